"""Beside Megatron's own code: what it makes of a model and its optimizer's state, and what we make of the same.

``megatron_reference.json`` holds what Megatron's functions gave (``megatron_reference.py`` writes it); where
megatron-core is installed they are run here as well.
"""

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import Experts, get_optimizer_state_dict, save, with_parameter_chunks
from fsdp_offload.fsdp.dtensor import local_shard
from tests.async_writers import read_checkpoint
from tests.distributed.launch import mesh, run_cases, spawn
from tests.distributed.megatron_model import (
    GDN_DIMS,
    MOMENTS,
    SHAPES,
    Layout,
    Module,
    begin_state,
    build,
    described,
    different,
    model_state,
    optimizer_name,
    own_of,
    whole_of,
)
from tests.distributed.megatron_reference import (
    FIXTURE,
    KINDS,
    MESHES,
    case_name,
    megatron_layout,
    megatron_state,
    numbered_by_megatron,
    reference_of,
    split_by_megatron,
)

pytestmark = pytest.mark.distributed
POLICY = OffloadPolicy(bucket_bytes=1 << 12)


def offloaded(layout: Layout, make: Any = None, *, zeros: bool = False) -> tuple[Module, torch.optim.Optimizer]:
    """The model and its offloaded optimizer; with state, unless it is to be loaded."""
    model = build(layout, make, zeros=zeros)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    if not zeros:
        begin_state(optimizer, params_of(model), own_of(layout))
    return model, optimizer


def params_of(model: Module) -> dict[str, torch.nn.Parameter]:
    return {name: model.get_parameter(f"module.{name}") for name in SHAPES}


def live(model: Module, optimizer: torch.optim.Optimizer, *, for_load: bool = False) -> tuple[Any, Any]:
    """As Megatron has them: the wrapper's ``state_dict()``, and the optimizer with one more ``module.`` in front."""
    state = get_optimizer_state_dict(model, optimizer, for_load=for_load, fsdp_dtensor=True)
    return model_state(model), {
        part: {f"module.{name}": values for name, values in of.items()} for part, of in state.items()
    }


def packed_by_megatron(model: Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As ``sharded_param_state_fsdp_dtensor`` of its DistributedOptimizer: the values of ``optimizer.state``."""
    names = {param: f"module.{name}" for name, param in model.named_parameters()}
    (group,) = optimizer.param_groups
    meta = {names[param]: {key: group[key] for key in group if key != "params"} for param in group["params"]}
    return {"state": {names[p]: dict(state) for p, state in optimizer.state.items()}, "param_to_group_meta": meta}


def load_as_megatron(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """As ``load_state_dict`` of its DistributedOptimizer: param groups that list names, in the order of the groups."""
    names = list(packed["param_to_group_meta"])
    groups = [{**packed["param_to_group_meta"][names[0]], "params": names}]
    optimizer.load_state_dict({"state": packed["state"], "param_groups": groups})


def moments(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for param in optimizer.param_groups[0]["params"]:
        yield from (local_shard(optimizer.state[param][key]) for key in MOMENTS)


def split(layout: Layout, model: Module, values: Any, optim: Any) -> tuple[Any, Any]:
    values, optim = split_state_dict(
        values, optim, preset("megatron-swiglu"), values={"tp_size": layout.tp}, model=model
    )
    return split_state_dict(values, optim, preset("megatron-gdn"), values={"tp_size": layout.tp, **GDN_DIMS})


def merge(layout: Layout, values: Any, optim: Any) -> tuple[Any, Any]:
    values, optim = merge_state_dict(values, optim, preset("megatron-gdn"), values={"tp_size": layout.tp, **GDN_DIMS})
    return merge_state_dict(values, optim, preset("megatron-swiglu"), values={"tp_size": layout.tp})


# The fixture ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [sizes for sizes in MESHES if sizes != (2, 2)])  # a seed's test
def test_keys_sizes_chunks_and_values_are_those_of_megatron(dp: int, tp: int, tmp_path: Path) -> None:
    spawn(run_against_the_fixture, dp * tp, tmp_path, dp, tp)


def run_against_the_fixture(rank: int, world_size: int, dp: int, tp: int) -> None:
    assert world_size == dp * tp
    device_mesh = mesh(dp, tp, names=("dp", "tp"))

    def compare(kind: str) -> Iterator[str]:
        layout = Layout(device_mesh, kind)
        model, optimizer = offloaded(layout)
        values, optim = split(layout, model, *live(model, optimizer))
        found = described({"model": values, "optimizer": optim})
        assert len(found) > 90
        yield from different(found, reference_of(case_name(dp, tp, kind), rank))
        if set(optim["param_to_group_meta"]) != {optimizer_name(name) for name in SHAPES}:
            yield "param_to_group_meta is not that of the parameters"
        # What Megatron itself packs, values without chunks whose placements are nominal.
        packed = packed_by_megatron(model, optimizer)
        values, optim = split(layout, model, model_state(model), packed)
        yield from different(described({"model": values, "optimizer": optim}), found)
        _, other = offloaded(layout, zeros=True)
        load_as_megatron(other, packed)
        for one, same in zip(moments(optimizer), moments(other), strict=True):
            if not torch.equal(one, same):
                yield "load_state_dict of Megatron's dict gave other state"

    run_cases({kind: partial(compare, kind) for kind in KINDS})


def test_experts_have_the_numbers_that_megatron_gives_them() -> None:
    """But biases of grouped experts, which Megatron leaves as they are: two ranks would save them under one key."""
    keys = [key for key in SHAPES if "experts" in key]
    ours = [Experts.of_rank(1, 2).global_name(key) for key in keys]
    theirs = json.loads(FIXTURE.read_text())["experts"]
    assert {key for key in ours if "experts.linear_fc1.bias" not in key} == {
        key for key in theirs if "experts.linear_fc1.bias" not in key
    }
    assert {f"{key[:-1]}{int(key[-1]) + 2}" for key in theirs if "linear_fc1.bias" in key and "local" not in key} <= {
        *ours
    }


@pytest.mark.parametrize(("kind", "tp"), [("uneven", 1), ("in mid-row", 1), ("even", 2)])
def test_parameters_that_dcp_would_misread_are_not_written(kind: str, tp: int, tmp_path: Path) -> None:
    """Of a slice DCP knows nothing, nor of the mesh's order: it goes by nominal placements, from left to right."""
    spawn(run_misread, 2 * tp, tmp_path, tmp_path, kind, tp)


def run_misread(rank: int, world_size: int, folder: Path, kind: str, tp: int) -> None:
    model = build(Layout(mesh(world_size // tp, tp, names=("dp", "tp")), kind))
    with pytest.raises(ValueError, match="nothing has been written: DCP would save"):
        save({"model": dict(model.named_parameters())}, checkpoint_id=folder / "no")
    assert not list((folder / "no").glob("*.distcp"))
    save({"model": with_parameter_chunks(model, model_state(model))}, checkpoint_id=folder / "yes")


FC1 = "module.decoder.layers.0.mlp.linear_fc1.weight"


def test_values_that_tensor_parallelism_cuts_first(tmp_path: Path) -> None:
    """Even slices have the size that DCP takes them for, in other places: averages of weights carry nothing else."""
    spawn(run_cut_first, 4, tmp_path, tmp_path)


def run_cut_first(rank: int, world_size: int, folder: Path) -> None:
    model = build(Layout(mesh(2, 2, names=("dp", "tp")), "even"))
    value = model_state(model)[FC1]
    average = torch.zeros_like(value)
    local_shard(average).copy_(local_shard(value))
    whole = whole_of(FC1)

    for name, unknown in {"state_dict": value, "average": average}.items():
        with pytest.raises(ValueError, match="nothing has been written: DCP would save"):
            save({"w": unknown}, checkpoint_id=folder / name)
    save(with_parameter_chunks(model, {"average.w": average}), checkpoint_id=folder / "carried")
    assert torch.equal(read_checkpoint(folder / "carried")["average.w"], whole)


# With the package ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_megatrons_own_code_beside_ours(dp: int, tp: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="what it gave is in the fixture, which is compared without it")
    spawn(run_beside, dp * tp, tmp_path, dp, tp)


def run_beside(rank: int, world_size: int, dp: int, tp: int) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as handlers

    warnings.filterwarnings("ignore")
    assert world_size == dp * tp

    def compare(kind: str) -> Iterator[str]:
        layout = megatron_layout(dp, tp, kind)
        their_model, *their_state = megatron_state(layout)
        theirs = split_by_megatron(their_model, *their_state)
        model, optimizer = offloaded(layout, make_fsdp_dtensor)
        ours = live(model, optimizer)
        if hasattr(handlers, "handle_gdn_in_state_dict"):
            ours = split(layout, model, *ours)
        else:  # 0.16.1: what it does not split stays fused
            ours = split_state_dict(*ours, preset("megatron-swiglu"), values={"tp_size": layout.tp}, model=model)
        found = [described({"model": values, "optimizer": optim}) for values, optim in (ours, theirs)]
        yield from different(*found, (rank,))

    run_cases({kind: partial(compare, kind) for kind in KINDS})


def test_megatron_numbers_experts_as_the_fixture_says() -> None:
    pytest.importorskip("megatron.core", reason="the fixture says it without the package")
    keys = [key for key in SHAPES if "experts" in key]
    assert numbered_by_megatron(1, 2, keys) == json.loads(FIXTURE.read_text())["experts"]
