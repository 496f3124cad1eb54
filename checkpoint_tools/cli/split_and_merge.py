"""The commands split and merge, which have their options in common.

Their errors come from where they are found, and their tables and last lines from ``checkpoint_tools/write/rewrite.py``.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ..core.errors import CheckpointError
from ..fused.preset_files import preset_names, preset_subject
from .command_options import (
    Destination,
    DryRun,
    Json,
    MaxMemory,
    Source,
    Values,
    WriteThreads,
    parse_memory,
    parse_values,
)
from .output import check_json, say_plan, say_written, write_progress

if TYPE_CHECKING:  # when a command runs: torch takes longer than all that help and wrong options need
    from ..exchange.request import Way
    from ..fused.rules import Rule

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
    asked = Asked(presets, rule_files, values, excluded, only)
    _rewrite("split", source, destination, asked, Doing(threads, max_memory, dry_run, as_json))


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
    asked = Asked(presets, rule_files, values, excluded, only, yes)
    _rewrite("merge", source, destination, asked, Doing(threads, max_memory, dry_run, as_json))


class Asked(NamedTuple):
    """A request for split or merge, in the words of the command line."""

    presets: list[str] | None
    rule_files: list[Path] | None
    values: list[str] | None
    excluded: list[str] | None
    only: list[str] | None
    is_sure: bool = False


class Doing(NamedTuple):
    """Resources and modes of a split or merge, in the words of the command line."""

    threads: int
    max_memory: str
    dry_run: bool
    as_json: bool


def _rewrite(way: "Way", source: str, destination: str, asked: Asked, doing: Doing) -> None:
    begin = time.monotonic()
    memory_bytes = parse_memory(doing.max_memory, doing.threads, 4)
    check_json(doing.as_json, doing.dry_run)
    numbers = parse_values(asked.values)
    from ..exchange.request import Request, check_used, complete, not_known
    from ..write import rewrite

    rules = _rules(asked.presets, asked.rule_files)
    request = Request(rules, numbers, asked.excluded or [], asked.only or [], asked.is_sure)
    rewrite.check_destination(source, destination)
    checkpoint, sidecars = rewrite.open_whole(source, doing.threads)
    completed = complete(checkpoint, way, request)
    planned = rewrite.plan(checkpoint, way, completed)
    check_used(request, planned.exchange)
    notes = [*completed.notes, *rewrite.notes_on(checkpoint, sidecars)]
    if doing.dry_run:
        shown = rewrite.as_json(planned, way) if doing.as_json else rewrite.as_table(planned, way)
        say_plan(shown, notes, rewrite.headline(planned, way))
        return
    if not completed.is_known:
        raise CheckpointError(not_known(checkpoint, planned.exchange.matched))
    with write_progress(way, planned.nbytes) as advance:
        rewrite.write(
            checkpoint,
            planned,
            destination,
            threads=doing.threads,
            max_memory_bytes=memory_bytes,
            advance=advance,
            sidecars=sidecars.files,
            record=rewrite.record_after(checkpoint, way, completed, planned),
        )
    say_written(destination, rewrite.headline(planned, way), notes, begin)


def _rules(presets: Sequence[str] | None, files: Sequence[Path] | None) -> "list[Rule]":
    from ..fused.rules import load_rules, preset

    try:
        rules = [rule for name in presets or () for rule in preset(name)]
        rules += [rule for file in files or () for rule in load_rules(file)]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{error.filename} is a folder; --rules takes a TOML or JSON file") from error
    return rules
