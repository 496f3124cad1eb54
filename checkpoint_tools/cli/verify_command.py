"""The command verify."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import CheckpointError
from ..core.sizes import counted, human_bytes
from .command_options import Folder, Json, MaxMemory, Threads, parse_memory
from .output import progress, say, say_json, say_notes

if TYPE_CHECKING:  # when the command runs: torch takes longer than all that help and wrong options need
    from ..look.verify import Files
    from ..stored.reading import Checkpoint, CheckpointProblem


def verify_checkpoint(
    path: Folder,
    data: Annotated[
        bool, typer.Option("--data", help="Also read all data, and compare them with their CRC-32.")
    ] = False,
    finite: Annotated[
        bool, typer.Option("--finite", help="Also read floating-point data: no infinity, no NaN, and as written.")
    ] = False,
    list_to_check: Annotated[
        Path | None, typer.Option("--checksums", metavar="FILE", help="Also compare the files with this list.")
    ] = None,
    list_to_write: Annotated[
        Path | None,
        typer.Option("--write-checksums", metavar="FILE", help="Write such a list, if nothing is wrong."),
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Of the list to write: sha256 or blake2b.")] = "sha256",
    threads: Threads = 4,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    """List everything that is wrong with a checkpoint.

    It is whole if every element of every tensor is in exactly one chunk, all files are there and long enough, and every
    item in them is of the right shape and dtype, with all that is around the data as it was written. Whether the data
    are as written takes --data, which reads all of them. The lists are those of sha256sum and b2sum. Exit code: 0
    whole, 1 something is wrong, 2 it could not be checked.
    """
    memory_bytes = parse_memory(max_memory, threads, 2)
    if algorithm not in ("sha256", "blake2b"):
        raise CheckpointError(f"--algorithm is sha256 or blake2b, not {algorithm}")
    from ..look import checksums, verify
    from ..stored.opening import open_checkpoint

    expected = None if list_to_check is None else checksums.read_checksums(list_to_check)
    if list_to_write is not None and list_to_write.exists():
        raise CheckpointError(f"{list_to_write} exists; compare with it (--checksums), or remove it first")
    checkpoint = open_checkpoint(path)
    problems, found = verify.check_structure(checkpoint, threads)
    checked = ["structure", "files"]
    notes = [*found.notes]
    if finite:
        with progress("finite values", verify.finite_bytes(checkpoint)) as advance:
            problems += verify.check_finite(checkpoint, found.sound, threads, memory_bytes, advance)
        checked.append("finite values")
    if data:
        with progress("data", verify.data_bytes(checkpoint, found.sound)) as advance:
            problems += verify.check_data(checkpoint, found.sound, threads, advance)
        checked.append("data")
        notes += verify.notes_on_checksums(checkpoint)
    if expected is not None:
        with progress("checksums", found.nbytes) as advance:
            problems += checksums.check_checksums(checkpoint, *expected, found.sound, threads, advance)
        checked.append("checksums")
    problems = list(dict.fromkeys(problems))
    if list_to_write is not None and not problems:
        with progress("checksums", found.nbytes) as advance:
            files = checksums.files_of(checkpoint)
            digests = checksums.checksums_of(checkpoint, files, algorithm, threads, advance)  # type: ignore[arg-type]
        checksums.write_checksums(list_to_write, digests)
    _report(checkpoint, problems, found._replace(notes=tuple(notes)), checked, as_json)
    raise typer.Exit(1 if problems else 0)


def _report(
    checkpoint: "Checkpoint",
    problems: "Sequence[CheckpointProblem]",
    found: "Files",
    checked: Sequence[str],
    as_json: bool,
) -> None:
    if as_json:
        say_json(
            {
                "path": checkpoint.path,
                "whole": not problems,
                "checked": checked,
                "problems": [problem._asdict() for problem in problems],
                "notes": found.notes,
            }
        )
        return
    for where, text in problems:
        say(f"{where}: {text}")
    say_notes(found.notes)
    what = f"{counted(len(checkpoint.tensors), 'tensor')}, {counted(len(checkpoint.objects), 'object')}"
    result = counted(len(problems), "problem") if problems else "whole"
    if "data" not in checked:
        checked = [*checked, "not whether data are as written: see --data"]
    say(f"{checkpoint.path}: {result} ({what}, {human_bytes(found.nbytes)}; checked: {', '.join(checked)})")
