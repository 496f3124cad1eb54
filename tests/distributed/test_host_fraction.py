"""A share updated on the host: the same parameters on every rank, however uneven and empty their shards are."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.attached import engine_of
from tests.distributed import models
from tests.distributed.launch import run_cases, spawn
from tests.distributed.models import build
from tests.parity import attach

pytestmark = pytest.mark.distributed


def same_on_all_ranks() -> list[str]:
    net = build(models.shard_even)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
    attach(optimizer, model=net, policy=OffloadPolicy(host_fraction=0.4))
    names = [shard.name for shard in engine_of(optimizer).plan.host_shards()]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, names)
    return [] if names and all(one == names for one in everywhere) else [f"{everywhere}"]


def run_choices(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases({"the same on all ranks": same_on_all_ranks})


def test_which_parameters(tmp_path: Path) -> None:
    spawn(run_choices, 3, tmp_path)
