"""Bits of what differs, and sums that differ where anything does: also where bits of several words could cancel out."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp_offload.listeners import rows
from fsdp_offload.listeners.rows import ROW, Sums, differing, gather, positions, rows_of, sums

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def copied(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return gather(parts, torch.empty(sum(rows_of(part.numel()) for part in parts), ROW, dtype=dtype))


def summed(parts: list[Tensor], dtype: torch.dtype) -> list[Sums]:
    return [Sums(*one) for one in sums(copied(parts, dtype), [part.numel() for part in parts]).tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_and_sums_of_parts(dtype: torch.dtype) -> None:
    drawn = random.Random(0)
    torch.manual_seed(0)
    for _ in range(20):
        old = [torch.randn(drawn.choice([1, 5, 64, 65, 130, 1000])).to(dtype) for _ in range(4)]
        new = [part.clone() for part in old]
        for part in new:
            for _ in range(drawn.choice([0, 1, 7])):
                part[drawn.randrange(len(part))] += 1
        parts = differing(copied(old, dtype), copied(new, dtype)).split([8 * rows_of(len(part)) for part in old])
        for bits, one, other in zip(parts, old, new, strict=True):
            changed = (one != other).nonzero().squeeze(1)
            assert torch.equal(positions(bits), changed)
        assert [one == other for one, other in zip(summed(old, dtype), summed(new, dtype), strict=True)] == [
            torch.equal(one, other) for one, other in zip(old, new, strict=True)
        ]
        assert summed(old, dtype) == [summed([part], dtype)[0] for part in old]  # whatever stands beside it


def test_sums_of_equal_rows_in_other_places() -> None:
    """Also where their numbers have the same sum."""
    one, other = torch.randn(2, 64)
    for one_way, turned in (("xyyx", "yxxy"), ("abba", "baab"), ("xyxyyxyx", "yxyxxyxy")):
        old, new = (torch.cat([one if row in "xa" else other for row in each]) for each in (one_way, turned))
        assert summed([old], torch.float32) != summed([new], torch.float32)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "signs of every fourth": lambda x: x.index_put((torch.arange(3, len(x), 4),), -x[3::4]),
    "signs of two": lambda x: x.index_put((torch.tensor([3, 131]),), -x[[3, 131]]),
    "all signs": lambda x: -x,
    "rows": lambda x: x.view(-1, 64).flip(0).view(-1),
    "columns": lambda x: x.view(-1, 64).flip(1).view(-1),
    "turned": lambda x: x.roll(64),
    "one up and one down": lambda x: x.index_put((torch.tensor([0, 64]),), x[[64, 0]]),
    "all the same": torch.ones_like,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_sums_are_others(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for _ in range(300):
        old = torch.randn(256).bfloat16()
        assert summed([old], old.dtype) != summed([change(old)], old.dtype)


def compare_by_kernel(device: str) -> None:
    """Compare the kernel's bits and sums with those of the formulas."""
    from fsdp_offload.listeners.rows_kernel import launch

    drawn = random.Random(0)
    for own, used in itertools.product((torch.bfloat16, torch.float16, torch.float32), repeat=2):
        sizes = [drawn.choice([1, 63, 64, 65, 2048, 8192, 8193, 20000]) for _ in range(3)]
        parts = [torch.randn(size, device=device).to(own) for size in sizes]
        old = gather(parts, torch.empty(sum(map(rows_of, sizes)), ROW, dtype=used, device=device))
        for part in parts:
            part += (torch.rand_like(part) < 0.1).to(own)
        bits, totals = launch(old, parts, rows._multipliers(ROW * old.itemsize // 8, old.device), rows.OF_PLACES)
        new = gather(parts, torch.empty_like(old))
        assert torch.equal(bits, differing(old, new))
        assert torch.equal(totals, torch.stack([sums(old, sizes), sums(new, sizes)]))


def test_the_kernel_has_the_formulas() -> None:
    pytest.importorskip("triton")
    program = "from tests.unit.test_rows_of_weights import compare_by_kernel; compare_by_kernel('cpu')"
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
