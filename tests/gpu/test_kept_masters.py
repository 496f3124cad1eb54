"""Masters on a device: the same bits as an fp32 model, and device memory against a formula."""

import gc
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import OffloadPolicy, add_masters, offload_optimizer
from tests.cpu.test_kept_masters import EVERY_FORMAT, EVERY_KIND, cases, check_remainders, load_own, of_bits
from tests.gpu.test_parity import ROOMY, on_device
from tests.parity import SMALL, Net, Run, Zoo, batch
from tests.twins import make_twins

MIB = 1 << 20


def has_kernel(case: Any) -> bool:
    return on_device(pytest.param(*case.values[:2]))


@pytest.mark.parametrize(("cls", "kwargs", "kind", "dtype"), [case for case in cases() if has_kernel(case)])
def test_same_bits(cls: type[optim.Optimizer], kwargs: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    twins = make_twins(Zoo, lambda params: cls(params, **kwargs), kind, dtype, device="cuda")
    twins.train(5)
    twins.assert_trained()


@EVERY_FORMAT
@pytest.mark.parametrize("kwargs", [{"fused": True}, {"foreach": True}, {}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("policy", [ROOMY, OffloadPolicy(bucket_bytes=2048, device_bytes=30_000)])
def test_a_network_with_clipping_and_parameters_that_are_used_later(
    kwargs: dict[str, Any], kind: str, dtype: torch.dtype, policy: OffloadPolicy
) -> None:
    def accumulate_and_clip(run: Run, step: int) -> None:
        for micro in range(2):
            (run.model(batch(2 * step + micro, run.device, run.dtype)) / 2).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        if step < 2:
            run.params["up.weight"].grad = None

    twins = make_twins(
        Net, lambda params: optim.AdamW(params, lr=0.02, **kwargs), kind, dtype, device="cuda", policy=policy
    )
    twins.train(6, accumulate_and_clip)
    twins.assert_trained("unused.weight", "unused.bias")
    twins.each(load_own)
    twins.assert_same()
    twins.train(3, accumulate_and_clip)


@EVERY_KIND
def test_many_steps_in_a_row(kind: str) -> None:
    """Nobody looks in between, so loads, updates and stores of following steps are all queued."""
    twins = make_twins(Zoo, lambda params: optim.AdamW(params, lr=0.02, fused=True), kind, device="cuda", policy=SMALL)
    for _ in range(20):
        twins.update()
    twins.assert_same()
    twins.assert_trained()


def test_remainders_of_every_upper_half() -> None:
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).flatten()
    check_remainders(of_bits(*bits.tolist()).cuda())


# Memory --------------------------------------------------------------------------------------------------------------

SHAPES = [(4096, 4096), (4096,), (8192, 2048), (1000, 4099), (32000, 1024), (1024, 3000)]
DEVICE_BYTES, BUCKET_BYTES = 384 * MIB, 64 * MIB
# Beside the blocks, in bytes for each element of one bucket: what there is at once when there is most.
TEMPORARIES = {
    # First step: moments and master that are being created 8 + 4, gradient in fp32 4. Later one kernel does all.
    "fp32": (8 + 4 + 4, 0),
    # First step: moments and remainder 8 + 2, gradient 4, master 4, and its rounding 3.
    "remainder": (8 + 2 + 4 + 4 + 3, 0),
}
BYTES_PER_ELEMENT = {"fp32": 12, "remainder": 10}


@EVERY_KIND
def test_device_peak_of_the_first_and_of_later_steps(kind: str, device: torch.device) -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in SHAPES)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    add_masters(optimizer, kind)
    policy = OffloadPolicy(device_bytes=DEVICE_BYTES, bucket_bytes=BUCKET_BYTES)
    offload_optimizer(optimizer, model=model, policy=policy)
    bucket_numel = BUCKET_BYTES / BYTES_PER_ELEMENT[kind]
    first = TEMPORARIES[kind][0] * bucket_numel - BUCKET_BYTES  # there is a block less
    for temporary_bytes in (first, *[TEMPORARIES[kind][1] * bucket_numel] * 3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        # Blocks of the allocator are up to 1 MiB larger than what is asked for.
        limit = DEVICE_BYTES + temporary_bytes + 0.1 * BUCKET_BYTES
        assert torch.cuda.max_memory_allocated() - before <= limit
    numel = sum(param.numel() for param in model.parameters())
    assert optimizer.offload_report().memory.host_state_bytes == BYTES_PER_ELEMENT[kind] * numel


@EVERY_KIND
def test_attaching_late_frees_the_state(kind: str, device: torch.device) -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in SHAPES)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    add_masters(optimizer, kind)
    policy = OffloadPolicy(device_bytes=DEVICE_BYTES, bucket_bytes=BUCKET_BYTES)
    offload_optimizer(optimizer, model=model, policy=policy)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < DEVICE_BYTES + 2 * MIB  # counters only
    optimizer.step()
