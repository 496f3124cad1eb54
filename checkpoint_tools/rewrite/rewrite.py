"""Rewrite a checkpoint to a new folder: check, plan, write, and publish only when it is complete.

::

    open_whole ──▶ Whole ──plan──▶ Rewrite ──torch.save of each piece──▶ DST.partial ──rename──▶ DST

Nothing of the source is changed, and nothing is written before the source was found to be whole. DST is there as a
whole or not at all. What a killed process has left in DST.partial, the next one removes.

*Sidecars* are files beside the data that belong to a checkpoint all the same, and are copied with it: tokenizer,
``config.json``, Megatron's ``common.pt`` and ``metadata.json``, the state of schedulers, of random numbers and of
trainers. Data that are not the checkpoint's own (files of another one saved here before, other formats of the same
weights) stay behind, and are named.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import math
import os
import pickle
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from ..core.regions import TensorRegion
from ..core.text import CheckpointError, counted, dtype_name, human_bytes, human_shape, some_of, table
from ..fuse.files import RECORD_FILE, Request, Split, find_exchange, read_record, record_bytes
from ..fuse.rules import Way
from ..look.verify import Advance, check_whole, notes_on_checksums, seal
from ..stored.checkpoint import Checkpoint
from ..stored.items import Archive, DamagedError, ItemReader, is_zip_end
from ..stored.metadata import MANIFEST_FILE, METADATA_FILE, open_dcp
from ..stored.storage import TORCH_SUFFIXES, Folder, RemoteFolder, open_folder, read_small, write_file
from .rewrite_plan import LARGEST_PIECE_BYTES, Piece, Rewrite, plan_rewrite

_SLICE_BYTES = 1 << 20
_MARK = ".being-written"  # in a partial folder: it is one of these tools
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


class Whole(NamedTuple):
    """A checkpoint that nothing is missing of; the names of its sidecars; and what people should know about both."""

    checkpoint: Checkpoint
    files: tuple[str, ...]
    notes: tuple[str, ...]


def open_whole(source: str, threads: int) -> Whole:
    """Open a checkpoint of DCP that nothing is missing of, and list the files beside its data."""
    return whole(open_dcp(source), (METADATA_FILE, MANIFEST_FILE), threads)


def plan(source: Whole, way: Way, asked: Request) -> Rewrite:
    """Plan the split or the merge of a checkpoint."""
    exchange = find_exchange(way, source.checkpoint, asked)
    new = plan_rewrite(source.checkpoint, exchange)
    state, done = len(exchange.fusions) - exchange.parameters, "split" if way == "split" else "merged"
    exchanged = f"{counted(exchange.parameters, 'tensor')} and {counted(state, 'state tensor')} {done}"
    nbytes = sum(math.prod(fusion.shape) * fusion.dtype.itemsize for fusion in exchange.fusions)
    size = f"{human_bytes(nbytes)} of {human_bytes(new.nbytes)}"
    return new._replace(
        notes=(*asked.notes, *source.notes),
        beside=dict.fromkeys(source.files),
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
    rewrite: Rewrite, destination: str, threads: int, max_memory_bytes: int, advance: Advance = lambda done: None
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
            _save(rewrite, ItemReader(checkpoint, max_memory_bytes // 4), folder, destination, threads, advance)
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


def as_table(rewrite: Rewrite) -> list[str]:
    """Return a table with a row for each fused tensor and each of its parts."""
    rows = (
        row
        for fusion in rewrite.exchange.fusions
        for row in (
            (fusion.fused, "", human_shape(fusion.shape), dtype_name(fusion.dtype)),
            *(("", key, human_shape(shape), dtype_name(fusion.dtype)) for key, shape in fusion.part_shapes()),
        )
    )
    return table(("fused tensor", "parts", "shape", "dtype"), (), rows)


# Files beside the data ----------------------------------------------------------------------------------------------


def whole(checkpoint: Checkpoint, own: Iterable[str] | None, threads: int) -> Whole:
    """Check a checkpoint, and list the files beside its data: none without ``own``, its files that are not data."""
    check_whole(checkpoint, threads)
    folder, known = checkpoint.folder, {*(own or ()), *checkpoint.items_by_file()}
    files: list[str] = []
    left: list[str] = []
    room_bytes: float = MAX_BYTES
    for name in folder.files() if own is not None else ():
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
    listed = (("copied", files), ("not copied, as not of the checkpoint", left))
    notes = [f"{what}: {some_of(names, _NAMES_IN_NOTES)}" for what, names in listed if names]
    return Whole(checkpoint, tuple(files), (*notes, *checkpoint.notes, *notes_on_checksums(checkpoint)))


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


# Files, and the folder that takes its name at the end -----------------------------------------------------------------

_Place = tuple[str, TensorRegion | None, _StorageInfo]
"""The key and the rectangle of a piece, and where it was written."""


class _Stream(io.BufferedWriter):
    """Writes a tensor of 128 MiB in slices that fit into caches: at once it takes three times as long."""

    def write(self, data: Any) -> int:
        view = memoryview(data)
        return sum(
            [super(_Stream, self).write(view[at : at + _SLICE_BYTES]) for at in range(0, len(view), _SLICE_BYTES)]
        )


def _save(rewrite: Rewrite, reader: ItemReader, folder: Path, destination: str, threads: int, advance: Advance) -> None:
    """Write all files of a checkpoint of DCP, and its metadata, or all files of safetensors."""
    stop = threading.Event()

    def write(file: str) -> list[_Place]:
        places = []
        with _Stream(io.FileIO(folder / file, "w")) as stream:
            stream.write(rewrite.heads.get(file, b""))
            as_torch_orders = sorted(rewrite.files[file], key=lambda piece: piece.region is not None)
            for piece in as_torch_orders:
                if stop.is_set():
                    raise CheckpointError("another file could not be written")
                begin = stream.tell()
                _write(piece, reader, stream, is_bare=bool(rewrite.heads))
                places.append((piece.key, piece.region, _StorageInfo(file, begin, stream.tell() - begin)))
                advance(piece.nbytes)
            stream.flush()
            os.fsync(stream.fileno())
        return places

    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            places = [place for found in pool.map(write, rewrite.files) for place in found]
        except BaseException:
            stop.set()
            raise
    if not rewrite.heads:
        write_file(folder / METADATA_FILE, pickle.dumps(_metadata(rewrite, places, destination)))


def _write(piece: Piece, reader: ItemReader, stream: io.BufferedWriter, *, is_bare: bool) -> None:
    """Write a piece, which does not stay in memory."""
    found = piece.read(reader)
    if not isinstance(found, Tensor):
        stream.write(found)
    elif is_bare:
        stream.write(found.reshape(-1).view(torch.uint8).numpy().data)
    else:
        torch.save(found, cast(IO[bytes], stream))


def _metadata(rewrite: Rewrite, places: list[_Place], destination: str) -> dcp.Metadata:
    entries = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(tensor.dtype), torch.Size(tensor.shape), [])
        for key, tensor in rewrite.tensors.items()
    }
    # DCP looks for a chunk first at the number that its index has.
    stored = {dcp.MetadataIndex(key): info for key, region, info in places if region is None}
    regions = {(key, region): info for key, region, info in places if region is not None}
    for key, region in sorted(regions):
        chunk, chunks = dcp.ChunkStorageMetadata(*map(torch.Size, region)), entries[key].chunks
        stored[dcp.MetadataIndex(key, chunk.offsets, len(chunks))] = regions[key, region]
        chunks.append(chunk)
    return dcp.Metadata(
        {**{key: dcp.BytesStorageMetadata() for key in rewrite.objects}, **entries},
        planner_data=dict(rewrite.paths),
        storage_data=stored,
        storage_meta=dcp.StorageMeta(destination),
        version=CURRENT_DCP_VERSION,
    )


@contextlib.contextmanager
def appearing(destination: str) -> Iterator[Path]:
    """Give an empty folder that becomes ``destination`` at the end, or is sent there; it is gone after an error."""
    if "://" in destination:
        with tempfile.TemporaryDirectory(prefix="checkpoint-tools-") as spool:
            yield Path(spool)
            _send(Path(spool), destination)
        return
    path, folder = Path(destination), Path(f"{destination.rstrip('/')}.partial")
    with held(folder) as mark:
        try:
            yield folder
            _sync(folder)
            if os.path.lexists(path):
                raise CheckpointError(f"{path} has appeared meanwhile; move it away, and run this again")
            folder.rename(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _sync(path.parent)
        (path / mark.name).unlink()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Hold a folder that no other process holds, and that is empty but for its mark."""
    mark = folder / _MARK
    try:
        folder.mkdir(exist_ok=True)
        names = os.listdir(folder)
        if names and _MARK not in names:
            raise CheckpointError(f"{folder} is there, and not of these tools; remove it, or give another name")
        lock = os.open(mark, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who had it may have finished, and renamed the folder.
            is_ours = os.path.samestat(os.fstat(lock), os.stat(mark))
        except OSError:
            is_ours = False
        if not is_ours:
            raise CheckpointError(f"another process is writing to {folder}; wait for it, or end it")
        for name in os.listdir(folder):
            if name != _MARK:
                each = folder / name
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        yield mark
    finally:
        os.close(lock)


def _sync(folder: Path) -> None:
    """Make the names in a folder safe on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _send(folder: Path, url: str) -> None:
    """Send all files; what was sent is removed again if one fails."""
    remote = RemoteFolder(url)
    fs, root = remote.fs, remote.root
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        for file in sorted(files, key=lambda name: (name == METADATA_FILE, name)):
            place = f"{root.rstrip('/')}/{file}"
            fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(folder / file), place)
    except BaseException as error:
        with contextlib.suppress(Exception):  # what is said is why it did not end well
            fs.rm(root, recursive=True)
        if isinstance(error, Exception):
            raise CheckpointError(f"{url} cannot be written: {type(error).__name__}: {error}") from error
        raise


def written(error: OSError | RuntimeError) -> CheckpointError:
    """Make the error for what could not be written; torch's writer has errors of its own for a full disk."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    error = found or error
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "; make room, or choose another disk" if full else ""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return CheckpointError(f"the new checkpoint cannot be written: {reason}{hint}")
