"""One loop for every mode: what may be updated now, what is used next, is there room for it."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..device.lanes import Mark
from .cache import Cache, Moved
from .items import Item
from .lanes import Lanes
from .plan import ELSEWHERE, Bucket, choose_kept
from .room import Stopwatch
from .timeline import Reductions, Timeline


class Mode(NamedTuple):
    """When updates may begin, where they run, who waits for them."""

    begin: Literal["step", "final"]
    lane: Literal["compute", "update"]
    waits: Literal["step", "gather"]


MODES = {
    "step": Mode("step", "compute", "step"),
    "forward": Mode("step", "update", "gather"),
    "iteration": Mode("final", "update", "gather"),
}

AHEAD = 16
"""Uses that are looked ahead: more than places ever hold is of no use."""


class Updates(Protocol):
    """Whoever runs the user's optimizer."""

    def begin(self) -> bool:
        """Begin a step; ``False``: it may not begin before ``step()`` is called."""

    def job(self, bucket: Bucket) -> tuple[list[Tensor], Callable[[], None]]:
        """Bind what an update of ``bucket`` needs now; returns the gradients that it reads, and the update."""


class Core:
    """What happens to the items of one optimizer at four events: gather, reduced, step, and somebody looks.

    Attributes:
        buckets: in forward order.
        weights: by group: what marks its parameters.
        done: buckets that this step has updated, in order.
        begun: updates of this step have begun.
        stepping: the point of compute at which ``step()`` was called.
        updated: the end of the last update.
        torn: the bucket whose update runs; after an exception, it may be half updated.
        may_begin_early: updates may begin in the backward.
    """

    def __init__(self, lanes: Lanes, device: torch.device, overlap: str, updates: Updates) -> None:
        self.lanes, self.mode, self.updates = lanes, MODES[overlap], updates
        self.timeline, self.reductions = Timeline(), Reductions()
        self.cache = Cache(device, lanes, self.timeline)
        self.buckets: list[Bucket] = []
        self.weights: dict[int, Item] = {}
        self.done: dict[Bucket, None] = {}
        self.begun = False
        self.stepping: Mark | None = None
        self.updated: Mark | None = None
        self.last_moved = Moved()
        self.stopwatch: Stopwatch | None = None
        self.torn: Bucket | None = None
        self.may_begin_early = True
        self._ready: list[Bucket] = []
        self._of_group: dict[int, list[Bucket]] = {}
        self._reduced_at: dict[int, Mark] = {}
        self._gradients: dict[int, list[Tensor]] = {}  # by bucket

    def take(self, buckets: Sequence[Bucket], weights: dict[int, Item]) -> None:
        """Be about these from now on. Nothing is under way."""
        self.buckets, self.weights = list(buckets), weights
        self._of_group = {number: [one for one in buckets if number in one.groups] for number in weights}
        self.timeline.forget()

    # Events -----------------------------------------------------------------------------------------------------------

    def gather(self, number: int, stream: torch.Stream | None) -> None:
        """Parameters of a group are about to be read on ``stream``; ``None``: the current one."""
        item = self.weights.get(number)
        if item is None or self.mode.lane != "update":
            return
        lane = self.lanes.on(stream)
        if item.ready is not None and lane.name not in item.known_to:
            watch = self.stopwatch.waiting(stream) if self.stopwatch is not None else contextlib.nullcontext()
            with watch:
                lane.wait(item.ready)  # R3: an update may still be writing them. This wait *is* overlap="forward"
            item.known_to.add(lane.name)
            if stream is None:
                for bucket in self._of_group.get(number, ()):
                    if item.known_to.issuperset(("compute",)) and all("compute" in w.known_to for w in bucket.weights):
                        self._gradients.pop(bucket.number, None)
        lane.touch(reads=item.place())

    def gathered(self, number: int, stream: torch.Stream | None) -> None:
        """The read has been issued."""
        item = self.weights.get(number)
        if item is not None and self.mode.lane == "update":
            lane = self.lanes.on(stream)
            item.used[lane.name] = lane.mark()  # R1: the next update of these parameters waits for it

    def reduced(self, number: int, event: object) -> None:
        """Gradients of a group have been reduced, as of ``event`` of torch's."""
        self.reductions.count(number)
        if self.mode.begin != "final" or not self.may_begin_early or number not in self.weights:
            self.prefetch()
            return
        self._reduced_at[number] = self.lanes.event(event)
        for bucket in self._of_group[number]:
            if bucket not in self.done and all(map(self.reductions.is_final, bucket.groups)):
                self._ready.append(bucket)
        self.pump()

    def step(self, wanted: Sequence[Bucket]) -> None:
        """Update those of ``wanted`` that have not been updated, and end the iteration."""
        self.stepping = self.lanes.compute.mark()
        self._ready = [bucket for bucket in wanted if bucket not in self.done]
        try:
            self.pump()
            for item in list(self.cache.held):
                if item.dirty and not item.kept:
                    self.cache.put(item)
        finally:
            self.stepping = None
        waits = self.mode.waits == "step"
        for number, item in self.weights.items():
            if waits or number == ELSEWHERE:
                self.lanes.compute.wait(item.ready)

    def end(self) -> bool:
        """End the iteration, its step being complete; returns whether it repeated the one before."""
        first = not self.timeline.cycle
        self.timeline.end()
        self.reductions.end()
        self.last_moved, self.cache.moved = self.cache.moved, Moved()
        self.done, self.begun, self._ready = {}, False, []
        if first:
            choose_kept(self.buckets, self.cache)
        self.prefetch()
        return self.timeline.repeats

    # The loop ---------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Update what may be updated now; load what is used next."""
        while self._ready:
            if not self.begun:
                if not self.updates.begin():
                    self._ready = []  # step() will find them
                    break
                self.begun = True
            self.update(self._ready.pop(0))
            self.prefetch()
        self.prefetch()

    def update(self, bucket: Bucket) -> None:
        """Run the user's optimizer on one bucket, and send home what changed."""
        state, cache = bucket.state, self.cache
        creates = not state.exists
        # What an optimizer creates it allocates itself, in the memory of the stream it runs in: that of compute.
        lane = self.lanes.compute if creates else getattr(self.lanes, self.mode.lane)
        if state.nbytes:
            cache.pinned = (state,)
            cache.fetch(state)
        if self.stepping is not None:
            lane.wait(self.stepping)  # clipping, or the user, may still be changing the gradients on the compute stream
        else:
            lane.wait(*(self._reduced_at[group] for group in bucket.groups))  # they may still be being reduced
        items = (state, *bucket.weights)
        watch = self.stopwatch if lane is self.lanes.compute else None
        with watch.waiting(None) if watch is not None else contextlib.nullcontext():
            for item in items:
                lane.wait(item.ready)  # R3: loads, or the update before, may still be writing the place
        for item in items:
            lane.wait(*item.used.values())  # R1: gathers, or a store, may still be reading it
        gradients, job = self.updates.job(bucket)
        self.torn = bucket
        lane.run(job, reads=gradients, writes=[memory for item in items for memory in item.place()])
        self.updated = mark = lane.mark()
        if self.mode.lane == "update":
            # Gradients of a group share one buffer of the reduce-scatter stream, freed with its last reference.
            # Compute waits for the update in the next gather; reductions wait for compute.
            self._gradients[bucket.number] = gradients
        for item in items:
            item.written(mark)
        if state.nbytes and not state.kept:
            cache.put(state)
        cache.pinned, self.torn = (), None
        self.done[bucket] = None
        if state.nbytes:
            self.timeline.note(bucket.use)

    def prefetch(self) -> None:
        """Load what is used next, nearest first, as far as nothing has to leave that is needed sooner."""
        for distance, use in self.timeline.upcoming(AHEAD):
            for item in use.items:
                if item.block is None and item.exists and not self.cache.fetch(item, must=False, distance=distance):
                    return

    # Those who look ---------------------------------------------------------------------------------------------------

    def wait_updated(self) -> None:
        """Let the current stream wait for all updates."""
        for item in self.weights.values():
            self.lanes.compute.wait(item.ready)
            item.known_to.add("compute")
        self.lanes.compute.wait(self.updated)
        self._gradients.clear()

    def wait_home(self, items: Iterable[Item]) -> None:
        """Block the host until these are at home; whoever asked may write there."""
        items = [item for item in items if item.nbytes]
        self.cache.flush(items)
        for item in items:
            if item.at_home is not None:
                item.at_home.synchronize()  # R2, on the host
            for mark in item.home_read.values():
                mark.synchronize()  # R4, on the host: whoever looks may write
            item.expose()
        if self.updated is not None:
            self.updated.synchronize()  # counters, which are written where they are

    def settle(self) -> None:
        """Block the host until everything is at home, and give up all places: homes are about to be written."""
        self.wait_home(bucket.state for bucket in self.buckets)
        self.cache.forget(list(self.cache.held))

    def abandon(self) -> None:
        """An exception has ended a step: forget what is on the device of buckets that were not updated."""
        if self.updated is not None:
            self.updated.synchronize()
        self.cache.forget([item for item in self.cache.held if item in self.cache.pinned])
        self.cache.pinned, self.torn = (), None
        self.cache.flush()
        self.reset()

    def reset(self) -> None:
        """Begin anew, with whatever is at home."""
        self._ready, self.begun, self.done = [], False, {}
        self.reductions.end(stepped=False)

    def wait_moved(self) -> None:
        """Let the current stream wait for all loads and stores."""
        for item in self.cache.held:
            self.lanes.compute.wait(item.ready, *item.used.values())
