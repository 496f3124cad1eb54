"""Clipping with updates in the backward on several ranks: the norm is that of all of them, and so is what follows."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload.engine import speculation
from tests.clipping import OPERATIONS, clipped, now_and_then, speculation_of, within_bounds
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.test_overlap import prefetch_forward, slow_updates
from tests.overlapping import SIZES, Loop, Net, adamw, same
from tests.policies import with_share

pytestmark = pytest.mark.distributed

FIELDS: dict[str, dict[str, Any]] = {"iteration": {}, "resident": {"staying": 5_000}, "auto": {"passing": "auto"}}


def in_two_groups(params: Any) -> Optimizer:
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02, fused=params[0].device.type != "cpu" or None)


def compare(device_mesh: DeviceMesh, fields: dict[str, Any], seed: int, **kwargs: Any) -> list[str]:
    """A random program, the same on every rank."""
    chosen = random.Random(seed)
    program = [within_bounds, within_bounds, within_bounds, *chosen.choices(OPERATIONS, k=8), within_bounds]
    policy = with_share(**{**SIZES, "overlap": "iteration", **fields})
    make = chosen.choice([adamw, in_two_groups])
    net = partial(Net, width=16, layers=2)
    loops = [Loop(device_mesh, make, one, net=net, micro_batches=1 + seed % 2, **kwargs) for one in (None, policy)]
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


def run_programs(rank: int, world_size: int, sizes: tuple[int, ...], seeds: int, every: int = 1) -> None:
    del rank
    slow_updates()
    device_mesh = mesh(world_size) if len(sizes) == 1 else mesh(*sizes, names=("replicate", "shard"))
    for threshold in ("_STOPS_ABOVE", "_GOES_ON_BELOW"):
        setattr(speculation, threshold, 1.0)  # else a program like these would soon stop it
    cases = {}
    for number, (name, fields) in enumerate(FIELDS.items()):
        for seed in range(seeds):
            prepare = prefetch_forward if seed % 2 else lambda model: None
            cases[f"{name}, {seed}"] = partial(compare, device_mesh, fields, 100 * number + seed, prepare=prepare)
    run_cases(cases, every)


@pytest.mark.parametrize(
    ("sizes", "every"),
    [((3,), 7), *(pytest.param(one, 1, marks=pytest.mark.long) for one in ((2,), (3,), (4,), (2, 2)))],
    ids=str,
)
def test_any_program(sizes: tuple[int, ...], every: int, tmp_path: Path) -> None:
    world_size = 4 if len(sizes) > 1 else sizes[0]
    spawn(run_programs, world_size, tmp_path, sizes, 2, every)  # more in tests/slow


def decisions(device_mesh: DeviceMesh) -> list[str]:
    """All ranks take back the same steps, although each has other gradients."""
    loop = Loop(
        device_mesh, adamw, with_share(**{**SIZES, "overlap": "iteration"}), net=partial(Net, width=16, layers=2)
    )
    for at, operation in enumerate([within_bounds] * 9 + [clipped, now_and_then] + [within_bounds] * 9):
        operation(loop, at)
    found = speculation_of(loop)
    counts = torch.tensor([float(found.committed), float(found.taken_back)])
    sums, ranks = counts.clone(), torch.distributed.get_world_size()
    torch.distributed.all_reduce(sums)
    return (
        [] if torch.equal(sums, ranks * counts) and found.taken_back else [f"{counts} here, {sums / ranks} on average"]
    )


def run_decisions(rank: int, world_size: int) -> None:
    del rank
    run_cases({"the same": partial(decisions, mesh(world_size))})


def test_every_rank_decides_the_same(tmp_path: Path) -> None:
    spawn(run_decisions, 3, tmp_path)
