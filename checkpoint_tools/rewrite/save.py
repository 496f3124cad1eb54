"""Write a new checkpoint in a folder beside its place, which takes its name at the end.

::

    Rewrite ──torch.save of each piece──▶ DST.partial/ ──rename──▶ DST

DST is there as a whole or not at all. What a killed process has left in DST.partial, the next one removes.
"""

import contextlib
import errno
import fcntl
import io
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..core.regions import TensorRegion
from ..core.text import CheckpointError
from ..look.verify import Advance
from ..stored.items import ItemReader
from ..stored.metadata import METADATA_FILE
from ..stored.storage import RemoteFolder, write_file
from .rewrite_plan import Piece, Rewrite

_SLICE_BYTES = 1 << 20
_MARK = ".being-written"  # in a partial folder: it is one of these tools

_Place = tuple[str, TensorRegion | None, _StorageInfo]
"""The key and the rectangle of a piece, and where it was written."""


class _Stream(io.BufferedWriter):
    """Writes a tensor of 128 MiB in slices that fit into caches: at once it takes three times as long."""

    def write(self, data: Any) -> int:
        view = memoryview(data)
        return sum(
            [super(_Stream, self).write(view[at : at + _SLICE_BYTES]) for at in range(0, len(view), _SLICE_BYTES)]
        )


def save(rewrite: Rewrite, reader: ItemReader, folder: Path, destination: str, threads: int, advance: Advance) -> None:
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


def _metadata(rewrite: Rewrite, places: list[_Place], destination: str) -> Metadata:
    entries = {
        key: TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), [])
        for key, tensor in rewrite.tensors.items()
    }
    # DCP looks for a chunk first at the number that its index has.
    stored = {MetadataIndex(key): info for key, region, info in places if region is None}
    regions = {(key, region): info for key, region, info in places if region is not None}
    for key, region in sorted(regions):
        chunk, chunks = ChunkStorageMetadata(*map(torch.Size, region)), entries[key].chunks
        stored[MetadataIndex(key, chunk.offsets, len(chunks))] = regions[key, region]
        chunks.append(chunk)
    return Metadata(
        {**{key: BytesStorageMetadata() for key in rewrite.objects}, **entries},
        planner_data=dict(rewrite.paths),
        storage_data=stored,
        storage_meta=StorageMeta(destination),
        version=CURRENT_DCP_VERSION,
    )


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
