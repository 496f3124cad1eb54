"""Overlap with forward and backward on several ranks: gathers and reductions run on streams of their own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload.engine.executor import Pipeline
from tests.cpu.test_elastic import Device
from tests.distributed.launch import DEVICE_TYPE, mesh, run_cases, spawn
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, SIZES, Loop, Net, adamw, same
from tests.policies import with_share
from tests.tiers import some_cases, world_sizes

pytestmark = pytest.mark.distributed


def prefetch_forward(model: nn.Module) -> None:
    """Explicitly: each block gathers the next two before it runs."""
    blocks = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])


def compare(device_mesh: DeviceMesh, fields: dict[str, Any], habit: str, **kwargs: Any) -> list[str]:
    if fields.get("overlap") == "iteration" and (habit in NOT_IN_BACKWARD or habit == "evaluate-before-step"):
        habit = "evaluate"
    steps = 8
    plain = Loop(device_mesh, adamw, None, **kwargs).train(steps, HABITS.get(habit))
    offloaded = Loop(device_mesh, adamw, with_share(**{**SIZES, **fields}), **kwargs).train(steps, HABITS.get(habit))
    return [] if same(plain, offloaded) else ["other bits"]


def slow_updates() -> None:
    """On streams, whoever does not wait for an update reads old parameters."""
    if DEVICE_TYPE == "cpu":
        return
    issue = Pipeline._issue

    def slowed(self: Pipeline, action: Any, update: Any) -> None:
        if action.kind == "U":
            with self._lanes["U"].running():
                torch.cuda._sleep(2_000_000)
        issue(self, action, update)

    Pipeline._issue = slowed  # type: ignore[method-assign]  # in this process, which ends with the test


def run_policies(rank: int, world_size: int, names: tuple[str, ...], habits: tuple[str, ...], every: int = 1) -> None:
    del rank
    slow_updates()
    device_mesh = mesh(world_size)
    cases = {
        f"{name}, {habit}, {how}": partial(compare, device_mesh, POLICIES[name], habit, prepare=prepare)
        for name in names
        for habit in habits
        for how, prepare in (("implicit", lambda model: None), ("explicit", prefetch_forward))
    }
    run_cases(cases, every)


@world_sizes(2, 3)
def test_every_policy(world_size: int, tmp_path: Path) -> None:
    spawn(run_policies, world_size, tmp_path, tuple(POLICIES), ("usual",))


@some_cases({2: 5})
def test_habits(world_size: int, every: int, tmp_path: Path) -> None:
    habits = "evaluate", "clip", "save-and-load"
    spawn(run_policies, world_size, tmp_path, ("forward", "iteration"), habits, every)


def run_hsdp(rank: int, world_size: int) -> None:
    del rank, world_size
    slow_updates()
    device_mesh = mesh(2, 2, names=("replicate", "shard"))
    run_cases({name: partial(compare, device_mesh, fields, "usual") for name, fields in POLICIES.items()})


@pytest.mark.long
def test_hsdp(tmp_path: Path) -> None:
    spawn(run_hsdp, 4, tmp_path)


def run_wide(rank: int, world_size: int) -> None:
    """Large enough for several streams to really run beside each other."""
    del rank
    slow_updates()
    device_mesh = mesh(world_size)
    wide = partial(Net, width=128)
    sizes = {"bucket_bytes": 128 << 10, "passing": 640 << 10}
    run_cases(
        {
            name: partial(compare, device_mesh, {**fields, **sizes}, "usual", net=wide, micro_batches=2)
            for name, fields in POLICIES.items()
        }
    )


@pytest.mark.long
def test_wide_model_with_micro_batches(tmp_path: Path) -> None:
    spawn(run_wide, 2, tmp_path)


def muon(params: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02, ns_steps=1)


def whole_parameters_with_other_room_on_each_rank(rank: int, device_mesh: DeviceMesh) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        Device(patch, group_bytes=60_000 if rank else 2_000)
        policy = with_share(passing="auto", bucket_bytes=1024, overlap="iteration")
        plain, offloaded = (Loop(device_mesh, muon, one).train(8) for one in (None, policy))
    return [] if same(plain, offloaded) else ["other bits"]


def run_muon(rank: int, world_size: int) -> None:
    """Its updates are collectives: all ranks have to come to them between the same two reductions."""
    run_cases({"muon": partial(whole_parameters_with_other_room_on_each_rank, rank, mesh(world_size))})


def test_collective_updates_where_ranks_have_different_room(tmp_path: Path) -> None:
    spawn(run_muon, 2, tmp_path)
