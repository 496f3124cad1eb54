"""Checks of what a load would get wrong without saying so, value by value: a function for each thing.

::

    requested value, metadata of its key ──▶ check_entry ──────────┐
                                                                   ├──▶ Problems ──▶ refusal: one message
    DCP's own plan for what is sound ──────▶ check_coverage ───────┘

Everything is taken from metadata and from DCP's plan. Neither a file nor an element of a tensor is looked at.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ..torch_compat.dtensor import is_dtensor, local_shard
from .chunks import chunks_of, is_placed_as_dcp_reads

_KEYS_SHOWN = 5


class Kind(Enum):
    """A finding: what is wrong, and what to do about it."""

    MISSING = (
        "requested, but not in the checkpoint",
        (
            "Is it of another model, of other options, or saved with another flatten_optimizer_state_dict? "
            "allow_missing=[patterns] leaves such keys as they are."
        ),
    )
    MISSING_STATE = (
        "keys of optimizer state that are requested, but not in the checkpoint",
        (
            "In this layout the metadata does not tell whether these parameters had any state when they were saved. If "
            "they had none, allow_missing=[patterns] leaves theirs as it is. flatten_optimizer_state_dict=True saves "
            "in a layout that tells."
        ),
    )
    EXTRA = (
        "in the checkpoint, but not requested",
        (
            "Request them too (get_optimizer_state_dict(..., for_load=True) requests state that does not exist yet), "
            "or leave them in the checkpoint with allow_extra=[patterns]."
        ),
    )
    VALUE = (
        "of another kind than in the checkpoint",
        "Put a value of the saved kind into the state dict: a tensor where a tensor was saved.",
    )
    SHAPE = (
        "of another shape than in the checkpoint",
        "Nothing is resized: build what you load into with the saved sizes.",
    )
    DTYPE = (
        "of another dtype than in the checkpoint, and would be cast",
        "Load into tensors of the saved dtype, or cast on purpose with allow_cast=[patterns].",
    )
    DESTINATION = (
        "that DCP cannot load into correctly",
        "Redistribute them, or give their local tensors chunks with fsdp_offload.checkpoint.with_chunks.",
    )
    HOLE = (
        "only partly in the checkpoint",
        "What is not there would keep its old values. The checkpoint is incomplete: use another one, or repair it.",
    )
    OVERLAP = (
        "stored twice in part",
        "Which of the two is loaded would depend on the order of reading. Use another checkpoint, or repair it.",
    )
    METADATA = (
        "described in the checkpoint's metadata in a way that is not understood",
        "Was it written by a newer PyTorch, or by another library?",
    )


class Problem(NamedTuple):
    """One thing that is wrong with one key."""

    kind: Kind
    key: str
    detail: str = ""


def refusal(problems: Iterable[Problem]) -> ValueError:
    """One error for all problems, those of a kind together."""
    by_kind: dict[Kind, list[str]] = {}
    for kind, key, detail in problems:
        by_kind.setdefault(kind, []).append(f"{key} ({detail})" if detail else key)
    lines = [
        f"- {len(texts)} {kind.value[0]}: {listed(texts)}. {kind.value[1]}"
        for kind, texts in sorted(by_kind.items(), key=lambda item: list(Kind).index(item[0]))
    ]
    return ValueError("\n".join(["this checkpoint is not loaded, and nothing has been changed:", *lines]))


def listed(texts: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    more = len(texts) - _KEYS_SHOWN
    return ", ".join(texts[:_KEYS_SHOWN]) + (f" and {more} more" if more > 0 else "")


# --- one value and its metadata --------------------------------------------------------------------------------------


def checked_metadata(metadata: object) -> Metadata:
    """``metadata``, if it has an entry for every key.

    Raises:
        ValueError: not the metadata of a checkpoint.
    """
    if isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, Mapping):
        return metadata
    raise ValueError(
        "expected torch.distributed.checkpoint.metadata.Metadata with an entry for every key, got "
        f"{type(metadata).__name__}; is this a checkpoint of torch.distributed.checkpoint?"
    )


def dtype_of(value: object) -> torch.dtype | None:
    """The dtype of a tensor, requested or stored; of what is in a DTensor, as that is what is copied into."""
    if isinstance(value, TensorStorageMetadata):
        return value.properties.dtype
    return local_shard(value).dtype if isinstance(value, Tensor) else None


def check_entry(key: str, value: object, entry: object, cast_allowed: Callable[[str], bool]) -> Iterator[Problem]:
    """Find what is wrong with loading the stored ``entry`` into ``value``, but for coverage."""
    if isinstance(entry, BytesStorageMetadata):
        if isinstance(value, Tensor):
            yield Problem(Kind.VALUE, key, "a tensor, where an object was saved")
        return
    if not isinstance(entry, TensorStorageMetadata) or not _is_well_formed(entry):
        yield Problem(Kind.METADATA, key, _described(entry))
        return
    if not isinstance(value, Tensor):
        yield Problem(Kind.VALUE, key, f"{type(value).__name__}, where a tensor was saved")
        return
    if value.size() != entry.size:
        yield Problem(Kind.SHAPE, key, f"{tuple(value.size())}, saved as {tuple(entry.size)}")
    dtype = dtype_of(value)
    if dtype != entry.properties.dtype and not cast_allowed(key):
        yield Problem(Kind.DTYPE, key, f"{dtype}, saved as {entry.properties.dtype}")
    unfit = why_unfit(value)
    if unfit is not None:
        yield Problem(Kind.DESTINATION, key, unfit)


def _is_well_formed(entry: TensorStorageMetadata) -> bool:
    ndim = len(entry.size)
    return all(len(chunk.offsets) == ndim == len(chunk.sizes) for chunk in entry.chunks)


def _described(entry: object) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"chunks of other than {len(entry.size)} dimensions"
    return type(entry).__name__


def why_unfit(value: Tensor) -> str | None:
    """Why DCP would take a DTensor for other elements than it has, or ``None``.

    It takes every local tensor that does not bring its own chunks for one rectangle, which starts where the placements
    say from left to right. What is held otherwise (interleaved rows, uneven parts from ``DTensor.from_local``, slices
    of Megatron-FSDP, mesh dimensions in another order) it would fill wrongly.
    """
    local = local_shard(value)
    if not is_dtensor(value) or hasattr(local, "__create_chunk_list__"):
        return None
    try:
        chunks = [chunk for chunk in chunks_of(value).chunks if chunk.numel]
    except (TypeError, ValueError) as error:
        return str(error)
    if local.numel() != sum(chunk.numel for chunk in chunks) or len(chunks) > 1:
        sizes = [chunk.sizes for chunk in chunks]
        return f"a local tensor of shape {tuple(local.shape)} for rectangles of {sizes}, not for one of that shape"
    if is_placed_as_dcp_reads(value):  # type: ignore[arg-type]  # it is a DTensor
        return None
    return f"it is {[chunk[:2] for chunk in chunks]}, and its placements, from left to right, say something else"


# --- coverage --------------------------------------------------------------------------------------------------------


class ReadPart(NamedTuple):
    """A part of one chunk of the destination, and the offsets of the stored chunk that it is read from."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored_at: tuple[int, ...]


def check_coverage(requested: Mapping[str, Any], items: Iterable[ReadItem]) -> Iterator[Problem]:
    """Elements of this rank that DCP's plan writes never or twice.

    Args:
        requested: the values that the plan is for, by flat key.
        items: the plan: one item for every stored chunk and destination chunk that meet.
    """
    regions: dict[str, dict[tuple[int, ...], list[ReadPart]]] = {}  # by key and offset of the destination's chunk
    for item in items:
        if item.type == LoadItemType.TENSOR and 0 not in item.lengths:
            stored_at = tuple(item.storage_index.offset or ())
            region = ReadPart(tuple(item.dest_offsets), tuple(item.lengths), stored_at)
            chunks = regions.setdefault(item.dest_index.fqn, {})
            chunks.setdefault(tuple(item.dest_index.offset or ()), []).append(region)
    for key, value in requested.items():
        if isinstance(value, Tensor):
            yield from _check_tensor(key, _local_numel(value), regions.get(key, {}))


def _check_tensor(
    key: str, local_numel: int, regions_by_chunk: Mapping[tuple[int, ...], list[ReadPart]]
) -> Iterator[Problem]:
    overlaps = [pair for regions in regions_by_chunk.values() if (pair := overlapping(regions)) is not None]
    for first, second in overlaps[:1]:
        yield Problem(Kind.OVERLAP, key, f"by the stored chunks at {first.stored_at} and {second.stored_at}")
    covered = sum(math.prod(region.sizes) for regions in regions_by_chunk.values() for region in regions)
    # As many as there are, and no two the same: all of them. With an overlap the sum says nothing.
    if covered != local_numel and not overlaps:
        yield Problem(Kind.HOLE, key, f"{covered} of the {local_numel} elements that this rank needs")


def _local_numel(value: Tensor) -> int:
    local = local_shard(value)
    local_shards = getattr(local, "local_shards", None)  # of a ShardedTensor, or of LocalShardsWrapper
    if local_shards is None:
        return local.numel()
    return sum(getattr(shard, "tensor", shard).numel() for shard in local_shards())


def overlapping(regions: list[ReadPart]) -> tuple[ReadPart, ReadPart] | None:
    """Two regions that have elements in common, or ``None``.

    Regions that a plane separates cannot overlap, so the list is divided along one dimension after the other until a
    part has one region: ``n log n`` for rows, columns, grids and ragged parts. Only what no plane divides is compared
    pair by pair.
    """
    undivided = [regions]
    while undivided:
        group = undivided.pop()
        if len(group) < 2:
            continue
        parts = _divided(group)
        if len(parts) > 1:
            undivided += parts
            continue
        for first, second in itertools.combinations(group, 2):
            if _overlap(first, second):
                return first, second
    return None


def _divided(regions: list[ReadPart]) -> list[list[ReadPart]]:
    for dim in range(len(regions[0].offsets)):
        parts: list[list[ReadPart]] = []
        end = -1
        for region in sorted(regions, key=lambda region: region.offsets[dim]):
            if region.offsets[dim] >= end:
                parts.append([])
            parts[-1].append(region)
            end = max(end, region.offsets[dim] + region.sizes[dim])
        if len(parts) > 1:
            return parts
    return [regions]


def _overlap(first: ReadPart, second: ReadPart) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    )
