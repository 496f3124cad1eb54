"""Any layout to any layout: what is saved by some ranks in some way is loaded by other ranks in any other way, bitwise.

All layouts of one world size share a start of processes: one that saves, one that loads what every layout has saved.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import LoadPlanner, get_optimizer_state_dict, load, set_optimizer_state_dict
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, run_cases, spawn
from tests.distributed.test_sharded_checkpoints import FULL, TINY, adamw, new_run, train
from tests.parity import Run, assert_at_home
from tests.state_dicts import assert_same
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed


class Layout(NamedTuple):
    ranks: int
    shard: models.ShardNet


LAYOUTS = {
    "1 rank": Layout(1, models.shard_even),
    "2 ranks": Layout(2, models.shard_even),
    "2 ranks, Shard(1)": Layout(2, models.shard_columns),
    "3 ranks": Layout(3, models.shard_even),
    "4 ranks": Layout(4, models.shard_even),
    "4 ranks, HSDP": Layout(4, models.shard_hybrid),
    "4 ranks, TP and FSDP": Layout(4, models.shard_tensor_parallel),
}
WORLD_SIZES = sorted({layout.ranks for layout in LAYOUTS.values()})


def layouts_of(ranks: int) -> dict[str, models.ShardNet]:
    return {name: layout.shard for name, layout in LAYOUTS.items() if layout.ranks == ranks}


def is_flat(saved_by: str) -> bool:
    """Both forms take part: their keys are different, so the form goes with the files."""
    return list(LAYOUTS).index(saved_by) % 2 == 1


def policy_of(name: str) -> OffloadPolicy:
    """Parameters live on the host in some layouts."""
    return replace(TINY, parameters=list(LAYOUTS).index(name) % 3 == 1)


def state_of(run: Run, *, flat: bool, for_load: bool) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, for_load=for_load, flatten_optimizer_state_dict=flat)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer}


def gathered(run: Run) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model, options=FULL),
        "optimizer": torch_get(run.model, run.optimizer, options=FULL),
    }


# Saving --------------------------------------------------------------------------------------------------------------


def run_save(rank: int, world_size: int, folder: Path) -> None:
    """A checkpoint for each layout and, gathered by torch, what it must contain."""
    run_cases({name: partial(saves, name, shard, folder) for name, shard in layouts_of(world_size).items()})


def saves(name: str, shard: models.ShardNet, folder: Path) -> Iterator[str]:
    run = new_run(shard, adamw, policy_of(name))
    train(run, 0, 2)
    dcp.save(state_of(run, flat=is_flat(name), for_load=False), checkpoint_id=folder / name)
    full = gathered(run)
    if dist.get_rank() == 0:
        torch.save(full, folder / f"{name}.pt")
        yield from (f"{fqn} has no moments" for fqn, state in full["optimizer"]["state"].items() if len(state) != 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if DEVICE_TYPE != "cpu" and torch.accelerator.device_count() < max(WORLD_SIZES):
        pytest.skip(f"needs {max(WORLD_SIZES)} devices")
    folder = tmp_path_factory.mktemp("checkpoints")
    for world_size in WORLD_SIZES:
        spawn(run_save, world_size, folder, folder)
    return folder


# Loading -------------------------------------------------------------------------------------------------------------


def loads(name: str, shard: models.ShardNet, saved_by: str, folder: Path) -> Iterator[str]:
    """Into a fresh process that has other parameters and no state."""
    run = new_run(shard, adamw, policy_of(name), seed=1)
    state = state_of(run, flat=is_flat(saved_by), for_load=True)
    dcp.load(state, checkpoint_id=folder / saved_by)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    found = gathered(run)
    if dist.get_rank() == 0:
        assert_same(torch.load(folder / f"{saved_by}.pt", weights_only=False), found)
    assert_at_home(run.optimizer)
    yield from ()


def run_load(rank: int, world_size: int, folder: Path, every: int) -> None:
    del rank
    pairs = [(name, saved_by) for name in layouts_of(world_size) for saved_by in LAYOUTS]
    run_cases(
        {
            f"{saved_by} to {name}": partial(loads, name, layouts_of(world_size)[name], saved_by, folder)
            for name, saved_by in pairs
        },
        every,
    )


@some_cases(dict.fromkeys(WORLD_SIZES, 7))
def test_every_layout_is_loaded_by(world_size: int, every: int, checkpoints: Path, tmp_path: Path) -> None:
    spawn(run_load, world_size, tmp_path, checkpoints, every)


# State that not every rank can tell --------------------------------------------------------------------------------


def lacks_a_parameter(folder: Path) -> Iterator[str]:
    """The checkpoint has no state for ``small``, whose shard is empty on some ranks: no rank may have some then."""
    run = new_run(models.shard_even, momentum, TINY)
    train(run, 0, 1)
    state = state_of(run, flat=False, for_load=False)
    for name in ("small.weight", "small.bias"):
        del state["optimizer"]["state"][name]
    dcp.save(state, checkpoint_id=folder)
    resumed = new_run(models.shard_even, momentum, TINY, seed=1)
    state = state_of(resumed, flat=False, for_load=True)
    load(state, checkpoint_id=folder, planner=LoadPlanner(allow_missing=["optimizer.state.small.*"]))
    set_optimizer_state_dict(resumed.model, resumed.optimizer, state["optimizer"])
    found = get_optimizer_state_dict(resumed.model, resumed.optimizer)["state"]
    yield from (f"{name} has state" for name in found if name.startswith("small"))


def momentum(net: models.Net) -> Optimizer:
    """Without a counter, which would say on every rank whether it was loaded."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def run_lacking(rank: int, world_size: int, folder: Path) -> None:
    del rank, world_size
    run_cases({"a parameter": partial(lacks_a_parameter, folder)})


def test_ranks_agree_on_what_was_not_loaded(tmp_path: Path) -> None:
    spawn(run_lacking, 4, tmp_path, tmp_path / "checkpoint")
