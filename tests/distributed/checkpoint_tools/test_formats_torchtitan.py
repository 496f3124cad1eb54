"""The layout of torchtitan's fused SwiGLU, under FSDP2: stacked gate and up, and the optimizer's flat state by FQN.

Shapes and names are those of ``overrides/fused_swiglu.py`` and ``components/optimizer/utils.py`` in torchtitan 0.3.0,
whose forward takes ``w13.unbind(-2)`` for gate and up. Its own modules import Triton, which a CPU does not have.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed.launch import mesh, run_cases, spawn
from tests.tiers import world_sizes

EXPERTS, HIDDEN, DIM = 3, 7, 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STEMS = {"feed_forward.": ".weight", "routed_experts.inner_experts.": "_EFD"}


class Model(nn.Module):
    """A dense layer and grouped experts, of which nothing but the parameters matters."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.feed_forward, experts = nn.Module(), nn.Module()
        self.routed_experts = nn.ModuleDict({"inner_experts": experts})
        if fused:
            self.feed_forward.w13 = nn.Parameter(torch.empty(HIDDEN, 2, DIM))
            experts.w13 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2, DIM))
        else:
            for name in ("w1", "w3"):
                self.feed_forward.add_module(name, nn.Linear(DIM, HIDDEN, bias=False))
                experts.register_parameter(f"{name}_EFD", nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM)))
        self.feed_forward.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        experts.w2_EDF = nn.Parameter(torch.empty(EXPERTS, DIM, HIDDEN))


@pytest.mark.distributed
@world_sizes(2, 4)
def test_stacked_weights_become_separate_ones(world_size: int, tmp_path: Path) -> None:
    spawn(run_stacked, world_size, tmp_path, tmp_path)


def run_stacked(rank: int, world_size: int, folder: Path) -> None:
    del rank
    run_cases({"stacked": lambda: stacked(world_size, folder)})


def sharded(world_size: int, model: Model) -> tuple[Model, torch.optim.Optimizer]:
    fully_shard(model, mesh=mesh(world_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for param in model.parameters():
        param.detach().normal_()
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def stacked(world_size: int, folder: Path) -> Iterator[str]:
    model, optimizer = sharded(world_size, Model(fused=True))
    params, rules = dict(model.named_parameters()), preset("torchtitan-w13")
    optim_state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    parts, part_optim = split_state_dict(params, optim_state, rules)
    dcp.save({"model": parts, "optimizer": part_optim}, checkpoint_id=folder / "split")

    other, other_optimizer = sharded(world_size, Model(fused=False))
    target: dict[str, Any] = {"model": dict(other.named_parameters())}
    target["optimizer"] = get_optimizer_state_dict(other, other_optimizer, options=FLAT)
    if target["model"].keys() != parts.keys() or target["optimizer"].keys() != part_optim.keys():
        yield f"other keys: {sorted(parts)}, {sorted(part_optim)}"
    dcp.load(target, checkpoint_id=folder / "split")
    for stem, suffix in STEMS.items():
        for lead, name, values, found in (
            ("", "", params, target["model"]),
            ("state.", ".exp_avg", optim_state, target["optimizer"]),
            ("state.", ".exp_avg_sq", optim_state, target["optimizer"]),
        ):
            halves = values[f"{lead}{stem}w13{name}"].full_tensor().unbind(-2)
            for part, half in zip(("w1", "w3"), halves, strict=True):
                if not torch.equal(found[f"{lead}{stem}{part}{suffix}{name}"].full_tensor(), half):
                    yield f"{stem}{part}{name} is wrong"

    before = {key: value.detach().full_tensor() for key, value in params.items()}
    for param in params.values():
        local_shard(param.detach()).zero_()
    dcp.load({"model": parts}, checkpoint_id=folder / "split")
    merged, _ = merge_state_dict(parts, part_optim, rules)
    for key, value in before.items():
        if merged[key] is not params[key] or not torch.equal(merged[key].full_tensor(), value):
            yield f"{key} was not filled"
