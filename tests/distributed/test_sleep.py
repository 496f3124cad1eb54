"""Sharded models sleep between any two calls of a training loop, on several ranks: the same bits as without."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_offload import offload_model, reload_model
from tests.distributed import models
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.models import Net, batch, build
from tests.parity import same_bits
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

ASLEEP = r"Call reload_model\(model\) first"


def keep_on_host(net: Net) -> None:
    models.shard_groups(net, mesh=mesh(dist.get_world_size()), offload_policy=CPUOffloadPolicy(pin_memory=False))


def nap(net: nn.Module) -> None:
    assert offload_model(net) > 0
    reload_model(net)


def everything(net: nn.Module) -> list[Tensor]:
    for module in net.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    params = list(net.parameters())
    tensors = [*params, *(param.grad for param in params if param.grad is not None)]
    return [tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]


# While asleep --------------------------------------------------------------------------------------------------------


def all_away(*, gathered: bool) -> Iterable[str]:
    net = build(models.shard_even)
    before = [tensor.clone() for tensor in everything(net)]
    storages = [local(param).untyped_storage() for param in net.parameters()]
    held = sum(storage.nbytes() for storage in storages)
    if gathered:
        with torch.no_grad():
            net(batch(0))
    if offload_model(net) != held:
        yield "other bytes than those of the shards"
    if any(storage.nbytes() for storage in storages):
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
        # On every rank, and before any collective: a rank that went on would wait for the others.
        try:
            with pytest.raises(RuntimeError, match=ASLEEP):
                use()
        except pytest.fail.Exception as failure:
            yield f"{name}: {failure}"
    reload_model(net)
    yield from ("other bits" for one, two in zip(before, everything(net), strict=True) if not same_bits(one, two))
    fresh = build(models.shard_even)
    for model in (net, fresh):
        model(batch(1)).backward()
    yield from ("later bits" for a, b in zip(everything(net), everything(fresh), strict=True) if not same_bits(a, b))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def at_home() -> Iterable[str]:
    net = build(keep_on_host)
    if offload_model(net):
        yield "moved from the host to the host"
    net(batch(0)).backward()


def run_while_asleep(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases(
        {
            "before the first forward": partial(all_away, gathered=False),
            "after generating": partial(all_away, gathered=True),
            "CPUOffloadPolicy": at_home,
        }
    )


@world_sizes(3, 2)
def test_while_asleep(world_size: int, tmp_path: Path) -> None:
    spawn(run_while_asleep, world_size, tmp_path)


# Parameters that fully_shard leaves alone ----------------------------------------------------------------------------


def run_plain_parameters(rank: int, world_size: int) -> None:
    """Parameters that fully_shard leaves alone sleep as well."""
    del rank, world_size

    def case() -> Iterable[str]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(net, mesh=mesh(dist.get_world_size()), ignored_params=set(net[1].parameters()))
        before = [tensor.clone() for tensor in everything(net)]
        nap(net)
        yield from ("other bits" for a, b in zip(before, everything(net), strict=True) if not same_bits(a, b))

    run_cases({"ignored": case})


def test_ignored_parameters(tmp_path: Path) -> None:
    spawn(run_plain_parameters, 2, tmp_path)
