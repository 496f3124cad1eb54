"""Read ``.metadata`` of ``torch.distributed.checkpoint``, without running code that it names, and the manifest.

::

    .metadata ──unpickle──▶ records ──checked──▶ Checkpoint, and problems: contradictions between the records

    .checksums    {"format": ..., "sha256": of the next line}
                  {"metadata": {"nbytes": ..., "sha256": ...},
                   "files": {"__0_0.distcp": [[offset, length, CRC-32 of all but large contents], ...]}}

The zip directory in each item has the CRC-32 of all contents, which ``torch.save`` computed in memory. So the manifest
covers every byte of the checkpoint, and large contents need not be read to write it.
"""

import functools
import gc
import hashlib
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.text import MAX_DIMS, MAX_INT64, CheckpointError, is_count, natural_order, shortened
from .checkpoint import Checkpoint, CheckpointProblem, Item, Path, StoredChunk, StoredObject, StoredTensor
from .foreign import described
from .storage import Folder, open_folder, read_file
from .unpickle import ForbiddenNameError, PickledObject, allowed, unpickle

METADATA_FILE = ".metadata"
MANIFEST_FILE = ".checksums"
_FORMAT = "fsdp_offload checksums 2"
_MAX_BYTES = 4 << 30

# The manifest --------------------------------------------------------------------------------------------------------


def manifest_bytes(metadata: bytes, files: Mapping[str, Sequence[Item]]) -> bytes:
    """Return the content of ``.checksums``; ``metadata``: the content of ``.metadata``."""
    found = {"nbytes": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    body = json.dumps({"metadata": found, "files": {file: sorted(items) for file, items in sorted(files.items())}})
    head = json.dumps({"format": _FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest()})
    return f"{head}\n{body}\n".encode()


def _read_manifest(folder: Folder) -> tuple[Mapping[str, tuple[Item, ...]] | None, str | None]:
    """Return the manifest, None without one, and a problem, if it is damaged or does not fit ``.metadata``."""
    try:
        head, _, body = read_file(folder, MANIFEST_FILE, _MAX_BYTES).partition(b"\n")
    except FileNotFoundError:
        return None, None
    except CheckpointError as error:
        return None, str(error)
    try:
        expected = {"format": _FORMAT, "sha256": hashlib.sha256(body.removesuffix(b"\n")).hexdigest()}
        if json.loads(head) != expected or not body.endswith(b"\n"):
            raise ValueError
        found = json.loads(body)
        files = {
            str(file): tuple((int(at), int(nbytes), int(crc)) for at, nbytes, crc in items)
            for file, items in found["files"].items()
        }
        sealed = int(found["metadata"]["nbytes"]), str(found["metadata"]["sha256"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None, f"{MANIFEST_FILE} is damaged, or of a newer version; remove it to go without"
    content = read_content(folder)
    if (len(content), hashlib.sha256(content).hexdigest()) == sealed:
        return files, None
    return files, (
        f"it is not the one that {MANIFEST_FILE} was written for: it is damaged, or the checkpoint was saved "
        f"again since it was sealed (then remove {MANIFEST_FILE}, and seal it again)"
    )


# The metadata --------------------------------------------------------------------------------------------------------

_FLATTENED = (
    "its optimizer state is flattened in the way of Megatron-Core before 0.16; save it there with "
    "distrib_optim_sharding_type='fully_reshardable'"
)
_MAX_NAME = 4096
_MAX_DEPTH = 256  # of a nested state dict


def open_dcp(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the metadata of the checkpoint in a local folder or at an fsspec URL."""
    folder, was_enabled = open_folder(path), gc.isenabled()
    gc.disable()  # a collection would visit millions of new objects in vain: all are in use
    try:
        checkpoint = _Reading(folder.path, _unpickled(folder)).checkpoint(folder)
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _damage(folder, f"{type(error).__name__}: {shortened(str(error))}") from error
    finally:
        if was_enabled:
            gc.enable()
    manifest, wrong = _read_manifest(folder)
    problems = [] if wrong is None else [CheckpointProblem(METADATA_FILE, wrong)]
    return replace(checkpoint, manifest=manifest, problems=(*checkpoint.problems, *problems))


def read_content(folder: Folder) -> bytes:
    """Read the metadata file's bytes."""
    try:
        return read_file(folder, METADATA_FILE, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        try:
            has_data = any(name.endswith(".distcp") for name in folder.files())
            text = (
                f"{folder.path} has no {METADATA_FILE}. DCP writes it last: this is no checkpoint, or its save did not "
            )
            text += "end, or it was saved with use_collectives=False, and each rank has metadata of its own"
        except OSError:
            has_data, text = False, f"{folder.path} is not a folder; give the folder that contains {METADATA_FILE}"
        raise CheckpointError((None if has_data else described(folder)) or text) from error


def _unpickled(folder: Folder) -> dict[str, Any]:
    content = read_content(folder)
    try:
        metadata = unpickle(content, allowed("metadata"))
    except ForbiddenNameError as error:
        raise CheckpointError(
            f"{folder.path}/{METADATA_FILE} asks for {error}, which the metadata of a checkpoint do not need; it was "
            "not run. Do not load this checkpoint with torch unless you trust who wrote it"
        ) from error
    except Exception as error:  # bytes that are no pickle can raise anything
        raise _damage(folder, f"{type(error).__name__}: {shortened(str(error))}") from error
    found = _name_of(metadata)
    if found not in ("Metadata", "MCoreMetadata"):
        raise _damage(folder, f"it has a {found} where Metadata are expected")
    return _attributes(metadata, found)


def _damage(folder: Folder, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.path}/{METADATA_FILE} cannot be read as the metadata of a checkpoint ({what}). It is damaged, cut "
        "short, or not from torch.distributed.checkpoint; use another checkpoint, or fetch this file again"
    )


_Where = tuple[str, tuple[int, ...] | None]
"""Key of an item, and its offsets in the tensor; None for an object."""

_Place = tuple[str, int, int]
"""File, and offset and length in bytes."""


class _Reading:
    """Turns the records of ``.metadata`` into a :class:`Checkpoint`, and collects contradictions as problems."""

    def __init__(self, path: str, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.problems: list[CheckpointProblem] = []
        self.places: dict[_Where, _Place] = {}
        self.used: set[_Where] = set()

    def checkpoint(self, folder: Folder) -> Checkpoint:
        version = self.metadata.get("version")  # torch before 2.6 wrote none
        if version is not None and not (isinstance(version, str) and version.partition(".")[0] == "1"):
            told = shortened(version, 20) if isinstance(version, str) else "an unknown version"
            raise CheckpointError(
                f"{folder.path} has version {told} of the checkpoint format, and these tools know 1.x; use newer "
                "tools, or load and save it again with the torch that wrote it"
            )
        storage, entries = self.metadata.get("storage_data"), self.metadata.get("state_dict_metadata")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise TypeError("it does not say which keys there are, or in which files")
        for index, info in storage.items():
            self._place_item(_attributes(index, "MetadataIndex"), _attributes(info, "_StorageInfo"))
        tensors, objects = {}, {}
        for key in sorted(map(_text, entries), key=natural_order):
            name = _name_of(entries[key])
            if name == "TensorStorageMetadata":
                tensors[key] = self._tensor(key, _attributes(entries[key], name))
            elif name != "BytesStorageMetadata":
                raise TypeError(f"{key} is a {name}")
            elif (place := self._place(key, None)) is not None:
                objects[key] = StoredObject(*place)
        for key, offsets in self.places.keys() - self.used:
            what = "is stored" if key not in entries else f"has data at {offsets}"
            self._note(key, f"{what}, but the metadata do not say what they are")
        self.problems.sort()
        paths = _planner_paths(self.metadata.get("planner_data"), set(entries))
        for key, path in paths.items():  # a damaged name shows: key and path are stored separately
            if (flat := ".".join(map(str, path))) != key:
                what = f"was saved as {shortened(flat)}, by its path in the state dict"
                self._note(key, f"{what}; one of the two names is damaged")
        flattened = self.metadata.get("mcore_data")
        refusal = _FLATTENED if isinstance(flattened, dict) and any(flattened.values()) else ""
        own, problems = (METADATA_FILE, MANIFEST_FILE), tuple(self.problems)
        return Checkpoint(folder.path, folder, tensors, objects, paths, problems, own, version, refusal=refusal)

    def _note(self, key: str, text: str) -> None:
        self.problems.append(CheckpointProblem(key, text))

    def _place_item(self, index: dict[str, Any], info: dict[str, Any]) -> None:
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{self.path} was written through an extension of DCP (such as stream.zstd), which these tools do not "
                "undo; load it with DCP, and save it without"
            )
        offset, file = index.get("offset"), _text(info.get("relative_path"))
        place = file, _count(info.get("offset")), _count(info.get("length"))
        where = _text(index.get("fqn")), None if offset is None else _counts(offset)
        if wrong := misnamed(file):
            self.used.add(where)  # report this problem only
            self._note(where[0], f"its data would be in {shortened(file)!r}, {wrong}")
        elif where in self.places:
            self._note(where[0], f"its data at {where[1]} are in two places")
        else:
            self.places[where] = place

    def _tensor(self, key: str, entry: dict[str, Any]) -> StoredTensor:
        shape, chunks, stored = _counts(entry.get("size")), [], entry.get("chunks")
        if math.prod(shape) > MAX_INT64:
            raise ValueError(f"{shortened(key)} would have more elements than can be counted")
        properties = _state(entry.get("properties"), "TensorProperties")  # a dict in torch before 2.3
        dtype = properties.get("dtype") if isinstance(properties, dict) else (properties or (None,))[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a dtype is a {type(dtype).__name__}")
        if not isinstance(stored, list | tuple):
            raise TypeError("a tensor has no list of chunks")
        for found in stored:
            chunk = _attributes(found, "ChunkStorageMetadata")
            offsets, sizes = _counts(chunk.get("offsets")), _counts(chunk.get("sizes"))
            if not len(offsets) == len(sizes) == len(shape):
                self._note(key, f"a chunk of {len(sizes)} dimensions in a tensor of {len(shape)}")
            elif (place := self._place(key, offsets)) is not None:
                chunks.append(StoredChunk(offsets, sizes, *place))
        return StoredTensor(key, shape, dtype, tuple(sorted(chunks)))

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> _Place | None:
        place = self.places.get((key, offsets))
        if place is None and (key, offsets) not in self.used:
            at = "" if offsets is None else f" for its chunk at {offsets}"
            self._note(key, f"the metadata do not say where the data are{at}")
        self.used.add((key, offsets))
        return place


# Values from a file: check that a value is small before printing or unpacking it.


def _name_of(value: object) -> str:
    return value.name if isinstance(value, PickledObject) else type(value).__name__


def _state(value: object, name: str) -> Any:
    """Return the state of an unpickled object of class ``name``."""
    if not isinstance(value, PickledObject) or value.name != name:
        raise TypeError(f"a {_name_of(value)} where a {name} is expected")
    return value.state


def _attributes(value: object, name: str) -> dict[str, Any]:
    state = _state(value, name) or {}
    if not isinstance(state, dict):
        raise TypeError(f"a {name} has no attributes")
    return state


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text is expected")
    return value


def _count(value: object) -> int:
    if not is_count(value):
        raise TypeError(f"a size or an offset is {reprlib.repr(value)}")
    return value


def _counts(values: object) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or len(values) > MAX_DIMS:
        raise TypeError(f"a {type(values).__name__} where a few values are expected")
    for value in values:  # inlined check: there are millions
        if type(value) is not int or not 0 <= value <= MAX_INT64:
            _count(value)
    return tuple(values)


@functools.lru_cache
def misnamed(file: str) -> str:
    """Say what is wrong with a file's name; return an empty text if nothing is."""
    parts = file.replace("\\", "/").split("/")
    if not file or ".." in parts or parts[0] == "" or ":" in parts[0]:
        return "outside of the checkpoint"
    is_name = "\0" not in file and len(file) < _MAX_NAME and not any("\ud800" <= letter <= "\udfff" for letter in file)
    return "" if is_name else "which no file is named"


def _planner_paths(planner_data: object, keys: set[str]) -> dict[str, Path]:
    # DefaultSavePlanner stores {flat key: path}; other planners may store anything.
    if not isinstance(planner_data, dict):
        return {}
    if any(type(key) is not str for key in planner_data) and any(key in keys for key in planner_data):
        raise TypeError("a path in the state dict belongs to no key")
    return {
        key: path
        for key, path in planner_data.items()
        if key in keys
        and isinstance(path, tuple)
        and len(path) <= _MAX_DEPTH
        and all(type(part) is str or (type(part) is int and abs(part) <= MAX_INT64) for part in path)
    }
