"""A checkpoint that is split afterwards equals one that was split before it was saved: values, chunks, who has them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint_tools import Rule, split_state_dict
from fsdp_offload.checkpoint.chunks import Cut, cut_chunks
from fsdp_offload.checkpoint.names import flattened
from tests.checkpoint_tools.saves import DOWN, FUSED, rule
from tests.checkpoint_tools.tool import assert_same, chunks_of, made, metadata_of
from tests.distributed.launch import mesh, spawn
from tests.tiers import world_sizes

BIAS = "mlp.gate_up.bias"
NAMES = {"fused": "{p}gate_up.{name:weight|bias}", "parts": ("{p}gate.{name}", "{p}up.{name}")}
WHOLES = {
    FUSED: torch.arange(14.0 * 4).view(14, 4),
    BIAS: torch.arange(14.0) - 3,
    DOWN: torch.arange(12.0).view(3, 4),
}

# Sizes that ranks divide unevenly; of the bias some ranks have nothing.
GROUPED = rule(**NAMES, layout="grouped", groups=2, sizes=("rest", 4))
CASES: dict[str, tuple[Rule, str]] = {  # and how the tensors are divided
    "concatenated": (rule(**NAMES, sizes=(5, "rest")), "rows"),
    "interleaved": (rule(**NAMES, layout="interleaved"), "rows"),
    "grouped": (GROUPED, "rows"),
    "first-is-nothing": (rule(**NAMES, sizes=(0, "rest")), "rows"),
    "columns": (GROUPED, "columns"),
    "columns-divided": (rule(dim=1), "columns"),
    "replicated": (GROUPED, "copies"),
}
STRIDED = {"strided-rows": (GROUPED, "strided")}  # as fully_shard leaves rows that tensor parallelism has divided


def cases_on(world_size: int) -> Iterator[tuple[str, Rule, str, bool]]:
    """Each with a nested state dict of the optimizer, and the first with a flattened one too."""
    for number, (name, (chosen, way)) in enumerate((STRIDED if world_size == 4 else CASES).items()):
        yield name, chosen, way, False
        if number == 0:
            yield f"{name}-flat", chosen, way, True


def sharded(whole: Tensor, way: str, rank: int, world_size: int) -> DTensor:
    if way != "strided":
        placement: Any = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}[way]
        return distribute_tensor(whole, mesh(world_size), [placement])
    dp, tp = divmod(rank, 2)
    chunks = cut_chunks(tuple(whole.shape), (Cut(0, 2, dp, 2), Cut(0, 2, tp)))
    rows = [row for chunk in chunks.chunks for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    device_mesh, local = mesh(2, 2, names=("dp", "tp")), whole[rows].contiguous()
    return DTensor.from_local(local, device_mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)


def save_twice(rank: int, world_size: int, folder: Path) -> None:
    """As it is, and split by its ranks."""
    for name, chosen, way, is_flat in cases_on(world_size):
        keys = (FUSED, DOWN) if way == "columns" else (FUSED, BIAS, DOWN)
        tensors = {key: sharded(WHOLES[key], way, rank, world_size) for key in keys}
        state = {
            key: {"step": torch.tensor(2.0), "exp_avg": value + 0.5, "exp_avg_sq": value * 2}
            for key, value in tensors.items()
        }
        groups = [{"lr": 0.5, "betas": (0.9, 0.99), "params": [*tensors]}]
        optim: dict[str, Any] = {"state": state, "param_groups": groups}
        if is_flat:
            optim = flattened(optim)
        dcp.save({"model": tensors, "optim": optim}, checkpoint_id=folder / name / "fused")
        model, split = split_state_dict(tensors, optim, [chosen])
        dcp.save({"model": model, "optim": split}, checkpoint_id=folder / name / "online")


def owners(folder: Path) -> set[tuple[Any, ...]]:
    """Which file has which rectangle. Counters, and chunks without elements, may be in any: all ranks have them."""
    numels = {
        (key, offsets): torch.Size(sizes).numel() for key, all_ in chunks_of(folder).items() for offsets, sizes in all_
    }
    return {
        (index.fqn, index.offset, info.relative_path)
        for index, info in metadata_of(folder).storage_data.items()
        if index.offset and numels[index.fqn, tuple(index.offset)]
    }


@pytest.mark.distributed
@world_sizes(3, 1, 4)
def test_the_same_as_when_the_ranks_split(world_size: int, tmp_path: Path) -> None:
    spawn(save_twice, world_size, tmp_path, tmp_path)
    for name, chosen, way, _ in cases_on(world_size):
        fused, online = tmp_path / name / "fused", tmp_path / name / "online"
        offline = made("split", fused, tmp_path / name / "offline", chosen, "--max-memory", 500)
        assert_same(offline, online)
        assert chunks_of(offline) == chunks_of(online), name
        if way != "copies":
            assert owners(offline) == owners(online), name
        assert_same(made("merge", offline, tmp_path / name / "merged", chosen, "--max-memory", 500), fused)
