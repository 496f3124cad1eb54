"""The long form of ``tests/cpu/test_speculation.py``; and kills between an update and its commit."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.speculation import Speculation
from tests.clipping import NEVER, clip, within_bounds
from tests.cpu.test_speculation import FIELDS, check_programs, policy_of, small_net
from tests.distributed.launch import spawn
from tests.distributed.test_speculation import run_programs
from tests.overlapping import Loop, adamw
from tests.parity import leaves, same_bits


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_any_program(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    check_programs(mesh, fields, max_examples=32)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_any_program_on_several_ranks(sizes: tuple[int, ...], tmp_path: Path) -> None:
    spawn(run_programs, 4 if len(sizes) > 1 else sizes[0], tmp_path, sizes, 12)


# Killed ---------------------------------------------------------------------------------------------------------------

SAVED_AT, KILLED_AT = 6, 7


def kill_me(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: Path, where: str) -> None:
    """Save between a backward and its ``step()``, and die between the next backward's updates and their commit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loop = Loop(init_device_mesh("cpu", (1,)), adamw, policy_of(), net=small_net)
    stager = ArenaStager(loop.optimizer)
    for at in range(KILLED_AT + 1):
        if at == KILLED_AT:
            owner, name = {"update": (Pipeline, "_store"), "commit": (Speculation, "commit")}[where]
            setattr(owner, name, kill_me)
        loop.backward(at)
        clip(loop, NEVER)
        if at == SAVED_AT:
            state = {
                "model": get_model_state_dict(loop.model),
                "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer),
            }
            dcp.async_save(state, checkpoint_id=folder, async_stager=stager).result()
        loop.step()


@pytest.mark.parametrize("where", ["update", "commit"])
def test_the_checkpoint_is_that_of_a_committed_step(mesh: DeviceMesh, tmp_path: Path, where: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(tmp_path / "saved", where))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    plain = Loop(mesh, adamw, None, net=small_net)
    for at in range(SAVED_AT):
        within_bounds(plain, at)
    resumed = Loop(mesh, adamw, policy_of(), net=small_net).train(1)
    state = {
        "model": get_model_state_dict(resumed.model),
        "optimizer": get_optimizer_state_dict(resumed.model, resumed.optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    found, wanted = (
        [p.detach().to_local() for p in loop.model.parameters()]
        + [leaf for p in loop.model.parameters() for v in loop.optimizer.state[p].values() for leaf in leaves(v)]
        for loop in (resumed, plain)
    )
    assert len(found) == len(wanted) > 50
    assert all(same_bits(one.cpu(), other) for one, other in zip(found, wanted, strict=True))
    assert torch.isfinite(found[0]).all()
