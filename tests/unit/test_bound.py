"""What an iteration takes at least: the formula of each policy, from parts given or measured."""

from typing import Any

import pytest

from examples.benchmarks.bound import Times, bound
from fsdp_offload import OffloadPolicy

# Powers of two, so that a term that is missing, or counted twice, shows, and sums are exact.
TIMES = Times(forward_ms=64, backward_ms=128, update_ms=2, clip_ms=1, load_ms=512, store_ms=256, two_way_ms=1024)
ITERATION: dict[str, Any] = {"overlap": "iteration"}
STEP: dict[str, Any] = {}
FORWARD: dict[str, Any] = {"overlap": "forward"}


@pytest.mark.parametrize(
    ("fields", "offloaded", "staged", "formula", "ms"),
    [
        (None, 1.0, 1.0, "F + B + clip + U", 64 + 128 + 1 + 2),
        ({}, 1.0, 0.0, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 1024),
        ({}, 1.0, 0.125, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 896),
        ({}, 0.0, 0.0, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 2),
        (FORWARD, 1.0, 0.0, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 1024),
        (FORWARD, 1.0, 0.5, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 768),  # the backward hides a quarter of L
        (FORWARD, 1 / 1024, 0.0, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 64 + 2),
        (STEP, 1.0, 0.25, "F + B + clip + max(U, (1 - r) T)", 64 + 128 + 1 + 768),
        (FORWARD, 0.25, 0.5, "B + clip + max(F + U, (1 - r) T)", 128 + 1 + 128),
        (ITERATION, 1.0, 1.0, "max(F + B + U, T)", 1024),
        (ITERATION, 0.125, 0.0, "max(F + B + U, T)", 64 + 128 + 2),
    ],
)
def test_the_formula_of_a_policy(
    fields: dict[str, Any] | None, offloaded: float, staged: float, formula: str, ms: float
) -> None:
    policy = None if fields is None else OffloadPolicy(**fields)
    assert bound(policy, TIMES, offloaded=offloaded, staged=staged) == (formula, ms)


def test_clipping_counts_where_updates_may_be_taken_back() -> None:
    found = bound(OffloadPolicy(**ITERATION), TIMES, offloaded=0.125, clips=True)
    assert found == ("max(F + B + clip + U, T)", 64 + 128 + 1 + 2)
