"""Rectangles: stretches of memory."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.core.regions import TensorRegion, stretches
from fsdp_offload.checkpoint.chunks import contiguous_strides

SIZES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def position_in(outer: TensorRegion, offsets: Sequence[int]) -> int:
    """Count the elements before the one at ``offsets`` in the row-major memory of ``outer``."""
    strides = contiguous_strides(outer.sizes)
    return sum((at - first) * step for at, first, step in zip(offsets, outer.offsets, strides, strict=True))


@given(sizes=SIZES, max_numel=st.integers(0, 40), shift=st.integers(0, 3))
def test_stretches_are_consecutive_and_small(sizes: tuple[int, ...], max_numel: int, shift: int) -> None:
    region = TensorRegion(tuple(shift for _ in sizes), sizes)
    at = 0
    for stretch in stretches(region, max_numel):
        assert position_in(region, stretch.offsets) == at
        assert stretch.numel <= max(max_numel, 1)
        last = tuple(start + size - 1 for start, size in zip(*stretch, strict=True))
        assert all(at < shift + size for at, size in zip(last, sizes, strict=True))
        assert position_in(region, last) == at + stretch.numel - 1
        at += stretch.numel
    assert at == region.numel


def test_stretches_are_few() -> None:
    assert len(list(stretches(TensorRegion((0, 0), (4, 6)), 12))) == 2
    assert len(list(stretches(TensorRegion((0, 0), (4, 6)), 4))) == 8
    assert len(list(stretches(TensorRegion((0, 0), (1, 10**9)), 10**8))) == 10
    assert list(stretches(TensorRegion((0, 7), (0, 3)), 5)) == [TensorRegion((0, 7), (0, 3))]
