"""Training habits that behave differently on a device: GradScaler with fused kernels, clipping, capture, accelerate."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_optimizer

POLICY = OffloadPolicy(device_bytes=2 << 20, bucket_bytes=1 << 18)


def make(device: torch.device, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 700), nn.GELU(), nn.Linear(700, 300), nn.LayerNorm(300), nn.Linear(300, 1))
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def assert_same(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
        state, twin = optimizers[0].state[one], optimizers[1].state[other]
        assert list(state) == list(twin)
        for name, value in state.items():
            assert torch.equal(value.cpu(), twin[name].cpu()), name
            assert value.dim() or value.device == twin[name].device, name


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {}, {"capturable": True}])
def test_grad_scaler_with_a_skipped_step_and_clipping(device, options):
    pairs = [make(device, **options) for _ in range(2)]
    offload_optimizer(pairs[1][1], model=pairs[1][0], policy=POLICY)
    scalers = [torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3) for _ in pairs]
    for step in range(12):
        batch = torch.randn(32, 64, device=device, generator=torch.Generator(device).manual_seed(step))
        for (model, optimizer), scaler in zip(pairs, scalers, strict=True):
            with torch.autocast("cuda", torch.float16):
                loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            if step in (0, 5):  # the very first step too: then no state exists
                model[0].weight.grad.view(-1)[3] = float("inf")
            if step % 3 == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same([model for model, _ in pairs], [optimizer for _, optimizer in pairs])


def test_capture_is_refused(device):
    model, optimizer = make(device, capturable=True)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.synchronize()
    captured = torch.zeros(1, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured += 1
        with pytest.raises(RuntimeError, match="CUDA graph"):
            optimizer.step()
    optimizer.step()  # still whole


def test_fully_shard_on_one_device_with_prefetch_and_low_precision(device, tmp_path):
    dist.init_process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        pairs = []
        for _ in range(2):
            model, _ = make(device)
            for layer in model:
                fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            fully_shard(model, mesh=mesh)
            pairs.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)))
        offload_optimizer(pairs[1][1], model=pairs[1][0], policy=POLICY)
        for step in range(10):
            batch = torch.randn(32, 64, device=device, generator=torch.Generator(device).manual_seed(step))
            losses = []
            for model, optimizer in pairs:
                loss = model(batch).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert torch.equal(*losses)
        for one, other in zip(*(model.parameters() for model, _ in pairs), strict=True):
            assert torch.equal(one._local_tensor, other._local_tensor)
            for name in ("exp_avg", "exp_avg_sq"):
                plain, twin = pairs[0][1].state[one][name], pairs[1][1].state[other][name]
                assert twin._local_tensor.is_pinned()
                assert twin.device_mesh == plain.device_mesh
                assert twin.placements == plain.placements
                assert torch.equal(plain._local_tensor.cpu(), twin._local_tensor)
    finally:
        dist.destroy_process_group()


def test_accelerates_wrapper_is_seen_through(device):
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = make(device)
    accelerator = accelerate.Accelerator()
    model, wrapped = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(wrapped, 1))
    assert offload_optimizer(wrapped, model=model, policy=POLICY) is wrapped
    assert isinstance(wrapped.optimizer, OffloadedOptimizer)
    twin_model, twin = make(device)
    twin_scheduler = torch.optim.lr_scheduler.StepLR(twin, 1)
    for step in range(4):
        batch = torch.randn(8, 64, device=device, generator=torch.Generator(device).manual_seed(step))
        for one, stepping, schedule, backward in (
            (model, wrapped, scheduler, accelerator.backward),
            (twin_model, twin, twin_scheduler, torch.Tensor.backward),
        ):
            backward(one(batch).square().mean())
            stepping.step()
            schedule.step()
            stepping.zero_grad()
    assert_same([twin_model, model], [twin, wrapped.optimizer])
