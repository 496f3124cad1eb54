"""Random programs of what a training loop may do, with parameters on the host: on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.launch import mesh as mesh_of_ranks
from tests.distributed.launch import spawn
from tests.overlapping import POLICIES, Loop, adamw, same
from tests.policies import with_share
from tests.slow import test_long_programs as programs


def write_parameters(loop: Loop, at: int) -> None:
    del at
    programs.phase(loop, "synchronize")
    with torch.no_grad():
        for param in loop.model.parameters():
            param.data.mul_(0.99)


def run_a_part(loop: Loop, at: int) -> None:
    """What would be gathered next is loaded, and never comes."""
    with torch.no_grad():
        loop.model.blocks[at % 4](torch.ones(32))


OPERATIONS = (
    *(programs.step, programs.step, programs.step_without_some, programs.evaluate, programs.read_state),
    *(programs.save, programs.load, programs.zero_in_place, programs.change_hyperparameter),
    *(programs.leave, programs.start_to_leave, programs.release, programs.come_back),
    *(write_parameters, run_a_part),
)
NOT_IN_BACKWARD = (programs.skip, programs.clip, programs.write_before_step, programs.step_twice)
PROGRAM = st.fixed_dictionaries(
    {
        "name": st.sampled_from(sorted(POLICIES)),
        "staying": st.sampled_from([0, 0, 60_000]),
        "passing": st.sampled_from([2, 5, 100]),
        "micro_batches": st.integers(1, 2),
        "operations": st.lists(st.integers(0, len(OPERATIONS + NOT_IN_BACKWARD) - 1), min_size=4, max_size=25),
    }
)


def run(device_mesh: DeviceMesh, program: dict[str, Any]) -> bool:
    """Whether both sides are the same after each operation."""
    allowed = OPERATIONS if program["name"] == "iteration" else OPERATIONS + NOT_IN_BACKWARD
    policy = with_share(
        **POLICIES[program["name"]],
        parameters=True,
        bucket_bytes=4096,
        passing=program["passing"] * 4096,
        staying=program["staying"],
    )
    loops = [Loop(device_mesh, adamw, one, micro_batches=program["micro_batches"]) for one in (None, policy)]
    for loop in loops:
        loop.train(2)
    for at, number in enumerate(program["operations"], start=2):
        for loop in loops:
            allowed[number % len(allowed)](loop, at)
        if not same(*loops):
            return False
    return True


@given(program=PROGRAM)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_programs(mesh: DeviceMesh, program: dict[str, Any]) -> None:
    assert run(mesh, program)


def run_programs(rank: int, world_size: int) -> None:
    """The same programs on every rank, and no shrinking, for which ranks would have to agree."""
    del rank
    device_mesh = mesh_of_ranks(world_size)

    @given(program=PROGRAM)
    @settings(
        max_examples=20, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(program: dict[str, Any]) -> None:
        assert run(device_mesh, program), program

    check()


@pytest.mark.distributed
def test_random_programs_on_two_ranks(tmp_path: Path) -> None:
    spawn(run_programs, 2, tmp_path)
