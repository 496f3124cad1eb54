"""What ``optimizer.state`` of a sharded model is while offloaded."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, run_cases, spawn
from tests.distributed.models import Net, batch, build, decay_groups
from tests.parity import attach, local, params_of

pytestmark = pytest.mark.distributed

TINY = OffloadPolicy(bucket_bytes=1024, device_bytes=5 * 1024)
# What stays on the device differs between ranks: the last shards are shorter or empty.
SOME_KEPT = OffloadPolicy(bucket_bytes=1024, device_bytes=9 * 1024)


def backward(net: Net, step: int) -> None:
    net(batch(step * 8 + net.data_rank)).backward()


def train(net: Net, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        backward(net, step)
        optimizer.step()
        optimizer.zero_grad()


def names_of(net: Net) -> dict[Tensor, str]:
    return {param: name for name, param in net.named_parameters()}


# What users find in optimizer.state ----------------------------------------------------------------------------------


def state_is_sharded_like_parameters(shard: models.ShardNet) -> Iterator[str]:
    net = build(shard)
    optimizer = attach(optim.AdamW(decay_groups(net)), model=net, policy=TINY)
    train(net, optimizer, 2)
    for param, name in names_of(net).items():
        state = optimizer.state[param]
        if list(state) != ["step", "exp_avg", "exp_avg_sq"]:
            yield f"{name} has {list(state)}"
        for key in ("exp_avg", "exp_avg_sq"):
            yield from not_like(param, state[key], f"{name}, {key}")
        if state["step"].item() != 2:
            yield f"{name} has been updated {state['step'].item()} times"


def not_like(param: Tensor, value: Any, what: str) -> Iterator[str]:
    if not isinstance(value, DTensor):
        yield f"{what} is a {type(value).__name__}"
        return
    if value.device_mesh != param.device_mesh or value.placements != param.placements:
        yield f"{what} is placed {value.placements} on {value.device_mesh}"
    if value.shape != param.shape or local(value).shape != local(param).shape:
        yield f"{what} has shapes {value.shape} and {local(value).shape}"
    if local(value).device.type != "cpu" or value.device_mesh.device_type != DEVICE_TYPE:
        yield f"{what} is on {local(value).device} under {value.device_mesh}"
    if local(value).untyped_storage().nbytes() != local(value).numel() * 4 or local(value).storage_offset():
        yield f"{what} has a storage of {local(value).untyped_storage().nbytes()} bytes"


def keys_are_the_same_on_every_rank(
    policy: OffloadPolicy, optimizer_class: type[Optimizer] = optim.AdamW
) -> Iterator[str]:
    """A full state dict is gathered tensor by tensor in this order: ranks that disagree wait for each other forever."""
    net = build(models.shard_even)
    if optimizer_class is optim.Muon:
        optimizer = optim.Muon([net.embed.weight, net.blocks[0].up.weight, net.odd.weight], ns_steps=1)
    else:
        optimizer = optimizer_class(decay_groups(net))
    attach(optimizer, model=net, policy=policy)
    train(net, optimizer, 1)
    names = names_of(net)
    mine = [(names[param], list(state)) for param, state in optimizer.state.items()]
    if sorted(name for name, _ in mine) != sorted(names[param] for param in params_of(optimizer)):
        yield f"there is state for {mine}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if everyone[0] != mine:
        yield f"keys are {[name for name, _ in mine]}, on rank 0 {[name for name, _ in everyone[0]]}"


def fused_sgd_works() -> Iterator[str]:
    """Without offload torch has no sharding rule for this kernel; offloaded it runs on locals, as on plain tensors."""
    net = build(models.shard_even)
    optimizer = attach(optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True), model=net, policy=TINY)
    plain = [torch.nn.Parameter(local(param).detach().clone()) for param in net.parameters()]
    reference = optim.SGD([param for param in plain if param.numel()], lr=0.1, momentum=0.9, fused=True)
    for step in range(3):
        backward(net, step)
        for param, copy in zip(net.parameters(), plain, strict=True):
            copy.grad = local(param.grad).clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for (name, param), copy in zip(net.named_parameters(), plain, strict=True):
        if not torch.equal(local(param), copy):
            yield f"{name} differs"


CASES = {
    "state, one dim": partial(state_is_sharded_like_parameters, models.shard_even),
    "state, Shard(1)": partial(state_is_sharded_like_parameters, models.shard_columns),
    "state, HSDP": partial(state_is_sharded_like_parameters, models.shard_hybrid),
    "state, TP": partial(state_is_sharded_like_parameters, models.shard_tensor_parallel),
    "same keys, some kept": partial(keys_are_the_same_on_every_rank, SOME_KEPT),
    "same keys, Muon, some kept": partial(keys_are_the_same_on_every_rank, SOME_KEPT, optim.Muon),
    "fused SGD": fused_sgd_works,
}


def run_state(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases(CASES)


def test_state_is_sharded_like_the_parameters(tmp_path: Path) -> None:
    spawn(run_state, 4, tmp_path)
