"""State that is away when it is saved and loaded, on ranks that differ in that."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.distributed.launch import mesh, run_cases, spawn
from tests.overlapping import SIZES, Loop, adamw, same
from tests.policies import with_share
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

PHASES = ("offload", "release", "reload")


def go_through(optimizer: Optimizer, phases: Sequence[str]) -> None:
    for phase in phases:
        getattr(optimizer, f"{phase}_states")()


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
    run_cases({"checkpoint": partial(away_in_a_checkpoint, mesh(world_size), folder)})


@world_sizes(3, 2)
def test_a_checkpoint(world_size: int, tmp_path: Path) -> None:
    spawn(run_checkpoints, world_size, tmp_path, tmp_path)
