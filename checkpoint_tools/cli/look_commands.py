"""The commands that look at checkpoints: inspect, verify, diff and seal."""

import gc
import time
from typing import Annotated

import typer

from ..core.text import CheckpointError, check_patterns, counted, dtype_name, human_bytes, is_excluded, parse_bytes
from .common import Folder, Json, MaxMemory, Patterns, Threads, progress, say, say_json, say_notes, say_table

# Each command imports its own functions: they import torch, which takes longer than help and wrong options do.


def inspect_checkpoint(
    path: Folder,
    patterns: Patterns = None,
    tiling_key: Annotated[
        str | None, typer.Option("--tiling", metavar="KEY", help="List which file has which part of this tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List keys, shapes, dtypes, chunks and sizes. Only the metadata are read."""
    from ..look import inspect
    from ..stored.safetensors_folder import open_checkpoint

    checkpoint = open_checkpoint(path)
    if tiling_key is not None:
        if tiling_key not in checkpoint.tensors:
            what = "an object, and in one piece" if tiling_key in checkpoint.objects else "not in the checkpoint"
            raise CheckpointError(f"{tiling_key} is {what}; give the key of a tensor, as inspect lists them")
        tensor = checkpoint.tensors[tiling_key]
        dtype, chunks = dtype_name(tensor.dtype), tensor.chunks
        if as_json:
            bare = {"bare_dtype": dtype} if chunks and chunks[0].bare_dtype is not None else {}
            listed = [{**chunk._asdict(), **bare} for chunk in chunks]
            say_json({"key": tiling_key, "shape": tensor.shape, "dtype": dtype, "chunks": listed})
        else:
            say(inspect.chunk_headline(tensor))
            say_table(inspect.chunk_table(tensor))
        return
    check_patterns("PATTERN", patterns or (), [*checkpoint.tensors, *checkpoint.objects])
    summary = inspect.summarize(checkpoint, patterns or ())
    if as_json:
        say_json(summary)
        return
    say(inspect.headline(summary))
    for table in inspect.as_tables(summary):
        say_table(table)
    say_notes(summary["notes"])
    if summary["problems"]:
        say(f"The metadata contradict themselves ({summary['problems']} times): see the command verify.")


def verify_checkpoint(
    path: Folder,
    data: Annotated[
        bool, typer.Option("--data", help="Also read all data, and compare them with their CRC-32.")
    ] = False,
    finite: Annotated[
        bool, typer.Option("--finite", help="Also read floating-point data: no infinity, no NaN, and as written.")
    ] = False,
    threads: Threads = 4,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    """List everything that is wrong with a checkpoint.

    It is whole if every element of every tensor is in exactly one chunk, all files are there and long enough, and every
    item in them is of the right shape and dtype, with all that is around the data as it was written. Whether the data
    are as written takes --data, which reads all of them. Exit code: 0 whole, 1 something is wrong, 2 it could not be
    checked.
    """
    memory_bytes = parse_bytes(max_memory)
    from ..look import verify
    from ..stored.safetensors_folder import open_checkpoint

    checkpoint = open_checkpoint(path)
    problems, found = verify.check_structure(checkpoint, threads)
    checked = ["structure", "files"]
    notes = [*found.notes]
    if finite:
        problems += verify.check_finite(checkpoint, found.sound, threads, memory_bytes, progress)
        checked.append("finite values")
    if data:
        problems += verify.check_items(checkpoint, found.sound, threads, data=True, progress=progress)
        checked.append("data")
        notes += verify.notes_on_checksums(checkpoint)
    problems = list(dict.fromkeys(problems))
    if as_json:
        shown = [problem._asdict() for problem in problems]
        whole = not problems
        say_json({"path": checkpoint.path, "whole": whole, "checked": checked, "problems": shown, "notes": notes})
        raise typer.Exit(1 if problems else 0)
    for where, text in problems:
        say(f"{where}: {text}")
    say_notes(notes)
    what = f"{counted(len(checkpoint.tensors), 'tensor')}, {counted(len(checkpoint.objects), 'object')}"
    result = counted(len(problems), "problem") if problems else "whole"
    if not data:
        checked.append("not whether data are as written: see --data")
    say(f"{checkpoint.path}: {result} ({what}, {human_bytes(found.nbytes)}; checked: {', '.join(checked)})")
    raise typer.Exit(1 if problems else 0)


def compare_checkpoints(
    path_a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its folder or its fsspec URL.")],
    path_b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    patterns: Patterns = None,
    rtol: Annotated[float, typer.Option(min=0, help="Values of tensors may differ by this much of B's.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Values of tensors may differ by this much.")] = 0.0,
    key_prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model's keys begin with on one side alone.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="How many keys are compared at the same time.")] = 2,
    max_memory: MaxMemory = "2GiB",
    as_json: Json = False,
) -> None:
    """Compare keys, shapes, dtypes and values of two checkpoints.

    Values are compared bit by bit unless a tolerance is given. How tensors are divided into chunks is no difference.
    Exit code: 0 the same, 1 different, 2 it could not be found out.
    """
    memory_bytes = parse_bytes(max_memory)
    from ..look import diff
    from ..stored.safetensors_folder import open_checkpoint

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
        say_json({"a": path_a, "b": path_b, "keys": len(keys), "differences": found})
    else:
        if differences:
            say_table(diff.as_table(differences))
        say(diff.headline(differences, len(keys), exact=not (rtol or atol)))
    raise typer.Exit(1 if differences else 0)


def seal_checkpoint(path: Folder, threads: Threads = 4) -> None:
    """Write the checksums of a finished checkpoint of DCP beside it, into the file .checksums.

    verify --data then finds every bit that has changed. Only what is around the data is read, whose checksums the save
    has taken from memory. Exit code: 0 sealed, 2 it is not whole, or sealed already.
    """
    from ..look.verify import seal

    begin_s = time.monotonic()
    say_notes(seal(path, threads=threads))
    say(f"{path}: sealed ({time.monotonic() - begin_s:.1f} s)")
