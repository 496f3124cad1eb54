"""Chunk metadata: which rectangles of a global tensor this rank has. Pure arithmetic, no collective.

::

    DTensor ──▶ mesh shape, coordinate, placements ──▶ Cuts ───────────────────────┐
    Megatron-FSDP parameter ──▶ its TP Cut ──▶ rectangle, megatron_fsdp_slice ──┐  │
    shape, flat range ──────────────────────────────▶ rectangle, [begin, end) ──┤  │
                                                                 ragged_chunks ─┴──┴─ cut_chunks ──▶ ShardChunks
    ShardTensor ──▶ what it carries ───────────────────────────────────────────────────────────────▶ ShardChunks
    a local tensor with ``__create_chunk_list__`` ──▶ what it says of itself ──────────────────────▶ ShardChunks

``rectangles.py`` has the nouns and the arithmetic; this file reads the integers off the objects. Equal to torch's
``compute_local_shape_and_global_offset`` where that is right. It is not where interleaved rows leave several rectangles
(it names one, of the total size) and where the spec has a shard order of its own (it goes from left to right).
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_compat.dtensor import local_shard, said_chunks
from .rectangles import Chunk, Cut, Shape, ShardChunks, contiguous_strides, cut_chunks, ragged_chunks
from .torch_private import mesh_dims_in_order, split_factor

__all__ = ["Chunk", "ShardChunks", "chunks_of"]

FlatRange = tuple[int, int] | slice

MEGATRON_INDEX = "megatron_fsdp_dist_index"
"""The attribute of a parameter in which Megatron-FSDP keeps its meshes, and what their dimensions are called."""

MEGATRON_SLICE = "megatron_fsdp_slice"
"""The attribute of a parameter in which Megatron-FSDP keeps its flat range. Detached, copied or in a state dict, a
tensor does not have it any more."""


def chunks_of(source: Tensor | Sequence[int], flat_range: FlatRange | None = None) -> ShardChunks:
    """Compute the chunks of this rank's part of a tensor.

    Args:
        source: What has chunks:

            - a DTensor; with a ``ShardTensor`` inside, what that carries;
            - a Megatron-FSDP parameter, recognised by ``megatron_fsdp_slice`` and ``megatron_fsdp_dist_index``;
            - a DTensor whose local tensor has ``__create_chunk_list__``, as Megatron's uneven DTensors: what that says;
            - a plain tensor or a global shape: all of it.
        flat_range: ``(begin, end)`` or a slice: only these elements of that part, counted row by row within it.

    Returns:
        Chunks in the order of the local buffer. None on a rank outside the mesh. An empty part is one chunk with
        the dimension's size as its offset.

    Raises:
        ValueError: a ``Partial`` placement; a range outside the part; a range of a part of several rectangles; a local
            tensor of another size than its chunks.
        TypeError: an unknown placement.
    """
    whole = _chunks_of_part(source)
    if flat_range is None:
        return whole
    if len(whole.chunks) != 1:
        raise ValueError(
            f"a flat range is taken of one rectangle; this part has {len(whole.chunks)}: {whole.chunks}. Give the "
            "global shape and the range within it"
        )
    chunk = whole.chunks[0]
    return ragged_chunks(whole.global_shape, (chunk.offsets, chunk.sizes), *_begin_end(flat_range))


def flat_range_of(part: ShardChunks) -> tuple[int, int] | None:
    """Begin and end of ``part`` in the global tensor's elements, row by row; ``None`` if those are not one range.

    An empty part is ``(0, 0)``.
    """
    strides = contiguous_strides(part.global_shape)
    begin = end = 0
    for chunk in part.chunks:
        if not chunk.numel:
            continue
        # One stretch, if no dimension behind the first that is longer than one index is cut.
        first = next((dim for dim, size in enumerate(chunk.sizes) if size != 1), len(chunk.sizes))
        starts_at = sum(at * stride for at, stride in zip(chunk.offsets, strides, strict=True))
        is_stretch = chunk.sizes[first + 1 :] == part.global_shape[first + 1 :]
        if not is_stretch or chunk.local_start != end - begin or (end and starts_at != end):
            return None
        begin, end = (begin if end else starts_at), starts_at + chunk.numel
    return begin, end


def says_its_chunks(tensor: Tensor) -> bool:
    """Return whether a DTensor's chunks are told by something else than its placements, which are nominal then."""
    carries = isinstance(getattr(local_shard(tensor), "shard_chunks", None), ShardChunks)
    return carries or hasattr(tensor, MEGATRON_SLICE) or said_chunks(tensor) is not None


def is_placed_as_dcp_reads(tensor: DTensor) -> bool:
    """Return whether this rank's part is one rectangle, and the one that DCP takes it for if nothing else is said.

    DCP asks the DTensor, which goes from left to right through the placements whatever the shard order is.
    """
    own = [chunk[:2] for chunk in chunks_of(tensor).chunks if chunk.numel]
    if len(own) > 1:
        return False
    read = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]
    return own == [(offsets, sizes) for offsets, sizes in read if 0 not in sizes]


def _chunks_of_part(source: Tensor | Sequence[int]) -> ShardChunks:
    if not isinstance(source, Tensor):
        return cut_chunks(tuple(source), ())
    carried = getattr(local_shard(source), "shard_chunks", None)
    if isinstance(carried, ShardChunks):
        return carried
    fsdp_slice = getattr(source, MEGATRON_SLICE, None)
    if fsdp_slice is not None:
        return _megatron_chunks(source, fsdp_slice)
    if isinstance(source, DTensor):
        return _placed_chunks(source) if said_chunks(source) is None else _said_chunks(source)
    return cut_chunks(tuple(source.shape), ())


def _begin_end(flat_range: FlatRange) -> tuple[int, int]:
    if not isinstance(flat_range, slice):
        return flat_range
    if flat_range.start is None or flat_range.stop is None or flat_range.step not in (None, 1):
        raise ValueError(f"a flat range has a start, a stop and no step, got {flat_range}")
    return flat_range.start, flat_range.stop


# --- DTensors --------------------------------------------------------------------------------------------------------


def _placed_chunks(tensor: DTensor) -> ShardChunks:
    global_shape = tuple(tensor.shape)
    cuts = _cuts_of(tensor)
    if cuts is None:
        return ShardChunks(global_shape, (0,), ())
    found, local = cut_chunks(global_shape, cuts), local_shard(tensor)
    if local.numel() != found.local_numel and not local.is_meta:  # one without data has no size of its own
        raise ValueError(
            f"a tensor of shape {global_shape} with placements {tensor.placements} has {found.local_shape} on this "
            f"rank, and its local tensor is {tuple(local.shape)}: it is sharded unevenly, and nothing says how. "
            "fsdp_offload.checkpoint.with_parameter_chunks gives values of a state_dict() what their parameters know; "
            "Megatron's update_uneven_dtensor_chunk_metadata and with_chunks say it of one tensor"
        )
    return found


def _cuts_of(tensor: DTensor, only_mesh_dims: Sequence[int] | None = None) -> tuple[Cut, ...] | None:
    """The cuts of the mesh dimensions that shard, in the order they are applied; ``None`` outside the mesh."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    cuts = []
    for mesh_dim in mesh_dims_in_order(tensor):
        placement: Any = placements[mesh_dim]
        if placement.is_partial():
            raise ValueError(
                f"a tensor with placements {placements} has no chunks: {placement} is a term of a sum. Redistribute it "
                "to Shard or Replicate"
            )
        if placement.is_replicate() or (only_mesh_dims is not None and mesh_dim not in only_mesh_dims):
            continue
        cuts.append(Cut(placement.dim, mesh.size(mesh_dim), coordinate[mesh_dim], split_factor(placement)))
    return tuple(cuts)


# --- what a local tensor says of itself ------------------------------------------------------------------------------


def _said_chunks(tensor: DTensor) -> ShardChunks:
    """Read ``__create_chunk_list__`` of the local tensor, which is what DCP saves it as.

    Megatron hangs it onto the local tensors of its uneven DTensors (``megatron_fsdp/uneven_dtensor.py``), one rectangle
    for each. It gives empty ones the offset at which they would begin; here they are at the dimension's end.
    """
    said, local, global_shape = said_chunks(tensor) or [], local_shard(tensor), tuple(tensor.shape)
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in said]
    if len(chunks) > 1:
        raise ValueError(
            f"the local tensor of a tensor of shape {global_shape} says that it is {len(chunks)} chunks, and not where "
            "each lies in it; wrap it with fsdp_offload.checkpoint.with_chunks"
        )
    offsets, sizes = chunks[0] if chunks else (global_shape, (0, *global_shape[1:]))
    inside = all(at + size <= whole for at, size, whole in zip(offsets, sizes, global_shape, strict=True))
    if math.prod(sizes) != local.numel() or not inside:
        raise ValueError(
            f"the local tensor of a tensor of shape {global_shape} says that it is the chunk at {offsets} of {sizes}, "
            f"and has shape {tuple(local.shape)}: was it resized after that was said?"
        )
    if not local.numel():
        offsets = (global_shape[0], *(0 for _ in global_shape[1:]))
    return ShardChunks(global_shape, tuple(sizes), (Chunk(offsets, sizes, 0, contiguous_strides(sizes)),))


# --- Megatron-FSDP ---------------------------------------------------------------------------------------------------


def _megatron_chunks(param: Tensor, fsdp_slice: slice) -> ShardChunks:
    """The chunks of a parameter of Megatron-FSDP, in whose buffers shards are not cut as ``torch.chunk`` does.

    As ``megatron_fsdp/param_and_grad_buffer.py`` of Megatron-LM sets them (read at d98e8a64, 2026-08-22):

    ``megatron_fsdp_slice``
        the flat range that this rank has, in coordinates of its *tensor-parallel* part, row by row; empty ones may be
        ``(0, 0)`` or ``(numel, numel)``; absent where nothing is sharded, and then the placements say it all.
    ``megatron_fsdp_dist_index.tp_dim``
        the name of the mesh dimension of tensor parallelism, or ``None``. The parameter's own ``device_mesh`` has a
        dimension of that name only if tensor parallelism shards the parameter; its placement is that cut. The
        placements of the other dimensions are nominal.

    Megatron derives the same from one gather per tensor and mesh dimension, and knows one chunk per rank; a fragment
    that is cut in mid-row has several here.
    """
    if not isinstance(param, DTensor):
        raise TypeError(f"expected a Megatron-FSDP parameter to be a DTensor, got {type(param).__name__}")
    tp_dim, names = _tp_dim_of(param), param.device_mesh.mesh_dim_names or ()
    cuts = _cuts_of(param, [names.index(tp_dim)] if tp_dim in names else [])
    global_shape: Shape = tuple(param.shape)
    if cuts is None:
        return ShardChunks(global_shape, (0,), ())
    (tensor_parallel_part,) = cut_chunks(global_shape, cuts).chunks
    rectangle = (tensor_parallel_part.offsets, tensor_parallel_part.sizes)
    return ragged_chunks(global_shape, rectangle, *_begin_end(fsdp_slice))


def tensor_parallel_ranks(tensor: Tensor) -> int | None:
    """Count the tensor-parallel ranks that divide a DTensor, by its own mesh; ``None`` where nothing tells.

    The dimension is called as Megatron-FSDP says (``tp_dim``), or else ``tp`` or ``etp``. Where Megatron-FSDP has none,
    one rank has all.
    """
    if not isinstance(tensor, DTensor):
        return None
    is_megatron, names = hasattr(tensor, MEGATRON_INDEX), tensor.device_mesh.mesh_dim_names or ()
    for name in [_tp_dim_of(tensor)] if is_megatron else ["tp", "etp"]:
        if name in names and tensor.placements[names.index(name)].is_shard():
            return tensor.device_mesh.size(names.index(name))
    return 1 if is_megatron else None


def _tp_dim_of(param: Tensor) -> str | None:
    return getattr(getattr(param, MEGATRON_INDEX, None), "tp_dim", None)
