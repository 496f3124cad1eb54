"""Summarize a checkpoint from its metadata: keys, groups and files, as plain data and as tables."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.tables import Table
from ..core.text import counted, dtype_name, human_bytes, human_shape, is_excluded, natural_order
from ..fuse.names import KINDS
from ..stored.checkpoint import Checkpoint, StoredTensor


class KeyRow(NamedTuple):
    """One key. Objects have neither shape nor dtype, and their bytes are those of the file."""

    key: str
    group: str
    shape: tuple[int, ...] | None
    dtype: str | None
    chunks: int
    nbytes: int


class GroupRow(NamedTuple):
    """Keys that belong together: ``model``, ``optim exp_avg``."""

    group: str
    keys: int
    chunks: int
    nbytes: int


class FileRow(NamedTuple):
    """One file, and what of the selected keys is in it."""

    file: str
    rank: int | None
    items: int
    stored_bytes: int


class Summary(NamedTuple):
    """Totals and entries of the selected keys; ``problems`` are those of the metadata."""

    path: str
    version: str | None
    nbytes: int
    problems: int
    notes: tuple[str, ...]
    groups: tuple[GroupRow, ...]
    keys: tuple[KeyRow, ...]
    files: tuple[FileRow, ...]


def summarize(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> Summary:
    """Rows for the keys that match any of ``patterns`` (as in a shell: ``*.weight``); for all keys without any."""
    rows = [
        _row_of(checkpoint, key)
        for key in sorted((*checkpoint.tensors, *checkpoint.objects), key=natural_order)
        if not patterns or is_excluded(key, patterns)
    ]
    groups: dict[str, list[KeyRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    selected, files = {row.key for row in rows}, []
    for file, entries in checkpoint.items_by_file().items():
        lengths = [item.length_bytes for key, item in entries if key in selected]
        if lengths:
            files.append(FileRow(file, rank_of(file), len(lengths), sum(lengths)))
    return Summary(
        path=checkpoint.path,
        version=checkpoint.version,
        nbytes=sum(row.nbytes for row in rows),
        problems=len(checkpoint.problems),
        notes=checkpoint.notes,
        groups=tuple(
            GroupRow(group, len(own), sum(row.chunks for row in own), sum(row.nbytes for row in own))
            for group, own in sorted(groups.items(), key=lambda entry: natural_order(entry[0]))
        ),
        keys=tuple(rows),
        files=tuple(files),
    )


def _row_of(checkpoint: Checkpoint, key: str) -> KeyRow:
    group, tensor = group_of(key, checkpoint.paths.get(key, ())), checkpoint.tensors.get(key)
    if tensor is None:
        return KeyRow(key, group, None, None, 1, checkpoint.objects[key].length_bytes)
    return KeyRow(key, group, tensor.shape, dtype_name(tensor.dtype), len(tensor.chunks), tensor.nbytes)


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


def as_json(summary: Summary) -> Mapping[str, Any]:
    """Return everything for JSON, with sizes in bytes."""
    rows = {name: [row._asdict() for row in getattr(summary, name)] for name in ("groups", "keys", "files")}
    return {**summary._asdict(), "notes": list(summary.notes), **rows}


def headline(summary: Summary) -> str:
    """Say in a line how much there is."""
    tensors = sum(row.shape is not None for row in summary.keys)
    counts = f"{counted(tensors, 'tensor')}, {counted(len(summary.keys) - tensors, 'object')}"
    return f"{summary.path}: {counts} in {counted(len(summary.files), 'file')}, {human_bytes(summary.nbytes)}"


def as_tables(summary: Summary, *, keys: bool = True, files: bool = False) -> Iterator[Table]:
    """Yield a table of the groups, and on request of every key and every file."""
    table = Table("group", numbers=("keys", "chunks", "size"))
    for group in summary.groups:
        table.add_row(group.group, f"{group.keys:,}", f"{group.chunks:,}", human_bytes(group.nbytes))
    yield table
    if keys:
        table = Table("key", "shape", "dtype", numbers=("chunks", "size"))
        for row in summary.keys:
            shape = "object" if row.shape is None else human_shape(row.shape)
            table.add_row(row.key, shape, row.dtype or "", f"{row.chunks:,}", human_bytes(row.nbytes))
        yield table
    if files:
        table = Table("file", numbers=("rank", "items", "size"))
        for file in summary.files:
            rank = "" if file.rank is None else str(file.rank)
            table.add_row(file.file, rank, f"{file.items:,}", human_bytes(file.stored_bytes))
        yield table


def chunk_table(tensor: StoredTensor) -> Table:
    """Return a table with a row for each chunk: which file has which part of a tensor."""
    table = Table("offsets", "sizes", "file", numbers=("size",))
    for chunk in tensor.chunks:
        nbytes = human_bytes(chunk.numel * tensor.dtype.itemsize)
        table.add_row(", ".join(map(str, chunk.offsets)), human_shape(chunk.sizes), chunk.file, nbytes)
    return table
