"""accelerate with FSDP2: what its ``save_state`` writes is read, and split through its own loads and saves."""

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from checkpoint_tools import preset, split_state_dict, verify
from tests.checkpoint_tools.formats import stepped
from tests.checkpoint_tools.tool import as_json
from tests.distributed.launch import spawn
from tests.distributed.test_integration_accelerate import accelerator_for

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """An MLP as Phi-3's, or with gate and up apart; of sizes that two ranks cannot share evenly."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        for name, size in ({"gate_up_proj": 14} if fused else {"gate_proj": 7, "up_proj": 7}).items():
            self.add_module(name, nn.Linear(5, size))
        self.down_proj = nn.Linear(7, 5)


def test_what_accelerate_saves_is_read_split_and_loaded(tmp_path: Path) -> None:
    spawn(run_accelerate, 2, tmp_path, tmp_path)
    for kind, key in (("fused", "mlp.gate_up_proj.weight"), ("split", "mlp.up_proj.weight")):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert verify(tmp_path / kind / part) == []
            found = as_json("inspect", tmp_path / kind / part)
            groups = {row["group"] for row in found["groups"]}
            moments = {"optimizer exp_avg", "optimizer exp_avg_sq", "optimizer step", "optimizer param_groups"}
            assert groups == ({"model"} if "model" in part else moments)
            assert any(key in row["key"] for row in found["keys"])


def accelerated(rank: int, world_size: int, *, fused: bool) -> tuple[Any, nn.Module, Any]:
    accelerator = accelerator_for(rank, world_size, "SHARDED_STATE_DICT")
    torch.manual_seed(1)
    model = nn.Sequential(OrderedDict(mlp=Block(fused=fused)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def wholes_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = get_model_state_dict(model)
    for name, state in get_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"{name} {key}": value for key, value in state.items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def run_accelerate(rank: int, world_size: int, folder: Path) -> None:
    accelerator, model, optimizer = accelerated(rank, world_size, fused=True)
    stepped(model, optimizer)
    accelerator.save_state(folder / "fused")

    # As accelerate saves it, but split; then loaded by accelerate into a model with separate weights.
    parts, part_optim = split_state_dict(
        get_model_state_dict(model), get_optimizer_state_dict(model, optimizer), preset("hf-gate-up")
    )
    dcp.save({"model": parts}, checkpoint_id=folder / "split" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": part_optim}, checkpoint_id=folder / "split" / "optimizer_0")
    expected = wholes_of(model, optimizer)
    accelerator, model, optimizer = accelerated(rank, world_size, fused=False)
    random_states = f"random_states_{rank}.pkl"
    shutil.copy(folder / "fused" / random_states, folder / "split" / random_states)
    accelerator.load_state(folder / "split")
    found = wholes_of(model, optimizer)
    for key, whole in expected.items():
        names = [key.replace("gate_up", name) for name in ("gate", "up")] if "gate_up" in key else [key]
        halves = [found.pop(name) for name in names]
        if whole.dim():
            assert torch.equal(torch.cat(halves), whole), key
        else:
            assert all(torch.equal(half, whole) for half in halves), key
    assert not found
