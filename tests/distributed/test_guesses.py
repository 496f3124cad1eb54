"""Clipping with updates in the backward on several ranks: the norm is that of all of them, and so is what follows."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.clipping import clipped, guesses_of, now_and_then, within_bounds
from tests.distributed.launch import mesh, run_cases, spawn
from tests.overlapping import SIZES, Loop, Net, adamw, same
from tests.policies import with_share

pytestmark = pytest.mark.distributed

small_net = partial(Net, width=16, layers=2)


def decisions(device_mesh: DeviceMesh, parameters: bool) -> list[str]:
    """All ranks take back the same steps, although each has other gradients."""
    policy = with_share(**{**SIZES, "overlap": "iteration", "parameters": parameters})
    loops = [Loop(device_mesh, adamw, one, net=small_net) for one in (None, policy)]
    for at, operation in enumerate([within_bounds] * 6 + [clipped, now_and_then] + [within_bounds] * 4):
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
