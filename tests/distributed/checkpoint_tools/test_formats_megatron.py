"""Megatron-FSDP: flat slices of a buffer, written by DCP as the parts that Megatron writes, and loaded elsewhere.

A parameter is made as Megatron-FSDP makes it (``param_and_grad_buffer.py`` of megatron-core 0.16.1): a DTensor of the
whole shape, whose local tensor is a slice of the flat elements of its tensor-parallel rows, named by
``megatron_fsdp_slice``; the optimizer keeps flat local tensors.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed.launch import mesh, run_cases, spawn

pytestmark = pytest.mark.distributed
LAYER = "decoder.layers.0.mlp"
FC1, FC2, BIAS = f"{LAYER}.linear_fc1.weight", f"{LAYER}.linear_fc2.weight", f"{LAYER}.linear_fc1.bias"

# Where the slices of the data-parallel ranks end, of 12 × 5 = 60 elements or, with tensor parallelism, 6 × 5 = 30: in
# mid-row, on both sides of the middle, empty at either end.
ENDS = {
    "in mid-row": (7, 31),
    "in the gate only": (4, 13),
    "whole rows": (10, 35),
    "empty first": (0, 22),
    "empty in the middle": (17, 17),
    "empty last": (22, 1000),
}


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.long)])
def test_flat_slices_are_split_saved_and_loaded(dp: int, tp: int, tmp_path: Path) -> None:
    spawn(run_flat_slices, dp * tp, tmp_path, tmp_path, dp, tp)


def run_flat_slices(rank: int, world_size: int, folder: Path, dp: int, tp: int) -> None:
    del rank, world_size
    device_mesh = mesh(dp, tp, names=("dp", "tp"))
    run_cases({name: lambda n=name: round_trip(folder / n, device_mesh, n) for name in ENDS})


def parameter(whole: Tensor, device_mesh: DeviceMesh, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The parameter, and this rank's elements."""
    dp, tp = device_mesh.get_coordinate()
    rows = whole.chunk(device_mesh.size(1), 0)[tp].reshape(-1)
    edges = [0, *(min(end, rows.numel()) for end in ends[: device_mesh.size(0) - 1]), rows.numel()]
    local = rows[edges[dp] : edges[dp + 1]].clone()
    param = DTensor.from_local(
        local, device_mesh, [Shard(0), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    param.megatron_fsdp_slice = slice(edges[dp], edges[dp + 1])
    param.megatron_fsdp_dist_index = SimpleNamespace(tp_dim="tp")
    return param, local


def halves(whole: Tensor, tp: int, half: int) -> Tensor:
    """Gate or up of every tensor-parallel rank, by indexing: ``[gate0; up0; gate1; up1]``."""
    return torch.cat([part.chunk(2, 0)[half] for part in whole.chunk(tp, 0)])


def state_of(wholes: dict[str, Tensor], device_mesh: DeviceMesh, ends: tuple[int, ...]) -> tuple[Any, Any]:
    made = {key: parameter(whole, device_mesh, ends) for key, whole in wholes.items()}
    state = {
        key: {"step": torch.tensor(2.0), "exp_avg": local + 0.5, "master_param": local.double() + 0.25}
        for key, (_, local) in made.items()
        if key != FC2
    }
    model = {key: param for key, (param, _) in made.items()}
    return model, {"state": state, "param_groups": [{"params": list(state), "lr": 0.5}]}


def round_trip(folder: Path, device_mesh: DeviceMesh, name: str) -> Iterator[str]:
    tp = device_mesh.size(1)
    fc1 = torch.arange(60.0).view(12, 5)
    wholes = {FC1: fc1, BIAS: torch.arange(12.0), FC2: torch.arange(30.0).view(5, 6)}
    rules, values = preset("megatron-swiglu"), {"tp_size": tp}
    model, optim = state_of(wholes, device_mesh, ENDS[name])
    # linear_fc2 tells that there is a gate; it is not split, and here it is not saved.
    parts, part_optim = split_state_dict(model, optim, rules, values=values)
    del parts[FC2]
    dcp.save({"model": parts, "optimizer": part_optim}, checkpoint_id=folder)

    flat_mesh = device_mesh._flatten(f"all_{name.replace(' ', '_')}")
    for key in (FC1, BIAS):
        for half, suffix in enumerate(("_w", "_v")):
            expected = halves(wholes[key], tp, half)
            empty = lambda dtype, e=expected: distribute_tensor(  # noqa: E731
                torch.zeros_like(e, dtype=dtype), flat_mesh, [Shard(0)], src_data_rank=None
            )
            loaded = {
                "model": {key + suffix: empty(torch.float32)},
                "optimizer": {
                    "state": {key + suffix: {"exp_avg": empty(torch.float32), "master_param": empty(torch.float64)}}
                },
            }
            dcp.load(loaded, checkpoint_id=folder)
            state = loaded["optimizer"]["state"][key + suffix]
            found = [loaded["model"][key + suffix], state["exp_avg"], state["master_param"]]
            for tensor, shift in zip(found, (0.0, 0.5, 0.25), strict=True):
                if not torch.equal(tensor.full_tensor(), (expected + shift).to(tensor.dtype)):
                    yield f"{key}{suffix} + {shift} was saved wrongly"

    # Into slices that end elsewhere: filled through the parts, merged to the very tensors.
    zeros = {key: torch.zeros_like(whole) for key, whole in wholes.items()}
    target, target_optim = state_of(zeros, device_mesh, (23, 41))
    parts, part_optim = split_state_dict(target, target_optim, rules, values=values)
    del parts[FC2]
    dcp.load({"model": parts, "optimizer": part_optim}, checkpoint_id=folder)
    merged, merged_optim = merge_state_dict(parts, part_optim, rules, values=values)
    for key in (FC1, BIAS):
        _, local = parameter(wholes[key], device_mesh, (23, 41))
        state = merged_optim["state"][key]
        if merged[key] is not target[key] or not torch.equal(local_shard(merged[key]), local):
            yield f"{key} was not filled"
        if state["exp_avg"] is not target_optim["state"][key]["exp_avg"] or state["exp_avg"].dim() != 1:
            yield f"exp_avg of {key} is not what the optimizer holds"
        if not torch.equal(state["exp_avg"], local + 0.5) or not torch.equal(
            state["master_param"], local.double() + 0.25
        ):
            yield f"the state of {key} was not filled"
        if state["step"].item() != 2:
            yield f"step of {key} is {state['step']}"


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
    made = {key: parameter(wholes[key], on, (7, 31, 40)) for key, on in ((FC1, dense), (EXPERT, expert))}
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
