"""FullyShardedDataParallel, FSDP2's predecessor: the same bits, without what overlaps with the model."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_offload import offload_report
from tests.distributed.frameworks import POLICY, everything
from tests.distributed.launch import mesh, run_cases, spawn, this_device
from tests.distributed.models import Block, Net, batch
from tests.parity import attach
from tests.policies import with_share

pytestmark = pytest.mark.distributed


def train(*, offload: bool, use_orig_params: bool, strategy: ShardingStrategy) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    net = FullyShardedDataParallel(
        Net().to(this_device()),
        device_mesh=mesh(2),
        device_id=this_device(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
    if offload:
        attach(optimizer, model=net, policy=with_share(**POLICY))
    seen = []
    for step in range(6):
        for micro in range(2):
            loss = net(batch(10 * step + micro))
            seen.append(loss.item())
            loss.backward()
        seen.append(net.clip_grad_norm_(0.5).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if offload:
        assert offload_report(optimizer).stored_bytes > 0
    return seen, everything(net, [optimizer])


def compare(*, use_orig_params: bool, strategy: ShardingStrategy) -> list[str]:
    (seen, left), (others, others_left) = (
        train(offload=offload, use_orig_params=use_orig_params, strategy=strategy) for offload in (False, True)
    )
    return [] if seen == others and all(map(torch.equal, left, others_left)) else ["other bits"]


def run_trainings(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases(
        {
            f"{strategy.name}, use_orig_params={original}": partial(
                compare, use_orig_params=original, strategy=strategy
            )
            for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
            for original in (False, True)
        }
    )


def test_training(tmp_path: Path) -> None:
    spawn(run_trainings, 2, tmp_path)
