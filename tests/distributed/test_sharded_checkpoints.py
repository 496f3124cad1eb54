"""Saving and loading offloaded state as people do it, and what it is: torch's state-dict functions, torch.save.

A load has to give what was saved, and training goes on as if it had not been interrupted, bit by bit. In
the end asynchronous saves by several ranks, of which one fails.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager
from fsdp_offload.checkpoint import get_optimizer_state_dict as get_ours
from fsdp_offload.fsdp.dtensor import has_inner_tensors
from tests.async_writers import FailingWriter, HeldWriter, copied, loaded, not_the_same
from tests.distributed import models
from tests.distributed.launch import agree, mesh, spawn, spawn_cases, this_device
from tests.distributed.models import Net, batch, build, decay_groups
from tests.parity import Run, assert_at_home, attach, differences, local, params_of
from tests.tiers import some_cases, world_sizes

pytestmark = pytest.mark.distributed

TINY = OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024)
SOME_KEPT = OffloadPolicy(bucket_bytes=1024, device_bytes=9 * 1024)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)

MakeOptimizer = Callable[[Net], Optimizer]


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
def never_stopped(shard: models.ShardNet, steps: int) -> Run:
    """A plain run after so many steps, once on each rank for all that is compared with it: only to be looked at."""
    run = new_run(shard, adamw, None)
    train(run, 0, steps)
    return run


# Gathered, from one process to another --------------------------------------------------------------------------------


def resumes_full(
    *,
    source_policy: OffloadPolicy | None = TINY,
    target_policy: OffloadPolicy | None = TINY,
    shard: models.ShardNet = models.shard_even,
    target_steps: int = 0,
) -> Iterator[str]:
    """Train, gather, load into a new model and optimizer (perhaps in use already), train on; as without a stop."""
    source = new_run(shard, adamw, source_policy)
    target = new_run(shard, adamw, target_policy, seed=1)
    train(source, 0, 3)
    train(target, 7, 7 + target_steps)
    saved_model = get_model_state_dict(source.model, options=FULL)
    saved = get_optimizer_state_dict(source.model, source.optimizer, options=FULL)
    assert bool(saved) == (dist.get_rank() == 0)
    sent = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(target.model, saved_model, options=sent)
    set_optimizer_state_dict(target.model, target.optimizer, saved, options=sent)
    for stage, last in (("loaded", 3), ("after the next step", 4), ("later", 7)):
        train(target, {3: 3, 4: 3, 7: 4}[last], last)
        yield from compared(never_stopped(shard, last), target, stage)
    if target_policy is not None:  # on the CPU, torch's own load_state_dict keeps the tensors that it is given
        train(source, 3, 7)
        yield from compared(never_stopped(shard, 7), source, "source, trained on")


def compared(plain: Run, other: Run, stage: str) -> Iterator[str]:
    tidy_groups(plain.optimizer)
    tidy_groups(other.optimizer)
    yield from agree(f"{stage}: {problem}" for problem in differences(plain, other))[:3]
    if other.is_offloaded:
        assert_at_home(other.optimizer)


def tidy_groups(optimizer: Optimizer) -> None:
    """torch's own load puts ``params`` last, and its broadcast makes lists of tuples; neither is a difference."""
    for group in optimizer.param_groups:
        entries = {
            k: tuple(group[k]) if isinstance(group[k], list) and k != "params" else group[k] for k in sorted(group)
        }
        group.clear()
        group.update(entries)


CASES: dict[str, dict[str, Any]] = {
    "offloaded to offloaded, in use": {"target_steps": 2},
    "offloaded to plain": {"target_policy": None},
    "plain to offloaded": {"source_policy": None},
    "TP": {"shard": models.shard_tensor_parallel},
    "some kept": {"source_policy": SOME_KEPT},
}
"""State of other classes, and other ways to save it, are in ``test_resumes.py``, files of ``dcp`` in ``same_files``."""


@some_cases({2: 2})
def test_training_resumes_where_it_was_saved(world_size: int, every: int, tmp_path: Path) -> None:
    cases = {name: partial(resumes_full, **options) for name, options in CASES.items()}
    spawn_cases(cases, world_size, tmp_path, every)


def run_eight_bits(rank: int, world_size: int) -> None:
    torch.compiler.set_stance("force_eager")
    make, found = pytest.importorskip("torchao.optim").AdamW8bit, []
    for policy in (None, TINY):
        torch.manual_seed(0)
        net = torch.nn.Linear(64, 128, device=this_device())  # large enough for 8 bits, on each rank
        fully_shard(net, mesh=mesh(world_size))
        optimizer = make(net.parameters(), lr=1e-2)
        if policy is not None:
            attach(optimizer, model=net, policy=policy)
        net(torch.ones(2, 64, device=this_device())).sum().backward()
        optimizer.step()
        assert has_inner_tensors(optimizer.state[net.weight]["exp_avg"])
        found.append(get_optimizer_state_dict(net, optimizer, options=FULL))
    assert (rank == 0) == bool(found[1])
    assert not list(not_the_same(*found))


def test_state_of_eight_bits_is_gathered(tmp_path: Path) -> None:
    """Wrappers inside DTensors, of a class that moves as a whole."""
    spawn(run_eight_bits, 2, tmp_path)


# What users find in optimizer.state ----------------------------------------------------------------------------------


def keys_are_the_same_on_every_rank(make: MakeOptimizer) -> Iterator[str]:
    """A full state dict is gathered tensor by tensor in this order: ranks that disagree wait for each other forever.

    What stays on the device differs between ranks: the last shards are shorter or empty.
    """
    run = new_run(models.shard_even, make, SOME_KEPT)
    train(run, 0, 1)
    names = {param: name for name, param in run.params.items()}
    mine = [(names[param], list(state)) for param, state in run.optimizer.state.items()]
    if sorted(name for name, _ in mine) != sorted(names[param] for param in params_of(run.optimizer)):
        yield f"there is state for {mine}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if everyone[0] != mine:
        yield f"keys are {[name for name, _ in mine]}, on rank 0 {[name for name, _ in everyone[0]]}"


def muon(net: Net) -> optim.Optimizer:
    return optim.Muon([net.embed.weight, net.blocks[0].up.weight, net.odd.weight], ns_steps=1)


def fused_sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def fused_sgd_works() -> Iterator[str]:
    """Without offload torch has no sharding rule for this kernel; offloaded it runs on locals, as on plain tensors."""
    run = new_run(models.shard_even, lambda net: fused_sgd(net.parameters()), TINY)
    plain = [torch.nn.Parameter(local(param).detach().clone()) for param in run.model.parameters()]
    reference = fused_sgd([param for param in plain if param.numel()])
    for step in range(3):
        run.model(batch(step * 8 + run.model.data_rank)).backward()
        for param, twin in zip(run.model.parameters(), plain, strict=True):
            twin.grad = local(param.grad).clone()
        for optimizer in (run.optimizer, reference):
            optimizer.step()
        run.model.zero_grad()
    for (name, param), twin in zip(run.model.named_parameters(), plain, strict=True):
        if not torch.equal(local(param), twin):
            yield f"{name} differs"


STATE_CASES = {
    "same keys, some kept": partial(keys_are_the_same_on_every_rank, adamw),
    "same keys, Muon, some kept": partial(keys_are_the_same_on_every_rank, muon),
    "fused SGD": fused_sgd_works,
}


def test_state_on_every_rank(tmp_path: Path) -> None:
    spawn_cases(STATE_CASES, 4, tmp_path)


# Asynchronous saves: the planner's collectives run in the writing threads, so they have a process group of their own --
#
# That every rank's part of every file is the state of the call is the axis ``save`` of the conformance suite, and
# ``tests/core/test_saves.py`` where writers are held.


SPARE = replace(TINY, snapshot_bytes=1 << 30)


def state_with(run: Run, step: int) -> dict[str, Any]:
    optimizer = get_ours(run.model, run.optimizer)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer, "step": step}


def fails_on_one_rank(folder: Path, policy: OffloadPolicy) -> Iterator[str]:
    """All ranks are told, none of them waits for ever, and the next save is complete."""
    plain, run = (new_run(models.shard_even, adamw, chosen) for chosen in (None, policy))
    group = dist.new_group(backend="gloo")
    stager, kept = ArenaStager(run.optimizer), []
    for step in range(3):
        kind = FailingWriter if dist.get_rank() == dist.get_world_size() - 1 else HeldWriter
        writer = kind(folder / f"bad{step}")
        future = dcp.async_save(state_with(run, step), storage_writer=writer, async_stager=stager, process_group=group)
        writer.let_go()
        for side in (plain, run):
            train(side, step, step + 1)
        kept.append(future)
        if "no space left on device" not in str(future.exception()):
            yield f"save {step} ended with {future.exception()!r}"
    yield from compared(plain, run, "after saves that failed")
    state = copied(state_with(run, 4))
    dcp.async_save(state_with(run, 4), checkpoint_id=folder / "good", async_stager=stager, process_group=group).result()
    yield from not_the_same(state, loaded(folder / "good", state))
    if list(folder.glob("bad*/.metadata")):
        yield "a checkpoint that failed looks complete"


@world_sizes(3, 2)
def test_a_writer_that_fails_on_one_rank(world_size: int, tmp_path: Path) -> None:
    cases = {name: partial(fails_on_one_rank, tmp_path / name, one) for name, one in (("all", SPARE), ("none", TINY))}
    spawn_cases(cases, world_size, tmp_path)
