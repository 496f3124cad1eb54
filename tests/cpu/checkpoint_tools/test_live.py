"""Splitting and merging live state dicts: parts of shards are shards of parts, and loading into them fills the whole.

All ranks are simulated in this process, under torch's fake process group. DCP asks a part for its chunks and for views
of them, to write from and to load into; so do the tests.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint_tools import Rule, merge_state_dict, preset, split_state_dict, verify
from fsdp_offload.checkpoint import save
from fsdp_offload.checkpoint.names import flattened
from fsdp_offload.fsdp.dtensor import local_shard
from tests.checkpoint_tools.formats import megatron_parameter
from tests.checkpoint_tools.saves import DOWN, FUSED, GATE, UP, part_of, rule
from tests.cpu.checkpoint_tools.test_round_trip import fused
from tests.process_groups import process_group

pytestmark = pytest.mark.distributed
FQN, PARTS = "mlp.fused", ("mlp.a", "mlp.b", "mlp.c")


@dataclass(frozen=True)
class Case:
    """A fused tensor and how it is sharded."""

    rule: Rule
    shape: tuple[int, ...]
    sharding: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    bounds: tuple[int, ...]
    is_flattened: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(2, 3))
    fields, shape = draw(fused(count=count, least=1, most_dims=3))
    dim = fields["dim"] % len(shape)
    sharding = draw(st.sampled_from(["sharded", "hybrid", "tensor parallel", "strided", "megatron"]))
    mesh = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dims = draw(st.tuples(*[st.integers(0, len(shape) - 1)] * 2))
    if sharding in ("strided", "megatron"):  # rows divide by the ranks of tensor parallelism, as Megatron asks for
        rows = math.prod(mesh)
        shape = (*(n * rows if (at == 0 and dim != 0) else n for at, n in enumerate(shape)),)
        if dim == 0 and shape[0] % rows:
            sharding = "sharded"
    bounds = draw(st.lists(st.integers(0, math.prod(shape)), min_size=mesh[0] - 1, max_size=mesh[0] - 1))
    rule = Rule(fused="{p}fused", parts=tuple(f"{{p}}{name[-1]}" for name in PARTS[:count]), **fields)
    return Case(rule, shape, sharding, mesh, dims, tuple(sorted(bounds)), draw(st.booleans()))


def sharded(case: Case, whole: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's DTensor of ``whole``, and the elements that it has, cut by indexing."""
    device_mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "tp"))
    dp, tp = divmod(rank, case.mesh[1])
    first, second = case.dims
    if case.sharding == "megatron":
        return megatron_parameter(whole, device_mesh, case.bounds)
    if case.sharding == "sharded":
        device_mesh = device_mesh._flatten()
        placements: list[Any] = [Shard(first)]
        local = chunk(whole, math.prod(case.mesh), first, rank)
    elif case.sharding == "hybrid":
        placements, local = [Replicate(), Shard(first)], chunk(whole, case.mesh[1], first, tp)
    else:
        if case.sharding == "strided":
            placements, first, second = [_StridedShard(0, split_factor=case.mesh[1]), Shard(0)], 0, 0
        elif first == second:
            placements = [Replicate(), Shard(second)]
        else:
            placements = [Shard(first), Shard(second)]
        local = chunk(whole, case.mesh[1], second, tp)
        if placements[0] != Replicate():
            local = chunk(local, case.mesh[0], first, dp)
    local = local.clone()
    return DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    ), local


def chunk(whole: Tensor, parts: int, dim: int, part: int) -> Tensor:
    """As FSDP2 and DTensor cut: the last parts may be smaller, or empty."""
    size = -(-whole.shape[dim] // parts)
    start = min(size * part, whole.shape[dim])
    return whole.narrow(dim, start, min(size, whole.shape[dim] - start))


SHIFTS = {"weight": 0.0, "of_this_rank": 0.5, "on_the_mesh": 0.25, "flat_on_the_mesh": 0.75}


def moments(case: Case, param: Tensor, local: Tensor) -> dict[str, Tensor]:
    """In every form in which an optimizer may hold them. Those of Megatron-FSDP have placements that say nothing."""
    assert isinstance(param, DTensor)

    def on_the_mesh(shift: float, shape: tuple[int, ...]) -> Tensor:
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = param.device_mesh, param.placements
        return DTensor.from_local(local + shift, mesh, placements, run_check=False, shape=shape, stride=stride)

    state = {
        "step": torch.tensor(3.0),
        "of_this_rank": local + SHIFTS["of_this_rank"],
        "on_the_mesh": on_the_mesh(SHIFTS["on_the_mesh"], tuple(param.shape)),
    }
    if case.sharding == "megatron":
        state["flat_on_the_mesh"] = on_the_mesh(SHIFTS["flat_on_the_mesh"], (param.numel(),))
    return state


def views(part: Tensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """What DCP writes from and loads into, and where in the whole part that is."""
    assert isinstance(part, DTensor)
    for each in part.__create_chunk_list__():
        where = tuple(slice(at, at + size) for at, size in zip(each.offsets, each.sizes, strict=True))
        yield where, part.__get_tensor_shard__(MetadataIndex("part", each.offsets))


@given(cases())
@settings(max_examples=150, deadline=None)
def test_parts_of_shards_are_shards_of_parts_and_fill_the_whole(case: Case) -> None:
    whole = torch.arange(float(math.prod(case.shape))).view(case.shape)
    count = len(case.rule.parts)
    names = list(SHIFTS) if case.sharding == "megatron" else list(SHIFTS)[:-1]
    shifts = {name: SHIFTS[name] for name in names}
    expected = {(name, n): part_of(case.rule, whole + shift, n) for name, shift in shifts.items() for n in range(count)}
    found = {key: torch.full_like(part, -1.0) for key, part in expected.items()}
    for rank in range(math.prod(case.mesh)):
        with process_group("fake", rank, math.prod(case.mesh)):
            param, local = sharded(case, whole, rank)
            state = moments(case, param, local)
            optim = {"state": {FQN: state}, "param_groups": [{"params": [FQN], "lr": 0.5}]}
            given_optim = flattened(optim) if case.is_flattened else optim
            model, parts_optim = split_state_dict({FQN: param}, given_optim, [case.rule])
            assert list(model) == list(PARTS[:count])
            tensors = {("weight", n): model[PARTS[n]] for n in range(count)}
            for name, n in itertools.product(names[1:], range(count)):
                part = PARTS[n]
                flat = parts_optim.get(f"state.{part}.{name}")
                tensors[name, n] = flat if case.is_flattened else parts_optim["state"][part][name]
            for key, tensor in tensors.items():
                assert tuple(tensor.shape) == tuple(expected[key].shape)
                for where, view in views(tensor):
                    assert torch.equal(view, expected[key][where])
                    found[key][where] = view
                    view.copy_(-expected[key][where])  # a load of other values
            merged, merged_optim = merge_state_dict(model, parts_optim, [case.rule])
            assert merged[FQN] is param
            assert torch.equal(local_shard(param), -sharded(case, whole, rank)[1])
            for name, value in state.items():
                if value.dim():
                    other = merged_optim[f"state.{FQN}.{name}"] if case.is_flattened else value
                    assert other is value
                    shifted = sharded(case, whole + shifts[name], rank)[1]
                    assert torch.equal(local_shard(value), -shifted), name
    assert all(torch.equal(found[key], part) for key, part in expected.items())


FC1, EXPERT = "decoder.layers.0.mlp.linear_fc1.weight", "mlp.experts.linear_fc1.weight0"


@pytest.mark.parametrize(("dense", "expert"), [*itertools.permutations([(2, 2), (4, 1), (1, 4)], 2)])
def test_experts_are_divided_by_their_own_mesh(dense: tuple[int, int], expert: tuple[int, int]) -> None:
    """Megatron-FSDP's: over another number of tensor-parallel ranks; the optimizer keeps flat local tensors."""
    meshes, rules, tp = {FC1: dense, EXPERT: expert}, preset("megatron-swiglu"), dense[1]
    wholes = {FC1: torch.arange(80.0).view(16, 5), EXPERT: 100 + torch.arange(80.0).view(16, 5)}
    found: dict[str, Any] = {}
    for rank in range(4):
        with process_group("fake", rank, 4):
            state, model = {}, {key.replace("fc1", "fc2"): torch.zeros(5, 8) for key in wholes}
            for key, sizes in meshes.items():
                device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
                model[key], local = megatron_parameter(wholes[key], device_mesh, (7, 31, 40)[: sizes[0] - 1])
                state[key] = {"exp_avg": local + 0.5}
            with pytest.raises(ValueError, match=f"{EXPERT}: expected etp_size={expert[1]}"):
                split_state_dict(model, None, rules, values={"tp_size": tp, "etp_size": tp})
            for values in ({"tp_size": tp}, {}):
                optim = {"state": state, "param_groups": [{"params": [*state], "lr": 0.5}]}
                parts, part_optim = split_state_dict(model, optim, rules, values=values)
                merged, merged_optim = merge_state_dict(parts, part_optim, rules, values=values)
                assert all(merged[key] is model[key] for key in model)
                assert all(merged_optim["state"][key]["exp_avg"] is state[key]["exp_avg"] for key in state)
            for key, moment in part_optim["state"].items():
                for name, part in ((key, parts[key]), (f"{key} moment", moment["exp_avg"])):
                    for where, view in views(part):
                        found.setdefault(name, torch.full((8, 5), -1.0))[where] = view
    for key, whole in wholes.items():
        halves = [part.chunk(2) for part in whole.chunk(meshes[key][1])]  # [gate0; up0; gate1; up1]
        for number, suffix in enumerate(("_w", "_v")):
            expected = torch.cat([half[number] for half in halves])
            assert torch.equal(found.pop(f"{key}{suffix}"), expected)
            assert torch.equal(found.pop(f"{key}{suffix} moment"), expected + 0.5)
    assert not found


# State that is not sharded as its parameter --------------------------------------------------------------------------


def states(fused: Tensor, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    state = {
        FUSED: {"step": torch.tensor(3.0), "exp_avg": fused + 1, "exp_avg_sq": fused * 2, **more},
        DOWN: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 6)},
    }
    groups = [{"lr": 0.1, "params": [FUSED, DOWN]}]
    return {FUSED: fused, DOWN: torch.randn(3, 6)}, {"state": state, "param_groups": groups}


def test_state_beside_a_sharded_parameter() -> None:
    """Sharded otherwise, whole on every rank, or of this rank alone; what cannot be told is refused."""
    whole = torch.arange(12.0 * 4).view(12, 4)
    for rank in range(2):
        with process_group("fake", rank, 2):
            rows, columns = (
                sharded(Case(rule(), (12, 4), "sharded", (2, 1), (dim, 0), (), False), whole, rank) for dim in (0, 1)
            )
            optim = {"state": {FUSED: {"columns": columns[0], "whole": whole.clone(), "half": rows[1]}}}
            optim["param_groups"] = [{"params": [FUSED], "lr": 1.0}]
            up = split_state_dict({FUSED: rows[0]}, optim, [rule()])[1]["state"][UP]
            assert torch.equal(up["whole"], whole[6:])
            (piece,) = up["columns"].__create_chunk_list__()
            assert (piece.offsets, piece.sizes) == ((0, 2 * rank), (6, 2))
            (piece,) = up["half"].__create_chunk_list__()
            assert (piece.offsets, piece.sizes) == (((6, 0), (0, 4)), ((0, 0), (6, 4)))[rank]
            optim["state"][FUSED] = {"column_sums": torch.zeros(24)}  # as many elements as the shard
            with pytest.raises(ValueError, match=r"column_sums has shape \(24,\), its parameter \(12, 4\)"):
                split_state_dict({FUSED: rows[0]}, optim, [rule()])


# Plain tensors -------------------------------------------------------------------------------------------------------


class Quantized(Tensor):
    """Stands for a tensor of blocks with scales."""

    @staticmethod
    def __new__(cls, data: Tensor) -> "Quantized":
        return data.as_subclass(cls)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved", "grouped", "stacked"])
def test_parts_are_views_and_merging_gives_back_the_fused_tensors(layout: Any) -> None:
    """But where they are grouped: those are copies, and written back. Parts from elsewhere are put together."""
    whole = torch.arange(12.0).view(2, 6) if layout == "stacked" else torch.arange(12.0)[:, None]
    index = torch.arange(12).view(whole.shape)
    chosen = rule(layout=layout, groups=3 if layout == "grouped" else 1)
    expected = part_of(chosen, index, 1)
    model, optim = states(whole)
    parts, part_optim = split_state_dict(model, optim, [chosen])
    assert list(parts) == [GATE, UP, DOWN]
    assert torch.equal(parts[UP], expected.float())
    assert torch.equal(part_optim["state"][UP]["exp_avg"], expected + 1.0)
    assert part_optim["param_groups"] == [{"lr": 0.1, "params": [GATE, UP, DOWN]}]
    assert (parts[UP].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == (layout != "grouped")
    copies = {key: part.clone() for key, part in parts.items()}
    assert torch.equal(merge_state_dict(copies, None, [chosen])[0][FUSED], whole)
    parts[UP].zero_()
    merged, merged_optim = merge_state_dict(parts, part_optim, [chosen])
    assert merged[FUSED] is whole
    assert torch.equal(whole.flatten(), torch.arange(12.0).index_fill(0, expected.flatten(), 0))
    assert merged_optim["state"][FUSED]["exp_avg"] is optim["state"][FUSED]["exp_avg"]
    assert merged_optim["param_groups"] == optim["param_groups"]
    assert list(model) == [FUSED, DOWN]  # the caller's own is untouched


@pytest.mark.parametrize(("param_dtype", "is_kept"), [(torch.float32, False), (torch.bfloat16, True)])
def test_masters_are_split_unless_they_repeat_the_parameter(param_dtype: torch.dtype, is_kept: bool) -> None:
    model, optim = states(torch.randn(12, 3).to(param_dtype), master_param=torch.randn(12, 3))
    _, parts = split_state_dict(model, optim, [rule()])
    assert ("master_param" in parts["state"][GATE]) == is_kept


def test_what_cannot_be_split_or_does_not_belong_together() -> None:
    whole = torch.randn(12, 3)
    model, optim = states(whole)
    for more, match in (
        ({FUSED: {"row_norms": torch.randn(12)}}, r"mlp\.gate_up\.weight\.row_norms has shape \(12,\)"),
        ({FUSED: {"exp_avg": Quantized(whole)}}, r"gate_up\.weight\.exp_avg is a Quantized, of which no views"),
        ({"other.gate_up.weight": {"exp_avg": whole}}, r"state of other\.gate_up\.weight, which is fused, and the mod"),
    ):
        with pytest.raises(ValueError, match=match):  # it would stay, silently
            split_state_dict(model, {**optim, "state": {**optim["state"], **more}}, [rule()])
    (one, _), (other, _) = (split_state_dict({FUSED: torch.randn(12, 3)}, None, [rule()]) for _ in range(2))
    with pytest.raises(ValueError, match="split from different tensors"):
        merge_state_dict({GATE: one[GATE], UP: other[UP]}, None, [rule()])
    parts, part_optim = split_state_dict(model, optim, [rule()])
    part_optim["state"][GATE]["step"].fill_(9)  # a copy
    with pytest.raises(ValueError, match=r"gate\.weight\.step.*one fused value cannot be both"):
        merge_state_dict(parts, part_optim, [rule()])
    with pytest.raises(ValueError, match="nothing is left"):
        split_state_dict({FUSED: torch.randn(2)}, None, [rule(layout="stacked")])


# Through DCP ---------------------------------------------------------------------------------------------------------


def test_async_save_and_the_writer_of_hugging_face(tmp_path: Path) -> None:
    """The staged copy has the parts as they were when the save began."""
    with process_group():
        one = init_device_mesh("cpu", (1,))
        whole = torch.randn(12, 3)
        param = DTensor.from_local(whole.clone(), one, [Shard(0)])
        parts, _ = split_state_dict({FUSED: param}, None, [rule()])
        save(parts, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf")))
        saving = dcp.async_save(parts, checkpoint_id=tmp_path / "dcp")
        param.to_local().zero_()
        saving.result()
        assert not verify(tmp_path / "dcp")
        loaded = {GATE: torch.zeros(6, 3), UP: torch.zeros(6, 3)}
        dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
        (file,) = (tmp_path / "hf").glob("*.safetensors")
        for found in (loaded, load_file(file)):
            assert torch.equal(torch.cat([found[GATE], found[UP]]), whole)
        separate = {key: DTensor.from_local(torch.randn(6, 3), one, [Shard(0)]) for key in (GATE, UP)}
        with pytest.raises(ValueError, match="were not made by split_state_dict"):
            merge_state_dict(separate, None, [rule()])
