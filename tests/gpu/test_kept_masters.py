"""Masters on a device: the same bits as an fp32 model, and device memory against a formula."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import OffloadPolicy, add_masters, offload_optimizer
from tests.cpu.test_kept_masters import EVERY_KIND, cases, check_remainders, of_bits
from tests.gpu.streams import MIB
from tests.gpu.test_parity import on_device
from tests.parity import Zoo
from tests.twins import make_twins


def has_kernel(case: Any) -> bool:
    return on_device(pytest.param(*case.values[:2]))


@pytest.mark.parametrize(("cls", "kwargs", "kind", "dtype"), [case for case in cases() if has_kernel(case)])
def test_same_bits(cls: type[optim.Optimizer], kwargs: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    twins = make_twins(Zoo, lambda params: cls(params, **kwargs), kind, dtype, device="cuda")
    twins.train(5)
    twins.assert_trained()


def test_remainders_of_every_upper_half() -> None:
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).flatten()
    check_remainders(of_bits(*bits.tolist()).cuda())


# Memory --------------------------------------------------------------------------------------------------------------

SHAPES = [(4096, 4096), (4096,), (8192, 2048), (1000, 4099), (32000, 1024), (1024, 3000)]
POLICY = OffloadPolicy(device_bytes=384 * MIB, bucket_bytes=64 * MIB)
# Beside the blocks, in bytes for each element of one bucket: what there is at once in the first step. Moments and
# master that are being created, and the gradient in fp32; for remainders also the master and its rounding. Later one
# kernel does all.
TEMPORARIES = {"fp32": 8 + 4 + 4, "remainder": 8 + 2 + 4 + 4 + 3}
BYTES_PER_ELEMENT = {"fp32": 12, "remainder": 10}


@pytest.mark.usefixtures("clean_device")
@EVERY_KIND
def test_device_peak_of_the_first_and_of_later_steps(kind: str, device: torch.device) -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in SHAPES)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer, before = optim.AdamW(model.parameters(), fused=True), torch.cuda.memory_allocated()
    add_masters(optimizer, kind)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    bucket_bytes = POLICY.bucket_bytes
    assert isinstance(bucket_bytes, int)
    first = TEMPORARIES[kind] * bucket_bytes / BYTES_PER_ELEMENT[kind] - bucket_bytes  # there is a block less
    for temporary_bytes in (first, 0, 0, 0):
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        # Blocks of the allocator are up to 1 MiB larger than what is asked for.
        limit = POLICY.device_bytes + temporary_bytes + 0.1 * bucket_bytes
        assert torch.cuda.max_memory_allocated() - before <= limit
    numel = sum(param.numel() for param in model.parameters())
    assert optimizer.offload_report().memory.host_state_bytes == BYTES_PER_ELEMENT[kind] * numel
