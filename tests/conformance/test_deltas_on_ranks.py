"""Deltas of weights on several ranks: each hands out what has changed in its shards, by numbers in whole parameters."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.conformance.axes import Case
from tests.conformance.following import SERVED, followed
from tests.conformance.oracle import compare
from tests.conformance.programs import programs
from tests.conformance.test_ranks import axes_of
from tests.distributed.launch import agree, attempt, run_cases, slow_updates, spawn, this_device

pytestmark = pytest.mark.distributed

CASES = [
    Case(layout="uneven", overlap="iteration", clip="sometimes", dtype="bf16", masters="fp32", program=("usual",) * 7),
    Case(layout="empty", overlap="iteration", clip="always", dtype="mixed", parameters=True, program=("usual",) * 7),
    Case(layout="columns-2", dtype="bf16", save="sync", program=("usual", "write-parameters", *("usual",) * 5)),
    Case(layout="even", optimizer="muon", dtype="mixed", program=("usual",) * 5),
]


def compare_followed(case: Case) -> list[str]:
    with followed(3e-4) as habits:
        return compare(case, this_device(), habits)


def run_deltas(rank: int, ranks: int) -> None:
    slow_updates()
    run_cases({str(case): partial(compare_followed, case) for case in CASES})


def test_deltas_are_what_has_changed(tmp_path: Path) -> None:
    spawn(run_deltas, 2, tmp_path)


def run_programs(rank: int, ranks: int, number: int) -> None:
    slow_updates()
    served = {axis: values for axis, values in SERVED.items() if axis != "layout"}

    @seed(number)
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=programs(axes_of(ranks, every=True) | served))
    def check(case: Case) -> None:
        assert not attempt(partial(compare_followed, case)), str(case)

    check()
    agree([])


@pytest.mark.long
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_program(ranks: int, number: int, tmp_path: Path) -> None:
    spawn(run_programs, ranks, tmp_path, number)
