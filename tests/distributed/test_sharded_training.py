"""Sharded models train the same with and without offload: every parameter, state tensor and counter, after each step.

One set of processes for each world size runs all of its cases one after the other; an error names the case.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from tests.distributed import models
from tests.distributed.launch import agree, run_cases, spawn, this_device
from tests.distributed.models import Net, batch, build, decay_groups
from tests.parity import Pair, Run, assert_at_home, differences
from tests.policies import with_share
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed

# Adam's state of 128 elements is a bucket, so most shards below are cut; four buckets share the ring.
TINY = with_share(bucket_bytes=1024, passing=5 * 1024)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train. ``attach_at`` is the step before which the optimizer is offloaded."""

    optimizer: Callable[[Net], Optimizer]
    shard: models.ShardNet = models.shard_even
    policy: OffloadPolicy = TINY
    tied: bool = False
    prepare: Callable[[Net], Any] | None = None
    clip: float | None = None
    accumulate: int = 1
    uses_extra: Callable[[int], bool] = lambda step: True
    attach_at: int = 0
    before_attach: Callable[[Net], Any] = lambda net: None
    at_step: tuple[int, Callable[[Run], Any]] | None = None
    steps: int = 10


def train_step(case: Case, run: Run, step: int) -> float:
    net = run.model
    if case.at_step is not None and case.at_step[0] == step:
        case.at_step[1](run)
    total = 0.0
    for micro in range(case.accumulate):
        net.set_requires_gradient_sync(micro == case.accumulate - 1)
        seed = (step * case.accumulate + micro) * 8 + net.data_rank
        loss = net(batch(seed), extra=case.uses_extra(step))
        loss.backward()
        total += loss.item()
    if case.clip is not None:
        clip_grad_norm_(net.parameters(), case.clip)
    run.optimizer.step()
    net.zero_grad()
    return total


def run_case(case: Case) -> Iterator[str]:
    """What is different, in words; nothing if all is the same."""
    runs = []
    for _ in range(2):
        net = build(case.shard, tied=case.tied, prepare=case.prepare)
        runs.append(Run(net, case.optimizer(net), this_device(), torch.float32))
    pair = Pair(*runs)
    for step in range(case.steps):
        if step == case.attach_at:
            pair.each(lambda run: case.before_attach(run.model))
            pair.attach(case.policy, with_model=True)
        losses = pair.each(partial(train_step_of(case), step=step))
        found = [f"step {step}: {problem}" for problem in differences(*pair)]
        if losses[0] != losses[1]:
            found.append(f"step {step}: the loss is {losses[0]} and {losses[1]}")
        found += [f"step {step}: {param} has state on a device" for param in state_not_at_home(pair.offloaded)]
        problems = agree(found)
        if problems:
            yield from problems[:4]
            return
        pair.steps += 1
    yield from nothing_shown(pair.plain, case)


def train_step_of(case: Case) -> Callable[..., float]:
    return partial(train_step, case)


def state_not_at_home(run: Run) -> Iterator[str]:
    if run.is_offloaded:
        try:
            assert_at_home(run.optimizer)
        except AssertionError as error:
            yield str(error)


def nothing_shown(run: Run, case: Case) -> Iterator[str]:
    """A training that leaves its parameters where they were shows nothing."""
    torch.manual_seed(0)
    start = build(case.shard, tied=case.tied, prepare=case.prepare)
    same = [
        name
        for (name, param), before in zip(run.model.named_parameters(), start.parameters(), strict=True)
        if param.to_local().numel() and param.requires_grad and torch.equal(param.to_local(), before.to_local())
    ]
    optimized = {id(param) for group in run.optimizer.param_groups for param in group["params"]}
    yield from (f"{name} was not trained" for name in same if id(dict(run.model.named_parameters())[name]) in optimized)


# Optimizers ----------------------------------------------------------------------------------------------------------


def adamw(net: Net, **options: Any) -> Optimizer:
    return optim.AdamW(net.parameters(), lr=1e-2, **options)


def adamw_groups(net: Net, **options: Any) -> Optimizer:
    return optim.AdamW(decay_groups(net), lr=1e-2, **options)


def sgd(net: Net, **options: Any) -> Optimizer:
    return optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, **options)


def matrices_of(net: Net) -> list[nn.Parameter]:
    """Uneven and empty shards, but no matrix with fewer rows than ranks: on these torch's own Muon fails."""
    return [net.embed.weight, net.blocks[0].up.weight, net.blocks[0].down.weight, net.odd.weight]


def muon(net: Net) -> Optimizer:
    return optim.Muon(matrices_of(net), lr=1e-2, ns_steps=2)


def muon_groups(net: Net) -> Optimizer:
    """Two groups that take turns in the model's order."""
    matrices = matrices_of(net)
    return optim.Muon([{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 3e-3}], lr=1e-2, ns_steps=2)


def schedule_free(net: Net, **options: Any) -> Optimizer:
    schedulefree = pytest.importorskip("schedulefree")
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=1e-2, warmup_steps=3, **options)
    optimizer.train()
    return optimizer


def of_class(cls: type[Optimizer], net: Net, **options: Any) -> Optimizer:
    return cls(net.parameters(), lr=1e-2, **options)


# What cases do in between --------------------------------------------------------------------------------------------


def freeze_some(net: Net) -> None:
    net.embed.weight.requires_grad_(False)
    net.blocks[1].up.weight.requires_grad_(False)
    net.small.bias.requires_grad_(False)


def unfreeze_embedding(run: Run) -> None:
    run.model.embed.weight.requires_grad_(True)


def evaluate(net: Net) -> None:
    """The root keeps its parameters gathered afterwards, and these are then registered in the model."""
    net.eval()
    with torch.no_grad():
        net(batch(0))
    net.train()


def evaluate_schedule_free(run: Run) -> None:
    run.optimizer.eval()
    evaluate(run.model)
    run.optimizer.train()


def change_by_hand(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.3


def every_third(step: int) -> bool:
    return step % 3 == 2


def not_at_first(step: int) -> bool:
    return step >= 4


SOME_RESIDENT = with_share(bucket_bytes=1024, passing=4096, staying=3000)
# Four ranks have 16, 16, 16 and 13 rows of the embedding: 1024 and 832 bytes of Muon's state.
LAST_RANK_RESIDENT = with_share(bucket_bytes=1024, passing=4096, staying=900)
WHOLE = OffloadPolicy(bucket_bytes=1 << 20)

EVERYWHERE: dict[str, Case] = {
    "AdamW": Case(optimizer=adamw),
    "AdamW foreach, groups, clipping": Case(optimizer=partial(adamw_groups, foreach=True), clip=0.1),
    "AdamW fused, groups": Case(optimizer=partial(adamw_groups, fused=True), clip=0.1),
    "SGD momentum": Case(optimizer=sgd, shard=models.shard_root_only),
}
"""For every world size; at 3 and 4 ranks shards are uneven and empty."""

SHARDINGS: dict[str, Case] = {
    "Shard(1)": Case(optimizer=partial(adamw_groups, foreach=True), shard=models.shard_columns, clip=0.1),
    "mixed precision": Case(optimizer=partial(adamw, fused=True), shard=models.shard_mixed_precision, clip=0.1),
    "bfloat16 parameters": Case(optimizer=partial(adamw, foreach=True), shard=models.shard_bfloat16),
}

TRAINING: dict[str, Case] = {
    "one bucket": Case(optimizer=adamw, policy=WHOLE),
    "some resident": Case(optimizer=partial(adamw_groups, foreach=True), policy=SOME_RESIDENT),
    "serial": Case(optimizer=adamw, policy=OffloadPolicy(bucket_bytes=1024, serial=True), steps=4),
    "capturable lr tensor": Case(optimizer=lambda net: optim.AdamW(net.parameters(), lr=torch.tensor(1e-2))),
    "AdamW amsgrad": Case(optimizer=partial(adamw, foreach=True, amsgrad=True)),
    "frozen": Case(optimizer=partial(adamw_groups, foreach=True), prepare=freeze_some),
    "frozen, thawed later": Case(optimizer=adamw, prepare=freeze_some, at_step=(5, unfreeze_embedding)),
    "sometimes without gradient": Case(optimizer=partial(adamw, foreach=True), uses_extra=every_third),
    "late first gradient": Case(optimizer=partial(adamw_groups, fused=True), uses_extra=not_at_first),
    "tied": Case(optimizer=partial(adamw, fused=True), tied=True, clip=0.1),
    "accumulation": Case(optimizer=partial(adamw, foreach=True), accumulate=3, clip=0.1),
    "attached after steps": Case(optimizer=partial(adamw, foreach=True), attach_at=4),
    "attached after eval": Case(optimizer=adamw, attach_at=0, before_attach=evaluate),
    "attached after steps and eval": Case(optimizer=partial(adamw, fused=True), attach_at=3, before_attach=evaluate),
    "changed by hand": Case(optimizer=adamw_groups, at_step=(5, change_by_hand)),
}

# Muon's collectives take their time, so these take fewer steps. Its state must be in the same order on every rank,
# although shards that differ in size are packed, and chosen to stay on the device, differently.
OPTIMIZERS: dict[str, Case] = {
    "Muon": Case(optimizer=muon, steps=5),
    "Muon, Shard(1)": Case(optimizer=muon, shard=models.shard_columns, steps=3),
    "Muon, two groups": Case(optimizer=muon_groups, steps=3),
    "Muon, some resident": Case(optimizer=muon, policy=LAST_RANK_RESIDENT, steps=3),
    "schedulefree": Case(optimizer=partial(schedule_free, foreach=False), at_step=(5, evaluate_schedule_free)),
    "schedulefree foreach": Case(optimizer=partial(schedule_free, foreach=True), at_step=(5, evaluate_schedule_free)),
    "RMSprop centered": Case(optimizer=partial(of_class, optim.RMSprop, momentum=0.5, centered=True)),
}

SEVERAL_DIMS: dict[str, Case] = {
    "HSDP": Case(optimizer=partial(adamw_groups, foreach=True), shard=models.shard_hybrid, clip=0.1),
    "HSDP fused": Case(optimizer=partial(adamw, fused=True), shard=models.shard_hybrid, accumulate=2),
    "TP attached after steps": Case(optimizer=adamw, shard=models.shard_tensor_parallel, attach_at=3),
    "TP fused": Case(optimizer=partial(adamw_groups, fused=True), shard=models.shard_tensor_parallel),
    "HSDP Muon": Case(optimizer=muon, shard=models.shard_hybrid, steps=3),
}

CASES: dict[int, dict[str, Case]] = {
    1: EVERYWHERE,
    2: EVERYWHERE | SHARDINGS | TRAINING,
    3: EVERYWHERE,
    4: EVERYWHERE | SHARDINGS | OPTIMIZERS | SEVERAL_DIMS,
    8: {"HSDP": SEVERAL_DIMS["HSDP"]},
}


def run_training(rank: int, world_size: int, every: int) -> None:
    del rank
    run_cases({name: partial(run_case, case) for name, case in CASES[world_size].items()}, every)


@some_cases({1: 0, 2: 7, 3: 5, 4: 0, 8: 0})
def test_training_is_the_same_with_and_without_offload(world_size: int, every: int, tmp_path: Path) -> None:
    spawn(run_training, world_size, tmp_path, every)
