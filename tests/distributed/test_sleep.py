"""Sharded models sleep between any two calls of a training loop, on several ranks: the same bits as without."""

from collections.abc import Callable, Iterable
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
from tests.distributed.models import Net, ShardNet, batch, build
from tests.parity import same_bits
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

ASLEEP = r"Call reload_model\(model\) first"


def shard_and_reshard_to_half(net: Net) -> None:
    """After the forward, parameters are kept by half of the ranks."""
    models.shard_groups(net, mesh=mesh(dist.get_world_size()), reshard_after_forward=dist.get_world_size() // 2)


def shard_and_keep_gathered(net: Net) -> None:
    models.shard_groups(net, mesh=mesh(dist.get_world_size()), reshard_after_forward=False)


def keep_on_host(net: Net) -> None:
    models.shard_groups(net, mesh=mesh(dist.get_world_size()), offload_policy=CPUOffloadPolicy(pin_memory=False))


SHARDINGS: dict[str, ShardNet] = {
    "even": models.shard_even,
    "root only": models.shard_root_only,
    "columns": models.shard_columns,
    "mixed precision": models.shard_mixed_precision,
    "kept gathered": shard_and_keep_gathered,
}
SHARDINGS_OF_FOUR: dict[str, ShardNet] = {
    "even": models.shard_even,
    "hybrid": models.shard_hybrid,
    "tensor parallel": models.shard_tensor_parallel,
    "half": shard_and_reshard_to_half,
}


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


def train(net: Net, between: Callable[[nn.Module], object], *, steps: int = 3) -> Iterable[list[Tensor]]:
    """Generate, accumulate over two micro-batches (the first without reducing), clip, step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        with torch.no_grad():
            net(batch(100 + step))
        between(net)
        for micro in range(2):
            net.set_requires_gradient_sync(micro == 1)
            net(batch(10 * step + micro), extra=step != 1).backward()
            between(net)
        if len({param.device_mesh for param in net.parameters()}) == 1:  # torch clips no others together
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        between(net)
        yield [tensor.clone() for tensor in everything(net)]
        optimizer.zero_grad()


def compare(shard: ShardNet, *, tied: bool) -> list[str]:
    plain, sleeping = build(shard, tied=tied), build(shard, tied=tied)
    steps = zip(train(plain, lambda net: None), train(sleeping, nap), strict=True)
    return [
        f"step {number}, tensor {index}"
        for number, (ones, others) in enumerate(steps)
        for index, (one, other) in enumerate(zip(ones, others, strict=True))
        if not same_bits(one, other)
    ]


def run_shardings(rank: int, world_size: int) -> None:
    del rank
    shardings = SHARDINGS_OF_FOUR if world_size == 4 else SHARDINGS
    cases = {
        f"{name}, tied={tied}": partial(compare, shard, tied=tied)
        for name, shard in shardings.items()
        for tied in ((False, True) if name == "even" else (False,))
    }
    run_cases(cases)


@world_sizes(4, 2, 3)
def test_training_goes_on_with_the_same_bits(world_size: int, tmp_path: Path) -> None:
    spawn(run_shardings, world_size, tmp_path)


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
