"""ShardTensor: a local tensor that carries its chunks.

DCP takes the local tensor of a DTensor for one rectangle that the placements describe. A ragged shard is several
rectangles, which no placement describes; so the local tensor carries its chunks, from the state dict to the file and
back::

    local memory ──ShardTensor(local, chunks)──▶ with_chunks(like, ...): a DTensor with it inside ──▶ state dict
    DTensor's three methods for DCP ──▶ ShardTensor's ──▶ views of the local memory: written from, loaded into

The chunks go where the tensor goes (``detach``, ``clone``, ``to``, staging, pickling, pointwise operations); results of
other operations are plain. Outside a DTensor, a ShardTensor can be saved but not loaded: DCP compares its local shape
with the global one. ``CheckpointableTensor`` of torch >= 2.14 is no substitute: its boxes need a local tensor with as
many dimensions as the global one, which a flat range lacks, and a DTensor does not ask its local tensor for it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from ..fsdp.dtensor import disabled_torch_function, is_dtensor, local_shard, over_local
from ..fsdp.fully_shard import parameter_names
from ..policy import check_is
from .chunks import MEGATRON_INDEX, Chunk, ShardChunks, chunks_of, says_its_chunks, why_misread
from .names import Experts, bare_name, check_experts, check_model

_aten = torch.ops.aten

# Like pointwise operations, these give a tensor for the same global elements if they keep the shape.
_KEEP_CHUNKS = {
    *(_aten.detach, _aten.alias, _aten.clone, _aten._to_copy, _aten._pin_memory),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_full),
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
}


class ShardTensor(Tensor):
    """``local`` and its chunks, as one tensor of the shape, dtype and device of ``local``.

    Make one with ``ShardTensor(local, shard_chunks)``.

    Attributes:
        local: A contiguous tensor; flat for ragged shards. Shared, not copied: loads write into it.
        shard_chunks: The result of :func:`~fsdp_offload.checkpoint.chunks_of` for it.

    Raises:
        ValueError: ``local`` has another number of elements than the chunks, or is not contiguous.
    """

    local: Tensor
    shard_chunks: ShardChunks

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, local: Tensor, shard_chunks: ShardChunks) -> "ShardTensor":  # noqa: D102  # see the class
        says, line = "ShardTensor: expected {}", "ShardTensor(local, chunks_of(param))"
        check_is(local, Tensor, says.format("a tensor first"), line)
        check_is(shard_chunks, ShardChunks, says.format("its chunks"), line)
        if local.numel() != shard_chunks.local_numel:
            raise ValueError(
                f"expected a local tensor of {shard_chunks.local_numel} elements, as its chunks have, got shape "
                f"{tuple(local.shape)}; chunks of global shape {shard_chunks.global_shape}: {shard_chunks.chunks}"
            )
        if not local.is_contiguous():
            raise ValueError(
                f"expected a contiguous local tensor, got strides {local.stride()} for {local.shape}: "
                "give local.contiguous(), and load into that"
            )
        # Without memory of its own and at storage offset 0: torch's stager and deepcopy recognise data_ptr() == 0.
        made: ShardTensor = Tensor._make_wrapper_subclass(
            cls, local.size(), strides=local.stride(), dtype=local.dtype, device=local.device, requires_grad=False
        )
        made.local = local
        made.shard_chunks = shard_chunks
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # Any, says torch's stub
        return f"ShardTensor({self.local!r}, {self.shard_chunks!r})"

    # For DCP (torch/distributed/_checkpointable.py):

    def __create_write_items__(self, fqn: str, object: Tensor) -> list[WriteItem]:  # noqa: A002  # torch names it so
        """Return one item per chunk. ``DTensor`` passes itself as ``object``; it must have the chunks' global shape."""
        global_shape = torch.Size(self.shard_chunks.global_shape)
        if object is not self and object.size() != global_shape:
            raise ValueError(f"{fqn} has shape {object.size()}, but its chunks are those of a tensor of {global_shape}")
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=global_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return offsets and sizes of the chunks in the global tensor."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in self.shard_chunks.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the chunk at ``index.offset``, as a view of the local memory."""
        by_offsets = {chunk.offsets: chunk for chunk in self.shard_chunks.chunks}
        if index.offset not in by_offsets:
            raise ValueError(f"{index.fqn} has no chunk at {index.offset} on this rank, only at {[*by_offsets]}")
        return by_offsets[index.offset].in_local(self.local.detach())

    # As a tensor:

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out `func`
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten.copy_.default and not isinstance(args[0], ShardTensor):
            raise RuntimeError(
                "a ShardTensor is being copied into a plain tensor, which would lose its chunks. To stage it for an "
                "asynchronous save, use torch's DefaultStager; to copy the bare data, copy from its `local`"
            )
        bare_args, bare_kwargs = tree_map_only(ShardTensor, lambda one: one.local, (args, kwargs or {}))
        result = func(*bare_args, **bare_kwargs)
        sources = [arg for arg in args if isinstance(arg, ShardTensor)]
        for arg in sources:
            if result is arg.local:  # in place
                # autograd counts the write only in the wrapper; a load is seen by the version of the memory.
                increment_version(arg.local)
                return arg
        keeps = func.overloadpacket in _KEEP_CHUNKS or torch.Tag.pointwise in func.tags
        in_place = any(result is arg for arg in args)  # on a plain tensor
        if keeps and sources and not in_place and isinstance(result, Tensor) and result.shape == sources[0].shape:
            return ShardTensor(result, sources[0].shard_chunks)
        return result

    def __tensor_flatten__(self) -> tuple[list[str], ShardChunks]:
        """Return the inner tensors' names, and the context to rebuild the tensor."""
        return ["local"], self.shard_chunks

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], shard_chunks: ShardChunks, outer_size: object, outer_stride: object
    ) -> "ShardTensor":
        """Invert ``__tensor_flatten__``."""
        return ShardTensor(inner["local"], shard_chunks)


# Pickling is torch's own for wrappers, attributes included. These are for torch.load(weights_only=True).
torch.serialization.add_safe_globals([ShardTensor, ShardChunks, Chunk])


def memory_of(tensor: Tensor) -> Tensor:
    """Return this rank's memory of ``tensor`` as a plain tensor, also if its local tensor carries chunks."""
    local = local_shard(tensor)
    return (local.local if isinstance(local, ShardTensor) else local).detach()


def with_chunks(like: Tensor, local: Tensor | None = None, shard_chunks: ShardChunks | None = None) -> Tensor:
    """Make a DTensor over ``local`` that saves and loads as the given chunks.

    Args:
        like: The DTensor whose mesh, placements and global shape it gets.
        local: This rank's memory, shared; by default that of ``like``.
        shard_chunks: By default ``chunks_of(like)``.

    Raises:
        TypeError: ``like`` is not a DTensor.
        ValueError: the chunks are of another global shape, or do not fit ``local``.
    """
    if not is_dtensor(like):
        raise TypeError(f"with_chunks: expected a DTensor, as DTensor.from_local makes it, got {type(like).__name__}")
    shard_chunks = chunks_of(like) if shard_chunks is None else shard_chunks
    if tuple(like.shape) != shard_chunks.global_shape:
        raise ValueError(f"expected chunks of a tensor of shape {tuple(like.shape)}, got {shard_chunks.global_shape}")
    return over_local(like, ShardTensor(memory_of(like if local is None else local), shard_chunks))


def needs_chunks(tensor: Tensor) -> bool:
    """Return whether a DTensor's placements, as DCP reads them, do not describe this rank's part."""
    return says_its_chunks(tensor) or why_misread(tensor) is not None


def with_parameter_chunks(
    model: nn.Module, state_dict: Mapping[str, Any], *, experts: Experts | None = None
) -> dict[str, Any]:
    """Return ``state_dict`` with values that carry the chunks of their parameters, over the same memory.

    For models whose placements are nominal, as those of Megatron-FSDP: ``model.state_dict()`` detaches parameters,
    which lose the attributes that describe their flat slices. Other values are returned unchanged.

    Args:
        model: the model that has the parameters.
        state_dict: ``{fqn: value}``. Keys and the model's names may begin with ``module.`` a different number of
            times, as with Megatron.
        experts: gives the keys of local experts their global numbers.

    Raises:
        ValueError: a value has another global shape or local size than its parameter; it is sharded unevenly, and no
            parameter has its name; experts are on a mesh that does not span all ranks, without ``experts``.
    """
    check_model(model, "with_parameter_chunks(model, state_dict)")
    line = "with_parameter_chunks(model, model.state_dict())"
    check_is(state_dict, Mapping, "with_parameter_chunks: expected a state dict", line)
    check_experts(state_dict.items(), experts)
    exact = {name: param for param, name in parameter_names(model).items()}
    params = {bare_name(name): param for name, param in exact.items()} | exact
    carrying: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = key if experts is None else experts.global_name(key)
        carrying[name] = value
        if not is_dtensor(value) or isinstance(local_shard(value), ShardTensor):
            continue
        param = params.get(key, params.get(bare_name(key)))
        like = param if param is not None and says_its_chunks(param) else value
        if like is value and not needs_chunks(value):
            continue
        try:
            carrying[name] = with_chunks(value, shard_chunks=chunks_of(like))
        except ValueError as error:
            unknown = "no parameter of the model has this name, and " if like is value else ""
            raise ValueError(f"{key}: {unknown}{error}") from error
        if hasattr(param, MEGATRON_INDEX):  # tells checkpoint_tools.split the tensor-parallel ranks of experts
            setattr(carrying[name], MEGATRON_INDEX, getattr(param, MEGATRON_INDEX))
    return carrying
