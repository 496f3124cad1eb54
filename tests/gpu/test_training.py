"""Training habits that behave differently on a device: GradScaler with fused kernels, clipping, capture."""

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy, offload_optimizer

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
