"""The folder beside a new checkpoint in which it is made, so that it appears only when it is complete.

::

    DST.partial/lock          held by the process that writes
    DST.partial/journal       what is made of what, and which units are safe on the disk
    DST.partial/checkpoint/   the files; becomes DST at the end, in one step

Whoever runs the same command after a kill finds the journal, and goes on with the units that are not in it.
"""

import contextlib
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.errors import CheckpointError


class Filled(NamedTuple):
    """A stretch of an item's elements that was written, from a position in bytes; and its checksum."""

    item: int
    start: int
    length: int
    crc: int


class Partial:
    """One process's hold on such a folder. Make it with :func:`open_partial`."""

    def __init__(self, destination: Path, folder: Path, done: dict[int, list[Filled]]) -> None:
        self._destination = destination
        self.folder = folder
        self.done = done
        """The units that are safe on the disk, by number."""
        self.files = folder / "checkpoint"
        self.is_of_use = bool(done)
        """True if a later run can continue from what is here."""

    def record(self, unit: int, filled: Sequence[Filled]) -> None:
        """Record that a unit is safe. Only one thread at a time may call this."""
        line = json.dumps([unit, filled]) + "\n"
        with (self.folder / "journal").open("a", encoding="utf-8") as journal:
            journal.write(line)
        self.is_of_use = True

    def publish(self) -> None:
        """Make the checkpoint appear. Everything in it must be safe on the disk.

        Raises:
            CheckpointError: something else has appeared there meanwhile.
        """
        sync_folder(self.files)
        if os.path.lexists(self._destination):
            raise CheckpointError(f"{self._destination} has appeared meanwhile; move it away, and run this again")
        self.files.rename(self._destination)
        sync_folder(self._destination.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def open_partial(destination: Path, fingerprint: Mapping[str, object], *, restart: bool = False) -> Iterator[Partial]:
    """Begin to make ``destination``, or go on with it.

    Args:
        destination: it must not exist.
        fingerprint: of everything that the result depends on, so that nobody goes on with something else.
        restart: begin anew, whatever is there.

    Raises:
        CheckpointError: another process is at it, or what is there was begun with something else.
    """
    folder = partial_of(destination)
    with locked_folder(folder):
        if restart:
            _empty(folder)
        done = _journal(folder, fingerprint)
        (folder / "checkpoint").mkdir(exist_ok=True)
        yield Partial(destination, folder, done)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder that no other process holds, made if it is not there.

    Raises:
        CheckpointError: another one has it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=False, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror or error}") from error
    try:
        _take(lock, folder)
        yield
    finally:
        os.close(lock)


def partial_of(destination: Path) -> Path:
    """Return the partial folder of a destination."""
    return destination.with_name(f"{destination.name}.partial")


def steps_beside(destination: Path) -> list[Path]:
    """List the folders in which renames have kept what is between their steps."""
    return sorted(destination.parent.glob(f"{glob.escape(destination.name)}.steps-*"))


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one who had it may have finished, and removed it with the folder.
        is_ours = os.path.samestat(os.fstat(lock), os.stat(folder / "lock"))
    except OSError:
        is_ours = False
    if not is_ours:
        raise CheckpointError(f"another process is writing to {folder}; wait for it, or end it")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    (folder / "journal").unlink(missing_ok=True)


def _journal(folder: Path, fingerprint: Mapping[str, object]) -> dict[int, list[Filled]]:
    """Read the units that are done; begin a journal if there is none."""
    path = folder / "journal"
    if not (folder / "checkpoint").is_dir():  # not begun; or published, and killed before this was removed
        path.unlink(missing_ok=True)
    header = json.dumps(fingerprint, sort_keys=True)
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    whole = lines[:-1]  # after the last line there is nothing, or a line that a kill has cut off
    if not whole:
        if any(name not in ("lock", "journal") for name in os.listdir(folder)):
            raise CheckpointError(f"{folder} is there, and not of this command; remove it, or pass --restart")
        path.write_text(header + "\n", encoding="utf-8")
        return {}
    if whole[0] != header:
        raise CheckpointError(
            f"{folder} was begun with another source, rules or version; remove it, or pass --restart to begin anew"
        )
    if lines[-1]:
        path.write_text("\n".join([*whole, ""]), encoding="utf-8")
    return {unit: [Filled(*each) for each in filled] for unit, filled in map(json.loads, whole[1:])}


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
