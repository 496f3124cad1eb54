"""Phases on several ranks: uneven shards, reductions in the wrapped hook, ranks that differ in what they do."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

from fsdp_offload import OffloadedOptimizer, reload_before
from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.distributed.launch import mesh, run_cases, spawn
from tests.overlapping import POLICIES, SIZES, Loop, adamw, same
from tests.policies import with_share
from tests.tiers import some_cases, world_sizes

pytestmark = pytest.mark.distributed

PHASES = ("offload", "release", "reload")
Habit = Callable[[Loop, int], None]


def go_through(optimizer: Optimizer, phases: Sequence[str]) -> None:
    """Nothing for a plain optimizer, which has no phases."""
    for phase in phases if isinstance(optimizer, OffloadedOptimizer) else ():
        getattr(optimizer, f"{phase}_states")()


def finalize(loop: Loop, tokens: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """What hooks that end the gradients do: a collective, and something with every gradient."""
    dist.all_reduce(tokens, group=group)
    for param in loop.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    loop.seen.append(tokens.item())


def megatron(loop: Loop, step: int) -> None:
    if not hasattr(loop, "finalize"):
        hook = functools.partial(finalize, loop, group=dist.group.WORLD)
        plain = not isinstance(loop.optimizer, OffloadedOptimizer)
        loop.finalize = hook if plain else reload_before(hook, loop.optimizer)  # type: ignore[attr-defined]
    go_through(loop.optimizer, ["offload"])
    with torch.no_grad():
        loop.seen.append(loop.model(loop.batch(999 + step)).item())
    go_through(loop.optimizer, ["release"])
    loop.backward(step)
    loop.finalize(torch.tensor(float(dist.get_rank() + step), device=loop.device))  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.step()


def each_rank_its_own(loop: Loop, step: int) -> None:
    """Phases issue no collective, so ranks need not agree on them."""
    rank = dist.get_rank()
    go_through(loop.optimizer, PHASES[: (rank + step) % 4])
    loop.backward(step)
    if rank % 2 == step % 2:
        go_through(loop.optimizer, ["reload", "offload"])
    loop.step()
    go_through(loop.optimizer, PHASES[rank % 3 :])


def in_update_backward(habit: Habit) -> Habit:
    """Without what such loops do to gradients after the backward."""
    return each_rank_its_own if habit is megatron else habit


def compare(device_mesh: DeviceMesh, fields: dict[str, Any], habit: Habit) -> list[str]:
    habit = in_update_backward(habit) if fields.get("overlap") == "iteration" else habit
    policy = with_share(**SIZES, **fields, staying=20_000)
    plain, offloaded = (Loop(device_mesh, adamw, one, micro_batches=2).train(6, habit) for one in (None, policy))
    return [] if same(plain, offloaded) else ["other bits"]


def run_policies(rank: int, world_size: int, every: int) -> None:
    del rank
    device_mesh = mesh(world_size)
    run_cases(
        {
            f"{name}, {habit.__name__}": partial(compare, device_mesh, fields, habit)
            for name, fields in {"step": {}, **POLICIES}.items()
            for habit in (megatron, each_rank_its_own)
            if name in ("step", "forward", "iteration")
        },
        every,
    )


@some_cases({2: 0, 3: 5})
def test_every_policy(world_size: int, every: int, tmp_path: Path) -> None:
    spawn(run_policies, world_size, tmp_path, every)


def no_collective(device_mesh: DeviceMesh) -> list[str]:
    loop = Loop(device_mesh, adamw, with_share(**SIZES, staying=20_000)).train(3)
    with CommDebugMode() as seen:
        for _ in range(2):
            go_through(loop.optimizer, PHASES)
    return [] if seen.get_total_counts() == 0 else [f"{seen.get_comm_counts()}"]


def away_in_a_checkpoint(device_mesh: DeviceMesh, folder: Path) -> list[str]:
    """Saved by ranks whose state is away, on its way or there, and loaded likewise."""
    path = folder / str(dist.get_world_size())
    rank = dist.get_rank()
    policy = with_share(**SIZES, staying=20_000)
    expected = Loop(device_mesh, adamw, policy).train(6)
    loop = Loop(device_mesh, adamw, policy).train(3)
    go_through(loop.optimizer, PHASES[: rank + 1])
    scheduler = loop.scheduler.state_dict()
    state = {"model": loop.model.state_dict(), "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer)}
    dcp.save(state, checkpoint_id=path)
    loop.train(2, first=10)
    go_through(loop.optimizer, PHASES[: (rank + 2) % 3])
    state = {
        "model": loop.model.state_dict(),
        "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer, for_load=True),
    }
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(loop.model, loop.optimizer, state["optimizer"])
    loop.scheduler.load_state_dict(scheduler)
    del loop.seen[3:]
    loop.train(3, first=3)
    return [] if same(expected, loop) else ["other bits"]


def run_checkpoints(rank: int, world_size: int, folder: Path) -> None:
    del rank
    device_mesh = mesh(world_size)
    run_cases(
        {
            "no collective": partial(no_collective, device_mesh),
            "checkpoint": partial(away_in_a_checkpoint, device_mesh, folder),
        }
    )


@world_sizes(3, 2)
def test_checkpoints_and_collectives(world_size: int, tmp_path: Path) -> None:
    spawn(run_checkpoints, world_size, tmp_path, tmp_path)
