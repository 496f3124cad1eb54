"""Ragged and uneven shards on several ranks: saved and loaded by DCP, to and from ordinary shards, bitwise."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import (
    ShardTensor,
    chunks_of,
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
    with_chunks,
)
from fsdp_offload.fsdp.dtensor import local_shard
from tests.distributed.launch import mesh, spawn_cases, this_device
from tests.tiers import world_sizes

pytestmark = pytest.mark.distributed

Held = Callable[[dict[str, Tensor]], dict[str, Tensor]]

# Three parameters of one flat buffer: cut in mid-row, over whole parameters, and absent from some ranks.
SHAPES = {"weight": (7, 3, 2), "bias": (5,), "head": (4, 5)}
WHOLE = {name: torch.arange(100.0, 100 + math.prod(shape)).view(shape) for name, shape in SHAPES.items()}


def round_trip(folder: Path, saved: Held, loaded: Held) -> Iterator[str]:
    dcp.save(saved(WHOLE), checkpoint_id=folder)
    target = loaded({name: torch.zeros_like(whole) for name, whole in WHOLE.items()})
    dcp.load(target, checkpoint_id=folder)
    yield from differences(target)


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


def interleaved(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    ranks = dist.get_world_size()
    placement, device_mesh = _StridedShard(0, split_factor=2), mesh(ranks)
    parts = {}
    for name, whole in wholes.items():
        local = placement._split_tensor(whole.to(this_device()), ranks, with_padding=False)[0][dist.get_rank()]
        like = DTensor.from_local(
            local.clone(), device_mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        parts[name] = with_chunks(like)
    return parts


WAYS: dict[str, tuple[Held, Held]] = {
    "ragged to plain": (ragged, plain),
    "plain to ragged": (plain, ragged),
    "ragged to ragged, other cuts": (ragged, partial(ragged, skew=4)),
    "ragged to replicas": (ragged, partial(plain, placement=Replicate())),
    "interleaved rows to plain": (interleaved, plain),
    "plain to interleaved rows": (plain, interleaved),
}


@world_sizes(3, 2)
def test_ragged_shards(world_size: int, tmp_path: Path):
    cases = {name: partial(round_trip, tmp_path / name, *both) for name, both in WAYS.items()}
    spawn_cases(cases, world_size, tmp_path)


# --- uneven shards, of which only the local tensor says where they are, as Megatron's ``uneven_dtensor.py`` leaves them


ROWS = torch.arange(60.0).view(12, 5)
ENDS = {"4 and 8": (0, 4, 12), "none and all": (0, 0, 12), "11 and 1": (0, 11, 12)}
POLICY = OffloadPolicy(bucket_bytes=1 << 10)


def test_uneven_shards(tmp_path: Path) -> None:
    cases = {name: partial(uneven_round_trip, tmp_path / name, *ends) for name, ends in ENDS.items()}
    spawn_cases(cases, 2, tmp_path)


def shard(device_mesh: DeviceMesh, whole: Tensor, begin: int, end: int) -> nn.Parameter:
    made = DTensor.from_local(
        whole[begin:end].clone(), device_mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    param = nn.Parameter(made)
    # As update_uneven_dtensor_chunk_metadata.
    chunk = ChunkStorageMetadata(offsets=torch.Size((begin, 0)), sizes=torch.Size((end - begin, 5)))
    local: Any = local_shard(param)
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = lambda fqn, tensor: written(fqn, tensor, chunk)
    return param


def written(fqn: str, tensor: DTensor, chunk: ChunkStorageMetadata) -> list[WriteItem]:
    if tensor.to_local().numel() == 0:
        return []
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.size())
    return [WriteItem(type=WriteItemType.SHARD, index=MetadataIndex(fqn, chunk.offsets), tensor_data=data)]


def trained(param: nn.Parameter, begin: int, end: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Module()
    model.weight = param
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    offload_optimizer(optimizer, model=model, policy=POLICY)
    for step in range(steps):
        local = (ROWS + step)[begin:end].clone()
        param.grad = DTensor.from_local(
            local, param.device_mesh, [Shard(0)], run_check=False, shape=ROWS.shape, stride=ROWS.stride()
        )
        optimizer.step()
    return model, optimizer


def uneven_round_trip(folder: Path, *ends: int) -> Iterator[str]:
    """State is saved as what it is, by DCP alone too, and loaded into even shards and back."""
    device_mesh, (begin, end) = mesh(2), ends[dist.get_rank() :][:2]
    model, optimizer = trained(shard(device_mesh, ROWS, begin, end), begin, end, steps=2)
    plain = nn.Parameter(ROWS.clone().to(this_device()))
    reference = torch.optim.AdamW([plain], lr=0.1, foreach=False)
    for step in range(2):
        plain.grad = (ROWS + step).to(this_device())
        reference.step()
    dcp.save({"w": model.weight, "s": dict(optimizer.state[model.weight])}, checkpoint_id=folder / "dcp")
    save({"w": model.weight, "s": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "ours")
    for name, path in (("dcp", "s.exp_avg"), ("ours", "s.state.weight.exp_avg")):
        even = {key: distribute_tensor(torch.zeros(12, 5), device_mesh, [Shard(0)]) for key in ("w", path)}
        dcp.load(even, checkpoint_id=folder / name)
        if not torch.equal(even[path].full_tensor(), reference.state[plain]["exp_avg"]):
            yield f"{name}: exp_avg was saved as other rows"
        if not torch.equal(even["w"].full_tensor(), plain.detach()):
            yield f"{name}: the parameter was saved as other rows"
    other, resumed = trained(shard(device_mesh, ROWS * 0, begin, end), begin, end, steps=0)
    state = get_optimizer_state_dict(other, resumed, for_load=True)
    load({"w": other.weight, "s": state}, checkpoint_id=folder / "ours")
    set_optimizer_state_dict(other, resumed, state)
    one, same = (o.state[m.weight]["exp_avg_sq"].to_local() for m, o in ((model, optimizer), (other, resumed)))
    if not torch.equal(one, same) or not torch.equal(other.weight.to_local(), model.weight.to_local()):
        yield "not loaded as it was saved"
