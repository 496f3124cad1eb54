"""Tables of any number of rows: what takes rich a minute for a hundred thousand of them takes a second here."""

from collections.abc import Sequence

from rich.cells import cell_len

from .text import printable


class Table:
    """Rows of texts, which are to the left, and of numbers, to the right. Nothing is cut off."""

    def __init__(self, *texts: str, numbers: Sequence[str] = ()) -> None:
        self._texts = len(texts)
        self._rows: list[tuple[str, ...]] = [(*texts, *numbers)]

    def add_row(self, *cells: str) -> None:
        """Add a cell for each column, with foreign text made printable."""
        assert len(cells) == len(self._rows[0])
        self._rows.append(tuple(printable(cell).replace("\n", "\\n") for cell in cells))

    def lines(self) -> list[str]:
        """Return the lines, of which the first is the header; the terminal wraps those that are too long."""
        widths = [max(map(_width, column)) for column in zip(*self._rows, strict=True)]
        lines = []
        for row in self._rows:
            rooms = [" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
            both = enumerate(zip(row, rooms, strict=True))
            lines.append("  ".join(cell + room if n < self._texts else room + cell for n, (cell, room) in both))
        return [line.rstrip() for line in lines]


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)
