"""Plan the conversion of a checkpoint to another format; :mod:`checkpoint_tools.rewrite` writes it.

::

    checkpoint of DCP ──_Parts──▶ model, other tensors, objects ──▶ model-*.safetensors, optimizer-*, optimizer.json
    safetensors ──open_safetensors──▶ the same keys and paths ──▶ __0_0.distcp, __1_0.distcp, ..., .metadata
    files of ranks ──open_rank_files──▶ one or the other
"""

import base64
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rewrite
from ..core.regions import TensorRegion, stretches, whole_of
from ..core.text import CheckpointError, check_patterns, counted, dtype_name, human_bytes, is_excluded, table
from ..core.text import natural_order as in_order
from ..fuse.names import sorted_out
from ..rewrite import LARGEST_PIECE_BYTES, Piece, Rewrite, given, in_files
from ..stored import safetensors_folder as folder
from ..stored.checkpoint import Checkpoint, Path, StoredTensor
from ..stored.foreign import state_files, works_for_state
from ..stored.items import ItemReader
from ..stored.metadata import open_dcp
from ..stored.rank_files import is_rank_files, open_rank_files, with_optimizer
from ..stored.safetensors_folder import MODEL, OPTIMIZER, open_safetensors, path_of
from ..stored.storage import TORCH_SUFFIXES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtypes that a model can be cast to, by the names of the command line."""

_DEFAULT_PREFIX = f"{MODEL}."
_LEAVE_OUT = "leave it out with --exclude"


class Wanted(NamedTuple):
    """Options of a conversion; ``key_prefix``: prefix of the model's keys in DCP, or None to find it."""

    key_prefix: str | None = None
    excluded: Sequence[str] = ()
    shard_bytes: int = 5_000_000_000
    dtype: torch.dtype | None = None
    names: Sequence[Any] | None = None  # --names: parameter names for the numbers in an optimizer's state


def plan(source: str, wanted: Wanted, to: str | None = None, threads: int = 4) -> Rewrite:
    """Open and check a checkpoint, and plan its conversion to ``to``, by default the format that it does not have."""
    if to not in (None, "safetensors", "dcp"):
        raise CheckpointError(f"--to is safetensors, dcp, torch or fsdp_dtensor, not {to}")
    of_ranks = is_rank_files(source)
    expected = "dcp" if (of_ranks and to != "safetensors") or folder.is_safetensors(source) else "safetensors"
    if to not in (None, expected):
        other = "safetensors" if expected == "dcp" else "a checkpoint of DCP"
        raise CheckpointError(f"{source} is {other} already; give --to {expected}, or nothing")
    if of_ranks and expected == "dcp" and wanted.key_prefix is not None:
        raise CheckpointError("--key-prefix is not for files of ranks: the model's keys begin with 'model.' in DCP")
    opened = open_rank_files(source, wanted.names) if of_ranks else None
    if opened is None:
        opened = open_dcp(source) if expected == "safetensors" else open_safetensors(source, wanted.key_prefix)
    if wanted.names and not of_ranks:
        files = [file for file in state_files(opened.folder.files()) if file.endswith(TORCH_SUFFIXES)]
        if len(files) != 1 or expected != "dcp" or opened.own_files is None:
            raise CheckpointError("--names is for files of ranks, or safetensors with one optimizer.pt; leave it out")
        opened = with_optimizer(opened, files[0], wanted.names)
    checkpoint = rewrite.whole(opened, threads)
    new, prefix = (_to_safetensors if expected == "safetensors" else _to_dcp)(checkpoint, wanted)
    size = f"{human_bytes(new.nbytes)} in {counted(len(new.files), 'file')}"
    begins = f"; keys of the model begin with {prefix!r} in DCP" if prefix else ""
    return new._replace(headline=f"{counted(len(new.tensors), 'tensor')} as {expected}, {size}{begins}")


def as_table(new: Rewrite) -> list[str]:
    """Return a table with a row for each file: its first tensor, count and size."""
    sizes = new.file_bytes().items()
    keys = {file: list(dict.fromkeys(each.key for each in new.files[file] if each.region)) for file, _ in sizes}
    rows = ((file, *(keys[file] or [""])[:1], f"{len(keys[file]):,}", human_bytes(nbytes)) for file, nbytes in sizes)
    return table(("file", "first"), ("tensors", "size"), rows)


def _to_safetensors(checkpoint: Checkpoint, wanted: Wanted) -> tuple[Rewrite, str]:
    parts = _Parts(checkpoint, wanted)
    new = _new_tensors(checkpoint, [*parts.model, *parts.others], frozenset(parts.model), wanted.dtype)
    files: dict[str, list[Piece]] = {}
    heads: dict[str, bytes] = {}
    sidecars: dict[str, bytes | None] = dict.fromkeys(checkpoint.sidecars)
    for file in checkpoint.sidecars if checkpoint.archives else ():  # move verl's to where from_pretrained looks
        sidecars[file.removeprefix("huggingface/")] = rewrite.read_sidecar(checkpoint.folder, file)
    for part, keys in ((MODEL, parts.model), (OPTIMIZER, parts.others)):
        names = {key: key.removeprefix(parts.prefix) if part == MODEL else key for key in keys}
        for key, name in names.items():
            if (dtype := checkpoint.tensors[key].dtype) not in folder.NAMES:
                raise CheckpointError(f"{key} is {dtype_name(dtype)}, which safetensors do not have; {_LEAVE_OUT}")
            if name in (folder.METADATA_KEY, "") or name.encode(errors="replace").decode() != name:  # lone surrogate
                raise CheckpointError(f"{key} would be named {name!r}, which safetensors do not allow; {_LEAVE_OUT}")
        shards = in_files(keys, lambda key: new[key].nbytes, wanted.shard_bytes)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"{part}-{number:05}-of-{len(shards):05}{folder.SUFFIX}"
            own = {names[key]: key for key in shard}
            heads[file], placed = folder.with_header((name, new[key]) for name, key in own.items())
            wholes = ((own[name], whole_of(new[own[name]].shape)) for name in placed)
            files[file] = [piece for each in wholes for piece in _pieces(checkpoint, new, *each)]
            weight_map.update(dict.fromkeys(own, file))
        if names:
            prefix = {"key_prefix": parts.prefix} if part == MODEL else {}
            metadata = {"total_size": sum(new[key].nbytes for key in keys), **prefix}
            by_name = {name: weight_map[name] for name in sorted(weight_map, key=in_order)}
            content = json.dumps({"metadata": metadata, "weight_map": by_name}, indent=2)
            sidecars[f"{part}{folder.INDEX_SUFFIX}"] = content.encode() + b"\n"
    if parts.objects or parts.others or parts.odd:
        stored = {}  # key → bytes that ``torch.save`` wrote, in base64; their pickles are not loaded
        reader = ItemReader(checkpoint)
        for key in sorted(parts.objects, key=in_order):
            item = checkpoint.objects[key]
            reader.check(item, data=True)
            stored[key] = base64.b64encode(reader.view(item)).decode()
        known = {key: path for key, path in checkpoint.paths.items() if path != (key,)}
        kept = sorted({*parts.others, *parts.objects} & known.keys() | parts.odd, key=in_order)
        listed = {key: list(known.get(key, (key,))) for key in kept}
        found = {"format": folder.OBJECTS_FORMAT, "key_prefix": parts.prefix, "stored": stored, "paths": listed}
        sidecars[folder.OBJECTS_FILE] = json.dumps(found, indent=1, allow_nan=False).encode() + b"\n"
    return Rewrite(checkpoint, new, (), files, {}, heads=heads, notes=checkpoint.notes, sidecars=sidecars), parts.prefix


class _Parts:
    """Keys of a checkpoint, by where they go: model files, optimizer files, or ``optimizer.json`` (objects)."""

    def __init__(self, checkpoint: Checkpoint, wanted: Wanted) -> None:
        keys = wanted_keys(checkpoint, wanted.excluded)
        neither = [key for key in sorted_out(keys, checkpoint.paths).others if key in checkpoint.tensors]
        self.prefix = _prefix_of(checkpoint, neither) if wanted.key_prefix is None else wanted.key_prefix
        model = {key for key in neither if key.startswith(self.prefix)}
        if not model and wanted.key_prefix:
            raise CheckpointError(
                f"{checkpoint.path} has no tensor of a model whose key begins with {self.prefix!r}; look at the keys "
                "with the command inspect, and give --key-prefix"
            )
        self.model = [key for key in checkpoint.tensors if key in model]
        self.others = [key for key in keys if key not in model and key in checkpoint.tensors]
        self.objects = [key for key in keys if key in checkpoint.objects]
        if not (self.model or self.others):
            raise CheckpointError(f"{checkpoint.path} has nothing that would be converted: no tensors")
        # Tensors of the model whose path cannot be derived from the key: optimizer.json stores it.
        paths = checkpoint.paths
        self.odd = {key for key in self.model if paths.get(key, (key,)) != path_of(key, self.prefix)}


def wanted_keys(checkpoint: Checkpoint, excluded: Sequence[str]) -> list[str]:
    """Return the keys that are not excluded; raise if the folder has optimizer state that this conversion ignores."""
    everything = [*checkpoint.tensors, *checkpoint.objects]
    states = state_files(checkpoint.folder.files()) if checkpoint.own_files is not None else []
    check_patterns("--exclude", excluded, [*everything, *states])
    left = [name for name in states if not is_excluded(name, excluded)]
    if left and not sorted_out(everything, checkpoint.paths).states:
        raise CheckpointError(
            f"{checkpoint.path}: {left[0]} has the optimizer's state, which would be left behind. "
            f"{works_for_state(checkpoint.folder, left[0])}. Leave it out here with --exclude {left[0]}"
        )
    return [key for key in everything if not is_excluded(key, excluded)]


def _prefix_of(checkpoint: Checkpoint, keys: Sequence[str]) -> str:
    """Return ``model.`` if the model is nested under it, or, with unknown nesting, if all ``keys`` begin with it."""
    inside = [key for key in keys if key.startswith(_DEFAULT_PREFIX)]
    paths = [path for key in inside if (path := checkpoint.paths.get(key))]
    if paths:
        return _DEFAULT_PREFIX if any(len(path) > 1 and path[0] == MODEL for path in paths) else ""
    return _DEFAULT_PREFIX if inside and len(inside) == len(keys) else ""


def _to_dcp(checkpoint: Checkpoint, wanted: Wanted) -> tuple[Rewrite, str]:
    keys = wanted_keys(checkpoint, wanted.excluded)
    if not keys:
        raise CheckpointError(f"{checkpoint.path} has nothing that would be converted; see --exclude")
    new = _new_tensors(checkpoint, keys, checkpoint.model_keys, wanted.dtype)
    pieces: list[Piece] = []
    for key, tensor in new.items():  # keep the stored chunks; divide those that are larger than a file may be
        numel = max(wanted.shard_bytes // tensor.dtype.itemsize, 1)
        for chunk in checkpoint.tensors[key].chunks:
            for small in stretches(chunk.region, numel):
                pieces += _pieces(checkpoint, new, key, small)
    objects = {key: checkpoint.objects[key].content or b"" for key in keys if key in checkpoint.objects}
    paths = {key: checkpoint.paths[key] for key in keys}
    return as_dcp(checkpoint, new, pieces, objects, paths, wanted.shard_bytes), checkpoint.key_prefix


def as_dcp(
    checkpoint: Checkpoint,
    new: Mapping[str, StoredTensor],
    pieces: Sequence[Piece],
    objects: Mapping[str, bytes],
    paths: Mapping[str, Path],
    shard_bytes: int,
) -> Rewrite:
    """Plan a checkpoint of DCP from tensors, their pieces, and contents of objects."""
    shards = in_files(pieces, lambda piece: piece.nbytes, shard_bytes) or [[]]
    shards[-1] += [given(key, content) for key, content in objects.items()]
    files = {f"__{number}_0.distcp": shard for number, shard in enumerate(shards)}
    sidecars = dict.fromkeys(checkpoint.sidecars)
    return Rewrite(checkpoint, new, tuple(objects), files, paths, notes=checkpoint.notes, sidecars=sidecars)


def _new_tensors(
    checkpoint: Checkpoint, keys: Iterable[str], model_keys: Collection[str], dtype: torch.dtype | None
) -> dict[str, StoredTensor]:
    """Return the new tensors of ``keys``; the model's floating-point tensors get ``dtype``, if given."""
    found = {key: checkpoint.tensors[key]._replace(chunks=()) for key in keys if key in checkpoint.tensors}
    cast = {key for key, tensor in found.items() if dtype and key in model_keys and tensor.dtype in DTYPES.values()}
    return {key: tensor._replace(dtype=dtype) if dtype and key in cast else tensor for key, tensor in found.items()}


def _pieces(checkpoint: Checkpoint, new: Mapping[str, StoredTensor], key: str, region: TensorRegion) -> Iterator[Piece]:
    old, dtype = checkpoint.tensors[key], new[key].dtype
    for small in stretches(region, LARGEST_PIECE_BYTES // old.dtype.itemsize):
        yield Piece(key, small, small.numel * dtype.itemsize, functools.partial(_cast, old, small, dtype))


def _cast(tensor: StoredTensor, region: TensorRegion, dtype: torch.dtype, reader: ItemReader) -> Tensor:
    return reader.read_region(tensor, region).to(dtype)
