"""Read a folder of safetensors, or one file, as a checkpoint like those of DCP.

::

    model.safetensors.index.json      ──▶ files ──headers──▶ tensors of the model, their keys with a prefix
    optimizer.safetensors.index.json  ──▶ files ──headers──▶ all other tensors        } if convert has written them:
    optimizer.json                    ──values──▶ objects, and paths                 } their keys are those of DCP

Without an index, all safetensors files of the folder are the model's. torch's ``HuggingFaceStorageWriter`` may have
written parts of tensors, one file per rank: headers then give the offsets of the parts, which become chunks.
"""

import base64
import json
import math
import os
import reprlib
import struct
import tempfile
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..core.text import MAX_DIMS, CheckpointError, human_bytes, is_count, natural_order, shortened
from .checkpoint import Checkpoint, Path, StoredChunk, StoredObject, StoredTensor
from .foreign import state_files
from .metadata import misnamed, open_dcp
from .rank_files import is_rank_files, open_rank_files
from .storage import Folder, files_without_metadata, is_file_of, open_folder, read_file

# One file -------------------------------------------------------------------------------------------------------------


SUFFIX = ".safetensors"
METADATA_KEY = "__metadata__"

MAX_HEADER_BYTES = 100_000_000  # the safetensors package's limit
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 8  # of the data: the header is padded with spaces

_BITS = (8, 16, 32, 64)
_FLOAT8 = {"E4M3": "e4m3fn", "E4M3FNUZ": "e4m3fnuz", "E5M2": "e5m2", "E5M2FNUZ": "e5m2fnuz", "E8M0": "e8m0fnu"}
DTYPES: dict[str, torch.dtype] = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"{kind[0].upper()}{bits}": getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in _BITS},
    **{f"F8_{name}": getattr(torch, f"float8_{kind}") for name, kind in _FLOAT8.items()},
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(folder: Folder, file: str) -> tuple[dict[str, StoredChunk], Mapping[str, str]]:
    """Read a file's header with the safetensors package; return chunks by key, ordered by offset, and its metadata."""
    from safetensors import safe_open  # in the extra [tools], which splits and merges in memory do not need

    file_bytes = folder.size_bytes(file)
    with folder.open(file) as stream:
        start = stream.read(_LENGTH.size)
        header_bytes = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        content = stream.read(min(header_bytes, MAX_HEADER_BYTES))
    try:
        with tempfile.NamedTemporaryFile(suffix=SUFFIX) as stream:  # with the same header and length
            stream.write(start + content)
            stream.truncate(file_bytes)
            stream.flush()
            with safe_open(stream.name, framework="pt"):
                pass
        found = json.loads(content)
        metadata = found.pop(METADATA_KEY, None) or {}
        chunks = {}
        for key, entry in found.items():
            dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
            if dtype is None or len(shape) > MAX_DIMS:
                raise ValueError(
                    f"{key} has the dtype {entry['dtype']} and {len(shape)} dimensions, which these tools do not know"
                )
            begin, nbytes = _LENGTH.size + header_bytes + entry["data_offsets"][0], math.prod(shape) * dtype.itemsize
            chunks[key] = StoredChunk((0,) * len(shape), tuple(shape), file, begin, nbytes, dtype)
        return dict(sorted(chunks.items(), key=lambda each: each[1].offset_bytes)), metadata
    except Exception as error:  # the package's errors, or MemoryError and the like
        raise CheckpointError(
            f"{folder.path}/{file} is not a whole safetensors file ({shortened(str(error))}); fetch it again, or use "
            "another one"
        ) from error


def with_header(tensors: Iterable[tuple[str, StoredTensor]]) -> tuple[bytes, list[str]]:
    """Lay out tensors in a file, those with large elements first, so that all elements are aligned.

    Return the bytes before the data, and the keys in the order of the data.
    """
    entries: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    at = 0
    for key, tensor in sorted(tensors, key=lambda each: -each[1].dtype.itemsize):
        end = at + tensor.nbytes
        entries[key] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of a file would have {human_bytes(len(text))}, and safetensors allow "
            f"{human_bytes(MAX_HEADER_BYTES)}; choose a smaller --shard-size"
        )
    return _LENGTH.pack(len(text)) + text, [*entries][1:]


# A folder of them -----------------------------------------------------------------------------------------------------


INDEX_SUFFIX = f"{SUFFIX}.index.json"
MODEL, OPTIMIZER = "model", "optimizer"
OBJECTS_FILE = f"{OPTIMIZER}.json"
OBJECTS_FORMAT = "checkpoint_tools 2"
_MAX_JSON_BYTES = 4 << 30

_SHARDING = "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint, in the headers
_NOTE_ON_PARTS = (
    "torch's files of parts of tensors say neither how large these are nor how many files there were: if the last ones "
    "are missing, this cannot be detected"
)


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a safetensors file, or a folder that has such files and no metadata of DCP."""
    if isinstance(path, str | os.PathLike) and is_file_of(os.fspath(path), SUFFIX):  # type: ignore[redundant-expr]
        return True
    return any(file.endswith((SUFFIX, INDEX_SUFFIX)) for file in files_without_metadata(path))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format: files of ranks, safetensors (keys without a default prefix), or DCP."""
    if is_rank_files(path):
        return open_rank_files(path)
    return open_safetensors(path, default_prefix="") if is_safetensors(path) else open_dcp(path)


def open_safetensors(
    path: str | os.PathLike[str], key_prefix: str | None = None, default_prefix: str = f"{MODEL}."
) -> Checkpoint:
    """Read all headers of a folder or of one file.

    Prefix of the model's keys: ``key_prefix`` if given; else the one that convert has removed, if it is recorded; else
    none if torch has written parts of tensors (it keeps DCP's keys); else ``default_prefix``.
    """
    found = _Reading(os.fspath(path))
    prefixes = key_prefix, found.recorded_prefix, "" if found.is_sharded else default_prefix
    prefix = next(each for each in prefixes if each is not None)
    keys = {(is_model, name): prefix * is_model + name for is_model, name in found.chunks}
    tensors: dict[str, StoredTensor] = {}
    for place, key in sorted(keys.items(), key=lambda each: natural_order(each[1])):
        if key in tensors or key in found.objects:
            raise CheckpointError(f"{found.path} has two values named {key}; choose another --key-prefix")
        tensors[key] = found.tensor(key, found.chunks[place])
    model_keys = frozenset(key for (is_model, _), key in keys.items() if is_model)
    paths = {
        **{key: (key,) for key in (*tensors, *found.objects)},
        **{key: path_of(key, prefix) for key in model_keys},
        **{key: path for key, path in found.paths.items() if key in tensors or key in found.objects},
    }
    return Checkpoint(
        *(found.path, found.folder, tensors, found.objects, paths, ()),
        own_files=None if found.single else tuple(found.json_files),
        key_prefix=prefix,
        model_keys=model_keys,
        notes=(*([_NOTE_ON_PARTS] if found.is_sharded else ()), *found.notes),
    )


class _Reading:
    """Reads a folder's indices, headers and objects."""

    def __init__(self, path: str) -> None:
        name = path.rpartition("/")[2]
        parent = path.removesuffix(name)
        self.path = path
        self.single = name if is_file_of(path, SUFFIX) else None
        self.folder: Folder = open_folder((parent.rstrip("/") or parent or ".") if self.single else path)
        self.json_files: list[str] = []
        self.chunks: dict[tuple[bool, str], list[StoredChunk]] = {}  # by (is the model's, name)
        self.objects: dict[str, StoredObject] = {}
        self.paths: dict[str, Path] = {}
        self.is_sharded = False
        self.notes: list[str] = []
        self.recorded_prefix: str | None = None
        model, others = ({self.single: {}}, {}) if self.single else self._listed()
        for is_model, files in ((True, model), (False, others)):
            for file, keys in files.items():
                self._add(file, keys, is_model=is_model)
        if OBJECTS_FILE in self.json_files:
            stored, where = self._read_json(OBJECTS_FILE), f"{self.folder.path}/{OBJECTS_FILE}"
            if not isinstance(stored, dict) or stored.get("format") != OBJECTS_FORMAT:
                raise CheckpointError(
                    f"{where} is not what these tools write (format {OBJECTS_FORMAT!r}); move it away to convert the "
                    "tensors alone"
                )
            try:
                for key in sorted(stored["stored"], key=natural_order):
                    content = base64.b64decode(stored["stored"][key], validate=True)
                    self.objects[key] = StoredObject(OBJECTS_FILE, 0, 0, content)
                for key, path in stored["paths"].items():
                    if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
                        raise TypeError(f"a path is {reprlib.repr(path)}")
                    self.paths[key] = tuple(path)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise CheckpointError(
                    f"{where} is damaged ({type(error).__name__}: {error}); fetch it again"
                ) from error
            self._record_prefix(stored)

    def _listed(self) -> tuple[dict[str, Collection[str]], dict[str, Collection[str]]]:
        """Return the model's files and the other files, each with the keys that an index says are in it."""
        there = self.folder.files()
        self.notes += (
            f"{name} has the optimizer's state, which is not in the safetensors" for name in state_files(there)
        )
        if OBJECTS_FILE in there:
            self.json_files.append(OBJECTS_FILE)
        own, index = f"{OPTIMIZER}{INDEX_SUFFIX}", f"{MODEL}{INDEX_SUFFIX}"
        others = self._indexed(own) if own in there else {}
        indices = [name for name in there if name.endswith(INDEX_SUFFIX) and name != own]
        if index not in there and len(indices) > 1:
            raise CheckpointError(f"{self.path} has several indices ({', '.join(indices)}); give one file at a time")
        if indices:
            return self._indexed(index if index in there else indices[0]), others
        model: dict[str, Collection[str]] = {f: () for f in there if f.endswith(SUFFIX) and f not in others}
        if not model and not others:
            raise CheckpointError(f"{self.path} has no safetensors; give the folder or the file that has them")
        return model, others

    def _indexed(self, index: str) -> dict[str, Collection[str]]:
        """Return the files that an index names, with the keys in each."""
        self.json_files.append(index)
        found, where = self._read_json(index), f"{self.folder.path}/{index}"
        weight_map = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{where} has no weight_map of keys and files; fetch it again")
        keys: dict[str, list[str]] = {}
        for key, file in weight_map.items():
            keys.setdefault(file, []).append(key)
        if wrong := list(filter(misnamed, keys)):
            raise CheckpointError(f"{where} names {min(wrong)!r}, which is outside of the folder")
        self._record_prefix(found.get("metadata"))
        return {file: keys[file] for file in sorted(keys, key=natural_order)}

    def _record_prefix(self, found: Any) -> None:
        if isinstance(found, dict) and isinstance(found.get("key_prefix"), str):  # convert has removed it
            self.recorded_prefix = found["key_prefix"]

    def _add(self, file: str, keys: Iterable[str], *, is_model: bool) -> None:
        chunks, metadata = read_header(self.folder, file)
        if lost := set(keys) - chunks.keys():
            raise CheckpointError(
                f"{self.folder.path}/{file} does not have {min(lost)}, which an index says is there; fetch both"
            )
        starts: dict[str, tuple[int, ...]] | None = None  # offsets of the file's parts in the whole tensors
        if _SHARDING in metadata:
            self.is_sharded = True
            try:
                found = json.loads(metadata[_SHARDING])
                starts = {key: tuple(found[key]["saved_offsets"]) for key in chunks}
                if any(len(at) != len(chunks[key].sizes) or not all(map(is_count, at)) for key, at in starts.items()):
                    raise ValueError("offsets of other dimensions")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckpointError(
                    f"{self.folder.path}/{file} has {_SHARDING} that do not fit ({type(error).__name__}: {error}); "
                    "fetch it again, or use another one"
                ) from error
        for key, chunk in chunks.items():
            known = self.chunks.setdefault((is_model, key), [])
            if known and (starts is None or known[0].file == file):
                raise CheckpointError(
                    f"{key} is in {known[0].file} and in {file} of {self.path}; give one file at a "
                    "time, or remove what does not belong there"
                )
            known.append(chunk if starts is None else chunk._replace(offsets=starts[key]))

    def tensor(self, key: str, chunks: list[StoredChunk]) -> StoredTensor:
        """Return the tensor that consists of ``chunks``."""
        dtype = chunks[0].bare_dtype
        if dtype is None or len({(chunk.bare_dtype, len(chunk.sizes)) for chunk in chunks}) > 1:
            raise CheckpointError(f"the parts of {key} in {self.path} are of different dtypes or dimensions")
        # Count empty chunks too, when looking for the tensor's end: torch puts them there.
        ends = [tuple(map(int.__add__, chunk.offsets, chunk.sizes)) for chunk in chunks]
        kept = [chunk for chunk in chunks if chunk.numel] or chunks[:1]
        return StoredTensor(key, tuple(map(max, zip(*ends, strict=True))), dtype, tuple(sorted(kept)))

    def _read_json(self, file: str) -> Any:
        try:
            return json.loads(read_file(self.folder, file, _MAX_JSON_BYTES))
        except CheckpointError:
            raise
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.folder.path}/{file} is no JSON ({error}); fetch it again") from error


def path_of(key: str, key_prefix: str) -> Path:
    """Return the path of a model's tensor in a nested state dict, unless another path is recorded."""
    first = key_prefix.partition(".")[0]
    return (first, key.removeprefix(key_prefix)) if first and key.startswith(f"{first}.") else (key,)
