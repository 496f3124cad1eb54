"""The command diff."""

import gc
from typing import Annotated

import typer

from ..core.errors import CheckpointError
from ..core.patterns import idle_patterns, matches
from .command_options import Json, MaxMemory, Patterns, parse_memory
from .output import console, progress, say, say_json, say_notes


def compare_checkpoints(
    path_a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its folder or its fsspec URL.")],
    path_b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    patterns: Patterns = None,
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
    memory_bytes = parse_memory(max_memory, threads, 16)
    from ..look import diff
    from ..stored.opening import open_checkpoint

    first, second, notes = diff.aligned(open_checkpoint(path_a), open_checkpoint(path_b), key_prefix)
    gc.freeze()  # what describes them stays to the end, and may be millions of objects that no collection has to visit
    all_keys = diff.all_keys(first, second)
    idle = idle_patterns(patterns or (), all_keys)
    if idle:
        raise CheckpointError(f"no key of either is like {' or '.join(idle)}; see the command inspect")
    keys = [key for key in all_keys if matches(key, patterns or ())]
    with progress("values", diff.bytes_to_compare(first, second, keys)) as advance:
        differences = diff.diff(first, second, keys, diff.Tolerance(rtol, atol), memory_bytes, threads, advance)
    if as_json:
        found = [difference._asdict() for difference in differences]
        say_json({"a": path_a, "b": path_b, "keys": len(keys), "notes": notes, "differences": found})
    else:
        if differences:
            console().print(diff.as_table(differences))
        say_notes(notes)
        say(diff.headline(differences, len(keys), exact=not (rtol or atol)))
    raise typer.Exit(1 if differences else 0)
