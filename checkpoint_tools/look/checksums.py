"""Checksums of the files of a checkpoint, in the format of ``sha256sum`` and ``b2sum``.

::

    5f70bf18a0860070b6a1ae7e6b6a09ed1f0d2c3d...  .metadata
    9d5e1b2c7a88f6e3c1d0b4a59687786950413223...  __0_0.distcp

So they can also be checked without Python: ``cd CHECKPOINT && sha256sum --check FILE``.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from ..core.errors import CheckpointError
from ..stored.manifest import MANIFEST_FILE
from ..stored.metadata import METADATA_FILE
from ..stored.reading import Checkpoint, CheckpointProblem

Algorithm = Literal["sha256", "blake2b"]

_BLOCK_BYTES = 4 << 20
_ALGORITHM_OF_LENGTH: Mapping[int, Algorithm] = {64: "sha256", 128: "blake2b"}  # hexadecimal digits


def files_of(checkpoint: Checkpoint) -> list[str]:
    """List all files that belong to a checkpoint, the metadata first."""
    manifest = [] if checkpoint.manifest is None else [MANIFEST_FILE]
    return [METADATA_FILE, *manifest, *checkpoint.items_by_file()]


def checksums_of(
    checkpoint: Checkpoint,
    files: Iterable[str],
    algorithm: Algorithm = "sha256",
    threads: int = 4,
    advance: Callable[[int], object] = lambda done: None,
) -> dict[str, str]:
    """File → hexadecimal checksum.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def digest(file: str) -> tuple[str, str]:
        state = hashlib.new(algorithm)
        try:
            with checkpoint.folder.open(file) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    state.update(block)
                    advance(len(block))
        except OSError as error:
            raise CheckpointError(f"{checkpoint.path}/{file} cannot be read: {error}") from error
        return file, state.hexdigest()

    with ThreadPoolExecutor(max_workers=threads) as pool:
        return dict(pool.map(digest, files))


def write_checksums(path: Path, checksums: Mapping[str, str]) -> None:
    """Write the list; the file appears only when it is complete.

    Raises:
        CheckpointError: it exists, or cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    try:
        if path.exists():
            raise CheckpointError(f"{path} exists; compare with it (--checksums), or remove it first")
        unfinished.write_text("".join(f"{digest}  {file}\n" for file, digest in checksums.items()), encoding="utf-8")
        unfinished.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def read_checksums(path: Path) -> tuple[Algorithm, dict[str, str]]:
    """Read a list: its algorithm, and file → checksum.

    Raises:
        CheckpointError: it cannot be read, or is no such list.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    checksums = {}
    for line in lines:
        digest, _, file = line.partition(" ")
        if len(file) < 2 or file[0] not in " *" or len(digest) not in _ALGORITHM_OF_LENGTH:
            raise CheckpointError(f"{path} is no list of checksums as sha256sum or b2sum write it, at {line[:80]!r}")
        checksums[file[1:].removeprefix("./")] = digest.lower()
    algorithms = {_ALGORITHM_OF_LENGTH[len(digest)] for digest in checksums.values()}
    if len(algorithms) != 1:
        raise CheckpointError(f"{path} has {'no checksums' if not algorithms else 'checksums of two kinds'}")
    return algorithms.pop(), checksums


def check_checksums(
    checkpoint: Checkpoint,
    algorithm: Algorithm,
    expected: Mapping[str, str],
    readable: Iterable[str],
    threads: int = 4,
    advance: Callable[[int], object] = lambda done: None,
) -> list[CheckpointProblem]:
    """Compare the files with a list.

    Args:
        checkpoint: whose files are compared.
        algorithm: of the list.
        expected: file → checksum.
        readable: the files that can be read; those that are missing are somebody else's problem.
        threads: how many files are read at the same time.
        advance: is told how many bytes were read.
    """
    files = [file for file in files_of(checkpoint) if file in {METADATA_FILE, MANIFEST_FILE, *readable}]
    problems = [
        CheckpointProblem(file, "is in the list of checksums, but not in the checkpoint")
        for file in expected
        if file not in files_of(checkpoint)
    ]
    problems += [CheckpointProblem(file, "is not in the list of checksums") for file in files if file not in expected]
    found = checksums_of(checkpoint, [file for file in files if file in expected], algorithm, threads, advance)
    return problems + [
        CheckpointProblem(file, f"has another {algorithm} checksum: its bytes have changed since the list was written")
        for file, digest in found.items()
        if digest != expected[file]
    ]
