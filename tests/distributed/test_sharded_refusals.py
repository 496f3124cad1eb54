"""What cannot be right with a sharded model is an error that says what to do, and leaves everything as it was."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.optim import Optimizer

from fsdp_offload import OffloadedOptimizer
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, mesh, run_cases, spawn, this_device
from tests.distributed.models import Net, batch, build
from tests.parity import attach

pytestmark = pytest.mark.distributed


def refused(action: Callable[[], Any], error: type[Exception], *words: str) -> Iterator[str]:
    try:
        action()
    except error as raised:
        yield from (f"{word!r} is not in: {raised}" for word in words if word not in str(raised))
    else:
        yield f"no {error.__name__}"


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
    yield from refused(lambda: attach(optimizer, model=model), ValueError, "CPUOffloadPolicy", "offload_policy")
    yield from still_plain(optimizer, net)


def optimizer_built_before_sharding() -> Iterator[str]:
    net = Net().to(this_device())
    optimizer = optim.AdamW(net.parameters())
    models.shard_even(net)
    yield from refused(lambda: attach(optimizer, model=net), ValueError, "not parameters of the model", "fully_shard")
    if isinstance(optimizer, OffloadedOptimizer):
        yield "the optimizer is offloaded nevertheless"


def sharded_after_attaching(shard: Callable[[Net], Any]) -> Iterator[str]:
    torch.manual_seed(0)
    net = Net().to(this_device())
    optimizer = attach(optim.AdamW(net.parameters()), model=net)
    shard(net)
    yield from refused(lambda: net(batch(0)), RuntimeError, "no longer the model's", "fully_shard")
    net(batch(0)).backward()
    yield from refused(optimizer.step, RuntimeError, "no longer the model's", "fully_shard")


def shard_one_block(net: Net) -> None:
    """The rest of the model still has the optimizer's parameters, and gets gradients."""
    fully_shard(net.blocks[1], mesh=mesh(dist.get_world_size()))


def parameters_of_another_model() -> Iterator[str]:
    net, other = build(models.shard_even), build(models.shard_even)
    optimizer = optim.AdamW([*net.parameters(), *other.odd.parameters()])
    yield from refused(lambda: attach(optimizer, model=net), ValueError, "2 of the", "not parameters of the model")


def adafactor() -> Iterator[str]:
    net = build(models.shard_even)
    optimizer = optim.Adafactor(net.parameters())
    yield from refused(lambda: attach(optimizer, model=net), ValueError, "Adafactor", "sharded")
    if isinstance(optimizer, OffloadedOptimizer):
        yield "the optimizer is offloaded nevertheless"


def replicated_gradient() -> Iterator[str]:
    """Somebody has gathered a gradient: its local part is not this shard's."""
    net = build(models.shard_even)
    optimizer = attach(optim.AdamW(net.parameters()), model=net)
    net(batch(net.data_rank)).backward()
    before = {name: param.to_local().clone() for name, param in net.named_parameters()}
    weight = net.odd.weight
    weight.grad = weight.grad.redistribute(placements=[Replicate()])
    yield from refused(optimizer.step, RuntimeError, "odd.weight", "redistribute")
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
    yield from refused(lambda: target.load_state_dict(saved), ValueError, "placements", "torch.distributed.checkpoint")
    gathered = {key: dict(state) for key, state in target.state_dict()["state"].items()}
    for state in gathered.values():
        state["exp_avg"] = torch.zeros(state["exp_avg"].shape)  # as after full_tensor()
    plain = {"state": gathered, "param_groups": target.state_dict()["param_groups"]}
    yield from refused(
        lambda: target.load_state_dict(plain), ValueError, "fsdp_offload.checkpoint.set_optimizer_state_dict"
    )
    if not torch.equal(target.state[sharded.odd.weight]["exp_avg"].to_local(), before):
        yield "the refused load has changed the state"


def meta_parameters() -> Iterator[str]:
    with torch.device("meta"):
        net = Net()
    models.shard_even(net)
    optimizer = optim.AdamW(net.parameters())
    yield from refused(lambda: attach(optimizer, model=net), ValueError, "meta device", "to_empty")


CASES = {
    "CPUOffloadPolicy": partial(cpu_offload_policy, with_model=True),
    "optimizer before fully_shard": optimizer_built_before_sharding,
    "attached before fully_shard": partial(sharded_after_attaching, models.shard_even),
    "attached before fully_shard of a part": partial(sharded_after_attaching, shard_one_block),
    **({} if DEVICE_TYPE == "cpu" else {"no model given": partial(cpu_offload_policy, with_model=False)}),
    "parameters of another model": parameters_of_another_model,
    "Adafactor": adafactor,
    "replicated gradient": replicated_gradient,
    "state of another sharding": state_of_another_sharding,
    "meta parameters": meta_parameters,
}


def run_refusals(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases(CASES)


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    spawn(run_refusals, 2, tmp_path)
