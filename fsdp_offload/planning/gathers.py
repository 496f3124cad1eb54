"""In which order an iteration gathers, so that what is needed next is known. Learnt in the iteration before; pure."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Gather(NamedTuple):
    """A group is gathered."""

    group: int
    in_backward: bool


class GatherOrder:
    """The gathers of one iteration, from step to step, and how far the next one has come."""

    def __init__(self) -> None:
        self._cycle: list[Gather] = []
        self._places: dict[int, list[int]] = {}  # of each group in it
        self._at = -1
        self._noted: list[Gather] = []

    def note(self, gather: Gather, *, counts: bool) -> None:
        """A gather comes; ``counts``: it belongs to training, and will come again."""
        if counts:
            self._noted.append(gather)
        # An evaluation in between, or another number of micro-batches: go on at the next one like it.
        ahead = (*range(self._at + 1, len(self._cycle)), *range(self._at + 1))
        self._at = next((place for place in ahead if self._cycle[place] == gather), self._at)

    def step_ended(self) -> None:
        """The iteration is over: the next one is expected to be like it."""
        if self._noted and self._noted != self._cycle:
            self._cycle = self._noted
            places: defaultdict[int, list[int]] = defaultdict(list)
            for place, gather in enumerate(self._cycle):
                places[gather.group].append(place)
            self._places = dict(places)
        self._at, self._noted = -1, []

    def upcoming(self) -> Iterator[tuple[int, Gather]]:
        """The gathers that are still to come before the step, nearest first, and how many gathers from now."""
        return ((place - self._at, self._cycle[place]) for place in range(self._at + 1, len(self._cycle)))

    def distance(self, group: int) -> float:
        """How many gathers from now a group is needed, in the next iteration if not in this one."""
        places = self._places.get(group)
        if not places:
            return math.inf
        later = next((place for place in places if place > self._at), places[0] + len(self._cycle))
        return later - self._at

    def expects(self, gather: Gather) -> bool:
        """Whether it is still to come before the step."""
        return gather in self._cycle[self._at + 1 :]

    def begins_with(self, group: int, nbytes: Sequence[int], room_bytes: int) -> bool:
        """Whether the next iteration needs a group so early that it fits into ``room_bytes`` with all before it.

        ``nbytes``: of each group.
        """
        seen: set[int] = set()
        for gather in self._cycle:
            if gather.group not in seen:
                seen.add(gather.group)
                room_bytes -= nbytes[gather.group]
            if room_bytes < 0:
                return False
            if gather.group == group:
                return True
        return False
