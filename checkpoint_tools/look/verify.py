"""Check that a checkpoint is whole, and report all problems; seal a whole one.

::

    Checkpoint ──check_structure──▶ problems of metadata, coverage, files and items; reads no large contents
               ──check_items──────▶ data that were changed, or are not finite; reads all data
             ──seal─────────────▶ .checksums: each item, with the CRC-32 of all but its large contents

Files are checked in parallel. ``torch.save`` computed the CRC-32 of all contents in memory, and wrote it next to them.
So sealing need not read large contents, and damage between the save and the seal is found as well.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_offload.checkpoint.chunks import ReadPart, overlapping
from fsdp_offload.policy import check_choices

from ..core.text import CheckpointError, counted, human_bytes, some_of
from ..stored.checkpoint import Checkpoint, CheckpointProblem, Entry, Item, Stored, StoredChunk, StoredTensor
from ..stored.items import ItemReader, typed
from ..stored.metadata import MANIFEST_FILE, manifest_bytes, read_content
from ..stored.safetensors_folder import is_safetensors, open_checkpoint
from ..stored.storage import RemoteFolder, open_folder, write_file

Advance = Callable[[int], object]
"""Called with the number of bytes done since the last call, from any thread."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Called with a title and the total bytes; returns a context that yields the :data:`Advance` to call on progress."""

UNSEEN: Progress = lambda what, nbytes: contextlib.nullcontext(lambda done: None)  # noqa: E731

WITHOUT_CHECKSUMS = "torch.serialization.set_crc32_options(False) was in force"

_BLOCK_NUMEL = 1 << 20  # fits into caches, and is long enough for a disk


class Findings(NamedTuple):
    """Structural findings: problems, notes, files that can be read, and a one-line summary."""

    problems: list[CheckpointProblem]
    notes: list[str]
    sound: list[str]
    size: str


def verify(path: str | os.PathLike[str], *, data: bool = True, threads: int = 4) -> list[CheckpointProblem]:
    """Return all problems of a checkpoint; none if it is whole and its data are unchanged.

    After :func:`~checkpoint_tools.seal`, ``verify`` with ``data`` finds every changed bit.

    Args:
        path: the checkpoint's folder, or its fsspec URL.
        data: read all data, and compare them with their CRC-32; otherwise check only the bytes around large data.
        threads: number of files read at the same time.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, or its metadata cannot be read.
    """
    check_choices("verify", data=data)
    _check_threads("verify", threads)
    checkpoint = open_checkpoint(path)
    problems, _, sound, _ = check_structure(checkpoint, threads)
    if data:
        problems += check_items(checkpoint, sound, threads, data=True)
    return list(dict.fromkeys(problems))


def _check_threads(function: str, threads: object) -> None:
    if not isinstance(threads, int) or threads < 1:
        raise TypeError(f"{function}: threads must be a whole number from 1 on, got {threads!r}")


def check_whole(checkpoint: Checkpoint, threads: int) -> None:
    """Raise if anything in the checkpoint is missing or inconsistent; contents above 64 KiB are not read."""
    problems = check_structure(checkpoint, threads).problems
    if problems:
        (where, text), more = problems[0], len(problems) - 1
        also = f", and {more:,} more problems" if more else ""
        raise CheckpointError(
            f"{checkpoint.path} is not whole: {where}: {text}{also}. The command verify lists all of them"
        )


def check_structure(checkpoint: Checkpoint, threads: int = 4) -> Findings:
    """Check everything except contents above 64 KiB."""
    problems, notes, sound, nbytes = [*checkpoint.problems], [*checkpoint.notes], [], 0
    for tensor in checkpoint.tensors.values():
        problems += [CheckpointProblem(tensor.key, text) for text in check_coverage(tensor)]
    by_file = checkpoint.items_by_file()
    for file, entries in by_file.items():
        try:
            found = checkpoint.folder.size_bytes(file)
        except OSError as error:
            what = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error})"
            problems.append(CheckpointProblem(file, f"{what}; it has {_of_whom(entries)}"))
            continue
        nbytes += found
        texts, is_long_enough = ([], True) if file in checkpoint.archives else _check_length(entries, found)
        problems += [CheckpointProblem(file, text) for text in texts]
        sound += [file] * is_long_enough
    spare = [name for name in checkpoint.folder.files() if name.endswith(".distcp") and name not in by_file]
    notes += [f"{name} is not part of the checkpoint; was another one saved here before?" for name in spare]
    problems += check_items(checkpoint, sound, threads)
    problems += check_manifest(checkpoint, sound)
    what = f"{counted(len(checkpoint.tensors), 'tensor')}, {counted(len(checkpoint.objects), 'object')}"
    return Findings(problems, notes, sound, f"{what}, {human_bytes(nbytes)}")


def check_coverage(tensor: StoredTensor) -> Iterator[str]:
    """Check that every element is in exactly one chunk."""
    regions = []
    for chunk in tensor.chunks:
        ends = map(int.__add__, chunk.offsets, chunk.sizes)
        if any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            yield f"a chunk of {chunk.sizes} at {chunk.offsets} does not fit into {tensor.shape}"
        elif chunk.numel:
            regions.append(ReadPart(chunk.offsets, chunk.sizes, chunk.offsets))
    pair = overlapping(regions)
    if pair is not None:
        first, second = sorted(pair)
        yield f"the chunks of {first.sizes} at {first.offsets} and of {second.sizes} at {second.offsets} overlap"
        return  # with an overlap, the sum below has no meaning
    covered, numel = sum(math.prod(region.sizes) for region in regions), math.prod(tensor.shape)
    if covered < numel:
        yield f"{numel - covered:,} of {numel:,} elements are in no chunk"


def _check_length(entries: Sequence[Entry], found: int) -> tuple[list[str], bool]:
    """Compare a file's length with its items; return problems, and whether all items can be read."""
    needed = max(item.offset_bytes + item.length_bytes for _, item in entries)
    texts = []  # of misplaced items; if there are any, the file's right length is not known
    # A tensor's empty chunks share one item; in old checkpoints, they share it with a chunk that is not empty.
    ranges: dict[tuple[str, int, int], bool] = {}  # key and place of an item → whether its chunk has elements
    for key, item in entries:
        place = key, item.offset_bytes, item.length_bytes
        has_elements = isinstance(item, StoredChunk) and item.numel > 0
        if has_elements and ranges.get(place):
            texts.append(f"two chunks of {key} are in the same bytes, from {item.offset_bytes:,} on")
        ranges[place] = has_elements or ranges.get(place, False)
    for (first, start, length), (second, next_start, _) in itertools.pairwise(ranges):
        if start + length > next_start:
            texts.append(f"the items of {first} and {second} are in the same bytes, from {next_start:,} on")
    if found < needed:
        lost = [entry for entry in entries if entry[1].offset_bytes + entry[1].length_bytes > found]
        texts.insert(0, f"has {found:,} bytes of {needed:,}; cut off: {_of_whom(lost)}")
    elif found > needed > 0 and not texts:  # 0: a file of values without places
        told = f"has {found:,} bytes, and its items end at {needed:,}"
        texts.append(f"{told}: something was appended, or items are lost")
    return texts, found >= needed


def _of_whom(entries: Sequence[Entry]) -> str:
    keys = list(dict.fromkeys(key for key, _ in entries))
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1:,} more keys"


def check_items(
    checkpoint: Checkpoint,
    files: Sequence[str],
    threads: int = 4,
    *,
    data: bool = False,
    finite: bool = False,
    progress: Progress = UNSEEN,
) -> list[CheckpointProblem]:
    """Check that each item of ``files`` is what ``torch.save`` writes, with the right shape and dtype.

    ``data``: also compare large contents with their CRC-32. ``finite``: also look for infinity and NaN, block by block.
    """
    reader, by_file = ItemReader(checkpoint), checkpoint.items_by_file()

    def problem_of(key: str, item: Stored) -> str | None:
        layout = reader.check(item, data=data)
        if not isinstance(item, StoredChunk):
            return None
        dtype = checkpoint.tensors[key].dtype
        if layout is not None and layout.dtype != dtype:
            return f"is stored as {layout.dtype} in {item.file}, and not as {dtype}"
        if not finite or not (dtype.is_floating_point or dtype.is_complex) or "float4" in str(dtype):
            return None
        blocks = reader.bits(item, dtype).split(_BLOCK_NUMEL)
        bad = sum(_not_finite(typed(block.clone(), dtype)) for block in blocks)  # copies are aligned
        at = f"in its chunk at {item.offsets} in {item.file}"
        return f"{bad:,} of {item.numel:,} values are not finite, {at}" if bad else None

    def check_file(file: str) -> list[CheckpointProblem]:
        problems = []
        for key, item in by_file[file]:
            try:
                text = problem_of(key, item)
            except CheckpointError as error:
                text = str(error)
            problems += [CheckpointProblem(key, text)] if text else []
            advance(item.length_bytes)
        return problems

    nbytes = sum(item.length_bytes for file in files for _, item in by_file[file])
    with progress("data", nbytes) as advance, ThreadPoolExecutor(max_workers=threads) as pool:
        return [problem for problems in pool.map(check_file, files) for problem in problems]


def check_manifest(checkpoint: Checkpoint, files: Sequence[str]) -> list[CheckpointProblem]:
    """Compare the places of all items with the manifest, and the CRC-32 of items of ``files``, already checked."""
    if checkpoint.manifest is None:
        return []
    problems = []
    by_file, known = checkpoint.items_by_file(), checkpoint.manifest
    for file in sorted({*known, *by_file}):
        expected = {(file, *place): crc for *place, crc in known.get(file, ())}
        keys = {item.place: key for key, item in by_file.get(file, ())}
        if expected.keys() != keys.keys():
            problems.append(CheckpointProblem(file, f"{MANIFEST_FILE} tells of other items in it than the metadata"))
        elif file in files:
            opened = checkpoint.opened
            others = [keys[at] for at, crc in expected.items() if at in opened and opened[at].around_crc != crc]
            if others:
                text = f"{some_of(others, 1)}: another item than was saved; is the file of another checkpoint?"
                problems.append(CheckpointProblem(file, text))
    return problems


def notes_on_checksums(checkpoint: Checkpoint) -> list[str]:
    """Return notes on data without checksums; call it after the items have been checked."""
    items = [item for _, item in checkpoint.items() if item.file not in checkpoint.archives]
    bare = sum(isinstance(item, StoredChunk) and item.bare_dtype is not None for item in items)
    opened = [checkpoint.opened[item.place] for item in items if item.place in checkpoint.opened]
    found = (bare, "safetensors have no checksums"), (sum(not each.has_crcs for each in opened), WITHOUT_CHECKSUMS)
    return [
        f"the data of {counted(count, 'item')} cannot be compared with checksums: {why}"
        for count, why in found
        if count
    ]


def _not_finite(values: Tensor) -> int:
    if values.numel() and values.itemsize > 1:
        # aminmax needs one pass and no mask, about ten times as fast as isfinite; a NaN makes both extremes NaN.
        extremes = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
        if all(map(math.isfinite, extremes)):
            return 0
    wide = torch.float32 if values.itemsize == 1 else values.dtype  # torch has few operations for 8 bits
    return values.numel() - int(torch.isfinite(values.to(wide)).sum())


# The seal ------------------------------------------------------------------------------------------------------------


def seal(path: str | os.PathLike[str], *, threads: int = 4) -> list[str]:
    """Write the checksums of a finished checkpoint of DCP to ``.checksums`` in its folder.

    ``verify`` with ``data`` then finds every changed bit, also in ``.metadata``, and files that belong to another
    checkpoint with the same layout. Call ``seal`` in one process, when the save has ended on all ranks::

        dcp.save(state, checkpoint_id=path)
        if dist.get_rank() == 0:
            seal(path)

    Args:
        path: the checkpoint's folder, or its fsspec URL.
        threads: number of files read at the same time.

    Returns:
        Notes on data without checksums, with reasons; usually none.

    Raises:
        CheckpointError: the checkpoint is not whole, not of DCP, sealed already, or changed meanwhile.
        OSError: the folder cannot be written to.
    """
    _check_threads("seal", threads)
    if is_safetensors(path):
        raise CheckpointError(
            f"{os.fspath(path)} has safetensors, which have no checksums; list those of the files, with sha256sum"
        )
    content = read_content(open_folder(path))
    checkpoint = open_checkpoint(path)
    if MANIFEST_FILE in checkpoint.folder.files():
        raise CheckpointError(
            f"{checkpoint.path} is sealed: verify compares it with {MANIFEST_FILE}. If another save has written there "
            f"since, remove {MANIFEST_FILE} and seal it again"
        )
    check_whole(checkpoint, threads)
    files: dict[str, set[Item]] = {}
    for _key, item in checkpoint.items():  # noqa: PERF102  # items() is not a dict's: a key has many items
        around_crc = checkpoint.opened[item.place].around_crc
        files.setdefault(item.file, set()).add((item.offset_bytes, item.length_bytes, around_crc))
    if read_content(checkpoint.folder) != content:
        raise CheckpointError(f"{checkpoint.path} was changed while it was read; seal it when no process writes it")
    made, folder = manifest_bytes(content, {file: list(items) for file, items in files.items()}), checkpoint.folder
    if isinstance(folder, RemoteFolder):
        folder.fs.pipe_file(f"{folder.root.rstrip('/')}/{MANIFEST_FILE}", made)
    else:  # rename, so that the file appears as a whole or not at all
        unfinished = Path(folder.path) / f"{MANIFEST_FILE}.unfinished-{os.getpid()}"
        try:
            write_file(unfinished, made)
            unfinished.rename(Path(folder.path) / MANIFEST_FILE)
        finally:
            unfinished.unlink(missing_ok=True)
    return notes_on_checksums(checkpoint)
