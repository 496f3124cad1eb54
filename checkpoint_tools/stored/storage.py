"""The folder of a checkpoint: on a local disk, or behind any URL that fsspec knows.

The same two ways as DCP's ``FileSystemReader`` and ``FsspecReader``, and the same rule for which it is: ``://``.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from ..core.errors import CheckpointError
from ..core.sizes import human_bytes


class Folder(Protocol):
    """Files by their name relative to the checkpoint."""

    path: str

    def open(self, file: str) -> BinaryIO:
        """Open a file for reading, from the start.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it cannot be opened.
        """
        ...

    def size_bytes(self, file: str) -> int:
        """Return the length of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        ...

    def files(self) -> list[str]:
        """List what lies directly in the folder, sorted; folders end in ``/``."""
        ...

    def stamp(self, file: str) -> str:
        """Return the file's length and, if known, its time: a change of the file changes this.

        Raises:
            OSError: there is no such file, or it cannot be looked at.
        """
        ...


class LocalFolder:
    """A folder on this machine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._path = Path(path)

    def open(self, file: str) -> BinaryIO:
        """See :class:`Folder`."""
        return (self._path / file).open("rb")

    def size_bytes(self, file: str) -> int:
        """See :class:`Folder`."""
        found = (self._path / file).stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe would be waited for
            raise OSError(errno.EINVAL, "it is no regular file", file)
        return found.st_size

    def files(self) -> list[str]:
        """See :class:`Folder`."""
        return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(self._path))

    def stamp(self, file: str) -> str:
        """See :class:`Folder`."""
        found = (self._path / file).stat()
        return f"{found.st_size} {found.st_mtime_ns}"


class RemoteFolder:
    """A folder behind an fsspec URL."""

    def __init__(self, url: str) -> None:
        self.path = url
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise CheckpointError(
                f"{url} is a URL, and those need fsspec: pip install 'fsdp-offload[tools]'"
            ) from error
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url} cannot be opened ({error}); is the file system's package installed?"
            ) from error

    def open(self, file: str) -> BinaryIO:
        """See :class:`Folder`."""
        return cast(BinaryIO, self._fs.open(self._at(file), "rb"))

    def size_bytes(self, file: str) -> int:
        """See :class:`Folder`."""
        return int(self._fs.size(self._at(file)))

    def files(self) -> list[str]:
        """See :class:`Folder`."""
        entries: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
        names = (entry["name"].rstrip("/").rsplit("/", 1)[-1] + _slash(entry) for entry in entries)
        return sorted(names)

    def stamp(self, file: str) -> str:
        """See :class:`Folder`."""
        found: dict[str, Any] = self._fs.info(self._at(file))
        times = [found[name] for name in ("mtime", "LastModified", "updated", "created") if name in found]
        return f"{found.get('size')} {times[:1]} {found.get('ETag', '')}"

    def _at(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"


def _slash(entry: dict[str, Any]) -> str:
    return "/" if entry["type"] == "directory" else ""


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Open the folder at a local path or a URL.

    Raises:
        CheckpointError: a URL that nothing here can open.
    """
    return RemoteFolder(path) if isinstance(path, str) and "://" in path else LocalFolder(path)


def read_small(folder: Folder, file: str, max_bytes: int) -> bytes:
    """Read a file that lies beside the data, up to the most that its reader looks at.

    Raises:
        OSError: there is no such file, it cannot be read, or has more than ``max_bytes``.
    """
    if folder.size_bytes(file) > max_bytes:  # which also says whether opening it can take forever
        raise OSError(errno.EFBIG, f"it has more than {human_bytes(max_bytes)}", file)
    with folder.open(file) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {human_bytes(max_bytes)}", file)
    return content


class Window(io.RawIOBase):
    """A byte range of an open file, as a file of its own, for one thread at a time.

    Attributes:
        offset_bytes: where in the file it begins.
        length_bytes: how long it is.
    """

    def __init__(self, stream: BinaryIO, offset_bytes: int, length_bytes: int) -> None:
        self._stream = stream
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position from the start of the range."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Also past the end, as in any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length_bytes}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Up to the end of the range."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length_bytes - self._at))
        self._stream.seek(self.offset_bytes + self._at)
        # Both open() and fsspec give a readinto; what typing calls BinaryIO does not.
        got: int = self._stream.readinto(view[:count])  # type: ignore[attr-defined]
        self._at += got
        return got


def read_into(stream: BinaryIO | Window, view: memoryview) -> int:
    """Fill ``view`` from where the stream is; fewer bytes are returned only at its end."""
    done = 0
    while done < len(view):
        got: int = stream.readinto(view[done:])  # type: ignore[union-attr]  # see Window.readinto
        if not got:
            break
        done += got
    return done
