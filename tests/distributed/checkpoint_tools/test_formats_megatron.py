"""Megatron-FSDP: experts over another number of tensor-parallel ranks; the optimizer keeps flat local tensors."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from tests.checkpoint_tools.formats import megatron_parameter
from tests.distributed.launch import mesh, run_cases, spawn

pytestmark = pytest.mark.distributed
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def halves(whole: Tensor, tp: int, half: int) -> Tensor:
    """Gate or up of every tensor-parallel rank, by indexing: ``[gate0; up0; gate1; up1]``."""
    return torch.cat([part.chunk(2, 0)[half] for part in whole.chunk(tp, 0)])


# Experts, over another number of tensor-parallel ranks ---------------------------------------------------------------

EXPERT = "mlp.experts.linear_fc1.weight0"


def test_experts_are_divided_by_their_own_mesh(tmp_path: Path) -> None:
    spawn(run_experts, 4, tmp_path, tmp_path)


def run_experts(rank: int, world_size: int, folder: Path) -> None:
    del rank, world_size
    meshes = {(dp, tp): mesh(dp, tp, names=("dp", "tp")) for dp, tp in ((2, 2), (4, 1), (1, 4))}
    for dense, expert in itertools.permutations(meshes, 2):
        run_cases(
            {f"{dense}, {expert}": lambda d=dense, e=expert: experts_of(folder / f"{d}{e}", meshes[d], meshes[e])}
        )


def experts_of(folder: Path, dense: DeviceMesh, expert: DeviceMesh) -> Iterator[str]:
    wholes = {FC1: torch.arange(80.0).view(16, 5), EXPERT: 100 + torch.arange(80.0).view(16, 5)}
    meshes = {FC1: dense, EXPERT: expert}
    made = {key: megatron_parameter(wholes[key], on, (7, 31, 40)[: on.size(0) - 1]) for key, on in meshes.items()}
    model: dict[str, Any] = {key: param for key, (param, _) in made.items()}
    downs = {key.replace("fc1", "fc2"): torch.zeros(5, 8) for key in made}
    rules, tp = preset("megatron-swiglu"), dense.size(1)
    try:
        split_state_dict({**model, **downs}, None, rules, values={"tp_size": tp, "etp_size": tp})
        yield "the dense layers' number was taken for experts"
    except ValueError as error:
        if f"{EXPERT}: expected etp_size={expert.size(1)}" not in str(error):
            yield str(error)
    optim = {
        "state": {key: {"exp_avg": local + 0.5} for key, (_, local) in made.items()},
        "param_groups": [{"params": list(made), "lr": 0.5}],
    }
    for values in ({"tp_size": tp}, {}):
        parts, part_optim = split_state_dict({**model, **downs}, optim, rules, values=values)
        merged, merged_optim = merge_state_dict(parts, part_optim, rules, values=values)
        for key in made:
            if (
                merged[key] is not model[key]
                or merged_optim["state"][key]["exp_avg"] is not optim["state"][key]["exp_avg"]
            ):
                yield f"{key} was not merged with {values}"
    fused = {key: part for key, part in parts.items() if key not in downs}
    dcp.save({"model": fused, "optimizer": part_optim}, checkpoint_id=folder)
    for key, whole in wholes.items():
        for half, suffix in enumerate(("_w", "_v")):
            expected = halves(whole, (expert if key == EXPERT else dense).size(1), half)
            loaded: Any = {
                "model": {key + suffix: torch.zeros_like(expected)},
                "optimizer": {"state": {key + suffix: {"exp_avg": torch.zeros_like(expected)}}},
            }
            dcp.load(loaded, checkpoint_id=folder)
            moment = loaded["optimizer"]["state"][key + suffix]["exp_avg"]
            if not torch.equal(loaded["model"][key + suffix], expected) or not torch.equal(moment, expected + 0.5):
                yield f"{key}{suffix} was saved wrongly"
