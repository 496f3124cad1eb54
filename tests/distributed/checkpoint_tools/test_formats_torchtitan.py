"""The layout of torchtitan's fused SwiGLU, under FSDP2: stacked gate and up, and the optimizer's flat state by FQN.

Shapes, names and forward are those of ``overrides/fused_swiglu.py`` and ``components/optimizer/utils.py`` in torchtitan
0.3.0. Its own modules import Triton, which a CPU does not have.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed.launch import mesh, run_cases, spawn
from tests.tiers import world_sizes

EXPERTS, HIDDEN, DIM = 3, 7, 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class FeedForward(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(HIDDEN, 2, DIM)) if fused else None
        if not fused:
            self.w1, self.w3 = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.w13 is None:
            return self.w2(F.relu(self.w1(x)) * self.w3(x))
        gate, up = torch.einsum("...d,hgd->...hg", x, self.w13).unbind(-1)
        return self.w2(F.relu(gate) * up)


class GroupedExperts(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2, DIM)) if fused else None
        if not fused:
            self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.empty(EXPERTS, DIM, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.w13 is None:
            gate, up = (torch.bmm(x, weight.transpose(-2, -1)) for weight in (self.w1_EFD, self.w3_EFD))
        else:
            gate_up = torch.bmm(x, self.w13.reshape(EXPERTS, HIDDEN * 2, DIM).transpose(-2, -1))
            gate, up = gate_up.reshape(*gate_up.shape[:-1], HIDDEN, 2).unbind(-1)
        return torch.bmm(F.relu(gate) * up, self.w2_EDF.transpose(-2, -1))


class Model(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.feed_forward = FeedForward(fused=fused)
        self.routed_experts = nn.ModuleDict({"inner_experts": GroupedExperts(fused=fused)})

    def forward(self, x: Tensor) -> Tensor:
        return self.routed_experts["inner_experts"](self.feed_forward(x))


@pytest.mark.distributed
@world_sizes(2, 4)
def test_stacked_weights_become_separate_ones_of_the_same_output(world_size: int, tmp_path: Path) -> None:
    spawn(run_stacked, world_size, tmp_path, tmp_path)


def run_stacked(rank: int, world_size: int, folder: Path) -> None:
    del rank
    run_cases({"stacked": lambda: stacked(world_size, folder)})


def sharded(world_size: int, model: Model) -> tuple[Model, torch.optim.Optimizer]:
    for number, param in enumerate(model.parameters()):
        # Whole numbers, so that sums are the same in any order.
        generator = torch.Generator().manual_seed(number)
        param.detach().copy_(torch.randint(-4, 5, param.shape, generator=generator))
    fully_shard(model, mesh=mesh(world_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    return model, optimizer


def stacked(world_size: int, folder: Path) -> Iterator[str]:
    model, optimizer = sharded(world_size, Model(fused=True))
    x = torch.arange(3.0 * 4 * DIM).view(EXPERTS, 4, DIM) % 7
    model(x).sum().backward()
    optimizer.step()
    for param in model.parameters():
        local_shard(param.detach()).round_()
    params, rules = dict(model.named_parameters()), preset("torchtitan-w13")
    optim_state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    parts, part_optim = split_state_dict(params, optim_state, rules)
    dcp.save({"model": parts, "optimizer": part_optim}, checkpoint_id=folder / "split")

    with torch.no_grad():
        expected = model(x)
    model.reshard()
    other, other_optimizer = sharded(world_size, Model(fused=False))
    target: dict[str, Any] = {"model": dict(other.named_parameters())}
    target["optimizer"] = get_optimizer_state_dict(other, other_optimizer, options=FLAT)
    if target["model"].keys() != parts.keys() or target["optimizer"].keys() != part_optim.keys():
        yield f"other keys: {sorted(parts)}, {sorted(part_optim)}"
    dcp.load(target, checkpoint_id=folder / "split")
    with torch.no_grad():
        if not torch.equal(other(x), expected):
            yield "the separate weights give another output"
    for name, moment in (("feed_forward.w13", "exp_avg"), ("routed_experts.inner_experts.w13", "exp_avg_sq")):
        whole = optim_state[f"state.{name}.{moment}"].full_tensor()
        stem = name.removesuffix("w13")
        for part, half in zip(("w1", "w3"), whole.unbind(-2), strict=True):
            suffix = ".weight" if "feed" in name else "_EFD"
            if not torch.equal(target["optimizer"][f"state.{stem}{part}{suffix}.{moment}"].full_tensor(), half):
                yield f"{moment} of {stem}{part} is wrong"

    before = {key: value.detach().full_tensor() for key, value in params.items()}
    for param in params.values():
        local_shard(param.detach()).zero_()
    dcp.load({"model": parts}, checkpoint_id=folder / "split")
    merged, _ = merge_state_dict(parts, part_optim, rules)
    for key, value in before.items():
        if merged[key] is not params[key] or not torch.equal(merged[key].full_tensor(), value):
            yield f"{key} was not filled"
