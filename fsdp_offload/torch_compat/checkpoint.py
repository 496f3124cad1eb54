"""Private PyTorch names that checkpoints need: how placements cut, names as DCP has them, and its readers.

============================================  ==============  =========================================================
private name                                  seen in         without it
============================================  ==============  =========================================================
``_StridedShard``                             2.11 to 2.13    no tensor can have that placement
``DTensor._spec.shard_order``                 2.11 to 2.13    mesh dimensions are taken from left to right
``DeviceMesh._shard_order``                   megatron-core   the same. No name of torch's: Megatron-FSDP sets it, and
                                              0.16.1          leaves the spec's order as it was
``torch._C._disabled_torch_function_impl``    2.11 to 2.13    required: AttributeError at import
``checkpoint.state_dict._get_fqns``           2.11 to 2.13    the prefixes of torch.compile, activation checkpointing
                                                              and DDP are cut out of names wherever they occur
``state_dict_loader._storage_setup``          2.11 to 2.13    paths are read as local files; URLs need a
                                                              ``storage_reader``
============================================  ==============  =========================================================
"""

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as _state_dict
from torch.distributed.checkpoint import state_dict_loader as _state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import placement_types as _placement_types

_GET_FQNS: Any = getattr(_state_dict, "_get_fqns", None)
_STORAGE_SETUP: Any = getattr(_state_dict_loader, "_storage_setup", None)
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")

_STRIDED_SHARD: type = getattr(_placement_types, "_StridedShard", type(None))

# Operations on a wrapper reach __torch_dispatch__ as they are; torch would otherwise turn results into the wrapper.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


def split_factor(placement: object) -> int:
    """The blocks in each of which a rank has a part; 1 for a plain ``Shard``.

    Raises:
        TypeError: a placement of a kind that is neither.
    """
    if isinstance(placement, _STRIDED_SHARD):
        return int(placement.split_factor)  # type: ignore[attr-defined]
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
    if any(isinstance(placement, _STRIDED_SHARD) for placement in tensor.placements):
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
    if _GET_FQNS is not None:
        (fqn,) = _GET_FQNS(model, name)
        return str(fqn)
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name.removeprefix("module.") if isinstance(model, nn.parallel.DistributedDataParallel) else name


def storage_reader_for(checkpoint_id: str | os.PathLike[str]) -> StorageReader:
    """The reader that ``dcp.load`` takes for ``checkpoint_id`` if none is given: local files, or fsspec's."""
    if _STORAGE_SETUP is None:
        return FileSystemReader(checkpoint_id)
    reader: StorageReader = _STORAGE_SETUP(None, checkpoint_id, reader=True)
    return reader
