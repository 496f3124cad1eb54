"""Scaled state of FusedAdam under fully_shard. Checkpoints of what is not scaled are in ``test_layout_matrix.py``.

Transformer Engine's own where the ranks have GPUs, the reference of its Python contract otherwise.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict
from tests.distributed.launch import DEVICE_TYPE, mesh, spawn, this_device
from tests.fused_adam import FP16, FP32, MASTERS, FusedPair, Mixed
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed


def fused_adam() -> Any:
    if DEVICE_TYPE == "cpu":
        from tests.fused_adam_reference import FusedAdam

        return FusedAdam
    return pytest.importorskip("transformer_engine.pytorch").optimizers.FusedAdam


def run_fp16(rank: int, world_size: int, folder: Path) -> None:
    """What is saved is what FusedAdam itself would save.

    fp16 scales each shard by itself, so its bits depend on the number of ranks, and a shard without elements has no
    scale to be found: FusedAdam itself fails there.
    """

    def pair_of(steps: int) -> FusedPair:
        kwargs = {**MASTERS["fp16"], "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16}
        return FusedPair(fused_adam(), device=str(this_device()), build=sharded_evenly, **kwargs).step(steps)

    plain, trained = pair_of(3)
    saved, expected = trained.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    for number, state in saved.items():
        for name, value in state.items():
            assert value.dtype is FP32
            assert torch.equal(value._local_tensor.cpu(), expected[number][name]._local_tensor.cpu())
    optim = get_optimizer_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": trained.model.state_dict(), "optim": optim}, checkpoint_id=folder / "fp16")
    pair = pair_of(0)
    model, fresh = pair.offloaded.model, pair.offloaded.optimizer
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, fresh, for_load=True)}
    load(state, checkpoint_id=folder / "fp16")
    set_optimizer_state_dict(model, fresh, state["optim"])
    for one, other in zip(expected.values(), fresh.state_dict()["state"].values(), strict=True):
        for name, value in other.items():
            torch.testing.assert_close(value._local_tensor.cpu(), one[name]._local_tensor.cpu(), rtol=1e-3, atol=1e-8)
    pair.give_gradients()
    fresh.step()


def sharded_evenly() -> nn.Module:
    torch.manual_seed(0)
    model = Mixed().to(this_device())
    return fully_shard(model, mesh=mesh(torch.distributed.get_world_size()))


@world_sizes(2, 1)
def test_scaled_state(world_size: int, tmp_path: Path) -> None:
    spawn(run_fp16, world_size, tmp_path, tmp_path)
