"""FusedAdam under fully_shard, with uneven and empty shards: checkpoints, also of other numbers of ranks.

Transformer Engine's own where the ranks have GPUs, the reference of its Python contract otherwise.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from checkpoint_tools.look.diff import EXACT, all_keys, diff
from checkpoint_tools.stored.reading import open_checkpoint
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict
from tests.distributed.launch import DEVICE_TYPE, mesh, spawn, this_device
from tests.fused_adam import BF16, FP16, FP32, MASTERS, Mixed, assert_same_content, name_of
from tests.parity import attach
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

# fp16 scales each shard by itself, so its bits depend on the number of ranks, and a shard without elements has no scale
# to be found: FusedAdam itself fails there.
CASES = [
    {**master, "exp_avg_dtype": moment} for name, master in MASTERS.items() for moment in (FP32, BF16) if name != "fp16"
]


def fused_adam() -> Any:
    if DEVICE_TYPE == "cpu":
        from tests.fused_adam_reference import FusedAdam

        return FusedAdam
    return pytest.importorskip("transformer_engine.pytorch").optimizers.FusedAdam


class Uneven(Mixed):
    """And a layer with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(8, 1, dtype=BF16)


def sharded() -> Uneven:
    torch.manual_seed(0)
    model = Uneven().to(this_device())
    device_mesh = mesh(torch.distributed.get_world_size())
    for layer in (model.up, model.norm, model.frozen, model.small):
        fully_shard(layer, mesh=device_mesh)
    return fully_shard(model, mesh=device_mesh)


def optimizer_of(model: nn.Module, **kwargs: Any) -> Any:
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
    return fused_adam()(groups, lr=0.02, weight_decay=0.1, **kwargs)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for name, param in model.named_parameters():
        whole = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        if param.requires_grad and not (number == 0 and name.startswith("norm")):
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    optimizer.step()


def offloaded(**kwargs: Any) -> tuple[nn.Module, Any]:
    model = sharded()
    optimizer = optimizer_of(model, **kwargs)
    attach(optimizer, model=model)
    return model, optimizer


def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def run_first(rank: int, world_size: int, folder: Path) -> None:
    """Five steps at once, and a save after three of them."""
    del rank, world_size
    for number, kwargs in enumerate(CASES):
        model, optimizer = offloaded(**kwargs)
        for at in range(5):
            if at == 3:
                save(model, optimizer, folder / f"{number}-three")
            step(model, optimizer, at)
        save(model, optimizer, folder / f"{number}-five")


def run_second(rank: int, world_size: int, folder: Path) -> None:
    """From the third step on, with another number of ranks."""
    del rank, world_size
    for number, kwargs in enumerate(CASES):
        model, optimizer = offloaded(**kwargs)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, for_load=True)}
        load(state, checkpoint_id=folder / f"{number}-three")
        set_optimizer_state_dict(model, optimizer, state["optim"])
        for at in range(3, 5):
            step(model, optimizer, at)
        save(model, optimizer, folder / f"{number}-resumed")


@pytest.mark.parametrize("worlds", [(2, 3), pytest.param((3, 1), marks=pytest.mark.long)], ids=str)
def test_resume_on_another_number_of_ranks(worlds: tuple[int, int], tmp_path: Path) -> None:
    spawn(run_first, worlds[0], tmp_path, tmp_path)
    spawn(run_second, worlds[1], tmp_path, tmp_path)
    for number, kwargs in enumerate(CASES):
        one, other = (open_checkpoint(tmp_path / f"{number}-{name}") for name in ("five", "resumed"))
        assert diff(one, other, all_keys(one, other), EXACT) == [], name_of(kwargs)
        masters = {key for key in one.tensors if key.endswith("master_param")}
        assert len(masters) == (8 if kwargs.get("master_weights") else 0), masters  # of bf16 parameters only


def run_fp16(rank: int, world_size: int, folder: Path) -> None:
    """State that is scaled: what is saved is what FusedAdam itself would save."""
    del rank, world_size
    kwargs = {**MASTERS["fp16"], "exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16}
    models = [sharded_evenly(), sharded_evenly()]
    plain, optimizer = (optimizer_of(model, **kwargs) for model in models)
    attach(optimizer, model=models[1])
    for number in range(1, 4):
        for model, one in zip(models, (plain, optimizer), strict=True):
            step(model, one, number)
        assert_same_content(models, [plain, optimizer])
    saved, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for number, state in saved.items():
        for name, value in state.items():
            assert value.dtype is FP32
            assert torch.equal(value._local_tensor.cpu(), expected[number][name]._local_tensor.cpu())
    save(models[1], optimizer, folder / "fp16")
    model, fresh = sharded_evenly(), None
    fresh = optimizer_of(model, **kwargs)
    attach(fresh, model=model)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, fresh, for_load=True)}
    load(state, checkpoint_id=folder / "fp16")
    set_optimizer_state_dict(model, fresh, state["optim"])
    for one, other in zip(plain.state_dict()["state"].values(), fresh.state_dict()["state"].values(), strict=True):
        for name, value in other.items():
            torch.testing.assert_close(value._local_tensor.cpu(), one[name]._local_tensor.cpu(), rtol=1e-3, atol=1e-8)
    step(model, fresh, 4)


def sharded_evenly() -> nn.Module:
    torch.manual_seed(0)
    model = Mixed().to(this_device())
    return fully_shard(model, mesh=mesh(torch.distributed.get_world_size()))


@world_sizes(2, 1)
def test_scaled_state(world_size: int, tmp_path: Path) -> None:
    spawn(run_fp16, world_size, tmp_path, tmp_path)
