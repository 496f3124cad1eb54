"""Convert a checkpoint to another format: open, plan, write, and publish only when it is complete.

::

    SRC ──plan──▶ Conversion ──rewrite.write──▶ DST

Written as split and merge write; see :mod:`checkpoint_tools.rewrite.rewrite`.
"""

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

import torch

from ..core.errors import CheckpointError
from ..core.regions import Comb, Index, TensorRegion, stretches, whole_of
from ..core.tables import Table
from ..core.text import check_excluded, counted, human_bytes, is_excluded, natural_order
from ..fuse.names import sorted_out
from ..fuse.plan import Exchange, Fusion
from ..rewrite import rewrite
from ..rewrite.rewrite_plan import Piece, Rewrite, gathered, given, in_files
from ..rewrite.sidecars import Sidecars, sidecars_of
from ..stored.items import ItemReader
from ..stored.reading import Checkpoint, Path, StoredTensor
from ..stored.safetensors_folder import (
    INDEX_SUFFIX,
    METADATA_KEY,
    MODEL,
    NAMES,
    OBJECTS_FILE,
    OBJECTS_FORMAT,
    OPTIMIZER,
    SUFFIX,
    FileTensor,
    Folders,
    is_safetensors,
    open_safetensors,
    path_of,
    with_header,
)
from ..stored.storage import CASTABLE

What = Literal["model", "optimizer", "all"]
Format = Literal["safetensors", "dcp"]

_CASTABLE = {getattr(torch, name) for name in CASTABLE.values()}
_DEFAULT_PREFIX = f"{MODEL}."
_LEAVE_OUT = "leave it out with --exclude"
_NO_EXCHANGE = Exchange((), {}, {}, {}, 0)


class Wanted(NamedTuple):
    """Selection of what is converted, and its options: files are about so large, the model's floats get the dtype.

    ``key_prefix`` is of the model's keys in the checkpoint; ``None``, to find out.
    """

    what: What = "all"
    key_prefix: str | None = None
    excluded: Sequence[str] = ()
    shard_bytes: int = 5_000_000_000
    dtype: torch.dtype | None = None


class Conversion(NamedTuple):
    """A conversion of a checkpoint that is whole, planned and not yet written.

    ``sidecars`` are copied, and ``beside`` are new files without data. The model's keys have the prefix in DCP alone.
    """

    checkpoint: Checkpoint
    to: Format
    rewrite: Rewrite
    notes: tuple[str, ...]
    sidecars: tuple[str, ...]
    beside: Mapping[str, bytes] = {}
    key_prefix: str = ""

    @property
    def headline(self) -> str:
        """Describe in a line which files are written."""
        new = self.rewrite
        size = f"{human_bytes(new.nbytes)} in {counted(len(new.files), 'file')}"
        prefix = f"; keys of the model begin with {self.key_prefix!r} in DCP" if self.key_prefix else ""
        return f"{counted(len(new.tensors), 'tensor')} as {self.to}, {size}{prefix}"

    def as_json(self) -> dict[str, Any]:
        """Return the plan for JSON, with sizes in bytes."""
        return {
            "key_prefix": self.key_prefix,
            "keys": len(self.rewrite.tensors) + len(self.rewrite.objects),
            "files": self.rewrite.file_bytes(),
            "nbytes": self.rewrite.nbytes,
        }

    def as_table(self) -> Table:
        """Return a table with a row for each file: its first tensor, count and size."""
        table = Table("file", "first", numbers=("tensors", "size"))
        for file, nbytes in self.rewrite.file_bytes().items():
            keys = list(dict.fromkeys(piece.key for piece in self.rewrite.files[file] if piece.region is not None))
            table.add_row(file, keys[0] if keys else "", f"{len(keys):,}", human_bytes(nbytes))
        return table


def plan(source: str, wanted: Wanted, *, to: str | None = None, threads: int = 4) -> Conversion:
    """Open a checkpoint, find it whole, and plan its conversion to the other format."""
    if to not in (None, "safetensors", "dcp"):
        raise CheckpointError(f"--to is safetensors or dcp, not {to}")
    expected: Format = "dcp" if is_safetensors(source) else "safetensors"
    if to not in (None, expected):
        other = "safetensors" if expected == "dcp" else "a checkpoint of DCP"
        raise CheckpointError(f"{source} is {other} already; give --to {expected}, or nothing")
    if expected == "safetensors":
        return _to_safetensors(*rewrite.open_whole(source, threads), wanted)
    folders = open_safetensors(source, wanted.key_prefix)
    rewrite.check_whole(folders.checkpoint, threads)
    is_file = PurePath(source).suffix == SUFFIX
    sidecars = Sidecars((), ()) if is_file else sidecars_of(folders.checkpoint, folders.own_files)
    return _to_dcp(folders, sidecars, wanted)


def _to_safetensors(checkpoint: Checkpoint, sidecars: Sidecars, wanted: Wanted) -> Conversion:
    parts = _Parts(checkpoint, wanted)
    builder = _ConversionBuilder(checkpoint, frozenset(parts.model), wanted.dtype)
    last_files: dict[str, bytes] = {}
    for part, keys in ((MODEL, parts.model), (OPTIMIZER, parts.others)):
        names = {key: key.removeprefix(parts.prefix) if part == MODEL else key for key in keys}
        for key, name in names.items():
            dtype, wrong = checkpoint.tensors[key].dtype, ""
            if dtype not in NAMES:
                wrong = f"is {str(dtype).removeprefix('torch.')}, which safetensors do not have"
            elif "float4" in str(dtype) and not checkpoint.tensors[key].shape:
                wrong = "is a float4 without dimensions, which safetensors do not have"
            elif name in (METADATA_KEY, ""):
                wrong = f"would be named {name!r}, which safetensors do not allow"
            if wrong:
                raise CheckpointError(f"{key} {wrong}; {_LEAVE_OUT}")
        weight_map = builder.add_safetensors(part, names, wanted.shard_bytes)
        if weight_map:
            nbytes = sum(builder.nbytes_of(checkpoint.tensors[key]) for key in names)
            metadata = {"total_size": nbytes, **({"key_prefix": parts.prefix} if part == MODEL else {})}
            content = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
            last_files[f"{part}{INDEX_SUFFIX}"] = content.encode() + b"\n"
    if wanted.what != "model" and (parts.objects or parts.others or parts.odd):
        last_files = {OBJECTS_FILE: _objects_file(checkpoint, parts), **last_files}
    notes = (*rewrite.notes_on(checkpoint, sidecars), *parts.notes)
    new = builder.rewrite({}, ())
    return Conversion(checkpoint, "safetensors", new, notes, sidecars.files, last_files, parts.prefix)


class _Parts:
    """Keys of a checkpoint, sorted by the file that they go to."""

    def __init__(self, checkpoint: Checkpoint, wanted: Wanted) -> None:
        everything = [*checkpoint.tensors, *checkpoint.objects]
        check_excluded(wanted.excluded, everything)
        keys = [key for key in everything if not is_excluded(key, wanted.excluded)]
        neither = [key for key in sorted_out(keys, checkpoint.paths).others if key in checkpoint.tensors]
        self.notes: list[str] = []
        self.prefix = _prefix_of(checkpoint, neither) if wanted.key_prefix is None else wanted.key_prefix
        model = {key for key in neither if key.startswith(self.prefix)}
        if not model and (wanted.what == "model" or wanted.key_prefix):
            raise CheckpointError(
                f"{checkpoint.path} has no tensor of a model whose key begins with {self.prefix!r}; look at the keys "
                "with the command inspect, and give --key-prefix"
            )
        self.model = [key for key in checkpoint.tensors if key in model] if wanted.what != "optimizer" else []
        left = [key for key in keys if key not in model]
        self.others = [key for key in left if key in checkpoint.tensors]
        self.objects = [key for key in left if key in checkpoint.objects]
        if wanted.what == "model":
            for key in self.objects:
                if "_extra_state" in key or (self.prefix and key.startswith(self.prefix)):
                    raise CheckpointError(
                        f"{key} is an object of the model, and safetensors have tensors; {_LEAVE_OUT}"
                    )
            if left:
                self.notes.append(f"{counted(len(left), 'key')} not of the model, left out")
            self.others, self.objects = [], []
        elif not (self.model or self.others or self.objects):
            raise CheckpointError(f"{checkpoint.path} has nothing that would be converted")
        elif wanted.what == "optimizer" and not (self.others or self.objects):
            raise CheckpointError(f"{checkpoint.path} has nothing but a model")
        # Tensors of the model that were nested in a way that their keys do not tell.
        paths = checkpoint.paths
        self.odd = {key for key in self.model if paths.get(key, (key,)) != path_of(key, self.prefix)}


def _prefix_of(checkpoint: Checkpoint, keys: Sequence[str]) -> str:
    """Return the prefix of the model's keys, which is known where the model was nested."""
    inside = [key for key in keys if key.startswith(_DEFAULT_PREFIX)]
    paths = [path for key in inside if (path := checkpoint.paths.get(key))]
    if paths:
        return _DEFAULT_PREFIX if any(len(path) > 1 and path[0] == MODEL for path in paths) else ""
    return _DEFAULT_PREFIX if inside and len(inside) == len(keys) else ""


def _objects_file(checkpoint: Checkpoint, parts: _Parts) -> bytes:
    """Write objects in base64, as ``torch.save`` wrote them, unopened."""
    stored = {}
    reader = ItemReader(checkpoint)
    for key in sorted(parts.objects, key=natural_order):
        item = checkpoint.objects[key]
        if item.transforms:
            raise CheckpointError(f"{key} was written through {', '.join(item.transforms)}; {_LEAVE_OUT}")
        try:
            reader.check_data(item)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}; {_LEAVE_OUT}") from error
        stored[key] = base64.b64encode(reader.view(item)).decode()
    known = {key: path for key, path in checkpoint.paths.items() if path != (key,)}
    listed = {*parts.others, *parts.objects}
    kept = sorted(listed & known.keys() | parts.odd, key=natural_order)
    paths = {key: list(known.get(key, (key,))) for key in kept}
    head = f'{{"format": {json.dumps(OBJECTS_FORMAT)},\n"key_prefix": {json.dumps(parts.prefix)},\n'
    return f'{head}"stored": {_by_line(stored)},\n"paths": {_by_line(paths)}}}\n'.encode()


def _by_line(values: Mapping[str, Any]) -> str:
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in values.items())
    return "{" + ",".join(f"\n  {line}" for line in lines) + "}"


def _to_dcp(folders: Folders, sidecars: Sidecars, wanted: Wanted) -> Conversion:
    checkpoint = folders.checkpoint
    everything = [*checkpoint.tensors, *checkpoint.objects]
    check_excluded(wanted.excluded, everything)
    keys = [
        key
        for key in everything
        if not is_excluded(key, wanted.excluded)
        and (wanted.what == "all" or (wanted.what == MODEL) == (key in folders.model_keys))
    ]
    if not keys:
        raise CheckpointError(f"{checkpoint.path} has nothing that would be converted; see --what and --exclude")
    builder = _ConversionBuilder(checkpoint, folders.model_keys, wanted.dtype)
    builder.add_dcp(keys, wanted.shard_bytes)
    objects = tuple(key for key in keys if key in checkpoint.objects)
    new = builder.rewrite({key: checkpoint.paths[key] for key in keys}, objects)
    notes = tuple(rewrite.notes_on(checkpoint, sidecars))
    return Conversion(checkpoint, "dcp", new, notes, sidecars.files, key_prefix=folders.key_prefix)


class _ConversionBuilder:
    """Files of pieces, each with how it is put together."""

    def __init__(self, checkpoint: Checkpoint, model_keys: Set[str], dtype: torch.dtype | None) -> None:
        self._checkpoint = checkpoint
        self._model_keys = model_keys
        self._dtype = dtype
        self._files: dict[str, list[Piece]] = {}
        self._heads: dict[str, bytes] = {}
        self._tensors: dict[str, StoredTensor] = {}

    def dtype_of(self, tensor: StoredTensor) -> torch.dtype:
        """Return the dtype that the new tensor has."""
        is_cast = self._dtype is not None and tensor.key in self._model_keys and tensor.dtype in _CASTABLE
        return self._dtype if is_cast and self._dtype is not None else tensor.dtype

    def nbytes_of(self, tensor: StoredTensor) -> int:
        """Return the size of the new tensor in bytes."""
        return math.prod(tensor.shape) * self.dtype_of(tensor).itemsize

    def add_safetensors(self, part: str, names: Mapping[str, str], shard_bytes: int) -> dict[str, str]:
        """Whole tensors; the names are those in the files. Returns name → file."""
        weight_map = {}
        wholes = (self._checkpoint.tensors[key] for key in names)
        sized = (Piece(each.key, None, self.nbytes_of(each), lambda reader: b"") for each in wholes)
        shards = list(in_files(sized, shard_bytes))
        for number, shard in enumerate(shards, start=1):
            file = f"{part}-{number:05}-of-{len(shards):05}{SUFFIX}"
            by_name = {names[piece.key]: self._checkpoint.tensors[piece.key] for piece in shard}
            self._heads[file], placed = with_header(
                FileTensor(name, tensor.shape, self.dtype_of(tensor)) for name, tensor in by_name.items()
            )
            tensors = [by_name[entry.key] for entry in placed]
            self._files[file] = [piece for each in tensors for piece in self._pieces(each, [whole_of(each.shape)])]
            weight_map.update(dict.fromkeys(by_name, file))
        return dict(sorted(weight_map.items(), key=lambda each: natural_order(each[0])))

    def add_dcp(self, keys: Sequence[str], shard_bytes: int) -> None:
        """Chunks as they are stored, and rows of those that are larger than a file may be."""
        pieces: list[Piece] = []
        for tensor in (self._checkpoint.tensors[key] for key in keys if key in self._checkpoint.tensors):
            numel = max(shard_bytes // self.dtype_of(tensor).itemsize, 1)
            for chunk in tensor.chunks:
                pieces += self._pieces(tensor, stretches(TensorRegion(chunk.offsets, chunk.sizes), numel))
        for number, shard in enumerate(in_files(pieces, shard_bytes)):
            self._files[f"__{number}_0.distcp"] = shard
        file = f"__{max(len(self._files) - 1, 0)}_0.distcp"
        for key in (key for key in keys if key in self._checkpoint.objects):
            content = self._checkpoint.objects[key].content
            assert content is not None
            self._files.setdefault(file, []).append(Piece(key, None, len(content), given(content)))

    def _pieces(self, tensor: StoredTensor, regions: Iterable[TensorRegion]) -> Iterator[Piece]:
        dtype, shape = self.dtype_of(tensor), tensor.shape
        self._tensors[tensor.key] = StoredTensor(tensor.key, shape, dtype, ())
        whole = Comb(0, shape[0], shape[0], 1) if shape else Comb(0, 1, 1, 1, is_dropped=True)  # its own only part
        fusion = Fusion(tensor.key, (tensor.key,), shape, tensor.dtype, 0, (whole,))
        sources = (Index(tensor.chunks),)
        for region in regions:
            yield from gathered(fusion, region, sources, dtype)

    def rewrite(self, paths: Mapping[str, Path], objects: tuple[str, ...]) -> Rewrite:
        return Rewrite(self._tensors, objects, self._files, paths, _NO_EXCHANGE, self._heads)
