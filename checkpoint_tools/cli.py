"""The command line: commands under the names that users type, their options, and errors of one line.

Each command imports the code that it runs only when called: that code imports torch, which is too slow for ``--help``.
"""

import contextlib
import functools
import gc
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import rich.console
import rich.progress
import typer

from .core.text import NEED_EXTRA, CheckpointError, check_patterns, counted, is_excluded, parse_bytes, printable
from .fuse.presets import preset_names, preset_text
from .stored.storage import TORCH_SUFFIXES, is_file_of

if TYPE_CHECKING:
    from .fuse.rules import Way
    from .rewrite import Rewrite

_HELP = tomllib.loads(resources.files(__package__).joinpath("help.toml").read_text())


def _option(flag: str, entry: str = "", **more: Any) -> Any:
    """Make an option from help.toml: from the entry ``entry``, or from the flag's own."""
    return typer.Option(flag, **_HELP["options"][entry or flag], **more)


def _argument(entry: str) -> Any:
    return typer.Argument(**_HELP["arguments"][entry])


Checkpoint = Annotated[str, _argument("CHECKPOINT")]
Source = Annotated[str, _argument("SRC")]
Destination = Annotated[str, _argument("DST")]
Patterns = Annotated[list[str] | None, _argument("PATTERN")]
Presets = Annotated[list[str] | None, _option("--preset")]
RuleFiles = Annotated[list[Path] | None, _option("--rules")]
Values = Annotated[list[str] | None, _option("--value")]
Kept = Annotated[list[str] | None, _option("--exclude", "--exclude of split")]
LeftOut = Annotated[list[str] | None, _option("--exclude")]
Only = Annotated[list[str] | None, _option("--only")]
Json = Annotated[bool, _option("--json")]
DryRun = Annotated[bool, _option("--dry-run")]
Threads = Annotated[int, _option("--threads")]
MaxMemory = Annotated[str, _option("--max-memory")]

# Printing -------------------------------------------------------------------------------------------------------------


def _say(text: str, *, err: bool = False) -> None:
    """Print a line; escape text from a checkpoint that could control the terminal."""
    typer.echo(printable(text), err=err)


def _say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        _say(f"note: {note}")


def _say_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))  # default=str writes dtypes, which safetensors' chunks have


def _say_table(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join((*lines, "")))  # typer.echo would print UTF-8, even to an ASCII terminal
    sys.stdout.flush()


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar (bytes, rate, time left) if standard error is a terminal; yield its ``advance``."""
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


def _at_work(what: str) -> contextlib.AbstractContextManager[object]:
    """Show a spinner with ``what``, if stderr is a terminal, until the amount of work is known and a bar can start."""
    errors = rich.console.Console(stderr=True)
    return errors.status(what) if errors.is_terminal else contextlib.nullcontext()


_Options = ParamSpec("_Options")


def _with_error_lines(run: Callable[_Options, None]) -> Callable[_Options, None]:
    """Wrap a command to print errors in one line; with CHECKPOINT_TOOLS_TRACEBACK set, raise unexpected errors."""

    @functools.wraps(run)
    def guarded(*args: _Options.args, **kwargs: _Options.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except CheckpointError as error:
            _fail(str(error))
        except (BrokenPipeError, typer.Exit):
            raise  # typer handles both: a closed pipe behind our output, and the end of a command
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except MemoryError:
            _fail("there is not enough memory; see --max-memory")
        except Exception as error:
            if os.environ.get("CHECKPOINT_TOOLS_TRACEBACK"):
                raise
            if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "safetensors":
                _fail(NEED_EXTRA)
            _fail(
                f"unexpected {type(error).__name__}: {error}. This should not happen: please report it, with what "
                "CHECKPOINT_TOOLS_TRACEBACK=1 in the environment shows"
            )

    return guarded


def _fail(message: str) -> NoReturn:
    _say(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)  # as in diff(1): 1 means "different" (diff) or "not whole" (verify), 2 means trouble


# Looking --------------------------------------------------------------------------------------------------------------


def _inspect(
    path: Checkpoint,
    patterns: Patterns = None,
    tiling_key: Annotated[str | None, _option("--tiling")] = None,
    as_json: Json = False,
) -> None:
    from .look import inspect
    from .stored.safetensors_folder import open_checkpoint

    with _at_work("reading the metadata"):
        checkpoint = open_checkpoint(path)
    if tiling_key is not None:
        if tiling_key not in checkpoint.tensors:
            what = "an object, and in one piece" if tiling_key in checkpoint.objects else "not in the checkpoint"
            raise CheckpointError(f"{tiling_key} is {what}; give the key of a tensor, as inspect lists them")
        found = inspect.tiling(checkpoint.tensors[tiling_key])
    else:
        check_patterns("PATTERN", patterns or (), [*checkpoint.tensors, *checkpoint.objects])
        found = inspect.summary(checkpoint, patterns or ())
    if as_json:
        _say_json(found.as_json)
        return
    _say(found.headline)
    for table in found.tables:
        _say_table(table)
    _say_notes(found.notes)


def _verify(
    path: Checkpoint,
    data: Annotated[bool, _option("--data")] = False,
    finite: Annotated[bool, _option("--finite")] = False,
    threads: Threads = 4,
    as_json: Json = False,
) -> None:
    from .look import verify
    from .stored.safetensors_folder import open_checkpoint

    with _at_work("checking structure and files"):
        checkpoint = open_checkpoint(path)
        found = verify.check_structure(checkpoint, threads)
    problems, notes = [*found.problems], [*found.notes]
    checked = ["structure", "files", *["finite values"] * finite, *["data"] * data]
    if data or finite:
        problems += verify.check_items(checkpoint, found.sound, threads, data=data, finite=finite, progress=progress)
        notes += verify.notes_on_checksums(checkpoint) if data else ()
    problems = list(dict.fromkeys(problems))
    if as_json:
        shown = [problem._asdict() for problem in problems]
        whole = not problems
        _say_json({"path": checkpoint.path, "whole": whole, "checked": checked, "problems": shown, "notes": notes})
        raise typer.Exit(1 if problems else 0)
    for where, text in problems:
        _say(f"{where}: {text}")
    _say_notes(notes)
    result = counted(len(problems), "problem") if problems else "whole"
    checked += [] if data else ["not whether data are as written: see --data"]
    _say(f"{checkpoint.path}: {result} ({found.size}; checked: {', '.join(checked)})")
    raise typer.Exit(1 if problems else 0)


def _diff(
    path_a: Annotated[str, _argument("A")],
    path_b: Annotated[str, _argument("B")],
    patterns: Patterns = None,
    rtol: Annotated[float, _option("--rtol")] = 0.0,
    atol: Annotated[float, _option("--atol")] = 0.0,
    key_prefix: Annotated[str | None, _option("--key-prefix", "--key-prefix of diff")] = None,
    threads: Threads = 2,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    from .look import diff
    from .stored.safetensors_folder import open_checkpoint

    memory_bytes = parse_bytes(max_memory)
    with _at_work("reading the metadata"):
        first, second = open_checkpoint(path_a), open_checkpoint(path_b)
    if key_prefix:
        first, second = diff.without_prefix(first, second, key_prefix)
    gc.freeze()  # the collector need not visit the metadata: perhaps millions of objects, all alive to the end
    all_keys = diff.all_keys(first, second)
    check_patterns("PATTERN", patterns or (), all_keys)
    keys = [key for key in all_keys if not patterns or is_excluded(key, patterns)]
    differences = diff.diff(first, second, keys, rtol, atol, memory_bytes, threads, progress)
    notes = diff.split_notes(first, second) if differences else []
    if as_json:
        found = [difference._asdict() for difference in differences]
        _say_json({"a": path_a, "b": path_b, "keys": len(keys), "differences": found, "notes": notes})
    else:
        if differences:
            _say_table(diff.as_table(differences))
        _say_notes(notes)
        how = "within the tolerance" if rtol or atol else "bit by bit"
        of_keys = counted(len(keys), "key")
        _say(f"different: {len(differences):,} of {of_keys}" if differences else f"the same: {of_keys}, {how}")
    raise typer.Exit(1 if differences else 0)


def _seal(path: Checkpoint, threads: Threads = 4) -> None:
    from .look import verify

    begin_s = time.monotonic()
    with _at_work("reading the checksums"):
        notes = verify.seal(path, threads=threads)
    _say_notes(notes)
    _say(f"{path}: sealed ({time.monotonic() - begin_s:.1f} s)")


# Writing --------------------------------------------------------------------------------------------------------------


class _Run:
    """One run of a command that writes a checkpoint: checks its options, writes, and prints the last line."""

    def __init__(self, source: str, destination: str, threads: int, max_memory: str) -> None:
        from . import rewrite

        self._begin_s = time.monotonic()
        self.destination, self.threads, self.memory_bytes = destination, threads, parse_bytes(max_memory)
        rewrite.check_destination(source, destination)

    def finish(self, what: str, new: "Rewrite", table_of: Callable[..., Iterable[str]], *, is_dry: bool) -> None:
        """Write ``new`` and print what was written; with ``is_dry``, only print what would be written."""
        from . import rewrite

        if is_dry:
            _say_table(table_of(new))
            _say_notes(new.notes)
            _say(f"to be written: {new.headline}")
            return
        with progress(what, new.nbytes) as advance:
            rewrite.write(new, self.destination, self.threads, self.memory_bytes, advance)
        self.say_written(new.headline, new.notes)

    def say_written(self, headline: str, notes: Iterable[str]) -> None:
        """Print the notes, and the line that says what was written."""
        _say_notes(notes)
        _say(f"{self.destination}: {headline} ({time.monotonic() - self._begin_s:.1f} s)")


def _numbers_of(values: Sequence[str] | None) -> dict[str, float]:
    """Parse all ``--value NAME=NUMBER``: name → number."""
    parsed: dict[str, float] = {}
    for text in values or ():
        name, _, number = text.partition("=")
        try:
            parsed[name.strip()] = int(number) if number.strip().lstrip("-").isdecimal() else float(number)
        except ValueError as error:
            raise CheckpointError(f"--value is NAME=NUMBER, for example tp_size=2, not {text}") from error
    return parsed


def _exchange(way: "Way") -> Callable[..., None]:
    """Return the command ``way``, split or merge; both have the same options."""

    def run(
        source: Source,
        destination: Destination,
        presets: Presets = None,
        rule_files: RuleFiles = None,
        values: Values = None,
        excluded: Kept = None,
        only: Only = None,
        yes: Annotated[bool, _option("--yes", hidden=way == "split")] = False,
        threads: Threads = 4,
        max_memory: MaxMemory = "2GiB",
        dry_run: DryRun = False,
    ) -> None:
        from . import rewrite
        from .fuse.files import Request
        from .fuse.rules import load_rules, preset

        numbers, to_write = _numbers_of(values), _Run(source, destination, threads, max_memory)
        rules = [rule for name in presets or () for rule in preset(name)]
        rules += [rule for file in rule_files or () for rule in load_rules(file)]
        request = Request(rules, numbers, excluded or (), only or (), yes, dry_run)
        with _at_work("reading and planning"):
            planned = rewrite.plan(rewrite.open_whole(source, threads), way, request)
        to_write.finish(way, planned, rewrite.as_table, is_dry=dry_run)

    run.__name__ = way
    return run


def _convert(
    source: Annotated[str, _argument("SRC of convert")],
    destination: Destination,
    to: Annotated[str | None, _option("--to")] = None,
    key_prefix: Annotated[str | None, _option("--key-prefix")] = None,
    dtype: Annotated[str | None, _option("--dtype")] = None,
    names: Annotated[Path | None, _option("--names")] = None,
    shard_size: Annotated[str | None, _option("--shard-size")] = None,
    excluded: LeftOut = None,
    threads: Threads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
) -> None:
    from .convert import convert, fsdp_dtensor, torch_files
    from .stored.rank_files import read_names

    shard_bytes = parse_bytes(shard_size or "5GB")
    of_torch = to == "torch" or (is_file_of(source, TORCH_SUFFIXES) and not dry_run)
    flags = "--dtype", "--key-prefix", "--names", "--shard-size"
    asked = zip(flags, (dtype, key_prefix, names, shard_size), strict=True)
    given = [name for name, value in asked if value is not None] + ["--dry-run"] * dry_run
    given += ["--to safetensors"] * (to == "safetensors")
    for is_wrong, text in (
        (dtype and dtype not in convert.DTYPES, f"--dtype is {', '.join(convert.DTYPES)}, not {dtype}"),
        (
            of_torch and given,
            f"between torch.save and DCP all is taken: leave out {', '.join(given)}, and convert the result once more",
        ),
        (to is None and destination.endswith((".pt", ".pth")), f"{destination} is a file's name: give --to torch"),
        (of_torch and "://" in source + destination, "files of torch.save are read and written on this machine alone"),
        (
            to == "fsdp_dtensor" and (dtype or key_prefix),
            "--dtype and --key-prefix are not for fsdp_dtensor, which has the names and dtypes of Megatron-FSDP",
        ),
        (of_torch and excluded and to != "torch", "--exclude is not for files of torch.save; use it on the result"),
    ):
        if is_wrong:
            raise CheckpointError(text)
    run = _Run(source, destination, threads, max_memory)
    if to == "torch":
        with _at_work("reading and writing"):
            written = torch_files.to_torch(source, destination, tuple(excluded or ()), run.memory_bytes)
        run.say_written(*written)
    elif of_torch:
        with _at_work("reading and writing"):
            written = torch_files.to_dcp(source, destination, run.memory_bytes)
        run.say_written(*written)
    else:
        cast_to = convert.DTYPES[dtype] if dtype else None
        wanted = convert.Wanted(key_prefix, excluded or (), shard_bytes, cast_to, read_names(names))
        is_megatron = to == "fsdp_dtensor"
        with _at_work("reading and planning"):
            of_format = fsdp_dtensor.plan(source, wanted, threads) if is_megatron else None
            new = of_format or convert.plan(source, wanted, to, threads)
        run.finish("convert", new, convert.as_table, is_dry=dry_run)


def _rename(
    source: Source,
    destination: Destination,
    family: Annotated[str, _option("--family")],
    from_framework: Annotated[str, _option("--from")],
    to_framework: Annotated[str, _option("--to", "--to of rename")],
    values: Values = None,
    excluded: LeftOut = None,
    threads: Threads = 4,
    max_memory: MaxMemory = "2GiB",
) -> None:
    from .convert import translate

    numbers, run = _numbers_of(values), _Run(source, destination, threads, max_memory)
    frameworks = from_framework, to_framework
    keys, notes = translate.translate(
        source, destination, family, frameworks, numbers, excluded or [], threads, run.memory_bytes, progress
    )
    run.say_written(f"{counted(keys, 'key')} as {to_framework} has them", notes)


# All of them ----------------------------------------------------------------------------------------------------------

app = typer.Typer(
    help="Look into checkpoints of torch.distributed.checkpoint, check them and compare them. No GPU is needed, and "
    "nothing that a checkpoint contains is run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"checkpoint-tools {version('fsdp-offload')}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    _version: Annotated[bool, _option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


_PURPOSES = {name: preset_text(name).partition("\n")[0].removeprefix("# ") for name in preset_names()}
_PRESETS = "\b\nPresets:\n" + "\n".join(f"  {name:24}{line}" for name, line in _PURPOSES.items())
for _command in (_inspect, _verify, _seal, _diff, _exchange("split"), _exchange("merge"), _rename, _convert):
    _name = _command.__name__.strip("_")
    app.command(_name, help=_HELP[_name], epilog=_PRESETS if _name in ("split", "merge") else None)(
        _with_error_lines(_command)
    )
