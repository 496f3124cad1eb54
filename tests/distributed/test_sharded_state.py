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

from tests.distributed import models
from tests.distributed.launch import DEVICE_TYPE, run_cases, spawn
from tests.distributed.models import Net, batch
from tests.distributed.test_sharded_checkpoints import SOME_KEPT, TINY, MakeOptimizer, adamw, new_run, train
from tests.parity import local, params_of

pytestmark = pytest.mark.distributed


def state_is_sharded_like_parameters(shard: models.ShardNet) -> Iterator[str]:
    run = new_run(shard, adamw, TINY)
    train(run, 0, 2)
    for name, param in run.model.named_parameters():
        state = run.optimizer.state[param]
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


def muon(net: Net) -> optim.Optimizer:
    return optim.Muon([net.embed.weight, net.blocks[0].up.weight, net.odd.weight], ns_steps=1)


def keys_are_the_same_on_every_rank(make: MakeOptimizer) -> Iterator[str]:
    """A full state dict is gathered tensor by tensor in this order: ranks that disagree wait for each other forever.

    What stays on the device differs between ranks: the last shards are shorter or empty.
    """
    run = new_run(models.shard_even, make, SOME_KEPT)
    train(run, 0, 1)
    names = {param: name for name, param in run.params.items()}
    mine = [(names[param], list(state)) for param, state in run.optimizer.state.items()]
    if sorted(name for name, _ in mine) != sorted(names[param] for param in params_of(run.optimizer)):
        yield f"there is state for {mine}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if everyone[0] != mine:
        yield f"keys are {[name for name, _ in mine]}, on rank 0 {[name for name, _ in everyone[0]]}"


def fused_sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def fused_sgd_works() -> Iterator[str]:
    """Without offload torch has no sharding rule for this kernel; offloaded it runs on locals, as on plain tensors."""
    run = new_run(models.shard_even, lambda net: fused_sgd(net.parameters()), TINY)
    plain = [torch.nn.Parameter(local(param).detach().clone()) for param in run.model.parameters()]
    reference = fused_sgd([param for param in plain if param.numel()])
    for step in range(3):
        run.model(batch(step * 8 + run.model.data_rank)).backward()
        for param, copy in zip(run.model.parameters(), plain, strict=True):
            copy.grad = local(param.grad).clone()
        for optimizer in (run.optimizer, reference):
            optimizer.step()
        run.model.zero_grad()
    for (name, param), copy in zip(run.model.named_parameters(), plain, strict=True):
        if not torch.equal(local(param), copy):
            yield f"{name} differs"


CASES = {
    "state, one dim": partial(state_is_sharded_like_parameters, models.shard_even),
    "state, Shard(1)": partial(state_is_sharded_like_parameters, models.shard_columns),
    "state, HSDP": partial(state_is_sharded_like_parameters, models.shard_hybrid),
    "state, TP": partial(state_is_sharded_like_parameters, models.shard_tensor_parallel),
    "same keys, some kept": partial(keys_are_the_same_on_every_rank, adamw),
    "same keys, Muon, some kept": partial(keys_are_the_same_on_every_rank, muon),
    "fused SGD": fused_sgd_works,
}


def run_state(rank: int, world_size: int) -> None:
    del rank, world_size
    run_cases(CASES)


def test_state_is_sharded_like_the_parameters(tmp_path: Path) -> None:
    spawn(run_state, 4, tmp_path)
