"""A checkpoint that is split afterwards equals one that was split before it was saved: values, chunks, who has them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint_tools.fuse.live import split_state_dict
from checkpoint_tools.fuse.rules import Rule
from checkpoint_tools.stored.checkpoint import Checkpoint
from checkpoint_tools.stored.reading import open_checkpoint
from fsdp_offload.checkpoint.chunks import Cut, cut_chunks
from fsdp_offload.checkpoint.names import flattened
from tests.checkpoint_tools.offline import DOWN, FUSED, assert_same, chunks_of_keys, rewritten, rule
from tests.distributed.launch import mesh, spawn
from tests.tiers import world_sizes

BIAS = "mlp.gate_up.bias"
NAMES = {"fused": "{p}gate_up.{name:weight|bias}", "parts": ("{p}gate.{name}", "{p}up.{name}")}

# Sizes that ranks divide unevenly; of the bias some ranks have nothing.
LAYOUTS = {
    "concatenated": rule(**NAMES, sizes=(5, "rest")),
    "interleaved": rule(**NAMES, layout="interleaved"),
    "grouped": rule(**NAMES, layout="grouped", groups=2, sizes=("rest", 4)),
    "first-is-nothing": rule(**NAMES, sizes=(0, "rest")),
}
COLUMNS = rule(dim=1)


def wholes() -> dict[str, Tensor]:
    return {
        FUSED: torch.arange(14.0 * 4).view(14, 4),
        BIAS: torch.arange(14.0) - 3,
        DOWN: torch.arange(12.0).view(3, 4),
    }


def saved_twice(folder: Path, rules: list[Rule], tensors: dict[str, Any], *, flat: bool) -> None:
    """As it is, and split by its ranks."""
    state = {
        key: {"step": torch.tensor(2.0), "exp_avg": value + 0.5, "exp_avg_sq": value * 2}
        for key, value in tensors.items()
    }
    optim: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [*tensors]}]}
    if flat:
        optim = flattened(optim)
    dcp.save({"model": tensors, "optim": optim}, checkpoint_id=folder / "fused")
    model, split = split_state_dict(tensors, optim, rules)
    dcp.save({"model": model, "optim": split}, checkpoint_id=folder / "online")


def run_on_ranks(rank: int, world_size: int, folder: Path) -> None:
    one_dim, cases = mesh(world_size), {}
    for name, chosen in LAYOUTS.items():
        tensors = {key: distribute_tensor(whole, one_dim, [Shard(0)]) for key, whole in wholes().items()}
        cases[f"{name}-rows"] = ([chosen], tensors)
    weights = {key: distribute_tensor(wholes()[key], one_dim, [Shard(1)]) for key in (FUSED, DOWN)}
    cases["columns"] = ([LAYOUTS["grouped"]], weights)
    cases["columns-divided"] = ([COLUMNS], weights)
    copies = {key: distribute_tensor(whole, one_dim, [Replicate()]) for key, whole in wholes().items()}
    cases["replicated"] = ([LAYOUTS["grouped"]], copies)
    if world_size == 4:
        two_dim = mesh(2, 2, names=("dp", "tp"))
        tensors = {key: strided(whole, two_dim, rank) for key, whole in wholes().items()}
        cases = {"strided-rows": ([LAYOUTS["grouped"]], tensors)}
    (folder / "cases.json").write_text(json.dumps(cases_of(cases)))
    for name, form in cases_of(cases):
        saved_twice(folder / f"{name}-{form}", *cases[name], flat=form == "flat")


def cases_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each with a nested state dict of the optimizer, and the first with a flattened one too."""
    return [(name, "nested") for name in names] + [(name, "flat") for name in list(names)[:1]]


def strided(whole: Tensor, device_mesh: DeviceMesh, rank: int) -> DTensor:
    """As fully_shard leaves what tensor parallelism has divided along the same dimension."""
    dp, tp = divmod(rank, 2)
    chunks = cut_chunks(tuple(whole.shape), (Cut(0, 2, dp, 2), Cut(0, 2, tp)))
    rows = [row for chunk in chunks.chunks for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    local = whole[rows].contiguous()
    return DTensor.from_local(local, device_mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)


def owners(checkpoint: Checkpoint) -> set[tuple[str, Any, str]]:
    """Which file has which rectangle. Counters, and chunks without elements, may be in any: all ranks have them."""
    return {
        (key, chunk.offsets, chunk.file)
        for key, t in checkpoint.tensors.items()
        for chunk in t.chunks
        if chunk.numel and t.shape
    }


@pytest.mark.distributed
@world_sizes(3, 1, 4)
def test_the_same_as_when_the_ranks_split(world_size: int, tmp_path: Path) -> None:
    spawn(run_on_ranks, world_size, tmp_path, tmp_path)
    for name, form in json.loads((tmp_path / "cases.json").read_text()):
        chosen = COLUMNS if name == "columns-divided" else LAYOUTS.get(name.removesuffix("-rows"), LAYOUTS["grouped"])
        folder = tmp_path / f"{name}-{form}"
        offline = rewritten("split", folder / "fused", folder / "offline", chosen, max_memory_bytes=500)
        online = open_checkpoint(folder / "online")
        assert_same(offline, online)
        assert chunks_of_keys(offline) == chunks_of_keys(online), folder
        if "replicated" not in name:
            assert owners(offline) == owners(online), folder
        merged = rewritten("merge", folder / "offline", folder / "merged", chosen, max_memory_bytes=500)
        assert_same(merged, open_checkpoint(folder / "fused"))
