"""The command line: commands under the names that users type, their options, and errors of one line."""

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
from typing import Annotated, Any, NoReturn, ParamSpec

import rich.console
import rich.progress
import typer

from . import rewrite
from .convert import convert, torch_files, translate
from .core.text import NEED_EXTRA, CheckpointError, check_patterns, counted, is_excluded, parse_bytes, printable
from .fuse.files import Request
from .fuse.rules import Way, load_rules, preset, preset_lines
from .look import diff, inspect, verify
from .stored.rank_files import read_names
from .stored.safetensors_folder import open_checkpoint
from .stored.storage import TORCH_SUFFIXES, is_file_of

Checkpoint = Annotated[
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
Presets = Annotated[
    list[str] | None,
    typer.Option("--preset", metavar="NAME", help="Rules that come with the tools, listed below. Several may be."),
]
RuleFiles = Annotated[list[Path] | None, typer.Option("--rules", metavar="FILE", help="Your own rules: TOML or JSON.")]
Values = Annotated[
    list[str] | None,
    typer.Option("--value", metavar="NAME=NUMBER", help="A value of the model's config that the rules name."),
]
Kept = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave keys like these as they are.")
]
LeftOut = Annotated[list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out keys like these.")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="PATTERN", help="Only fused tensors, or parts, whose names are like these."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with all sizes in bytes.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be written.")]
Threads = Annotated[int, typer.Option(min=1, help="How many files, or blocks of them, are in work at the same time.")]
MaxMemory = Annotated[str, typer.Option(metavar="SIZE", help="For data, over all threads: 512MiB, 2GiB, bytes.")]

# Printing -------------------------------------------------------------------------------------------------------------


def _say(text: str, *, err: bool = False) -> None:
    """Print a line, with whatever a checkpoint contains made harmless for the terminal."""
    typer.echo(printable(text), err=err)


def _say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        _say(f"note: {note}")


def _say_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))  # of safetensors, chunks have a dtype


def _say_table(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join((*lines, "")))  # typer.echo takes a terminal of ASCII for one of UTF-8
    sys.stdout.flush()


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar with bytes, rate and time left on standard error, if that is a terminal; yields what to tell."""
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


_Options = ParamSpec("_Options")


def _with_error_lines(run: Callable[_Options, None]) -> Callable[_Options, None]:
    """Wrap a command so that its errors are a line each; CHECKPOINT_TOOLS_TRACEBACK lets unexpected ones through."""

    @functools.wraps(run)
    def guarded(*args: _Options.args, **kwargs: _Options.kwargs) -> None:
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
            if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "safetensors":
                _fail(NEED_EXTRA)
            _fail(
                f"unexpected {type(error).__name__}: {error}. This should not happen: please report it, with what "
                "CHECKPOINT_TOOLS_TRACEBACK=1 in the environment shows"
            )

    return guarded


def _fail(message: str) -> NoReturn:
    _say(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)  # 1 says that something is different, or not whole, as of diff(1)


# Looking --------------------------------------------------------------------------------------------------------------


def _inspect(
    path: Checkpoint,
    patterns: Patterns = None,
    tiling_key: Annotated[
        str | None, typer.Option("--tiling", metavar="KEY", help="List which file has which part of this tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
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
    data: Annotated[
        bool, typer.Option("--data", help="Also read all data, and compare them with their CRC-32.")
    ] = False,
    finite: Annotated[
        bool, typer.Option("--finite", help="Also read floating-point data: no infinity, no NaN, and as written.")
    ] = False,
    threads: Threads = 4,
    as_json: Json = False,
) -> None:
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
    path_a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its folder or its fsspec URL.")],
    path_b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    patterns: Patterns = None,
    rtol: Annotated[float, typer.Option(min=0, help="Values of tensors may differ by this much of B's.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Values of tensors may differ by this much.")] = 0.0,
    key_prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model's keys begin with on one side alone.")
    ] = None,
    threads: Threads = 2,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    memory_bytes = parse_bytes(max_memory)
    first, second = open_checkpoint(path_a), open_checkpoint(path_b)
    if key_prefix:
        first, second = diff.without_prefix(first, second, key_prefix)
    gc.freeze()  # what describes them stays to the end, and may be millions of objects that no collection has to visit
    all_keys = diff.all_keys(first, second)
    check_patterns("PATTERN", patterns or (), all_keys)
    keys = [key for key in all_keys if not patterns or is_excluded(key, patterns)]
    differences = diff.diff(first, second, keys, rtol, atol, memory_bytes, threads, progress)
    if as_json:
        found = [difference._asdict() for difference in differences]
        _say_json({"a": path_a, "b": path_b, "keys": len(keys), "differences": found})
    else:
        if differences:
            _say_table(diff.as_table(differences))
        _say(diff.headline(differences, len(keys), exact=not (rtol or atol)))
    raise typer.Exit(1 if differences else 0)


def _seal(path: Checkpoint, threads: Threads = 4) -> None:
    begin_s = time.monotonic()
    _say_notes(verify.seal(path, threads=threads))
    _say(f"{path}: sealed ({time.monotonic() - begin_s:.1f} s)")


# Writing --------------------------------------------------------------------------------------------------------------


class _Run:
    """One command that writes, from its options to its last line."""

    def __init__(self, source: str, destination: str, threads: int, max_memory: str) -> None:
        self._begin_s = time.monotonic()
        self.destination, self.threads, self.memory_bytes = destination, threads, parse_bytes(max_memory)
        rewrite.check_destination(source, destination)

    def finish(self, what: str, new: rewrite.Rewrite, table_of: Callable[..., Iterable[str]], *, is_dry: bool) -> None:
        """Write it, and say so; or print what would be written."""
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
    """Return the numbers of all --value by name."""
    parsed: dict[str, float] = {}
    for text in values or ():
        name, _, number = text.partition("=")
        try:
            parsed[name.strip()] = int(number) if number.strip().lstrip("-").isdecimal() else float(number)
        except ValueError as error:
            raise CheckpointError(f"--value is NAME=NUMBER, for example tp_size=2, not {text}") from error
    return parsed


def _exchange(way: Way) -> Callable[..., None]:
    """Make the command split, or merge, which have their options in common."""

    def run(
        source: Source,
        destination: Destination,
        presets: Presets = None,
        rule_files: RuleFiles = None,
        values: Values = None,
        excluded: Kept = None,
        only: Only = None,
        yes: Annotated[
            bool,
            typer.Option(
                "--yes",
                hidden=way == "split",
                help="Merge all that the rules match, whether or not split took it apart.",
            ),
        ] = False,
        threads: Threads = 4,
        max_memory: MaxMemory = "2GiB",
        dry_run: DryRun = False,
    ) -> None:
        numbers, to_write = _numbers_of(values), _Run(source, destination, threads, max_memory)
        rules = [rule for name in presets or () for rule in preset(name)]
        rules += [rule for file in rule_files or () for rule in load_rules(file)]
        request = Request(rules, numbers, excluded or (), only or (), yes, dry_run)
        planned = rewrite.plan(rewrite.open_whole(source, threads), way, request)
        to_write.finish(way, planned, rewrite.as_table, is_dry=dry_run)

    run.__name__ = way
    return run


def _convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="DCP, safetensors, files of ranks (verl, SkyRL), or of torch.save.")
    ],
    destination: Destination,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="safetensors, dcp, or torch (one file of torch.save).")
    ] = None,
    key_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the model's keys begin with in DCP alone. Else 'model.' if nested, or what was taken away.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Cast the model's floats: fp32, bf16, fp16 or fp64.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option("--names", metavar="FILE", help="JSON: names for an optimizer's numbers, in order.")
    ] = None,
    shard_size: Annotated[str | None, typer.Option(metavar="SIZE", help="About how large new files are: 5GB.")] = None,
    excluded: LeftOut = None,
    threads: Threads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
) -> None:
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
        (of_torch and excluded and to != "torch", "--exclude is not for files of torch.save; use it on the result"),
    ):
        if is_wrong:
            raise CheckpointError(text)
    run = _Run(source, destination, threads, max_memory)
    if to == "torch":
        run.say_written(*torch_files.to_torch(source, destination, tuple(excluded or ()), run.memory_bytes))
    elif of_torch:
        run.say_written(*torch_files.to_dcp(source, destination, run.memory_bytes))
    else:
        cast_to = convert.DTYPES[dtype] if dtype else None
        wanted = convert.Wanted(key_prefix, excluded or (), shard_bytes, cast_to, read_names(names))
        new = convert.plan(source, wanted, to=to, threads=threads)
        run.finish("convert", new, convert.as_table, is_dry=dry_run)


def _rename(
    source: Source,
    destination: Destination,
    family: Annotated[
        str, typer.Option(metavar="NAME", help="llama, mixtral, qwen3, qwen3-moe, or a file like theirs.")
    ],
    from_framework: Annotated[
        str, typer.Option("--from", metavar="NAME", help="hf, torchtitan, megatron, or transformers5 (mixtral).")
    ],
    to_framework: Annotated[str, typer.Option("--to", metavar="NAME", help="Another one of them.")],
    values: Values = None,
    excluded: LeftOut = None,
    threads: Threads = 4,
    max_memory: MaxMemory = "2GiB",
) -> None:
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
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_PRESETS = "\b\nPresets:\n" + "\n".join(f"  {name:24}{line}" for name, line in preset_lines().items())
_HELP = tomllib.loads(resources.files(__package__).joinpath("help.toml").read_text())
for _command in (_inspect, _verify, _seal, _diff, _exchange("split"), _exchange("merge"), _rename, _convert):
    _name = _command.__name__.strip("_")
    app.command(_name, help=_HELP[_name], epilog=_PRESETS if _name in ("split", "merge") else None)(
        _with_error_lines(_command)
    )
