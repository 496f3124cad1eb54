"""Plain and offloaded training have the same bits: every pair of the axes' values, on a device with slow updates."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.distributed.device_mesh import DeviceMesh

from tests.conformance.axes import AXES, Case, all_pairs
from tests.conformance.oracle import compare
from tests.conformance.programs import HABITS, programs
from tests.overlapping import slow_down


@pytest.fixture(scope="module", autouse=True)
def slow_updates() -> Iterator[None]:
    """What does not wait for an update reads what was there before."""
    with pytest.MonkeyPatch.context() as patch:
        slow_down("U", 1_000_000, patch.setattr)
        yield


@pytest.mark.parametrize("case", all_pairs(AXES, tuple(HABITS)), ids=lambda case: str(case).replace(" ", "-"))
def test_every_pair(case: Case, device: torch.device, mesh: DeviceMesh) -> None:
    del mesh  # its process group is what is wanted
    assert not compare(case, device, HABITS)


@pytest.mark.long
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(case=programs(AXES))
def test_any_program(mesh: DeviceMesh, case: Case) -> None:
    del mesh
    assert not compare(case, torch.device("cuda", torch.cuda.current_device()), HABITS), str(case)
