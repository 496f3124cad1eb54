"""Gathers read the newest parameters: random programs of uneven shards, some kept on the device, by fused kernels too.

Nothing here looks at parameters through torch's functions, which would make the window load all of them again.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed import models
from tests.distributed.launch import spawn
from tests.distributed.models import Net, batch, build
from tests.overlapping import POLICIES
from tests.parity import attach, leaves, same_bits
from tests.policies import with_share

pytestmark = pytest.mark.distributed

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "for-loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
}


class Training:
    """One side of a comparison. What it has seen of losses and norms is kept."""

    def __init__(self, make: Callable[[Any], Optimizer], fields: dict[str, Any] | None) -> None:
        self.net: Net = build(models.shard_even)
        self.optimizer = make(self.net.parameters())
        self.seen: list[Tensor] = []
        self.at = 0
        self.clips = True
        if fields is not None:
            policy = with_share(**{"bucket_bytes": 1024, "passing": 5 * 1024, "parameters": True, **fields})
            attach(self.optimizer, model=self.net, policy=policy)
        with torch.no_grad():
            self.params = [local_shard(param) for param in self.net.parameters()]
        self.kept = [param.to_local().detach() for param in self.net.parameters()]
        self.kept_data = [param.data for param in self.net.parameters()]

    def call(self, *names: str) -> None:
        """What a plain optimizer has nothing of."""
        for name in names:
            getattr(self.optimizer, name, lambda: None)()

    def backward(self) -> None:
        self.at += 1
        loss = self.net(batch(100 * self.at + self.net.data_rank))
        loss.backward()
        self.seen.append(loss.detach())

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self) -> Iterator[Tensor]:
        self.call("synchronize")
        for param in self.net.parameters():
            yield local_shard(param)
            for _, value in sorted(self.optimizer.state.get(param, {}).items()):
                yield from leaves(value)


def step(training: Training) -> None:
    training.backward()
    training.end_step()


def step_with_norm(training: Training) -> None:
    training.backward()
    if training.clips:
        norm = nn.utils.clip_grad_norm_(training.net.parameters(), 0.5)
        training.seen.append(norm.full_tensor())
    training.end_step()


def two_micro_batches(training: Training) -> None:
    if training.clips:  # else their number must not change
        training.backward()
    step(training)


def evaluate(training: Training) -> None:
    with torch.no_grad():
        training.seen.append(training.net(batch(999), extra=training.at % 2 == 0))


def evaluate_in_inference(training: Training) -> None:
    with torch.inference_mode():
        training.seen.append(training.net(batch(998)).clone())


def write_aliases(training: Training) -> None:
    """Through tensors that were taken after attaching: nobody is asked for new ones."""
    training.call("synchronize")
    torch._foreach_mul_(training.kept, 0.99)


def write_data(training: Training) -> None:
    training.call("synchronize")
    for data in training.kept_data:
        data.mul_(0.98)


def write_before_step(training: Training) -> None:
    """When loads for the step may have been issued."""
    training.backward()
    if training.clips:
        write_aliases(training)
    training.end_step()


def leave(training: Training) -> None:
    """What stays on the device leaves it, and is copied for a gather from where it went."""
    training.call("offload_states")
    evaluate(training)


def leave_and_release(training: Training) -> None:
    training.call("offload_states", "release_states")
    evaluate(training)


USUAL = (step, step, step, step_with_norm, two_micro_batches, evaluate, evaluate_in_inference)
WRITES = (write_aliases, write_data, write_before_step)
LEAVES = (leave, leave, leave_and_release)  # what is kept lives elsewhere then: aliases are of memory that it had


def run_program(number: int) -> list[str]:
    """What differs from a plain optimizer after each operation of a program."""
    choose = random.Random(number)
    overlap, made_by = choose.choice(list(POLICIES)), choose.choice([*OPTIMIZERS, "fused", "fused"])
    fields = {**POLICIES[overlap], "staying": choose.choice([0, 3_000, 9_000, 20_000])}
    operations = [step, *choose.choices((*USUAL, *choose.choice([WRITES, LEAVES])), k=9), evaluate, step]
    looks_each_time = choose.random() < 0.6
    sides = [Training(OPTIMIZERS[made_by], one) for one in (None, fields)]
    for at, operation in enumerate(operations):
        for side in sides:
            side.clips = overlap != "iteration"
            operation(side)
        plain, ours = ([*side.seen] for side in sides)
        if looks_each_time or at == len(operations) - 1:
            plain, ours = ([*one, *side.everything()] for one, side in zip((plain, ours), sides, strict=True))
        same = [same_bits(one, other) for one, other in zip(plain, ours, strict=True)]
        if not all(same):
            names = [one.__name__ for one in operations[: at + 1]]
            return [f"program {number}: {made_by}, {fields}, {names}: {same.count(False)} of {len(same)} differ"]
    return []


def run_programs(rank: int, world_size: int, first: int, count: int) -> None:
    """Each rank runs all of them: what differs on one differs in its losses on all, or is reported at the end."""
    del rank, world_size
    found = [problem for number in range(first, first + count) for problem in run_program(number)]
    assert not found, "\n".join(found)


LONG = [(size, first, 25) for size in (1, 2, 3, 4) for first in range(0, 125, 25)]


@pytest.mark.parametrize(
    ("world_size", "first", "count"),
    [(1, 0, 10), (2, 0, 6), *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)],
)
def test_any_program(world_size: int, first: int, count: int, tmp_path: Path) -> None:
    spawn(run_programs, world_size, tmp_path, 1000 * world_size + first, count)
