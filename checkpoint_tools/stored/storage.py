"""Folders of checkpoints: on a local disk, or behind any URL that fsspec knows.

``://`` in a path means a URL, as in the choice between DCP's ``FileSystemReader`` and ``FsspecReader``.
"""

import errno
import mmap
import os
import stat
import threading
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..core.text import CheckpointError, human_bytes

_SMALL_BYTES = 64 << 10  # ranges up to this size are read, larger ones are mapped
_OPEN_FILES = 8


class _Descriptor:
    """File descriptor that is closed when this object is freed."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class Folder:
    """Files of a local folder, addressed by their names in it. All methods may raise OSError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._path = Path(path)
        self._known = threading.local()  # each thread's open files: opening is slow on network disks

    def open(self, file: str) -> BinaryIO:
        """Open a file for reading, from the start."""
        return (self._path / file).open("rb")

    def size_bytes(self, file: str) -> int:
        """Return the length of a regular file."""
        found = (self._path / file).stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # opening a pipe would block
            raise OSError(errno.EINVAL, "it is no regular file", file)
        return found.st_size

    def files(self) -> list[str]:
        """List the files and subfolders of the folder, sorted; subfolders end in ``/``."""
        return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(self._path))

    def stamp(self, file: str) -> str:
        """Return a text that changes with the file: its length and modification time, or fsspec's ``ukey``."""
        found = (self._path / file).stat()
        return f"{found.st_size} {found.st_mtime_ns}"

    def view(self, file: str, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return a range of a file; a large one is mapped and takes no memory. Writes to it do not change the file."""
        known: dict[str, _Descriptor] = vars(self._known)
        if file not in known:
            self.size_bytes(file)  # raises for a pipe
            if len(known) >= _OPEN_FILES:
                del known[next(iter(known))]
            known[file] = _Descriptor(self._path / file)
        descriptor, end = known[file].number, offset_bytes + length_bytes
        if end > os.fstat(descriptor).st_size:
            raise OSError(errno.ENODATA, "it is cut short", file)
        if length_bytes <= _SMALL_BYTES:
            return memoryview(bytearray(os.pread(descriptor, length_bytes, offset_bytes)))
        begin = offset_bytes - offset_bytes % mmap.ALLOCATIONGRANULARITY
        # Map copy-on-write: torch has no read-only tensors.
        mapped = mmap.mmap(descriptor, end - begin, access=mmap.ACCESS_COPY, offset=begin)
        return memoryview(mapped)[offset_bytes - begin :]


class RemoteFolder(Folder):
    """A folder behind an fsspec URL."""

    def __init__(self, url: str) -> None:
        self.path = url
        try:
            from fsspec.core import url_to_fs

            self.fs, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url} cannot be opened ({error}); are fsspec, and the file system's package, installed?"
            ) from error

    def open(self, file: str) -> BinaryIO:  # noqa: D102
        return cast(BinaryIO, self.fs.open(self._at(file), "rb"))

    def size_bytes(self, file: str) -> int:  # noqa: D102
        return int(self.fs.size(self._at(file)))

    def files(self) -> list[str]:  # noqa: D102
        entries: list[dict[str, Any]] = self.fs.ls(self.root, detail=True)
        slashes = ("/" if entry["type"] == "directory" else "" for entry in entries)
        return sorted(
            entry["name"].rstrip("/").rsplit("/", 1)[-1] + end for entry, end in zip(entries, slashes, strict=True)
        )

    def stamp(self, file: str) -> str:  # noqa: D102
        return str(self.fs.ukey(self._at(file)))

    def view(self, file: str, offset_bytes: int, length_bytes: int) -> memoryview:  # noqa: D102
        if offset_bytes + length_bytes > self.size_bytes(file):
            raise OSError(errno.ENODATA, "it is cut short", file)
        return memoryview(bytearray(self.fs.cat_file(self._at(file), offset_bytes, offset_bytes + length_bytes)))

    def _at(self, file: str) -> str:
        return f"{self.root.rstrip('/')}/{file}"


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Open the folder at a local path or a URL."""
    given: object = path
    if not (isinstance(given, str | os.PathLike) and os.fspath(given)):
        raise CheckpointError(f"expected the folder of a checkpoint, or its fsspec URL, got {path!r:.60}")
    return RemoteFolder(path) if isinstance(path, str) and "://" in path else Folder(path)


def files_without_metadata(path: str | os.PathLike[str]) -> list[str]:
    """List the files of a folder; return an empty list if it does not exist, or has metadata of DCP."""
    try:
        files = open_folder(path).files()
    except OSError:
        return []
    return [] if ".metadata" in files else files


def read_file(folder: Folder, file: str, max_bytes: int) -> bytes:
    """Read a whole file; raise a FileNotFoundError or NotADirectoryError if there is none."""
    try:
        nbytes, content = folder.size_bytes(file), b""  # raises for a pipe, which would block when opened
        if nbytes <= max_bytes:
            with folder.open(file) as stream:
                content = stream.read()
        if max(nbytes, len(content)) > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {human_bytes(max_bytes)}", file)
        return content
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:  # ValueError: the name is impossible
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder.path}/{file} cannot be read: {why}") from error


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file, and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that ``torch.save`` writes."""


def is_file_of(path: str, suffixes: str | tuple[str, ...]) -> bool:
    """Tell whether a path is a file with one of ``suffixes``, not a folder."""
    return path.endswith(suffixes) and not Path(path).is_dir()
