"""Draws the use of a device's memory over an iteration, at each turn: the forward or backward of one group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .timeline import new_figure

_REST = "activations, gathered"

_COLORS = {
    "parameters": "#4c566a",
    "optimizer state": "#2f7fc1",
    "staging": "#88b8de",
    "gradients": "#c8502f",
    _REST: "#2e8b57",
}


@dataclass(frozen=True)
class Moment:
    """Bytes on the device at one turn of an iteration.

    Attributes:
        name: name of the turn: of a group and its pass, ``forward`` (the beginning) or ``step`` (the end).
        places: bytes by use: parameters, gradients, ...
        allocated_bytes: all bytes that the allocator has given out; 0 on the CPU, where they are not counted.
    """

    name: str
    places: Mapping[str, int]
    allocated_bytes: int

    def by_place(self) -> dict[str, int]:
        """Return ``places``, and as one more place the rest of ``allocated_bytes``."""
        return {**self.places, _REST: max(0, self.allocated_bytes - sum(self.places.values()))}


def draw_memory(moments: Sequence[Moment], path: Path) -> None:
    """Write a picture, SVG or PNG by the suffix: a stack of places over the turns of an iteration.

    Raises:
        SystemExit: matplotlib is missing.
    """
    figure = new_figure(12, 4.5)
    axes = figure.subplots()
    places = moments[0].by_place()
    stacks = [[one.by_place()[place] / 1e9 for one in moments] for place in places]
    axes.stackplot(
        range(len(moments)), stacks, labels=list(places), colors=[_COLORS[place] for place in places], step="post"
    )
    several = max(1, len(moments) // 24)
    ticks = range(0, len(moments), several)
    axes.set_xticks(ticks, [moments[number].name for number in ticks], rotation=60, ha="right", fontsize=7)
    axes.set_xlim(0, max(1, len(moments) - 1))
    axes.set_ylabel("GB")
    axes.legend(loc="upper right", fontsize=8)
    axes.grid(axis="y", linewidth=0.3)
    figure.savefig(path)
