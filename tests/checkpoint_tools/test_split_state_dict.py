"""Splitting and merging state dicts in memory: views, both forms of optimizer state, and through DCP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpoint_tools.live import merge_state_dict, split_state_dict
from checkpoint_tools.rules import Rule
from tests.distributed.launch import mesh, run_cases, spawn

FUSED, DOWN = "mlp.gate_up.weight", "mlp.down.weight"
GATE, UP = "mlp.gate.weight", "mlp.up.weight"


def rule(**fields: Any) -> Rule:
    return Rule(fused="{p}gate_up.weight", parts=("{p}gate.weight", "{p}up.weight"), **fields)


def states(fused: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {FUSED: fused, DOWN: torch.randn(3, 6)}
    state = {
        FUSED: {"step": torch.tensor(3.0), "exp_avg": fused + 1, "exp_avg_sq": fused * 2},
        DOWN: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 6)},
    }
    return model, {"state": state, "param_groups": [{"lr": 0.1, "params": [FUSED, DOWN]}]}


def flat(optim: dict[str, Any]) -> dict[str, Any]:
    state = {f"state.{f}.{n}": v for f, values in optim["state"].items() for n, v in values.items()}
    return state | {f"param_groups.{f}.lr": group["lr"] for group in optim["param_groups"] for f in group["params"]}


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


def test_flattened_optimizer_state() -> None:
    model, optim = states(torch.randn(12, 3))
    _, parts = split_state_dict(model, flat(optim), [rule()])
    assert {"state.mlp.gate.weight.exp_avg", "param_groups.mlp.up.weight.lr"} <= parts.keys()
    assert not any("gate_up" in key for key in parts)


def test_counters_are_copies_and_have_to_agree_when_merged() -> None:
    model, optim = states(torch.randn(12, 3))
    parts, part_optim = split_state_dict(model, optim, [rule()])
    steps = [part_optim["state"][name]["step"] for name in (GATE, UP)]
    assert steps[0].data_ptr() != steps[1].data_ptr()
    steps[0].fill_(9)
    with pytest.raises(ValueError, match=r"gate_up\.weight\.step.*cannot be all of them"):
        merge_state_dict(parts, part_optim, [rule()])


def test_parts_from_elsewhere_are_copied_together() -> None:
    whole = torch.randn(12, 3)
    for layout, fields in (("interleaved", {}), ("grouped", {"groups": 3}), ("concatenated", {})):
        merging = rule(layout=layout, **fields)
        index = merging.combs(12, {}, "x")
        pieces = [torch.cat([whole[c.start + b * c.distance :][: c.length] for b in range(c.blocks)]) for c in index]
        merged, _ = merge_state_dict(dict(zip((GATE, UP), pieces, strict=True)), None, [merging])
        assert torch.equal(merged[FUSED], whole), layout


def test_state_of_another_shape_is_an_error_that_names_it() -> None:
    model, optim = states(torch.randn(12, 3))
    optim["state"][FUSED]["row_norms"] = torch.randn(12)
    with pytest.raises(ValueError, match=r"mlp\.gate_up\.weight\.row_norms has shape \(12,\)"):
        split_state_dict(model, optim, [rule()])


@pytest.mark.parametrize(("param_dtype", "is_kept"), [(torch.float32, False), (torch.bfloat16, True)])
def test_masters_are_split_unless_they_repeat_the_parameter(param_dtype: torch.dtype, is_kept: bool) -> None:
    model, optim = states(torch.randn(12, 3).to(param_dtype))
    optim["state"][FUSED]["master_param"] = torch.randn(12, 3)
    _, parts = split_state_dict(model, optim, [rule()])
    assert ("master_param" in parts["state"][GATE]) == is_kept


# On ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_are_split_saved_and_loaded(world_size: int, tmp_path: Path) -> None:
    spawn(run_on_ranks, world_size, tmp_path, tmp_path)


def run_on_ranks(rank: int, world_size: int, folder: Path) -> None:
    del rank, world_size
    layouts = {
        "concatenated": rule(),
        "interleaved": rule(layout="interleaved"),
        "grouped": rule(layout="grouped", groups=2),
        "uneven parts": rule(sizes=(3, "rest")),
        "columns": rule(dim=1, layout="interleaved"),
    }
    cases = {
        f"{name}, Shard({dim})": lambda f=folder / f"{name}{dim}", r=chosen, d=dim: round_trip(f, r, d)
        for name, chosen in layouts.items()
        for dim in (0, 1)
    }
    run_cases(cases)


def sharded(whole: Tensor, dim: int) -> DTensor:
    return distribute_tensor(whole.clone(), mesh(dist.get_world_size()), [Shard(dim)], src_data_rank=None)


def round_trip(folder: Path, chosen: Rule, dim: int) -> Iterator[str]:
    """Split, saved; loaded as plain shards of the parts, and into the split of another fused tensor."""
    whole = torch.arange(12.0 * 4).view(12, 4)
    model = {FUSED: sharded(whole, dim)}
    optim = {"state": {FUSED: {"step": torch.tensor(1.0), "exp_avg": sharded(whole + 0.5, dim)}}, "param_groups": []}
    optim["param_groups"].append({"params": [FUSED], "lr": 1.0})
    parts, part_optim = split_state_dict(model, optim, [chosen])
    dcp.save({"model": parts, "optim": part_optim}, checkpoint_id=folder)
    combs = chosen.combs(whole.shape[chosen.dim], {}, FUSED)
    for key, comb in zip((GATE, UP), combs, strict=True):
        index = [comb.start + b * comb.distance + at for b in range(comb.blocks) for at in range(comb.length)]
        expected = whole.index_select(chosen.dim, torch.tensor(index))
        loaded = {"model": {key: sharded(torch.zeros_like(expected), 0)}}
        loaded["optim"] = {"state": {key: {"exp_avg": sharded(torch.zeros_like(expected), 1)}}}
        dcp.load(loaded, checkpoint_id=folder)
        if not torch.equal(loaded["model"][key].full_tensor(), expected):
            yield f"{key} was saved wrongly"
        if not torch.equal(loaded["optim"]["state"][key]["exp_avg"].full_tensor(), expected + 0.5):
            yield f"exp_avg of {key} was saved wrongly"
    target = {FUSED: sharded(torch.zeros_like(whole), 1 - dim)}
    parts, _ = split_state_dict(target, None, [chosen])
    dcp.load({"model": parts}, checkpoint_id=folder)
    merged, _ = merge_state_dict(parts, None, [chosen])
    if merged[FUSED] is not target[FUSED] or not torch.equal(merged[FUSED].full_tensor(), whole):
        yield "loading into the parts did not fill the whole"


def test_sharded_parts_from_elsewhere_are_refused(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        one = init_device_mesh("cpu", (1,))
        parts = {key: distribute_tensor(torch.randn(6, 3), one, [Shard(0)]) for key in (GATE, UP)}
        with pytest.raises(ValueError, match="were not made by split_state_dict"):
            merge_state_dict(parts, None, [rule()])
    finally:
        dist.destroy_process_group()
