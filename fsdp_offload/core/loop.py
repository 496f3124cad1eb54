"""One loop for every mode: decides what may be updated now, what is loaded next, and whether there is room for it."""

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..device.lanes import Lane, Lanes, Mark, current_stream, recorded
from ..fsdp.dtensor import versions_of
from ..fsdp.fully_shard import runs_in_backward
from .buckets import ELSEWHERE, JOINED_BYTES, Bucket, choose_kept
from .cache import Cache, Moved, Timeline
from .curve import Curve, RoomHere
from .items import BytesAtHome, Item, Pool, Use
from .room import Reading


class Mode(NamedTuple):
    """Says when updates may begin, and in which lane they run.

    With the lane "update", gathers wait for updates, and ``step()`` does not.
    """

    begin: Literal["step", "final"]
    lane: Literal["compute", "update"]


MODES = {
    "step": Mode("step", "compute"),
    "forward": Mode("step", "update"),
    "iteration": Mode("final", "update"),
}

AHEAD, GATHERS_AHEAD, LOADS_FOR_GATHERS = 16, 4, 2
"""Limits of one prefetch if parameters stream: uses looked ahead, gathers among these, and loads for gathers.
More would delay other copies over the link: state for updates, and fully_shard's own small copies."""

REDUCTIONS_BEHIND = 4
"""Reductions that may follow an update before compute waits for it. Otherwise gradients of late updates pile up."""

BACKWARD, LATER = 0.7, 4
"""Part of a micro-batch's time that is its backward. If the link needs longer than the last of them, a bucket in
``LATER`` waits for ``step()``, and runs on into the next forward, in which the link would have nothing to do. Llama 3B,
4,096 tokens, 640 MiB, one H200: 569 ms in place of 695."""

STEP_SECONDS, POLL_SECONDS = 300, 0.002
"""Time for which a thread that does not train waits for the end of a step, and time between its checks."""

_NO_END = (
    f"a thread has waited {STEP_SECONDS} s for the end of the step that the backward has begun "
    "(OffloadPolicy(overlap='iteration')): optimizer state and parameters cannot be read in between. If the training "
    "thread waits for this thread, let it do so before the backward, or behind step(); or use overlap='forward'."
)


class Updates:
    """The step under way: interface to the code that updates one or more buckets. It is dropped when the step ends.

    Attributes:
        joined_bytes: state that one update may cover; 0: an update has one bucket.
        way_back: undoes the updates of a speculative step; ``None``: the step is certain.
        done: buckets that this step has updated, in order.
        torn: buckets whose update is being issued; after an exception, they may be half updated.
        ready: buckets that may be updated now.
        used_by: for each of the last reductions, marks after its updates, and numbers of the updated buckets.
        began_at: mark of compute where the backward began the step; unset if ``step()`` began it.
        stepping: mark of compute where ``step()`` was called; ``None`` outside of ``step()``.
        is_seen: a forward already ran on parameters that the backward updated for this step.
        stores_kept: kept items are stored right after their update, too.
    """

    began_at: Mark

    def __init__(self, way_back: "WayBack | None" = None) -> None:
        self.joined_bytes, self.way_back, self.is_seen, self.stores_kept = 0, way_back, False, False
        self.done: dict[Bucket, None] = {}
        self.torn: tuple[Bucket, ...] = ()
        self.ready: list[Bucket] = []
        self.used_by: deque[tuple[list[Mark], list[int]]] = deque()
        self.stepping: Mark | None = None

    def job(self, buckets: Sequence[Bucket]) -> tuple[list[Tensor], Callable[[], None]]:
        """Bind the tensors that one update of ``buckets`` needs; return those that it reads, and the update."""
        raise NotImplementedError

    def on_host(self, bucket: Bucket, after: Sequence[Mark]) -> Mark:
        """Let the CPU update ``bucket`` once the marks ``after`` have passed; return the update's mark at once."""
        raise NotImplementedError

    def abandon(self, buckets: Sequence[Bucket]) -> None:
        """End a failed step: those of ``buckets`` that are not ``done`` will not be updated."""
        raise NotImplementedError


class Reductions:
    """Counts reductions ahead of one ``step()``, and predicts from earlier steps when a group's gradients are final.

    They are final after the largest reduction count of the last four steps.

    Attributes:
        counts: reductions of each group.
        least: reductions expected of a group without a count from earlier steps; 1: not all gradients fit; 0: unknown.
        marks: by group, mark of its last reduction.
        held: buckets that wait for ``step()``, since others hold tensors over bytes that the update would change.
            ``Core.frees_all``: they are updated nevertheless.
        later: buckets that wait for ``step()``, since the backward is too short for the link to move all of them.
        chooses: ``later`` may be chosen: not for collectives, whose order must be the same on all ranks, nor where
            updates free gradients.
        undone: buckets whose speculative updates were rolled back.
    """

    def __init__(self) -> None:
        self.marks: dict[int, Mark] = {}
        self.held: set[Bucket] = set()
        self.later: set[Bucket] = set()
        self.undone: set[Bucket] = set()
        self.counts: dict[int, int] = defaultdict(int)
        self._before: deque[dict[int, int]] = deque(maxlen=4)
        self._most: dict[int, int] = {}  # by group, the largest count in ``_before``
        self._compute_ms = deque[float](maxlen=4)  # of the last readings: a shared host may halt, but is never too fast
        self.least = 0
        self.chooses = False

    def is_final(self, group: int) -> bool:
        """Return whether no further reduction is expected; ``False`` in the first step, unless ``least`` is set."""
        expected = self._most.get(group, 0) or self.least
        return 0 < expected <= self.counts.get(group, 0)

    def is_expected(self, group: int) -> bool:
        """Return whether ``group`` was reduced in one of the last four steps; ``True`` in the first step."""
        return not self._before or group in self._most

    def next_is_final(self, group: int) -> bool:
        return self.counts.get(group, 0) + 1 == self._most.get(group, 0)

    def choose_later(self, buckets: Sequence[Bucket], reading: Reading) -> None:
        """Choose :attr:`later` by the times of an iteration: none, or some of each part of the forward."""
        backwards = min(self._most.values(), default=1)  # less those without a reduction
        self._compute_ms.append((reading.iteration_ms - reading.stalled_ms) / backwards)
        limit_ms = (0.85 if self.later else 1.0) * BACKWARD * min(self._compute_ms)  # lower, so that it holds still
        self.later, due_bytes = set(), 0.0
        for one in reversed(buckets) if reading.link_ms > limit_ms else ():
            if not (one.state.kept or one.on_host or ELSEWHERE in one.groups):
                due_bytes += one.state.nbytes / LATER
                if 2 * due_bytes > one.state.nbytes and self.later.issuperset(one.followers):  # these would wait for it
                    self.later.add(one)
                    due_bytes -= one.state.nbytes

    def end(self, *, stepped: bool = True) -> None:
        """Begin the next step. Without ``stepped``, gradients were cleared: forget these reductions."""
        if stepped and self.counts:
            self._before.append(dict(self.counts))
            self._most = {}
            for one in self._before:
                self._most |= {number: max(count, self._most.get(number, 0)) for number, count in one.items()}
        self.counts, self.held, self.undone = defaultdict(int), set(), set()


class Core:
    """Moves and updates the items of one optimizer at four events: gather, reduced, step, and reads by the user.

    Attributes:
        buckets: all buckets, in forward order; ``of_group``: by group number, buckets with parameters of the group.
        weights: by group number, the item of its parameters; ``nbytes`` is 0 if they stay on the device.
        frees_gradients: gradients are freed in the backward that uses them.
        frees_all: gradients are freed in the first backward, too: the device has no room for all.
        last_moved: bytes and operations of the last step; ``None``: no step has ended yet.
        updates: the step under way; ``None``: no step has begun.
        updated: by lane name, mark of the last update in that lane.
        away: ``offload()`` was called: items return when they are used, and are not prefetched.
        steps: steps that have ended.
        curve: device memory that the model leaves free at each point.
        gives_way: blocks of state in transit leave where they would raise the model's own peak of memory.
        lock: held for one operation on this object, and never around users' code, which may wait for a thread that
            needs the lock: on a GPU, hooks run in autograd's threads.
        thread: identity of the thread that trains; other threads wait for the end of a step before they look.
        loading: by ``id`` of each module whose ``load_state_dict`` is under way, identity of its thread.
        stream: lane of the stream on which that thread trains.
    """

    def __init__(self, lanes: Lanes, device: torch.device, overlap: str) -> None:
        self.lanes, self.mode = lanes, MODES[overlap]
        self.updates: Updates | None = None
        self.timeline, self.reductions = Timeline(), Reductions()
        self.cache, self.curve = Cache(device, lanes, self.timeline), Curve()
        self.buckets: list[Bucket] = []
        self.weights: dict[int, Item] = {}
        self.updated: dict[str, Mark] = {}
        self.last_moved: Moved | None = None
        self.away = False
        self.frees_gradients = self.frees_all = False
        self.steps = 0
        self.lock = threading.Condition(threading.RLock())
        self.thread, self.stream = threading.get_ident(), lanes.on(None)
        self.loading: dict[int, int] = {}
        self.gives_way = False
        self._gathers: dict[int, Use] = {}
        self.of_group: dict[int, list[Bucket]] = {}
        self._gradients: dict[int, list[Tensor]] = {}  # by bucket number, until compute has waited for the update
        self._room = RoomHere(self.curve, (), (), ())

    def take(self, buckets: list[Bucket], weights: dict[int, Item]) -> None:
        """Replace buckets and weights. Call only while nothing is in flight."""
        self.buckets, self.weights = buckets, weights
        for bucket in buckets:
            bucket.connect(tuple(weights[number] for number in bucket.groups))
            bucket.followers = tuple(one for one in buckets if bucket.number in one.after)
        self.cache.bound = [one.bound for one in buckets]
        self.of_group = {number: [one for one in buckets if number in one.groups] for number in weights}
        self.reductions.held.clear()
        self.reductions.later.clear()
        self._gathers = {n: Use(f"gather {n}", (item,), gathers=True) for n, item in weights.items() if item.nbytes}
        self.timeline.forget()
        self.curve.forget()

    @property
    def done(self) -> Mapping[Bucket, None]:
        """Return the buckets that the step under way has updated."""
        return self.updates.done if self.updates is not None else {}

    @property
    def torn(self) -> tuple[Bucket, ...]:
        """Return the buckets that the step under way may have half updated."""
        return self.updates.torn if self.updates is not None else ()

    # Threads ----------------------------------------------------------------------------------------------------------

    def trained_here(self) -> None:
        """Note that the calling thread trains, on the current stream."""
        device = self.cache.device
        stream = None if device.type == "cpu" else current_stream(device)
        self.thread, self.stream = threading.get_ident(), self.lanes.on(stream)

    @property
    def is_foreign(self) -> bool:
        """Return whether the calling thread is neither the one that trains nor autograd's, which works for it."""
        return threading.get_ident() != self.thread and not runs_in_backward()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the lock; a thread that does not train first waits for the end of the step under way.

        All threads wait for the end of a ``load_state_dict`` in another one.

        Raises:
            RuntimeError: the step has not ended within ``STEP_SECONDS``.
        """
        give_up = time.monotonic() + STEP_SECONDS
        with self.lock:
            here = threading.get_ident()
            while (self.updates is not None and self.is_foreign) or not {here}.issuperset(self.loading.values()):
                if time.monotonic() > give_up:
                    raise RuntimeError(_NO_END)
                self.lock.wait(POLL_SECONDS)
            yield

    # Events -----------------------------------------------------------------------------------------------------------

    def come(self, name: object) -> None:
        """Handle a point of the model, on the compute stream, after which its memory grows or shrinks."""
        self.lanes.load.go_on()  # also where no curve is known, and in a forward that gathers nothing from the host
        if self.curve.read is None:
            return
        self.curve.come(name, self.timeline.noted)
        if self._room.curve_bytes is not self.curve.room_bytes:
            self._divide_room()
        here = self._room.at(self.curve.at) if self.curve.is_expected and not self.away else None
        self.cache.allow(*(here or [[0] * len(self.cache.pools)] * 2))
        if here is not None:
            self.prefetch()

    def _divide_room(self) -> None:
        moving = {bucket.state.pool for bucket in self.buckets if not bucket.state.kept}
        leaving = [pool for pool in self.cache.pools if self.gives_way and pool in moving]
        self._room = RoomHere(self.curve, self.timeline.cycle, self.cache.pools, leaving)

    def gather(self, number: int, stream: torch.Stream | None) -> None:
        """Prepare a read of a group's parameters on ``stream``; ``None``: the current one."""
        item = self.weights.get(number)
        if item is None or not (item.nbytes or self.mode.lane == "update"):
            return
        lane = self.lanes.compute if stream is None else self.lanes.on(stream)
        if item.nbytes:
            self.cache.fetch(item)
        self._wait_ready(item, lane)
        if lane.looks_for_races:
            lane.touch(reads=item.place())

    def _wait_ready(self, item: Item, lane: Lane) -> None:
        """Make ``lane`` wait (R3) for the update, load or copy from the CPU that may still write parameters.

        This *is* overlap="forward".
        """
        if lane.name not in item.known_to and (item.ready is not None or item.cpu_updates):
            with self._timed_wait(lane):
                lane.wait(item.ready, *item.cpu_updates.values())
            item.known_to.add(lane.name)

    def _timed_wait(self, lane: Lane, **how: bool) -> contextlib.AbstractContextManager[None]:
        # A stream that gathers ahead may wait while compute runs on: only waits of compute are timed.
        watch = self.cache.stopwatch if lane is self.lanes.compute else None
        return contextlib.nullcontext() if watch is None else watch.waiting(**how)

    def timed_call(self) -> contextlib.AbstractContextManager[None]:
        """Time how long the device waits for the host in this block, if updates run in a lane of their own."""
        watch = self.cache.stopwatch if self.mode.lane == "update" else None
        return contextlib.nullcontext() if watch is None else watch.calling()

    def gathered(self, number: int, stream: torch.Stream | None, *, counts: bool = True) -> None:
        """Note that the read after :meth:`gather` was issued. ``counts``: it is part of training, not an evaluation."""
        item = self.weights.get(number)
        if item is None or not (item.nbytes or self.mode.lane == "update"):
            return
        lane = self.lanes.compute if stream is None else self.lanes.on(stream)
        item.used[lane.name] = lane.mark()  # R1: the next update of the parameters, or load into the place, waits
        if item.nbytes:
            if counts:
                self.timeline.note(self._gathers[number])
            self.prefetch()

    def has_updated(self, number: int) -> bool:
        return self.updates is not None and not self.updates.done.keys().isdisjoint(self.of_group.get(number, ()))

    def uses(self, number: int) -> None:
        """Before compute uses a gathered group, make it wait for the group's updates, and release their gradients."""
        done = self.updates.done if self.updates is not None else {}
        for bucket in self.of_group.get(number, ()):
            if bucket.number in self._gradients and bucket not in done:
                late = [item.updated for item in bucket.weights if self.lanes.compute.name not in item.known_to]
                if late:
                    with self._timed_wait(self.lanes.compute):
                        self.lanes.compute.wait(*late)
                del self._gradients[bucket.number]
        item = self.weights.get(number)
        if item is not None and item.block is not None:
            self._wait_ready(item, self.lanes.compute)  # the gather waited as well; on compute the wait is timed

    def reduced(self, number: int, event: object, *, goes_on: bool) -> Sequence[Bucket]:
        """Count a reduction of group ``number``, which ends at torch's ``event``; return buckets to update now.

        All their gradients are final. Buckets with later ranges of a parameter come last.
        ``goes_on``: a step has begun in this backward, or may begin here.
        """
        self.reductions.counts[number] += 1
        if self.mode.begin != "final" or number not in self.weights:
            return ()
        self.reductions.marks[number] = self.lanes.event(event)  # also for a bucket that a later group completes
        found: list[Bucket] = []
        updated = {bucket.number for bucket in self.done}
        looked_at = list(self.of_group[number]) if goes_on else []
        for bucket in looked_at:
            final = all(map(self.reductions.is_final, bucket.groups)) and bucket not in self.reductions.later
            if not final or bucket.number in updated or not updated >= bucket.after:
                continue
            exposed = [one.home for one in (bucket.state, *bucket.weights) if one.home.exposed_at is not None]
            if exposed and any(home.waits_for_step() for home in exposed):
                self.reductions.held.add(bucket)  # values that others hold change in step(), as without offload
                if not self.frees_all:
                    continue
            found.append(bucket)
            updated.add(bucket.number)
            looked_at += bucket.followers
        return found

    def begin(self, updates: Updates) -> None:
        """Begin a step in the backward."""
        updates.began_at = self.lanes.compute.mark()
        self.updates = updates

    def run(self, ready: Sequence[Bucket]) -> None:
        """In the backward, update ``ready`` if a step has begun, and load the items that are used next."""
        updates = self.updates
        if updates is None:
            self.prefetch()  # for the updates in step()
            return
        before = len(updates.done)
        updates.ready += ready
        self.pump(updates)
        if not self.frees_gradients:
            return
        # Make compute wait for updates issued over ``REDUCTIONS_BEHIND`` reductions ago, and free the gradients that
        # they read: later reductions reuse the memory, on a stream that waits for compute.
        updates.used_by.append(([*self.updated.values()], [bucket.number for bucket in list(updates.done)[before:]]))
        while len(updates.used_by) > REDUCTIONS_BEHIND:
            marks, numbers = updates.used_by.popleft()
            if numbers:
                with self._timed_wait(self.lanes.compute):
                    self.lanes.compute.wait(*marks)
            for number in numbers:
                self._gradients.pop(number, None)

    def step(self, wanted: Sequence[Bucket], late: Container[Bucket] = ()) -> None:
        """Update buckets of ``wanted`` that the backward has not updated, or updated before a ``late`` gradient."""
        assert self.updates is not None
        self.updates.stepping = self.lanes.compute.mark()
        left = [one for one in wanted if one not in self.updates.done or one in late]
        # Buckets of the CPU need no load: issue them first, so that the CPU works while others are loaded.
        self.updates.ready = sorted(left, key=lambda bucket: not bucket.on_host)
        aside = self.mode.lane == "update"
        try:
            # Time the host, too: if copies fill the driver's queue, the host waits here, and the forward begins late.
            with self._timed_wait(self.lanes.compute, with_host=True) if aside else contextlib.nullcontext():
                self.pump(self.updates)
                for item in list(self.cache.held):
                    if item.dirty and not item.stays:
                        self.cache.put(item)
        finally:
            self.updates.stepping = None
        for number, item in self.weights.items():
            if not aside or number == ELSEWHERE:
                self.lanes.compute.wait(item.updated, *item.cpu_updates.values())
        # Exposed items are stored when this returns: tensors of others change in ``step()``, and not after it.
        states = {bucket.state: None for bucket in wanted}
        for item in (*states, *self.weights.values()):
            if item.home.exposed_at is not None and item.home.stored is not None:
                item.home.stored.synchronize()  # R2, on the host: others may read and write the home after step()
                if item in states:
                    self.cache.drop(item)  # not every write changes a version: the next step() loads the home again
        for bucket in self.of_group.get(ELSEWHERE, ()):
            if bucket.groups == (ELSEWHERE,):
                self._gradients.pop(bucket.number, None)  # no gather will release them

    def end(self) -> bool:
        """End the iteration, whose step is complete; return whether it repeated the one before."""
        first = not self.timeline.cycle
        self.cache.moved.held_updates = 0 if self.frees_all else len(self.reductions.held)
        self.reductions.end()
        self.updates = None
        self.timeline.end()  # after an interrupt from here on, the step is over, and only time is lost
        if self.curve.read is not None:
            self.curve.end(repeats=self.timeline.repeats)
        self.last_moved, self.cache.moved, self.cache.is_full = self.cache.moved, Moved(), False
        self.cache.last_peak_bytes, self.cache.peak_bytes = self.cache.peak_bytes, self.cache.nbytes
        self.steps += 1
        if first:
            self.choose_kept()
        self.prefetch()
        return self.timeline.repeats

    def choose_kept(self) -> None:
        choose_kept([bucket.state for bucket in self.buckets if bucket.state.nbytes])
        choose_kept([item for item in self.weights.values() if item.nbytes])
        self._divide_room()

    def pump(self, updates: Updates) -> None:
        """Update all ready buckets, and load the items that are used next.

        One update takes a bucket, and others of the same groups whose items are on the device already, since each
        update costs the host 0.3 ms. It leaves one block in transit unused: the next load fills that block while the
        updated items are stored, so that the link is busy both ways. If items move in ``step()`` only, the link limits
        and the host has time: updates of 64 MiB free blocks one by one, and neither copies up nor down wait for them.
        """
        if not updates.ready:
            self.prefetch()
        while updates.ready:
            first, *others = updates.ready
            taken, nbytes, passing = [first], first.state.nbytes, int(not first.state.kept)
            streams_alone = self.cache.copies_alone and not first.state.kept
            most_bytes = min(updates.joined_bytes, JOINED_BYTES) if streams_alone else updates.joined_bytes
            for one in () if first.on_host else others:
                nbytes, passing = nbytes + one.state.nbytes, passing + (not one.state.kept)
                is_like = (one.groups, one.on_host, one.state.exists) == (first.groups, False, first.state.exists)
                is_there = None not in [item.block for item in one.streamed]
                pool = one.state.pool
                leaves_room = one.state.kept or pool is None or passing < pool.passing + pool.beyond
                if not (is_like and is_there and leaves_room) or nbytes > most_bytes:
                    break
                taken.append(one)
            del updates.ready[: len(taken)]
            self.update(updates, tuple(taken))
            self.prefetch()

    def update(self, updates: Updates, buckets: Sequence[Bucket]) -> None:
        """Run the user's optimizer on ``buckets``, and store the items that it has changed."""
        first, cache = buckets[0], self.cache
        if first.on_host:
            self._update_on_host(updates, first)
            return
        creates = not first.state.exists
        lane = self._lane_of(updates, buckets)
        cache.pinned = tuple({item: None for one in buckets for item in one.streamed})
        for item in cache.pinned:
            cache.fetch(item)
        way_back = updates.way_back if updates.stepping is None else None
        if way_back is not None:
            for one in buckets:
                way_back.guard(one)
        lane.wait(*self._with_gradients(updates, first))
        if creates:
            lane.wait(*self.updated.values())  # R3: other updates may still be writing counters, or shared tensors
        items = {item: None for one in buckets for item in (one.state, *one.weights)}
        with self._timed_wait(lane, in_step=True):
            for item in items:
                lane.wait(item.ready)  # R3: loads, or the update before, may still be writing the place
        for item in items:
            lane.wait(*item.used.values())  # R1: gathers, or a store, may still be reading it
        gradients, job = updates.job(buckets)
        updates.torn = tuple(buckets)
        try:
            with recorded(f"fsdp_offload U {first.state.name}"):
                lane.run(job, reads=gradients, writes=(memory for item in items for memory in item.place()))
        finally:  # an update that fails has issued some kernels
            self.updated[lane.name] = mark = lane.mark()
            for item in items:
                item.used[lane.name] = mark  # R1: the next owner of the place waits for these kernels
        for item in items:
            cache.changed(item, mark)
        self._hold(updates, gradients, buckets)
        updates.done.update(dict.fromkeys(buckets))
        cache.pinned, updates.torn = (), ()  # last: an interrupt leaves each bucket in done or in torn
        cache.moved.updates += len(buckets)
        if way_back is not None:
            for one in buckets:
                way_back.updated(one)
        self._send_home(updates, buckets, way_back)

    def _lane_of(self, updates: Updates, buckets: Sequence[Bucket]) -> Lane:
        """Choose the lane of an update. Kept buckets, which the next forward needs first, have one of their own.

        There they never wait for another bucket's load. ``Item.ready`` orders updates of the same parameters.
        """
        if not buckets[0].state.exists:
            return self.lanes.compute  # an optimizer allocates new state on the stream that it runs on
        if updates.joined_bytes and all(one.state.kept for one in buckets) and self.mode.lane == "update":
            return self.lanes.update_kept
        lane: Lane = getattr(self.lanes, self.mode.lane)
        return lane

    def _with_gradients(self, updates: Updates, bucket: Bucket) -> list[Mark]:
        """Return marks after which the gradients of a bucket, and hyperparameters, have their final values."""
        if updates.stepping is not None:
            return [updates.stepping]  # clipping, or the user, may still be changing them on the compute stream
        # The reduction may still be writing gradients, and compute may be copying hyperparameters that are tensors.
        return [updates.began_at, *(self.reductions.marks[group] for group in bucket.groups)]

    def _hold(self, updates: Updates, gradients: list[Tensor], buckets: Sequence[Bucket]) -> None:
        """Keep gradients alive until compute has waited for the update that reads them: in :meth:`uses` or :meth:`run`.

        Gradients of a group share one buffer of the reduce-scatter stream. It is freed with its last reference, and the
        next reduction that gets the memory waits for compute only.
        """
        for one in buckets if self.mode.lane == "update" else ():
            before = self._gradients.get(one.number, []) if one in updates.done else []  # these gradients came late
            self._gradients[one.number] = [*before, *gradients]

    def _send_home(self, updates: Updates, buckets: Sequence[Bucket], way_back: "WayBack | None") -> None:
        """Store items of updated buckets; in a speculative step also kept ones, to have them at home before the next.

        State that is not kept gives up its place now, so that the next load waits for this store, not for later ones.
        """
        number_of = {item: number for one in buckets for number, item in zip(one.groups, one.weights, strict=True)}
        for item in {item: None for one in buckets for item in one.streamed}:
            is_state = item not in number_of
            is_complete = is_state or updates.done.keys() >= set(self.of_group[number_of[item]])
            if is_complete and (way_back is not None or updates.stores_kept or not item.stays):
                self.cache.put(item)
                if is_state and not item.kept:
                    self.cache.drop(item, is_used=True)
        for one in buckets:
            if one.streamed and one not in self.reductions.undone:
                self.timeline.note(one.use)

    def _update_on_host(self, updates: Updates, bucket: Bucket) -> None:
        """Let the CPU update a bucket: its state stays in its home, and its slice of the parameters is copied up.

        No wait for gathers is needed (R1): the update waits for gradients, which were made after the gathers.
        """
        bucket.state.exists = True
        if (
            updates.stepping is None and bucket not in self.reductions.held
        ):  # do not ask ``is_held`` again: updates hold tensors over the home, too
            bucket.state.home.exposed_at = None  # others have not seen the values that this update writes
        bucket.state.home.stored = mark = updates.on_host(
            bucket, self._with_gradients(updates, bucket)
        )  # R2: the update is the store
        for item in bucket.weights:
            item.cpu_updates[bucket.number] = mark
            item.known_to.clear()
        updates.done[bucket] = None
        self.cache.moved.updates += 1

    def prefetch(self) -> None:
        """Load the next items of each pool, nearest use first, until an item needed sooner would have to leave."""
        self.lanes.load.go_on()
        if self.away:
            return
        timeline, cycle, gathers, loads = self.timeline, self.timeline.cycle, 0, 0
        full: list[Pool | None] = []
        for at in timeline.upcoming(AHEAD):
            use = cycle[at % len(cycle)]
            gathers += use.gathers
            if gathers > GATHERS_AHEAD or len(full) == len(self.cache.pools):
                return
            is_there = True
            for item in use.items:
                is_wanted = item.block is None and item.exists and item.pool not in full
                if is_wanted and not (item.home.exposed_at is not None and self._may_be_written(item)):
                    loads += use.gathers
                    if loads > LOADS_FOR_GATHERS:
                        return
                    is_early = self._room.is_known and self._room.is_too_early(item.pool, at)
                    if is_early or not self.cache.fetch(item, must=False, distance=at - timeline.at):
                        full.append(item.pool)
                is_there = is_there and item.block is not None
            if is_there and max(timeline.at, timeline.there) == at:
                timeline.there = at + 1

    def _may_be_written(self, item: Item) -> bool:
        """Return whether others may write the home before the next update: a load now would miss the write."""
        if item in self.weights.values() or not item.home.is_held():
            return False
        updates = self.updates
        return updates is None or updates.stepping is None or not any(one.state is item for one in updates.ready)

    # Reads by the user ------------------------------------------------------------------------------------------------

    def wait_updated(self, *, lets_go: bool = True) -> None:
        """Make the current stream wait for all updates, so that it reads new parameters and counters.

        ``lets_go``: the current stream is the one that trains: release the gradients held for these updates.
        """
        for item in self.weights.values():
            self.lanes.compute.wait(item.updated, *item.cpu_updates.values())
        self.lanes.compute.wait(*self.updated.values())  # R3: counters may be written after the parameters
        if lets_go:
            self._gradients.clear()

    def wait_home(self, items: Iterable[Item], *, may_write: bool = True) -> None:
        """Block the host until the homes of ``items`` are up to date. ``may_write``: the caller may write these homes.

        With ``may_write``, load places again before use: versions miss some writes (``torch._foreach_*`` on DTensors).
        """
        items, updated = list(items), self._updated_items()
        self.cache.flush(items)
        for item in items:
            home = item.home
            if home.stored is not None:
                home.stored.synchronize()  # R2, on the host
            for mark in home.read.values():
                mark.synchronize()  # R4, on the host: the caller may write the home
            home.expose(self.steps)
            if may_write and item not in updated:  # ``Speculation.problem`` needs ``seen`` of updated items
                home.seen = None
        for mark in self.updated.values():
            mark.synchronize()  # R3, on the host: counters, which updates write in place

    def settle(self) -> None:
        """Block the host until all homes are up to date, and give up all places: homes are about to be written."""
        self.wait_home([*(bucket.state for bucket in self.buckets), *self.weights.values()])
        self.cache.forget(list(self.cache.held))

    def abandon(self) -> None:
        """End a step that an exception has stopped: drop the places of half updated buckets, and store the others."""
        for mark in self.updated.values():
            mark.synchronize()
        updated, torn = self._updated_items(), [item for bucket in self.torn for item in bucket.streamed]
        self.cache.forget([item for item in torn if item.block is not None and item not in updated])
        self.cache.pinned = ()
        self._gradients.clear()  # the updates that read them have ended
        if self.updates is not None:
            self.updates.torn = ()
            self.updates.abandon(self.buckets)
        try:
            self.cache.flush()
        finally:
            self.reset()

    def _updated_items(self) -> set[Item]:
        return {item for bucket in self.done for item in (bucket.state, *bucket.streamed)}

    def reset(self) -> None:
        """Begin a new iteration, and forget what the unfinished one has recorded."""
        self.updates = None
        self.timeline.abandon()
        if self.curve.read is not None:
            self.curve.end(repeats=False)
        self.reductions.end(stepped=False)
        if self.cache.stopwatch is not None:
            self.cache.stopwatch.forget()


class WayBack:
    """Undoes the updates of one speculative step: forgets places, and copies old parameters back to the device."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._before: dict[Item, tuple[BytesAtHome, object]] = {}  # old homes; their versions, if users have looked
        self._stored: set[Bucket] = set()  # buckets whose old parameters are stored, or being stored, on the host
        self._versions: dict[Tensor, object] = {}  # of parameters, when stored here or updated by this step

    def guard(self, bucket: Bucket) -> None:
        """Before the update of ``bucket``, store the bytes that a roll-back needs and the host does not have."""
        for item in bucket.streamed:
            if item not in self._before:
                if item.dirty:
                    self.core.cache.put(item)
                self._before[item] = item.home.bytes, item.home.version() if item.home.exposed_at is not None else None
        self.keep(bucket)

    def keep(self, bucket: Bucket) -> None:
        """Store the old parameters of ``bucket``, unless they are stored already and the user has not written them."""
        known, versions = self._versions, dict(zip(bucket.params, versions_of(bucket.params), strict=True))
        if not versions.items() <= known.items():
            written = {one for one, version in versions.items() if known.get(one, version) != version}
            if written:  # also store again what other buckets have of a written parameter
                self.distrust(written)
        self._versions |= versions
        if bucket in self._stored or not bucket.old:
            return
        lanes = self.core.lanes
        lanes.store.wait(lanes.compute.mark())  # R3: compute has waited for the last update, and users write there, too
        lanes.store.copy(bucket.old)
        mark = lanes.store.mark()
        for item in bucket.weights:
            item.used["store"] = mark  # R1: the update writes the parameters that this store reads
        self._stored.add(bucket)

    def distrust(self, params: Collection[Tensor]) -> None:
        """Store ``params`` again before their update: others may write them, and versions miss some writes."""
        self._stored = {one for one in self._stored if set(one.params).isdisjoint(params)}

    def updated(self, bucket: Bucket) -> None:
        """Note that the update of ``bucket`` has written its parameters: this does not count as a write by the user."""
        self._versions.update(zip(bucket.params, versions_of(bucket.params), strict=True))

    def is_written(self) -> bool:
        """Return whether others have written a home since its update."""
        looked_at = [(item.home, seen) for item, (_, seen) in self._before.items() if seen is not None]
        return any(home.version() != seen for home, seen in looked_at)

    def roll_back(self) -> None:
        """Undo all updates of this step, in the order of the compute stream."""
        core, lanes = self.core, self.core.lanes
        core.wait_updated()  # updates read gradients, which the user may write after this
        lanes.load.wait(*core.updated.values())  # R1: updates have waited for gathers; a failed one sets no ``ready``
        core.cache.forget(self._before)
        for item, (before, _) in self._before.items():
            item.home.bytes = before
            item.home.read.clear()  # the update has waited for loads from it, and the next update waits for later ones
            item.home.expose(core.steps)  # the user may still hold tensors over it, and write them before step()
        for bucket in (*core.done, *core.torn):
            if bucket.old:
                lanes.load.copy([(param, old) for old, param in bucket.old])
                mark = lanes.load.mark()
                for item in bucket.weights:
                    item.written(mark)
                lanes.compute.wait(mark)  # R3: the user may read parameters without a gather
        core.reductions.undone |= core.done.keys()  # ``step()`` runs them again
        core.cache.pinned, core.updates = (), None
