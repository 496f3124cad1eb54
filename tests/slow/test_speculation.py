"""Random programs of ``tests/clipping.py``; and kills between an update and its commit."""

import multiprocessing
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_offload.engine import speculation
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.speculation import Speculation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from tests.clipping import NEVER, OPERATIONS, Operation, clip, speculation_of, within_bounds
from tests.cpu.test_speculation import policy_of, small_net
from tests.distributed.launch import mesh as mesh_of_ranks
from tests.distributed.launch import run_cases, slow_updates, spawn
from tests.overlapping import SIZES, Loop, Net, adamw, same
from tests.parity import leaves, same_bits
from tests.policies import with_share

FIELDS: dict[str, dict[str, Any]] = {
    "iteration": {},
    "resident": {"staying": 20_000},
    "half-resident": {"staying": 60_000},
    "serial": {"serial": True},
    "snapshot": {"snapshot_bytes": 30_000},
    "host": {"host_fraction": 0.3},
    "auto": {"passing": "auto", "staying": "auto"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_any_program(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    @settings(max_examples=32, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        program=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=12),
        slots=st.integers(3, 6),
        never_stops=st.booleans(),
        micro_batches=st.sampled_from([1, 1, 2]),
    )
    def check(program: list[Operation], slots: int, never_stops: bool, micro_batches: int) -> None:
        sizes = {} if "passing" in fields else {"passing": slots * SIZES["bucket_bytes"]}
        policy = policy_of(**fields, **sizes)
        kwargs = {"net": partial(Net, width=16, layers=2), "micro_batches": micro_batches}
        with pytest.MonkeyPatch.context() as patch:
            if never_stops:
                patch.setattr(speculation, "_STOPS_ABOVE", 1.0)
                patch.setattr(speculation, "_GOES_ON_BELOW", 1.0)
            loops = pair_with_reference(mesh, policy, **kwargs)
            for at, operation in enumerate([within_bounds, within_bounds, *program, within_bounds]):
                for loop in loops:
                    operation(loop, at)
                assert same(*loops), (at, [one.__name__ for one in program])

    check()


def pair_with_reference(mesh: DeviceMesh, policy: OffloadPolicy, **kwargs: Any) -> tuple[Loop, Loop]:
    """Beside a loop with ``policy`` one whose bits it must have: plain, or the host's share in ``step()``."""
    reference = None if not policy.host_fraction else with_share(policy, overlap="step")
    return Loop(mesh, adamw, reference, **kwargs), Loop(mesh, adamw, policy, **kwargs)


# On several ranks the norm is that of all of them, and so is what follows -------------------------------------------

OF_RANKS: dict[str, dict[str, Any]] = {"iteration": {}, "resident": {"staying": 5_000}, "auto": {"passing": "auto"}}


def in_two_groups(params: Any) -> Optimizer:
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02, fused=params[0].device.type != "cpu" or None)


def compare(device_mesh: DeviceMesh, fields: dict[str, Any], seed: int) -> list[str]:
    """A random program, the same on every rank."""
    chosen = random.Random(seed)
    program = [within_bounds, within_bounds, within_bounds, *chosen.choices(OPERATIONS, k=8), within_bounds]
    policy = with_share(**{**SIZES, "overlap": "iteration", **fields})
    make = chosen.choice([adamw, in_two_groups])
    net = partial(Net, width=16, layers=2)
    loops = [Loop(device_mesh, make, one, net=net, micro_batches=1 + seed % 2) for one in (None, policy)]
    found = []
    for at, operation in enumerate(program):
        for loop in loops:
            operation(loop, at)
        if not same(*loops):
            found.append(f"other bits after {operation.__name__} ({at})")
            break
    if not speculation_of(loops[1]).committed:
        found.append("nothing was updated in a backward")
    return found


def run_programs(rank: int, world_size: int, sizes: tuple[int, ...]) -> None:
    del rank
    slow_updates()
    device_mesh = mesh_of_ranks(world_size) if len(sizes) == 1 else mesh_of_ranks(*sizes, names=("replicate", "shard"))
    for threshold in ("_STOPS_ABOVE", "_GOES_ON_BELOW"):
        setattr(speculation, threshold, 1.0)  # else a program like these would soon stop it
    run_cases(
        {
            f"{name}, {seed}": partial(compare, device_mesh, fields, 100 * number + seed)
            for number, (name, fields) in enumerate(OF_RANKS.items())
            for seed in range(12)
        }
    )


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_any_program_on_several_ranks(sizes: tuple[int, ...], tmp_path: Path) -> None:
    spawn(run_programs, 4 if len(sizes) > 1 else sizes[0], tmp_path, sizes)


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
