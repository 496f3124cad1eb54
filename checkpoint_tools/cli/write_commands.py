"""The commands that write checkpoints: split and merge, which have their options in common, convert and rename.

Errors come from where they are found; tables and last lines from ``checkpoint_tools/rewrite/rewrite.py``.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.text import CheckpointError, check_patterns, counted, parse_bytes
from ..fuse import preset_names
from ..stored.storage import CASTABLE, is_torch_file
from .common import (
    Destination,
    DryRun,
    LeftOut,
    MaxMemory,
    Source,
    Values,
    WriteThreads,
    parse_values,
    progress,
    say,
    say_notes,
    say_table,
)

if TYPE_CHECKING:  # imported when a command runs: torch takes longer than help and wrong options do
    from ..fuse.rules import Way
    from ..rewrite.rewrite_plan import Rewrite


Presets = Annotated[
    list[str] | None,
    typer.Option("--preset", metavar="NAME", help="Rules that come with the tools, listed below. Several may be."),
]
PRESETS_EPILOG = "\b\nPresets:\n" + "\n".join(f"  {name}" for name in preset_names())
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
) -> None:
    """Exchange fused weights (SwiGLU, QKV and others) for their parts, with all of the optimizer's state.

    SRC is only read. DST is there when it is complete, and not before: run the same command again after a kill, and it
    begins anew. (Behind a URL, files are made in a temporary folder and sent at the end, the metadata last.)
    DST says in split_record.json what was taken apart, so that merge can undo it.
    Exit code: 0 done, 2 not done, 130 interrupted.
    """
    run = _Run(destination, threads, max_memory)
    _exchange("split", source, run, presets or (), rule_files or (), values, (excluded or (), only or ()), dry_run)


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
) -> None:
    """Exchange the parts of fused weights for these: the inverse of split, with the same rules.

    Without rules, the last split is undone as split_record.json has it; with rules, only what is written there. Where
    there is no such file, nobody knows which parts were ever fused: then --yes or --only is needed.
    How each part is divided over files does not matter. Counters have to be the same for all parts. For all else, see
    split. Exit code: 0 done, 2 not done, 130 interrupted.
    """
    run, patterns = _Run(destination, threads, max_memory), (excluded or (), only or ())
    _exchange("merge", source, run, presets or (), rule_files or (), values, patterns, dry_run, is_sure=yes)


def _exchange(
    way: "Way",
    source: str,
    run: "_Run",
    presets: Sequence[str],
    rule_files: Sequence[Path],
    values: Sequence[str] | None,
    patterns: tuple[Sequence[str], Sequence[str]],
    dry_run: bool,
    *,
    is_sure: bool = False,
) -> None:
    numbers = parse_values(values)
    from ..fuse.files import Request, complete, not_known
    from ..fuse.rules import load_rules, preset
    from ..rewrite import rewrite

    try:
        rules = [rule for name in presets for rule in preset(name)]
        rules += [rule for file in rule_files for rule in load_rules(file)]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    rewrite.check_destination(source, run.destination)
    old = rewrite.open_whole(source, run.threads)
    asked = complete(old.checkpoint, way, Request(rules, numbers, *patterns, is_sure))
    planned = rewrite.plan(old, way, asked)
    parts = (part for fusion in planned.exchange.fusions for part in fusion.parts)
    check_patterns("--only", asked.only, [*planned.exchange.matched, *parts])
    if dry_run:
        run.show(planned, rewrite.as_table(planned))
        return
    if not asked.is_known:
        raise CheckpointError(not_known(old.checkpoint, planned.exchange.matched))
    run.write(way, rewrite.with_record(planned, way, asked))


class _Run:
    """One command that writes, from its options to its last line."""

    def __init__(self, destination: str, threads: int, max_memory: str) -> None:
        self._begin_s = time.monotonic()
        self.destination = destination
        self.threads = threads
        self.memory_bytes = parse_bytes(max_memory)

    def show(self, new: "Rewrite", table: Iterable[str]) -> None:
        """Print what would be written."""
        say_table(table)
        say_notes(new.notes)
        say(f"to be written: {new.headline}")

    def write(self, what: str, new: "Rewrite") -> None:
        """Write it, and say so."""
        from ..rewrite.rewrite import write

        with progress(what, new.nbytes) as advance:
            write(new, self.destination, self.threads, self.memory_bytes, advance)
        self.say_written(new.headline, new.notes)

    def say_written(self, headline: str, notes: Iterable[str]) -> None:
        """Print the notes, and the line that says what was written."""
        say_notes(notes)
        say(f"{self.destination}: {headline} ({time.monotonic() - self._begin_s:.1f} s)")


def convert_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint of DCP, or safetensors: a folder, a file or a URL.")
    ],
    destination: Destination,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="safetensors, dcp, or torch (one file of torch.save).")
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
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Cast the model's floats: fp32, bf16, fp16 or fp64.")
    ] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="About how large the new files are.")] = "5GB",
    excluded: LeftOut = None,
    threads: WriteThreads = 4,
    max_memory: MaxMemory = "2GiB",
    dry_run: DryRun = False,
) -> None:
    """Make safetensors of a checkpoint of DCP, or a checkpoint of safetensors, bit by bit.

    The model's tensors get their own names, in model-*.safetensors with an index, as Hugging Face has them. All other
    tensors are in optimizer-*.safetensors under the keys of the checkpoint, and what is no tensor is in optimizer.json.
    The way back gives the same checkpoint. A file of torch.save becomes a checkpoint of DCP, and --to torch makes one,
    in memory. SRC is only read. DST is there when it is complete, and not before: run the same command again after a
    kill, and it begins anew. Exit code: 0 done, 2 not done, 130 interrupted.
    """
    run, shard_bytes = _Run(destination, threads, max_memory), parse_bytes(shard_size)
    if what not in ("model", "optimizer", "all"):
        raise CheckpointError(f"--what is model, optimizer or all, not {what}")
    if dtype is not None and dtype not in CASTABLE:
        raise CheckpointError(f"--dtype is {', '.join(CASTABLE)}, not {dtype}")
    if to == "torch" or (is_torch_file(source) and not dry_run):
        for is_wrong, text in (
            (
                to == "safetensors" or dtype is not None or key_prefix is not None or what != "all" or dry_run,
                "between torch.save and DCP all is taken as it is; convert the result once more",
            ),
            ("://" in source + destination, "files of torch.save are read and written on this machine alone"),
            (excluded and to != "torch", "--exclude is not for files of torch.save; leave keys out afterwards"),
        ):
            if is_wrong:
                raise CheckpointError(text)
        from ..convert import torch_files

        if to == "torch":
            told = torch_files.to_torch(source, destination, tuple(excluded or ()), run.memory_bytes)
        else:
            told = torch_files.to_dcp(source, destination, run.memory_bytes)
        run.say_written(*told)
        return
    import torch

    from ..convert import convert
    from ..rewrite import rewrite

    cast_to = None if dtype is None else getattr(torch, CASTABLE[dtype])
    wanted = convert.Wanted(what, key_prefix, excluded or (), shard_bytes, cast_to)  # type: ignore[arg-type]
    rewrite.check_destination(source, destination)
    new = convert.plan(source, wanted, to=to, threads=threads)
    if dry_run:
        run.show(new, convert.as_table(new))
    else:
        run.write("convert", new)


def rename_weights(
    source: Source,
    destination: Destination,
    family: Annotated[
        str, typer.Option(metavar="NAME", help="Of models: llama, qwen3, qwen3-moe, or a file like theirs.")
    ],
    from_framework: Annotated[str, typer.Option("--from", metavar="NAME", help="hf, torchtitan or megatron.")],
    to_framework: Annotated[str, typer.Option("--to", metavar="NAME", help="Another one of them.")],
    values: Values = None,
    excluded: LeftOut = None,
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
    run = _Run(destination, threads, max_memory)
    numbers = parse_values(values)
    from ..convert.translate import translate

    frameworks = from_framework, to_framework
    keys, notes = translate(
        source, destination, family, frameworks, numbers, excluded or [], threads, run.memory_bytes, progress
    )
    run.say_written(f"{counted(keys, 'key')} as {to_framework} has them", notes)
