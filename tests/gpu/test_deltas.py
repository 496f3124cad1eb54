"""Deltas of weights are what has changed, with streams of a device, one of which is slow."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.conformance.axes import Case
from tests.conformance.following import followed
from tests.conformance.oracle import compare
from tests.conformance.test_deltas import CASES
from tests.gpu.test_conformance import LANES, SLEEP_CYCLES
from tests.overlapping import slow_down


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case).replace(" ", "-"))
def test_deltas_are_what_has_changed(
    case: Case, lane: str, device: torch.device, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    del mesh
    slow_down(lane, SLEEP_CYCLES, monkeypatch.setattr)
    with followed(3e-4) as habits:
        assert not compare(case, device, habits)
