"""The arithmetic of chunks: integers in, hyper-rectangles out. No tensor, no collective, nothing of torch.

A rank's part of a global tensor is described in one of two ways, and both end in the same noun::

    Cut, Cut, ...        one per mesh dimension that shards   ──cut_chunks──▶     ShardChunks
    rectangle, [b, e)    a flat range of it (a *ragged* part) ──ragged_chunks──▶  ShardChunks

=============  ========================================================================================================
noun           meaning
=============  ========================================================================================================
Cut            one mesh dimension's split of one tensor dimension, and which of its parts this rank has
run            ``(start, length)``: consecutive indices of one tensor dimension. After cuts, a rank has a list of runs
Chunk          one hyper-rectangle of the global tensor, and where its elements lie in the local buffer
ShardChunks    all chunks of one rank: the whole of its part
=============  ========================================================================================================

Work and memory grow with the number of cuts and rectangles, never with rows. Results are cached: every state tensor of
a parameter, and every parameter of the same shape, shares one.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

Shape = tuple[int, ...]
Run = tuple[int, int]
Rectangle = tuple[Shape, Shape]  # offsets, sizes

# Ragged ranges are different for every parameter, rectangles are shared; an entry takes about a kilobyte.
_CACHED_ENTRIES = 16_384


class Cut(NamedTuple):
    """Part number ``part`` of the ``parts`` of ``tensor_dim``, split as ``torch.chunk`` does.

    With a ``split_factor`` above 1 the dimension is first split into that many blocks, each of them into ``parts``, and
    the rank has that part of every block: what ``_StridedShard`` means.
    """

    tensor_dim: int
    parts: int
    part: int
    split_factor: int = 1


class Chunk(NamedTuple):
    """One hyper-rectangle of the global tensor.

    ``offsets`` and ``sizes`` are in the global tensor; ``local_start`` and ``local_strides`` say, in elements, where
    it lies in this rank's contiguous buffer.
    """

    offsets: Shape
    sizes: Shape
    local_start: int
    local_strides: Shape

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return math.prod(self.sizes)


class ShardChunks(NamedTuple):
    """One rank's part of a tensor of ``global_shape``, in a contiguous buffer of ``local_shape``."""

    global_shape: Shape
    local_shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def local_numel(self) -> int:
        """Elements of this rank's part."""
        return math.prod(self.local_shape)

    def __deepcopy__(self, memo: object) -> "ShardChunks":
        return self  # integers only; torch's stager copies every attribute of every tensor


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides in elements, as torch has them: a dimension of size 0 counts as 1."""
    sizes = [max(size, 1) for size in shape[1:]] + [1]
    return tuple(itertools.accumulate(reversed(sizes[: len(shape)]), int.__mul__))[::-1]


# --- parts made by cuts ----------------------------------------------------------------------------------------------


@functools.lru_cache(_CACHED_ENTRIES)
def cut_chunks(global_shape: Shape, cuts: tuple[Cut, ...]) -> ShardChunks:
    """The rectangles that are left of ``global_shape`` after ``cuts``, applied in order.

    One, except where interleaved rows were cut so that they do not join. An empty part is one chunk without elements
    whose offset is the dimension's size, as torch has it: all empty parts are then the same chunk, and none of them
    collides with a real one at offset 0.
    """
    runs_by_dim: list[list[Run]] = [[(0, size)] if size else [] for size in global_shape]
    for cut in cuts:
        runs_by_dim[cut.tensor_dim] = _cut_runs(runs_by_dim[cut.tensor_dim], cut)
    local_shape = tuple(_length(runs) for runs in runs_by_dim)
    if 0 in local_shape:
        first = [runs[0][0] if runs else size for runs, size in zip(runs_by_dim, global_shape, strict=True)]
        empty = Chunk(tuple(first), local_shape, 0, contiguous_strides(local_shape))
        return ShardChunks(global_shape, local_shape, (empty,))
    return ShardChunks(global_shape, local_shape, tuple(_products(runs_by_dim, contiguous_strides(local_shape))))


def part_of(length: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of a part, as ``torch.chunk`` splits: equal parts, the last ones short or empty."""
    size = -(-length // parts)
    return min(size * part, length), min(size * (part + 1), length)


def _cut_runs(runs: list[Run], cut: Cut) -> list[Run]:
    length = _length(runs)
    kept: list[Run] = []
    for block in range(cut.split_factor):
        block_begin, block_end = part_of(length, cut.split_factor, block)
        begin, end = part_of(block_end - block_begin, cut.parts, cut.part)
        if begin < end:
            kept += _slice_runs(runs, block_begin + begin, block_begin + end)
    return _joined(kept)


def _slice_runs(runs: list[Run], begin: int, end: int) -> list[Run]:
    """Positions ``begin`` to ``end`` of the indices that ``runs`` list one after the other."""
    if len(runs) == 1:
        return [(runs[0][0] + begin, end - begin)]
    sliced = []
    position = 0
    for start, length in runs:
        first, last = max(begin - position, 0), min(end - position, length)
        if first < last:
            sliced.append((start + first, last - first))
        position += length
    return sliced


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _length(runs: list[Run]) -> int:
    return sum(length for _, length in runs)


def _products(runs_by_dim: list[list[Run]], strides: Shape) -> Iterator[Chunk]:
    """Every combination of one run per dimension, in the order of the local tensor."""
    for combination in itertools.product(*(_with_local_offsets(runs) for runs in runs_by_dim)):
        offsets = tuple(start for start, _, _ in combination)
        sizes = tuple(length for _, length, _ in combination)
        local_start = sum(local * stride for (_, _, local), stride in zip(combination, strides, strict=True))
        yield Chunk(offsets, sizes, local_start, strides)


def _with_local_offsets(runs: list[Run]) -> list[tuple[int, int, int]]:
    local_offsets = itertools.accumulate((length for _, length in runs), initial=0)
    return [(start, length, local) for (start, length), local in zip(runs, local_offsets, strict=False)]


# --- ragged parts ----------------------------------------------------------------------------------------------------


@functools.lru_cache(_CACHED_ENTRIES)
def ragged_chunks(global_shape: Shape, rectangle: Rectangle, begin: int, end: int) -> ShardChunks:
    """The row-major flat range ``[begin, end)`` of ``rectangle``, as the fewest rectangles that follow each other.

    At most ``2 * ndim - 1``, in order, each a consecutive stretch of the flat local buffer. (Rectangles that lie
    scattered in the buffer could in rare cases be one fewer; reading and writing them would be strided.) An empty range
    is one chunk without elements at the end of dimension 0, as an empty ``Shard(0)``.

    Raises:
        ValueError: the range does not lie within the rectangle.
    """
    offsets, sizes = rectangle
    if not 0 <= begin <= end <= math.prod(sizes):
        raise ValueError(
            f"a flat range [{begin}, {end}) does not lie within the {math.prod(sizes)} elements of a rectangle of "
            f"sizes {sizes}; flat ranges count elements of this rank's own rectangle, row by row"
        )
    if begin == end:
        return ShardChunks(global_shape, (0,), tuple(_empty_chunk(global_shape, rectangle)))
    chunks = []
    local_start = 0
    for within, chunk_sizes in _flat_rectangles(sizes, begin, end):
        shifted = tuple(map(int.__add__, offsets, within))
        chunks.append(Chunk(shifted, chunk_sizes, local_start, contiguous_strides(chunk_sizes)))
        local_start += math.prod(chunk_sizes)
    return ShardChunks(global_shape, (end - begin,), tuple(chunks))


def _flat_rectangles(sizes: Shape, begin: int, end: int) -> Iterator[Rectangle]:
    """A head in the first row, whole rows, and a tail in the last; head and tail are ranges of one dimension less."""
    if not sizes:
        yield (), ()
        return
    row_numel = math.prod(sizes[1:])
    first, skipped = divmod(begin, row_numel)
    last, kept = divmod(end, row_numel)
    if first == last:
        yield from _in_row(first, sizes, skipped, kept)
        return
    if skipped:
        yield from _in_row(first, sizes, skipped, row_numel)
        first += 1
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    if kept:
        yield from _in_row(last, sizes, 0, kept)


def _in_row(row: int, sizes: Shape, begin: int, end: int) -> Iterator[Rectangle]:
    for offsets, inner_sizes in _flat_rectangles(sizes[1:], begin, end):
        yield (row, *offsets), (1, *inner_sizes)


def _empty_chunk(global_shape: Shape, rectangle: Rectangle) -> Iterator[Chunk]:
    offsets, sizes = rectangle
    if sizes:  # a 0-dim tensor has no chunk without elements
        empty_sizes = (0, *sizes[1:])
        yield Chunk((global_shape[0], *offsets[1:]), empty_sizes, 0, contiguous_strides(empty_sizes))
