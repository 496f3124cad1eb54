"""Room by position: at each point of an iteration, the memory that a model leaves free below its own peak.

Activations take little memory from the end of the backward to the middle of the next forward, gradients none from
``zero_grad()`` to the backward. The allocator counts in the host's program order, so the bytes in use at each gather
and each reduction of one iteration are a curve, which the next iteration repeats.
"""

import bisect
import itertools
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

from .items import Item, Pool, Use

LASTING_POINTS = 8
"""A block is allocated only if it fits at this many following points, or at an eighth of all points if that is fewer:
when a block leaves, compute waits for its store."""

ALIKE = 0.02
"""Part of the peak by which two iterations may differ and still count as equal."""

PATIENCE = 12
"""After this many iterations without a fitting curve, the choice of blocks no longer waits for one, and iterations are
read ever more seldom: some loops never repeat."""


class Reading(NamedTuple):
    """Device memory at one point, without the blocks of offloaded optimizers.

    Attributes:
        used_bytes: bytes in use.
        ever_bytes: bytes ever allocated; it only grows.
        operations: count of allocations and frees.
        optimizers: count of offloaded optimizers, which share the room.
    """

    used_bytes: int
    ever_bytes: int
    operations: int = 0
    optimizers: int = 1


class History(Protocol):
    """Records what the allocator does between two calls, in the host's program order."""

    def begin(self) -> bool:
        """Begin to record; return whether recording has begun."""

    def end(self) -> list[int]:
        """Return the bytes of each allocation in order, negative for frees."""


class Curve:
    """The points of an iteration, in program order, and the room from each up to the next one.

    It is read in one iteration, and again when the model takes another amount of memory or comes to other points.

    Attributes:
        read: reads the memory now; ``None``: the allocator has no statistics, and there is no room.
        history: records operations between points; ``None``: only the sum of allocations between points is known.
        room_bytes: room of each point; empty: not known.
        positions: for each point, the number of uses before it.
        at: index of the last point that this iteration has passed; -1: none.
        is_expected: the last point that came was the expected one.
        is_new: the engine has not seen this curve yet.
    """

    def __init__(self) -> None:
        self.read: Callable[[], Reading] | None = None
        self.history: History | None = None
        self.is_new = self._is_recorded = False
        self._missed = 0
        self.forget()

    def forget(self) -> None:
        """Forget the curve: iterations use other memory from now on."""
        self._end_history()
        self.room_bytes: list[int] = []
        self.positions: list[int] = []
        self.at, self.is_expected = -1, False
        self._names: list[object] = []
        self._noted: list[tuple[object, int, Reading]] | None = None  # points read in this iteration; None: not read
        self._has_ended, self._is_wanted = True, False  # the next point begins an iteration; read that iteration
        self._peak, self._peak_at, self._last_bytes = Reading(0, 0), 0, 0  # peak; its point; last bytes at that point

    @property
    def is_awaited(self) -> bool:
        """Return whether to wait for a curve: none is known, for fewer than ``PATIENCE`` iterations so far."""
        return self.read is not None and not self.room_bytes and self._missed < PATIENCE

    def come(self, name: object, position: int) -> None:
        """Handle the point ``name``, before which the iteration has had ``position`` uses."""
        assert self.read is not None
        if self._has_ended:
            if self._noted is not None:
                self._learn(self._noted, self.read())
            self.at, self._has_ended = -1, False
            self._noted = [] if self._is_wanted else None
            self._is_recorded = self._noted is not None and self.history is not None and self.history.begin()
        if self._noted is not None:
            self._noted.append((name, position, self.read()))
        # The root is not gathered again after an evaluation has gathered it: one point may be missing.
        expected = self._names[self.at + 1 : self.at + 3]
        self.is_expected = name in expected
        self.at += expected.index(name) + 1 if self.is_expected else 0
        if self.is_expected and self.at == self._peak_at and self._noted is None:
            now = self.read()
            # Ask for a new reading if two iterations in a row agree with each other, but not with the curve.
            peak_bytes, last_bytes, self._last_bytes = self._peak.used_bytes, self._last_bytes, now.used_bytes
            alike_bytes = ALIKE * peak_bytes
            is_other = abs(now.used_bytes - peak_bytes) > alike_bytes >= abs(now.used_bytes - last_bytes)
            self._is_wanted = is_other or now.optimizers != self._peak.optimizers

    def end(self, *, repeats: bool) -> None:
        """End an iteration. ``repeats``: it had the same uses as the one before, and the next one may be read."""
        is_known = bool(self.room_bytes) and self.at + 1 == len(self._names) and not self._is_wanted
        if not repeats or (self.room_bytes and not is_known):
            self.forget()  # the reading would count memory that other iterations do not take
        self._missed = 0 if is_known else self._missed + 1
        if repeats and self._noted is None:  # ever more seldom: each reading costs the host
            self._is_wanted = not is_known and (self._missed <= PATIENCE or self._missed.bit_count() == 1)
        self.at, self._has_ended = -1, True

    def _end_history(self) -> list[int]:
        if not self._is_recorded or self.history is None:
            return []
        self._is_recorded = False
        return self.history.end()

    def _learn(self, noted: list[tuple[object, int, Reading]], behind: Reading) -> None:
        """Make a curve of the points ``noted`` in an iteration; ``behind`` is read at the first point of the next."""
        events = self._end_history()
        self._is_wanted = False
        readings = [*(reading for *_, reading in noted), behind]
        more_bytes = transients(readings, events)
        is_exact = more_bytes is not None
        if more_bytes is None:  # upper bound: the sum of allocations up to the next point
            more_bytes = [later.ever_bytes - one.ever_bytes for one, later in itertools.pairwise(readings)]
            if min(more_bytes) < 0:  # the statistics have been reset
                return
        self._peak = max(readings[:-1])
        self._peak_at, self._last_bytes = readings.index(self._peak), self._peak.used_bytes
        needed_bytes = [one.used_bytes + more for one, more in zip(readings[:-1], more_bytes, strict=True)]
        peak_bytes = max(needed_bytes) if is_exact else self._peak.used_bytes
        room_bytes = [max(0, peak_bytes - one) // self._peak.optimizers for one in needed_bytes]
        names, positions = [name for name, *_ in noted], [position for _, position, _ in noted]
        self._names, self.positions, self.room_bytes = names, positions, room_bytes  # together: an interrupt may come
        self.is_new = True


class RoomHere:
    """Says how many blocks the room allows at each point. It is replaced as a whole, so that no interrupt tears it.

    Attributes:
        curve_bytes: ``room_bytes`` of the curve from which it was made.
        is_known: the curve is known.
    """

    def __init__(self, curve: Curve, cycle: Sequence[Use], pools: Sequence[Pool], leaving: Container[Pool]) -> None:
        """Divide the room.

        Args:
            curve: the curve of an iteration.
            cycle: uses of the iteration.
            pools: all pools, those that gain most from a block first.
            leaving: pools that give up blocks in transit at points without room for them, unless a use needs them.
        """
        self._curve, self._count, self.curve_bytes = curve, len(cycle), curve.room_bytes
        self.is_known, self._positions = bool(curve.room_bytes), curve.positions
        transit = [pool.passing if pool in leaving else 0 for pool in pools]
        beyond = [shares(nbytes, pools, transit) for nbytes in curve.room_bytes]
        ahead = min(LASTING_POINTS, len(beyond) // 8)
        for number, pool in enumerate(pools if beyond else ()):
            uses = (at for at, use in enumerate(cycle) if any(one.pool is pool and not one.kept for one in use.items))
            used = {point_of(self._positions, at) for at in uses}
            for point in {(point + more) % len(self._positions) for point in used for more in range(ahead + 1)}:
                beyond[point][number] = max(0, beyond[point][number])  # updates or stores need these blocks
        soon = [*beyond, *beyond]
        lasting = [[min(each) for each in zip(*soon[at : at + ahead + 1], strict=True)] for at in range(len(beyond))]
        self._blocks = list(zip(beyond, lasting, strict=True))
        self._leads = {
            id(pool): leads(cycle, self._positions, pool, [pool.passing + more[number] for more in beyond], ahead // 2)
            for number, pool in enumerate(pools if beyond else ())
        }

    def at(self, point: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return ``Pool.beyond`` and ``Pool.lasting`` of each pool at ``point``."""
        return self._blocks[point]

    def is_too_early(self, pool: Pool | None, at: int) -> bool:
        """Return whether an item of ``pool``, loaded now for use ``at``, would have to leave before that use."""
        iterations, own = divmod(at, self._count)
        lead = self._leads[id(pool)].get(own) if id(pool) in self._leads else None
        ahead = iterations * len(self._blocks) + point_of(self._positions, own) - self._curve.at
        return lead is not None and ahead > lead


def transients(readings: Sequence[Reading], events: Sequence[int]) -> list[int] | None:
    """Return, for each point, by how many bytes memory in use rises at most before the next point.

    Args:
        readings: memory at each point, and at the first point of the next iteration.
        events: bytes allocated, negative for frees, in order since the first reading. Unless there are as many
            as counted operations, the result is ``None``.
    """
    counts = [one.operations - readings[0].operations for one in readings]
    if counts[-1] != len(events):
        return None
    return [max(itertools.accumulate(events[begin:end], initial=0)) for begin, end in itertools.pairwise(counts)]


def leads(
    cycle: Sequence[Use], positions: Sequence[int], pool: Pool, most: Sequence[int], behind: int
) -> dict[int, int]:
    """Return, for each use, how many points earlier its items may be loaded without having to leave before the use.

    Loads may take ``pool.transit`` blocks, and more only if blocks are left to items that updates used at the last
    ``behind`` points. If loads took all, compute would wait for each update's stores, with an idle link meanwhile.

    Args:
        cycle: uses of an iteration.
        positions: for each point, the number of uses before it.
        pool: the pool whose items count.
        most: for each point, the most items of the pool that may be on the device without being kept.
        behind: points for which an updated item keeps its block, while it is stored.
    """
    moving = [{item for item in use.items if item.pool is pool and not item.kept} for use in cycle]
    found: dict[int, int] = {}
    for at, items in enumerate(moving):
        lead, first, there, before = 0, point_of(positions, at), set(items), set[Item]()
        begin = stored = at
        while items and lead < len(positions):
            point = first - lead  # negative: a point of the iteration before
            while begin > _use_behind(point, cycle, positions):
                begin -= 1
                there |= moving[begin]  # items used in between are on the device as well
            while stored > _use_behind(point - behind, cycle, positions):
                stored -= 1
                before |= set() if cycle[stored % len(cycle)].gathers else moving[stored % len(cycle)]
            if len(there) > max(min(most[point], pool.transit), most[point] - len(before - there)):
                break
            lead += 1
        found[at] = lead
    return found


def _use_behind(point: int, cycle: Sequence[Use], positions: Sequence[int]) -> int:
    """Return the number of the first use after ``point``; both may belong to earlier iterations."""
    iterations, own = divmod(point, len(positions))
    return positions[own] + iterations * len(cycle)


def point_of(positions: Sequence[int], at: int) -> int:
    """Return the last point before the use ``at`` of an iteration."""
    return max(0, bisect.bisect_right(positions, at) - 1)


def shares(room_bytes: int, pools: Sequence[Pool], leaving: Sequence[int]) -> list[int]:
    """Divide room among ``pools``, given in the order of their gain; return how many more blocks each may have.

    ``leaving``: blocks of each pool that exist and have to fit as well; each that does not fit counts -1 in the result.
    """
    room_bytes -= sum(pool.nbytes * count for pool, count in zip(pools, leaving, strict=True))
    found = [0] * len(pools)
    for at, pool in enumerate(pools):
        found[at] = max(0, min(pool.most - pool.count, room_bytes // pool.nbytes))
        room_bytes -= found[at] * pool.nbytes
    for at, pool in reversed([*enumerate(pools)]):
        less = max(0, min(leaving[at], -(room_bytes // pool.nbytes)))
        found[at] -= less
        room_bytes += less * pool.nbytes
    return found
