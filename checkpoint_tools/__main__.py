"""Command line of the checkpoint tools."""

import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar

from .core.errors import NEED_EXTRA, CheckpointError

try:
    import typer
except ImportError:
    sys.stderr.write(f"{NEED_EXTRA}\n")
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

from .core.patterns import idle_patterns, matches
from .core.printing import be_printable, printable
from .core.sizes import MAX_ITEM_BYTES, counted, human_bytes, parse_bytes, thread_bytes
from .stored.formats import CASTABLE, is_torch_file

if TYPE_CHECKING:  # when a command runs: torch takes longer than all that help and wrong options need
    import rich.console

    from .convert import convert
    from .convert.conversion_plan import Plan
    from .exchange.request import Way
    from .fused.rules import Rule
    from .look import verify
    from .stored.reading import Checkpoint, Problem
    from .write.layout import Rewrite

TROUBLE = 2
"""Exit code where a question has no answer: also that of wrong options, and as diff(1) has it."""

INTERRUPTED = 130

app = typer.Typer(
    help="Look into checkpoints of torch.distributed.checkpoint, check them and compare them. No GPU is needed, and "
    "nothing that a checkpoint contains is run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Folder = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="Folder with a .metadata file or with safetensors, or its fsspec URL."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with all sizes in bytes.")]
Threads = Annotated[int, typer.Option(min=1, help="How many files are read at the same time.")]
MaxMemory = Annotated[str, typer.Option(metavar="SIZE", help="For data, over all threads: 512MiB, 2GiB, bytes.")]

Command = TypeVar("Command", bound=Callable[..., None])


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"checkpoint_tools of fsdp-offload {version()}")
        raise typer.Exit


@app.callback()
def _tools(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    be_printable(sys.stdout, sys.stderr)


def command(name: str, description: str | None = None) -> Callable[[Command], Command]:
    """Make a function a command whose errors are one line on standard error; its docstring describes it otherwise."""

    def register(run: Command) -> Command:
        @functools.wraps(run)
        def guarded(*args: Any, **kwargs: Any) -> None:
            with _errors_in_a_line():
                run(*args, **kwargs)

        app.command(name, help=description)(guarded)
        return run

    return register


@contextmanager
def _errors_in_a_line() -> Iterator[None]:
    """None of them is exit code 1, which would say that something is different, or not whole."""
    try:
        yield
    except CheckpointError as error:
        _fail(str(error))
    except (BrokenPipeError, typer.Exit):
        raise  # the reader of our output has left; the command line knows
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except MemoryError:
        _fail("there is not enough memory; see --max-memory")
    except Exception as error:
        if os.environ.get("CHECKPOINT_TOOLS_TRACEBACK"):
            raise
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "rich":
            _fail(NEED_EXTRA)
        _fail(
            f"unexpected {type(error).__name__}: {error}. This should not happen: please report it, with what "
            "CHECKPOINT_TOOLS_TRACEBACK=1 in the environment shows"
        )


def _fail(message: str) -> NoReturn:
    _say(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(TROUBLE)


def _say(text: str, *, err: bool = False) -> None:
    """A line, in which nothing that a checkpoint contains speaks to the terminal."""
    typer.echo(printable(text), err=err)


def _memory(text: str, threads: int, least_items: int) -> int:
    """What --max-memory says, if each of so many threads can hold so many elements of the largest dtype with that."""
    memory_bytes = parse_bytes(text)
    thread_bytes(memory_bytes, threads, least_items * MAX_ITEM_BYTES)
    return memory_bytes


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
    from .look import inspect
    from .stored.opening import open_checkpoint

    checkpoint = open_checkpoint(path)
    if tiling_key is not None:
        _show_tiling(checkpoint, tiling_key, as_json)
        return
    idle = idle_patterns(patterns or (), [*checkpoint.tensors, *checkpoint.objects])
    if idle:
        raise CheckpointError(f"no key of {path} is like {' or '.join(idle)}; without a pattern, all are listed")
    summary = inspect.summarize(checkpoint, patterns or ())
    if as_json:
        _print_json(inspect.as_json(summary))
    else:
        _console().print(inspect.as_tables(summary, keys=not groups, files=files))


def _show_tiling(checkpoint: "Checkpoint", key: str, as_json: bool) -> None:
    from .look import tiling

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
    memory_bytes = _memory(max_memory, threads, 2)
    if algorithm not in ("sha256", "blake2b"):
        raise CheckpointError(f"--algorithm is sha256 or blake2b, not {algorithm}")
    from .look import checksums, verify
    from .look.data_checks import DataChecks
    from .stored.opening import open_checkpoint

    expected = None if list_to_check is None else checksums.read_checksums(list_to_check)
    if list_to_write is not None and list_to_write.exists():
        raise CheckpointError(f"{list_to_write} exists; compare with it (--checksums), or remove it first")
    checkpoint = open_checkpoint(path)
    problems, found = verify.check_structure(checkpoint, threads)
    checked = ["structure", "files"]
    checks, notes = DataChecks(checkpoint), [*found.notes]
    if finite:
        with _progress("finite values", verify.finite_bytes(checkpoint)) as advance:
            problems += verify.check_finite(checkpoint, found.sound, threads, memory_bytes, advance, checks)
        checked.append("finite values")
    if data:
        with _progress("data", checks.left_bytes(found.sound)) as advance:
            problems += checks.check_files(found.sound, threads, advance)
        checked.append("data")
        notes += verify.notes_on_checksums(checkpoint)
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
    _report(checkpoint, problems, found._replace(notes=tuple(notes)), checked, as_json)
    raise typer.Exit(1 if problems else 0)


def _report(
    checkpoint: "Checkpoint",
    problems: "Sequence[Problem]",
    found: "verify.Files",
    checked: Sequence[str],
    as_json: bool,
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
        _say(f"{where}: {text}")
    for note in found.notes:
        _say(f"note: {note}")
    what = f"{counted(len(checkpoint.tensors), 'tensor')}, {counted(len(checkpoint.objects), 'object')}"
    result = counted(len(problems), "problem") if problems else "whole"
    if "data" not in checked:
        checked = [*checked, "not whether data are as written: see --data"]
    _say(f"{checkpoint.path}: {result} ({what}, {human_bytes(found.nbytes)}; checked: {', '.join(checked)})")


@command("diff")
def diff_main(
    path_a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its folder or its fsspec URL.")],
    path_b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="PATTERN", help="Only keys like these: '*.weight' 'optim.*'.")
    ] = None,
    rtol: Annotated[float, typer.Option(min=0, help="Values of tensors may differ by this much of B's.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Values of tensors may differ by this much.")] = 0.0,
    key_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the model's keys begin with on one side alone; '' for nothing. Without it, that is found out "
            "where no key is on both sides.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="How many keys are compared at the same time.")] = 2,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    """Compare keys, shapes, dtypes and values of two checkpoints.

    Values are compared bit by bit unless a tolerance is given. How tensors are divided into chunks is no difference.
    Exit code: 0 the same, 1 different, 2 it could not be found out.
    """
    memory_bytes = _memory(max_memory, threads, 16)
    from .look import diff
    from .stored.opening import open_checkpoint

    first, second, notes = diff.aligned(open_checkpoint(path_a), open_checkpoint(path_b), key_prefix)
    gc.freeze()  # what describes them stays to the end, and may be millions of objects that no collection has to visit
    all_keys = diff.all_keys(first, second)
    idle = idle_patterns(patterns or (), all_keys)
    if idle:
        raise CheckpointError(f"no key of either is like {' or '.join(idle)}; see the command inspect")
    keys = [key for key in all_keys if matches(key, patterns or ())]
    with _progress("values", diff.bytes_to_compare(first, second, keys)) as advance:
        differences = diff.diff(first, second, keys, diff.Tolerance(rtol, atol), memory_bytes, threads, advance)
    if as_json:
        found = [difference._asdict() for difference in differences]
        _print_json({"a": path_a, "b": path_b, "keys": len(keys), "notes": notes, "differences": found})
    else:
        if differences:
            _console().print(diff.as_table(differences))
        for note in notes:
            _say(f"note: {note}")
        _say(diff.headline(differences, len(keys), exact=not (rtol or atol)))
    raise typer.Exit(1 if differences else 0)


# --- split and merge -------------------------------------------------------------------------------------------------

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: its folder or its fsspec URL.")]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The new one. A folder that is not there yet, or an fsspec URL.")
]
Presets = Annotated[
    list[str] | None, typer.Option("--preset", metavar="NAME", help="Rules that come with the tools. Several may be.")
]
RuleFiles = Annotated[
    list[Path] | None, typer.Option("--rules", metavar="FILE", help="Rules of your own, as TOML or JSON.")
]
Values = Annotated[
    list[str] | None,
    typer.Option("--value", metavar="NAME=NUMBER", help="A value of the model's config that the rules name."),
]
Excluded = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave keys like these as they are.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be written.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew, whatever an earlier run has left.")]
WriteThreads = Annotated[int, typer.Option("--threads", min=1, help="How many blocks are in work at the same time.")]


Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="PATTERN", help="Only fused tensors, or parts, whose names are like these."),
]


@command("split")
def split_main(
    source: Source,
    destination: Destination,
    presets: Presets = None,
    rule_files: RuleFiles = None,
    values: Values = None,
    excluded: Excluded = None,
    only: Only = None,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
    restart: Restart = False,
    as_json: Json = False,
) -> None:
    """Exchange fused weights for their parts, with all of the optimizer's state.

    SRC is only read. DST is there when it is complete, and not before: run the same command again after a kill, and it
    goes on where it was. (Behind a URL, files are sent as they are ready, the metadata last, and nothing is resumed.)
    DST says in split_record.json what was taken apart, so that merge can undo it.
    Exit code: 0 done, 2 not done, 130 interrupted.
    """
    asked = Asked(presets, rule_files, values, excluded, only)
    _rewrite("split", source, destination, asked, Doing(threads, max_memory, dry_run, restart, as_json))


@command("merge")
def merge_main(
    source: Source,
    destination: Destination,
    presets: Presets = None,
    rule_files: RuleFiles = None,
    values: Values = None,
    excluded: Excluded = None,
    only: Only = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Merge all that the rules match, whether or not split took it apart.")
    ] = False,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
    restart: Restart = False,
    as_json: Json = False,
) -> None:
    """Exchange the parts of fused weights for these: the inverse of split, with the same rules.

    Without rules, the last split is undone as split_record.json has it; with rules, only what is written there. Where
    there is no such file, nobody knows which parts were ever fused: then --yes or --only is needed.
    How each part is divided over files does not matter. Counters have to be the same for all parts. For all else, see
    split. Exit code: 0 done, 2 not done, 130 interrupted.
    """
    asked = Asked(presets, rule_files, values, excluded, only, yes)
    _rewrite("merge", source, destination, asked, Doing(threads, max_memory, dry_run, restart, as_json))


class Asked(NamedTuple):
    """A request for split or merge, in the words of the command line."""

    presets: list[str] | None
    rule_files: list[Path] | None
    values: list[str] | None
    excluded: list[str] | None
    only: list[str] | None
    is_sure: bool = False


class Doing(NamedTuple):
    """How split and merge do it."""

    threads: int
    max_memory: str
    dry_run: bool
    restart: bool
    as_json: bool


def _rewrite(way: "Way", source: str, destination: str, asked: Asked, doing: Doing) -> None:
    begin = time.monotonic()
    memory_bytes = _memory(doing.max_memory, doing.threads, 4)
    _check_json(doing.as_json, doing.dry_run)
    numbers = _parse_values(asked.values)
    from .exchange.request import Request, check_used, complete, not_known
    from .write import rewrite as rewriting

    rules = _rules(asked.presets, asked.rule_files)
    request = Request(rules, numbers, asked.excluded or [], asked.only or [], asked.is_sure)
    rewriting.check_destination(source, destination)
    checkpoint, sidecars = rewriting.open_whole(source, doing.threads)
    completed = complete(checkpoint, way, request)
    planned = rewriting.plan(checkpoint, way, completed)
    check_used(request, planned.exchange)
    notes = [*completed.notes, *rewriting.notes_on(checkpoint, sidecars)]
    if doing.dry_run:
        _show_plan(planned, way, notes, as_json=doing.as_json)
        return
    if not completed.is_known:
        raise CheckpointError(not_known(checkpoint, planned.exchange.matched))
    fingerprint = rewriting.fingerprint_of(checkpoint, way, completed)
    with _writing(way, destination, planned.nbytes) as advance:
        rewriting.write(
            checkpoint,
            planned,
            destination,
            fingerprint,
            threads=doing.threads,
            max_memory_bytes=memory_bytes,
            restart=doing.restart,
            advance=advance,
            sidecars=sidecars.files,
            record=rewriting.record_after(checkpoint, way, completed, planned),
        )
    _report_written(destination, rewriting.headline(planned, way), notes, begin)


def _show_plan(planned: "Rewrite", way: "Way", notes: Sequence[str], *, as_json: bool) -> None:
    from .write import rewrite as rewriting

    if as_json:
        _print_json({**rewriting.as_json(planned, way), "notes": list(notes)})
        return
    _console().print(rewriting.as_table(planned, way))
    for note in notes:
        _say(f"note: {note}")
    _say(f"to be written: {rewriting.headline(planned, way)}")


def _rules(presets: Sequence[str] | None, files: Sequence[Path] | None) -> "list[Rule]":
    from .fused.rules import load_rules, preset

    try:
        rules = [rule for name in presets or () for rule in preset(name)]
        rules += [rule for file in files or () for rule in load_rules(file)]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{error.filename} is a folder; --rules takes a TOML or JSON file") from error
    return rules


def _parse_values(values: Sequence[str] | None) -> dict[str, float]:
    parsed: dict[str, float] = {}
    for text in values or ():
        name, _, number = text.partition("=")
        try:
            parsed[name.strip()] = int(number) if number.strip().lstrip("-").isdecimal() else float(number)
        except ValueError as error:
            raise CheckpointError(f"--value is NAME=NUMBER, for example tp_size=2, not {text}") from error
    if len(parsed) < len(values or ()):
        raise CheckpointError(f"--value gives one name twice: {', '.join(values or ())}; give each once")
    return parsed


# --- rename ----------------------------------------------------------------------------------------------------------


@command("rename")
def rename_main(
    source: Source,
    destination: Destination,
    family: Annotated[
        str, typer.Option(metavar="NAME", help="Of models: llama, qwen3, qwen3-moe, or a file like theirs.")
    ],
    from_framework: Annotated[str, typer.Option("--from", metavar="NAME", help="hf, torchtitan or megatron.")],
    to_framework: Annotated[str, typer.Option("--to", metavar="NAME", help="Another one of them.")],
    values: Values = None,
    excluded: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out keys like these.")
    ] = None,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
    restart: Restart = False,
) -> None:
    """Give the weights of a model, and their state by FQN, the names that another framework has for them.

    Weights that one of the two has fused, stacked or in another order of rows are split, merged and put in order on the
    way. SRC and DST are checkpoints of DCP; convert makes these of safetensors, and the other way round. What is in
    between takes as much disk as DST, in DST.steps-*, until DST is there: run the same command again after a kill, and
    it goes on where it was.
    Exit code: 0 done, 2 not done, 130 interrupted.
    """
    begin = time.monotonic()
    memory_bytes = _memory(max_memory, threads, 4)
    numbers = _parse_values(values)
    from .convert.translate import Translation, translate

    asked = Translation(family, from_framework, to_framework, numbers, excluded or [])

    def progress(what: str, nbytes: int) -> AbstractContextManager[Callable[[int], object]]:
        return _writing(what, destination, nbytes, f"{destination}.steps-* and {destination}.partial")

    keys, notes = translate(
        source,
        destination,
        asked,
        threads=threads,
        max_memory_bytes=memory_bytes,
        progress=progress,
        restart=restart,
    )
    _report_written(destination, f"{counted(keys, 'key')} as {to_framework} has them", notes, begin)


# --- convert ---------------------------------------------------------------------------------------------------------


@command("convert")
def convert_main(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint of DCP, or safetensors: a folder, a file or a URL."),
    ],
    destination: Destination,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FORMAT", help="safetensors, dcp, or torch (one file of torch.save)."),
    ] = None,
    what: Annotated[str, typer.Option("--what", help="model, optimizer (everything else), or all.")] = "all",
    key_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the model's keys begin with in DCP, and not in safetensors. Without it, 'model.' where the "
            "model was nested in the state dict; the other way round, what was taken away, or 'model.'.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Cast the model's floats: fp32, bf16, fp16 or fp64."),
    ] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="About how large the new files are.")] = "5GB",
    excluded: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", metavar="PATTERN", help="Leave out keys like these (in DCP); with --flat-to-nd, as they are."
        ),
    ] = None,
    flat_to_nd: Annotated[
        bool,
        typer.Option(
            "--flat-to-nd", help="From DCP to DCP: optimizer state of one dimension gets its parameter's shape."
        ),
    ] = False,
    shapes_from: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="For --flat-to-nd: the checkpoint that has the model, if SRC has not."),
    ] = None,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
    restart: Restart = False,
    as_json: Json = False,
) -> None:
    """Make safetensors of a checkpoint of DCP, or a checkpoint of safetensors, bit by bit.

    The model's tensors get their own names, in model-*.safetensors with an index, as Hugging Face has them. All other
    tensors are in optimizer-*.safetensors under the keys of the checkpoint, and what is no tensor is in optimizer.json.
    The way back gives the same checkpoint. A file of torch.save becomes a checkpoint of DCP, and --to torch makes one,
    in memory. SRC is only read. DST is there when it is complete, and not before: run the same command again after a
    kill, and it goes on where it was. Exit code: 0 done, 2 not done, 130 interrupted.
    """
    begin = time.monotonic()
    memory_bytes = _memory(max_memory, threads, 4)
    shard_bytes = parse_bytes(shard_size)
    if what not in ("model", "optimizer", "all"):
        raise CheckpointError(f"--what is model, optimizer or all, not {what}")
    _check_json(as_json, dry_run)
    if flat_to_nd and (what != "all" or key_prefix is not None or dtype is not None):
        raise CheckpointError("--flat-to-nd changes state alone, and takes neither --what nor --key-prefix nor --dtype")
    if dtype is not None and dtype not in CASTABLE:
        raise CheckpointError(f"--dtype is {', '.join(CASTABLE)}, not {dtype}")
    if shapes_from is not None and not flat_to_nd:
        raise CheckpointError("--shapes-from is for --flat-to-nd")
    if to == "torch" or (is_torch_file(source) and not dry_run):
        if to == "safetensors" or flat_to_nd or dtype is not None or key_prefix is not None or what != "all" or dry_run:
            raise CheckpointError("between torch.save and DCP all is taken as it is; convert the result once more")
        keys, told = _convert_torch(source, destination, to, tuple(excluded or ()), memory_bytes)
        _report_written(destination, keys, told, begin)
        return
    import torch

    from .convert import convert
    from .convert.conversion_plan import Wanted
    from .write import rewrite as rewriting

    cast_to = None if dtype is None else getattr(torch, CASTABLE[dtype])
    wanted = Wanted(what, key_prefix, excluded or (), shard_bytes, cast_to)  # type: ignore[arg-type]
    for each in (source, shapes_from):
        if each is not None:
            rewriting.check_destination(each, destination)
    opened = convert.open_source(source, to, key_prefix, threads, flat=flat_to_nd)
    planned = convert.plan_flat(opened, shapes_from, wanted) if flat_to_nd else convert.plan(opened, wanted)
    notes = [*opened.notes, *planned.notes]
    if dry_run:
        _show_conversion(opened, planned, notes, as_json=as_json)
        return
    with _writing("convert", destination, planned.rewrite.nbytes) as advance:
        convert.write(
            opened,
            planned,
            destination,
            threads=threads,
            max_memory_bytes=memory_bytes,
            restart=restart,
            advance=advance,
        )
    _report_written(destination, convert.headline(opened, planned), notes, begin)


def _convert_torch(
    source: str, destination: str, to: str | None, excluded: tuple[str, ...], memory_bytes: int
) -> tuple[str, list[str]]:
    """To or from one file of torch.save; what is done, in a line, and what there is to be said."""
    if "://" in source or "://" in destination:
        raise CheckpointError("files of torch.save are read and written on this machine alone")
    if excluded and to != "torch":
        raise CheckpointError("--exclude is not for files of torch.save; convert all, and leave out afterwards")
    from .convert import torch_files
    from .look.verify import notes_on_checksums
    from .stored.opening import open_checkpoint
    from .write import rewrite as rewriting

    rewriting.check_destination(source, destination)
    if to == "torch":
        checkpoint = open_checkpoint(source)
        rewriting.check_whole(checkpoint, 1)
        keys = torch_files.to_torch(checkpoint, destination, excluded, memory_bytes)
        notes = [*checkpoint.notes, *notes_on_checksums(checkpoint)]
        return f"{counted(keys, 'key')} in one file of torch.save", notes
    values, notes = torch_files.to_dcp(source, destination, memory_bytes)
    return f"{counted(values, 'value')} as a checkpoint of DCP", notes


def _show_conversion(opened: "convert.Source", planned: "Plan", notes: Sequence[str], *, as_json: bool) -> None:
    from .convert import convert

    if as_json:
        _print_json({**convert.as_json(planned), "notes": notes})
        return
    _console().print(convert.as_table(planned))
    for note in notes:
        _say(f"note: {note}")
    _say(f"to be written: {convert.headline(opened, planned)}")


# --- what split, merge and convert share -----------------------------------------------------------------------------


def _check_json(as_json: bool, dry_run: bool) -> None:
    if as_json and not dry_run:
        raise CheckpointError("--json is for --dry-run; without it there is nothing to print but one line")


@contextmanager
def _writing(what: str, destination: str, nbytes: int, kept_in: str | None = None) -> Iterator[Callable[[int], object]]:
    """Progress; and if it is interrupted, what can be done then."""
    try:
        with _progress(what, nbytes) as advance:
            yield advance
    except KeyboardInterrupt:
        from .write import rewrite as rewriting

        _say(f"interrupted. {rewriting.after_interrupt(destination, kept_in)}", err=True)
        raise


def _report_written(destination: str, headline: str, notes: Iterable[str], begin: float) -> None:
    for note in notes:
        _say(f"note: {note}")
    _say(f"{destination}: {headline} ({time.monotonic() - begin:.1f} s)")


# --- output ----------------------------------------------------------------------------------------------------------


def _console() -> "rich.console.Console":
    import rich.console

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
    import rich.console
    import rich.progress

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


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="checkpoint-tools")


def version() -> str:
    """Return the version of the package that the tools come with."""
    from importlib import metadata

    try:
        return metadata.version("fsdp-offload")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    app(prog_name="python -m checkpoint_tools")
