"""A folder of safetensors, or one file, as the same nouns that a checkpoint of DCP has.

::

    model.safetensors.index.json      ──▶ files ──headers──▶ tensors of the model, their keys with a prefix
    optimizer.safetensors.index.json  ──▶ files ──headers──▶ all other tensors        } if convert has written them:
    optimizer.json                    ──values──▶ objects, paths of all              } their keys are those of DCP

Without an index, all safetensors files of the folder are the model's. Where torch's ``HuggingFaceStorageWriter`` has
left the parts of tensors as its ranks had them, each header says where they belong, and they are chunks here.
"""

import base64
import json
import math
import os
import reprlib
import struct
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from ..core.text import MAX_DIMS, CheckpointError, human_bytes, is_count, natural_order, shortened
from .checkpoint import Checkpoint, Path, StoredChunk, StoredObject, StoredTensor
from .metadata import misnamed, open_dcp
from .storage import Folder, open_folder

# One file -------------------------------------------------------------------------------------------------------------


SUFFIX = ".safetensors"
METADATA_KEY = "__metadata__"

MAX_HEADER_BYTES = 100_000_000  # of the safetensors package
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 8  # of the data in the file, padded with spaces

DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{
        f"{kind[0].upper()}{bits}": getattr(torch, f"{kind}{bits}")
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(folder: Folder, file: str) -> tuple[dict[str, StoredChunk], Mapping[str, str]]:
    """Read a file's header, which the safetensors package checks: tensors in the order of their bytes, and texts."""
    try:
        file_bytes = folder.size_bytes(file)
        with folder.open(file) as stream:
            start = stream.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            content = stream.read(min(header_bytes, MAX_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{folder.path}/{file} cannot be read: {error}") from error
    try:
        with tempfile.NamedTemporaryFile(suffix=SUFFIX) as stream:  # a file of that length that begins so
            stream.write(start + content)
            stream.truncate(file_bytes)
            stream.flush()
            with safe_open(stream.name, framework="pt"):
                pass
        found = json.loads(content)
        metadata = found.pop(METADATA_KEY, None) or {}
        chunks = {key: _chunk(key, entry, file, _LENGTH.size + header_bytes) for key, entry in found.items()}
        return dict(sorted(chunks.items(), key=lambda each: each[1].offset_bytes)), metadata
    except Exception as error:  # the package has errors of its own, and what it takes may be too much for others
        raise CheckpointError(
            f"{folder.path}/{file} is not a whole safetensors file ({shortened(str(error))}); fetch it again, or use "
            "another one"
        ) from error


def _chunk(key: str, entry: Any, file: str, data_at: int) -> StoredChunk:
    dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
    if dtype is None or len(shape) > MAX_DIMS:
        raise ValueError(
            f"{key} has the dtype {entry['dtype']} and {len(shape)} dimensions, which these tools do not know"
        )
    begin, nbytes = data_at + entry["data_offsets"][0], math.prod(shape) * dtype.itemsize
    return StoredChunk((0,) * len(shape), tuple(shape), file, begin, nbytes, dtype)


def with_header(tensors: Iterable[tuple[str, StoredTensor]]) -> tuple[bytes, list[str]]:
    """Place tensors in a file, large elements first, so that all are aligned.

    Returns all that comes before the data, and the keys in the order of the data.
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

_SHARDING = "DCP_SHARDING_INFO"  # of torch.distributed.checkpoint, in the headers
_NOTE_ON_PARTS = (
    "torch's files of parts of tensors say neither how large these are nor how many files there were: if the last ones "
    "are missing, nobody can tell"
)


class Folders(NamedTuple):
    """Safetensors of a model and of its optimizer, opened as a checkpoint.

    Keys of the model's tensors begin with a prefix, which the files do not have. ``own_files`` are without data.
    """

    checkpoint: Checkpoint
    model_keys: frozenset[str]
    key_prefix: str
    own_files: tuple[str, ...]


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Tell whether there are safetensors, and no DCP checkpoint."""
    if os.fspath(path).endswith(SUFFIX):
        return True
    try:
        files = open_folder(path).files()
    except OSError:
        return False
    return ".metadata" not in files and any(file.endswith((SUFFIX, INDEX_SUFFIX)) for file in files)


def open_safetensors(
    path: str | os.PathLike[str], key_prefix: str | None = None, default_prefix: str = f"{MODEL}."
) -> Folders:
    """Read all headers of a folder or of one file.

    The model's keys get the prefix. Without it, they get what convert has taken away; nothing where torch has written
    parts of tensors, under its own keys; else the default.
    """
    return _Opening(os.fspath(path)).opened(key_prefix, default_prefix)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the metadata of DCP, or the headers of safetensors (under their own keys), in a folder or at a URL."""
    return open_safetensors(path, default_prefix="").checkpoint if is_safetensors(path) else open_dcp(path)


class _Opening:
    def __init__(self, path: str) -> None:
        name = path.rpartition("/")[2]
        parent = path.removesuffix(name)
        self._single = name if name.endswith(SUFFIX) else None
        self._folder: Folder = open_folder((parent.rstrip("/") or parent or ".") if self._single else path)
        self._path = path
        self._json_files: list[str] = []
        self._headers: dict[str, tuple[dict[str, StoredChunk], Mapping[str, str]]] = {}
        self._places: dict[tuple[bool, str], list[StoredChunk]] = {}  # by whether it is the model's, and its name
        self._is_sharded = False
        self._recorded_prefix: str | None = None

    def opened(self, key_prefix: str | None, default_prefix: str) -> Folders:
        model_files, other_files = ([self._single], []) if self._single else self._listed()
        for is_model, file in (*((True, file) for file in model_files), *((False, file) for file in other_files)):
            self._add(file, is_model=is_model)
        objects, paths = self._objects() if OBJECTS_FILE in self._json_files else ({}, {})
        prefixes = key_prefix, self._recorded_prefix, "" if self._is_sharded else default_prefix
        key_prefix = next(prefix for prefix in prefixes if prefix is not None)
        renamed = {(is_model, name): key_prefix * is_model + name for is_model, name in self._places}
        tensors = {}
        for place, key in sorted(renamed.items(), key=lambda each: natural_order(each[1])):
            if key in tensors or key in objects:
                raise CheckpointError(f"{self._path} has two values named {key}; choose another --key-prefix")
            tensors[key] = self._tensor(place[1], key, self._places[place])
        model_keys = frozenset(key for (is_model, _), key in renamed.items() if is_model)
        paths = {
            **{key: (key,) for key in (*tensors, *objects)},
            **{key: path_of(key, key_prefix) for key in model_keys},
            **{key: path for key, path in paths.items() if key in tensors or key in objects},
        }
        notes = (_NOTE_ON_PARTS,) if self._is_sharded else ()
        checkpoint = Checkpoint(self._path, self._folder, tensors, objects, paths, (), None, notes)
        return Folders(checkpoint, model_keys, key_prefix, tuple(self._json_files))

    def _listed(self) -> tuple[list[str], list[str]]:
        try:
            there = self._folder.files()
        except OSError as error:
            raise CheckpointError(f"{self._path} is not a folder of safetensors: {error}") from error
        if OBJECTS_FILE in there:
            self._json_files.append(OBJECTS_FILE)
        own, index = f"{OPTIMIZER}{INDEX_SUFFIX}", f"{MODEL}{INDEX_SUFFIX}"
        others = self._indexed(own, there) or []
        indices = [name for name in there if name.endswith(INDEX_SUFFIX) and name != own]
        if index not in there and len(indices) > 1:
            raise CheckpointError(f"{self._path} has several indices ({', '.join(indices)}); give one file at a time")
        model = self._indexed(index if index in there or not indices else indices[0], there)
        if model is None:
            model = [file for file in there if file.endswith(SUFFIX) and file not in others]
        if not model and not others:
            raise CheckpointError(f"{self._path} has no safetensors; give the folder or the file that has them")
        return model, others

    def _indexed(self, index: str, there: Iterable[str]) -> list[str] | None:
        """List the files of an index, if there is one."""
        if index not in there:
            return None
        self._json_files.append(index)
        found, where = self._read_json(index), f"{self._folder.path}/{index}"
        weight_map = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{where} has no weight_map of keys and files; fetch it again")
        keys: dict[str, set[str]] = {}
        for key, file in weight_map.items():
            keys.setdefault(file, set()).add(key)
        files = sorted(keys, key=natural_order)
        if wrong := list(filter(misnamed, files)):
            raise CheckpointError(f"{where} names {wrong[0]!r}, which is outside of the folder")
        for file in files:
            lost = keys[file] - self._header(file)[0].keys()
            if lost:
                raise CheckpointError(
                    f"{self._folder.path}/{file} does not have {min(lost)}, which {index} says is there; fetch both"
                )
        self._record_prefix(found.get("metadata"))
        return files

    def _record_prefix(self, found: Any) -> None:
        if isinstance(found, dict) and isinstance(found.get("key_prefix"), str):  # what convert has taken away
            self._recorded_prefix = found["key_prefix"]

    def _header(self, file: str) -> tuple[dict[str, StoredChunk], Mapping[str, str]]:
        if file not in self._headers:
            self._headers[file] = read_header(self._folder, file)
        return self._headers[file]

    def _add(self, file: str, *, is_model: bool) -> None:
        chunks, metadata = self._header(file)
        starts = self._starts(file, chunks, metadata.get(_SHARDING))
        for key, chunk in chunks.items():
            known = self._places.setdefault((is_model, key), [])
            if known and (starts is None or known[0].file == file):
                raise CheckpointError(
                    f"{key} is in {known[0].file} and in {file} of {self._path}; give one file at a "
                    "time, or remove what does not belong there"
                )
            known.append(chunk if starts is None else chunk._replace(offsets=starts[key]))

    def _starts(
        self, file: str, chunks: Mapping[str, StoredChunk], text: str | None
    ) -> dict[str, tuple[int, ...]] | None:
        """Locate a file's tensors in the whole ones, if it holds parts of them."""
        if text is None:
            return None
        self._is_sharded = True
        try:
            found = json.loads(text)
            starts = {key: tuple(found[key]["saved_offsets"]) for key in chunks}
            if all(len(at) == len(chunks[key].sizes) and all(map(is_count, at)) for key, at in starts.items()):
                return starts
            what = "offsets of other dimensions"
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{self._folder.path}/{file} has {_SHARDING} that do not fit ({what}); fetch it again, or use another one"
        )

    def _tensor(self, name: str, key: str, chunks: list[StoredChunk]) -> StoredTensor:
        dtype = chunks[0].bare_dtype
        if dtype is None or len({(chunk.bare_dtype, len(chunk.sizes)) for chunk in chunks}) > 1:
            raise CheckpointError(f"the parts of {name} in {self._path} are of different dtypes or dimensions")
        # Those without elements count too: torch puts them at the end of the whole.
        ends = [tuple(map(int.__add__, chunk.offsets, chunk.sizes)) for chunk in chunks]
        kept = [chunk for chunk in chunks if chunk.numel] or chunks[:1]
        return StoredTensor(key, tuple(map(max, zip(*ends, strict=True))), dtype, tuple(sorted(kept)))

    def _read_json(self, file: str) -> Any:
        try:
            with self._folder.open(file) as stream:
                return json.loads(stream.read())
        except OSError as error:
            raise CheckpointError(f"{self._folder.path}/{file} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._folder.path}/{file} is no JSON ({error}); fetch it again") from error

    def _objects(self) -> tuple[dict[str, StoredObject], dict[str, Path]]:
        found, where = self._read_json(OBJECTS_FILE), f"{self._folder.path}/{OBJECTS_FILE}"
        if not isinstance(found, dict) or found.get("format") != OBJECTS_FORMAT:
            raise CheckpointError(
                f"{where} is not what these tools write (format {OBJECTS_FORMAT!r}); move it away to convert the "
                "tensors alone"
            )
        try:
            stored = {key: base64.b64decode(text, validate=True) for key, text in found["stored"].items()}
            keys = sorted(stored, key=natural_order)
            objects = {key: StoredObject(key, OBJECTS_FILE, 0, 0, stored[key]) for key in keys}
            paths = {key: _path(path) for key, path in found["paths"].items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{where} is damaged ({type(error).__name__}: {error}); fetch it again") from error
        self._record_prefix(found)
        return objects, paths


def _path(found: Any) -> Path:
    if not isinstance(found, list) or not all(type(part) in (str, int) for part in found):
        raise TypeError(f"a path is {reprlib.repr(found)}")
    return tuple(found)


def path_of(key: str, key_prefix: str) -> Path:
    """Return a model tensor's default path in a nested state dict."""
    first = key_prefix.partition(".")[0]
    return (first, key.removeprefix(key_prefix)) if first and key.startswith(f"{first}.") else (key,)
