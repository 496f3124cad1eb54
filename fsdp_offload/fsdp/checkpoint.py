"""How placements cut a tensor, names as DCP has them, and the reader that it takes."""

import os
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# Operations on a wrapper reach __torch_dispatch__ as they are; torch would otherwise turn results into the wrapper.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


def split_factor(placement: object) -> int:
    """The blocks in each of which a rank has a part; 1 for a plain ``Shard``.

    Raises:
        TypeError: a placement of a kind that is neither.
    """
    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    if isinstance(placement, Shard):
        return 1
    raise TypeError(
        f"chunks are known for Shard, _StridedShard and Replicate, not for {placement!r}; wrap the local tensor in a "
        "ShardTensor that says which chunks it has"
    )


def mesh_dims_in_order(tensor: DTensor) -> list[int]:
    """Mesh dimensions in the order in which their placements cut the tensor.

    From left to right, unless the spec of plain shards names another order, or else their mesh. ``_StridedShard`` says
    the same in another way, and is always taken from left to right.
    """
    in_order = list(range(tensor.device_mesh.ndim))
    if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return in_order
    by_tensor_dim = [list(entry.mesh_dims) for entry in getattr(tensor._spec, "shard_order", None) or ()]
    named = [mesh_dim for mesh_dims in by_tensor_dim for mesh_dim in mesh_dims]
    if all(mesh_dims == sorted(mesh_dims) for mesh_dims in by_tensor_dim):  # what torch makes of no order
        named = list(getattr(tensor.device_mesh, "_shard_order", ()))
    return named + [mesh_dim for mesh_dim in in_order if mesh_dim not in named]


def canonical_fqn(model: nn.Module, name: str) -> str:
    """``name`` of a parameter as checkpoints have it: without the prefixes of modules that only wrap others.

    The same as ``torch.distributed.checkpoint.state_dict`` gives it, so that files of either are files of the other.
    """
    (fqn,) = _get_fqns(model, name)
    return str(fqn)


def storage_reader_for(checkpoint_id: str | os.PathLike[str]) -> StorageReader:
    """The reader that ``dcp.load`` takes for ``checkpoint_id`` if none is given: local files, or fsspec's."""
    return cast(StorageReader, _storage_setup(None, checkpoint_id, reader=True))
