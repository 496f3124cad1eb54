"""The uses of the last iteration in order, and how far this one has come; how often gradients are reduced in a step."""

import bisect
from collections import defaultdict, deque
from collections.abc import Iterator

from .items import Item, Use

NEVER = 1 << 30


class Timeline:
    """Training repeats one sequence of uses, so what comes next is known. A wrong guess costs time only.

    Attributes:
        cycle: the uses of the last iteration that had any.
        repeats: whether that iteration had the same uses as the one before.
    """

    def __init__(self) -> None:
        self.cycle: list[Use] = []
        self.repeats = False
        self._positions: dict[Item, list[int]] = {}
        self._index: dict[Use, list[int]] = {}
        self._noted: list[Use] = []
        self._at = 0

    def note(self, use: Use) -> None:
        """Say that ``use`` has come."""
        self._noted.append(use)
        found = self._index.get(use, ())
        later = bisect.bisect_left(found, self._at)
        if later < len(found):
            self._at = found[later] + 1

    def end(self) -> None:
        """End the iteration: its uses are expected of the next one."""
        if not self._noted:
            return
        self.repeats = list(map(id, self._noted)) == list(map(id, self.cycle))
        if not self.repeats:
            positions, index = defaultdict(list), defaultdict(list)
            for at, use in enumerate(self._noted):
                index[use].append(at)
                for item in use.items:
                    positions[item].append(at)
            self.cycle, self._positions, self._index = self._noted, dict(positions), dict(index)
        self._noted, self._at = [], 0

    def forget(self) -> None:
        """Expect nothing: the items are others now."""
        self.__init__()  # type: ignore[misc]

    def upcoming(self, most: int) -> Iterator[tuple[int, Use]]:
        """Yield what comes next, nearest first, into the next iteration."""
        count = len(self.cycle)
        for ahead in range(min(count, most)):
            yield ahead, self.cycle[(self._at + ahead) % count]

    def distance(self, item: Item) -> int:
        """Count uses until the next one of ``item``."""
        positions = self._positions.get(item)
        if not positions:
            return NEVER
        index = bisect.bisect_left(positions, self._at)
        return positions[index] - self._at if index < len(positions) else positions[0] + len(self.cycle) - self._at


class Reductions:
    """When gradients of a group are final: after as many reductions as the one of the last four steps with most had."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = defaultdict(int)
        self._before: deque[dict[int, int]] = deque(maxlen=4)
        self._least = 0

    @property
    def have_begun(self) -> bool:
        """Return whether there has been a reduction since the last step."""
        return bool(self._counts)

    def expect_one(self) -> None:
        """Expect one reduction where no earlier step tells how many: there is no room to keep gradients for more."""
        self._least = 1

    def count(self, group: int) -> None:
        """Note one reduction of the gradients of ``group``."""
        self._counts[group] += 1

    def is_final(self, group: int) -> bool:
        """Return whether no further reduction is expected. In the first step, nobody knows."""
        expected = max((counts.get(group, 0) for counts in self._before), default=0) or self._least
        return 0 < expected <= self._counts.get(group, 0)

    def next_is_final(self, group: int) -> bool:
        """Return whether one more reduction is expected of ``group``."""
        return self._counts.get(group, 0) + 1 == max((counts.get(group, 0) for counts in self._before), default=0)

    def end(self, *, stepped: bool = True) -> None:
        """Begin the next step; without ``stepped``, gradients were cleared, and what was reduced counts for nothing."""
        if stepped and self._counts:
            self._before.append(dict(self._counts))
        self._counts = defaultdict(int)
