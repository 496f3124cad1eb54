"""How many bytes of what is offloaded may lie on the device, where the policy says ``"auto"``.

It begins with what passes, and grows by ``extra`` where compute stood still waiting for items: a byte that stays saves
a load and a store, so half of what the link could have moved meanwhile is enough. No model of the iteration, nothing
measured alone.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..device.lanes import StreamMark, current_stream

TOLERATED = 0.01
"""Part of an iteration for which compute may stand still."""

UNSETTLED = 3
"""Iterations that allocate, pin, create state and fill caches: their times say nothing."""

CALM = 16
"""Iterations without a wait after which a block less is tried."""


class Reading(NamedTuple):
    """One iteration, as the device has measured it."""

    stalled_ms: float
    iteration_ms: float


class Stopwatch:
    """Times waits on streams by pairs of events, which are read one iteration later so that nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[tuple[StreamMark, StreamMark]] = []
        self._begun: StreamMark | None = None
        self._ended: deque[tuple[StreamMark, StreamMark, list[tuple[StreamMark, StreamMark]]]] = deque()

    def _now(self, stream: torch.Stream | None) -> StreamMark:
        mark = StreamMark(self._device)
        (current_stream(self._device) if stream is None else stream).record_event(mark.event)
        return mark

    @contextmanager
    def waiting(self, stream: torch.Stream | None) -> Iterator[None]:
        """Time what ``stream`` waits for in between; ``None``: the current stream."""
        begin = self._now(stream)
        yield
        self._waits.append((begin, self._now(stream)))

    def end(self) -> Reading | None:
        """End an iteration; returns the latest one that the device has finished, if there is a new one."""
        now = self._now(None)
        if self._begun is not None:
            self._ended.append((self._begun, now, self._waits))
        self._begun, self._waits = now, []
        if len(self._ended) < 2:
            return None
        begin, end, waits = self._ended.popleft()
        end.synchronize()  # of the iteration before the last: the host is not held up
        return Reading(sum(one.elapsed_ms_since(b) for b, one in waits), end.elapsed_ms_since(begin))


class Room:
    """The blocks that may be there beside the least.

    Attributes:
        extra: how many.
        sentence: what was found, for the report.
    """

    def __init__(self, block_bytes: int, most: int, rate: float) -> None:
        """Take the bytes of a block, how many more would be of use, and bytes per ms of loads and stores together."""
        self.block_bytes, self.most, self.rate = block_bytes, most, rate
        self.extra = 0
        self.sentence = ""
        self._floor = 0  # fewer than so many have been seen to stall
        self._calm = 0
        self._iterations = 0
        self._rest = 0  # iterations whose readings are of other blocks

    def end(self, reading: Reading | None, *, steady: bool, free_bytes: Callable[[], int]) -> bool:
        """End an iteration; returns whether ``extra`` has changed.

        Args:
            reading: times of an iteration before.
            steady: this iteration repeated the one before, created no state and took no memory.
            free_bytes: what would still be free at the highest point so far.
        """
        self._iterations = self._iterations + 1 if steady else 0
        self._rest = max(0, self._rest - 1)
        if reading is None or self._rest or self._iterations < UNSETTLED:
            return False
        before = self.extra
        if reading.stalled_ms > TOLERATED * reading.iteration_ms:
            self._floor, self._calm = max(self._floor, self.extra + 1), 0
            wanted = -(-int(reading.stalled_ms * self.rate / 2) // self.block_bytes)
            # Half of what is free at most: the next reading says whether more is needed.
            self.extra = min(self.most, self.extra + min(max(1, wanted), max(0, free_bytes()) // 2 // self.block_bytes))
        else:
            self._calm += 1
            if self._calm >= CALM and self.extra > self._floor:
                self.extra, self._calm = self.extra - 1, 0
        if free_bytes() < 0:
            self.extra = max(0, self.extra - 1)
        self.sentence = (
            f"{self.extra} blocks stay; compute waited {reading.stalled_ms:.1f} of {reading.iteration_ms:.1f} ms"
        )
        if self.extra != before:
            self._rest = 3  # the readings of iterations that have begun already are of other blocks
        return self.extra != before
