"""Plain and offloaded training have the same bits: every pair of the axes' values, on a device with one slow lane."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from tests.conformance.axes import AXES, Case, all_pairs
from tests.conformance.oracle import compare
from tests.conformance.programs import HABITS, programs
from tests.overlapping import slow_down

LANES = "LUS"
"""What does not wait for a load, an update or a store that is slow reads what was there before."""
SLEEP_CYCLES = 1_000_000
PAIRS = all_pairs(AXES, tuple(HABITS))


def slowed(case: Case, device: torch.device, lane: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        slow_down(lane, SLEEP_CYCLES, patch.setattr)
        found = compare(case, device, HABITS)
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize(
    ("case", "lane"),
    [
        pytest.param(
            case, lane, id=f"{lane}-{case}".replace(" ", "-"), marks=() if number % 3 == at else pytest.mark.long
        )
        for number, case in enumerate(PAIRS)
        for at, lane in enumerate(LANES)
    ],
)
def test_every_pair(case: Case, lane: str, device: torch.device, mesh: DeviceMesh) -> None:
    del mesh  # its process group is what is wanted
    assert not slowed(case, device, lane)


@pytest.mark.long
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(case=programs(AXES), lane=st.sampled_from(LANES))
def test_any_program(mesh: DeviceMesh, case: Case, lane: str) -> None:
    del mesh
    assert not slowed(case, torch.device("cuda", torch.cuda.current_device()), lane), str(case)
