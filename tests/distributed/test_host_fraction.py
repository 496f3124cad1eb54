"""A share updated on the host, on several ranks: uneven and empty shards, HSDP, every policy; the same on each rank."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from tests.distributed import models
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.models import build
from tests.distributed.test_sharded_training import TINY, Case, run_case
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, SIZES, Loop, same
from tests.parity import attach
from tests.policies import with_share
from tests.tiers import some_cases

pytestmark = [
    pytest.mark.distributed,
    # The plain optimizer is the reference. On a device it rounds differently; tests/gpu compares with copies there.
    pytest.mark.gloo,
]


def fused_adamw(params: Any) -> Optimizer:
    return optim.AdamW(params, lr=0.02, fused=True)


def of_net(net: nn.Module) -> Optimizer:
    return fused_adamw(net.parameters())


def with_fraction(fraction: float) -> OffloadPolicy:
    fields = {"bucket_bytes": TINY.bucket_bytes, "passing": 5 * TINY.bucket_bytes}
    return with_share(**fields, host_fraction=fraction)


def run_training(rank: int, world_size: int, every: int) -> None:
    del rank, world_size
    cases = {
        f"{how}, {fraction}": Case(optimizer=of_net, policy=with_fraction(fraction), **more)
        for fraction in (0.4, 1.0)
        for how, more in {
            "usual": {},
            "clipped, accumulated": {"clip": 0.1, "accumulate": 2},
            "not always used": {"uses_extra": lambda step: step % 3 != 1},
            "attached late": {"attach_at": 3},
        }.items()
    }
    run_cases({name: partial(lambda case: list(run_case(case)), case) for name, case in cases.items()}, every)


@some_cases({2: 0, 3: 3})
def test_training(world_size: int, every: int, tmp_path: Path) -> None:
    """Rows that divide by no world size, and fewer rows than ranks."""
    spawn(run_training, world_size, tmp_path, every)


def compare(device_mesh: DeviceMesh, fields: dict[str, Any], fraction: float, habit: str) -> list[str]:
    if fields.get("overlap") == "iteration" and (habit in NOT_IN_BACKWARD or habit == "evaluate-before-step"):
        habit = "evaluate"
    policy = with_share(**{**SIZES, **fields}, host_fraction=fraction)
    plain, offloaded = (Loop(device_mesh, fused_adamw, one).train(8, HABITS.get(habit)) for one in (None, policy))
    return [] if same(plain, offloaded) else ["other bits"]


def run_policies(rank: int, world_size: int) -> None:
    del rank
    device_mesh = mesh(world_size)
    run_cases(
        {
            f"{name}, {fraction}, {habit}": partial(compare, device_mesh, fields, fraction, habit)
            for name, fields in {"step": {}, **POLICIES}.items()
            for fraction, habit in ((0.4, "usual"), (1.0, "clip"), (0.4, "save-and-load"))
        }
    )


def test_every_policy(tmp_path: Path) -> None:
    spawn(run_policies, 2, tmp_path)


def run_hsdp(rank: int, world_size: int) -> None:
    del rank, world_size
    device_mesh = mesh(2, 2, names=("replicate", "shard"))
    run_cases({name: partial(compare, device_mesh, fields, 0.5, "usual") for name, fields in POLICIES.items()})


def test_hsdp(tmp_path: Path) -> None:
    spawn(run_hsdp, 4, tmp_path)


def names_on_host(fraction: float | str) -> list[str]:
    net = build(models.shard_even)
    optimizer = attach(of_net(net), model=net, policy=OffloadPolicy(host_fraction=fraction))
    return [shard.name for shard in vars(optimizer)["_offload_engine"].engine.plan.host_shards()]


def same_on_all_ranks() -> list[str]:
    names = names_on_host(0.4)
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, names)
    return [] if names and all(one == names for one in everywhere) else [f"{everywhere}"]


def run_choices(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases({"the same on all ranks": same_on_all_ranks})


def test_which_parameters(tmp_path: Path) -> None:
    spawn(run_choices, 3, tmp_path)
