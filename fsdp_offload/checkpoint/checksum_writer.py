"""Saves that leave a manifest of checksums beside the checkpoint.

::

    dcp.save ──▶ ChecksumWriter ──▶ FileSystemWriter ──▶ its file system, whose streams are listened to ──▶ files
                       │                                        │
                       └── finish: .checksums ◀── gathered ◀────┘  the directory of each item, as it passes

No byte is read again, and no collective is added: what each rank has to tell goes with the results of its writes.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import UnsupportedOperation
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .item_archive import crc32
from .manifest import MANIFEST_FILE, Item, manifest_bytes

_METADATA_FILE = ".metadata"
_KEPT_BYTES = 64 << 10  # of what was written last: the directory of an item is in it, but that of very many tensors
_END = struct.Struct("<4s4H2IH")  # of a zip file
_WIDE_BYTES = 56 + 20  # before it: the end with wide numbers, and where that is


class ChecksumWriter(StorageWriter):
    """A storage writer that leaves a manifest of checksums in the file ``.checksums``.

    ::

        dcp.save(state, storage_writer=ChecksumWriter(dcp.FileSystemWriter(path)))

    ``python -m checkpoint_tools verify --data`` then finds every bit that has changed, and files of another checkpoint
    that look the same; without a manifest it finds what has changed in the data, and not in the file ``.metadata``.

    Args:
        writer: that writes; also one of fsspec.

    Raises:
        TypeError: another kind of writer, whose files are not those of ``torch.save``.
        ValueError: it has extensions, which change what ``torch.save`` has written.
    """

    def __init__(self, writer: StorageWriter) -> None:
        if not isinstance(writer, FileSystemWriter) or isinstance(writer, HuggingFaceStorageWriter):
            raise TypeError(
                f"ChecksumWriter: expected a FileSystemWriter or one of fsspec, got a {type(writer).__name__}"
            )
        if getattr(getattr(writer, "transforms", None), "extensions", None):
            raise ValueError("ChecksumWriter: the writer has extensions, and its items no checksums; save without")
        self.writer = writer
        if not isinstance(writer.fs, _ListeningFileSystem):
            writer.fs = _ListeningFileSystem(writer.fs)  # type: ignore[assignment]
        self._fs: _ListeningFileSystem = writer.fs  # type: ignore[assignment]

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's address; shown in DCP's own log."""
        return self.writer.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """As ``FileSystemWriter``."""
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another save begins."""
        self.writer.reset(checkpoint_id)
        self._fs.streams.clear()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the writer. A manifest that is there is that of another save.

        Raises:
            ValueError: each rank is to write metadata of its own, which no manifest tells of.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError("ChecksumWriter: use_collectives=False leaves no .metadata for a manifest to tell of")
        self.writer.set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator and self._fs.exists(self._manifest_path()):
            self._fs.rm_file(self._manifest_path())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the writer."""
        return self.writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the writer."""
        return self.writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the writer; with each result travels the checksum of the item's directory."""
        results = self.writer.write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([replace(result, storage_data=self._with_crc(result.storage_data)) for result in results])
        return future

    def _with_crc(self, info: Any) -> "_Written":
        path = self._fs.concat_path(self.writer.path, info.relative_path)
        crc = self._fs.streams[str(path)].directory_crcs.get(info.offset + info.length)
        if crc is None:
            raise RuntimeError(
                f"ChecksumWriter: what was written to {path} at {info.offset} is no file of torch.save; save without"
            )
        return _Written(info, crc)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the writer, and then the manifest."""
        files: dict[str, list[Item]] = {}
        plain = []
        for of_rank in results:
            plain.append([replace(result, storage_data=result.storage_data.info) for result in of_rank])
            for result in of_rank:
                info, crc = result.storage_data
                files.setdefault(info.relative_path, []).append(Item(info.offset, info.length, crc))
        self.writer.finish(metadata, plain)
        content = self._fs.streams[self._metadata_stream()].content
        with self._fs.create_stream(self._manifest_path(), "wb") as stream:
            stream.write(manifest_bytes(bytes(content), {file: list(set(items)) for file, items in files.items()}))
            if self.writer.sync_files:
                with suppress(AttributeError, UnsupportedOperation):  # only files of this machine have a number
                    stream.flush()
                    os.fsync(stream.fileno())
        self._fs.streams.clear()

    def storage_meta(self) -> StorageMeta | None:
        """As the writer."""
        return self.writer.storage_meta()

    def _manifest_path(self) -> str | os.PathLike[str]:
        return self._fs.concat_path(self.writer.path, MANIFEST_FILE)

    def _metadata_stream(self) -> str:
        """The path through which the writer has written ``.metadata``: it renames the file afterwards."""
        return next(path for path in reversed(self._fs.streams) if _METADATA_FILE in path.rpartition("/")[2])


class _Written(NamedTuple):
    """A rank's word on an item: the writer's own word, and the checksum of its directory."""

    info: Any
    directory_crc: int


class _ListeningFileSystem(FileSystemBase):
    """A writer's file system that remembers of its streams what a manifest needs."""

    def __init__(self, fs: FileSystemBase) -> None:
        self._fs = fs
        self.streams: dict[str, _ListeningStream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)  # what some file systems have beside what all have

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """As the file system."""
        with self._fs.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            self.streams[str(path)] = listening = _ListeningStream(
                stream, keeps_all=_METADATA_FILE in os.path.basename(path)
            )
            yield listening

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        """As the file system."""
        return self._fs.concat_path(path, suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """As the file system."""
        self._fs.rename(path, new_path)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """As the file system."""
        return self._fs.init_path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """As the file system."""
        self._fs.mkdir(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """As the file system."""
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """As the file system."""
        return self._fs.exists(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """As the file system."""
        self._fs.rm_file(path)


class _ListeningStream:
    """A stream that is written from its start to its end, by one thread.

    Attributes:
        directory_crcs: by where they end: the checksums of the directories that were written.
        content: all of it, if that was asked for.
    """

    def __init__(self, stream: Any, *, keeps_all: bool) -> None:
        self._stream = stream
        self._keeps_all = keeps_all
        self._at = 0
        self.content = bytearray()  # of what was written last
        self.directory_crcs: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        written = self._stream.write(content)
        self._at += len(view)
        if self._keeps_all:
            self.content += view
            return int(written)
        if len(view) >= _KEPT_BYTES:
            self.content = bytearray(view[-_KEPT_BYTES:])
        else:
            self.content += view
            del self.content[:-_KEPT_BYTES]
        # The end of a zip file is written by itself, or with the rest of a small file.
        if self.content[-_END.size : 4 - _END.size] == b"PK\5\6":
            self._note_directory(view)
        return int(written)

    def _note_directory(self, view: memoryview) -> None:
        *_, size, _, comment = _END.unpack(self.content[-_END.size :])
        wide = self.content[-_END.size - _WIDE_BYTES : -_END.size]
        size += _END.size + (_WIDE_BYTES if wide.startswith(b"PK\6\6") else 0)
        last = self.content if size <= len(self.content) else view
        if not comment and size <= len(last):
            self.directory_crcs[self._at] = crc32(bytes(last[-size:]))
