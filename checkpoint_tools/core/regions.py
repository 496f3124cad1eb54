"""Rectangles of a tensor: divided into stretches, cut with each other, joined, and taken from a part to the whole.

Integers in, integers out, as in :mod:`checkpoint_tools.core.parts`. A *stretch* of a rectangle is a smaller one whose
elements follow each other in the row-major memory of the larger one::

    rectangle 4 × 6      stretches of up to 12      of up to 4
    ┌────────────┐       ┌────────────┐ 1           ┌───────┬────┐
    │            │       ├────────────┤             ├───────┼────┤
    │            │       │            │ 2           ├───────┼────┤
    └────────────┘       └────────────┘             └───────┴────┘
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from fsdp_offload.checkpoint.rectangles import contiguous_strides

from .parts import Comb

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A hyper-rectangle of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.sizes)


class Placed(Protocol):
    """Whatever has a place in a tensor."""

    @property
    def offsets(self) -> Shape: ...  # noqa: D102

    @property
    def sizes(self) -> Shape: ...  # noqa: D102


def stretches(region: Region, max_numel: int) -> Iterator[Region]:
    """A rectangle as stretches of at most so many elements, in the order of its memory."""
    offsets, sizes = region
    if region.numel <= max(max_numel, 1):
        yield region
        return
    # The first dimension of which several indices may fit into one stretch; all before it are taken one by one.
    inner = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    dim = next(dim for dim, numel in enumerate(inner) if numel <= max_numel or dim == len(sizes) - 1)
    step = max(max_numel // inner[dim], 1)
    for outer in itertools.product(*(range(size) for size in sizes[:dim])):
        for start in range(0, sizes[dim], step):
            at = (*map(int.__add__, offsets, outer), offsets[dim] + start, *offsets[dim + 1 :])
            yield Region(at, (*(1 for _ in outer), min(step, sizes[dim] - start), *sizes[dim + 1 :]))


def position_in(outer: Placed, offsets: Sequence[int]) -> int:
    """How many elements come before the one at ``offsets``, in the row-major memory of ``outer``."""
    strides = contiguous_strides(outer.sizes)
    return sum((at - first) * step for at, first, step in zip(offsets, outer.offsets, strides, strict=True))


def contains(outer: Placed, inner: Placed) -> bool:
    """Whether all of ``inner`` is in ``outer``."""
    ends = zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    return all(first <= at and at + size <= first + whole for first, whole, at, size in ends)


def common(one: Placed, other: Placed) -> Region | None:
    """The elements of both, if there are any."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = zip(offsets, one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    sizes = tuple(min(a + n, b + m) - start for start, a, n, b, m in ends)
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


PlacedT = TypeVar("PlacedT", bound=Placed)


class Index(Generic[PlacedT]):
    """Rectangles to look up by what they have in common with another one: fast where dimension 0 is divided."""

    def __init__(self, placed: Iterable[PlacedT]) -> None:
        self._placed = sorted((each for each in placed if math.prod(each.sizes)), key=lambda each: each.offsets)
        self._starts = [(*each.offsets, 0)[0] for each in self._placed]
        ends = ((*each.offsets, 0)[0] + (*each.sizes, 1)[0] for each in self._placed)
        self._ends = list(itertools.accumulate(ends, max))

    def overlapping(self, region: Placed) -> list[PlacedT]:
        """Those that have elements in common with ``region``."""
        begin = (*region.offsets, 0)[0]
        first = bisect.bisect_right(self._ends, begin)
        last = bisect.bisect_left(self._starts, begin + (*region.sizes, 1)[0])
        return [each for each in self._placed[first:last] if common(each, region) is not None]


def joined(regions: Iterable[Region], dim: int) -> list[Region]:
    """The same elements in fewer rectangles: those that touch along ``dim`` and are otherwise alike are one."""

    def others(region: Region) -> tuple[tuple[int, int], ...]:
        both = zip(region.offsets, region.sizes, strict=True)
        return tuple(each for at, each in enumerate(both) if at != dim)

    found: list[Region] = []
    for region in sorted(regions, key=lambda each: (others(each), each.offsets[dim])):
        last = found[-1] if found else None
        if last is not None and others(last) == others(region) and _end(last, dim) == region.offsets[dim]:
            size = last.sizes[dim] + region.sizes[dim]
            found[-1] = Region(last.offsets, (*last.sizes[:dim], size, *last.sizes[dim + 1 :]))
        else:
            found.append(region)
    return sorted(found)


def _end(region: Region, dim: int) -> int:
    return region.offsets[dim] + region.sizes[dim]


def fused_regions(part: Placed, dim: int, comb: Comb) -> Iterator[Region]:
    """Where a rectangle of a part lies in the fused tensor: one rectangle for each block of the comb that it touches.

    The inverse of :func:`checkpoint_tools.core.parts.part_chunks`.
    """
    if not math.prod(part.sizes):
        return
    if comb.is_dropped:
        yield _with_dim(part, dim, comb.start, 1, dropped=True)
        return
    begin, end = part.offsets[dim], part.offsets[dim] + part.sizes[dim]
    for block in range(begin // comb.length, -(-end // comb.length)):
        lower, upper = max(begin, block * comb.length), min(end, (block + 1) * comb.length)
        start = comb.start + block * comb.distance + lower - block * comb.length
        yield _with_dim(part, dim, start, upper - lower)


def _with_dim(part: Placed, dim: int, start: int, size: int, *, dropped: bool = False) -> Region:
    after = dim if dropped else dim + 1
    return Region((*part.offsets[:dim], start, *part.offsets[after:]), (*part.sizes[:dim], size, *part.sizes[after:]))
