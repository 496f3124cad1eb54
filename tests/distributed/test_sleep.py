"""Sharded models asleep, on several ranks. That they train the same is an axis of the conformance suite."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_offload import offload_model, reload_model
from fsdp_offload.fsdp.fully_shard import _param_groups
from tests.distributed import models
from tests.distributed.launch import mesh, spawn_cases, this_device, unless_refused
from tests.distributed.models import batch, build
from tests.parity import local, same_bits
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed


def shards_of(net: nn.Module) -> list[Tensor]:
    return [local(param.detach()) for param in net.parameters()]


def storages_of_fsdp(net: nn.Module) -> list[torch.UntypedStorage]:
    params = [param for group in _param_groups(net) for param in group.fsdp_params]
    tensors = [param._sharded_param_data for param in params]
    tensors += [param.sharded_param._local_tensor for param in params]
    tensors += [tensor for param in params for tensor in param.all_gather_outputs]
    return [tensor.untyped_storage() for tensor in tensors]


def all_away(when: str) -> Iterable[str]:
    """On every rank, and before any collective: a rank that went on would wait for the others."""
    net = build(models.shard_even)
    before = [tensor.clone() for tensor in shards_of(net)]
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in shards_of(net))
    if when == "after generating":
        with torch.no_grad():
            net(batch(0))
    if when == "after a backward":
        net(batch(0)).backward()
        held_bytes *= 2  # with gradients
    if offload_model(net) != held_bytes:
        yield "other bytes than those of the shards"
    if any(storage.nbytes() for storage in storages_of_fsdp(net)):
        yield "some memory stays"
    uses = {
        "forward": lambda: net(batch(0)),
        "forward of a block": lambda: net.blocks[0](torch.ones(1, models.WIDTH)),
        "unshard": net.unshard,
        "unshard of a block": net.blocks[0].unshard,
        "state_dict": lambda: [value.full_tensor() for value in net.state_dict().values()],
        "get_model_state_dict": lambda: get_model_state_dict(net),
        "full_tensor": lambda: next(net.parameters()).full_tensor(),
        "clip": lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    }
    for name, use in uses.items():
        yield from (f"{name}: {one}" for one in unless_refused(use, RuntimeError, "Call reload_model(model) first"))
    reload_model(net)
    net.reshard()
    yield from ("other bits" for one, two in zip(before, shards_of(net), strict=True) if not same_bits(one, two))
    net(batch(1)).backward()


def ignored_by_fully_shard() -> Iterable[str]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(this_device())  # fully_shard moves none that it ignores
    fully_shard(net, mesh=mesh(dist.get_world_size()), ignored_params=set(net[1].parameters()))
    before = [tensor.clone() for tensor in shards_of(net)]
    storages = [tensor.untyped_storage() for tensor in shards_of(net)]
    offload_model(net)
    if any(storage.nbytes() for storage in storages):
        yield "some memory stays"
    reload_model(net)
    yield from ("other bits" for one, two in zip(before, shards_of(net), strict=True) if not same_bits(one, two))


@world_sizes(3, 2)
def test_while_asleep(world_size: int, tmp_path: Path) -> None:
    cases = {
        **{when: partial(all_away, when) for when in ("at first", "after generating", "after a backward")},
        "ignored by fully_shard": ignored_by_fully_shard,
    }
    spawn_cases(cases, world_size, tmp_path)
