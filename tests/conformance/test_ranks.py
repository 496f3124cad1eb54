"""Plain and offloaded training have the same bits on several ranks: every pair of the axes' values, in every layout."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.conformance.axes import AXES, LAYOUTS, Case, all_pairs
from tests.conformance.oracle import compare
from tests.conformance.programs import HABITS, programs
from tests.distributed.launch import agree, attempt, run_cases, slow_updates, spawn, this_device

pytestmark = pytest.mark.distributed

SOME_HABITS = (
    *("evaluate", "unreduced", "unused", "skip", "scaler", "read-state", "write-parameters", "freeze", "reattach"),
)
SOME: dict[str, tuple[object, ...]] = {
    "model": ("usual", "tied", "groups"),
    "optimizer": ("adamw", "adamw-fused", "sgd-momentum", "muon", "fused-adam"),
    "attached": ("first", "late", "behind a look"),
    "phases": ("none", "within", "own"),
    "host": (0.0, 0.5),
    "looks": ("each",),
}
"""Those for which it may matter that others hold the rest of a tensor."""


DELTAS = [
    Case(layout="uneven", overlap="iteration", clip="sometimes", dtype="bf16", masters="fp32", program=("usual",) * 7),
    Case(layout="empty", overlap="iteration", clip="always", dtype="mixed", parameters=True, program=("usual",) * 7),
    Case(layout="columns-2", dtype="bf16", save="sync", program=("usual", "write-parameters", *("usual",) * 5)),
    Case(layout="even", optimizer="muon", dtype="mixed", program=("usual",) * 5),
]
"""For the quick tier, in which few pairs have them."""


def axes_of(ranks: int, *, every: bool = False) -> dict[str, tuple[object, ...]]:
    layouts = tuple(name for name, layout in LAYOUTS.items() if layout.ranks == ranks)
    return {**AXES, **({} if every else SOME), "layout": layouts}


def run_pairs(rank: int, ranks: int, first: int, every: int) -> None:
    slow_updates()
    cases = all_pairs(axes_of(ranks), SOME_HABITS)[first::every]
    if every > 2:
        cases += [replace(case, deltas=True) for case in DELTAS]
    run_cases({str(case): partial(compare, case, this_device(), HABITS) for case in cases})


HALVES = [pytest.param(ranks, first, 2, marks=pytest.mark.long) for ranks in (2, 3, 4) for first in (0, 1)]
"""A case of a few minutes each, on two cores."""


@pytest.mark.parametrize(("ranks", "first", "every"), [(2, 0, 9), *HALVES])
def test_every_pair(ranks: int, first: int, every: int, tmp_path: Path) -> None:
    spawn(run_pairs, ranks, tmp_path, first, every)


def run_programs(rank: int, ranks: int, number: int) -> None:
    """All ranks draw the same programs: what they find is the same on all of them."""
    slow_updates()

    @seed(number)
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=programs(axes_of(ranks, every=True)))
    def check(case: Case) -> None:
        assert not attempt(partial(compare, case, this_device(), HABITS)), str(case)

    check()
    agree([])


@pytest.mark.long
@pytest.mark.parametrize("number", range(4))  # minutes each
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_program(ranks: int, number: int, tmp_path: Path) -> None:
    spawn(run_programs, ranks, tmp_path, number)
