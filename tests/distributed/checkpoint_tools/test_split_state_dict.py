"""Splitting and merging state dicts in memory: views, both forms of optimizer state, and through DCP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from checkpoint_tools.look.verify import verify
from fsdp_offload.checkpoint import check_storage_writer
from fsdp_offload.checkpoint.names import flattened
from tests.checkpoint_tools.offline import DOWN, FUSED, GATE, UP, part_of, rule
from tests.distributed.launch import mesh, spawn


class Quantized(Tensor):
    """Stands for a tensor of blocks with scales."""

    @staticmethod
    def __new__(cls, data: Tensor) -> "Quantized":
        return data.as_subclass(cls)


def states(fused: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {FUSED: fused, DOWN: torch.randn(3, 6)}
    state = {
        FUSED: {"step": torch.tensor(3.0), "exp_avg": fused + 1, "exp_avg_sq": fused * 2},
        DOWN: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 6)},
    }
    return model, {"state": state, "param_groups": [{"lr": 0.1, "params": [FUSED, DOWN]}]}


# In one process ------------------------------------------------------------------------------------------------------


def test_parts_are_views_and_merging_gives_back_the_fused_tensors() -> None:
    whole = torch.randn(12, 3)
    model, optim = states(whole)
    parts, part_optim = split_state_dict(model, optim, [rule()])
    assert list(parts) == [GATE, UP, DOWN]
    assert torch.equal(parts[UP], whole[6:])
    assert parts[UP].data_ptr() == whole[6:].data_ptr()
    assert torch.equal(part_optim["state"][GATE]["exp_avg"], optim["state"][FUSED]["exp_avg"][:6])
    assert part_optim["param_groups"] == [{"lr": 0.1, "params": [GATE, UP, DOWN]}]
    parts[GATE].fill_(7)
    merged, merged_optim = merge_state_dict(parts, part_optim, [rule()])
    assert merged[FUSED] is whole
    assert bool((whole[:6] == 7).all())
    assert merged_optim["state"][FUSED]["exp_avg"] is optim["state"][FUSED]["exp_avg"]
    assert merged_optim["param_groups"] == optim["param_groups"]
    assert list(model) == [FUSED, DOWN]  # the caller's own is untouched


@pytest.mark.parametrize(("param_dtype", "is_kept"), [(torch.float32, False), (torch.bfloat16, True)])
def test_masters_are_split_unless_they_repeat_the_parameter(param_dtype: torch.dtype, is_kept: bool) -> None:
    model, optim = states(torch.randn(12, 3).to(param_dtype))
    optim["state"][FUSED]["master_param"] = torch.randn(12, 3)
    _, parts = split_state_dict(model, optim, [rule()])
    assert ("master_param" in parts["state"][GATE]) == is_kept


@pytest.mark.parametrize("layout", ["concatenated", "interleaved", "grouped", "stacked"])
def test_parts_of_a_plain_tensor(layout: Any) -> None:
    """Views but where they are grouped: those are copies, and written back. Parts from elsewhere are put together."""
    whole = torch.arange(12.0).view(2, 6) if layout == "stacked" else torch.arange(12.0)[:, None]
    index = torch.arange(12).view(whole.shape)
    chosen = rule(layout=layout, groups=3 if layout == "grouped" else 1)
    expected = part_of(chosen, index, 1)
    parts, _ = split_state_dict({FUSED: whole}, None, [chosen])
    assert torch.equal(parts[UP], expected.float())
    assert (parts[UP].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == (layout != "grouped")
    copies = {key: part.clone() for key, part in parts.items()}
    assert torch.equal(merge_state_dict(copies, None, [chosen])[0][FUSED], whole)
    parts[UP].zero_()
    merged, _ = merge_state_dict(parts, None, [chosen])
    assert merged[FUSED] is whole
    assert torch.equal(whole.flatten(), torch.arange(12.0).index_fill(0, expected.flatten(), 0))


def test_stacked_weights_of_torchtitan() -> None:
    """As its ``overrides/fused_swiglu.py`` has them, whose forward takes ``w13.unbind(-2)`` for gate and up."""
    dense, experts = "feed_forward.", "routed_experts.inner_experts."
    model = {f"{dense}w13": torch.randn(7, 2, 5), f"{experts}w13": torch.randn(3, 7, 2, 5)}
    state = {key: {"exp_avg": weight * 2} for key, weight in model.items()}
    optim = flattened({"state": state, "param_groups": [{"params": [*model], "lr": 1.0}]})
    parts, part_optim = split_state_dict(model, optim, preset("torchtitan-w13"))
    separate = [f"{dense}w1.weight", f"{dense}w3.weight", f"{experts}w1_EFD", f"{experts}w3_EFD"]
    assert list(parts) == separate
    assert part_optim.keys() == {
        name for key in separate for name in (f"state.{key}.exp_avg", f"param_groups.{key}.lr")
    }
    for key, half in zip(separate, (half for weight in model.values() for half in weight.unbind(-2)), strict=True):
        assert torch.equal(parts[key], half)
        assert torch.equal(part_optim[f"state.{key}.exp_avg"], half * 2)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("row_norms", torch.randn(12), r"mlp\.gate_up\.weight\.row_norms has shape \(12,\)"),
        ("exp_avg", Quantized(torch.randn(12, 3)), r"gate_up\.weight\.exp_avg is a Quantized, of which no views"),
        ("other", None, r"state of other\.gate_up\.weight, which is fused, and the model"),  # it would stay, silently
    ],
)
def test_state_that_cannot_be_split(name: str, value: Any, match: str) -> None:
    model, optim = states(torch.randn(12, 3))
    if value is None:
        optim["state"]["other.gate_up.weight"] = optim["state"][FUSED]
    else:
        optim["state"][FUSED][name] = value
    with pytest.raises(ValueError, match=match):
        split_state_dict(model, optim, [rule()])


def test_parts_that_do_not_belong_together() -> None:
    (one, _), (other, _) = (split_state_dict({FUSED: torch.randn(12, 3)}, None, [rule()]) for _ in range(2))
    with pytest.raises(ValueError, match="split from different tensors"):
        merge_state_dict({GATE: one[GATE], UP: other[UP]}, None, [rule()])
    model, optim = states(torch.randn(12, 3))
    parts, part_optim = split_state_dict(model, optim, [rule()])
    part_optim["state"][GATE]["step"].fill_(9)  # a copy
    with pytest.raises(ValueError, match=r"gate\.weight\.step.*one fused value cannot be both"):
        merge_state_dict(parts, part_optim, [rule()])
    with pytest.raises(ValueError, match="nothing is left"):
        split_state_dict({FUSED: torch.randn(2)}, None, [rule(layout="stacked")])


# On ranks ------------------------------------------------------------------------------------------------------------


def sharded(whole: Tensor, dim: int) -> DTensor:
    return distribute_tensor(whole.clone(), mesh(dist.get_world_size()), [Shard(dim)], src_data_rank=None)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_async_save_and_the_writer_of_hugging_face(one: DeviceMesh, tmp_path: Path) -> None:
    """The staged copy has the parts as they were when the save began."""
    whole = torch.randn(12, 3)
    fused = distribute_tensor(whole.clone(), one, [Shard(0)])
    parts, _ = split_state_dict({FUSED: fused}, None, [rule()])
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"))
    check_storage_writer(parts, writer)
    dcp.save(parts, storage_writer=writer)
    saving = dcp.async_save(parts, checkpoint_id=tmp_path / "dcp")
    fused.to_local().zero_()
    saving.result()
    assert not verify(tmp_path / "dcp")
    loaded = {GATE: torch.zeros(6, 3), UP: torch.zeros(6, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    for found in (loaded, load_file(file)):
        assert torch.equal(torch.cat([found[GATE], found[UP]]), whole)


def test_sharded_parts_from_elsewhere_are_refused(one: DeviceMesh) -> None:
    parts = {key: distribute_tensor(torch.randn(6, 3), one, [Shard(0)]) for key in (GATE, UP)}
    with pytest.raises(ValueError, match="were not made by split_state_dict"):
        merge_state_dict(parts, None, [rule()])


@pytest.mark.distributed
def test_state_beside_a_sharded_parameter(tmp_path: Path) -> None:
    spawn(run_state_beside, 2, tmp_path)


def run_state_beside(rank: int, world_size: int) -> None:
    """Sharded otherwise, whole on every rank, or of this rank alone; what cannot be told is refused."""
    whole = torch.arange(12.0 * 4).view(12, 4)
    half = whole[6 * rank : 6 * rank + 6].clone()
    optim = {"state": {FUSED: {"columns": sharded(whole, 1), "whole": whole.clone(), "half": half}}}
    optim["param_groups"] = [{"params": [FUSED], "lr": 1.0}]
    _, parts = split_state_dict({FUSED: sharded(whole, 0)}, optim, [rule()])
    up = parts["state"][UP]
    assert torch.equal(up["whole"], whole[6:])
    (piece,) = up["columns"].__create_chunk_list__()
    assert (piece.offsets, piece.sizes) == ((0, 2 * rank), (6, 2))
    (piece,) = up["half"].__create_chunk_list__()
    assert (piece.offsets, piece.sizes) == (((6, 0), (0, 4)), ((0, 0), (6, 4)))[rank]
    optim["state"][FUSED] = {"column_sums": torch.zeros(24 // world_size * 2)}  # as many elements as the shard
    with pytest.raises(ValueError, match=r"column_sums has shape \(24,\), its parameter \(12, 4\)"):
        split_state_dict({FUSED: sharded(whole, 0)}, optim, [rule()])
