"""Tables of any number of rows: what takes rich a minute for a hundred thousand of them takes a second here."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from .text import printable

_GAP = "  "


class Table:
    """Rows of texts, which are to the left, and of numbers, to the right. Nothing is cut off."""

    def __init__(self, *texts: str, numbers: Sequence[str] = ()) -> None:
        self._texts = len(texts)
        self._rows: list[tuple[str, ...]] = [(*texts, *numbers)]

    def add_row(self, *cells: str) -> None:
        """Add a cell for each column, with foreign text made printable."""
        assert len(cells) == len(self._rows[0])
        self._rows.append(tuple(printable(cell).replace("\n", "\\n") for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield the lines; the terminal wraps those that are too long."""
        del console, options
        widths = [max(map(_width, column)) for column in zip(*self._rows, strict=True)]
        for number, row in enumerate(self._rows):
            cells = (self._aligned(*each) for each in enumerate(zip(row, widths, strict=True)))
            yield Segment(_GAP.join(cells).rstrip(), Style(bold=True) if number == 0 else None)
            yield Segment.line()

    def _aligned(self, number: int, cell_and_width: tuple[str, int]) -> str:
        cell, width = cell_and_width
        room = " " * (width - _width(cell))
        return cell + room if number < self._texts else room + cell


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def shown(text: str) -> Text:
    """Return a rich text of a string that others have written parts of."""
    return Text(printable(text))
