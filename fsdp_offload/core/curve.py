"""Room by position: what a model leaves free, of the memory that it takes at its peak, at each point of an iteration.

Activations are gone from the end of the loss's backward to the middle of the next forward, and gradients from
``zero_grad()`` to the backward. The allocator counts in the host's program order, so what is in use at each gather and
at each reduction of one iteration is a curve, which the next iteration repeats.
"""

import bisect
import itertools
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

from .items import Item, Pool, Use

LASTING_POINTS = 8
"""For how many points of an iteration a block has to find room to come: compute waits when it leaves behind a store.
Less where there are few: an eighth of them."""

ALIKE = 0.02
"""Part of the peak by which two iterations may differ and count as one."""

PATIENCE = 12
"""Iterations without a curve that fits until it is not waited for, and read ever more seldom: some loops have none."""


class Reading(NamedTuple):
    """Device memory at one point, without the blocks of offloaded optimizers.

    Attributes:
        used_bytes: in use.
        ever_bytes: all that has ever been allocated; it only grows.
        operations: how many times some was allocated, or freed.
        optimizers: how many have blocks on the device, and share the room.
    """

    used_bytes: int
    ever_bytes: int
    operations: int = 0
    optimizers: int = 1


class History(Protocol):
    """Records what the allocator does between two calls, in the host's program order."""

    def begin(self) -> bool:
        """Begin to record; returns whether it does."""

    def end(self) -> list[int]:
        """Return bytes allocated, and, below zero, freed."""


class Curve:
    """The points of an iteration, in program order, and the room from each up to the next one.

    One iteration is read, and another one when the model takes another amount of memory, or comes to other points.

    Attributes:
        read: reads the memory now; ``None``: no allocator counts it, and there is no room.
        history: between points; ``None``: only what is allocated in all is known of these.
        room_bytes: of each point; empty: not known.
        positions: of each point, how many uses come before it.
        at: the last of these points to which this iteration has come; -1: none.
        is_expected: it has come there, and to no other point since.
        is_new: nobody has used it yet.
    """

    def __init__(self) -> None:
        self.read: Callable[[], Reading] | None = None
        self.history: History | None = None
        self.is_new = self._is_recorded = False
        self._missed = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing: what an iteration uses is something else now."""
        self._end_history()
        self.room_bytes: list[int] = []
        self.positions: list[int] = []
        self.at, self.is_expected = -1, False
        self._names: list[object] = []
        self._noted: list[tuple[object, int, Reading]] | None = None  # the points of this iteration, if it is read
        self._has_ended, self._is_wanted = True, False  # the next point begins an iteration, which is read
        self._peak, self._peak_at, self._last_bytes = Reading(0, 0), 0, 0  # and what the last iteration took there

    @property
    def is_awaited(self) -> bool:
        """Return whether an iteration is about to be read, unless some have gone by and none repeats another."""
        return self.read is not None and not self.room_bytes and self._missed < PATIENCE

    def come(self, name: object, position: int) -> None:
        """Come to a point, behind as many uses as ``position``."""
        assert self.read is not None
        if self._has_ended:
            if self._noted is not None:
                self._learn(self._noted, self.read())
            self.at, self._has_ended = -1, False
            self._noted = [] if self._is_wanted else None
            self._is_recorded = self._noted is not None and self.history is not None and self.history.begin()
        if self._noted is not None:
            self._noted.append((name, position, self.read()))
        # A root that an evaluation has gathered is not gathered again: one point may be missing.
        expected = self._names[self.at + 1 : self.at + 3]
        self.is_expected = name in expected
        self.at += expected.index(name) + 1 if self.is_expected else 0
        if self.is_expected and self.at == self._peak_at and self._noted is None:
            self._look_again(self.read())

    def end(self, *, repeats: bool) -> None:
        """End an iteration. ``repeats``: it was as the one before, and the next one may be read."""
        is_known = bool(self.room_bytes) and self.at + 1 == len(self._names) and not self._is_wanted
        if not repeats or (self.room_bytes and not is_known):
            self.forget()  # what comes and goes would count where it is read
        self._missed = 0 if is_known else self._missed + 1
        if repeats and self._noted is None:  # in the end seldom: each reading costs the host
            self._is_wanted = not is_known and (self._missed <= PATIENCE or self._missed.bit_count() == 1)
        self.at, self._has_ended = -1, True

    def _end_history(self) -> list[int]:
        if not self._is_recorded or self.history is None:
            return []
        self._is_recorded = False
        return self.history.end()

    def _learn(self, noted: list[tuple[object, int, Reading]], behind: Reading) -> None:
        """Make a curve of an iteration, and of what is read at the first point of the next."""
        events = self._end_history()
        self._is_wanted = False
        readings = [*(reading for *_, reading in noted), behind]
        more_bytes = transients(readings, events)
        is_exact = more_bytes is not None
        if more_bytes is None:  # all that is allocated up to the next point is no less than what is in use at once
            more_bytes = [later.ever_bytes - one.ever_bytes for one, later in itertools.pairwise(readings)]
            if min(more_bytes) < 0:  # the statistics have been reset
                return
        self._peak = max(readings[:-1])
        self._peak_at, self._last_bytes = readings.index(self._peak), self._peak.used_bytes
        needed_bytes = [one.used_bytes + more for one, more in zip(readings[:-1], more_bytes, strict=True)]
        peak_bytes = max(needed_bytes) if is_exact else self._peak.used_bytes
        room_bytes = [max(0, peak_bytes - one) // self._peak.optimizers for one in needed_bytes]
        names, positions = [name for name, *_ in noted], [position for _, position, _ in noted]
        self._names, self.positions, self.room_bytes = names, positions, room_bytes  # at once: there are interrupts
        self.is_new = True

    def _look_again(self, now: Reading) -> None:
        """Have an iteration read if two in turn take as much as each other, and not what the curve says."""
        peak_bytes, last_bytes, self._last_bytes = self._peak.used_bytes, self._last_bytes, now.used_bytes
        alike_bytes = ALIKE * peak_bytes
        is_other = abs(now.used_bytes - peak_bytes) > alike_bytes >= abs(now.used_bytes - last_bytes)
        self._is_wanted = is_other or now.optimizers != self._peak.optimizers


class RoomHere:
    """Holds what the room means for blocks. It is exchanged as a whole: an interrupt leaves nothing of it half done.

    Attributes:
        curve_bytes: the room of the curve that it was made of.
        is_known: there is any.
    """

    def __init__(self, curve: Curve, cycle: Sequence[Use], pools: Sequence[Pool], leaving: Container[Pool]) -> None:
        """Divide the room.

        Args:
            curve: of this iteration.
            cycle: its uses.
            pools: those that profit most in front.
            leaving: of these, those whose blocks in transit are to lie in the room, too, where no item needs them.
        """
        self._curve, self._count, self.curve_bytes = curve, len(cycle), curve.room_bytes
        self.is_known, self._positions = bool(curve.room_bytes), curve.positions
        transit = [pool.passing if pool in leaving else 0 for pool in pools]
        beyond = [shares(nbytes, pools, transit) for nbytes in curve.room_bytes]
        ahead = min(LASTING_POINTS, len(beyond) // 8)
        for number, pool in enumerate(pools if beyond else ()):
            for point in points_of(cycle, self._positions, pool, ahead):
                beyond[point][number] = max(0, beyond[point][number])  # updates need them, or stores do
        soon = [*beyond, *beyond]
        lasting = [[min(each) for each in zip(*soon[at : at + ahead + 1], strict=True)] for at in range(len(beyond))]
        self._blocks = list(zip(beyond, lasting, strict=True))
        self._leads = {
            id(pool): leads(cycle, self._positions, pool, [pool.passing + more[number] for more in beyond], ahead // 2)
            for number, pool in enumerate(pools if beyond else ())
        }

    def at(self, point: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return how many blocks each pool may have there beyond its count, and of these, how many may come."""
        return self._blocks[point]

    def is_too_early(self, pool: Pool | None, at: int) -> bool:
        """Return whether what the iteration uses at ``at`` would have to leave before, if it came into ``pool`` now."""
        iterations, own = divmod(at, self._count)
        lead = self._leads[id(pool)].get(own) if id(pool) in self._leads else None
        ahead = iterations * len(self._blocks) + point_of(self._positions, own) - self._curve.at
        return lead is not None and ahead > lead


def transients(readings: Sequence[Reading], events: Sequence[int]) -> list[int] | None:
    """Return how much more than at each point is in use at once before the next one comes.

    Args:
        readings: at each point, and at the one behind the last.
        events: bytes that were allocated and, below zero, freed since the first reading; if these are not all of them,
            the result is ``None``.
    """
    counts = [one.operations - readings[0].operations for one in readings]
    if counts[-1] != len(events):
        return None
    return [max(itertools.accumulate(events[begin:end], initial=0)) for begin, end in itertools.pairwise(counts)]


def leads(
    cycle: Sequence[Use], positions: Sequence[int], pool: Pool, most: Sequence[int], behind: int
) -> dict[int, int]:
    """Return, for each use, how many points ahead of it its items may be loaded without having to leave before it.

    Blocks are left to what updates have used at the last ``behind`` points, beyond those for items in transit: if loads
    took all of them, compute would wait for the stores of each update, and the link would stand still meanwhile.

    Args:
        cycle: the uses of an iteration.
        positions: of each point, how many of them come before it.
        pool: of these items.
        most: at each point, the most items of it that may be there and are not kept.
        behind: points of an iteration.
    """
    moving = [{item for item in use.items if item.pool is pool and not item.kept} for use in cycle]
    found: dict[int, int] = {}
    for at, items in enumerate(moving):
        lead, first, there, before = 0, point_of(positions, at), set(items), set[Item]()
        begin = stored = at
        while items and lead < len(positions):
            point = first - lead  # of the iteration before where it is negative
            while begin > _use_behind(point, cycle, positions):
                begin -= 1
                there |= moving[begin]  # they are there as well, if this is loaded ahead of them
            while stored > _use_behind(point - behind, cycle, positions):
                stored -= 1
                before |= set() if cycle[stored % len(cycle)].gathers else moving[stored % len(cycle)]
            if len(there) > max(min(most[point], pool.transit), most[point] - len(before - there)):
                break
            lead += 1
        found[at] = lead
    return found


def _use_behind(point: int, cycle: Sequence[Use], positions: Sequence[int]) -> int:
    """Return the number of the first use behind ``point``; both may be of iterations before."""
    iterations, own = divmod(point, len(positions))
    return positions[own] + iterations * len(cycle)


def point_of(positions: Sequence[int], at: int) -> int:
    """Return the point behind which an iteration has its use ``at``."""
    return max(0, bisect.bisect_right(positions, at) - 1)


def points_of(cycle: Sequence[Use], positions: Sequence[int], pool: Pool, behind: int) -> set[int]:
    """Return the points at which items of ``pool`` that are not kept are used, and so many ``behind`` each of them."""
    used = {
        point_of(positions, at)
        for at, use in enumerate(cycle)
        if any(item.pool is pool and not item.kept for item in use.items)
    }
    return {(point + more) % len(positions) for point in used for more in range(behind + 1)}


def shares(room_bytes: int, pools: Sequence[Pool], leaving: Sequence[int]) -> list[int]:
    """Divide room among ``pools``, those that profit most in front; returns how many blocks more each may have.

    ``leaving``: so many blocks of each are to lie in the room, too. Those that do not fit count below zero.
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
