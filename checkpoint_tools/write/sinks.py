"""Destinations of new files: a folder on this machine, or any place that fsspec knows.

A file is written in parts, in any order and by several threads, and closed once. Object storage takes a file only from
its start to its end, and only as a whole; files for it are made in a temporary folder, and sent when they are closed.
"""

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..core.errors import CheckpointError
from ..core.sizes import human_bytes
from ..stored.metadata import METADATA_FILE

_SENT_BYTES = 8 << 20  # at a time


class OpenFile:
    """A file to write to, for one thread."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY)

    def write(self, offset: int, content: Any) -> None:
        """Write all of ``content`` at ``offset``."""
        view = memoryview(content)
        while view:
            written = os.pwrite(self.descriptor, view, offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        """No more is written. Whether it is on the disk is another question: see :meth:`Sink.sync`."""
        os.close(self.descriptor)


class Sink(Protocol):
    """The files of a new checkpoint."""

    def prepare(self, file_bytes: Mapping[str, int]) -> None:
        """Before anything is written: all files and their lengths."""
        ...

    def open(self, file: str) -> OpenFile:
        """Open a file for writing; any thread may."""
        ...

    def sync(self, file: str) -> None:
        """Make what was written to the file safe on the disk."""
        ...

    def reopen(self, file: str) -> BinaryIO:
        """Open an unfinished file for reading."""
        ...

    def finish(self, file: str) -> None:
        """Declare the file complete."""
        ...

    def write_metadata(self, content: bytes, file: str = METADATA_FILE) -> None:
        """Write a whole file, safe on the disk; the metadata files come last of all."""
        ...


class LocalSink:
    """Files in a folder that is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self, file_bytes: Mapping[str, int]) -> None:
        """Reserve all disk space that is needed, so that a full disk is found now and not in an hour.

        Raises:
            OSError: there is not enough.
        """
        missing = sum(max(nbytes - _taken_bytes(self._folder / file), 0) for file, nbytes in file_bytes.items())
        free = shutil.disk_usage(self._folder).free
        if missing > free:
            room = f"{human_bytes(missing)} are needed, and {human_bytes(free)} are free"
            raise OSError(errno.ENOSPC, f"{room}; make room, or choose another disk")
        for file, nbytes in file_bytes.items():
            path = self._folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as stream:
                if nbytes:
                    _reserve(stream.fileno(), nbytes)

    def open(self, file: str) -> OpenFile:
        """See :class:`Sink`."""
        return OpenFile(self._folder / file)

    def sync(self, file: str) -> None:
        """See :class:`Sink`."""
        descriptor = os.open(self._folder / file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def reopen(self, file: str) -> BinaryIO:
        """See :class:`Sink`."""
        return (self._folder / file).open("rb")

    def finish(self, file: str) -> None:
        """See :class:`Sink`."""

    def write_metadata(self, content: bytes, file: str = METADATA_FILE) -> None:
        """See :class:`Sink`."""
        path = self._folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def _taken_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _reserve(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
    os.truncate(descriptor, nbytes)


_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class RemoteSink:
    """Files behind an fsspec URL, each sent as a whole when it is complete. The metadata are the last.

    Whoever writes there has a *claim*, a file with a name of its own. Two that begin at the same time both write one,
    and then both look: not before it is there. So at least one of them sees that it is not alone, and leaves. No more
    is asked of a storage than that a file that was written is listed.
    """

    def __init__(self, url: str, spool: Path) -> None:
        from fsspec.core import url_to_fs

        self._fs, self._root = url_to_fs(url)
        self._url = url
        self._spool = spool
        self._claim = f"{CLAIM_PREFIX}{uuid.uuid4().hex}"
        self._sent: dict[str, None] = {}  # what is there, or may be

    def claim(self) -> None:
        """Claim the place, so that nobody else writes there.

        Raises:
            CheckpointError: something is there already.
        """
        self._fs.makedirs(self._root, exist_ok=True)
        self._send(self._claim, b"somebody is writing a checkpoint here")
        others = [name for name in _names(self._fs, self._root) if name != self._claim]
        if others:
            raise CheckpointError(_taken(self._url, others))

    def prepare(self, file_bytes: Mapping[str, int]) -> None:
        """See :class:`Sink`."""

    def open(self, file: str) -> OpenFile:
        """See :class:`Sink`."""
        path = self._spool / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return OpenFile(path)

    def sync(self, file: str) -> None:
        """See :class:`Sink`. What is only sent need not be."""

    def reopen(self, file: str) -> BinaryIO:
        """See :class:`Sink`."""
        return (self._spool / file).open("rb")

    def finish(self, file: str) -> None:
        """See :class:`Sink`."""
        path = self._spool / file
        self._sent[file] = None
        self._make_folder_of(file)
        with path.open("rb") as source, self._fs.open(self._at(file), "wb") as target:
            while block := source.read(_SENT_BYTES):
                target.write(block)
        path.unlink()

    def write_metadata(self, content: bytes, file: str = METADATA_FILE) -> None:
        """See :class:`Sink`."""
        self._make_folder_of(file)
        self._send(file, content)

    def release(self) -> None:
        """Release the finished result to whoever finds it."""
        with contextlib.suppress(Exception):  # a claim that stays does no harm to what is complete
            self._fs.rm_file(self._at(self._claim))

    def remove(self) -> None:
        """Remove what this sink has sent, and nothing else; the claim last."""
        for name in sorted(self._sent, key=lambda name: name == self._claim):
            with contextlib.suppress(Exception):  # what is said is why it did not end well
                self._fs.rm_file(self._at(name))
        with contextlib.suppress(Exception):
            if not _names(self._fs, self._root):
                self._fs.rmdir(self._root)

    def _send(self, file: str, content: bytes) -> None:
        self._sent[file] = None
        with self._fs.open(self._at(file), "wb") as target:
            target.write(content)

    def _make_folder_of(self, file: str) -> None:
        if "/" in file:
            self._fs.makedirs(self._at(file.rpartition("/")[0]), exist_ok=True)

    def _at(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"


CLAIM_PREFIX = ".being-written-"


def _names(fs: Any, root: str) -> list[str]:
    """List what is there now, bypassing caches."""
    fs.invalidate_cache()
    return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(root, detail=False)]


def _taken(url: str, names: Sequence[str]) -> str:
    if any(name.startswith(CLAIM_PREFIX) for name in names):
        return (
            f"another process is writing to {url}, or was killed while it did: wait for it, remove what it has left, "
            "or give another name"
        )
    return f"{url} exists; give a name that is not taken, or remove it first"


def check_empty_remote(url: str) -> None:
    """Check that there is nothing at a URL yet.

    Raises:
        CheckpointError: there is, or it cannot be opened.
    """
    try:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(url)
        names = _names(fs, root) if fs.exists(root) else []
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url} cannot be opened ({error}); is the file system's package installed?") from error
    if names:
        raise CheckpointError(_taken(url, names))


@contextlib.contextmanager
def remote_sink(url: str) -> Iterator[RemoteSink]:
    """Hold a sink for a URL that nobody else writes to; on failure, remove what it has sent.

    Raises:
        CheckpointError: something is there already.
    """
    with tempfile.TemporaryDirectory(prefix="checkpoint-tools-") as spool:
        sink = RemoteSink(url, Path(spool))
        try:
            sink.claim()
            yield sink
        except BaseException:
            sink.remove()
            raise
        sink.release()
