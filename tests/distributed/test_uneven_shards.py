"""Uneven shards of which only the local tensor says where they are, as Megatron's ``uneven_dtensor.py`` leaves them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.distributed.launch import mesh, run_cases, spawn, this_device

pytestmark = pytest.mark.distributed

WHOLE = torch.arange(60.0).view(12, 5)
ENDS = {"4 and 8": (0, 4, 12), "none and all": (0, 0, 12), "11 and 1": (0, 11, 12)}
POLICY = OffloadPolicy(bucket_bytes=1 << 10)


def test_uneven_shards(tmp_path: Path) -> None:
    spawn(run_uneven, 2, tmp_path, tmp_path)


def run_uneven(rank: int, world_size: int, folder: Path) -> None:
    device_mesh = mesh(world_size)
    cases: dict[str, Any] = {
        name: lambda e=ends, n=name: round_trip(folder / n, device_mesh, e[rank], e[rank + 1])
        for name, ends in ENDS.items()
    }
    cases["nothing says it"] = lambda: refused(folder / "refused", device_mesh, rank)
    run_cases(cases)


def shard(device_mesh: DeviceMesh, whole: Tensor, begin: int, end: int, *, says: bool = True) -> nn.Parameter:
    made = DTensor.from_local(
        whole[begin:end].clone(), device_mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    param = nn.Parameter(made)
    if says:  # as update_uneven_dtensor_chunk_metadata
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
        local = (WHOLE + step)[begin:end].clone()
        param.grad = DTensor.from_local(
            local, param.device_mesh, [Shard(0)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
        )
        optimizer.step()
    return model, optimizer


def round_trip(folder: Path, device_mesh: DeviceMesh, begin: int, end: int) -> Iterator[str]:
    """State is saved as what it is, by DCP alone too, and loaded into even shards and back."""
    model, optimizer = trained(shard(device_mesh, WHOLE, begin, end), begin, end, steps=2)
    plain = nn.Parameter(WHOLE.clone().to(this_device()))
    reference = torch.optim.AdamW([plain], lr=0.1, foreach=False)
    for step in range(2):
        plain.grad = (WHOLE + step).to(this_device())
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
    other, resumed = trained(shard(device_mesh, WHOLE * 0, begin, end), begin, end, steps=0)
    state = get_optimizer_state_dict(other, resumed, for_load=True)
    load({"w": other.weight, "s": state}, checkpoint_id=folder / "ours")
    set_optimizer_state_dict(other, resumed, state)
    one, same = (o.state[m.weight]["exp_avg_sq"].to_local() for m, o in ((model, optimizer), (other, resumed)))
    if not torch.equal(one, same) or not torch.equal(other.weight.to_local(), model.weight.to_local()):
        yield "not loaded as it was saved"


def refused(folder: Path, device_mesh: DeviceMesh, rank: int) -> Iterator[str]:
    begin, end = ENDS["4 and 8"][rank : rank + 2]
    model, optimizer = trained(shard(device_mesh, WHOLE, begin, end, says=False), begin, end, steps=1)
    try:
        get_optimizer_state_dict(model, optimizer)
        yield "the state was given as that of even shards"
    except ValueError as error:
        if "it is sharded unevenly, and nothing says how" not in str(error):
            yield str(error)
    try:
        save({"model": {"weight": model.weight.detach()}}, checkpoint_id=folder)
        yield "it was saved"
    except CheckpointException as error:
        if "nothing has been written: DCP would save 1 tensors as other parts" not in str(error):
            yield str(error)
    dist.barrier()
    if list(folder.glob("*.distcp")):
        yield "something was written"
