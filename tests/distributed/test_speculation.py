"""Clipping with updates in the backward on several ranks: the norm is that of all of them, and so is what follows."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.clipping import clipped, now_and_then, speculation_of, within_bounds
from tests.distributed.launch import mesh, run_cases, spawn
from tests.overlapping import SIZES, Loop, Net, adamw
from tests.policies import with_share

pytestmark = pytest.mark.distributed


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
