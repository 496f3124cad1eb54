"""Rewrite a checkpoint to a new folder: check, plan, write, and publish only when it is complete.

::

    open_checkpoint ──check──▶ Exchange ──plan──▶ Rewrite ──units──▶ perform ──▶ files ──▶ .metadata ──▶ DST

Nothing of the source is changed, and nothing is written before the source was found to be whole.
"""

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.errors import CheckpointError
from ..core.sizes import counted, human_bytes, human_shape
from ..core.tables import Table
from ..exchange.exchange import find_exchange
from ..exchange.request import Complete, Way
from ..fused.fusions import Exchange, Fusion
from ..fused.split_record import RECORD_FILE, Split, read_record, record_bytes, without
from ..look.verify import check_structure, notes_on_checksums
from ..stored.manifest import MANIFEST_FILE, manifest_bytes
from ..stored.metadata import METADATA_FILE, read_metadata
from ..stored.reading import Checkpoint, open_checkpoint
from .execute import perform
from .new_metadata import metadata_bytes
from .partial import Partial, open_partial, partial_of, steps_beside
from .rewrite_plan import Rewrite, Unit, plan_rewrite, unit_bytes_of, units_of
from .sidecars import Sidecars, read_sidecar, sidecars_of
from .sinks import LocalSink, Sink, check_empty_remote, remote_sink

FORMAT = 1
"""Version of a partial folder's content; a run continues only from its own."""

_MAY_END = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Write errors after which a run can continue, once there is room again."""

_ROUND_NOTES = 3
_NAMES_IN_NOTES = 8


def open_whole(source: str, threads: int) -> tuple[Checkpoint, Sidecars]:
    """Open a checkpoint and list the files beside its data.

    Raises:
        CheckpointError: it is not whole.
    """
    checkpoint = open_checkpoint(source)
    check_whole(checkpoint, threads)
    return checkpoint, sidecars_of(checkpoint, (METADATA_FILE, MANIFEST_FILE))


def check_whole(checkpoint: Checkpoint, threads: int) -> None:
    """Check that nothing of the checkpoint is missing or inconsistent.

    Raises:
        CheckpointError: it is not.
    """
    problems, _ = check_structure(checkpoint, threads)
    if problems:
        first, more = problems[0], len(problems) - 1
        also = f", and {more:,} more problems" if more else ""
        raise CheckpointError(
            f"{checkpoint.path} is not whole: {first.where}: {first.text}{also}. The command verify lists all of them"
        )


def notes_on(checkpoint: Checkpoint, sidecars: Sidecars) -> list[str]:
    """Note what is copied beside the data, and what has no checksum to be compared with."""
    return [*beside(sidecars), *checkpoint.notes, *notes_on_checksums(checkpoint)]


def beside(sidecars: Sidecars) -> list[str]:
    """Notes about files that have nothing of the data: those that are copied, and those that are not."""
    notes = [f"copied as {'it is' if len(sidecars.files) == 1 else 'they are'}: {_some(sidecars.files)}"]
    notes = notes if sidecars.files else []
    notes += [f"{name} does not belong to the checkpoint, and is not copied" for name in sidecars.left[:_ROUND_NOTES]]
    if len(sidecars.left) > _ROUND_NOTES:
        notes.append(f"{len(sidecars.left) - _ROUND_NOTES} more files and folders do not belong to it either")
    return notes


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_NOTES
    return ", ".join(names[:_NAMES_IN_NOTES]) + (f" and {more:,} more" if more > 0 else "")


def plan(checkpoint: Checkpoint, way: Way, asked: Complete) -> Rewrite:
    """Plan the new checkpoint.

    Raises:
        CheckpointError: the rules do not fit the checkpoint.
    """
    exchange = find_exchange(way, checkpoint, asked.rules, asked.values, asked.excluded, asked.wanted)
    for key in (key for fusion in exchange.fusions for key in (fusion.fused, *fusion.parts)):
        for chunk in checkpoint.tensors[key].chunks if key in checkpoint.tensors else ():
            if chunk.transforms:
                raise CheckpointError(
                    f"{key} was written through {', '.join(chunk.transforms)}, which these tools do not undo; load the "
                    "checkpoint with DCP and save it without, or --exclude it"
                )
    return plan_rewrite(checkpoint, exchange)


def record_after(checkpoint: Checkpoint, way: Way, asked: Complete, rewrite: Rewrite) -> dict[str, bytes]:
    """Make the split record of the new checkpoint; nothing if all is merged again."""
    matched = rewrite.exchange.matched
    before = read_record(checkpoint)
    if way == "split":
        splits = [*before, Split(tuple(asked.rules), asked.values, frozenset(matched))]
    else:
        splits = without(before, matched)
    return {RECORD_FILE: record_bytes(splits)} if splits else {}


def fingerprint_of(checkpoint: Checkpoint, way: Way, asked: Complete) -> dict[str, object]:
    """Identify everything that the files of the new checkpoint depend on."""
    folder = checkpoint.folder
    with folder.open(METADATA_FILE) as stream:
        metadata = stream.read()
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "metadata": hashlib.sha256(metadata).hexdigest(),
        "files": stamps_of(checkpoint),
        "asked": hashlib.sha256(f"{way} {asked.asked}".encode()).hexdigest(),
    }


def stamps_of(checkpoint: Checkpoint) -> str:
    """Hash lengths and times of the data files: a change of any of them changes this."""
    files = {file: checkpoint.folder.stamp(file) for file in checkpoint.items_by_file()}
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


# --- where to --------------------------------------------------------------------------------------------------------


def check_destination(source: str, destination: str) -> None:
    """Refuse a destination that is there, or is in the source, or the other way round.

    Raises:
        CheckpointError: says which.
    """
    if not destination.strip():
        raise CheckpointError("DST is empty; give the name of a new folder, or a URL")
    if "://" in destination:
        _check_remote(source, destination)
        return
    path = Path(destination)
    if os.path.lexists(path):
        left = [str(each) for each in (partial_of(path), *steps_beside(path)) if each.exists()]
        also = f". Beside it, an interrupted run has left {', '.join(left)}, which can be removed" if left else ""
        raise CheckpointError(f"{destination} exists; give a name that is not taken, or remove it first{also}")
    if not path.name or path.name in (".", ".."):
        raise CheckpointError(f"{destination!r} is not the name of a new folder")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a folder; make it first, or choose another place")
    old = _local_path(source)
    if old is not None:
        new = path.parent.resolve() / path.name
        if new == old or old in new.parents:
            raise CheckpointError(f"{destination} lies inside of {source}; choose a place outside of it")
        if new in old.parents or partial_of(new) in (old, *old.parents):
            raise CheckpointError(f"{source} lies inside of {destination}; choose another place")


def _check_remote(source: str, destination: str) -> None:
    ends = [each.rstrip("/") + "/" for each in (source, destination)]
    if ends[0].startswith(ends[1]) or ends[1].startswith(ends[0]):
        raise CheckpointError(f"{destination} and {source} lie inside of each other; choose another place")
    old, new = _local_path(source), _local_path(destination)
    if old is not None and new is not None and (old == new or old in new.parents or new in old.parents):
        raise CheckpointError(f"{destination} and {source} lie inside of each other; choose another place")
    check_empty_remote(destination)


def _local_path(path: str) -> Path | None:
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    return None if "://" in path else Path(path).resolve()


# --- doing it --------------------------------------------------------------------------------------------------------


def write(
    checkpoint: Checkpoint,
    rewrite: Rewrite,
    destination: str,
    fingerprint: Mapping[str, object],
    *,
    threads: int,
    max_memory_bytes: int,
    restart: bool = False,
    advance: Callable[[int], object] = lambda done: None,
    last_files: Mapping[str, bytes] | None = None,
    sidecars: Sequence[str] = (),
    record: Mapping[str, bytes] | None = None,
) -> None:
    """Write the new checkpoint.

    Args:
        checkpoint: to read from.
        rewrite: the plan.
        destination: where to, checked.
        fingerprint: of everything that the files depend on.
        threads: how many units are done at the same time.
        max_memory_bytes: for data, over all threads.
        restart: begin anew, whatever an earlier run has left.
        advance: is told of bytes that are written, from any thread.
        last_files: what is written when all else is there, by name; without it, the metadata.
        sidecars: files of the old checkpoint that are copied, unless there is a new one of that name.
        record: :func:`record_after`; without it, the old one goes on.

    Raises:
        CheckpointError: the source cannot be read, or the destination not be written. What was written so far is gone,
            unless it says otherwise.
        KeyboardInterrupt: as it came. What was written so far is there to go on with.
    """
    if last_files is None:
        last_files = {METADATA_FILE: metadata_bytes(read_metadata(checkpoint.folder), rewrite, destination)}
    if record is not None:
        last_files = {**record, **last_files}
        sidecars = [file for file in sidecars if file != RECORD_FILE]
    beside = [file for file in sidecars if file not in rewrite.files and file not in last_files]
    units = units_of(rewrite, unit_bytes_of(rewrite.nbytes))
    options: dict[str, Any] = {"threads": threads, "max_memory_bytes": max_memory_bytes, "advance": advance}
    if "://" in destination:
        with _errors_named(destination), remote_sink(destination) as sink:
            _fill(
                checkpoint,
                rewrite,
                units,
                sink,
                beside,
                last_files,
                done={},
                record=lambda unit, filled: None,
                **options,
            )
        return
    path = Path(destination)
    with open_partial(path, fingerprint, restart=restart) as partial, _removed_unless_of_use(partial):
        local = LocalSink(partial.files)
        _check_what_is_done(partial, units, rewrite.file_bytes())
        options |= {"done": partial.done, "record": partial.record}
        _fill(checkpoint, rewrite, units, local, beside, last_files, **options)
        _check_unchanged(checkpoint, fingerprint)
        partial.publish()


def _fill(
    checkpoint: Checkpoint,
    rewrite: Rewrite,
    units: Sequence[Unit],
    sink: Sink,
    beside: Iterable[str],
    last_files: Mapping[str, bytes],
    **options: Any,
) -> None:
    sink.prepare(rewrite.file_bytes())
    items = perform(checkpoint, rewrite, units, sink, **options)
    for file in beside:
        sink.write_metadata(read_sidecar(checkpoint.folder, file), file)
    if METADATA_FILE in last_files and len(items) == len(rewrite.files):
        sink.write_metadata(manifest_bytes(last_files[METADATA_FILE], items), MANIFEST_FILE)
    for file, content in last_files.items():
        sink.write_metadata(content, file)


def _check_what_is_done(partial: Partial, units: Sequence[Unit], file_bytes: Mapping[str, int]) -> None:
    for file in {file for number in partial.done for file in units[number].files}:
        path = partial.files / file
        if not path.is_file() or path.stat().st_size != file_bytes[file]:
            raise CheckpointError(f"{path} is not as it was left, so that all is begun anew; run the command again")


def _check_unchanged(checkpoint: Checkpoint, fingerprint: Mapping[str, object]) -> None:
    if stamps_of(checkpoint) != fingerprint["files"]:
        raise CheckpointError(f"{checkpoint.path} was changed while it was read; run this again when nobody writes it")


@contextlib.contextmanager
def _removed_unless_of_use(partial: Partial) -> Iterator[None]:
    """Keep what was written if it can be continued: after an interrupt, or when there is room again."""
    try:
        yield
    except CheckpointError:
        partial.remove()
        raise
    except OSError as error:
        if error.errno not in _MAY_END or not partial.is_of_use:
            partial.remove()
            raise CheckpointError(f"the new checkpoint cannot be written: {error.strerror or error}") from error
        raise CheckpointError(
            f"the new checkpoint cannot be written: {error.strerror or error}. What there is stays in "
            f"{partial.folder}: run the same command again to go on with it, or remove it"
        ) from error


@contextlib.contextmanager
def _errors_named(destination: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, KeyboardInterrupt):
        raise
    except Exception as error:  # file systems have errors of their own
        raise CheckpointError(f"{destination} cannot be written: {type(error).__name__}: {error}") from error


def after_interrupt(destination: str, kept_in: str | None = None) -> str:
    """Say what to do after an interrupt; ``kept_in`` is where the unfinished result stays, if elsewhere."""
    if "://" in destination:
        return "What was sent is removed again"
    kept_in = kept_in or f"{partial_of(Path(destination))}"
    return f"What there is stays in {kept_in}: run the same command again to go on with it, or remove it"


# --- shown -----------------------------------------------------------------------------------------------------------


def as_json(rewrite: Rewrite, way: Way) -> dict[str, Any]:
    """Return the plan for JSON, with sizes in bytes."""
    counts = _chunk_counts(rewrite)
    return {
        "way": way,
        "fusions": [_fusion_json(fusion, counts, way) for fusion in rewrite.exchange.fusions],
        "copies": {key: list(new) for key, new in rewrite.exchange.copies.items()},
        "rewritten": sorted(rewrite.exchange.objects),
        "files": rewrite.file_bytes(),
        "nbytes": rewrite.nbytes,
        "fused_bytes": _fused_bytes(rewrite.exchange),
    }


def _fusion_json(fusion: Fusion, counts: Mapping[str, int], way: Way) -> dict[str, Any]:
    parts = [
        {"key": key, "shape": comb.part_shape(fusion.shape, fusion.dim), "chunks": counts.get(key)}
        for key, comb in zip(fusion.parts, fusion.combs, strict=True)
    ]
    return {
        "fused": fusion.fused,
        "shape": fusion.shape,
        "dtype": str(fusion.dtype).removeprefix("torch."),
        "dim": fusion.dim,
        "chunks": counts.get(fusion.fused),
        "parts": parts,
    }


def as_table(rewrite: Rewrite, way: Way) -> Table:
    """Return a table with a row for each fused tensor and each of its parts."""
    table = Table("fused tensor", "parts", "shape", "dtype", numbers=("new chunks",))
    counts = _chunk_counts(rewrite)
    for fusion in rewrite.exchange.fusions:
        dtype = str(fusion.dtype).removeprefix("torch.")
        chunks = f"{counts[fusion.fused]:,}" if way == "merge" else ""
        table.add_row(fusion.fused, "", human_shape(fusion.shape), dtype, chunks)
        for key, comb in zip(fusion.parts, fusion.combs, strict=True):
            chunks = f"{counts[key]:,}" if way == "split" else ""
            shape = human_shape(comb.part_shape(fusion.shape, fusion.dim))
            table.add_row("", key, shape, dtype, chunks)
    return table


def _chunk_counts(rewrite: Rewrite) -> dict[str, int]:
    counts = dict.fromkeys(rewrite.tensors, 0)
    for items in rewrite.files.values():
        for item in items:
            for entry in item.entries:
                if entry.region is not None:
                    counts[entry.key] += 1
    return counts


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
