"""Options, printed lines, progress, and errors of one line: shared by all commands."""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from ..core.text import NEED_EXTRA, CheckpointError, printable

Folder = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="Folder with a .metadata file or with safetensors, or its fsspec URL."),
]
Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: its folder or its fsspec URL.")]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The new one. A folder that is not there yet, or an fsspec URL.")
]
Patterns = Annotated[
    list[str] | None, typer.Argument(metavar="PATTERN", help="Only keys like these: '*.weight' 'optim.*'.")
]
LeftOut = Annotated[list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out keys like these.")]
Values = Annotated[
    list[str] | None,
    typer.Option("--value", metavar="NAME=NUMBER", help="A value of the model's config that the rules name."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with all sizes in bytes.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be written.")]
Threads = Annotated[int, typer.Option(min=1, help="How many files are read at the same time.")]
WriteThreads = Annotated[int, typer.Option("--threads", min=1, help="How many blocks are in work at the same time.")]
MaxMemory = Annotated[str, typer.Option(metavar="SIZE", help="For data, over all threads: 512MiB, 2GiB, bytes.")]


def parse_values(values: Sequence[str] | None) -> dict[str, float]:
    """Return the numbers of all --value by name."""
    parsed: dict[str, float] = {}
    for text in values or ():
        name, _, number = text.partition("=")
        try:
            parsed[name.strip()] = int(number) if number.strip().lstrip("-").isdecimal() else float(number)
        except ValueError as error:
            raise CheckpointError(f"--value is NAME=NUMBER, for example tp_size=2, not {text}") from error
    return parsed


def say(text: str, *, err: bool = False) -> None:
    """Print a line, with whatever a checkpoint contains made harmless for the terminal."""
    typer.echo(printable(text), err=err)


def say_notes(notes: Iterable[str]) -> None:
    """Print each note on a line of its own."""
    for note in notes:
        say(f"note: {note}")


def say_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, default=str))  # of safetensors, chunks have a dtype


def say_table(lines: Iterable[str]) -> None:
    """Print a table."""
    sys.stdout.write("\n".join((*lines, "")))  # typer.echo takes a terminal of ASCII for one of UTF-8
    sys.stdout.flush()


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar with bytes, rate and time left on standard error, if that is a terminal; yields what to tell."""
    import rich.console  # here: it takes longer than help and wrong options do
    import rich.progress

    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    errors = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task(what, total=total_bytes)
        yield lambda done: shown.advance(task, done)


Options = ParamSpec("Options")


def with_error_lines(run: Callable[Options, None]) -> Callable[Options, None]:
    """Wrap a command so that its errors are a line each; CHECKPOINT_TOOLS_TRACEBACK lets unexpected ones through."""

    @functools.wraps(run)
    def guarded(*args: Options.args, **kwargs: Options.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except CheckpointError as error:
            _fail(str(error))
        except (BrokenPipeError, typer.Exit):
            raise  # the reader of our output has left, or the command is done: typer knows what to do
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except MemoryError:
            _fail("there is not enough memory; see --max-memory")
        except Exception as error:
            if os.environ.get("CHECKPOINT_TOOLS_TRACEBACK"):
                raise
            missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
            if missing in ("rich", "safetensors"):
                _fail(NEED_EXTRA)
            _fail(
                f"unexpected {type(error).__name__}: {error}. This should not happen: please report it, with what "
                "CHECKPOINT_TOOLS_TRACEBACK=1 in the environment shows"
            )

    return guarded


def _fail(message: str) -> NoReturn:
    say(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)  # 1 says that something is different, or not whole, as of diff(1)
