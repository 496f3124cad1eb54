"""Summarize a checkpoint from its metadata: keys, groups and files, as plain data and as tables.

::

    Checkpoint ──summarize──▶ Summary ──▶ as_json, or tables of rich
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType

from ..core.tables import Table, shown
from ..core.text import counted, human_bytes, human_shape, is_excluded, natural_order
from ..fuse.names import KINDS
from ..stored.reading import Checkpoint, StoredTensor


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
    """Totals and entries of the selected keys."""

    path: str
    version: str | None
    keys: tuple[KeyRow, ...]
    groups: tuple[GroupRow, ...]
    files: tuple[FileRow, ...]
    problems: int
    notes: tuple[str, ...]


def summarize(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> Summary:
    """Rows for the keys that match any of ``patterns`` (as in a shell: ``*.weight``); for all keys without any."""
    rows = []
    for key in (*checkpoint.tensors, *checkpoint.objects):
        if patterns and not is_excluded(key, patterns):
            continue
        group, tensor = group_of(key, checkpoint.paths.get(key, ())), checkpoint.tensors.get(key)
        if tensor is None:
            rows.append(KeyRow(key, group, None, None, 1, checkpoint.objects[key].length_bytes))
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append(KeyRow(key, group, tensor.shape, dtype, len(tensor.chunks), tensor.nbytes))
    rows.sort(key=lambda row: natural_order(row.key))
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
        keys=tuple(rows),
        groups=tuple(
            GroupRow(group, len(own), sum(row.chunks for row in own), sum(row.nbytes for row in own))
            for group, own in sorted(groups.items(), key=lambda entry: natural_order(entry[0]))
        ),
        files=tuple(files),
        problems=len(checkpoint.problems),
        notes=checkpoint.notes,
    )


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
    return {
        "path": summary.path,
        "version": summary.version,
        "nbytes": sum(row.nbytes for row in summary.keys),
        "problems": summary.problems,
        "notes": list(summary.notes),
        "groups": [row._asdict() for row in summary.groups],
        "keys": [row._asdict() for row in summary.keys],
        "files": [row._asdict() for row in summary.files],
    }


def as_tables(summary: Summary, *, keys: bool = True, files: bool = False) -> RenderableType:
    """Return tables of the groups, and on request of every key and every file."""
    groups = Table("group", numbers=("keys", "chunks", "size"))
    for group in summary.groups:
        groups.add_row(group.group, f"{group.keys:,}", f"{group.chunks:,}", human_bytes(group.nbytes))
    tensors = sum(row.shape is not None for row in summary.keys)
    total = human_bytes(sum(row.nbytes for row in summary.keys))
    counts = f"{counted(tensors, 'tensor')}, {counted(len(summary.keys) - tensors, 'object')}"
    headline = f"{summary.path}: {counts} in {counted(len(summary.files), 'file')}, {total}"
    parts: list[RenderableType] = [shown(headline), groups]
    if keys:
        table = Table("key", "shape", "dtype", numbers=("chunks", "size"))
        for row in summary.keys:
            shape = "object" if row.shape is None else human_shape(row.shape)
            table.add_row(row.key, shape, row.dtype or "", f"{row.chunks:,}", human_bytes(row.nbytes))
        parts.append(table)
    if files:
        table = Table("file", numbers=("rank", "items", "size"))
        for file in summary.files:
            rank = "" if file.rank is None else str(file.rank)
            table.add_row(file.file, rank, f"{file.items:,}", human_bytes(file.stored_bytes))
        parts.append(table)
    parts += [shown(f"note: {note}") for note in summary.notes]
    if summary.problems:
        parts.append(shown(f"The metadata contradict themselves ({summary.problems} times): see the command verify."))
    return Group(*parts)


def chunk_table(tensor: StoredTensor) -> Table:
    """Return a table with a row for each chunk: which file has which part of a tensor."""
    table = Table("offsets", "sizes", "file", numbers=("size",))
    for chunk in tensor.chunks:
        nbytes = human_bytes(chunk.numel * tensor.dtype.itemsize)
        table.add_row(", ".join(map(str, chunk.offsets)), human_shape(chunk.sizes), chunk.file, nbytes)
    return table
