"""The commands that write checkpoints: split and merge, which have their options in common, convert and rename.

Errors come from where they are found; tables and last lines from ``checkpoint_tools/rewrite/rewrite.py``.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import CheckpointError
from ..core.text import counted, parse_bytes
from ..fuse.preset_files import preset_names, preset_subject
from ..stored.storage import CASTABLE, is_torch_file
from .common import (
    Destination,
    DryRun,
    Json,
    MaxMemory,
    Source,
    Values,
    WriteThreads,
    check_json,
    parse_memory,
    parse_values,
    say_plan,
    say_written,
    write_progress,
)

if TYPE_CHECKING:  # when a command runs: torch takes longer than all that help and wrong options need
    from ..fuse.rules import Rule, Way


Presets = Annotated[
    list[str] | None,
    typer.Option("--preset", metavar="NAME", help="Rules that come with the tools, listed below. Several may be."),
]
PRESETS_EPILOG = "\b\nPresets:\n" + "\n".join(f"  {name}: {preset_subject(name)}" for name in preset_names())
RuleFiles = Annotated[
    list[Path] | None, typer.Option("--rules", metavar="FILE", help="Rules of your own, as TOML or JSON.")
]
Excluded = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave keys like these as they are.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="PATTERN", help="Only fused tensors, or parts, whose names are like these."),
]


def split_fused(
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
    as_json: Json = False,
) -> None:
    """Exchange fused weights (SwiGLU, QKV and others) for their parts, with all of the optimizer's state.

    SRC is only read. DST is there when it is complete, and not before: run the same command again after a kill, and it
    begins anew. (Behind a URL, files are made in a temporary folder and sent at the end, the metadata last.)
    DST says in split_record.json what was taken apart, so that merge can undo it.
    Exit code: 0 done, 2 not done, 130 interrupted.
    """
    _rewrite("split", **locals())


def merge_parts(
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
    as_json: Json = False,
) -> None:
    """Exchange the parts of fused weights for these: the inverse of split, with the same rules.

    Without rules, the last split is undone as split_record.json has it; with rules, only what is written there. Where
    there is no such file, nobody knows which parts were ever fused: then --yes or --only is needed.
    How each part is divided over files does not matter. Counters have to be the same for all parts. For all else, see
    split. Exit code: 0 done, 2 not done, 130 interrupted.
    """
    _rewrite("merge", **locals())


def _rewrite(
    way: "Way",
    source: str,
    destination: str,
    presets: Sequence[str] | None,
    rule_files: Sequence[Path] | None,
    values: Sequence[str] | None,
    excluded: Sequence[str] | None,
    only: Sequence[str] | None,
    threads: int,
    max_memory: str,
    dry_run: bool,
    as_json: bool,
    yes: bool = False,
) -> None:
    begin = time.monotonic()
    memory_bytes = parse_memory(max_memory, threads, 4)
    check_json(as_json, dry_run)
    numbers = parse_values(values)
    from ..fuse.request import Request, check_used, complete, not_known
    from ..rewrite import rewrite

    request = Request(_rules(presets, rule_files), numbers, excluded or [], only or [], yes)
    rewrite.check_destination(source, destination)
    checkpoint, sidecars = rewrite.open_whole(source, threads)
    completed = complete(checkpoint, way, request)
    planned = rewrite.plan(checkpoint, way, completed)
    check_used(request, planned.exchange)
    notes = [*completed.notes, *rewrite.notes_on(checkpoint, sidecars)]
    if dry_run:
        shown = rewrite.as_json(planned, way) if as_json else rewrite.as_table(planned)
        say_plan(shown, notes, rewrite.headline(planned, way))
        return
    if not completed.is_known:
        raise CheckpointError(not_known(checkpoint, planned.exchange.matched))
    with write_progress(way, planned.nbytes) as advance:
        rewrite.write(
            checkpoint,
            planned,
            destination,
            threads=threads,
            max_memory_bytes=memory_bytes,
            advance=advance,
            sidecars=sidecars.files,
            record=rewrite.record_after(checkpoint, way, completed, planned),
        )
    say_written(destination, rewrite.headline(planned, way), notes, begin)


def _rules(presets: Sequence[str] | None, files: Sequence[Path] | None) -> "list[Rule]":
    from ..fuse.rules import load_rules, preset

    try:
        rules = [rule for name in presets or () for rule in preset(name)]
        rules += [rule for file in files or () for rule in load_rules(file)]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{error.filename} is a folder; --rules takes a TOML or JSON file") from error
    return rules


def convert_checkpoint(
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
        typer.Option("--exclude", metavar="PATTERN", help="Leave out keys like these (in DCP)."),
    ] = None,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make safetensors of a checkpoint of DCP, or a checkpoint of safetensors, bit by bit.

    The model's tensors get their own names, in model-*.safetensors with an index, as Hugging Face has them. All other
    tensors are in optimizer-*.safetensors under the keys of the checkpoint, and what is no tensor is in optimizer.json.
    The way back gives the same checkpoint. A file of torch.save becomes a checkpoint of DCP, and --to torch makes one,
    in memory. SRC is only read. DST is there when it is complete, and not before: run the same command again after a
    kill, and it begins anew. Exit code: 0 done, 2 not done, 130 interrupted.
    """
    begin = time.monotonic()
    memory_bytes = parse_memory(max_memory, threads, 4)
    shard_bytes = parse_bytes(shard_size)
    if what not in ("model", "optimizer", "all"):
        raise CheckpointError(f"--what is model, optimizer or all, not {what}")
    check_json(as_json, dry_run)
    if dtype is not None and dtype not in CASTABLE:
        raise CheckpointError(f"--dtype is {', '.join(CASTABLE)}, not {dtype}")
    if to == "torch" or (is_torch_file(source) and not dry_run):
        if to == "safetensors" or dtype is not None or key_prefix is not None or what != "all" or dry_run:
            raise CheckpointError("between torch.save and DCP all is taken as it is; convert the result once more")
        keys, told = _convert_torch(source, destination, to, tuple(excluded or ()), memory_bytes)
        say_written(destination, keys, told, begin)
        return
    import torch

    from ..convert import convert
    from ..convert.convert import Wanted
    from ..rewrite import rewrite

    cast_to = None if dtype is None else getattr(torch, CASTABLE[dtype])
    wanted = Wanted(what, key_prefix, excluded or (), shard_bytes, cast_to)  # type: ignore[arg-type]
    rewrite.check_destination(source, destination)
    planned = convert.plan(source, wanted, to=to, threads=threads)
    if dry_run:
        say_plan(planned.as_json() if as_json else planned.as_table(), planned.notes, planned.headline)
        return
    with write_progress("convert", planned.rewrite.nbytes) as advance:
        rewrite.write(
            planned.checkpoint,
            planned.rewrite,
            destination,
            threads=threads,
            max_memory_bytes=memory_bytes,
            advance=advance,
            beside=planned.beside,
            sidecars=planned.sidecars,
        )
    say_written(destination, planned.headline, planned.notes, begin)


def _convert_torch(
    source: str, destination: str, to: str | None, excluded: tuple[str, ...], memory_bytes: int
) -> tuple[str, list[str]]:
    """Convert to or from one file of torch.save; return the headline and the notes."""
    if "://" in source or "://" in destination:
        raise CheckpointError("files of torch.save are read and written on this machine alone")
    if excluded and to != "torch":
        raise CheckpointError("--exclude is not for files of torch.save; convert all, and leave out afterwards")
    from ..convert import torch_files
    from ..look.verify import notes_on_checksums
    from ..rewrite import rewrite
    from ..stored.opening import open_checkpoint

    rewrite.check_destination(source, destination)
    if to == "torch":
        checkpoint = open_checkpoint(source)
        rewrite.check_whole(checkpoint, 1)
        keys = torch_files.to_torch(checkpoint, destination, excluded, memory_bytes)
        notes = [*checkpoint.notes, *notes_on_checksums(checkpoint)]
        return f"{counted(keys, 'key')} in one file of torch.save", notes
    values, notes = torch_files.to_dcp(source, destination, memory_bytes)
    return f"{counted(values, 'value')} as a checkpoint of DCP", notes


def rename_weights(
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
) -> None:
    """Give the weights of a model, and their state by FQN, the names that another framework has for them.

    Weights that one of the two has fused, stacked or in another order of rows are split, merged and put in order on the
    way. SRC and DST are checkpoints of DCP; convert makes these of safetensors, and the other way round. What is in
    between takes as much disk as DST, in DST.steps, until DST is there: run the same command again after a kill, and it
    begins anew.
    Exit code: 0 done, 2 not done, 130 interrupted.
    """
    begin = time.monotonic()
    memory_bytes = parse_memory(max_memory, threads, 4)
    numbers = parse_values(values)
    from ..convert.translate import translate

    keys, notes = translate(
        source,
        destination,
        family,
        (from_framework, to_framework),
        numbers,
        excluded or [],
        threads=threads,
        max_memory_bytes=memory_bytes,
        progress=write_progress,
    )
    say_written(destination, f"{counted(keys, 'key')} as {to_framework} has them", notes, begin)
