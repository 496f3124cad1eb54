"""The command convert."""

import time
from typing import Annotated

import typer

from ..core.errors import CheckpointError
from ..core.sizes import counted, parse_bytes
from ..stored.formats import CASTABLE, is_torch_file
from .command_options import Destination, DryRun, Json, MaxMemory, WriteThreads, parse_memory
from .output import check_json, say_plan, say_written, write_progress


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
        say_written(destination, keys, told, begin)
        return
    import torch

    from ..convert import convert
    from ..convert.conversion_plan import Wanted
    from ..write import rewrite

    cast_to = None if dtype is None else getattr(torch, CASTABLE[dtype])
    wanted = Wanted(what, key_prefix, excluded or (), shard_bytes, cast_to)  # type: ignore[arg-type]
    for each in (source, shapes_from):
        if each is not None:
            rewrite.check_destination(each, destination)
    opened = convert.open_source(source, to, key_prefix, threads, flat=flat_to_nd)
    planned = convert.plan_flat(opened, shapes_from, wanted) if flat_to_nd else convert.plan(opened, wanted)
    notes = [*opened.notes, *planned.notes]
    if dry_run:
        shown = convert.as_json(planned) if as_json else convert.as_table(planned)
        say_plan(shown, notes, convert.headline(opened, planned))
        return
    with write_progress("convert", planned.rewrite.nbytes) as advance:
        convert.write(
            opened,
            planned,
            destination,
            threads=threads,
            max_memory_bytes=memory_bytes,
            advance=advance,
        )
    say_written(destination, convert.headline(opened, planned), notes, begin)


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
    from ..stored.opening import open_checkpoint
    from ..write import rewrite

    rewrite.check_destination(source, destination)
    if to == "torch":
        checkpoint = open_checkpoint(source)
        rewrite.check_whole(checkpoint, 1)
        keys = torch_files.to_torch(checkpoint, destination, excluded, memory_bytes)
        notes = [*checkpoint.notes, *notes_on_checksums(checkpoint)]
        return f"{counted(keys, 'key')} in one file of torch.save", notes
    values, notes = torch_files.to_dcp(source, destination, memory_bytes)
    return f"{counted(values, 'value')} as a checkpoint of DCP", notes
