"""A folder in a tmpfs with what one rank needs to be recovered: its homes, their layout, and records of commits.

::

    folder/rank-00000/layout.json              names, shapes, offsets and versions that must be the same again
                      homes-1-0, homes-1-1     homes of an arena, and their spare homes; device-0, -1: other parameters
                      commit-00000041          which of the two files commit 41 is in, and all small values
                      lock                     held by the process that trains
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_IN_MEMORY = {"tmpfs", "ramfs"}
_held: set[Path] = set()
"""Folders that this process has locked: a second lock of the same process would be granted."""


def newest_commit(folder: str | os.PathLike[str]) -> int | None:
    """Return the number of the newest commit that all ranks of this host have in ``folder``; ``None`` without one.

    With ranks on several hosts, each with its own folder, give :func:`recover` the smallest number of all hosts.

    Raises:
        RuntimeError: there are commits, and folders of more or fewer ranks than made them.
    """
    ranks = [RankFolder(path) for path in Path(folder).glob("rank-*")]
    layouts = [one.layout() for one in ranks]
    commits = [set(one.commits()) for one in ranks]
    if None in layouts or not any(commits):
        return None
    if (wanted := {layout["ranks_here"] for layout in layouts if layout}) != {len(ranks)}:
        raise RuntimeError(
            f"{folder} has commits of a run with {min(wanted)} ranks on this host, and folders of {len(ranks)}: it was "
            "changed, or LOCAL_WORLD_SIZE was not set as torchrun does. Put back what is missing and move away what "
            "another run has left; or delete all of it to begin anew."
        )
    return max(set.intersection(*commits), default=None)


class RankFolder:
    """The folder of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def layout(self) -> dict[str, Any] | None:
        """Read the layout; ``None`` if there is none, or it was not written to its end."""
        try:
            found: dict[str, Any] = json.loads((self.path / "layout.json").read_text())
        except (OSError, ValueError):
            return None
        return found

    def commits(self) -> list[int]:
        """List the numbers of commits that were written to their end."""
        return sorted(int(path.name.removeprefix("commit-")) for path in self.path.glob("commit-" + 8 * "[0-9]"))

    # For the process that trains --------------------------------------------------------------------------------------

    def hold(self, ranks: int) -> None:
        """Make this rank's folder, one of ``ranks``, if there is none; lock it until :meth:`leave` or the process ends.

        Raises:
            ValueError: the folder is not in memory.
            RuntimeError: another process, or another optimizer of this one, has locked it; or another user owns it; or
                there are folders of more ranks.
        """
        names = {path.name for path in self.path.parent.glob("rank-*")}
        if more := sorted(names - {f"rank-{rank:05d}" for rank in range(ranks)}):
            raise RuntimeError(
                f"{self.path.parent} has {more[0]} of a run with more ranks than {ranks}. Delete that folder, or give "
                "another one."
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = self.path.resolve()
        if (kind := _file_system_of(where)) not in _IN_MEMORY:
            raise ValueError(
                f"{self.path} is on {kind}, and homes have to lie in memory. Give a folder of a tmpfs, such as one in "
                "/dev/shm."
            )
        if self.path.stat().st_uid != os.geteuid():
            raise RuntimeError(f"{self.path} belongs to another user, whose files are not read. Give another folder.")
        # Not flock: a child of fork, such as a DataLoader's worker, would hold it after this process was killed.
        lock = None
        try:
            if where in _held:
                raise BlockingIOError
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if lock is not None:
                os.close(lock)
            raise RuntimeError(
                f"{self.path} is in use: another run trains in it, or another optimizer. Give each a folder of its "
                "own, or call close() of the one before, in a notebook, with deletes=False."
            ) from None
        self._lock = lock
        _held.add(where)

    def leave(self, *, deletes: bool) -> None:
        """Unlock the folder; with ``deletes``, delete it and its files. Mapped homes stay until they are unmapped."""
        if self._lock is not None:
            if deletes:
                self.clear()
                shutil.rmtree(self.path, ignore_errors=True)
            _held.discard(self.path.resolve())
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Delete all but the lock; commits first, so that none is left without its homes."""
        self.prune()
        for path in self.path.iterdir():
            if path.name != "lock":
                path.unlink()

    def write_layout(self, layout: Mapping[str, Any]) -> None:
        """Write ``layout``, after which commits may follow."""
        with self._writing("layout.json") as path:
            path.write_text(json.dumps(layout))

    def write(self, number: int, record: object) -> None:
        """Write a commit atomically: its file has its name only when it is complete."""
        with self._writing(f"commit-{number:08d}") as path:
            torch.save(record, path)

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        path = self.path / f"new-{name}"
        yield path
        path.rename(self.path / name)

    def read(self, number: int) -> dict[str, Any]:
        """Read the record of a commit, which this user has written."""
        found: dict[str, Any] = torch.load(self.path / f"commit-{number:08d}", weights_only=False)
        return found

    def prune(self, keeps: Container[int] = ()) -> None:
        """Delete all commits but those whose number it ``keeps``."""
        for number in self.commits():
            if number not in keeps:
                (self.path / f"commit-{number:08d}").unlink()

    @contextmanager
    def file(self, name: str, nbytes: int, *, makes: bool) -> Iterator[int]:
        """Open a file of ``nbytes`` for the block; with ``makes``, create the file first, all zeros.

        Raises:
            FileNotFoundError: without ``makes``: there is no such file.
            ValueError: without ``makes``: the file has another size.
            MemoryError: the block found no room for the file's bytes.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if makes else 0)
        descriptor = os.open(self.path / name, flags, 0o600)
        try:
            if makes:
                os.ftruncate(descriptor, nbytes)  # the file's pages are made where it is mapped, by many threads
            elif (there_bytes := os.fstat(descriptor).st_size) != nbytes:
                raise ValueError(
                    f"{self.path / name} has {there_bytes} bytes, not {nbytes}: it is not what was written."
                )
            yield descriptor
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            free_bytes = free_bytes_at(self.path)
            raise MemoryError(f"{self.path}: no room for {nbytes} bytes more, {free_bytes} are free.") from None
        finally:
            os.close(descriptor)


def free_bytes_at(path: Path) -> int:
    """Return the bytes that may be written into the file system of ``path``, or of its nearest parent that exists."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def _file_system_of(path: Path) -> str:
    """Return the type of the file system on which ``path`` lies."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    below = [(where, kind) for where, kind in mounts if path.is_relative_to(where.replace("\\040", " "))]
    return max(below, key=lambda one: len(one[0]), default=("", "an unknown file system"))[1]
