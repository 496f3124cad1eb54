"""Chunks: which hyper-rectangles of a global tensor this rank has, and where they lie in its buffer. No collective.

::

    DTensor ──▶ mesh shape, coordinate, placements ──▶ Cuts ── cut_chunks ───────────────────────┐
    flat range of a rectangle (Megatron-FSDP, or the caller's) ── ragged_chunks ─────────────────┼─▶ ShardChunks
    ShardTensor, or a local tensor with ``__create_chunk_list__`` ──▶ what it says of itself ────┘

=============  ========================================================================================================
Cut            one mesh dimension's split of one tensor dimension, and which of its parts this rank has
run            ``(start, length)``: consecutive indices of one tensor dimension. After cuts, a rank has a list of runs
Chunk          one hyper-rectangle of the global tensor, and where its elements lie in the local buffer
ShardChunks    all chunks of one rank: the whole of its part
=============  ========================================================================================================

Equal to torch's ``compute_local_shape_and_global_offset`` except where that is wrong: interleaved rows that leave
several rectangles (it names one, of the total size), and a shard order of the spec or the mesh (it goes from left to
right). Work and memory grow with the number of cuts and rectangles, never with rows. Results are cached: the state
tensors of a parameter, and parameters of the same shape, share one.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_compat.checkpoint import mesh_dims_in_order, split_factor
from ..torch_compat.dtensor import local_shard, said_chunks

Shape = tuple[int, ...]
Run = tuple[int, int]
Rectangle = tuple[Shape, Shape]  # offsets, sizes
FlatRange = tuple[int, int] | slice

MEGATRON_INDEX = "megatron_fsdp_dist_index"
"""The attribute of a parameter in which Megatron-FSDP keeps its meshes, and what their dimensions are called."""

MEGATRON_SLICE = "megatron_fsdp_slice"
"""The attribute of a parameter in which Megatron-FSDP keeps its flat range. Detached, copied or in a state dict, a
tensor does not have it any more."""

# Ragged ranges are different for every parameter, rectangles are shared; an entry takes about a kilobyte.
_CACHED_ENTRIES = 16_384


class Cut(NamedTuple):
    """Part number ``part`` of the ``parts`` of ``tensor_dim``, split as ``torch.chunk`` does.

    With a ``split_factor`` above 1 the dimension is first split into that many blocks, each of them into ``parts``, and
    the rank has that part of every block: what ``_StridedShard`` means.
    """

    tensor_dim: int
    parts: int
    part: int
    split_factor: int = 1


class Chunk(NamedTuple):
    """One hyper-rectangle of the global tensor.

    ``offsets`` and ``sizes`` are in the global tensor; ``local_start`` and ``local_strides`` say, in elements, where
    it lies in this rank's contiguous buffer.
    """

    offsets: Shape
    sizes: Shape
    local_start: int
    local_strides: Shape

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return math.prod(self.sizes)


class ShardChunks(NamedTuple):
    """One rank's part of a tensor of ``global_shape``, in a contiguous buffer of ``local_shape``."""

    global_shape: Shape
    local_shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def local_numel(self) -> int:
        """Elements of this rank's part."""
        return math.prod(self.local_shape)

    @property
    def rectangles(self) -> list[Rectangle]:
        """Offsets and sizes of the chunks that have elements."""
        return [chunk[:2] for chunk in self.chunks if chunk.numel]

    def __deepcopy__(self, memo: object) -> "ShardChunks":
        return self  # integers only; torch's stager copies every attribute of every tensor


def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides in elements, as torch has them: a dimension of size 0 counts as 1."""
    sizes = [max(size, 1) for size in shape[1:]] + [1]
    return tuple(itertools.accumulate(reversed(sizes[: len(shape)]), int.__mul__))[::-1]


# --- read off tensors ------------------------------------------------------------------------------------------------


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
    part = _part_of(source)
    if flat_range is None:
        return part
    if len(part.chunks) != 1:
        raise ValueError(
            f"a flat range is taken of one rectangle; this part has {len(part.chunks)}: {part.chunks}. Give the global "
            "shape and the range within it"
        )
    return ragged_chunks(part.global_shape, part.chunks[0][:2], *_begin_end(flat_range))


def says_its_chunks(tensor: Tensor) -> bool:
    """Return whether a DTensor's chunks are told by something else than its placements, which are nominal then."""
    carries = isinstance(getattr(local_shard(tensor), "shard_chunks", None), ShardChunks)
    return carries or hasattr(tensor, MEGATRON_SLICE) or said_chunks(tensor) is not None


def is_placed_as_dcp_reads(tensor: Tensor) -> bool:
    """Return whether this rank's part is one rectangle, and the one that DCP takes it for if nothing else is said.

    DCP asks the DTensor, which goes from left to right through the placements whatever the shard order is.
    """
    assert isinstance(tensor, DTensor), "a plain tensor is whole"
    own = chunks_of(tensor).rectangles
    if len(own) > 1:
        return False
    read = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]
    return own == [(offsets, sizes) for offsets, sizes in read if 0 not in sizes]


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


def _part_of(source: Tensor | Sequence[int]) -> ShardChunks:
    if not isinstance(source, Tensor):
        return cut_chunks(tuple(source), ())
    carried = getattr(local_shard(source), "shard_chunks", None)
    if isinstance(carried, ShardChunks):
        return carried
    fsdp_slice = getattr(source, MEGATRON_SLICE, None)
    if fsdp_slice is not None:
        return _megatron_chunks(source, fsdp_slice)
    if not isinstance(source, DTensor):
        return cut_chunks(tuple(source.shape), ())
    said = said_chunks(source)
    return _placed_chunks(source) if said is None else _said_chunks(source, said)


def _begin_end(flat_range: FlatRange) -> tuple[int, int]:
    if not isinstance(flat_range, slice):
        return flat_range
    if flat_range.start is None or flat_range.stop is None or flat_range.step not in (None, 1):
        raise ValueError(f"a flat range has a start, a stop and no step, got {flat_range}")
    return flat_range.start, flat_range.stop


def _placed_chunks(tensor: DTensor) -> ShardChunks:
    cuts = _cuts_of(tensor, range(tensor.device_mesh.ndim))
    if cuts is None:
        return ShardChunks(tuple(tensor.shape), (0,), ())
    found, local = cut_chunks(tuple(tensor.shape), cuts), local_shard(tensor)
    if local.numel() != found.local_numel and not local.is_meta:  # one without data has no size of its own
        raise ValueError(
            f"a tensor of shape {found.global_shape} with placements {tensor.placements} has {found.local_shape} on "
            f"this rank, and its local tensor is {tuple(local.shape)}: it is sharded unevenly, and nothing says how. "
            "fsdp_offload.checkpoint.with_parameter_chunks gives values of a state_dict() what their parameters know; "
            "Megatron's update_uneven_dtensor_chunk_metadata and with_chunks say it of one tensor"
        )
    return found


def _cuts_of(tensor: DTensor, mesh_dims: Sequence[int]) -> tuple[Cut, ...] | None:
    """The cuts of those of the ``mesh_dims`` that shard, in the order they are applied; ``None`` outside the mesh."""
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
        if mesh_dim in mesh_dims and not placement.is_replicate():
            cuts.append(Cut(placement.dim, mesh.size(mesh_dim), coordinate[mesh_dim], split_factor(placement)))
    return tuple(cuts)


def _said_chunks(tensor: DTensor, said: Sequence[Any]) -> ShardChunks:
    """Chunks that ``__create_chunk_list__`` of the local tensor has ``said``, which is what DCP saves it as.

    Megatron hangs it onto the local tensors of its uneven DTensors (``megatron_fsdp/uneven_dtensor.py``), one rectangle
    for each. It gives empty ones the offset at which they would begin; here they are at the dimension's end.
    """
    local, global_shape = local_shard(tensor), tuple(tensor.shape)
    if len(said) > 1:
        raise ValueError(
            f"the local tensor of a tensor of shape {global_shape} says that it is {len(said)} chunks, and not where "
            "each lies in it; wrap it with fsdp_offload.checkpoint.with_chunks"
        )
    at_end = (*global_shape[:1], *(0 for _ in global_shape[1:]))
    offsets, sizes = at_end, (0, *global_shape[1:])
    for chunk in said:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    inside = all(at + size <= whole for at, size, whole in zip(offsets, sizes, global_shape, strict=True))
    if math.prod(sizes) != local.numel() or not inside:
        raise ValueError(
            f"the local tensor of a tensor of shape {global_shape} says that it is the chunk at {offsets} of {sizes}, "
            f"and has shape {tuple(local.shape)}: was it resized after that was said?"
        )
    chunk = Chunk(offsets if local.numel() else at_end, sizes, 0, contiguous_strides(sizes))
    return ShardChunks(global_shape, sizes, (chunk,))


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
    return ragged_chunks(global_shape, tensor_parallel_part[:2], *_begin_end(fsdp_slice))


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


# --- arithmetic: parts made by cuts ----------------------------------------------------------------------------------


@functools.lru_cache(_CACHED_ENTRIES)
def cut_chunks(global_shape: Shape, cuts: tuple[Cut, ...]) -> ShardChunks:
    """The rectangles that are left of ``global_shape`` after ``cuts``, applied in order.

    One, except where interleaved rows were cut so that they do not join. An empty part is one chunk without elements
    whose offset is the dimension's size, as torch has it: all empty parts are then the same chunk, and none of them
    collides with a real one at offset 0.
    """
    runs_by_dim: list[list[Run]] = [[(0, size)] if size else [] for size in global_shape]
    for cut in cuts:
        runs_by_dim[cut.tensor_dim] = _cut_runs(runs_by_dim[cut.tensor_dim], cut)
    local_shape = tuple(_length(runs) for runs in runs_by_dim)
    strides = contiguous_strides(local_shape)
    if 0 in local_shape:
        first = [runs[0][0] if runs else size for runs, size in zip(runs_by_dim, global_shape, strict=True)]
        return ShardChunks(global_shape, local_shape, (Chunk(tuple(first), local_shape, 0, strides),))
    chunks = []
    for combination in itertools.product(*map(_with_local_offsets, runs_by_dim)):  # in the order of the local tensor
        offsets, sizes, local_offsets = (tuple(run[field] for run in combination) for field in range(3))
        local_start = sum(local * stride for local, stride in zip(local_offsets, strides, strict=True))
        chunks.append(Chunk(offsets, sizes, local_start, strides))
    return ShardChunks(global_shape, local_shape, tuple(chunks))


def part_of(length: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of a part, as ``torch.chunk`` splits: equal parts, the last ones short or empty."""
    size = -(-length // parts)
    return min(size * part, length), min(size * (part + 1), length)


def _cut_runs(runs: list[Run], cut: Cut) -> list[Run]:
    kept: list[Run] = []
    for block in range(cut.split_factor):
        block_begin, block_end = part_of(_length(runs), cut.split_factor, block)
        begin, end = part_of(block_end - block_begin, cut.parts, cut.part)
        for start, length in _slice_runs(runs, block_begin + begin, block_begin + end):
            if kept and sum(kept[-1]) == start:  # it goes on where the last one ends
                start, length = kept[-1][0], kept.pop()[1] + length
            kept.append((start, length))
    return kept


def _slice_runs(runs: list[Run], begin: int, end: int) -> Iterator[Run]:
    """Positions ``begin`` to ``end`` of the indices that ``runs`` list one after the other."""
    position = 0
    for start, length in runs:
        first, last = max(begin - position, 0), min(end - position, length)
        if first < last:
            yield start + first, last - first
        position += length


def _length(runs: list[Run]) -> int:
    return sum(length for _, length in runs)


def _with_local_offsets(runs: list[Run]) -> list[tuple[int, int, int]]:
    local_offsets = itertools.accumulate((length for _, length in runs), initial=0)
    return [(*run, local) for run, local in zip(runs, local_offsets, strict=False)]


# --- arithmetic: ragged parts ----------------------------------------------------------------------------------------


@functools.lru_cache(_CACHED_ENTRIES)
def ragged_chunks(global_shape: Shape, rectangle: Rectangle, begin: int, end: int) -> ShardChunks:
    """The row-major flat range ``[begin, end)`` of ``rectangle``, as the fewest rectangles that follow each other.

    At most ``2 * ndim - 1``, in order, each a consecutive stretch of the flat local buffer. (Rectangles that lie
    scattered in the buffer could in rare cases be one fewer; reading and writing them would be strided.) An empty range
    is one chunk without elements at the end of dimension 0, as an empty ``Shard(0)``; a 0-dim tensor has no such chunk.

    Raises:
        ValueError: the range does not lie within the rectangle.
    """
    offsets, sizes = rectangle
    if not 0 <= begin <= end <= math.prod(sizes):
        raise ValueError(
            f"a flat range [{begin}, {end}) does not lie within the {math.prod(sizes)} elements of a rectangle of "
            f"sizes {sizes}; flat ranges count elements of this rank's own rectangle, row by row"
        )
    chunks = []
    local_start = 0
    for within, chunk_sizes in _flat_rectangles(sizes, begin, end) if begin < end else ():
        shifted = tuple(map(int.__add__, offsets, within))
        chunks.append(Chunk(shifted, chunk_sizes, local_start, contiguous_strides(chunk_sizes)))
        local_start += math.prod(chunk_sizes)
    if begin == end and sizes:
        empty = (0, *sizes[1:])
        chunks.append(Chunk((global_shape[0], *offsets[1:]), empty, 0, contiguous_strides(empty)))
    return ShardChunks(global_shape, (end - begin,), tuple(chunks))


def _flat_rectangles(sizes: Shape, begin: int, end: int) -> Iterator[Rectangle]:
    """A head in the first row, whole rows, and a tail in the last; head and tail are ranges of one dimension less."""
    if not sizes:
        yield (), ()
        return
    row_numel = math.prod(sizes[1:])
    first, skipped = divmod(begin, row_numel)
    last, kept = divmod(end, row_numel)
    if first == last:
        yield from _in_row(first, sizes, skipped, kept)
        return
    if skipped:
        yield from _in_row(first, sizes, skipped, row_numel)
        first += 1
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    if kept:
        yield from _in_row(last, sizes, 0, kept)


def _in_row(row: int, sizes: Shape, begin: int, end: int) -> Iterator[Rectangle]:
    for offsets, inner_sizes in _flat_rectangles(sizes[1:], begin, end):
        yield (row, *offsets), (1, *inner_sizes)
