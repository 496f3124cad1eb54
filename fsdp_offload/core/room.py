"""Chooses how many offloaded bytes may lie on the device, where the policy says ``"auto"``.

It begins with blocks for items in transit. ``extra`` grows when compute has stalled for items: a byte that stays saves
a load and a store, so half of the bytes that the link moves during the stall are enough. Then blocks leave again, while
compute does not stall. It needs no model of the iteration, and measures training itself.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..device.lanes import EventMark, Lane, current_stream, mark_on
from .items import Item, Pool

TOLERATED = 0.01
"""Part of an iteration for which compute may stall."""

UNSETTLED = 3
"""First iterations, which allocate, pin, create state and fill caches, so that their times say nothing."""

CALM = 6
"""Iterations without a stall after which fewer blocks are tried: half of those above the most that have stalled."""

LONGER, LASTING = 1.5, 16
"""After 16 iterations that take 1.5 times as long, blocks that were too few are tried again: more tokens hide more."""

TWO_WAY_BYTES_PER_MS = 80e6
"""Rate of loads and stores together until both are measured; only how fast ``"auto"`` grows depends on it."""

SAMPLED, ASKED = 8, 16
"""Once nothing changes, one iteration in eight is timed; the next 16 are if someone has asked for the last one."""

FULL = 0.75
"""Busy part of the link's time above which copies fill the driver's queue: the host waits in our hooks, and compute
waits for the host."""


class Reading(NamedTuple):
    """Times of one iteration, measured by the device.

    Attributes:
        stalled_ms: time for which compute waited for items.
        in_step_ms: part of ``stalled_ms`` in updates on compute, which wait for all copies, however many items stay.
        iteration_ms: from the end of the last step to the end of this one.
        load_gb_per_s, store_gb_per_s: rate of one large copy each way, in 10**9 bytes; ``None``: not measured.
        link_ms: time that the busier direction needs for all bytes moved, at that rate.
        host_ms: time for which compute was idle while the host was in reductions' hooks or in ``step()``.
        paced_ms: ``host_ms`` plus time between two of our calls, less waits, if compute was idle at both calls: other
            Python code may have kept compute waiting.
    """

    stalled_ms: float
    iteration_ms: float
    load_gb_per_s: float | None = None
    store_gb_per_s: float | None = None
    in_step_ms: float = 0.0
    host_ms: float = 0.0
    paced_ms: float = 0.0
    link_ms: float = 0.0

    @property
    def late_ms(self) -> float:
        """Return the part of the stall that more blocks would have avoided."""
        is_full = self.link_ms > FULL * self.iteration_ms
        return self.stalled_ms - self.in_step_ms + (self.host_ms if is_full else 0)


class _Wait(NamedTuple):
    """Marks before and after the waits of compute for one item, and the time that the host took between them."""

    begin: EventMark
    end: EventMark
    in_step: bool
    host_ms: float

    @property
    def ms(self) -> float:
        """Return the time for which compute waited for the item, less that for which the host was late."""
        return max(0.0, self.end.elapsed_ms_since(self.begin) - self.host_ms)


class _Call(NamedTuple):
    """A call of ours: marks at its ends, its waits ``[first, behind)``, and whether compute caught up during it."""

    begin: EventMark
    end: EventMark
    first: int
    behind: int
    caught_up: bool


@dataclass
class _Iteration:
    """Marks of one iteration: at its ends, and around each wait, each of our calls, one load and one store."""

    begin: EventMark
    caught_up: bool = False  # ``_Call.caught_up`` of the last call before the iteration
    end: EventMark | None = None
    waits: list["_Wait"] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    copies: dict[str, tuple[int, Any, Any]] = field(default_factory=dict)  # EventMarks: no lane is serial here
    largest_bytes: dict[str, int] = field(default_factory=dict)  # by lane name, the largest copy
    moved_bytes: dict[str, int] = field(default_factory=dict)  # by lane name, the sum of all copies

    def read(self) -> Reading:
        """Block the host until the device has finished the iteration and its timed copies; return the times."""
        assert self.end is not None
        self.end.synchronize()
        waits_ms = [wait.ms for wait in self.waits]  # once: each costs the host 10 us

        def ms(begin: EventMark, end: EventMark, first: int, behind: int) -> float:
            return max(0.0, end.elapsed_ms_since(begin) - sum(waits_ms[first:behind]))

        in_step_ms = sum(itertools.compress(waits_ms, [wait.in_step for wait in self.waits]))
        # The device passes both marks of a call at once, unless it has run out of earlier work.
        host_ms = sum(ms(*call[:4]) for call in self.calls)
        before, at, caught_up = self.begin, 0, self.caught_up
        between = []
        for call in self.calls:
            between.append((ms(before, call.begin, at, call.first), caught_up and call.caught_up))
            before, at, caught_up = call.end, call.behind, call.caught_up
        rates = {name: self.gb_per_s(name) for name in ("load", "store")}
        return Reading(
            *(sum(waits_ms), self.end.elapsed_ms_since(self.begin), rates["load"], rates["store"]),
            link_ms=max(self.moved_bytes[name] / rate / 1e6 if rate else 0.0 for name, rate in rates.items()),
            in_step_ms=in_step_ms,
            host_ms=host_ms,
            paced_ms=host_ms + sum(between_ms for between_ms, is_paced in between if is_paced),
        )

    def gb_per_s(self, lane: str) -> float | None:
        """Return the rate of the copy that was timed on ``lane``; block the host until it has ended."""
        if lane not in self.copies:
            return None
        nbytes, begin, end = self.copies[lane]
        end.synchronize()
        return float(nbytes / max(1e-6, end.elapsed_ms_since(begin)) / 1e6)


class Stopwatch:
    """Times iterations, waits of compute, and one copy each way, by pairs of events.

    Training reads the times one iteration later, so that it need not wait for the device; the report waits. Marks cost
    the host 3 ms of an iteration of a Llama of 3 G parameters, so that not every iteration is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now: _Iteration | None = None
        self._ended: deque[_Iteration] = deque(maxlen=2)
        self._unread: _Iteration | None = None
        self._asked = 0  # iterations that are timed since someone has asked for the last one
        self._largest_bytes: dict[str, int] = {}
        self._is_called = False

    def _mark(self) -> EventMark:
        return mark_on(current_stream(self._device), self._device)

    @contextmanager
    def waiting(self, *, in_step: bool = False, with_host: bool = False) -> Iterator[None]:
        """Time waits that are issued to the current stream inside the block.

        ``in_step``: an update on compute waits. ``with_host``: count the host's time, too, as for a full driver queue.
        """
        if (now := self._now) is None:
            yield
            return
        begin, began = self._mark(), time.perf_counter()
        yield
        if now is self._now:
            host_ms = 0.0 if with_host else (time.perf_counter() - began) * 1e3
            now.waits.append(_Wait(begin, self._mark(), in_step, host_ms))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Time how long the device is idle while the host is in this block, which issues no work of ours on compute."""
        if (now := self._now) is None:
            yield
            return
        begin, first, is_outer = self._mark(), len(now.waits), not self._is_called
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = not is_outer
        if is_outer and now is self._now:
            now.calls.append(_Call(begin, self._mark(), first, len(now.waits), begin.is_passed()))

    @contextmanager
    def copying(self, lane: Lane, nbytes: int) -> Iterator[None]:
        """Count ``nbytes`` copied on ``lane``; time the first copy as large as the largest of the iteration before."""
        name, now = lane.name, self._now
        largest_bytes = self._largest_bytes.get(name, 0)
        if now is not None:
            now.largest_bytes[name] = max(nbytes, now.largest_bytes.get(name, 0))
            now.moved_bytes[name] = now.moved_bytes.get(name, 0) + nbytes
        if now is None or name in now.copies or nbytes < largest_bytes:
            yield
            return
        begin = lane.mark(timed=True)
        yield
        end = lane.mark(timed=True)
        if type(begin) is type(end):  # else the copy was put off behind its begin: time the next one
            now.copies[name] = nbytes, begin, end

    def end(self, *, reads: bool = True, times_next: bool = True) -> Reading | None:
        """End an iteration; return the times of the one before, if known. The device has finished it, or will soon.

        ``reads``: the times are wanted, which costs the host 1 ms. ``times_next``: time the next iteration.
        """
        unread, self._unread, ended = self._unread, self._now, self._now
        times_next, self._asked = times_next or self._asked > 0, max(0, self._asked - 1)
        self._now = None
        if ended is not None or times_next:
            mark = self._mark()
            if ended is not None:
                ended.end = mark
                self._ended.append(ended)
                self._largest_bytes = ended.largest_bytes
            if times_next:
                last = [] if ended is None else ended.calls[-1:]
                self._now = _Iteration(mark, any(call.caught_up for call in last))
        return unread.read() if reads and unread is not None else None

    def last(self) -> Reading | None:
        """Return times and rates of the last timed iteration, and time the next ones.

        Block the host until the device has finished it. ``None``: none has been timed.
        """
        self._asked = ASKED
        if not self._ended:
            return None

        def rate(lane: str) -> float | None:  # that of the iteration before, if this one timed no copy
            rates = (one.gb_per_s(lane) for one in reversed(self._ended))
            return next((one for one in rates if one is not None), None)

        return self._ended[-1].read()._replace(load_gb_per_s=rate("load"), store_gb_per_s=rate("store"))

    def forget(self) -> None:
        """Forget all iterations, including the one under way, which did not end with a step."""
        self._now = self._unread = None
        self._ended.clear()


class Room:
    """Chooses how many blocks are allowed above the minimum.

    Attributes:
        extra: blocks above the minimum.
        is_full: compute stalled when it did last, though no memory was free for more blocks.
        is_settled: compute has not stalled for long with this number of blocks.
        sentence: the last finding, for the report.
    """

    def __init__(self, block_bytes: int, most: int, rate: float) -> None:
        """Take the bytes of a block, the largest useful ``extra``, and bytes per ms of loads and stores together."""
        self.block_bytes, self.most, self.rate = block_bytes, most, rate
        self.extra, self.is_full, self.is_settled = 0, False, False
        self.sentence = ""
        self._floor = 0  # with fewer extra blocks, compute has stalled before
        self._enough = most  # with these, compute has not
        self._tries = False  # fewer blocks than were enough are tried
        self._lasting = LASTING
        self._calm = deque[float](maxlen=LASTING)  # ms of iterations since the last stall or change
        self._calm_ms = math.inf  # the shortest since the last stall
        self._iterations = 0
        self._rest = 0  # readings still to skip, taken with the previous number of blocks
        self._late_ms = deque[float](maxlen=4)  # ``late_ms`` of the last readings with this number of blocks
        self._proven: float = math.inf  # with these, compute has not stalled for ``LASTING`` iterations

    @classmethod
    def for_pools(cls, pools: Sequence[Pool], items: Iterable[Item]) -> "Room | None":
        """Make a room for the blocks that ``pools`` lack and could use; ``None`` if they lack none.

        All blocks together take at most the bytes of ``items``, which would be on the device without offload. Blocks
        are as large as the largest item, so that one for each item would take more.
        """
        wanting = [pool for pool in pools if pool.most > pool.count]
        if not wanting:
            return None
        unit_bytes = max(pool.nbytes for pool in wanting)
        wanted_bytes = sum((pool.most - pool.count) * pool.nbytes for pool in wanting)
        left_bytes = sum(item.nbytes for item in items) - sum(pool.count * pool.nbytes for pool in pools)
        most = min(-(-wanted_bytes // unit_bytes), -(-left_bytes // unit_bytes))
        return cls(unit_bytes, max(0, most), TWO_WAY_BYTES_PER_MS)

    def counts(self, pools: Sequence[Pool]) -> list[int]:
        """Divide ``extra`` among ``pools``, given in the order of their gain; return how many blocks each gets."""
        left_bytes, counts = self.extra * self.block_bytes, []
        for pool in pools:
            more = min(pool.most - pool.least, left_bytes // pool.nbytes)
            counts.append(pool.least + more)
            left_bytes -= more * pool.nbytes
        return counts

    def end(self, reading: Reading | None, *, steady: bool, free_bytes: Callable[[], int]) -> int:
        """End an iteration; return by how many blocks ``extra`` has grown.

        Args:
            reading: times of an earlier iteration.
            steady: this iteration repeated the one before, created no state and took no memory.
            free_bytes: returns the bytes still free at the peak so far.
        """
        self._iterations = self._iterations + 1 if steady else 0
        self._rest = max(0, self._rest - 1)
        if reading is None or self._rest or self._iterations < UNSETTLED:
            return 0
        before, free = self.extra, free_bytes()  # once: on a GPU it costs the host half a ms
        # The best of two readings counts: a shared machine may halt once, which no block would have prevented. The best
        # of four, if these blocks have been enough for long: it may halt for longer.
        believed = 4 if self.extra >= self._proven else 2
        self._late_ms.append(reading.late_ms)
        last = [*self._late_ms][-believed:]
        late_ms = min(last) if len(last) == believed else 0.0
        if reading.load_gb_per_s is not None and reading.store_gb_per_s is not None:
            self.rate = 1e6 * (reading.load_gb_per_s + reading.store_gb_per_s)
        tolerated_ms = TOLERATED * reading.iteration_ms
        if late_ms > tolerated_ms:
            wanted = -(-int(late_ms * self.rate / 2) // self.block_bytes)
            # A stall behind a try says how many are lacking; one of the first iterations has other causes, too.
            lacking = min(wanted * 2 // 3, self._enough - self.extra) if self._tries else 1
            self._floor, self._calm_ms = max(self._floor, self.extra + max(1, lacking)), math.inf
            self._tries = False
            self._calm.clear()
            if self._enough <= self.extra:
                self._enough = self.most  # it was for iterations with more tokens
            if self._proven <= self.extra:
                self._proven = math.inf
            # Take at most half of the free bytes: the next reading says whether more is needed.
            wanted = min(max(1, wanted), max(0, free) // 2 // self.block_bytes)
            self.extra = min(self._enough, self.extra + wanted)
            self.is_full = self.extra == before
        elif reading.late_ms <= tolerated_ms:
            self._calm.append(reading.iteration_ms)
            if len(self._calm) >= LASTING:
                self._proven = min(self._proven, self.extra)
            if len(self._calm) == self._lasting and min(self._calm) > LONGER * self._calm_ms:
                self._floor, self._calm_ms, self._proven = 0, min(self._calm), math.inf
                self._lasting *= 2  # the next time, only for longer phases: a host may be slow now and then
                self._calm = deque(self._calm, maxlen=self._lasting)
            self._calm_ms = min(self._calm_ms, *self._calm)
            # Not to the last block: each try that stalls costs some iterations. Not if ``step()`` would take longer.
            is_calm = len(self._calm) >= CALM and reading.in_step_ms <= tolerated_ms
            # Nor more than could be taken again: what is free at the peak does not grow when blocks leave.
            less = min((self.extra - self._floor + 1) // 2, max(0, free) // 2 // self.block_bytes)
            if is_calm and less and self.extra > self._floor + self.most // 32:
                self._enough, self.extra, self._tries = self.extra, self.extra - less, True
                self._calm.clear()
        if free < 0:
            self.extra = max(0, self.extra - 1)
        host_ms = min(reading.host_ms, reading.iteration_ms - reading.stalled_ms)
        late = f", and {host_ms:.1f} ms for the host" if host_ms > tolerated_ms else ""
        waited = f"compute waited {reading.stalled_ms:.1f} of {reading.iteration_ms:.1f} ms{late}"
        self.sentence = f"{waited}, with {self.extra} blocks above the minimum"
        if self.extra != before:
            self._rest = 3  # iterations that have begun already had the previous number of blocks
            self._late_ms.clear()  # and the first one behind them finds blocks that nothing is bound to
        self.is_settled = reading.late_ms <= tolerated_ms and len(self._calm) >= LASTING
        return self.extra - before
