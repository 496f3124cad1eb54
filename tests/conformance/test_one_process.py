"""Plain and offloaded training have the same bits: every pair of the axes' values, on one CPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.conformance.axes import AXES, Case, all_pairs
from tests.conformance.following import seen
from tests.conformance.oracle import compare
from tests.conformance.programs import HABITS, programs

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("mesh")


@pytest.mark.parametrize("case", all_pairs(AXES, tuple(HABITS)), ids=lambda case: str(case).replace(" ", "-"))
def test_every_pair(case: Case) -> None:
    assert not compare(case, CPU, HABITS)


WRONG_ONCE = [
    # The first step is skipped: a fused optimizer creates its state all the same, and its counter stays zero.
    *(Case(optimizer=f"adamw{one}", program=("scaler", "usual", "usual")) for one in ("", "-foreach", "-fused")),
    Case(optimizer="sgd-momentum", dtype="bf16", host=1.0, program=("usual",) * 3),
    *(
        Case(optimizer="adamw-fused", host=host, program=("usual", "usual", "scaler", "scaler", "scaler", "usual"))
        for host in (0.0, 0.5)
    ),
    # Buckets of the CPU are no neighbours of those of the device.
    Case(layout="unsharded", optimizer="amsgrad", device_bytes="auto", host=0.5, program=("usual",) * 4),
    # A checkpoint's writer holds tensors over homes, but not as others do, who keep their tensors.
    Case(save="async", host=1.0, program=("usual",) * 3 + ("replace-state",)),
    # An evaluation before the first step leaves the root gathered: the next forward uses its weights, as without us.
    *(Case(overlap=one, program=("evaluate-before-step", *("usual",) * 3)) for one in AXES["overlap"]),
    # Inference is the first to need parameters, and nobody looks in between.
    *(Case(overlap=one, parameters=True, looks="end", program=("infer",) * 6) for one in AXES["overlap"]),
]
"""Cases of three values, which no pair shows, and programs that are not drawn."""


@pytest.mark.parametrize("case", WRONG_ONCE, ids=lambda case: str(case).replace(" ", "-"))
def test_what_was_wrong_once(case: Case) -> None:
    assert not compare(case, CPU, HABITS)


DELTAS = [
    Case(overlap="iteration", clip="always", dtype="bf16", program=("usual",) * 8),
    Case(overlap="iteration", clip="sometimes", dtype="bf16", masters="remainder", program=("usual",) * 8),
    Case(overlap="iteration", clip="sometimes", dtype="mixed", parameters=True, micro=3, program=("usual",) * 8),
    Case(overlap="forward", dtype="bf16", masters="fp32", parameters=True, save="async", program=("usual",) * 8),
    Case(optimizer="muon", dtype="mixed", program=("usual", "write-parameters", "usual", "write-between", "usual")),
    Case(optimizer="sgd-momentum", dtype="bf16", save="sync", sleep=True, program=("usual",) * 8),
    Case(dtype="mixed", program=("usual", "reattach", "load-between", "freeze", "skip", "usual", "scaler", "scaler")),
]


@pytest.mark.parametrize("case", DELTAS, ids=lambda case: str(case).replace(" ", "-"))
def test_deltas_are_few(case: Case) -> None:
    """Most are handed out one by one, also where steps are taken back; that they are right is an axis."""
    before = seen.copy()
    assert not compare(replace(case, deltas=True), CPU, HABITS)
    of_kind = seen - before
    assert of_kind["sparse"]
    assert of_kind["taken back"] or case.clip != "sometimes"


@pytest.mark.long
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(case=programs(AXES))
def test_any_program(case: Case) -> None:
    assert not compare(case, CPU, HABITS), str(case)
