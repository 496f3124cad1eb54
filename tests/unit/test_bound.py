"""What an iteration takes at least: the formula of each policy."""

import pytest

from examples.benchmarks.bound import Times, bound
from fsdp_offload import OffloadPolicy

# Powers of two, so that a term that is missing, or counted twice, shows, and sums are exact.
TIMES = Times(forward_ms=64, backward_ms=128, update_ms=2, clip_ms=1, load_ms=512, store_ms=256, two_way_ms=1024)


@pytest.mark.parametrize(
    ("overlap", "offloaded", "staged", "formula", "ms"),
    [
        (None, 1.0, 1.0, "F + B + clip + U", 64 + 128 + 1 + 2),
        ("step", 1.0, 0.125, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 896),
        ("step", 1.0, 0.25, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 768),
        ("step", 0.0, 0.0, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 2),
        ("forward", 1.0, 0.0, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 1024),
        ("forward", 1.0, 0.5, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 768),  # the backward hides a quarter of L
        ("forward", 1 / 1024, 0.0, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 64 + 2),
        ("iteration", 1.0, 1.0, "max(F + B + U, T)", 1024),
        ("iteration", 0.125, 0.0, "max(F + B + U, T)", 64 + 128 + 2),
        ("iteration", 0.125, 0.0, "max(F + B + clip + U, T)", 64 + 128 + 1 + 2),
    ],
)
def test_the_formula_of_a_policy(overlap: str | None, offloaded: float, staged: float, formula: str, ms: float) -> None:
    policy = None if overlap is None else OffloadPolicy(overlap=overlap)
    clips = "F + B + clip + U" in formula and overlap == "iteration"  # where updates may be taken back
    assert bound(policy, TIMES, offloaded=offloaded, staged=staged, clips=clips) == (formula, ms)
