"""Which parameters are the host's: arithmetic on sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.core.packing import choose_host_share

SIZES = st.lists(st.integers(0, 10_000), max_size=30)
FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize(
    ("sizes", "fraction", "chosen"),
    [
        *(([10] * 4, fraction, chosen) for fraction, chosen in ((0.5, [2, 3]), (0.0, []), (1.0, [0, 1, 2, 3]))),
        ([0, 10, 0], 1.0, [1]),  # without state there is nothing to update
        ([10, 10, 50], 0.3, [0, 1]),  # what is too large is passed over
    ],
)
def test_taken_from_the_end(sizes: list[int], fraction: float, chosen: list[int]) -> None:
    assert [at for at, on_host in enumerate(choose_host_share(sizes, fraction)) if on_host] == chosen


@given(sizes=SIZES, fraction=FRACTIONS)
def test_as_near_as_one_parameter_allows(sizes: list[int], fraction: float) -> None:
    chosen = choose_host_share(sizes, fraction)
    share = sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host)
    left_out = [size for size, on_host in zip(sizes, chosen, strict=True) if size and not on_host]
    wanted = round(fraction * sum(sizes))
    assert share - wanted <= max(sizes, default=0) / 2
    assert not left_out or wanted - share <= min(left_out) / 2
    assert chosen == choose_host_share(list(sizes), fraction)
