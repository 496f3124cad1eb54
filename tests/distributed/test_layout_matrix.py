"""Any layout to any layout: what is saved by some ranks in some way is loaded by other ranks in any other way, bitwise.

In one of them optimizers are plain, which the functions for state dicts serve as well.

All layouts of one world size share a start of processes: one that saves, one that loads what every layout has saved.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
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

from fsdp_offload import OffloadPolicy, add_masters
from fsdp_offload.checkpoint import LoadPlanner, get_optimizer_state_dict, load, set_optimizer_state_dict
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, agree, spawn, spawn_cases, this_device
from tests.distributed.models import Net, build, decay_groups
from tests.distributed.test_fused_adam import fused_adam
from tests.distributed.test_sharded_checkpoints import FULL, TINY, adamw, new_run, train
from tests.fused_adam import BF16, MASTERS
from tests.parity import Run, assert_at_home, attach
from tests.state_dicts import assert_same
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed


class Layout(NamedTuple):
    ranks: int
    shard: models.ShardNet
    offload: bool = True


LAYOUTS = {
    "1 rank": Layout(1, models.shard_even),
    "2 ranks": Layout(2, models.shard_even),
    "2 ranks, Shard(1)": Layout(2, models.shard_columns),
    "3 ranks": Layout(3, models.shard_even),
    "4 ranks": Layout(4, models.shard_even),
    "4 ranks, HSDP": Layout(4, models.shard_hybrid),
    "4 ranks, TP and FSDP": Layout(4, models.shard_tensor_parallel),
    "3 ranks, plain": Layout(3, models.shard_columns, offload=False),
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


def fused(**options: Any) -> Callable[[Net], Optimizer]:
    return lambda net: fused_adam()(decay_groups(net), lr=1e-2, **options)


KINDS: dict[str, tuple[Callable[[Net], Optimizer], Any]] = {
    "AdamW": (adamw, None),
    "fp32 masters": (adamw, "fp32"),
    "remainders": (adamw, "remainder"),
    "FusedAdam": (fused(**MASTERS["fp32"]), None),
    "FusedAdam, remainders": (fused(**MASTERS["remainder"], exp_avg_dtype=BF16), None),
}
"""An optimizer, and masters beside it; but for the first, parameters are bf16."""


def run_of(name: str, kind: str, seed: int = 0) -> Run:
    make, masters = KINDS[kind]
    low = kind != "AdamW"
    net = build(LAYOUTS[name].shard, seed=seed, prepare=lambda net: net.bfloat16() if low else None)
    optimizer = make(net)
    if masters is not None:
        add_masters(optimizer, masters)
    if LAYOUTS[name].offload:
        attach(optimizer, model=net, policy=policy_of(name))
    return Run(net, optimizer, this_device(), torch.float32)


def state_of(run: Run, *, flat: bool, for_load: bool = False) -> dict[str, Any]:
    get = partial(get_optimizer_state_dict, for_load=for_load, flatten_optimizer_state_dict=flat)
    return {"model": get_model_state_dict(run.model), "optimizer": get(run.model, run.optimizer)}


def gathered(run: Run) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model, options=FULL),
        "optimizer": torch_get(run.model, run.optimizer, options=FULL),
    }


# Saving --------------------------------------------------------------------------------------------------------------


def saves(name: str, kind: str, folder: Path) -> Iterator[str]:
    """A checkpoint for each layout and kind and, gathered by torch, what it must contain."""
    run = run_of(name, kind)
    train(run, 0, 2)
    dcp.save(state_of(run, flat=is_flat(name)), checkpoint_id=folder / name)
    full = gathered(run)
    if dist.get_rank() == 0:
        torch.save(full, folder / f"{name}.pt")
        expected = {"exp_avg", "exp_avg_sq"} | ({"master_param"} if kind != "AdamW" else set())
        states = full["optimizer"]["state"].items()
        yield from (f"{fqn} has {[*state]}" for fqn, state in states if state.keys() - {"step"} != expected)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Path]:
    """Return a function that saves those of some kinds, once."""
    if DEVICE_TYPE != "cpu" and torch.accelerator.device_count() < max(WORLD_SIZES):
        pytest.skip(f"needs {max(WORLD_SIZES)} devices")
    folder, saved = tmp_path_factory.mktemp("checkpoints"), set[str]()

    def save(kinds: Sequence[str]) -> Path:
        new = [kind for kind in kinds if kind not in saved]
        for world_size in WORLD_SIZES if new else ():
            cases = itertools.product(layouts_of(world_size), new)
            named = {f"{name}, {kind}": partial(saves, name, kind, folder / kind) for name, kind in cases}
            spawn_cases(named, world_size, folder)
        saved.update(new)
        return folder

    return save


# Loading -------------------------------------------------------------------------------------------------------------


def loads(name: str, saved_by: str, kind: str, folder: Path) -> Iterator[str]:
    """Into a fresh process that has other parameters and no state; it trains on."""
    run = run_of(name, kind, seed=1)
    state = state_of(run, flat=is_flat(saved_by), for_load=True)
    dcp.load(state, checkpoint_id=folder / saved_by)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    full = torch.load(folder / f"{saved_by}.pt", weights_only=False)
    found = gathered(run)
    if dist.get_rank() == 0:
        assert_same(full, found)
    if run.is_offloaded:
        assert_at_home(run.optimizer)
    else:  # each rank takes its part of a full one
        train(run, 2, 3)
        set_optimizer_state_dict(run.model, run.optimizer, full["optimizer"])
        found = gathered(run)
        if dist.get_rank() == 0:
            assert_same(full["optimizer"], found["optimizer"])
    train(run, 2, 3)
    yield from ()


@some_cases(dict.fromkeys(WORLD_SIZES, 9))
def test_every_layout_is_loaded_by(
    world_size: int, every: int, checkpoints: Callable[[Sequence[str]], Path], tmp_path: Path
) -> None:
    kinds = [*KINDS] if every == 1 else ["AdamW"]
    folder, every_case = checkpoints(kinds), itertools.product(layouts_of(world_size), LAYOUTS, kinds)
    cases = {f"{a} from {b}, {kind}": partial(loads, a, b, kind, folder / kind) for a, b, kind in every_case}
    spawn_cases(cases, world_size, tmp_path, every)


# State that not every rank can tell --------------------------------------------------------------------------------


def run_lacking(rank: int, world_size: int, folder: Path) -> None:
    """The checkpoint has no state for ``small``, whose shard is empty on some ranks: no rank may have some then."""

    def momentum(net: Net) -> Optimizer:
        """Without a counter, which would say on every rank whether it was loaded."""
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    run, resumed = (new_run(models.shard_even, momentum, TINY, seed=seed) for seed in (0, 1))
    train(run, 0, 1)
    state = state_of(run, flat=False)
    for name in ("small.weight", "small.bias"):
        del state["optimizer"]["state"][name]
    dcp.save(state, checkpoint_id=folder)
    state = state_of(resumed, flat=False, for_load=True)
    load(state, checkpoint_id=folder, planner=LoadPlanner(allow_missing=["optimizer.state.small.*"]))
    set_optimizer_state_dict(resumed.model, resumed.optimizer, state["optimizer"])
    found = get_optimizer_state_dict(resumed.model, resumed.optimizer)["state"]
    wanted = {name for name in resumed.params if not name.startswith("small")}  # empty shards of others, too
    assert not agree(found.keys() ^ wanted)


def test_ranks_agree_on_what_was_not_loaded(tmp_path: Path) -> None:
    spawn(run_lacking, 4, tmp_path, tmp_path / "checkpoint")
