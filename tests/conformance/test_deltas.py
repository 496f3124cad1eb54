"""Deltas of weights, applied to a copy, give the weights, whatever the loop does; and training has the same bits."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.conformance.axes import AXES, Case
from tests.conformance.following import SERVED, followed, seen
from tests.conformance.oracle import compare
from tests.conformance.programs import programs

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("mesh")

CASES = [
    Case(overlap="iteration", clip="always", dtype="bf16", program=("usual",) * 8),
    Case(overlap="iteration", clip="sometimes", dtype="bf16", masters="remainder", program=("usual",) * 8),
    Case(overlap="iteration", clip="sometimes", dtype="mixed", parameters=True, micro=3, program=("usual",) * 8),
    Case(overlap="forward", dtype="bf16", masters="fp32", parameters=True, save="async", program=("usual",) * 8),
    Case(optimizer="muon", dtype="mixed", program=("usual", "write-parameters", "usual", "write-between", "usual")),
    Case(optimizer="sgd-momentum", dtype="bf16", save="sync", sleep=True, program=("usual",) * 8),
    Case(dtype="mixed", program=("usual", "reattach", "load-between", "freeze", "skip", "usual", "scaler", "scaler")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case).replace(" ", "-"))
def test_deltas_are_what_has_changed(case: Case) -> None:
    before = seen.copy()
    with followed(3e-4) as habits:
        assert not compare(case, CPU, habits)
    of_kind = seen - before
    assert of_kind["sparse"]
    assert of_kind["taken back"] or case.clip != "sometimes"


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.long)])
def test_any_program(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=programs(AXES | SERVED))
    def check(case: Case) -> None:
        with followed(3e-4) as habits:
            assert not compare(case, CPU, habits), str(case)

    before = seen.copy()
    check()
    of_kind = seen - before
    assert of_kind["sparse"] > of_kind["elements"] / 10
    assert of_kind["dense"] > 0
    assert of_kind["taken back"] > 0 or examples < 300  # few may draw no step that is taken back
