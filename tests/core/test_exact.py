"""Parameters, state, losses and counters are bitwise those of plain training, whatever the loop does."""

from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_offload.core.switch import VARIABLE
from tests.core.programs import check
from tests.distributed.launch import DEVICE_TYPE, spawn


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize("seed", range(40))
def test_random_program(mesh: DeviceMesh, seed: int) -> None:
    check(seed, mesh)


def run_programs(rank: int, world_size: int, first: int, last: int) -> None:
    mesh = init_device_mesh(DEVICE_TYPE, (world_size,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        for seed in range(first, last):
            check(seed, mesh)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("first", range(100, 200, 20))
def test_random_programs_on_two_ranks(tmp_path: Path, first: int) -> None:
    spawn(run_programs, 2, tmp_path, first, first + 20)
