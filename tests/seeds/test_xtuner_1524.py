"""xtuner #1524 (``SwapAdamW``): state on the device only while ``step()`` needs it, in sharded training and in RL."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from fsdp_offload import OffloadPolicy, is_offloaded, offload_model, offload_report, reload_model
from tests.distributed import models
from tests.distributed.launch import spawn_cases
from tests.distributed.same_files import either_resumes_from_either
from tests.overlapping import Loop, assert_same_each_step, assert_trained, pair, same
from tests.parity import Zoo, leaves
from tests.tiers import world_sizes

BUCKET_BYTES = 1 << 10
POLICY = OffloadPolicy(bucket_bytes=BUCKET_BYTES, device_bytes=4 * BUCKET_BYTES)


class DecaysAfterwards(Optimizer):
    """Adam in the order of operations that ``SwapAdamW`` has: one parameter at a time, decay after the update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param))
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                count = state["step"].item()
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(one).add_(param.grad, alpha=1 - one)
                square.mul_(two).addcmul_(param.grad, param.grad, value=1 - two)
                rms = (square.sqrt() / (1 - two**count) ** 0.5) + group["eps"]
                param.addcdiv_(mean, rms, value=-group["lr"] / (1 - one**count))
                param.mul_(1 - group["lr"] * group["weight_decay"])


def test_swapped_state_is_updated_by_the_optimizers_own_arithmetic_bit_for_bit() -> None:
    """Those of torch's AdamW are an axis of the conformance suite."""
    both = pair(None, POLICY, DecaysAfterwards, net=Zoo)
    assert_same_each_step(*both, 6)
    assert_trained(both[0])


def moving(optimizer: Any) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [leaf for value in values for leaf in leaves(value) if leaf.dim()]


def test_state_is_on_the_device_only_in_the_step_and_in_as_many_parts_as_asked_for(mesh: DeviceMesh) -> None:
    """``swap_optimizer_times`` is here a size: of what is loaded and stored together, and of all of it at once."""
    loop = Loop(mesh, AdamW, POLICY).train(3)
    state_bytes = sum(leaf.nbytes for leaf in moving(loop.optimizer))
    report = offload_report(loop.optimizer)
    kept_bytes = report.memory.kept_state_bytes
    assert report.memory.host_state_bytes == state_bytes
    assert kept_bytes <= BUCKET_BYTES  # of the four blocks, three pass; the first bucket keeps one
    assert all(leaf.device.type == "cpu" for leaf in moving(loop.optimizer))
    for moved in (report.step.loaded_bytes, report.step.stored_bytes):
        assert state_bytes <= moved + kept_bytes <= 1.01 * state_bytes  # each byte once each way; and padding
    assert report.kept.moving_buckets >= state_bytes // BUCKET_BYTES
    assert report.memory.device_bytes <= 4 * BUCKET_BYTES


# Checkpoints ---------------------------------------------------------------------------------------------------------


LAYOUTS: dict[int, list[models.ShardNet]] = {
    3: [models.shard_even],
    2: [models.shard_columns, models.shard_bfloat16],
    4: [models.shard_hybrid, models.shard_tensor_parallel],
}


@pytest.mark.distributed
@world_sizes(*LAYOUTS)
def test_dcp_saves_swapped_state_as_the_shards_that_it_is(world_size: int, tmp_path: Path) -> None:
    """Local tensors beside sharded parameters would be taken for replicas: ranks would resume from one rank's.

    Either way between offloaded and plain training; their files have the same bytes.
    """
    cases = {f"{shard.__name__}, {flat}": (shard, flat) for shard in LAYOUTS[world_size] for flat in (False, True)}
    made = {
        name: partial(either_resumes_from_either, tmp_path / name, shard, flat=flat)
        for name, (shard, flat) in cases.items()
    }
    spawn_cases(made, world_size, tmp_path)


# RL ------------------------------------------------------------------------------------------------------------------


def sleep_between(loop: Loop, step: int) -> None:
    """A worker that gives way to generation: the optimizer goes before the model, and comes back after it."""
    loop.backward(step)
    loop.step()
    if is_offloaded(loop.optimizer):
        storages = [param.to_local().untyped_storage() for param in loop.model.parameters()]
        loop.optimizer.offload_states()
        loop.optimizer.release_states()
        offload_model(loop.model)
        report = offload_report(loop.optimizer)
        assert report.memory.kept_state_bytes == report.memory.device_bytes == 0
        assert not any(storage.nbytes() for storage in storages)
        reload_model(loop.model)
        loop.optimizer.reload_states()


def put_all_state(loop: Loop, step: int) -> None:
    """xtuner's ``put_optimizer_to_device``: tensors of its own in the state of every parameter, to and fro."""
    loop.backward(step)
    loop.step()
    for state in loop.optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone()


@pytest.mark.parametrize("habit", [sleep_between, put_all_state])
@pytest.mark.parametrize("device_bytes", [4 * BUCKET_BYTES, 1 << 20], ids=["streams", "stays"])
def test_rl_offload_and_onload_between_steps_leave_the_bits(mesh: DeviceMesh, device_bytes: int, habit: Any) -> None:
    policy = OffloadPolicy(bucket_bytes=BUCKET_BYTES, device_bytes=device_bytes)
    plain, offloaded = (Loop(mesh, AdamW, one).train(5, habit) for one in (None, policy))
    assert same(plain, offloaded)
