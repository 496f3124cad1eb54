"""Command line of the checkpoint tools."""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

try:
    import rich.console
    import rich.progress
    import typer
except ImportError:
    sys.exit("The checkpoint tools need the extra 'tools': pip install 'fsdp-offload[tools]'")

from . import checksums, diff, inspect, tiling, verify
from .errors import CheckpointError
from .reading import Checkpoint, Problem, open_checkpoint
from .sizes import human_bytes, parse_bytes

TROUBLE = 2
"""Exit code where a question has no answer: also that of wrong options, and as diff(1) has it."""

INTERRUPTED = 130

app = typer.Typer(
    help="Look into checkpoints of torch.distributed.checkpoint, check them and compare them. No GPU is needed, and "
    "nothing that a checkpoint contains is run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Folder = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder with a .metadata file, or its fsspec URL.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with all sizes in bytes.")]
Threads = Annotated[int, typer.Option(min=1, help="How many files are read at the same time.")]
MaxMemory = Annotated[str, typer.Option(metavar="SIZE", help="For data, over all threads: 512MiB, 2GiB, bytes.")]

Command = TypeVar("Command", bound=Callable[..., None])


@app.callback()
def _tools() -> None:
    pass


def command(name: str) -> Callable[[Command], Command]:
    """Make a function a command whose errors are one line on standard error."""

    def register(run: Command) -> Command:
        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                run(*args, **kwargs)
            except CheckpointError as error:
                _fail(str(error))
            except BrokenPipeError:
                raise  # the reader of our output has left; the command line knows
            except OSError as error:
                _fail(str(error))
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None  # 1 would say that something is different, or not whole

        app.command(name)(guarded)
        return run

    return register


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(TROUBLE)


# --- commands --------------------------------------------------------------------------------------------------------


@command("inspect")
def inspect_main(
    path: Folder,
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="PATTERN", help="Only keys like these: '*.weight' 'optim.*'.")
    ] = None,
    groups: Annotated[bool, typer.Option("--groups", help="Only the totals by group, without each key.")] = False,
    files: Annotated[bool, typer.Option("--files", help="Also the files, and which rank wrote each of them.")] = False,
    tiling_key: Annotated[
        str | None, typer.Option("--tiling", metavar="KEY", help="Draw which file has which part of this tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List keys, shapes, dtypes, chunks and sizes. Only the metadata are read."""
    checkpoint = open_checkpoint(path)
    if tiling_key is not None:
        _show_tiling(checkpoint, tiling_key, as_json)
        return
    summary = inspect.summarize(checkpoint, patterns or ())
    if patterns and not summary.keys:
        raise CheckpointError(f"no key of {path} is like {' or '.join(patterns)}; without a pattern, all are listed")
    if as_json:
        _print_json(inspect.as_json(summary))
    else:
        _console().print(inspect.as_tables(summary, keys=not groups, files=files))


def _show_tiling(checkpoint: Checkpoint, key: str, as_json: bool) -> None:
    if key not in checkpoint.tensors:
        what = "an object, and in one piece" if key in checkpoint.objects else "not in the checkpoint"
        raise CheckpointError(f"{key} is {what}; give the key of a tensor, as inspect lists them")
    tensor = checkpoint.tensors[key]
    if as_json:
        chunks = [chunk._asdict() for chunk in tensor.chunks]
        _print_json({"key": key, "shape": tensor.shape, "dtype": str(tensor.dtype)[6:], "chunks": chunks})
    else:
        _console().print(tiling.as_picture(tensor, tiling.tile(tensor)))


@command("verify")
def verify_main(
    path: Folder,
    finite: Annotated[bool, typer.Option("--finite", help="Also read all data: no infinity, no NaN.")] = False,
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
    item in them is of the right shape and dtype. Data are only read for --finite and checksums. The lists are those of
    sha256sum and b2sum. Exit code: 0 whole, 1 something is wrong, 2 it could not be checked.
    """
    memory_bytes = parse_bytes(max_memory)
    if algorithm not in ("sha256", "blake2b"):
        raise CheckpointError(f"--algorithm is sha256 or blake2b, not {algorithm}")
    expected = None if list_to_check is None else checksums.read_checksums(list_to_check)
    if list_to_write is not None and list_to_write.exists():
        raise CheckpointError(f"{list_to_write} exists; compare with it (--checksums), or remove it first")
    checkpoint = open_checkpoint(path)
    problems, found = verify.check_structure(checkpoint, threads)
    checked = ["structure", "files"]
    if finite:
        with _progress("finite values", verify.finite_bytes(checkpoint)) as advance:
            problems += verify.check_finite(checkpoint, found.sound, threads, memory_bytes, advance)
        checked.append("finite values")
    if expected is not None:
        with _progress("checksums", found.nbytes) as advance:
            problems += checksums.check_checksums(checkpoint, *expected, found.sound, threads, advance)
        checked.append("checksums")
    problems = list(dict.fromkeys(problems))
    if list_to_write is not None and not problems:
        with _progress("checksums", found.nbytes) as advance:
            files = checksums.files_of(checkpoint)
            digests = checksums.checksums_of(checkpoint, files, algorithm, threads, advance)  # type: ignore[arg-type]
        checksums.write_checksums(list_to_write, digests)
    _report(checkpoint, problems, found, checked, as_json)
    raise typer.Exit(1 if problems else 0)


def _report(
    checkpoint: Checkpoint, problems: Sequence[Problem], found: verify.Files, checked: Sequence[str], as_json: bool
) -> None:
    if as_json:
        _print_json(
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
        typer.echo(f"{where}: {text}")
    for note in found.notes:
        typer.echo(f"note: {note}")
    what = f"{inspect.counted(len(checkpoint.tensors), 'tensor')}, {inspect.counted(len(checkpoint.objects), 'object')}"
    result = inspect.counted(len(problems), "problem") if problems else "whole"
    typer.echo(f"{checkpoint.path}: {result} ({what}, {human_bytes(found.nbytes)}; checked: {', '.join(checked)})")


@command("diff")
def diff_main(
    path_a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its folder or its fsspec URL.")],
    path_b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="PATTERN", help="Only keys like these: '*.weight' 'optim.*'.")
    ] = None,
    rtol: Annotated[float, typer.Option(min=0, help="Values may differ by this much of B's.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Values may differ by this much.")] = 0.0,
    threads: Annotated[int, typer.Option(min=1, help="How many keys are compared at the same time.")] = 2,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    """Compare keys, shapes, dtypes and values of two checkpoints.

    Values are compared bit by bit unless a tolerance is given. How tensors are divided into chunks is no difference.
    Exit code: 0 the same, 1 different, 2 it could not be found out.
    """
    memory_bytes = parse_bytes(max_memory)
    first, second = open_checkpoint(path_a), open_checkpoint(path_b)
    keys = [key for key in diff.all_keys(first, second) if inspect.matches(key, patterns or ())]
    if patterns and not keys:
        raise CheckpointError(f"no key of either is like {' or '.join(patterns)}; see the command inspect")
    with _progress("values", diff.bytes_to_compare(first, second, keys)) as advance:
        differences = diff.diff(first, second, keys, diff.Tolerance(rtol, atol), memory_bytes, threads, advance)
    if as_json:
        _print_json({"a": path_a, "b": path_b, "keys": len(keys), "differences": [d._asdict() for d in differences]})
    else:
        if differences:
            _console().print(diff.as_table(differences))
        typer.echo(diff.headline(differences, len(keys), exact=not (rtol or atol)))
    raise typer.Exit(1 if differences else 0)


# --- output ----------------------------------------------------------------------------------------------------------


def _console() -> rich.console.Console:
    # In a pipe or a file, a line is as long as it has to be.
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = 100_000
    return console


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar on standard error with bytes, rate and time left, if that is a terminal."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda done: progress.advance(task, done)


if __name__ == "__main__":
    app(prog_name="python -m checkpoint_tools")
