"""Write a new checkpoint with torch's own writer, in a folder beside its place that takes its name at the end.

::

    Rewrite ──a SavePlan for each file──▶ FileSystemWriter ──▶ DST.partial/ ──rename──▶ DST

DST is there as a whole or not at all. What a killed process has left in DST.partial, the next one removes.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ..core.text import CheckpointError
from ..look.verify import Advance
from ..stored.items import ItemReader
from ..stored.metadata import METADATA_FILE
from ..stored.storage import RemoteFolder
from .rewrite_plan import Piece, Rewrite

_SLICE_BYTES = 1 << 20
_MARK = ".being-written"  # in a partial folder: it is one of these tools


class _Planner:
    """Gives each piece when the writer asks for it: all that torch's writer calls of a ``SavePlanner``."""

    def __init__(self, rewrite: Rewrite, reader: ItemReader, advance: Advance) -> None:
        self._rewrite = rewrite
        self._reader = reader
        self._advance = advance
        self._pieces: dict[MetadataIndex, Piece] = {}
        # DCP looks for a chunk first at the number that its index has.
        pieces = (piece for pieces in rewrite.files.values() for piece in pieces)
        regions = sorted((piece.key, piece.region) for piece in pieces if piece.region is not None)
        self._numbers = {
            each: number
            for _, same_key in itertools.groupby(regions, key=lambda each: each[0])
            for number, each in enumerate(same_key)
        }
        self._entries = {
            key: TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), [])
            for key, tensor in rewrite.tensors.items()
        }
        self._written = threading.local()
        self.stop = threading.Event()

    def plan_of(self, pieces: Sequence[Piece]) -> SavePlan:
        """Return the plan of a file."""
        plan = SavePlan([])
        for piece in pieces:
            item = WriteItem(MetadataIndex(piece.key), WriteItemType.BYTE_IO)
            if piece.region is not None:
                entry, chunk = self._entries[piece.key], ChunkStorageMetadata(*map(torch.Size, piece.region))
                index = MetadataIndex(piece.key, chunk.offsets, self._numbers[piece.key, piece.region])
                data = TensorWriteData(chunk, entry.properties, entry.size)
                item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
            self._pieces[item.index] = piece
            plan.items.append(item)
        return plan

    def metadata(self) -> Metadata:
        """Return the metadata of all plans."""
        for key, region in self._numbers:
            self._entries[key].chunks.append(ChunkStorageMetadata(*map(torch.Size, region)))
        objects = {key: BytesStorageMetadata() for key in self._rewrite.objects}
        return Metadata(state_dict_metadata={**objects, **self._entries}, planner_data=dict(self._rewrite.paths))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read the piece of an item of a plan.

        Torch's writer keeps the last tensor of each key until its file is closed: each is emptied before the next one.
        """
        storage: torch.UntypedStorage | None = vars(self._written).pop("storage", None)
        if storage is not None and storage.resizable():  # and no view of a mapped file
            storage.resize_(0)
        found = self.read(self._pieces[write_item.index])
        if not isinstance(found, Tensor):
            return io.BytesIO(found)
        self._written.storage = found.untyped_storage()
        return found

    def read(self, piece: Piece) -> Tensor | bytes | memoryview:
        """Read a piece."""
        if self.stop.is_set():
            raise CheckpointError("another file could not be written")
        found = piece.read(self._reader)
        self._advance(piece.nbytes)
        return found


class _Stream(io.BufferedWriter):
    """Writes a tensor of 128 MiB in slices that fit into caches: at once it takes three times as long."""

    def write(self, data: Any) -> int:
        view = memoryview(data)
        return sum(
            [super(_Stream, self).write(view[at : at + _SLICE_BYTES]) for at in range(0, len(view), _SLICE_BYTES)]
        )


class _Files(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with _Stream(io.FileIO(path, mode)) as stream:
            yield stream


class _Writer(FileSystemWriter):
    """Torch's writer, into a folder that is going to have another name."""

    destination = ""

    @property
    def checkpoint_id(self) -> str:
        """See :class:`FileSystemWriter`."""
        return self.destination


def save(rewrite: Rewrite, reader: ItemReader, folder: Path, destination: str, threads: int, advance: Advance) -> None:
    """Write all files of a checkpoint of DCP, and its metadata, or all files of safetensors."""
    planner = _Planner(rewrite, reader, advance)

    def write_safetensors(file: str) -> None:
        with (folder / file).open("wb") as stream:
            stream.write(rewrite.heads[file])
            for piece in rewrite.files[file]:
                values = planner.read(piece)
                assert isinstance(values, Tensor)
                stream.write(values.reshape(-1).view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())

    if rewrite.heads:
        _in_threads(write_safetensors, [*rewrite.files], threads, planner.stop)
        return
    writer = _Writer(folder, per_thread_copy_ahead=0)
    writer.destination, writer.fs = destination, _Files()
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(planner.plan_of(pieces)) for pieces in rewrite.files.values()]
    plans = writer.prepare_global_plan(plans)
    results = _in_threads(lambda plan: writer.write_data(plan, cast(Any, planner)).wait(), plans, threads, planner.stop)
    writer.finish(planner.metadata(), results)


def _in_threads(run: Callable[[Any], Any], things: Sequence[Any], threads: int, stop: threading.Event) -> list[Any]:
    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            return [*pool.map(run, things)]
        except BaseException:
            stop.set()
            raise


@contextlib.contextmanager
def appearing(destination: str) -> Iterator[Path]:
    """Give an empty folder that becomes ``destination`` at the end, and is gone after an error.

    Behind a URL, that is a temporary one, whose files are sent at the end, the metadata last.
    """
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
