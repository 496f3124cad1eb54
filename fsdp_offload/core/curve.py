"""Room by position: what a model leaves free, of the memory that it takes at its peak, at each point of an iteration.

Activations are gone from the end of the loss's backward to the middle of the next forward, and gradients from
``zero_grad()`` to the backward. The allocator counts in the host's program order, so what is in use at each gather and
at each reduction of one iteration is a curve, which the next iteration repeats.
"""

import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from .items import Pool, Use

ALIKE = 0.02
"""Part of the peak by which two iterations may differ and count as one."""

PATIENCE = 12
"""Iterations until the curve is not waited for: a loop that never repeats itself has none."""


class Reading(NamedTuple):
    """Device memory at one point, without the blocks of offloaded optimizers.

    Attributes:
        used_bytes: in use.
        ever_bytes: all that has ever been allocated; it only grows.
        optimizers: how many have blocks on the device, and share the room.
    """

    used_bytes: int
    ever_bytes: int
    optimizers: int = 1


class Curve:
    """The points of an iteration, in program order, and the room from each up to the next one.

    One iteration is read, and another one when the model takes another amount of memory, or comes to other points.

    Attributes:
        read: reads the memory now; ``None``: no allocator counts it, and there is no room.
        room_bytes: of each point; empty: not known.
        at: the last of these points to which this iteration has come; -1: none.
        is_expected: it has come there, and to no other point since.
    """

    def __init__(self, read: Callable[[], Reading] | None = None) -> None:
        self.read, self._missed = read, 0
        self.forget()

    @property
    def is_awaited(self) -> bool:
        """Return whether iterations are about to be read, unless some have gone by and none repeats another."""
        return self.read is not None and not self.room_bytes and self._missed < PATIENCE

    def forget(self) -> None:
        """Know nothing: what an iteration uses is something else now."""
        self.room_bytes: list[int] = []
        self.at, self.is_expected = -1, False
        self.positions: list[int] = []  # of each point, how many uses come before it
        self._names: list[object] = []
        self._noted: list[tuple[object, int, Reading]] | None = None  # the points of this iteration, if it is read
        self._has_ended, self._is_wanted = True, False  # the next point begins an iteration, which is read
        self._peak, self._peak_at, self._last_bytes = Reading(0, 0), 0, 0  # and what the last iteration took there

    def come(self, name: object, position: int) -> bool:
        """Come to a point, behind as many uses as ``position``; returns whether the curve is another one now."""
        assert self.read is not None
        is_learnt = False
        if self._has_ended:
            if self._noted is not None:
                is_learnt = self._learn(self._noted, self.read())
            self.at, self._has_ended = -1, False
            self._noted = [] if self._is_wanted else None
        if self._noted is not None:
            self._noted.append((name, position, self.read()))
        self.is_expected = self._names[self.at + 1 : self.at + 2] == [name]
        self.at += self.is_expected
        if self.is_expected and self.at == self._peak_at and self._noted is None:
            self._look_again(self.read())
        return is_learnt

    def end(self, *, repeats: bool) -> None:
        """End an iteration. ``repeats``: it was as the one before, and the next one may be read."""
        self._missed += not self.room_bytes
        if not repeats:
            self.forget()
        if self._has_ended:
            return
        is_known = bool(self.room_bytes) and self.at + 1 == len(self._names)
        self._is_wanted = self._noted is None and (self._is_wanted or not is_known)
        self.at, self._has_ended = -1, True

    def _learn(self, noted: list[tuple[object, int, Reading]], behind: Reading) -> bool:
        """Make a curve of an iteration, and of what is read at the first point of the next."""
        readings = [reading for *_, reading in noted]
        # What was in use at a point, and all that is allocated up to the next one, is no less than what is in use at
        # once; and the model's peak is no less than what is in use at any point.
        more_bytes = [later.ever_bytes - one.ever_bytes for one, later in pairwise([*readings, behind])]
        if min(more_bytes) < 0:  # the statistics have been reset
            return False
        self._peak = max(readings)
        self._peak_at, self._last_bytes = readings.index(self._peak), self._peak.used_bytes
        needed_bytes = [one.used_bytes + more for one, more in zip(readings, more_bytes, strict=True)]
        self.room_bytes = [max(0, self._peak.used_bytes - one) // self._peak.optimizers for one in needed_bytes]
        self._names, self.positions = [name for name, *_ in noted], [position for _, position, _ in noted]
        self._is_wanted, self._missed = False, 0
        return True

    def _look_again(self, now: Reading) -> None:
        """Have the next iteration read if two in turn take as much as each other, and not what the curve says."""
        peak_bytes, last_bytes, self._last_bytes = self._peak.used_bytes, self._last_bytes, now.used_bytes
        alike_bytes = ALIKE * peak_bytes
        is_other = abs(now.used_bytes - peak_bytes) > alike_bytes >= abs(now.used_bytes - last_bytes)
        self._is_wanted = is_other or now.optimizers != self._peak.optimizers


def leads(cycle: Sequence[Use], positions: Sequence[int], pool: Pool, most: Sequence[int]) -> dict[int, int]:
    """Return, for each use, how many points ahead of it its items may be loaded without having to leave before it.

    Args:
        cycle: the uses of an iteration.
        positions: of each point, how many of them come before it.
        pool: of these items.
        most: at each point, the most items of it that may be there and are not kept.
    """
    moving = [{item for item in use.items if item.pool is pool and not item.kept} for use in cycle]
    found: dict[int, int] = {}
    for at, items in enumerate(moving):
        lead, first, there = 0, point_of(positions, at), set(items)
        begin = at
        while items and lead < len(positions):
            point = first - lead  # of the iteration before where it is negative
            while begin > positions[point] - (len(cycle) if point < 0 else 0):
                begin -= 1
                there |= moving[begin]  # they are there as well, if this is loaded ahead of them
            if len(there) > most[point]:
                break
            lead += 1
        found[at] = lead
    return found


def point_of(positions: Sequence[int], at: int) -> int:
    """Return the point behind which an iteration has its use ``at``."""
    return max(0, bisect.bisect_right(positions, at) - 1)


def shares(room_bytes: int, pools: Sequence[Pool]) -> tuple[int, ...]:
    """Divide room among ``pools``, those that profit most in front; returns how many blocks more each may have."""
    found = []
    for pool in pools:
        found.append(max(0, min(pool.most - pool.count, room_bytes // pool.nbytes)))
        room_bytes -= found[-1] * pool.nbytes
    return tuple(found)
