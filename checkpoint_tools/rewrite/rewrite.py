"""Rewrite a checkpoint to a new folder: check, plan, write, and publish only when it is complete.

::

    open_whole ──▶ Checkpoint, Sidecars ──plan──▶ Rewrite ──write──▶ DST.partial ──rename──▶ DST

Nothing of the source is changed, and nothing is written before the source was found to be whole.

*Sidecars* are files beside the data that belong to a checkpoint all the same, and are copied with it: tokenizer,
``config.json``, Megatron's ``common.pt`` and ``metadata.json``, the state of schedulers, of random numbers and of
trainers. Data that are not the checkpoint's own (files of another one saved here before, other formats of the same
weights) stay behind, and are named.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..core.text import CheckpointError, Table, counted, dtype_name, human_bytes, human_shape, some_of
from ..fuse.files import RECORD_FILE, Request, Split, find_exchange, read_record, record_bytes
from ..fuse.rules import Way
from ..look.verify import check_whole, notes_on_checksums, seal
from ..stored.checkpoint import Checkpoint
from ..stored.items import Archive, DamagedError, ItemReader, is_zip_end
from ..stored.metadata import MANIFEST_FILE, METADATA_FILE, open_dcp
from ..stored.storage import TORCH_SUFFIXES, Folder, RemoteFolder, open_folder, read_small, write_file
from .rewrite_plan import LARGEST_PIECE_BYTES, Rewrite, plan_rewrite
from .save import appearing, save, written

_NAMES_IN_NOTES = 8

MAX_BYTES = 256 << 20
"""Total size up to which files beside the data are copied."""

_MAX_FILES = 1000
_MAX_DEPTH = 3

# Data, and what only fits them: of this checkpoint, or of another one.
_DATA = re.compile(
    r"""
    \..*                                                    # hidden, .metadata too
    | .*\.(distcp|safetensors|safetensors\.index\.json|bin\.index\.json|gguf|onnx|h5|msgpack|npz|partial|lock|tmp)
    | (pytorch_model|tf_model|flax_model|model|optimizer|consolidated)[^/]*\.(bin|pth?|ckpt)
    | (mp_rank|zero_pp_rank|bf16_zero)_.*
    | optimizer\.json                                       # what convert itself writes
    """,
    re.VERBOSE,
)


class Sidecars(NamedTuple):
    """Files beside the data that are copied, by their names in the folder, and notes on these and on all others."""

    files: tuple[str, ...]
    notes: tuple[str, ...]


def open_whole(source: str, threads: int) -> tuple[Checkpoint, Sidecars]:
    """Open a checkpoint of DCP that nothing is missing of, and list the files beside its data."""
    checkpoint = open_dcp(source)
    check_whole(checkpoint, threads)
    return checkpoint, sidecars_of(checkpoint, (METADATA_FILE, MANIFEST_FILE))


def notes_on(checkpoint: Checkpoint, sidecars: Sidecars) -> list[str]:
    """Note which files beside the data are copied and which are not, and what has no checksum to be compared with."""
    return [*sidecars.notes, *checkpoint.notes, *notes_on_checksums(checkpoint)]


def plan(checkpoint: Checkpoint, sidecars: Sidecars, way: Way, asked: Request) -> Rewrite:
    """Plan the split or the merge of a checkpoint."""
    exchange = find_exchange(way, checkpoint, asked)
    new = plan_rewrite(checkpoint, exchange)
    state, done = len(exchange.fusions) - exchange.parameters, "split" if way == "split" else "merged"
    exchanged = f"{counted(exchange.parameters, 'tensor')} and {counted(state, 'state tensor')} {done}"
    nbytes = sum(math.prod(fusion.shape) * fusion.dtype.itemsize for fusion in exchange.fusions)
    size = f"{human_bytes(nbytes)} of {human_bytes(new.nbytes)}"
    return new._replace(
        notes=(*asked.notes, *notes_on(checkpoint, sidecars)),
        beside=dict.fromkeys(sidecars.files),
        headline=f"{exchanged}, {size}; {counted(new.keys, 'key')} in {counted(len(new.files), 'file')}",
    )


def with_record(rewrite: Rewrite, way: Way, asked: Request) -> Rewrite:
    """Put the new split record beside the data in place of the old one; none if all is merged again."""
    matched, splits = frozenset(rewrite.exchange.matched), read_record(rewrite.checkpoint)
    if way == "split":
        splits.append(Split(tuple(asked.rules), asked.values, matched))
    else:
        splits = [left for split in splits if (left := split._replace(fused=split.fused - matched)).fused]
    beside = {file: content for file, content in rewrite.beside.items() if file != RECORD_FILE}
    return rewrite._replace(beside={**beside, RECORD_FILE: record_bytes(splits)} if splits else beside)


def check_destination(source: str, destination: str) -> None:
    """Refuse a destination that is there, or is in the source, or the other way round."""
    old, new, path = _place(source), _place(destination), Path(destination)
    is_there, has_no_parent = os.path.lexists(path), not path.parent.is_dir()
    if "://" in destination:
        remote = RemoteFolder(destination)
        remote.fs.invalidate_cache()
        is_there, has_no_parent = remote.fs.exists(remote.root) and bool(remote.files()), False
    for is_wrong, text in (
        (not destination.strip(), "DST is empty; give the name of a new folder, or a URL"),
        (is_there, f"{destination} exists; give a name that is not taken, or remove it first"),
        (path.name in ("", ".", ".."), f"{destination!r} is not the name of a new folder"),
        (has_no_parent, f"{path.parent} is not a folder; make it first, or choose another place"),
        (new.startswith(old), f"{destination} lies inside of {source}; choose a place outside of it"),
        (old.startswith((new, f"{new[:-1]}.partial/")), f"{source} lies inside of {destination}; choose another place"),
    ):
        if is_wrong:
            raise CheckpointError(text)


def _place(path: str) -> str:
    """Return what all paths inside of this one begin with."""
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    return os.path.join(path if "://" in path else Path(path).resolve(), "")


def write(
    rewrite: Rewrite,
    destination: str,
    threads: int,
    max_memory_bytes: int,
    advance: Callable[[int], object] = lambda done: None,
) -> None:
    """Write the new checkpoint, and seal it if it is one of DCP. After an error nothing is left of it.

    ``max_memory_bytes``: for pieces that are put together, over all threads. ``advance`` is told of bytes that are
    written, from any thread.
    """
    # A thread has one piece, and an item of the old checkpoint mapped; one thread can always go on.
    checkpoint = rewrite.checkpoint
    mapped_bytes = max((item.length_bytes for _, item in checkpoint.items()), default=0)
    each_bytes = min(LARGEST_PIECE_BYTES, rewrite.nbytes) + mapped_bytes + 1
    threads = max(min(threads, max_memory_bytes // each_bytes), 1)
    files = checkpoint.items_by_file()
    stamps = [checkpoint.folder.stamp(file) for file in files]
    with appearing(destination) as folder:
        try:
            save(rewrite, ItemReader(checkpoint, max_memory_bytes // 4), folder, destination, threads, advance)
            for file, content in rewrite.beside.items():
                write_file(folder / file, read_sidecar(checkpoint.folder, file) if content is None else content)
        except (OSError, RuntimeError) as error:
            raise written(error) from error
        if not rewrite.heads:
            seal(folder, threads=threads)
        if [checkpoint.folder.stamp(file) for file in files] != stamps:
            raise CheckpointError(
                f"{checkpoint.path} was changed while it was read; run this again when nobody writes it"
            )


def as_table(rewrite: Rewrite) -> Table:
    """Return a table with a row for each fused tensor and each of its parts."""
    table = Table("fused tensor", "parts", "shape", "dtype")
    for fusion in rewrite.exchange.fusions:
        dtype = dtype_name(fusion.dtype)
        table.add_row(fusion.fused, "", human_shape(fusion.shape), dtype)
        for key, shape in fusion.part_shapes():
            table.add_row("", key, human_shape(shape), dtype)
    return table


# Files beside the data ----------------------------------------------------------------------------------------------


def sidecars_of(checkpoint: Checkpoint, own: Iterable[str]) -> Sidecars:
    """List the files beside the data; ``own`` are the checkpoint's other files."""
    folder, known = checkpoint.folder, {*own, *checkpoint.items_by_file()}
    files: list[str] = []
    left: list[str] = []
    room_bytes: float = MAX_BYTES
    for name in folder.files():
        if name in known or (name.endswith("/") and any(file.startswith(name) for file in known)):
            continue
        inside = list(itertools.islice(_files_in(folder, name, _MAX_DEPTH), _MAX_FILES + 1))
        try:
            nbytes: float = sum(map(folder.size_bytes, inside))
        except OSError:
            nbytes = math.inf
        has_data = any(_DATA.fullmatch(file.rpartition("/")[2]) for file in (name.removesuffix("/"), *inside))
        # A folder goes as a whole, or not at all.
        if inside and not has_data and nbytes <= room_bytes and len(files) + len(inside) <= _MAX_FILES:
            files += inside
            room_bytes -= nbytes
        else:
            left.append(name)
    notes = [f"copied: {some_of(files, _NAMES_IN_NOTES)}"] if files else []
    notes += [f"not copied, as not of the checkpoint: {some_of(left, _NAMES_IN_NOTES)}"] if left else []
    return Sidecars(tuple(files), tuple(notes))


def _files_in(folder: Folder, name: str, depth: int) -> Iterator[str]:
    """List the file itself, or all files in a folder that has no data files."""
    if not name.endswith("/"):
        yield name
    elif depth == 0:
        yield f"{name}.deep"  # no name of a sidecar: the folder is left
    else:
        inside = open_folder(f"{folder.path.rstrip('/')}/{name.rstrip('/')}")
        for each in inside.files():
            yield from _files_in(folder, f"{name}{each}", depth - 1)


def read_sidecar(folder: Folder, file: str) -> bytes:
    """Read such a file; one of ``torch.save`` is compared with its checksums."""
    try:
        content = read_small(folder, file, MAX_BYTES)
        # One damaged bit cannot hide both ends of a zip file. Files of torch.save before 1.6 are none.
        if file.endswith(TORCH_SUFFIXES) and (content.startswith(b"PK\3\4") or is_zip_end(content)):
            Archive(memoryview(content)).read_all()
    except OSError as error:
        raise CheckpointError(f"{folder.path}/{file} cannot be read: {error.strerror or error}") from error
    except DamagedError as error:
        raise CheckpointError(
            f"{folder.path}/{file} is not what torch.save writes ({error}), and would be copied as it is; fetch it "
            "again, or move it away"
        ) from error
    return content
