"""The long form of ``tests/cpu/test_overlap_programs.py``: many random programs under every policy."""

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.cpu.test_overlap_programs import WITH_RESIDENT, check_programs


@pytest.mark.parametrize("with_phases", [False, True], ids=["", "phases"])
@pytest.mark.parametrize("fields", WITH_RESIDENT.values(), ids=WITH_RESIDENT)
def test_any_program(mesh: DeviceMesh, fields: dict[str, object], with_phases: bool) -> None:
    check_programs(mesh, fields, with_phases, max_examples=32)
