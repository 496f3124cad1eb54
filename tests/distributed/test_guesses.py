"""Clipping with updates in the backward on several ranks: the norm is that of all of them, and so is what follows."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload.core import guesses
from tests.clipping import OPERATIONS, clipped, guesses_of, now_and_then, within_bounds
from tests.distributed.launch import mesh, run_cases, slow_updates, spawn
from tests.overlapping import SIZES, Loop, Net, adamw, same
from tests.policies import with_share

pytestmark = pytest.mark.distributed

small_net = partial(Net, width=16, layers=2)


def decisions(device_mesh: DeviceMesh, parameters: bool) -> list[str]:
    """All ranks take back the same steps, although each has other gradients."""
    policy = with_share(**{**SIZES, "overlap": "iteration", "parameters": parameters})
    loops = [Loop(device_mesh, adamw, one, net=small_net) for one in (None, policy)]
    for at, operation in enumerate([within_bounds] * 9 + [clipped, now_and_then] + [within_bounds] * 9):
        for loop in loops:
            operation(loop, at)
        if not same(*loops):
            return [f"other bits after step {at}"]
    found = guesses_of(loops[1])
    counts = torch.tensor([float(found.committed), float(found.taken_back)])
    sums, ranks = counts.clone(), torch.distributed.get_world_size()
    torch.distributed.all_reduce(sums)
    if torch.equal(sums, ranks * counts) and found.taken_back:
        return []
    return [f"{counts} here, {sums / ranks} on average"]


def run_decisions(rank: int, world_size: int) -> None:
    del rank
    run_cases({f"parameters={one}": partial(decisions, mesh(world_size), one) for one in (False, True)})


def test_every_rank_decides_the_same(tmp_path: Path) -> None:
    spawn(run_decisions, 3, tmp_path)


OF_RANKS: dict[str, dict[str, Any]] = {"iteration": {}, "parameters": {"parameters": True}, "auto": {"passing": "auto"}}


def in_two_groups(params: Any) -> Optimizer:
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02, fused=params[0].device.type != "cpu" or None)


def compare(device_mesh: DeviceMesh, fields: dict[str, Any], seed: int) -> list[str]:
    """A random program, the same on every rank."""
    chosen = random.Random(seed)
    program = [within_bounds, within_bounds, within_bounds, *chosen.choices(OPERATIONS, k=8), within_bounds]
    policy = with_share(**{**SIZES, "overlap": "iteration", **fields})
    make = chosen.choice([adamw, in_two_groups])
    loops = [Loop(device_mesh, make, one, net=small_net, micro_batches=1 + seed % 2) for one in (None, policy)]
    for at, operation in enumerate(program):
        for loop in loops:
            operation(loop, at)
        if not same(*loops):
            return [f"other bits after {operation.__name__} ({at})"]
    return [] if guesses_of(loops[1]).committed else ["nothing was updated in a backward"]


def run_programs(rank: int, world_size: int, sizes: tuple[int, ...], seeds: int) -> None:
    del rank
    slow_updates()
    device_mesh = mesh(world_size) if len(sizes) == 1 else mesh(*sizes, names=("replicate", "shard"))
    guesses.STOPS_ABOVE = guesses.GOES_ON_BELOW = 1.0  # else a program like these would soon stop it
    run_cases(
        {
            f"{name}, {seed}": partial(compare, device_mesh, fields, 100 * number + seed)
            for number, (name, fields) in enumerate(OF_RANKS.items())
            for seed in range(seeds)
        }
    )


def test_some_programs_on_two_ranks(tmp_path: Path) -> None:
    spawn(run_programs, 2, tmp_path, (2,), 2)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_any_program_on_several_ranks(sizes: tuple[int, ...], tmp_path: Path) -> None:
    spawn(run_programs, 4 if len(sizes) > 1 else sizes[0], tmp_path, sizes, 12)
