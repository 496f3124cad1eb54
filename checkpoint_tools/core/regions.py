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
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from .parts import Comb

Shape = tuple[int, ...]


class TensorRegion(NamedTuple):
    """A hyper-rectangle of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Count the elements."""
        return math.prod(self.sizes)


def whole_of(shape: Shape) -> TensorRegion:
    """Return all of a tensor as a region of it."""
    return TensorRegion((0,) * len(shape), shape)


class Placed(Protocol):
    """Anything that has a place in a tensor."""

    @property
    def offsets(self) -> Shape: ...  # noqa: D102

    @property
    def sizes(self) -> Shape: ...  # noqa: D102


def stretches(region: TensorRegion, max_numel: int) -> Iterator[TensorRegion]:
    """Divide a rectangle into stretches of at most ``max_numel`` elements, in the order of its memory."""
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
            yield TensorRegion(at, (*(1 for _ in outer), min(step, sizes[dim] - start), *sizes[dim + 1 :]))


def common(one: Placed, other: Placed) -> TensorRegion | None:
    """Return the rectangle that both have in common, or None."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = zip(offsets, one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    sizes = tuple(min(a + n, b + m) - start for start, a, n, b, m in ends)
    return TensorRegion(offsets, sizes) if all(size > 0 for size in sizes) else None


PlacedT = TypeVar("PlacedT", bound=Placed)


class Index(Generic[PlacedT]):
    """Rectangles to look up by what they have in common with another one: fast where dimension 0 is divided."""

    def __init__(self, placed: Iterable[PlacedT]) -> None:
        self._placed = sorted((each for each in placed if math.prod(each.sizes)), key=lambda each: each.offsets)
        self._starts = [(*each.offsets, 0)[0] for each in self._placed]
        ends = ((*each.offsets, 0)[0] + (*each.sizes, 1)[0] for each in self._placed)
        self._ends = list(itertools.accumulate(ends, max))

    def overlapping(self, region: Placed) -> list[PlacedT]:
        """List those that have elements in common with ``region``."""
        begin = (*region.offsets, 0)[0]
        first = bisect.bisect_right(self._ends, begin)
        last = bisect.bisect_left(self._starts, begin + (*region.sizes, 1)[0])
        return [each for each in self._placed[first:last] if common(each, region) is not None]


def joined(regions: Iterable[TensorRegion], dim: int) -> list[TensorRegion]:
    """Join rectangles that touch along ``dim`` and are otherwise alike."""

    def others(region: TensorRegion) -> tuple[tuple[int, int], ...]:
        both = zip(region.offsets, region.sizes, strict=True)
        return tuple(each for at, each in enumerate(both) if at != dim)

    found: list[TensorRegion] = []
    for region in sorted(regions, key=lambda each: (others(each), each.offsets[dim])):
        last = found[-1] if found else None
        if last is not None and others(last) == others(region) and _end(last, dim) == region.offsets[dim]:
            size = last.sizes[dim] + region.sizes[dim]
            found[-1] = TensorRegion(last.offsets, (*last.sizes[:dim], size, *last.sizes[dim + 1 :]))
        else:
            found.append(region)
    return sorted(found)


def _end(region: TensorRegion, dim: int) -> int:
    return region.offsets[dim] + region.sizes[dim]


def fused_regions(part: Placed, dim: int, comb: Comb) -> Iterator[TensorRegion]:
    """Yield a part's rectangle in the fused tensor: one rectangle for each block of the comb that it touches.

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


def _with_dim(part: Placed, dim: int, start: int, size: int, *, dropped: bool = False) -> TensorRegion:
    after = dim if dropped else dim + 1
    offsets = (*part.offsets[:dim], start, *part.offsets[after:])
    return TensorRegion(offsets, (*part.sizes[:dim], size, *part.sizes[after:]))
