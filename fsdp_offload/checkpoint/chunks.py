"""Chunks: the hyper-rectangles of a global tensor on this rank, and their places in its buffer. No collective.

::

    DTensor ──▶ mesh shape, coordinate, placements ──▶ Cuts ── cut_chunks ───────────────────────┐
    flat range of a rectangle (Megatron-FSDP, or the caller's) ── ragged_chunks ─────────────────┼─▶ ShardChunks
    ShardTensor, or a local tensor with ``__create_chunk_list__`` ──▶ its own description ───────┘

Equal to torch's ``compute_local_shape_and_global_offset`` except where that is wrong: for interleaved rows in several
rectangles (it gives one, of the total size), and for a shard order of the spec or the mesh (it assumes left to right).
Work and memory grow with cuts and rectangles, never with rows. Equal parts share one cached result.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..fsdp.dtensor import local_shard, mesh_dims_in_order, split_factor

Shape = tuple[int, ...]
Rectangle = tuple[Shape, Shape]  # offsets, sizes
FlatRange = tuple[int, int] | slice

# Megatron-FSDP does not cut its buffers as torch.chunk does; two attributes of a parameter tell its place
# (megatron_fsdp/param_and_grad_buffer.py of Megatron-LM, read at d98e8a64). detach(), copies and state dicts lose them.

MEGATRON_SLICE = "megatron_fsdp_slice"
"""The flat range that this rank has, row by row, in coordinates of its *tensor-parallel* part.

Empty ranges may be ``(0, 0)`` or ``(numel, numel)``. Missing if nothing is sharded: then the placements suffice."""

MEGATRON_INDEX = "megatron_fsdp_dist_index"
"""Megatron-FSDP's meshes. ``tp_dim`` names the mesh dimension of tensor parallelism, or is ``None``.

The parameter's own mesh has a dimension of that name only if tensor parallelism shards the parameter; the dimension's
placement then describes that cut. The placements of the other dimensions are nominal."""

MEGATRON_GROUP = "_mfsdp_parameter_group"
"""In version 2 (``experimental``): the group, or a weak reference to it, whose ``main_weight`` packs whole rows.

Read in megatron-fsdp 0.6.1, too. The placements tell which ranks share the rows, but not which rank has which rows."""

# Parameters share rectangles but not ragged ranges; an entry takes about a kilobyte.
_CACHED_ENTRIES = 16_384


class Cut(NamedTuple):
    """One mesh dimension's split: ``part`` of the ``parts`` of ``tensor_dim``, in each of ``split_factor`` blocks."""

    tensor_dim: int
    parts: int
    part: int
    split_factor: int = 1


class Chunk(NamedTuple):
    """One hyper-rectangle of the global tensor, and its place, in elements, in this rank's contiguous buffer."""

    offsets: Shape
    sizes: Shape
    local_start: int
    local_strides: Shape

    @property
    def numel(self) -> int:
        """Return the number of elements of the rectangle."""
        return math.prod(self.sizes)

    def in_global(self, whole: Tensor) -> Tensor:
        """Return a view of the rectangle in ``whole``, which has all elements."""
        ends, shape = tuple(map(int.__add__, self.offsets, self.sizes)), tuple(getattr(whole, "shape", ()))
        if len(shape) != len(ends) or any(map(int.__lt__, shape, ends)):
            raise ValueError(f"Chunk.in_global: expected the whole tensor, at least {ends}, got shape {shape}.")
        return whole[tuple(map(slice, self.offsets, ends))]

    def in_local(self, local: Tensor) -> Tensor:
        """Return a view of the chunk in ``local``, this rank's buffer of any shape."""
        ends = map(int.__mul__, (size - 1 for size in self.sizes), self.local_strides)
        end = self.local_start + 1 + sum(ends)
        if self.numel and local.numel() < end:  # other memory may follow in its storage
            raise ValueError(
                f"Chunk.in_local: expected this rank's buffer, at least {end} elements, got {local.numel()}."
            )
        return local.as_strided(self.sizes, self.local_strides, local.storage_offset() + self.local_start)


class ShardChunks(NamedTuple):
    """One rank's part of a tensor of ``global_shape``, in a contiguous buffer of ``local_shape``."""

    global_shape: Shape
    local_shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def local_numel(self) -> int:
        """Return the number of elements of this rank's part."""
        return math.prod(self.local_shape)

    @property
    def rectangles(self) -> list[Rectangle]:
        """Return offsets and sizes of the chunks that have elements."""
        return [chunk[:2] for chunk in self.chunks if chunk.numel]

    def __deepcopy__(self, memo: object) -> "ShardChunks":
        return self  # immutable; torch's stager would copy it with every tensor


def contiguous_strides(shape: Shape) -> Shape:
    """Return row-major strides in elements, as in torch: a dimension of size 0 counts as 1."""
    sizes = [max(size, 1) for size in shape[1:]] + [1]
    return tuple(itertools.accumulate(reversed(sizes[: len(shape)]), int.__mul__))[::-1]


def chunks_of(source: Tensor | Sequence[int], flat_range: FlatRange | None = None) -> ShardChunks:
    """Compute the chunks of this rank's part of a tensor.

    Args:
        source: One of:

            - a DTensor; with a ``ShardTensor`` inside, the chunks that it carries;
            - a Megatron-FSDP parameter, recognised by ``megatron_fsdp_slice`` and ``megatron_fsdp_dist_index``, or by
              its parameter group;
            - a DTensor whose local tensor has ``__create_chunk_list__``, as Megatron's uneven DTensors: those chunks;
            - a plain tensor or a global shape: all of it.
        flat_range: ``(begin, end)`` or a slice: only these elements of the part, counted row by row within the part.

    Returns:
        Chunks in the order of the local buffer; no chunks on a rank outside the mesh. An empty part is one chunk with
        the dimension's size as its offset.

    Raises:
        ValueError: a ``Partial`` placement; a range outside the part; a range of a part of several rectangles; a local
            tensor of another size than its chunks.
        TypeError: an unknown placement.
    """
    shape: Any = () if isinstance(source, Tensor) else source
    ends: Any = (0, 0) if isinstance(flat_range, slice | None) else flat_range
    if not (isinstance(shape, Sequence) and all(map(is_whole, shape)) and min(shape, default=0) >= 0):
        raise TypeError(f"chunks_of: expected a tensor or a global shape of integers from 0 on, got {source!r:.60}.")
    if not (isinstance(ends, Sequence) and [*map(is_whole, ends)] == [True, True]):
        raise TypeError(f"chunks_of: flat_range must be (begin, end) or a slice, got {flat_range!r:.60}.")
    part = _part_of(source)
    return part if flat_range is None else _range_of(part, flat_range)


def is_whole(number: object) -> bool:
    """Return whether ``number`` is an integer, of Python, NumPy or torch."""
    return hasattr(number, "__index__")


def says_its_chunks(tensor: Tensor) -> bool:
    """Return whether something other than the placements, which are then nominal, describes a DTensor's chunks."""
    is_said = hasattr(tensor, MEGATRON_SLICE) or hasattr(local_shard(tensor), "__create_chunk_list__")
    return is_said or _range_in_group(tensor) is not None


def why_misread(value: object) -> str | None:
    """Return why DCP would take a DTensor for other elements than it has, or ``None``.

    DCP takes a local tensor without chunks for the one rectangle that the placements give from left to right, which is
    wrong for interleaved rows, uneven parts, slices of Megatron-FSDP, and mesh dimensions in another order.
    """
    if not isinstance(value, DTensor) or hasattr(local_shard(value), "__create_chunk_list__"):
        return None
    try:
        own = chunks_of(value).rectangles
    except (TypeError, ValueError) as error:
        return str(error)
    read = value.__create_chunk_list__() if len(own) < 2 else ()
    if own == [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in read if 0 not in chunk.sizes]:
        return None
    return "its local tensor is not the rectangle that its placements, left to right, name"


def flat_range_of(part: ShardChunks) -> tuple[int, int] | None:
    """Return begin and end of ``part`` in global elements, ``(0, 0)`` if empty; ``None`` if it is not one range."""
    strides = contiguous_strides(part.global_shape)
    begin = end = 0
    for chunk in (one for one in part.chunks if one.numel):
        first = sum(map(int.__mul__, chunk.offsets, strides))
        length = 1 + sum((size - 1) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
        if length != chunk.numel or chunk.local_start != end - begin or (end and first != end):
            return None
        begin, end = (begin if end else first), first + length
    return begin, end


def flat_index(part: ShardChunks, at: Tensor) -> Tensor:
    """Map the numbers ``at`` of elements in the local buffer to their numbers in the flat global tensor."""
    strides, own = contiguous_strides(part.global_shape), contiguous_strides(part.local_shape)
    is_grid, found = len(part.local_shape) == len(part.global_shape), torch.empty_like(at)
    for chunk in (one for one in part.chunks if one.numel):
        begin, numbers = chunk.local_start, torch.zeros_like(at)
        inside = torch.ones_like(at, dtype=torch.bool) if is_grid else (at >= begin) & (at < begin + chunk.numel)
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            if is_grid:  # rectangles in a buffer with all dimensions of the tensor
                within = at // own[dim] % part.local_shape[dim] - begin // own[dim] % part.local_shape[dim]
                inside &= (within >= 0) & (within < size)
            else:  # rectangles one after the other in a flat buffer
                within = (at - begin) // chunk.local_strides[dim] % size
            numbers += (within + offset) * strides[dim]
        found = torch.where(inside, numbers, found)
    return found


def _part_of(source: Tensor | Sequence[int]) -> ShardChunks:
    if not isinstance(source, Tensor):
        return cut_chunks(tuple(source), ())
    local, global_shape = local_shard(source), tuple(source.shape)
    carried, megatron_range = getattr(local, "shard_chunks", None), getattr(source, MEGATRON_SLICE, None)
    if isinstance(carried, ShardChunks):
        return carried
    if not isinstance(source, DTensor):
        if megatron_range is not None:
            raise TypeError(f"expected a Megatron-FSDP parameter to be a DTensor, got {type(source).__name__}")
        return cut_chunks(global_shape, ())
    if megatron_range is not None:
        tp_dim = getattr(getattr(source, MEGATRON_INDEX, None), "tp_dim", None)
        names = enumerate(source.device_mesh.mesh_dim_names or ())
        return _range_of(_cut_by(source, [dim for dim, name in names if name == tp_dim]), megatron_range)
    if hasattr(local, "__create_chunk_list__"):
        return _said_chunks(source, local.__create_chunk_list__())
    if (packed := _range_in_group(source)) is not None:
        return ragged_chunks(global_shape, ((0,) * source.dim(), global_shape), *packed)
    placed = _cut_by(source, range(source.device_mesh.ndim))
    if placed.chunks and local.numel() != placed.local_numel and not local.is_meta:
        raise ValueError(
            f"a tensor of shape {global_shape} with placements {source.placements} has {placed.local_shape} on "
            f"this rank, and its local tensor is {tuple(local.shape)}: it is sharded unevenly, and nothing says how. "
            "fsdp_offload.checkpoint.with_parameter_chunks says it of a state_dict(), if its parameters know it. "
            "Megatron's update_uneven_dtensor_chunk_metadata(param), called on all ranks, lets a parameter know it"
        )
    return placed


def _range_in_group(param: Tensor) -> tuple[int, int] | None:
    """Find the elements that this rank has of a parameter of Megatron-FSDP v2; ``None`` for any other tensor."""
    group: Any = getattr(param, MEGATRON_GROUP, None)
    group = group() if isinstance(group, weakref.ref) else group
    packed: Any = getattr(group, "main_weight", None)
    if packed is None:
        return None
    sharded = getattr(group, "sharded_parameters", None) or [one.sharded for one in group.fsdp_parameters]
    number = next((number for number, one in enumerate(sharded) if one is param), None)
    if number is None:  # ``param`` is the gathered parameter
        return None
    if packed.layout.tensor_shapes[number] != param.shape:
        shape = tuple(packed.layout.tensor_shapes[number])
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has {shape} in its group: its rows are not known")
    begin = packed.offset - packed.layout.tensor_to_offset[number]
    first, last = (min(max(at, 0), param.numel()) for at in (begin, begin + packed.local_buffer.numel()))
    return first, last


def _range_of(part: ShardChunks, flat_range: FlatRange) -> ShardChunks:
    """Return the elements of ``flat_range`` in a part of one rectangle; a part without chunks is returned unchanged."""
    if len(part.chunks) > 1:
        raise ValueError(f"a flat range is taken of one rectangle, and this part of a tensor has {len(part.chunks)}")
    if isinstance(flat_range, slice):
        if flat_range.start is None or flat_range.stop is None or flat_range.step not in (None, 1):
            raise ValueError(f"a flat range has a start, a stop and no step, got {flat_range}")
        flat_range = (flat_range.start, flat_range.stop)
    return ragged_chunks(part.global_shape, part.chunks[0][:2], *flat_range) if part.chunks else part


def _cut_by(tensor: DTensor, among: Collection[int]) -> ShardChunks:
    """List the chunks that mesh dimensions ``among`` leave to this rank; none on a rank outside the mesh."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ShardChunks(tuple(tensor.shape), (0,), ())
    cuts = []
    for mesh_dim in mesh_dims_in_order(tensor):
        placement: Any = placements[mesh_dim]
        if placement.is_partial():
            raise ValueError(
                f"a tensor with placements {placements} has no chunks: {placement} is a term of a sum. Redistribute it "
                "to Shard or Replicate"
            )
        if mesh_dim in among and not placement.is_replicate():
            cuts.append(Cut(placement.dim, mesh.size(mesh_dim), coordinate[mesh_dim], split_factor(placement)))
    return cut_chunks(tuple(tensor.shape), tuple(cuts))


def _said_chunks(tensor: DTensor, said: Sequence[Any]) -> ShardChunks:
    """Return the one chunk that Megatron attaches to an uneven DTensor's local tensor; an empty chunk is at the end."""
    local, global_shape = local_shard(tensor), tuple(tensor.shape)
    at_end = (*global_shape[:1], *(0 for _ in global_shape[1:]))
    offsets, sizes = (tuple(said[0].offsets), tuple(said[0].sizes)) if said else (at_end, (0, *global_shape[1:]))
    inside = all(at + size <= whole for at, size, whole in zip(offsets, sizes, global_shape, strict=True))
    if math.prod(sizes) != local.numel() or not inside or len(said) > 1:
        raise ValueError(
            f"the local tensor of a tensor of shape {global_shape} says that it is the chunk at {offsets} of {sizes} "
            f"({len(said)} in all), and has shape {tuple(local.shape)}: was it resized after that was said?"
        )
    chunk = Chunk(offsets if local.numel() else at_end, sizes, 0, contiguous_strides(sizes))
    return ShardChunks(global_shape, sizes, (chunk,))


# --- arithmetic -------------------------------------------------------------------------------------------------------


@functools.lru_cache(_CACHED_ENTRIES)
def cut_chunks(global_shape: Shape, cuts: tuple[Cut, ...]) -> ShardChunks:
    """Return the rectangles that remain of ``global_shape`` after ``cuts``, in order.

    There is one rectangle, or several if interleaved rows do not join. An empty part is one chunk without elements
    whose offset is the dimension's size, as in torch: all empty parts are then the same chunk, and none of them
    collides with a real one at offset 0.
    """
    runs_by_dim: list[list[range]] = [[range(size)] if size else [] for size in global_shape]
    for cut in cuts:
        runs_by_dim[cut.tensor_dim] = _cut_runs(runs_by_dim[cut.tensor_dim], cut)
    local_shape = tuple(sum(map(len, runs)) for runs in runs_by_dim)
    strides = contiguous_strides(local_shape)
    if 0 in local_shape:
        first = [runs[0].start if runs else size for runs, size in zip(runs_by_dim, global_shape, strict=True)]
        return ShardChunks(global_shape, local_shape, (Chunk(tuple(first), local_shape, 0, strides),))
    starts_by_dim = [list(itertools.accumulate(map(len, runs[:-1]), initial=0)) for runs in runs_by_dim]
    in_order = zip(itertools.product(*runs_by_dim), itertools.product(*starts_by_dim), strict=True)  # buffer order
    chunks = [
        Chunk(tuple(run.start for run in runs), tuple(map(len, runs)), sum(map(int.__mul__, starts, strides)), strides)
        for runs, starts in in_order
    ]
    return ShardChunks(global_shape, local_shape, tuple(chunks))


def part_of(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return begin and end of a part, as ``torch.chunk`` splits: equal parts, the last ones short or empty."""
    size = -(-length // parts)
    return min(size * part, length), min(size * (part + 1), length)


def _cut_runs(runs: list[range], cut: Cut) -> list[range]:
    kept: list[range] = []
    for block in range(cut.split_factor):
        block_begin, block_end = part_of(sum(map(len, runs)), cut.split_factor, block)
        begin, end = (block_begin + at for at in part_of(block_end - block_begin, cut.parts, cut.part))
        for run in runs:  # [begin, end) of the indices that the runs list one after another
            part = run[max(begin, 0) : max(end, 0)]
            if part and kept and kept[-1].stop == part.start:  # it continues the last one
                kept[-1] = range(kept[-1].start, part.stop)
            elif part:
                kept.append(part)
            begin, end = begin - len(run), end - len(run)
    return kept


@functools.lru_cache(_CACHED_ENTRIES)
def ragged_chunks(global_shape: Shape, rectangle: Rectangle, begin: int, end: int) -> ShardChunks:
    """Return the row-major flat range ``[begin, end)`` of ``rectangle`` as the fewest consecutive rectangles.

    At most ``2 * ndim - 1``, each a consecutive stretch of the flat local buffer. An empty range is one chunk without
    elements at the end of dimension 0, as an empty ``Shard(0)``; a 0-dim tensor has no such chunk.
    """
    offsets, sizes = rectangle
    if not 0 <= begin <= end <= math.prod(sizes):
        raise ValueError(
            f"a flat range [{begin}, {end}) does not lie within the {math.prod(sizes)} elements of a rectangle of "
            f"sizes {sizes}; flat ranges count elements of this rank's own rectangle, row by row"
        )
    chunks = []
    local_start = 0
    for within, chunk_sizes in _flat_rectangles(sizes, begin, end):
        shifted = tuple(map(int.__add__, offsets, within))
        chunks.append(Chunk(shifted, chunk_sizes, local_start, contiguous_strides(chunk_sizes)))
        local_start += math.prod(chunk_sizes)
    if begin == end and sizes:
        empty = (0, *sizes[1:])
        chunks.append(Chunk((global_shape[0], *offsets[1:]), empty, 0, contiguous_strides(empty)))
    return ShardChunks(global_shape, (end - begin,), tuple(chunks))


def _flat_rectangles(sizes: Shape, begin: int, end: int) -> Iterator[Rectangle]:
    """Yield a head within the first row, whole rows, and a tail within the last; head and tail are cut likewise."""
    if begin == end:
        return
    if not sizes:
        yield (), ()
        return
    row_numel = math.prod(sizes[1:])
    while begin < end:
        row, skipped = divmod(begin, row_numel)
        rows = 0 if skipped else (end - begin) // row_numel
        if rows:
            yield (row, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            begin += rows * row_numel
        else:
            kept = min(row_numel, skipped + end - begin)
            for offsets, inner_sizes in _flat_rectangles(sizes[1:], skipped, kept):
                yield (row, *offsets), (1, *inner_sizes)
            begin += kept - skipped


class ReadPart(NamedTuple):
    """A part of a destination chunk, and the offsets of the stored chunk from which it is read."""

    offsets: Shape
    sizes: Shape
    stored_at: Shape


def overlapping(parts: list[ReadPart]) -> tuple[ReadPart, ReadPart] | None:
    """Return two parts that have elements in common, or ``None``.

    Parts that a plane separates cannot overlap: ``n log n`` for rows, columns, grids and ragged parts. Only parts that
    no plane separates are compared pair by pair.
    """
    for dim in range(len(parts[0].offsets) if len(parts) > 1 else 0):
        groups: list[list[ReadPart]] = []
        end = -1
        for part in sorted(parts, key=lambda part: part.offsets[dim]):
            if part.offsets[dim] >= end:
                groups.append([])
            groups[-1].append(part)
            end = max(end, part.offsets[dim] + part.sizes[dim])
        if len(groups) > 1:
            return next(filter(None, map(overlapping, groups)), None)
    return next((pair for pair in itertools.combinations(parts, 2) if _overlap(*pair)), None)


def _overlap(first: ReadPart, second: ReadPart) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    )
