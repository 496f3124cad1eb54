"""The Triton kernel of :mod:`rows`, which has the formulas. Imported on use: Triton imports slowly."""
# mypy: ignore-errors
# Triton gives annotations and names its own meaning.

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 32


def launch(both: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the rows ``both[0]`` and ``both[1]``, of elements of 2 or 4 bytes, on the current stream.

    Returns the bits of :func:`rows.differing`, and the hash of each row, those of ``both[0]`` first.
    """
    _, rows, numel = both.shape
    elements = both.view(torch.int16 if both.itemsize == 2 else torch.int32)
    bits = torch.empty(rows * numel // 8, dtype=torch.uint8, device=both.device)
    hashes = torch.empty(2 * rows, dtype=torch.int64, device=both.device)
    words, width = both.view(torch.int64), multipliers.shape[1]
    _compare[(triton.cdiv(rows, _BLOCK),)](
        elements, words, multipliers, bits, hashes, rows, numel=numel, width=width, block=_BLOCK
    )
    return bits, hashes


@triton.jit
def _fold(word):
    return word ^ ((word >> 32) & 0xFFFFFFFF)


@triton.jit
def _compare(
    elements,
    words,
    multipliers,
    bits,
    hashes,
    rows,
    numel: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside, column = (row < rows)[:, None], tl.arange(0, width)
    first, second = tl.load(multipliers + column)[None, :], tl.load(multipliers + width + column)[None, :]
    for side in tl.static_range(2):
        at = (side * rows + row)[:, None] * width + column[None, :]
        mixed = _fold(_fold(tl.load(words + at, mask=inside, other=0) * first) * second)
        tl.store(hashes + side * rows + row, tl.sum(mixed, 1), mask=row < rows)
    at = row[:, None] * numel + tl.arange(0, numel)[None, :]
    old, new = tl.load(elements + at, mask=inside, other=0), tl.load(elements + rows * numel + at, mask=inside, other=0)
    eights = tl.reshape((old != new).to(tl.int32), [block, numel // 8, 8])
    packed = tl.sum(eights << tl.arange(0, 8)[None, None, :], 2)
    at = row[:, None] * (numel // 8) + tl.arange(0, numel // 8)[None, :]
    tl.store(bits + at, packed.to(tl.uint8), mask=inside)
