"""The Triton kernel of :mod:`rows`, which has the formulas. Imported on use: Triton imports slowly."""
# mypy: ignore-errors
# Triton gives annotations and names its own meaning.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _TURNS = 32, 4
"""Rows that a program reads at once, and the number of such reads before it adds its sums to the common ones."""


def launch(
    old: Tensor, parts: Sequence[Tensor], multipliers: Tensor, of_places: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Compare ``old`` rows, of elements of 2 or 4 bytes, with flat float ``parts``, on the current stream.

    It reads ``parts`` once, in their own dtype. Returns what :func:`rows.compare` does.
    """
    (rows, numel), itemsize, device = old.shape, old.itemsize, old.device
    bits = torch.empty(rows * numel // 8, dtype=torch.uint8, device=device)
    sums = torch.zeros(2, len(parts), 2, dtype=torch.int64, device=device)
    begin = 0
    for number, part in enumerate(parts):
        count = triton.cdiv(part.numel(), numel)
        _compare[(triton.cdiv(count, _ROWS * _TURNS),)](
            part,
            old[begin:],
            multipliers,
            bits[begin * numel // 8 :],
            sums[:, number],
            part.numel(),
            count,
            ragged=part.numel() % numel != 0,
            apart=2 * len(parts),
            numel=numel,
            bits_each=8 * itemsize,
            place=of_places[0],
            scatter=of_places[1],
            block=_ROWS,
            turns=_TURNS,
        )
        begin += count
    return bits, sums


@triton.jit
def _fold(word):
    return word ^ ((word >> 32) & 0xFFFFFFFF)


@triton.jit
def _hashes(elements, multipliers, block: tl.constexpr, numel: tl.constexpr, bits_each: tl.constexpr):
    each: tl.constexpr = 64 // bits_each
    width: tl.constexpr = numel // each
    parts = tl.reshape(elements.to(tl.int64) & ((1 << bits_each) - 1), [block, width, each])
    words = tl.sum(parts << (tl.arange(0, each) * bits_each)[None, None, :], 2)
    column = tl.arange(0, width)
    first, second = tl.load(multipliers + column)[None, :], tl.load(multipliers + width + column)[None, :]
    return tl.sum(_fold(_fold(words * first) * second), 1)


@triton.jit(do_not_specialize=["length", "count"])
def _compare(
    part,
    old,
    multipliers,
    bits,
    sums,
    length,
    count,
    ragged: tl.constexpr,
    apart: tl.constexpr,
    numel: tl.constexpr,
    bits_each: tl.constexpr,
    place: tl.constexpr,
    scatter: tl.constexpr,
    block: tl.constexpr,
    turns: tl.constexpr,
):
    kind: tl.constexpr = tl.int16 if bits_each == 16 else tl.int32
    old_hashes = tl.zeros([block], tl.int64)
    new_hashes, old_placed, new_placed = old_hashes, old_hashes, old_hashes
    for turn in tl.static_range(turns):
        row = (tl.program_id(0).to(tl.int64) * turns + turn) * block + tl.arange(0, block)
        here = row < count
        at = row[:, None] * numel + tl.arange(0, numel)[None, :]
        before = tl.load(old + at, mask=here[:, None], other=0.0)
        if ragged:
            after = tl.load(part + at, mask=at < length, other=0.0)
        else:  # several elements at once
            after = tl.load(part + at, mask=here[:, None], other=0.0)
        if before.dtype == tl.bfloat16 and after.dtype != tl.bfloat16:  # Triton's interpreter does not round to nearest
            word = after.to(tl.float32).to(tl.uint32, bitcast=True)
            after = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int16)
        else:
            after = after.to(before.dtype).to(kind, bitcast=True)
        before = before.to(kind, bitcast=True)
        eights = tl.reshape((before != after).to(tl.int32), [block, numel // 8, 8])
        packed = tl.sum(eights << tl.arange(0, 8)[None, None, :], 2)
        at = row[:, None] * (numel // 8) + tl.arange(0, numel // 8)[None, :]
        tl.store(bits + at, packed.to(tl.uint8), mask=here[:, None])
        one = _hashes(before, multipliers, block, numel, bits_each)
        other = _hashes(after, multipliers, block, numel, bits_each)
        old_hashes += one  # rows behind the last one are zeros, with hashes of 0
        new_hashes += other
        old_placed += tl.where(here, _fold(_fold(row * place + one) * scatter), 0)
        new_placed += tl.where(here, _fold(_fold(row * place + other) * scatter), 0)
    tl.atomic_add(sums, tl.sum(old_hashes), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(old_placed), sem="relaxed")
    tl.atomic_add(sums + apart, tl.sum(new_hashes), sem="relaxed")
    tl.atomic_add(sums + apart + 1, tl.sum(new_placed), sem="relaxed")
