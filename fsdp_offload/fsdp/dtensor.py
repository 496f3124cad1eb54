"""DTensors: local shards, new DTensors over other memory, write counters, and layouts for checkpoints."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

# As __torch_function__ of a wrapper: operations reach __torch_dispatch__, and torch does not wrap their results.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

# Methods of a local tensor that tells DCP which chunks of the global tensor it has.
_SAYS_CHUNKS = {"__create_chunk_list__", "__create_write_items__"}
# Neither gloo nor NCCL carries these dtypes: the remainders of masters, ours and Transformer Engine's, are int16.
_NOT_CARRIED = {torch.int16, torch.uint16}
# Attribute of a parameter on the host: the DTensor through which it is written there (homed.py).
STAND_IN = "_fsdp_offload_stand_in"
# The slot itself: a class derived from DTensor may replace the attribute by a property that notifies a watcher.
LOCAL: Any = DTensor._local_tensor
_VERSION: Any = Tensor._version.__get__  # type: ignore[attr-defined]
NEWEST_TESTED = 2, 14
"""The newest version of torch that the tests have run with."""


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def is_unreduced(tensor: object) -> bool:
    """Return whether ``tensor`` is the unreduced gradient that torch above 2.14 puts into ``param.grad``."""
    try:
        return isinstance(tensor, DTensor) and LOCAL.__get__(tensor) is None
    except AttributeError:
        return True  # it has components in place of a local tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``: a DTensor's local tensor itself (no copy), or ``tensor``."""
    return cast(Tensor, LOCAL.__get__(tensor)) if isinstance(tensor, DTensor) else tensor


def compute_device(tensor: Tensor) -> torch.device:
    """Return the device on which a parameter is gathered and updated, also if its shard is on the host."""
    return tensor.device if STAND_IN in vars(tensor) else local_shard(tensor).device


def has_inner_tensors(tensor: Tensor) -> bool:
    return hasattr(type(local_shard(tensor)), "__tensor_flatten__")


def versions_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return, for each tensor, version counters that change with writes into the DTensor or its local tensor."""
    # Bypasses the classes of watched tensors, and makes no call per tensor: this runs often.
    with torch._C.DisableTorchFunctionSubclass():
        return [
            (_VERSION(vars(one).get(STAND_IN, one)), _VERSION(LOCAL.__get__(one) if isinstance(one, DTensor) else one))
            for one in tensors
        ]


def unseen() -> AbstractContextManager[None]:
    """Call functions inside the block without ``__torch_function__`` of watched tensors and of those on the host."""
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return the counters of one tensor, as :func:`versions_of`."""
    return versions_of([tensor])[0]


def call_counted(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``; count versions of writes through ``.data``, and by ``_foreach_`` to DTensors: torch does not."""
    name = getattr(func, "__name__", "")
    if func == Tensor.data.__get__:  # type: ignore[attr-defined]
        with torch.inference_mode(mode=False):  # in which DTensors cannot be detached
            return call_counted(Tensor.detach, args, {})
    result = func(*args, **kwargs)
    if func == Tensor.detach and is_dtensor(result):
        result._local_tensor = local_shard(args[0]).detach()  # else it has a counter of its own
    if name.startswith("_foreach_") and name.endswith("_"):
        increment_version([local_shard(each) for each in args[0] if is_dtensor(each)])
    return result


def alias_of(tensor: Tensor) -> Tensor:
    """Return another tensor over the memory of ``tensor``: a write into one counts a version of both."""
    with torch.inference_mode(mode=False):  # in which DTensors cannot be detached
        alias = tensor.detach()
    if is_dtensor(alias):
        LOCAL.__set__(alias, local_shard(tensor).detach())  # else it has a counter of its own
    return alias


def holders_of(local: Tensor) -> int:
    """Count live tensors that share the memory of ``local``, including views the user still holds."""
    return int(torch._C._storage_Use_Count(local.untyped_storage()._cdata))


def over_local(like: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a DTensor like ``like`` (mesh, placements, global shape); ``local`` if that is plain.

    The local tensor may live on another device than the mesh (host memory under a CUDA mesh) and may have another
    dtype than ``like``. Nothing is copied or moved. If the local tensor of ``like`` describes its chunks (Megatron's
    uneven DTensors, whose placements are nominal), one of the same shape gets that description.
    """
    if not isinstance(like, DTensor):
        return local
    said = vars(local_shard(like))
    if said and local.shape == local_shard(like).shape and not local.is_meta:
        for name in _SAYS_CHUNKS & said.keys():
            if not hasattr(local, name):
                setattr(local, name, said[name])
    return _over(local, _spec_for(like, local.dtype))


def _spec_for(like: DTensor, dtype: torch.dtype) -> DTensorSpec:
    meta = like._spec.tensor_meta
    assert meta is not None, "a DTensor always knows its global shape"
    if meta.dtype == dtype:
        return like._spec  # specs are never written; making one takes longer
    return dataclasses.replace(like._spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


class _GatheredByBits(DTensor):
    """A DTensor of a dtype that collectives do not support; they move its bits as bfloat16, unchanged."""

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        local, spec = local_shard(self).detach(), _spec_for(self, torch.bfloat16)
        bits = DTensor(local.view(torch.bfloat16), spec, requires_grad=False)
        found = bits.redistribute(*args, **kwargs)
        return cast(DTensor, over_local(found, local_shard(found).view(self.dtype)))

    def _as_dtensor_does(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        found = getattr(_plain(self), name)(*args, **kwargs)
        return _over(local_shard(found), found._spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # files are to be read without this class


def _plain(tensor: Any) -> Any:
    return DTensor(LOCAL.__get__(tensor), tensor._spec, requires_grad=False)


# Full state dicts call ``to`` first, and deepcopy needs a result of this class; other results are plain DTensors.
for _name in ("to", "detach", "clone"):
    setattr(_GatheredByBits, _name, functools.partialmethod(_GatheredByBits._as_dtensor_does, _name))


def _over(local: Tensor, spec: DTensorSpec) -> Tensor:
    cls: Any = _GatheredByBits if local.dtype in _NOT_CARRIED else DTensor
    # An evaluation may be the first to need one: made under inference mode, it would never count writes.
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
        made: Tensor = cls(local, spec, requires_grad=False)
    return made


def over_part(like: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``local`` as a DTensor of global ``shape`` on the mesh of ``like``; its placements mean nothing."""
    assert isinstance(like, DTensor), "only a DTensor has a mesh"
    stride = torch.empty(shape, device="meta").stride()
    spec = dataclasses.replace(like._spec, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    return _over(local, spec)


def placements_of(tensor: Tensor) -> object:
    """Return mesh and placements, for comparisons and messages; ``None`` for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def world_size() -> int:
    """Return the number of all ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def may_be_another_ranks(tensor: Tensor) -> bool:
    """Return whether ranks outside the mesh of ``tensor`` may have another tensor of the same name."""
    return world_size() > 1 and not (isinstance(tensor, DTensor) and tensor.device_mesh.size() == world_size())


def first_rank(tensor: Tensor) -> int:
    """Return the first rank of the mesh of ``tensor``, to tell disjoint meshes apart; this rank for a plain tensor."""
    return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else dist.get_rank()


def largest_local_numel(tensor: Tensor) -> int:
    """Return the size of the largest local part over all ranks, in elements; it is the same on each rank."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if not placement.is_replicate():
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)  # type: ignore[attr-defined]
    return math.prod(sizes)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def split_factor(placement: object) -> int:
    """Return the number of blocks of which each rank has a part, 1 for plain ``Shard``; raise TypeError for others."""
    if isinstance(placement, _StridedShard):
        return int(placement.split_factor)
    if isinstance(placement, Shard):
        return 1
    raise TypeError(
        f"chunks are known for Shard, _StridedShard and Replicate, not for {placement!r}; wrap the local tensor in a "
        "ShardTensor that says which chunks it has"
    )


def mesh_dims_in_order(tensor: DTensor) -> list[int]:
    """Return mesh dimensions in the order in which their placements cut the tensor.

    From left to right, unless the spec of plain shards, or else their mesh, names another order. ``_StridedShard``
    encodes an order in itself, and is always taken from left to right.
    """
    in_order = list(range(tensor.device_mesh.ndim))
    if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return in_order
    by_tensor_dim = [list(entry.mesh_dims) for entry in getattr(tensor._spec, "shard_order", None) or ()]
    named = [mesh_dim for mesh_dims in by_tensor_dim for mesh_dim in mesh_dims]
    if all(mesh_dims == sorted(mesh_dims) for mesh_dims in by_tensor_dim):  # torch's default order
        named = list(getattr(tensor.device_mesh, "_shard_order", ()))
    return named + [mesh_dim for mesh_dim in in_order if mesh_dim not in named]


def canonical_fqn(model: nn.Module, name: str) -> str:
    """Return the ``name`` of a parameter without prefixes of wrapper modules, as in DCP's state dicts."""
    from torch.distributed.checkpoint.state_dict import _get_fqns  # DCP takes long to import

    (fqn,) = _get_fqns(model, name)
    return str(fqn)


def storage_reader_for(checkpoint_id: str | os.PathLike[str]) -> Any:
    """Return the ``StorageReader`` that ``dcp.load`` uses by default: for local files, or fsspec's."""
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    return _storage_setup(None, checkpoint_id, reader=True)
