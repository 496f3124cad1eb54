"""The file ``.metadata`` of a checkpoint that these tools write, of torch's own classes.

::

    old Records ──▶ properties, planner's paths, storage's notes ─┐
    Rewrite ──▶ keys, chunks, places ────────────────────────────┴──▶ bytes of a pickled Metadata
"""

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..core.errors import CheckpointError
from ..stored.reading import StoredChunk, StoredObject
from ..stored.torch_private import storage_info
from ..stored.unpickle import PickledObject
from .rewrite_plan import Entry, NewItem, NewTensor, Rewrite

_MAX_PLAIN = 100_000  # of one entry
_VERSION = "1.0.0"  # of the format, as torch 2.6 to 2.13 write it
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def metadata_bytes(old: PickledObject, rewrite: Rewrite, checkpoint_id: str) -> bytes:
    """Serialize the metadata of a rewritten checkpoint.

    Args:
        old: the metadata of the checkpoint that is rewritten.
        rewrite: the plan.
        checkpoint_id: where the new one is.

    Raises:
        CheckpointError: torch has not the classes of which it consists, or Megatron-Core has kept more in them.
    """
    flattened = old.get("mcore_data")
    if isinstance(flattened, dict) and any(flattened.values()):
        raise CheckpointError(
            "its optimizer state is flattened in the way of Megatron-Core before 0.16; save it there with "
            "distrib_optim_sharding_type='fully_reshardable'"
        )
    old_entries = old.get("state_dict_metadata")
    properties = {t.key: _properties(t, old_entries[t.like]) for t in rewrite.tensors.values()}
    metadata = _metadata(rewrite, properties)
    metadata.planner_data = _planner_data(old.get("planner_data"), rewrite, metadata.state_dict_metadata)
    metadata.storage_meta = _storage_meta(old.get("storage_meta"), checkpoint_id)
    metadata.version = old.get("version")
    return pickle.dumps(metadata)


def first_metadata_bytes(rewrite: Rewrite, checkpoint_id: str) -> bytes:
    """Serialize the metadata of what was in no DCP checkpoint before."""
    metadata = _metadata(rewrite, {t.key: TensorProperties(dtype=t.dtype) for t in rewrite.tensors.values()})
    metadata.planner_data = dict(rewrite.exchange.paths)
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id)
    metadata.version = _VERSION
    return pickle.dumps(metadata)


def _metadata(rewrite: Rewrite, properties: Mapping[str, TensorProperties]) -> Metadata:
    placed = [(entry, item) for items in rewrite.files.values() for item in items for entry in item.entries]
    placed.sort(key=lambda each: (each[0].key, each[0].region or ()))
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in rewrite.objects}
    for tensor in rewrite.tensors.values():
        entries[tensor.key] = TensorStorageMetadata(properties[tensor.key], torch.Size(tensor.shape), [])
    storage_data = {}
    for entry, item in placed:
        storage_data[_index(entry, entries)] = _info(item)
    return Metadata(state_dict_metadata=entries, storage_data=storage_data)


def _index(entry: Entry, entries: Mapping[str, Any]) -> MetadataIndex:
    """Return an item's key in ``storage_data``, after adding its chunk to the tensor's."""
    if entry.region is None:
        return MetadataIndex(entry.key)
    chunks: list[ChunkStorageMetadata] = entries[entry.key].chunks
    chunks.append(ChunkStorageMetadata(torch.Size(entry.region.offsets), torch.Size(entry.region.sizes)))
    return MetadataIndex(entry.key, entry.region.offsets, len(chunks) - 1)


def _info(item: NewItem) -> Any:
    transforms = item.content.transforms if isinstance(item.content, StoredChunk | StoredObject) else ()
    return storage_info(item.file, item.offset_bytes, item.length_bytes, transforms)


def _properties(tensor: NewTensor, old: PickledObject) -> TensorProperties:
    properties = old.get("properties")
    state = properties.state
    if not isinstance(state, tuple):  # torch before 2.3
        names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
        state = tuple(properties.get(name) for name in names)
    _, layout, requires_grad, memory_format, pin_memory = state
    return TensorProperties(
        dtype=tensor.dtype,
        layout=_layout(layout),
        requires_grad=bool(requires_grad),
        memory_format=_memory_format(memory_format),
        pin_memory=bool(pin_memory),
    )


def _layout(record: object) -> torch.layout:
    arguments = record.arguments if isinstance(record, PickledObject) else ()
    name = str(arguments[0]).removeprefix("torch.") if arguments else ""
    found = vars(torch).get(name)
    return found if isinstance(found, torch.layout) else torch.strided


def _memory_format(record: object) -> torch.memory_format:
    # An enum: by its number, or, of Python up to 3.11.3, as getattr(class, name).
    if isinstance(record, PickledObject) and record.arguments:
        value = record.arguments[-1]
        if value in range(len(_MEMORY_FORMATS)):
            return _MEMORY_FORMATS[value]
        names = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
        if value in names:
            return _MEMORY_FORMATS[names.index(value)]
    return torch.contiguous_format


def _planner_data(old: object, rewrite: Rewrite, entries: Mapping[str, Any]) -> Any:
    """Return the planner's paths, with those of new keys and without those of dropped ones."""
    if not isinstance(old, dict):
        return old if _is_plain(old) else None
    new_paths = rewrite.exchange.paths
    gone = _gone(rewrite)
    kept = {key: path for key, path in old.items() if key not in gone and _is_plain(path)}
    return kept | {key: path for key, path in new_paths.items() if key in entries}


def _gone(rewrite: Rewrite) -> set[str]:
    old = {key for fusion in rewrite.exchange.fusions for key in (fusion.fused, *fusion.parts)}
    old |= set(rewrite.exchange.copies)
    return old - rewrite.tensors.keys() - set(rewrite.objects)


def _is_plain(value: object) -> bool:
    """Tell whether it is made of plain values, few enough that it cannot contain itself."""
    pending, seen = [value], 0
    while pending:
        each = pending.pop()
        seen += 1
        if seen > _MAX_PLAIN:
            return False
        if isinstance(each, dict):
            pending += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            pending += each
        elif not (each is None or isinstance(each, str | int | float | bool)):
            return False
    return True


def _storage_meta(old: object, checkpoint_id: str) -> StorageMeta | None:
    if not isinstance(old, PickledObject):
        return None
    modules, save_id = old.get("modules"), old.get("save_id")
    names = [module for module in modules if isinstance(module, str)] if isinstance(modules, list | tuple) else []
    return StorageMeta(
        checkpoint_id=checkpoint_id, save_id=save_id if isinstance(save_id, str) else None, modules=names
    )
