"""Overlap on several ranks, where they differ in what they have room for, and optimizers that see more than a shard."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from tests.cpu.test_elastic import Device
from tests.distributed.launch import mesh, run_cases, slow_updates, spawn
from tests.overlapping import POLICIES, SIZES, Habit, Loop, Net, adamw, look, same
from tests.policies import with_share

pytestmark = pytest.mark.distributed

Make = Callable[[Any], Optimizer]


def run_wide(rank: int, world_size: int) -> None:
    """Large enough for several streams to really run beside each other."""
    del rank
    slow_updates()
    device_mesh = mesh(world_size)
    wide = partial(Net, width=128)
    sizes = {"bucket_bytes": 128 << 10, "passing": 640 << 10}
    run_cases(
        {
            name: partial(compare, device_mesh, adamw, with_share(**fields, **sizes), net=wide, micro_batches=2)
            for name, fields in POLICIES.items()
        }
    )


@pytest.mark.long
def test_wide_model_with_micro_batches(tmp_path: Path) -> None:
    spawn(run_wide, 2, tmp_path)


def compare(
    device_mesh: DeviceMesh, make: Make, policy: OffloadPolicy, habit: Habit | None = None, **kwargs: Any
) -> list[str]:
    plain, offloaded = (Loop(device_mesh, make, one, **kwargs).train(8, habit) for one in (None, policy))
    return [] if same(plain, offloaded) else ["other bits"]


# Updates that are collectives: all ranks have to come to them between the same two reductions ------------------------


def muon(params: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02, ns_steps=1)


def other_room_on_each_rank(rank: int, device_mesh: DeviceMesh) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        Device(patch, group_bytes=60_000 if rank else 2_000)
        return compare(device_mesh, muon, with_share(passing="auto", bucket_bytes=1024, overlap="iteration"))


def other_state_stays_on_each_rank(device_mesh: DeviceMesh) -> list[str]:
    """Of 51 rows one rank has 26, and 25 the other, whose momentum is 3,200 bytes."""
    return compare(device_mesh, muon, with_share(bucket_bytes=1024, passing=5 * 8192, staying=3_300))


def run_muon(rank: int, world_size: int) -> None:
    device_mesh = mesh(world_size)
    run_cases(
        {
            "room": partial(other_room_on_each_rank, rank, device_mesh),
            "staying": partial(other_state_stays_on_each_rank, device_mesh),
        }
    )


def test_collective_updates_where_ranks_differ(tmp_path: Path) -> None:
    spawn(run_muon, 2, tmp_path)


# An optimizer that is evaluated with, too ---------------------------------------------------------------------------


def schedule_free(params: Sequence[nn.Parameter]) -> Optimizer:
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=1e-2, warmup_steps=3)
    optimizer.train()
    return optimizer


def evaluate(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    if step in (2, 5):
        loop.optimizer.eval()  # type: ignore[attr-defined]
        look(loop)
        loop.optimizer.train()  # type: ignore[attr-defined]


def run_schedule_free(rank: int, world_size: int) -> None:
    del rank
    run_cases({"schedulefree": partial(compare, mesh(world_size), schedule_free, with_share(**SIZES), evaluate)})


def test_a_schedule_free_optimizer(tmp_path: Path) -> None:
    spawn(run_schedule_free, 3, tmp_path)
