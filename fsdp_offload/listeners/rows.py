"""Rows of 64 elements: copy weights in their dtype of use, compare copies, and sum them to detect other writers.

State is cut at multiples of 64 elements, so the rows of a range are rows of its shard, and a row of bits is 8 bytes.
Hashes and sums are integer arithmetic modulo 2**64, which is the same on every device.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..optimizers.masters import kernel_in

ROW = 64
PIECE_NUMEL = 1 << 24
"""The most elements that are compared at once; without the kernel, a bf16 element takes 12 bytes on top of the copy."""

_KERNEL, _OF_KERNEL = f"{__package__}.rows_kernel", (torch.float32, torch.bfloat16, torch.float16)
_PACKS = 0x0102040810204080
"""Factor that packs eight bytes, each 0 or 1, into the bits of the product's highest byte, the first byte lowest."""

OF_PLACES = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D  # factors of a row's number, and of that mixed with its hash


class Sums(NamedTuple):
    """Sums over the rows of a piece: their hashes, and the hashes mixed with the row's number."""

    rows: int
    placed: int


def rows_of(numel: int) -> int:
    """Count the rows that ``numel`` elements fill, the last one perhaps in part."""
    return -(-numel // ROW)


@torch.no_grad()
def gather(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Copy flat ``parts``, none of them empty, into ``rows``; the last row of each is filled with zeros."""
    flat, end, targets = rows.view(-1), 0, []
    for part in parts:
        begin, numel = end, part.numel()
        end += rows_of(numel) * ROW
        targets.append(flat[begin : begin + numel])
        if numel % ROW:
            flat[begin + numel : end].zero_()
    torch._foreach_copy_(targets, list(parts))
    return rows


@functools.cache
def _multipliers(words: int, device: torch.device) -> Tensor:
    drawn = random.Random(0)
    numbers = [[drawn.getrandbits(63) | 1 for _ in range(words)] for _ in range(2)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)


def _fold(words: Tensor) -> None:
    """Mix the upper half of each word into the lower one, in one pass over memory."""
    lower, upper = words.view(torch.int32).view(*words.shape, 2).unbind(-1)  # little-endian, as all of torch's devices
    lower ^= upper


def _hashes(rows: Tensor) -> Tensor:
    """Hash each row, which is the last dimension; in order."""
    # Sums of words times multipliers would not do: two changes of highest bits, the signs of elements, would cancel.
    first, second = _multipliers(rows.shape[-1] * rows.itemsize // 8, rows.device)
    mixed = rows.view(torch.int64) * first
    _fold(mixed)
    mixed *= second
    _fold(mixed)
    of_row: Tensor = mixed.sum(-1)
    return of_row.view(-1)


def sums(rows: Tensor, numels: Sequence[int]) -> Tensor:
    """Return the :class:`Sums` (dimension 1) of the rows of each part, of ``numels`` elements: int64 ``[part, 2]``."""
    of_row = _hashes(rows)
    # Hashes times row numbers would not do: several sets of places of equal rows have the same sum of row numbers.
    placed = torch.cat([torch.arange(rows_of(numel), device=of_row.device) for numel in numels])
    placed *= OF_PLACES[0]
    placed += of_row
    _fold(placed)
    placed *= OF_PLACES[1]
    _fold(placed)
    ends = [*itertools.accumulate(map(rows_of, numels))]
    # One scan for each: on a GPU, a scan over a matrix adds up each column in one thread, in 50 ms.
    totals = [one.cumsum(0) for one in (of_row, placed)]
    so_far = torch.stack([total[end - 1] for end in ends for total in totals]).view(-1, 2)
    return so_far.diff(dim=0, prepend=so_far.new_zeros(1, 2))


def compare(old: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compare ``old`` rows, which :func:`gather` has made of flat ``parts``, with those of ``parts`` as they are now.

    Returns the bits of :func:`differing`, and :class:`Sums` (last dimension): int64 ``[before and after, part, 2]``.
    """
    is_float = all(part.dtype in _OF_KERNEL for part in (old, *parts))
    launch = kernel_in(_KERNEL) if old.device.type == "cuda" and is_float else None
    if launch is not None:  # the kernel reads memory once, the formulas below ten times
        found: tuple[Tensor, Tensor] = launch(old, parts, _multipliers(ROW * old.itemsize // 8, old.device), OF_PLACES)
        return found
    new, numels = gather(parts, torch.empty_like(old)), [part.numel() for part in parts]
    return differing(old, new), torch.stack([sums(old, numels), sums(new, numels)])


def differing(old: Tensor, new: Tensor) -> Tensor:
    """Return a bit for each element, 1 where ``old`` and ``new`` have different bits: flat bytes, 8 for each row."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(old.itemsize, 8)]
    differ = old.view(kind) != new.view(kind)
    if old.itemsize > 8:  # complex128 has two words
        differ = differ.view(-1, ROW, old.itemsize // 8).any(-1)
    words = differ.view(torch.int64)
    words = words * _PACKS
    words >>= 56
    return words.to(torch.uint8).view(-1)


def merge(bits: Tensor, others: Tensor) -> None:
    """Set those ``bits`` that are set in ``others``, both on the host, by the calling thread alone."""
    # Larger operations are split between torch's threads, which then spin until the next one: the bits of 3.2 G
    # weights kept 18 of 32 cores busy.
    parts = zip(bits.view(torch.int64).split(1 << 14), others.view(torch.int64).split(1 << 14), strict=True)
    for one, other in parts:
        one |= other


def positions(bits: Tensor) -> Tensor:
    """Return the numbers of the bits that are 1, in order."""
    at = bits.nonzero().squeeze(1)
    each = (bits[at].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    byte, bit = each.nonzero(as_tuple=True)
    return at[byte] * 8 + bit
