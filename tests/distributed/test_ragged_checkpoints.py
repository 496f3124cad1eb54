"""Ragged shards on several ranks: saved and loaded by DCP, to and from ordinary shards, bitwise."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_offload.checkpoint import ShardTensor, chunks_of, with_chunks
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed.launch import mesh, run_cases, spawn, this_device
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

# Three parameters of one flat buffer: cut in mid-row, over whole parameters, and absent from some ranks.
SHAPES = {"weight": (7, 3, 2), "bias": (5,), "head": (4, 5)}
WHOLE = {name: torch.arange(100.0, 100 + math.prod(shape)).view(shape) for name, shape in SHAPES.items()}


@world_sizes(3, 2)
def test_ragged_shards(world_size: int, tmp_path: Path):
    spawn(run_ragged_shards, world_size, tmp_path, tmp_path)


def run_ragged_shards(rank: int, world_size: int, folder: Path) -> None:
    cases = {
        "ragged to plain": lambda: round_trip(folder / "1", ragged(WHOLE), plain(zeros())),
        "plain to ragged": lambda: round_trip(folder / "2", plain(WHOLE), ragged(zeros())),
        "ragged to ragged, other cuts": lambda: round_trip(folder / "3", ragged(WHOLE), ragged(zeros(), skew=4)),
        "ragged to replicas": lambda: round_trip(folder / "4", ragged(WHOLE), plain(zeros(), Replicate())),
        "interleaved rows to plain": lambda: round_trip(folder / "5", interleaved(WHOLE, world_size), plain(zeros())),
        "plain to interleaved rows": lambda: round_trip(folder / "6", plain(WHOLE), interleaved(zeros(), world_size)),
        "staged, then overwritten": lambda: async_round_trip(folder / "7"),
    }
    run_cases(cases)


def round_trip(folder: Path, saved: dict[str, Tensor], loaded: dict[str, Tensor]) -> Iterator[str]:
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(loaded, checkpoint_id=folder)
    yield from differences(loaded)


def async_round_trip(folder: Path) -> Iterator[str]:
    saved, loaded = ragged(WHOLE), plain(zeros())
    stager = DefaultStager(StagingOptions(False, False, False, False))
    future = dcp.async_save(saved, checkpoint_id=folder, async_stager=stager)
    for tensor in saved.values():
        local_shard(tensor).zero_()
    future.result()
    dist.barrier()
    dcp.load(loaded, checkpoint_id=folder)
    yield from differences(loaded)


def differences(loaded: dict[str, Tensor]) -> Iterator[str]:
    """Each rank looks at its own part, as its chunks say where that belongs."""
    for name, tensor in loaded.items():
        local = local_shard(tensor)
        memory = local.local if isinstance(local, ShardTensor) else local
        for chunk in chunks_of(tensor).chunks:
            there = WHOLE[name][tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
            view = memory.cpu().flatten().as_strided(chunk.sizes, chunk.local_strides, chunk.local_start)
            if not torch.equal(view, there):
                yield f"{name} at {chunk.offsets}: expected {there}, got {view}"


# --- the same tensors, held in different ways ------------------------------------------------------------------------


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}


def plain(wholes: dict[str, Tensor], placement: Placement | None = None) -> dict[str, Tensor]:
    sharding = [placement or Shard(0)]
    device_mesh = mesh(dist.get_world_size())
    return {
        name: distribute_tensor(whole.to(this_device()), device_mesh, sharding, src_data_rank=None)
        for name, whole in wholes.items()
    }


def ragged(wholes: dict[str, Tensor], skew: int = 0) -> dict[str, Tensor]:
    """This rank's equal share of one flat buffer, each rank's end moved by ``skew``."""
    numel = sum(whole.numel() for whole in wholes.values())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bounds = [0, *(-(-numel // ranks) * part + skew for part in range(1, ranks)), numel]
    at, parts = 0, {}
    for (name, whole), like in zip(wholes.items(), plain(wholes).values(), strict=True):
        begin, end = (min(max(bound - at, 0), whole.numel()) for bound in bounds[rank : rank + 2])
        local = whole.flatten()[begin:end].clone().to(this_device())
        parts[name] = with_chunks(like, local, chunks_of(tuple(whole.shape), (begin, end)))
        at += whole.numel()
    return parts


def interleaved(wholes: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    placement = _StridedShard(0, split_factor=2)
    device_mesh = mesh(ranks)
    parts = {}
    for name, whole in wholes.items():
        local = placement._split_tensor(whole.to(this_device()), ranks, with_padding=False)[0][dist.get_rank()]
        like = DTensor.from_local(
            local.clone(), device_mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        parts[name] = with_chunks(like)
    return parts
