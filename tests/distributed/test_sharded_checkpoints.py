"""Saving and loading offloaded state as people do it: torch's state-dict functions, DCP, torch.save.

What is loaded has to be what was saved, and training has to go on as if it had not been interrupted, bit by bit.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from tests.distributed import models
from tests.distributed.launch import agree, run_cases, spawn, this_device
from tests.distributed.models import Net, batch, build, decay_groups
from tests.parity import Pair, Run, assert_at_home, attach, differences
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed

TINY = OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024)
SOME_KEPT = OffloadPolicy(bucket_bytes=1024, device_bytes=9 * 1024)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

MakeOptimizer = Callable[[Net], Optimizer]
Resume = Callable[[Run, Run, Path], None]


def adamw(net: Net, **options: Any) -> Optimizer:
    return optim.AdamW(decay_groups(net), lr=1e-2, **options)


def new_run(shard: models.ShardNet, make_optimizer: MakeOptimizer, policy: OffloadPolicy | None, seed: int = 0) -> Run:
    net = build(shard, seed=seed)
    run = Run(net, make_optimizer(net), this_device(), torch.float32)
    if policy is not None:
        attach(run.optimizer, model=net, policy=policy)
    return run


def train(run: Run, first: int, last: int) -> None:
    for step in range(first, last):
        run.model(batch(step * 8 + run.model.data_rank)).backward()
        run.optimizer.step()
        run.model.zero_grad()


@functools.cache
def never_stopped(shard: models.ShardNet, make_optimizer: MakeOptimizer, steps: int) -> Run:
    """A plain run after so many steps, once on each rank for all that is compared with it: only to be looked at."""
    run = new_run(shard, make_optimizer, None)
    train(run, 0, steps)
    return run


# Ways to get from one process to another -----------------------------------------------------------------------------


def resume_in_memory(source: Run, target: Run, folder: Path, options: StateDictOptions | None = None) -> None:
    del folder
    saved_model = copy_of(get_model_state_dict(source.model))
    saved = copy_of(get_optimizer_state_dict(source.model, source.optimizer, options=options))
    set_model_state_dict(target.model, saved_model)
    set_optimizer_state_dict(target.model, target.optimizer, saved, options=options)


def resume_full(source: Run, target: Run, folder: Path) -> None:
    """Gathered on rank 0, and sent from there to all."""
    del folder
    saved_model = get_model_state_dict(source.model, options=FULL)
    saved = get_optimizer_state_dict(source.model, source.optimizer, options=FULL)
    assert bool(saved) == (dist.get_rank() == 0)
    sent = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(target.model, saved_model, options=sent)
    set_optimizer_state_dict(target.model, target.optimizer, saved, options=sent)


def resume_dcp(source: Run, target: Run, folder: Path, options: StateDictOptions | None = None) -> None:
    dcp_save(source, folder, options)
    dcp_load(target, folder, options)


def dcp_save(run: Run, folder: Path, options: StateDictOptions | None = None) -> None:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    dcp.save({"model": get_model_state_dict(run.model), "optimizer": optimizer}, checkpoint_id=folder)


def dcp_load(run: Run, folder: Path, options: StateDictOptions | None = None) -> None:
    saved = {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
    }
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(run.model, saved["model"])
    set_optimizer_state_dict(run.model, run.optimizer, saved["optimizer"], options=options)


def resume_torch_save(source: Run, target: Run, folder: Path) -> None:
    """Each rank its own file, with the state dicts of model and optimizer as they are."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rank{dist.get_rank()}.pt"
    torch.save({"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}, path)
    saved = torch.load(path, weights_only=False)
    target.model.load_state_dict(saved["model"])
    target.optimizer.load_state_dict(saved["optimizer"])


def resume_state_dict(source: Run, target: Run, folder: Path) -> None:
    """Straight from optimizer to optimizer: what is loaded must not stay connected with what it was loaded from."""
    del folder
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())


def copy_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {
        key: copy_of(value)
        if isinstance(value, dict)
        else value.detach().clone()
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for key, value in state_dict.items()
    }


WAYS: dict[str, Resume] = {
    "in memory": resume_in_memory,
    "in memory, flat": partial(resume_in_memory, options=FLAT),
    "full": resume_full,
    "dcp": resume_dcp,
    "dcp, flat": partial(resume_dcp, options=FLAT),
    "torch.save": resume_torch_save,
    "state_dict": resume_state_dict,
}


def resumes(
    way: Resume,
    folder: Path,
    *,
    source_policy: OffloadPolicy | None = TINY,
    target_policy: OffloadPolicy | None = TINY,
    shard: models.ShardNet = models.shard_even,
    make_optimizer: MakeOptimizer = adamw,
    target_steps: int = 0,
) -> Iterator[str]:
    """Train, save, load into a new model and optimizer (perhaps in use already), train on; against no interruption."""
    source = new_run(shard, make_optimizer, source_policy)
    target = new_run(shard, make_optimizer, target_policy, seed=1)
    train(source, 0, 3)
    train(target, 7, 7 + target_steps)
    way(source, target, folder)
    for stage, last in (("loaded", 3), ("after the next step", 4), ("later", 7)):
        train(target, {3: 3, 4: 3, 7: 4}[last], last)
        yield from compared(never_stopped(shard, make_optimizer, last), target, stage)
    if target_policy is not None:  # on the CPU, torch's own load_state_dict keeps the tensors that it is given
        train(source, 3, 7)
        yield from compared(never_stopped(shard, make_optimizer, 7), source, "source, trained on")


def compared(plain: Run, other: Run, stage: str) -> Iterator[str]:
    tidy_groups(plain.optimizer)
    tidy_groups(other.optimizer)
    yield from agree(f"{stage}: {problem}" for problem in differences(*Pair(plain, other)))[:3]
    if other.is_offloaded:
        assert_at_home(other.optimizer)


def tidy_groups(optimizer: Optimizer) -> None:
    """torch's own load puts ``params`` last, and its broadcast makes lists of tuples; neither is a difference."""
    for group in optimizer.param_groups:
        entries = {key: tuple(group[key]) if key == "betas" else group[key] for key in sorted(group)}
        group.clear()
        group.update(entries)


def cases(folder: Path) -> dict[str, Callable[[], Iterator[str]]]:
    """What the conformance suite, which saves by torch's functions and ``dcp`` alone, does not go through."""
    ways: dict[str, dict[str, Any]] = {
        "offloaded to offloaded, in use": {"target_steps": 2},
        "offloaded to plain": {"target_policy": None},
        "plain to offloaded": {"source_policy": None},
    }
    found = {f"{name}, {how}": partial(resumes, way, **ways[how]) for name, way in WAYS.items() for how in ways}
    found["dcp, Shard(1)"] = partial(resumes, resume_dcp, shard=models.shard_columns)
    found["dcp, to some kept"] = partial(resumes, resume_dcp, target_policy=SOME_KEPT)
    found["full, TP"] = partial(resumes, resume_full, shard=models.shard_tensor_parallel)
    found["full, some kept"] = partial(resumes, resume_full, source_policy=SOME_KEPT)
    return {name: partial(case, folder / f"case{number}") for number, (name, case) in enumerate(found.items())}


def run_resume(rank: int, world_size: int, folder: Path, every: int) -> None:
    del rank, world_size
    run_cases(cases(folder), every)


@some_cases({2: 3})
def test_training_resumes_where_it_was_saved(world_size: int, every: int, tmp_path: Path) -> None:
    spawn(run_resume, world_size, tmp_path, tmp_path, every)
