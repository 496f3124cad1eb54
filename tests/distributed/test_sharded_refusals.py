"""What cannot be right with a sharded model is an error that says what to do, and leaves everything as it was.

Attaching in a wrong order is told; attaching itself only warns.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_offload import OffloadedOptimizer, offload_optimizer
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, mesh, spawn_cases, this_device, unless_refused
from tests.distributed.models import Net, batch, build
from tests.parity import attach

pytestmark = pytest.mark.distributed


def still_plain(optimizer: Optimizer, net: Net) -> Iterator[str]:
    if isinstance(optimizer, OffloadedOptimizer):
        yield "the optimizer is offloaded nevertheless"
    net(batch(net.data_rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def cpu_offload_policy(*, with_model: bool) -> Iterator[str]:
    policy = CPUOffloadPolicy(pin_memory=DEVICE_TYPE != "cpu")
    net = build(lambda net: models.shard_groups(net, mesh=mesh(dist.get_world_size()), offload_policy=policy))
    optimizer = optim.AdamW(net.parameters())
    model = net if with_model else None
    yield from unless_refused(lambda: attach(optimizer, model=model), ValueError, "CPUOffloadPolicy", "offload_policy")
    yield from still_plain(optimizer, net)


UNSHARDED = ("None of the optimizer's parameters is a DTensor, and there are 2 ranks", "call fully_shard")


def advice_of(optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """What attaching says, without what it says of the CPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        offload_optimizer(optimizer, model=model)
    return [str(one.message) for one in seen if "nothing to gain" not in str(one.message)]


def one_step(net: nn.Module, optimizer: Optimizer) -> None:
    net(batch(0)).backward()
    optimizer.step()


def plain_net() -> Net:
    torch.manual_seed(0)
    return Net().to(this_device())


def sharded_after_attaching(shard: Callable[[Net], Any], *, with_model: bool = True) -> Iterator[str]:
    """DDP is unsharded on purpose. The first forward knows that this is not, or else the first step."""
    net = plain_net()
    optimizer = optim.AdamW(net.parameters())
    advice = advice_of(optimizer, net if with_model else None)
    if len(advice) != 1 or not all(part in advice[0] for part in UNSHARDED):
        yield f"advice {advice}"
    shard(net)
    if with_model:
        yield from unless_refused(lambda: net(batch(0)), RuntimeError, "no longer the model's", "fully_shard")
        net(batch(0)).backward()
        yield from unless_refused(optimizer.step, RuntimeError, "no longer the model's", "fully_shard")
    else:
        with pytest.warns(UserWarning, match="never found one.*call fully_shard"):
            one_step(net, optimizer)


def in_the_right_order(*, ddp: bool) -> Iterator[str]:
    net = DistributedDataParallel(plain_net()) if ddp else build(models.shard_even)
    optimizer = optim.AdamW(net.parameters())
    advice = advice_of(optimizer, net)
    if len(advice) != ddp or not all(UNSHARDED[0] in one for one in advice):
        yield f"advice {advice}"
    one_step(net, optimizer)


def other_parameters() -> Iterator[str]:
    """Two optimizers, as GANs have them; and one that follows another that has stepped."""
    net = build(models.shard_even)
    attached = attach(optim.AdamW(net.blocks.parameters()), model=net)
    one_step(net, optim.SGD(net.head.parameters(), lr=0.1))
    attached.step()
    optim.SGD(net.parameters(), lr=0.1).step()
    yield from ()


def shard_one_block(net: Net) -> None:
    """The rest of the model still has the optimizer's parameters, and gets gradients."""
    fully_shard(net.blocks[1], mesh=mesh(dist.get_world_size()))


def replicated_gradient() -> Iterator[str]:
    """Somebody has gathered a gradient: its local part is not this shard's."""
    net = build(models.shard_even)
    optimizer = attach(optim.AdamW(net.parameters()), model=net)
    net(batch(net.data_rank)).backward()
    before = {name: param.to_local().clone() for name, param in net.named_parameters()}
    weight = net.odd.weight
    weight.grad = weight.grad.redistribute(placements=[Replicate()])
    yield from unless_refused(optimizer.step, RuntimeError, "odd.weight", "redistribute")
    for name, param in net.named_parameters():
        if not torch.equal(param.to_local(), before[name]):
            yield f"{name} has changed"
    weight.grad = weight.grad.redistribute(placements=weight.placements)
    optimizer.step()


def state_of_another_sharding() -> Iterator[str]:
    """Local tensors may well have the right shape and yet be other rows."""
    replicated, sharded = build(models.shard_hybrid), build(models.shard_even)
    source, target = (optim.AdamW(net.parameters()) for net in (replicated, sharded))
    attach(target, model=sharded)
    for net, optimizer in ((replicated, source), (sharded, target)):
        net(batch(0)).backward()
        optimizer.step()
    before = target.state[sharded.odd.weight]["exp_avg"].to_local().clone()
    saved = source.state_dict()
    yield from unless_refused(
        lambda: target.load_state_dict(saved), ValueError, "placements", "torch.distributed.checkpoint"
    )
    gathered = {key: dict(state) for key, state in target.state_dict()["state"].items()}
    for state in gathered.values():
        state["exp_avg"] = torch.zeros(state["exp_avg"].shape)  # as after full_tensor()
    plain = {"state": gathered, "param_groups": target.state_dict()["param_groups"]}
    yield from unless_refused(
        lambda: target.load_state_dict(plain), ValueError, "fsdp_offload.checkpoint.set_optimizer_state_dict"
    )
    if not torch.equal(target.state[sharded.odd.weight]["exp_avg"].to_local(), before):
        yield "the refused load has changed the state"


CASES = {
    "CPUOffloadPolicy": partial(cpu_offload_policy, with_model=True),
    "attached before fully_shard": partial(sharded_after_attaching, models.shard_even),
    "attached before fully_shard of a part": partial(sharded_after_attaching, shard_one_block),
    **({} if DEVICE_TYPE == "cpu" else {"no model given": partial(cpu_offload_policy, with_model=False)}),
    "attached before fully_shard, without a model": partial(
        sharded_after_attaching, models.shard_even, with_model=False
    ),
    "attached behind it": partial(in_the_right_order, ddp=False),
    "DDP": partial(in_the_right_order, ddp=True),
    "other parameters": other_parameters,
    "replicated gradient": replicated_gradient,
    "state of another sharding": state_of_another_sharding,
}


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    spawn_cases(CASES, 2, tmp_path)
