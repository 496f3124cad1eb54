"""DTensors and other tensors that hold tensors: their local shards, and new ones over other memory."""

import dataclasses
import math
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

_SAYS_CHUNKS = {"__create_chunk_list__", "__create_write_items__"}
"""Methods of a local tensor that says itself which chunks of the global tensor it is."""


STAND_IN = "_fsdp_offload_stand_in"
"""Attribute of a parameter that lives on the host: the DTensor through which it is written there (:mod:`homed`)."""


def is_dtensor(tensor: object) -> bool:
    """Return whether ``tensor`` is sharded or replicated over a device mesh."""
    return isinstance(tensor, DTensor)


LOCAL: Any = DTensor._local_tensor
"""The slot itself: a class derived from DTensor may tell somebody who reaches for the attribute."""


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: the local tensor of a DTensor itself (no copy), or ``tensor``."""
    return cast(Tensor, LOCAL.__get__(tensor)) if isinstance(tensor, DTensor) else tensor


def compute_device(tensor: Tensor) -> torch.device:
    """Return the device on which a parameter is gathered and updated: not where it lives, if that is the host."""
    return tensor.device if STAND_IN in vars(tensor) else local_shard(tensor).device


def has_inner_tensors(tensor: Tensor) -> bool:
    """Return whether the local shard of ``tensor`` is of a type that is made of other tensors."""
    return hasattr(type(local_shard(tensor)), "__tensor_flatten__")


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Changes with every write into ``tensor``: through a DTensor itself, or through its local tensor."""
    return vars(tensor).get(STAND_IN, tensor)._version, local_shard(tensor)._version


def over_local(like: Tensor, local: Tensor) -> Tensor:
    """``local`` as a DTensor with the mesh, placements and global shape of ``like``; ``local`` if that is plain.

    The local tensor may live on another device than the mesh (host memory under a CUDA mesh) and may have another
    dtype than ``like``. Nothing is copied or moved. What the local tensor of ``like`` says of its chunks (Megatron's
    uneven DTensors, whose placements are nominal), one of the same shape says as well.
    """
    if not isinstance(like, DTensor):
        return local
    said = vars(like._local_tensor)
    if said and local.shape == like._local_tensor.shape and not local.is_meta:
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


_NOT_CARRIED = {torch.int16, torch.uint16}
"""Dtypes that neither gloo nor NCCL carries: the remainders of masters, ours and Transformer Engine's, are int16."""


class _GatheredByBits(DTensor):
    """A DTensor of such a dtype: collectives get its bits as bfloat16, which they move and do not look at."""

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As DTensor's."""
        local, spec = local_shard(self).detach(), _spec_for(self, torch.bfloat16)
        bits = DTensor(local.view(torch.bfloat16), spec, requires_grad=False)
        found = bits.redistribute(*args, **kwargs)
        return cast(DTensor, over_local(found, local_shard(found).view(self.dtype)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # files are to be read without this class


def _plain(tensor: Any) -> Any:
    return DTensor(LOCAL.__get__(tensor), tensor._spec, requires_grad=False)


def _as_dtensor_does(name: str) -> Any:
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = getattr(_plain(self), name)(*args, **kwargs)
        return _over(local_shard(found), found._spec)

    return call


# Full state dicts move first, deepcopy wants this class; results of all other operations are plain DTensors.
for _name in ("to", "detach", "clone"):
    setattr(_GatheredByBits, _name, _as_dtensor_does(_name))


def _over(local: Tensor, spec: DTensorSpec) -> Tensor:
    cls: Any = _GatheredByBits if local.dtype in _NOT_CARRIED else DTensor
    # An evaluation may be the first to need one: made under inference mode, it would never count writes.
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
        made: Tensor = cls(local, spec, requires_grad=False)
    return made


def over_part(like: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``local`` as a DTensor of another global ``shape`` on the mesh of ``like``. Its placements say nothing then."""
    assert isinstance(like, DTensor), "only a DTensor has a mesh"
    stride = torch.empty(shape, device="meta").stride()
    spec = dataclasses.replace(like._spec, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    return _over(local, spec)


def without_data(value: Tensor) -> Tensor:
    """A DTensor that only knows mesh, placements and global shape: something to pass to :func:`over_local`."""
    return over_local(value, torch.empty(0, dtype=value.dtype, device="meta"))


def placements_of(tensor: Tensor) -> object:
    """Mesh and placements, to be compared and shown; ``None`` for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def may_be_another_ranks(tensor: Tensor) -> bool:
    """Return whether there are ranks outside of the mesh of ``tensor``, which may call another tensor by its name."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return ranks > 1 and not (isinstance(tensor, DTensor) and tensor.device_mesh.size() == ranks)


def largest_local_numel(tensor: Tensor) -> int:
    """Elements of the largest local part over all ranks: the same figure on each of them."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if not placement.is_replicate():
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)  # type: ignore[attr-defined]
    return math.prod(sizes)


def is_host_offloaded(param: Tensor) -> bool:
    """Return whether ``fully_shard`` itself keeps ``param`` on the host, under a mesh of another device."""
    return isinstance(param, DTensor) and param._local_tensor.device.type != param.device_mesh.device_type
