"""Rewrite a checkpoint to a new folder: check, plan, write, and publish only when it is complete.

::

    open_checkpoint ──check──▶ Exchange ──plan──▶ Rewrite ──save──▶ DST.partial ──rename──▶ DST

Nothing of the source is changed, and nothing is written before the source was found to be whole.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.errors import CheckpointError
from ..core.tables import Table
from ..core.text import counted, human_bytes, human_shape
from ..fuse.files import find_exchange
from ..fuse.plan import Exchange
from ..fuse.request import RECORD_FILE, Complete, Split, read_record, record_bytes
from ..fuse.rules import Way
from ..integrity.seal import seal
from ..look.verify import check_structure, notes_on_checksums
from ..stored.items import ItemReader
from ..stored.metadata import MANIFEST_FILE, METADATA_FILE
from ..stored.reading import Checkpoint, open_checkpoint
from ..stored.storage import RemoteFolder, write_file
from .rewrite_plan import LARGEST_PIECE_BYTES, Rewrite, plan_rewrite
from .save import appearing, partial_of, save, written
from .sidecars import Sidecars, read_sidecar, sidecars_of

_ROUND_NOTES = 3
_NAMES_IN_NOTES = 8


def open_whole(source: str, threads: int) -> tuple[Checkpoint, Sidecars]:
    """Open a checkpoint and list the files beside its data."""
    checkpoint = open_checkpoint(source)
    check_whole(checkpoint, threads)
    return checkpoint, sidecars_of(checkpoint, (METADATA_FILE, MANIFEST_FILE))


def check_whole(checkpoint: Checkpoint, threads: int) -> None:
    """Check that nothing of the checkpoint is missing or inconsistent."""
    problems, _ = check_structure(checkpoint, threads)
    if problems:
        first, more = problems[0], len(problems) - 1
        also = f", and {more:,} more problems" if more else ""
        raise CheckpointError(
            f"{checkpoint.path} is not whole: {first.where}: {first.text}{also}. The command verify lists all of them"
        )


def notes_on(checkpoint: Checkpoint, sidecars: Sidecars) -> list[str]:
    """Note which files beside the data are copied and which are not, and what has no checksum to be compared with."""
    more = len(sidecars.files) - _NAMES_IN_NOTES
    names = ", ".join(sidecars.files[:_NAMES_IN_NOTES]) + (f" and {more:,} more" if more > 0 else "")
    notes = [f"copied as {'it is' if len(sidecars.files) == 1 else 'they are'}: {names}"] if names else []
    notes += [f"{name} does not belong to the checkpoint, and is not copied" for name in sidecars.left[:_ROUND_NOTES]]
    if len(sidecars.left) > _ROUND_NOTES:
        notes.append(f"{len(sidecars.left) - _ROUND_NOTES} more files and folders do not belong to it either")
    return [*notes, *checkpoint.notes, *notes_on_checksums(checkpoint)]


def plan(checkpoint: Checkpoint, way: Way, asked: Complete) -> Rewrite:
    """Plan the new checkpoint."""
    exchange = find_exchange(way, checkpoint, asked.rules, asked.values, asked.excluded, asked.wanted)
    return plan_rewrite(checkpoint, exchange)


def record_after(checkpoint: Checkpoint, way: Way, asked: Complete, rewrite: Rewrite) -> dict[str, bytes]:
    """Make the split record of the new checkpoint; nothing if all is merged again."""
    matched, splits = frozenset(rewrite.exchange.matched), read_record(checkpoint)
    if way == "split":
        splits.append(Split(tuple(asked.rules), asked.values, matched))
    else:
        splits = [left for split in splits if (left := split._replace(fused=split.fused - matched)).fused]
    return {RECORD_FILE: record_bytes(splits)} if splits else {}


def stamps_of(checkpoint: Checkpoint) -> str:
    """Hash lengths and times of the data files: a change of any of them changes this."""
    files = {file: checkpoint.folder.stamp(file) for file in checkpoint.items_by_file()}
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def check_destination(source: str, destination: str) -> None:
    """Refuse a destination that is there, or is in the source, or the other way round."""
    if not destination.strip():
        raise CheckpointError("DST is empty; give the name of a new folder, or a URL")
    old, new = _local_path(source), _local_path(destination)
    if "://" in destination:
        ends = [each.rstrip("/") + "/" for each in (source, destination)]
        is_inside = ends[0].startswith(ends[1]) or ends[1].startswith(ends[0])
        if is_inside or (
            old is not None and new is not None and (old == new or old in new.parents or new in old.parents)
        ):
            raise CheckpointError(f"{destination} and {source} lie inside of each other; choose another place")
        remote = RemoteFolder(destination)
        remote.fs.invalidate_cache()
        if remote.fs.exists(remote.root) and remote.files():
            raise CheckpointError(f"{destination} exists; give a name that is not taken, or remove it first")
        return
    path = Path(destination)
    if os.path.lexists(path):
        raise CheckpointError(f"{destination} exists; give a name that is not taken, or remove it first")
    if not path.name or path.name in (".", ".."):
        raise CheckpointError(f"{destination!r} is not the name of a new folder")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a folder; make it first, or choose another place")
    if old is not None and new is not None:
        if new == old or old in new.parents:
            raise CheckpointError(f"{destination} lies inside of {source}; choose a place outside of it")
        if new in old.parents or partial_of(new) in (old, *old.parents):
            raise CheckpointError(f"{source} lies inside of {destination}; choose another place")


def _local_path(path: str) -> Path | None:
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    return None if "://" in path else Path(path).resolve()


def write(
    checkpoint: Checkpoint,
    rewrite: Rewrite,
    destination: str,
    *,
    threads: int,
    max_memory_bytes: int,
    advance: Callable[[int], object] = lambda done: None,
    beside: Mapping[str, bytes] | None = None,
    sidecars: Sequence[str] = (),
    record: Mapping[str, bytes] | None = None,
) -> None:
    """Write the new checkpoint, and seal it if it is one of DCP. After an error nothing is left of it.

    ``beside`` are other files, by name; ``sidecars`` are files of the old checkpoint that are copied, unless there is a
    new one of that name; ``record`` is :func:`record_after`: without it, the old one goes on. ``max_memory_bytes``: for
    pieces that are put together, over all threads. ``advance`` is told of bytes that are written, from any thread.
    """
    # A thread has one piece, and an item of the old checkpoint mapped; one thread can always go on.
    mapped_bytes = max((item.length_bytes for _, item in checkpoint.items()), default=0)
    each_bytes = min(LARGEST_PIECE_BYTES, rewrite.nbytes) + mapped_bytes + 1
    threads = max(min(threads, max_memory_bytes // each_bytes), 1)
    stamps = stamps_of(checkpoint)
    others = {**(beside or {}), **(record or {})}
    reader = ItemReader(checkpoint, max_memory_bytes // 4)
    with appearing(destination, rewrite.nbytes) as folder:
        try:
            save(rewrite, reader, folder, destination, threads, advance)
            for file in sidecars:
                if file not in others and (record is None or file != RECORD_FILE):
                    others[file] = read_sidecar(checkpoint.folder, file)
            for file, content in others.items():
                write_file(folder / file, content)
        except (OSError, RuntimeError) as error:
            raise written(error) from error
        if not rewrite.heads and (folder / METADATA_FILE).exists():
            seal(folder, threads=threads)
        if stamps_of(checkpoint) != stamps:
            raise CheckpointError(
                f"{checkpoint.path} was changed while it was read; run this again when nobody writes it"
            )


def as_json(rewrite: Rewrite, way: Way) -> dict[str, Any]:
    """Return the plan for JSON, with sizes in bytes."""
    counts = _chunk_counts(rewrite)
    fusions = [
        {
            "fused": fusion.fused,
            "shape": fusion.shape,
            "dtype": str(fusion.dtype).removeprefix("torch."),
            "dim": fusion.dim,
            "chunks": counts.get(fusion.fused),
            "parts": [
                {"key": key, "shape": comb.part_shape(fusion.shape, fusion.dim), "chunks": counts.get(key)}
                for key, comb in zip(fusion.parts, fusion.combs, strict=True)
            ],
        }
        for fusion in rewrite.exchange.fusions
    ]
    return {
        "way": way,
        "fusions": fusions,
        "copies": {key: list(new) for key, new in rewrite.exchange.copies.items()},
        "rewritten": sorted(rewrite.exchange.objects),
        "files": rewrite.file_bytes(),
        "nbytes": rewrite.nbytes,
        "fused_bytes": _fused_bytes(rewrite.exchange),
    }


def as_table(rewrite: Rewrite) -> Table:
    """Return a table with a row for each fused tensor and each of its parts."""
    table = Table("fused tensor", "parts", "shape", "dtype", numbers=("new chunks",))
    counts = {key: f"{count:,}" for key, count in _chunk_counts(rewrite).items()}
    for fusion in rewrite.exchange.fusions:
        dtype = str(fusion.dtype).removeprefix("torch.")
        table.add_row(fusion.fused, "", human_shape(fusion.shape), dtype, counts.get(fusion.fused, ""))
        for key, comb in zip(fusion.parts, fusion.combs, strict=True):
            shape = human_shape(comb.part_shape(fusion.shape, fusion.dim))
            table.add_row("", key, shape, dtype, counts.get(key, ""))
    return table


def _chunk_counts(rewrite: Rewrite) -> Mapping[str, int]:
    return Counter(piece.key for pieces in rewrite.files.values() for piece in pieces if piece.region is not None)


def _fused_bytes(exchange: Exchange) -> int:
    return sum(torch.Size(fusion.shape).numel() * fusion.dtype.itemsize for fusion in exchange.fusions)


def headline(rewrite: Rewrite, way: Way) -> str:
    """Say in a line what is done."""
    exchange = rewrite.exchange
    state = len(exchange.fusions) - exchange.parameters
    verb = "split" if way == "split" else "merged"
    objects = len(rewrite.tensors) + len(rewrite.objects)
    return (
        f"{counted(exchange.parameters, 'tensor')} and {counted(state, 'state tensor')} {verb}, "
        f"{human_bytes(_fused_bytes(exchange))} of {human_bytes(rewrite.nbytes)}; "
        f"{counted(objects, 'key')} in {counted(len(rewrite.files), 'file')}"
    )
