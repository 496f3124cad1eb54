"""Convert a checkpoint to another format: open, plan, write, and publish only when it is complete.

::

    SRC ──open──▶ Source ──plan──▶ ConversionPlan ──rewrite.write──▶ DST

Written as split and merge write; see :mod:`checkpoint_tools.write.rewrite`.
"""

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

from ..core.errors import CheckpointError
from ..core.sizes import counted, human_bytes
from ..core.tables import Table
from ..stored.opening import open_checkpoint
from ..stored.reading import Checkpoint
from ..stored.safetensors_folder import Folders, is_safetensors, open_safetensors
from ..write import rewrite
from ..write.rewrite_plan import Rewrite
from ..write.sidecars import Sidecars, sidecars_of
from .conversion_plan import ConversionPlan, Wanted, to_dcp, to_safetensors
from .flat_to_nd import flat_to_nd

Format = Literal["safetensors", "dcp"]


class Source(NamedTuple):
    """Checkpoint to be converted, opened and found whole.

    Attributes:
        checkpoint: of either format.
        folders: the same as safetensors, if it is that.
        to: the format that it gets.
        notes: what there is to be said about it.
        sidecars: files beside the data, which are copied.
    """

    checkpoint: Checkpoint
    folders: Folders | None
    to: Format
    notes: tuple[str, ...]
    sidecars: tuple[str, ...]


def open_source(source: str, to: str | None, key_prefix: str | None, threads: int, *, flat: bool = False) -> Source:
    """Open what is to be converted, and find it whole.

    Raises:
        CheckpointError: it is not, or it has that format already.
    """
    if to not in (None, "safetensors", "dcp"):
        raise CheckpointError(f"--to is safetensors or dcp, not {to}")
    if is_safetensors(source):
        if flat:
            raise CheckpointError(f"--flat-to-nd is for checkpoints of DCP, and {source} has safetensors")
        _check_changes("dcp", to, source)
        folders = open_safetensors(source, key_prefix)
        rewrite.check_whole(folders.checkpoint, threads)
        is_file = PurePath(source).suffix == ".safetensors"
        sidecars = Sidecars((), ()) if is_file else sidecars_of(folders.checkpoint, folders.own_files)
        notes = rewrite.notes_on(folders.checkpoint, sidecars)
        return Source(folders.checkpoint, folders, "dcp", tuple(notes), sidecars.files)
    if flat and to == "safetensors":
        raise CheckpointError("--flat-to-nd gives a checkpoint of DCP; convert that to safetensors afterwards")
    if not flat:
        _check_changes("safetensors", to, source)
    checkpoint, sidecars = rewrite.open_whole(source, threads)
    notes = rewrite.notes_on(checkpoint, sidecars)
    return Source(checkpoint, None, "dcp" if flat else "safetensors", tuple(notes), sidecars.files)


def _check_changes(expected: Format, to: str | None, source: str) -> None:
    if to not in (None, expected):
        other = "safetensors" if expected == "dcp" else "a checkpoint of DCP"
        raise CheckpointError(f"{source} is {other} already; give --to {expected}, or nothing")


def plan(source: Source, wanted: Wanted) -> ConversionPlan:
    """Plan the new checkpoint.

    Raises:
        CheckpointError: the other format cannot have it.
    """
    if source.folders is not None:
        return to_dcp(source.folders, wanted)
    return to_safetensors(source.checkpoint, wanted)


def plan_flat(source: Source, shapes_from: str | None, wanted: Wanted) -> ConversionPlan:
    """Plan the new checkpoint for ``--flat-to-nd``.

    Raises:
        CheckpointError: it is not known which shapes the state should have.
    """
    other = None if shapes_from is None else open_checkpoint(shapes_from)
    return ConversionPlan(flat_to_nd(source.checkpoint, other, wanted.excluded), {}, "", ())


def write(
    source: Source,
    planned: ConversionPlan,
    destination: str,
    *,
    threads: int,
    max_memory_bytes: int,
    advance: Callable[[int], object] = lambda done: None,
) -> None:
    """Write it.

    Raises:
        CheckpointError: the source cannot be read, or the destination not be written.
    """
    rewrite.write(
        source.checkpoint,
        planned.rewrite,
        destination,
        threads=threads,
        max_memory_bytes=max_memory_bytes,
        advance=advance,
        beside=planned.beside,
        sidecars=source.sidecars,
    )


# --- shown -----------------------------------------------------------------------------------------------------------


def as_json(planned: ConversionPlan) -> dict[str, Any]:
    """Return the plan for JSON, with sizes in bytes."""
    return {
        "key_prefix": planned.key_prefix,
        "keys": len(planned.rewrite.tensors) + len(planned.rewrite.objects),
        "files": planned.rewrite.file_bytes(),
        "nbytes": planned.rewrite.nbytes,
        "flat": [fusion.fused for fusion in planned.rewrite.exchange.fusions],
    }


def as_table(planned: ConversionPlan) -> Table:
    """Return a table with a row for each file: its first tensor, count and size."""
    table = Table("file", "first", numbers=("tensors", "size"))
    for file, nbytes in planned.rewrite.file_bytes().items():
        keys = list(_keys_by_file(planned.rewrite)[file])
        table.add_row(file, keys[0] if keys else "", f"{len(keys):,}", human_bytes(nbytes))
    return table


def _keys_by_file(rewrite: Rewrite) -> Mapping[str, dict[str, None]]:
    return {
        file: {piece.key: None for piece in pieces if piece.region is not None}
        for file, pieces in rewrite.files.items()
    }


def headline(source: Source, planned: ConversionPlan) -> str:
    """Say in a line what is done."""
    new = planned.rewrite
    size = f"{human_bytes(new.nbytes)} in {counted(len(new.files), 'file')}"
    flat = new.exchange.fusions
    if flat:
        return f"{counted(len(flat), 'flat state tensor')} given the shape of the parameter; {size}"
    prefix = f"; keys of the model begin with {planned.key_prefix!r} in DCP" if planned.key_prefix else ""
    return f"{counted(len(new.tensors), 'tensor')} as {source.to}, {size}{prefix}"
