"""Parameters that live on the host give the same bits, whatever the loop does, and are at home outside their uses."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.checkpoint import ArenaStager
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.engine.window import Window
from fsdp_offload.torch_compat import sharded_parameter
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.overlapping import HABITS, NOT_IN_BACKWARD, POLICIES, SIZES, Loop, Net, adamw, look, same
from tests.parity import attach
from tests.policies import with_share

EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)
DEVICE_BYTES = {"auto": "auto", "small": 2 * 4096, "large": 64 << 20}


@pytest.fixture(autouse=True)
def spoil_what_the_window_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the window that is free holds NaN, so that whoever still reads it is found out."""
    free = Window._free

    def spoil(self: Window, entry: Any) -> None:
        free(self, entry)
        spoil_bytes(self, entry.begin, entry.end)

    monkeypatch.setattr(Window, "_free", spoil)


def spoil_bytes(window: Window, begin: int, end: int) -> None:
    for first, memory in window._memory.items():
        if first <= begin < end <= first + memory.numel():
            memory[begin - first : end - first] = 0xFF


def policy_of(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, **fields, "parameters": True, **more})


def pair(mesh: DeviceMesh, policy: OffloadPolicy, make: Any = adamw, **kwargs: Any) -> tuple[Loop, Loop]:
    return Loop(mesh, make, None, **kwargs), Loop(mesh, make, policy, **kwargs)


def assert_same_each_step(plain: Loop, loop: Loop, steps: int = 10, habit: Any = None) -> None:
    for step in range(plain_steps(plain), plain_steps(plain) + steps):
        assert same(plain.train(1, habit, step), loop.train(1, habit, step)), f"after step {step}"
    assert_at_home(loop)


def plain_steps(loop: Loop) -> int:
    return loop.scheduler.last_epoch


def assert_at_home(loop: Loop) -> None:
    """Every parameter that fully_shard gathers is in the arena, unless its state is resident."""
    engine = engine_of(loop.optimizer)
    regions = [(region.bytes.data_ptr(), region.nbytes) for region in engine.plan.regions]
    for name, param in loop.model.named_parameters():
        shard = engine.plan.shards.get(param)
        if not isinstance(param, DTensor) or (shard is not None and (shard.resident or shard.sharded is None)):
            continue
        local = local_shard(param)
        inside = any(begin <= local.data_ptr() < begin + nbytes for begin, nbytes in regions)
        assert inside or not local.numel(), f"{name} is not in the arena"


# The matrix ------------------------------------------------------------------------------------------------------


@EVERY_POLICY
@pytest.mark.parametrize("device_bytes", DEVICE_BYTES.values(), ids=DEVICE_BYTES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_same_bits(mesh: DeviceMesh, fields: dict[str, Any], device_bytes: Any, micro_batches: int) -> None:
    policy = OffloadPolicy(parameters=True, bucket_bytes=4096, device_bytes=device_bytes, **fields)
    plain, loop = pair(mesh, policy, micro_batches=micro_batches)
    assert_same_each_step(plain, loop)


def set_reshard(model: nn.Module, value: bool) -> None:
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):
            module.set_reshard_after_forward(value, recurse=False)


@EVERY_POLICY
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_reshard_after_forward(mesh: DeviceMesh, fields: dict[str, Any], reshard: bool, micro_batches: int) -> None:
    """In all modules, the root's included."""
    prepare = partial(set_reshard, value=reshard)
    plain, loop = pair(mesh, policy_of(fields), prepare=prepare, micro_batches=micro_batches)
    assert_same_each_step(plain, loop, 6)
    assert_same_each_step(plain, loop, 6, HABITS["evaluate"])


def keep_gradients_unreduced(loop: Loop, step: int) -> None:
    loop.model.set_requires_gradient_sync(False)
    loop.backward(step)
    loop.model.set_requires_gradient_sync(True)
    loop.backward(step + 50)
    loop.step()


def keep_unsharded_between(loop: Loop, step: int) -> None:
    loop.model.set_reshard_after_backward(False)
    loop.backward(step)
    loop.model.set_reshard_after_backward(True)
    loop.backward(step + 50)
    loop.step()


def generate(loop: Loop, step: int) -> None:
    """Many forwards without gradients, between steps and in the middle of one."""
    loop.model.eval()
    with torch.no_grad():
        for at in range(4):
            loop.seen.append(loop.model(loop.batch(900 + at), extra=at % 2 == 0).item())
    loop.model.train()
    loop.backward(step)
    loop.step()


def forwards_before_one_backward(loop: Loop, step: int) -> None:
    (loop.model(loop.batch(step)) + loop.model(loop.batch(step + 30))).backward()
    loop.step()


def forward_without_backward(loop: Loop, step: int) -> None:
    if step % 2:
        loop.seen.append(loop.model(loop.batch(step + 70)).item())
    loop.backward(step)
    loop.step()


def unshard_by_hand(loop: Loop, step: int) -> None:
    for block in loop.model.blocks:
        block.unshard()
    if step % 2:
        for block in loop.model.blocks:
            block.reshard()
    loop.backward(step)
    loop.step()


def write_parameters(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    sync(loop)
    with torch.no_grad():
        for param in loop.model.parameters():
            if step % 3 == 0:
                param.mul_(0.99)
            elif step % 3 == 1:
                param.copy_(param.detach() * 1.01)
            else:
                torch._foreach_add_([param], 0.001)


def write_through_data(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    sync(loop)
    for param in loop.model.parameters():
        if step % 2:
            param.data.mul_(0.99)
        else:
            param.data.copy_(param.data.clone() * 1.01)


def write_through_locals(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    sync(loop)
    for param in loop.model.parameters():
        param.detach().to_local().mul_(0.99)
        if step % 2:
            with torch.no_grad():
                param.to_local().add_(0.001)


def average(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    sync(loop)
    params = list(loop.model.parameters())
    if not hasattr(loop, "mean"):
        loop.mean = [param.detach().clone() for param in params]  # type: ignore[attr-defined]
    mean: list[Tensor] = loop.mean  # type: ignore[attr-defined]
    torch._foreach_lerp_(mean, [param.detach() for param in params], 0.3)
    loop.seen.append(sum(one.to_local().sum().item() for one in mean))  # type: ignore[attr-defined]
    if step % 4 == 3:  # evaluate with the mean, and go back
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param, one in zip(params, mean, strict=True):
                param.copy_(one)
        look(loop)
        with torch.no_grad():
            for param, one in zip(params, kept, strict=True):
                param.copy_(one)


def read_everything(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    sync(loop)
    for param in loop.model.parameters():
        loop.seen.append(param.detach().norm().full_tensor().item())
        loop.seen.append(param.full_tensor().sum().item())
        loop.seen.append(param.to_local().abs().max().item())
        loop.seen.append(copy.deepcopy(param).detach().to_local().sum().item())
        loop.seen.append(param.data.to_local().sum().item())


def sync(loop: Loop) -> None:
    if hasattr(loop.optimizer, "synchronize"):
        loop.optimizer.synchronize()


def step_by_set_to_none(loop: Loop, step: int) -> None:
    loop.optimizer.zero_grad()
    loop.backward(step)
    loop.optimizer.step()
    loop.model.zero_grad(set_to_none=step % 2 == 0)


MORE_HABITS: dict[str, Callable[[Loop, int], None]] = {
    "unreduced-gradients": keep_gradients_unreduced,
    "unsharded-between": keep_unsharded_between,
    "generation": generate,
    "forwards-before-one-backward": forwards_before_one_backward,
    "forward-without-backward": forward_without_backward,
    "unshard-by-hand": unshard_by_hand,
    "write-parameters": write_parameters,
    "write-through-data": write_through_data,
    "write-through-locals": write_through_locals,
    "average": average,
    "read-everything": read_everything,
    "zero-by-model": step_by_set_to_none,
}


@EVERY_POLICY
@pytest.mark.parametrize("passing", [2 * 4096, 64 << 20], ids=["small", "large"])
@pytest.mark.parametrize("habit", MORE_HABITS)
def test_more_habits(mesh: DeviceMesh, fields: dict[str, Any], habit: str, passing: int) -> None:
    plain, loop = pair(mesh, policy_of(fields, passing=passing))
    assert_same_each_step(plain, loop, 7, MORE_HABITS[habit])


@EVERY_POLICY
@pytest.mark.parametrize("habit", HABITS)
def test_habits(mesh: DeviceMesh, fields: dict[str, Any], habit: str) -> None:
    refused = fields.get("overlap") == "iteration" and habit in NOT_IN_BACKWARD
    if fields.get("overlap") == "iteration" and habit == "evaluate-before-step":
        habit = "evaluate"
    plain, loop = pair(mesh, policy_of(fields))
    plain.train(9, HABITS[habit])
    if refused:
        with pytest.raises(RuntimeError, match=r"[Uu]se\s+overlap='forward'"):
            loop.train(9, HABITS[habit])
        return
    assert same(plain, loop.train(9, HABITS[habit]))
