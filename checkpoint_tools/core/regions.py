"""Rectangles of tensors, and where the parts of fused tensors lie in them and in shards. Integers in, integers out.

In each layout, a part of a fused projection is a *comb* along one dimension: blocks of equal length, equally spaced::

    concatenated   gggguuuu    gate: 1 block of 4 at 0           up: 1 block of 4 at 4
    grouped        gguugguu    gate: 2 blocks of 2, every 4      up: the same, from 2 on
    interleaved    gugugugu    gate: 4 blocks of 1, every 2      up: the same, from 1 on
    stacked        gu          gate: index 0                     up: index 1; the parts do not have the dimension

::

    sizes, layout ──combs_of──▶ Comb of each part ──▶ part_chunks(chunks of a shard, Comb) ──▶ chunks of the part,
                                                                                             in the same local memory

A *stretch* is a smaller rectangle whose elements are contiguous in the row-major memory of the larger rectangle::

    rectangle 4 × 6      stretches of up to 12      of up to 4
    ┌────────────┐       ┌────────────┐ 1           ┌───────┬────┐
    │            │       ├────────────┤             ├───────┼────┤
    │            │       │            │ 2           ├───────┼────┤
    └────────────┘       └────────────┘             └───────┴────┘
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from fsdp_offload.checkpoint import Chunk, ShardChunks
from fsdp_offload.checkpoint.chunks import contiguous_strides

Shape = tuple[int, ...]
Layout = Literal["concatenated", "interleaved", "grouped", "stacked"]


class Comb(NamedTuple):
    """The indices of one part along the fused dimension: ``blocks`` of ``length``, ``distance`` apart.

    ``is_dropped``: the part is one index of the fused dimension, and lacks this dimension itself.
    """

    start: int
    length: int
    distance: int
    blocks: int
    is_dropped: bool = False

    def part_shape(self, fused_shape: Sequence[int], dim: int) -> Shape:
        """Return the part's shape for a fused tensor of that shape; ``dim`` is not negative."""
        return replaced(fused_shape, dim, *(() if self.is_dropped else (self.length * self.blocks,)))


def replaced(values: Sequence[int], dim: int, *new: int) -> Shape:
    """Replace the value of dimension ``dim`` in offsets, sizes or strides by ``new`` values, or by none."""
    return (*values[:dim], *new, *values[dim + 1 :])


def combs_of(sizes: Sequence[int], layout: Layout, groups: int = 1) -> tuple[Comb, ...]:
    """Return the comb of each part. ``sizes``: of each part over all groups; every group has an equal share of it."""
    if layout == "interleaved":
        if len(set(sizes)) > 1:
            raise ValueError(f"interleaved parts have equal sizes, got {list(sizes)}")
        return tuple(Comb(number, 1, len(sizes), size) for number, size in enumerate(sizes))
    if layout == "stacked":
        return tuple(Comb(number, 1, len(sizes), 1, is_dropped=True) for number in range(len(sizes)))
    count = groups if layout == "grouped" else 1
    if count < 1 or any(size % count for size in sizes):
        raise ValueError(f"part sizes {list(sizes)} do not divide into {count} groups")
    starts = itertools.accumulate((size // count for size in sizes), initial=0)
    distance = sum(sizes) // count
    return tuple(Comb(start, size // count, distance, count) for start, size in zip(starts, sizes, strict=False))


def part_chunks(fused: ShardChunks, dim: int, comb: Comb) -> ShardChunks:
    """List a part's rectangles in this rank's memory; if it has none there, one empty rectangle."""
    shape = comb.part_shape(fused.global_shape, dim)
    chunks = tuple(piece for chunk in fused.chunks for piece in _cut(chunk, dim, comb) if piece.numel)
    if comb.is_dropped:  # the part lacks the fused dimension
        chunks = tuple(
            Chunk(replaced(at, dim), replaced(sizes, dim), start, replaced(strides, dim))
            for at, sizes, start, strides in chunks
        )
    if not chunks and shape:  # a part without dimensions cannot have an empty chunk
        nothing = nothing_of(shape)
        chunks = (Chunk(*nothing, 0, contiguous_strides(nothing.sizes)),)
    return ShardChunks(shape, fused.local_shape, chunks)


def span_of(part: ShardChunks) -> tuple[int, ShardChunks]:
    """Return the index of the part's first element in flat local memory, and its chunks relative to this index."""
    chunks = [chunk for chunk in part.chunks if chunk.numel]
    if not chunks:
        return 0, ShardChunks(part.global_shape, (0,), part.chunks)
    begin = min(chunk.local_start for chunk in chunks)
    lasts = (
        start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        for _, sizes, start, strides in chunks
    )
    moved = tuple(chunk._replace(local_start=chunk.local_start - begin) for chunk in chunks)
    return begin, ShardChunks(part.global_shape, (max(lasts) + 1 - begin,), moved)


def _cut(chunk: Chunk, dim: int, comb: Comb) -> Iterator[Chunk]:
    """Cut a rectangle to the part's elements, in the part's own coordinates."""
    begin, end = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
    if comb.length == 1:  # one strided rectangle instead of many thin ones
        first, last = (_blocks_before(comb, at) for at in (begin, end))
        if first < last:
            fused_at = comb.start + first * comb.distance
            yield _piece(chunk, dim, first, last - first, fused_at - begin, comb.distance)
        return
    for block in range(_blocks_before(comb, begin - comb.length + 1), _blocks_before(comb, end)):
        block_at = comb.start + block * comb.distance
        lower, upper = max(begin, block_at), min(end, block_at + comb.length)
        if lower < upper:
            yield _piece(chunk, dim, block * comb.length + lower - block_at, upper - lower, lower - begin, 1)


def _blocks_before(comb: Comb, index: int) -> int:
    """Count the comb's blocks that begin before ``index``."""
    return min(max(-(-(index - comb.start) // comb.distance), 0), comb.blocks) if comb.distance else 0


def _piece(chunk: Chunk, dim: int, part_at: int, size: int, local_at: int, step: int) -> Chunk:
    offsets, sizes, start, strides = chunk
    start += local_at * strides[dim]
    strides = replaced(strides, dim, strides[dim] * step)
    return Chunk(replaced(offsets, dim, part_at), replaced(sizes, dim, size), start, strides)


def nothing_of(shape: Shape) -> "TensorRegion":
    """Return the empty rectangle at the end of dimension 0, where torch puts every empty shard."""
    return TensorRegion((shape[0], *(0 for _ in shape[1:])), (0, *shape[1:]))


class TensorRegion(NamedTuple):
    """A hyper-rectangle of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Count the elements."""
        return math.prod(self.sizes)


def whole_of(shape: Shape) -> TensorRegion:
    """Return the region of a whole tensor."""
    return TensorRegion((0,) * len(shape), shape)


def stretches(region: TensorRegion, max_numel: int) -> Iterator[TensorRegion]:
    """Divide a rectangle into stretches of at most ``max_numel`` elements, in row-major order."""
    offsets, sizes = region
    if region.numel <= max(max_numel, 1):
        yield region
        return
    # The first dimension with several indices per stretch; dimensions before it are taken one index at a time.
    inner = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    dim = next(dim for dim, numel in enumerate(inner) if numel <= max_numel or dim == len(sizes) - 1)
    step = max(max_numel // inner[dim], 1)
    for outer in itertools.product(*(range(size) for size in sizes[:dim])):
        for start in range(0, sizes[dim], step):
            at = (*map(int.__add__, offsets, outer), offsets[dim] + start, *offsets[dim + 1 :])
            yield TensorRegion(at, (*(1 for _ in outer), min(step, sizes[dim] - start), *sizes[dim + 1 :]))


def common(one: TensorRegion, other: TensorRegion) -> TensorRegion | None:
    """Return the intersection of two rectangles, or None."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = zip(offsets, one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    sizes = tuple(min(a + n, b + m) - start for start, a, n, b, m in ends)
    return TensorRegion(offsets, sizes) if all(size > 0 for size in sizes) else None
