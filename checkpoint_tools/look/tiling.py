"""A picture of how one tensor is tiled by its chunks.

Every place where a chunk begins or ends divides the tensor, so each cell of the picture is in the same chunks
throughout, and no hole or overlap is too small to be seen. Two dimensions are drawn, the first two that are divided;
all other dimensions are inside the cells.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table

from ..core.sizes import human_shape
from ..core.tables import shown
from ..stored.reading import StoredChunk, StoredTensor

MAX_ROWS = 32
MAX_COLUMNS = 8
_FILES_SHOWN = 3

Range = tuple[int, int]


class Tiling(NamedTuple):
    """The cells of a picture.

    Attributes:
        dims: that are drawn: downwards, and to the right; fewer for tensors of fewer dimensions.
        rows: the ranges along the first of them.
        columns: the ranges along the second.
        cells: a text for each row and column.
        left_out: how many rows and columns there are beyond these.
    """

    dims: tuple[int, ...]
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]
    cells: tuple[tuple[str, ...], ...]
    left_out: tuple[int, int]


def tile(tensor: StoredTensor, max_rows: int = MAX_ROWS, max_columns: int = MAX_COLUMNS) -> Tiling:
    """Find which files have which part of ``tensor``."""
    dims = _dims_to_draw(tensor)
    ranges = [_ranges(tensor, dim) for dim in dims]
    rows = ranges[0] if dims else [(0, 1)]
    columns = ranges[1] if len(dims) > 1 else [(0, 1)]
    shown_rows, shown_columns = rows[:max_rows], columns[:max_columns]
    cells = tuple(
        tuple(_cell(tensor, dims, (row, column)[: len(dims)]) for column in shown_columns) for row in shown_rows
    )
    left_out = (len(rows) - len(shown_rows), len(columns) - len(shown_columns))
    return Tiling(dims, tuple(shown_rows), tuple(shown_columns), cells, left_out)


def _dims_to_draw(tensor: StoredTensor) -> tuple[int, ...]:
    divided = [dim for dim in range(len(tensor.shape)) if len(_ranges(tensor, dim)) > 1]
    others = [dim for dim in range(len(tensor.shape)) if dim not in divided]
    return tuple(sorted([*divided, *others][:2]))


def _ranges(tensor: StoredTensor, dim: int) -> list[Range]:
    # Empty chunks are nowhere; DCP puts them at the end of the dimension.
    bounds = {0, tensor.shape[dim]}
    for chunk in tensor.chunks:
        if chunk.numel:
            bounds |= {chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]}
    return list(itertools.pairwise(sorted(bounds))) or [(0, 0)]


def _cell(tensor: StoredTensor, dims: Sequence[int], ranges: Sequence[Range]) -> str:
    inside = [chunk for chunk in tensor.chunks if chunk.numel and _covers(chunk, dims, ranges)]
    if not math.prod(tensor.shape):
        return "(empty)"
    if not inside:
        return "(nothing)"
    inner = [size for dim, size in enumerate(tensor.shape) if dim not in dims]
    covered = sum(math.prod(size for dim, size in enumerate(c.sizes) if dim not in dims) for c in inside)
    if covered > math.prod(inner):
        return " and ".join(_files(inside)) + " (twice)"
    text = " + ".join(_files(inside))
    return text if covered == math.prod(inner) else f"{text} (in part)"


def _covers(chunk: StoredChunk, dims: Sequence[int], ranges: Sequence[Range]) -> bool:
    return all(
        chunk.offsets[dim] <= start and stop <= chunk.offsets[dim] + chunk.sizes[dim]
        for dim, (start, stop) in zip(dims, ranges, strict=True)
    )


def _files(chunks: Sequence[StoredChunk]) -> list[str]:
    counts = {chunk.file: 0 for chunk in chunks}
    for chunk in chunks:
        counts[chunk.file] += 1
    names = [file if count == 1 else f"{count} × {file}" for file, count in counts.items()]
    more = len(names) - _FILES_SHOWN
    return [*names[:_FILES_SHOWN], *([f"{more} more"] if more > 0 else [])]


# --- shown -----------------------------------------------------------------------------------------------------------


def as_picture(tensor: StoredTensor, tiling: Tiling) -> RenderableType:
    """Draw the cells with their ranges."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    count = len(tensor.chunks)
    lines: list[RenderableType] = [
        shown(f"{tensor.key}: {human_shape(tensor.shape)} of {dtype} in {count} chunk{'' if count == 1 else 's'}")
    ]
    if len(tensor.shape) > len(tiling.dims):
        drawn = " and ".join(map(str, tiling.dims))
        lines.append(shown(f"Dimensions {drawn} are drawn; the others are inside the cells."))
    lines.append(_grid(tiling))
    for number, what in zip(tiling.left_out, ("rows", "columns"), strict=True):
        if number:
            lines.append(shown(f"… and {number:,} more {what}; --json has all chunks"))
    return Group(*lines)


def _grid(tiling: Tiling) -> Table:
    table = Table(show_lines=True, show_header=len(tiling.dims) > 1)
    table.add_column("", no_wrap=True)
    for column in tiling.columns:
        table.add_column(shown(_range_text(column)), overflow="fold")
    for row, cells in zip(tiling.rows, tiling.cells, strict=True):
        table.add_row(shown(_range_text(row) if tiling.dims else ""), *map(shown, cells))
    return table


def _range_text(bounds: Range) -> str:
    return f"{bounds[0]}:{bounds[1]}"
