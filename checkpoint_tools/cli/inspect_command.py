"""The command inspect."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import CheckpointError
from ..core.patterns import idle_patterns
from .command_options import Folder, Json, Patterns
from .output import console, say_json

if TYPE_CHECKING:  # when the command runs: torch takes longer than all that help and wrong options need
    from ..stored.reading import Checkpoint


def inspect_checkpoint(
    path: Folder,
    patterns: Patterns = None,
    groups: Annotated[bool, typer.Option("--groups", help="Only the totals by group, without each key.")] = False,
    files: Annotated[bool, typer.Option("--files", help="Also the files, and which rank wrote each of them.")] = False,
    tiling_key: Annotated[
        str | None, typer.Option("--tiling", metavar="KEY", help="List which file has which part of this tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List keys, shapes, dtypes, chunks and sizes. Only the metadata are read."""
    from ..look import inspect
    from ..stored.opening import open_checkpoint

    checkpoint = open_checkpoint(path)
    if tiling_key is not None:
        _show_tiling(checkpoint, tiling_key, as_json)
        return
    idle = idle_patterns(patterns or (), [*checkpoint.tensors, *checkpoint.objects])
    if idle:
        raise CheckpointError(f"no key of {path} is like {' or '.join(idle)}; without a pattern, all are listed")
    summary = inspect.summarize(checkpoint, patterns or ())
    if as_json:
        say_json(inspect.as_json(summary))
    else:
        console().print(inspect.as_tables(summary, keys=not groups, files=files))


def _show_tiling(checkpoint: "Checkpoint", key: str, as_json: bool) -> None:
    from ..look import inspect

    if key not in checkpoint.tensors:
        what = "an object, and in one piece" if key in checkpoint.objects else "not in the checkpoint"
        raise CheckpointError(f"{key} is {what}; give the key of a tensor, as inspect lists them")
    tensor = checkpoint.tensors[key]
    if as_json:
        chunks = [chunk._asdict() for chunk in tensor.chunks]
        say_json({"key": key, "shape": tensor.shape, "dtype": str(tensor.dtype)[6:], "chunks": chunks})
    else:
        console().print(inspect.chunk_table(tensor))
