"""Summarize a checkpoint from its metadata: its keys and groups of keys, as JSON and as tables."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.text import counted, dtype_name, human_bytes, human_shape, is_excluded, natural_order, table
from ..fuse.names import KINDS
from ..stored.checkpoint import Checkpoint, StoredTensor


class Shown(NamedTuple):
    """Output of a command in two forms: JSON; or a line, tables and notes."""

    as_json: dict[str, Any]
    headline: str
    tables: tuple[list[str], ...]
    notes: tuple[str, ...] = ()


def summary(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> Shown:
    """Describe the keys that match ``patterns``, or all, and their groups; an object's size is that in the file."""
    keys: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key in sorted((*checkpoint.tensors, *checkpoint.objects), key=natural_order):
        if patterns and not is_excluded(key, patterns):
            continue
        name, tensor = group_of(key, checkpoint.paths.get(key, ())), checkpoint.tensors.get(key)
        chunks, nbytes = (len(tensor.chunks), tensor.nbytes) if tensor else (1, checkpoint.objects[key].length_bytes)
        shape, dtype = tensor and tensor.shape, tensor and dtype_name(tensor.dtype)
        keys[key] = {"key": key, "group": name, "shape": shape, "dtype": dtype, "chunks": chunks, "nbytes": nbytes}
        group = groups.setdefault(name, {"group": name, "keys": 0, "chunks": 0, "nbytes": 0})
        for count, more in (("keys", 1), ("chunks", chunks), ("nbytes", nbytes)):
            group[count] += more
    totals = [groups[name] for name in sorted(groups, key=natural_order)]
    nbytes, problems = sum(group["nbytes"] for group in totals), len(checkpoint.problems)
    files = sorted({item.file for key, item in checkpoint.items() if key in keys}, key=natural_order)
    tensors = sum(key in checkpoint.tensors for key in keys)
    counts = f"{counted(tensors, 'tensor')}, {counted(len(keys) - tensors, 'object')} in {counted(len(files), 'file')}"
    contradictions = f"the metadata contradict themselves ({problems} times): see the command verify"
    of_groups = ((of["group"], f"{of['keys']:,}", f"{of['chunks']:,}", human_bytes(of["nbytes"])) for of in totals)
    of_keys = (
        (key, human_shape(of["shape"]) if of["dtype"] else "object", of["dtype"] or "", f"{of['chunks']:,}", size)
        for key, of in keys.items()
        for size in [human_bytes(of["nbytes"])]
    )
    sizes = "chunks", "size"
    return Shown(
        {
            "path": checkpoint.path,
            "version": checkpoint.version,
            "nbytes": nbytes,
            "problems": problems,
            "notes": [*checkpoint.notes],
            "groups": totals,
            "keys": [*keys.values()],
            "files": files,
        },
        f"{checkpoint.path}: {counts}, {human_bytes(nbytes)}",
        (table(("group",), ("keys", *sizes), of_groups), table(("key", "shape", "dtype"), sizes, of_keys)),
        (*checkpoint.notes, *[contradictions] * bool(problems)),
    )


def tiling(tensor: StoredTensor) -> Shown:
    """List the chunks of a tensor with their files."""
    dtype, chunks = dtype_name(tensor.dtype), tensor.chunks
    bare = {"bare_dtype": dtype} if chunks and chunks[0].bare_dtype is not None else {}
    rows = (
        (", ".join(map(str, chunk.offsets)), human_shape(chunk.sizes), chunk.file, human_bytes(nbytes))
        for chunk in chunks
        for nbytes in [chunk.numel * tensor.dtype.itemsize]
    )
    listed = [{**chunk._asdict(), **bare} for chunk in chunks]
    return Shown(
        {"key": tensor.key, "shape": tensor.shape, "dtype": dtype, "chunks": listed},
        f"{tensor.key}: {human_shape(tensor.shape)} of {dtype} in {counted(len(chunks), 'chunk')}",
        (table(("offsets", "sizes", "file"), ("size",), rows),),
    )


def group_of(key: str, path: Sequence[str | int] = ()) -> str:
    """Return the group of a key, its part of the state dict: ``model``, ``optim exp_avg``, ``optim param_groups``."""
    parts = [str(part) for part in path] if len(path) > 1 else key.split(".")
    for at, part in enumerate(parts[:2]):
        if part == "state" and len(parts) > at + 2:
            entry = parts[at + 1] if parts[at + 1] in KINDS and parts[-1] not in KINDS else parts[-1]
            return " ".join([*parts[:at], entry] if at else [part, entry])
        if part == "param_groups":
            return " ".join(parts[: at + 1])
    return parts[0]
