"""Summarize a checkpoint from its metadata: keys, groups and files, as JSON and as tables."""

import re
from collections.abc import Sequence
from typing import Any

from ..core.text import counted, dtype_name, human_bytes, human_shape, is_excluded, natural_order, table
from ..fuse.names import KINDS
from ..stored.checkpoint import Checkpoint, StoredTensor


def summarize(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> dict[str, Any]:
    """Return totals, and entries of the keys like ``patterns``, or of all; bytes of an object are those of the file."""
    keys: list[dict[str, Any]] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for key in sorted((*checkpoint.tensors, *checkpoint.objects), key=natural_order):
        if patterns and not is_excluded(key, patterns):
            continue
        group, tensor = group_of(key, checkpoint.paths.get(key, ())), checkpoint.tensors.get(key)
        entry = {
            "key": key,
            "group": group,
            "shape": tensor and tensor.shape,
            "dtype": tensor and dtype_name(tensor.dtype),
            "chunks": len(tensor.chunks) if tensor else 1,
            "nbytes": tensor.nbytes if tensor else checkpoint.objects[key].length_bytes,
        }
        keys.append(entry)
        groups.setdefault(group, []).append(entry)
    selected, files = {entry["key"] for entry in keys}, []
    for file, items in checkpoint.items_by_file().items():
        lengths = [item.length_bytes for key, item in items if key in selected]
        if lengths:
            files.append({"file": file, "rank": rank_of(file), "items": len(lengths), "stored_bytes": sum(lengths)})
    return {
        "path": checkpoint.path,
        "version": checkpoint.version,
        "nbytes": sum(entry["nbytes"] for entry in keys),
        "problems": len(checkpoint.problems),
        "notes": [*checkpoint.notes],
        "groups": [
            {
                "group": group,
                "keys": len(groups[group]),
                **{name: sum(entry[name] for entry in groups[group]) for name in ("chunks", "nbytes")},
            }
            for group in sorted(groups, key=natural_order)
        ],
        "keys": keys,
        "files": files,
    }


def group_of(key: str, path: Sequence[str | int] = ()) -> str:
    """Name the part of the state dict that holds a key: ``model``, ``optim exp_avg``, ``optim param_groups``."""
    parts = [str(part) for part in path] if len(path) > 1 else key.split(".")
    for at, part in enumerate(parts[:2]):
        if part == "state" and len(parts) > at + 2:
            entry = parts[at + 1] if parts[at + 1] in KINDS and parts[-1] not in KINDS else parts[-1]
            return " ".join([*parts[:at], entry] if at else [part, entry])
        if part == "param_groups":
            return " ".join(parts[: at + 1])
    return parts[0]


def rank_of(file: str) -> int | None:
    """Read the writing rank from a file's name: 3 from ``__3_0.distcp``."""
    match = re.fullmatch(r"__(\d+)_\d+\.distcp", file)
    return int(match[1]) if match else None


def headline(summary: dict[str, Any]) -> str:
    """Say in a line how much there is."""
    tensors = sum(entry["shape"] is not None for entry in summary["keys"])
    counts = f"{counted(tensors, 'tensor')}, {counted(len(summary['keys']) - tensors, 'object')}"
    return f"{summary['path']}: {counts} in {counted(len(summary['files']), 'file')}, {human_bytes(summary['nbytes'])}"


def as_tables(summary: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return a table of the groups, and one of the keys."""
    groups = (
        (group["group"], f"{group['keys']:,}", f"{group['chunks']:,}", human_bytes(group["nbytes"]))
        for group in summary["groups"]
    )
    shapes = ("object" if row["shape"] is None else human_shape(row["shape"]) for row in summary["keys"])
    keys = (
        (row["key"], shape, row["dtype"] or "", f"{row['chunks']:,}", human_bytes(row["nbytes"]))
        for row, shape in zip(summary["keys"], shapes, strict=True)
    )
    sizes = ("chunks", "size")
    return table(("group",), ("keys", *sizes), groups), table(("key", "shape", "dtype"), sizes, keys)


def chunk_headline(tensor: StoredTensor) -> str:
    """Say in a line what is divided into chunks."""
    what = f"{human_shape(tensor.shape)} of {dtype_name(tensor.dtype)}"
    return f"{tensor.key}: {what} in {counted(len(tensor.chunks), 'chunk')}"


def chunk_table(tensor: StoredTensor) -> list[str]:
    """Return a table with a row for each chunk: which file has which part of a tensor."""
    rows = (
        (", ".join(map(str, chunk.offsets)), human_shape(chunk.sizes), chunk.file, human_bytes(nbytes))
        for chunk in tensor.chunks
        for nbytes in [chunk.numel * tensor.dtype.itemsize]
    )
    return table(("offsets", "sizes", "file"), ("size",), rows)
