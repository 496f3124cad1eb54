"""Print the commands' lines, tables, JSON and progress."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import CheckpointError
from ..core.printing import printable

if TYPE_CHECKING:  # when a command runs: rich takes longer than all that help and wrong options need
    import rich.console

    from ..core.tables import Table


def say(text: str, *, err: bool = False) -> None:
    """Print a line, with whatever a checkpoint contains made harmless for the terminal."""
    typer.echo(printable(text), err=err)


def say_notes(notes: Iterable[str]) -> None:
    """Print each note on a line of its own."""
    for note in notes:
        say(f"note: {note}")


def say_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def console() -> "rich.console.Console":
    """Return rich's console on standard output, as wide as any line where that is a pipe or a file."""
    import rich.console

    made = rich.console.Console(highlight=False)
    if not made.is_terminal:
        made.width = 100_000
    return made


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar with bytes, rate and time left on standard error, if that is a terminal.

    Yields:
        A function to be told of bytes that are done, from any thread.
    """
    import rich.console
    import rich.progress

    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    error_console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        *columns, console=error_console, transient=True, disable=not error_console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=total_bytes)
        yield lambda done: shown.advance(task, done)


@contextmanager
def write_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show progress of writing, and say so if it is interrupted.

    Yields:
        A function to be told of bytes that are written, from any thread.
    """
    try:
        with progress(what, total_bytes) as advance:
            yield advance
    except KeyboardInterrupt:
        say("interrupted: nothing is left of what was written", err=True)
        raise


def say_written(destination: str, headline: str, notes: Iterable[str], begin_s: float) -> None:
    """Print the notes, and the line that says what was written; ``begin_s`` is on the monotonic clock."""
    say_notes(notes)
    say(f"{destination}: {headline} ({time.monotonic() - begin_s:.1f} s)")


def check_json(as_json: bool, dry_run: bool) -> None:
    """Refuse --json where nothing would be printed as JSON.

    Raises:
        CheckpointError: --json without --dry-run.
    """
    if as_json and not dry_run:
        raise CheckpointError("--json is for --dry-run; without it there is nothing to print but one line")


def say_plan(plan: "Mapping[str, Any] | Table", notes: Iterable[str], headline: str) -> None:
    """Print what would be written: as JSON if that is what the plan is, or else as a table and a line."""
    if isinstance(plan, Mapping):
        say_json({**plan, "notes": list(notes)})
        return
    console().print(plan)
    say_notes(notes)
    say(f"to be written: {headline}")
