"""Executes a schedule, and is the one owner of where each bucket's newest bytes are."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ..device.bucket_times import BucketTimes, Span, StepTimes
from ..device.iteration import IterationMarks
from ..device.lanes import Copy, Lane, Mark, recorded, wait_on
from ..device.link import DeviceLink
from ..device.ring import Ring
from ..planning.ring_layout import Placement, RingBlocks
from ..planning.schedule import Action, Kind
from .bucket import Residency, StagedBucket
from .cpu_updates import CpuUpdates

_pipeline_numbers = itertools.count(1)


class Weights(Protocol):
    """Parameters that pass through the ring with their state, and are on the device at other times as well."""

    def will_hold(self, bucket: int) -> bool:
        """Whether they will be on the device at the update of a bucket, and :meth:`fill` takes them from there."""

    def fill(self, bucket: int, slot: Tensor, lane: Lane) -> None:
        """Bring those of a bucket into its slot, for an update that is about to be issued in ``lane``."""

    def updated(self, bucket: int, slot: Tensor | None, lane: Lane) -> None:
        """An update has been issued in ``lane``: the slot holds the new ones; ``None``: they are where they live."""

    def release(self) -> None:
        """Forget what is on the device of those that live on the host."""

    def before_store(self, bucket: int, lane: Lane) -> None:
        """Let ``lane`` wait until nobody loads those of a bucket from where they live."""


class Pipeline:
    """Runs schedules over a growing list of buckets on one device.

    Attributes:
        number: tells users of the device's staging memory apart.
        ring: what is there of the staging memory.
        buckets: by number.
        weights: who brings parameters, where they live on the host with their state.
        host: who updates those of them that are the host's. They never move, but everything here waits for them.
        iteration: how long iterations take, and how long the compute stream stands still in them.
        before_load: called with the number of a bucket when its load is about to be issued.
        moved: from when on resident state is where it is: the end of its last copies to the host or back.
    """

    def __init__(
        self, link: DeviceLink, *, serial: bool, beside_compute: bool = False, host: CpuUpdates | None = None
    ) -> None:
        self.buckets: list[StagedBucket] = []
        self.host = host
        self.before_load: Callable[[int], None] | None = None
        self.moved: Mark | None = None
        self.weights: Weights | None = None
        self._link = link
        self.number = next(_pipeline_numbers)
        self._lanes: dict[str, Lane] = link.lanes(serial=serial, beside_compute=beside_compute)
        self.iteration = IterationMarks(self._lanes["C"])
        self._beside_compute = beside_compute or host is not None
        self._unseen: set[int] = set()  # updated beside the compute stream, which has not waited for it
        self._updates = self._updates_ended = 0  # ever issued; and when end_updates was called
        self._awaited: dict[int, int] = {}  # the last update that each stream has been made to wait for
        self._spans: dict[tuple[Kind, int], Span] = {}
        self.ring = Ring(link, self.number)
        self._blocks = RingBlocks(())
        self._step_begin: Mark | None = None
        self._step_called: Mark | None = None
        self._compute_point: Mark | None = None
        self._updates_end: Mark | None = None
        self._last_actions: Sequence[Action] = ()
        self._before_updates: list[Mark] = []  # what the next update has to wait for
        self._queue: deque[Action] = deque()
        self._issued: list[Action] = []
        self._skipped: set[int] = set()  # taken out of the schedule, of whose actions others wait for some
        self._places: Mapping[int, Placement] = {}

    def take_ring(self, blocks: RingBlocks) -> None:
        """Have all blocks of the ring now, ahead of the schedules that use them.

        Raises:
            torch.OutOfMemoryError: there is no room; a step may find some.
        """
        self.ring.keep_first(blocks.lasting)
        with self._link.in_use:
            # A block that has to grow loses what others have loaded into it.
            if self._link.changes_hands(self.number):
                self._take_ring_back()
            for block, nbytes in enumerate(blocks.nbytes):
                self._enter_block(block, nbytes)

    def give_back_ring(self, keep_bytes: int | None = None) -> set[int]:
        """Free blocks of the ring: all, or those that come and go until ``keep_bytes`` of them are left.

        Nothing is loaded.

        Returns:
            Their numbers: nobody may keep views of their memory.
        """
        assert not self._queue, "a schedule is in progress"
        if not self.ring.nbytes or (keep_bytes is not None and self.ring.passing_bytes <= keep_bytes):
            return set()
        with self.iteration.waiting():
            gone = self.ring.give_back_all() if keep_bytes is None else self.ring.give_back(keep_bytes)
        self._leave(gone)
        return gone

    def _leave(self, blocks: Container[int]) -> None:
        for bucket in self.buckets:
            bucket.leave(blocks)

    def block_of(self, number: int) -> Tensor | None:
        """The memory of the block in which the slot of a bucket is, within its update."""
        placement = self.buckets[number].placement
        return None if placement is None else self.ring.memory(placement.block)

    def copy_down(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        """Store ``(to the host, from the device)``, all ``uint8``, after the updates and loads that were issued."""
        store = self._lanes["S"]
        with self._link.in_use:
            store.wait(self._lanes["U"].mark())
            store.wait(self._lanes["L"].mark())
            store.wait(self._lanes["C"].mark())  # the user may have written state there
            for home, source in copies:
                store.copy(home, source)
            self.moved = store.mark()
        return self.moved

    def copy_up(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        """Load ``(to the device, from the host)``, all ``uint8``, ahead of the updates that are issued from now on.

        What is on the device was allocated on the current stream; what is on the host was stored by :meth:`copy_down`.
        """
        load = self._lanes["L"]
        with self._link.in_use:
            load.wait(self._lanes["C"].mark())
            load.wait(self._lanes["S"].mark())
            for target, home in copies:
                load.copy(target, home)
            self.moved = load.mark()
        self._before_updates.append(self.moved)
        return self.moved

    def keep_aside(self, copies: Sequence[Copy], reuse: Mark | None, *, after_compute: bool) -> Mark:
        """Store ``(to the host, from parameters)`` as the updates that were issued have left them.

        Args:
            copies: all ``uint8``.
            reuse: a mark that an earlier call returned, and that nobody waits for any more.
            after_compute: and as the current stream has, so far.
        """
        store = self._lanes["S"]
        store.wait(self._lanes["U"].mark())  # a bucket without state has no store that waited for its update
        if after_compute:
            store.wait(self._lanes["C"].mark())
        store.copy_pieces(store.cut(copies))
        return store.mark(reuse)

    def come_after(self, mark: Mark) -> None:
        """Let what follows on the current stream, be it that of an update, start only after ``mark``."""
        self._lanes["C"].wait(mark)

    def bring_back(self, numbers: Iterable[int], copies: Sequence[Copy]) -> None:
        """Load ``(to parameters, from the host)``, as if updates of these buckets wrote them; the current stream waits.

        Every update that was issued has been, and stored first what is loaded now.
        """
        load, update, current = (self._lanes[name] for name in ("L", "U", "C"))
        load.wait(update.mark())
        load.wait(current.mark())  # which may still read them
        load.copy_pieces(load.cut(copies))
        mark = load.mark()
        with self.iteration.waiting():
            update.wait(mark)
            current.wait(mark)
        for number in numbers:
            # Whoever gathers these parameters waits for the last update of their bucket.
            span = self._spans["U", number]
            self._updates = span.number = self._updates + 1
            span.end = update.mark(span.end)
        self.end_updates()

    def take_back(self) -> None:
        """Give up a schedule of which updates have been issued whose stores went elsewhere; the host goes on.

        What is in the ring counts for nothing. Stores that are still on their way keep their place in it, for which
        later schedules wait.
        """
        self._queue, self._issued = deque(), []
        for bucket in self.buckets:
            bucket.residency = Residency.HOME

    def wait_on_current(self, mark: Mark) -> None:
        """Let what follows on the current stream start only after ``mark``."""
        with self.iteration.waiting():
            self._lanes["C"].wait(mark)

    def waiting(self) -> AbstractContextManager[None]:
        """Within it, the current stream is made to wait for all updates: for how long it stands still is noted."""
        return self.iteration.waiting() if self._unseen else nullcontext()

    def begin(self, actions: Sequence[Action], places: Mapping[int, Placement], blocks: RingBlocks) -> None:
        """Take up a schedule, of which nothing is issued yet.

        Args:
            actions: in the order in which to issue them.
            places: in the ring, of all buckets that pass through it. The same object as long as they are the same.
            blocks: in which these places are.
        """
        self._blocks = blocks
        self.ring.keep_first(blocks.lasting)
        if places is not self._places:
            self._places = places
            self._after_stores()  # of buckets that passed through other places, for which ``actions`` do not wait
            for number, placement in places.items():
                self.buckets[number].place(placement)
        self._last_actions = ()
        self._step_begin = self._lanes["C"].mark(self._step_begin)
        self._step_called = None
        self._queue = deque(actions)
        self._issued = []
        self._skipped = set()

    def step_is_called(self) -> None:
        """Only loads have been issued so far, and what has passed since :meth:`begin` was the model's time."""
        self._step_called = self._lanes["C"].mark()

    def _take_ring_back(self) -> None:
        """Somebody else has used the ring: their stores may still read it, and what was loaded is no longer there."""
        self._after_stores()
        updated = {action.bucket for action in self._issued if action.kind == "U"}
        lost = [action for action in self._issued if action.kind == "L" and action.bucket not in updated]
        for action in lost:
            self.buckets[action.bucket].residency = Residency.HOME
        self._issued = [action for action in self._issued if action not in lost]
        self._queue.extendleft(reversed(lost))

    def _after_stores(self) -> None:
        """Let what enters the ring from now on come after all stores that have been issued."""
        stores = self._lanes["S"].mark()
        self._lanes["L"].wait(stores)
        self._lanes["U"].wait(stores)

    def advance(
        self,
        update: Callable[[int], None],
        may_update: Callable[[int], bool] = lambda number: True,
        room_bytes: float = math.inf,
    ) -> None:
        """Issue actions in order, up to the first update that may not run yet, or that needs more of the ring.

        A load that needs more of the ring holds up the loads behind it, and no updates of what has been loaded.

        Args:
            update: runs the optimizer on a bucket, in the update lane.
            may_update: whether the gradients of a bucket are final.
            room_bytes: no more of what comes and goes of the ring may be there now. What is already there stays.
        """
        if self._queue and self._link.changes_hands(self.number):
            self._take_ring_back()
        try:
            put_off: list[Action] = []  # loads without room
            while self._queue:
                action = self._queue.popleft()
                if action.kind == "L" and (put_off or not self._enter(action.bucket, room_bytes)):
                    put_off.append(action)
                    continue
                if action.kind == "U" and not self._may_run(action, put_off, may_update, room_bytes):
                    self._queue.appendleft(action)
                    break
                self._issue(action, update)
                self._issued.append(action)
            self._queue.extendleft(reversed(put_off))
        except BaseException:
            self.synchronize()
            raise

    def _may_run(
        self, action: Action, put_off: Sequence[Action], may_update: Callable[[int], bool], room_bytes: float
    ) -> bool:
        """Whether an update may be issued, while these loads that come before it are not."""
        waits_for_load = any(wait.kind == "L" and not wait.earlier for wait in action.waits)
        if put_off and (not waits_for_load or any(load.bucket == action.bucket for load in put_off)):
            return False  # it enters the ring itself, or what it updates is not there
        return may_update(action.bucket) and self._enter(action.bucket, room_bytes)

    def _enter(self, bucket: int, room_bytes: float) -> bool:
        """Whether the block that a bucket passes through is there. It is taken if there is room for it.

        Raises:
            torch.OutOfMemoryError: there is none, and nothing goes on without this block.
        """
        placement = self.buckets[bucket].placement
        if placement is None:
            return True
        block, nbytes = placement.block, self._blocks.nbytes[placement.block]
        is_new = block not in self.ring and not self.ring.lasts(block)
        if is_new and self.ring.passing_bytes + nbytes > room_bytes:
            return False
        try:
            self._enter_block(block, nbytes)
        except torch.OutOfMemoryError:
            if is_new and not math.isinf(room_bytes):
                return False  # in a backward, whose activations have it; there is more room later
            raise
        return True

    def _enter_block(self, block: int, nbytes: int) -> None:
        if self.ring.enter(block, nbytes, self.wait_on_current):
            self._leave({block})

    @property
    def is_issued(self) -> bool:
        """Whether nothing of the schedule is left to be issued."""
        return not self._queue

    def finish(self) -> None:
        """The whole schedule has been issued."""
        assert not self._queue
        self._last_actions, self._issued = tuple(self._issued), []

    def skip(self, buckets: Container[int]) -> None:
        """Take buckets that turn out to have no gradient out of the schedule. What is loaded of them goes unused."""
        self._skipped |= {action.bucket for action in self._queue if action.bucket in buckets}
        for action in self._issued:
            if action.bucket in buckets and action.kind == "L":
                self.buckets[action.bucket].residency = Residency.HOME
        self._queue = deque(action for action in self._queue if action.bucket not in buckets)
        self._issued = [action for action in self._issued if action.bucket not in buckets]

    def cancel(self) -> None:
        """Forget a schedule of which only loads have been issued."""
        assert not any(action.kind == "U" for action in self._issued), "state has been updated"
        for action in self._issued:
            self.buckets[action.bucket].residency = Residency.HOME
        self._queue, self._issued = deque(), []

    def loads_after(self, mark: Mark) -> None:
        """Loads that are issued from now on start only after ``mark``."""
        self._lanes["L"].wait(mark)

    def updates_after(self, mark: Mark) -> None:
        """Updates that are issued from now on start only after ``mark``."""
        self._lanes["U"].wait(mark)
        if self.host is not None:
            self.host.after(mark)

    def updates_after_compute(self) -> None:
        """Updates that are issued from now on start only when the current stream has done what it was given so far."""
        if self._lanes["U"] is not self._lanes["C"]:
            self._compute_point = self._lanes["C"].mark(self._compute_point)
            self._lanes["U"].wait(self._compute_point)
        if self.host is not None:
            self.host.after(self._lanes["C"].mark())  # one of its own: the host comes to it later

    def updating(self) -> AbstractContextManager[None]:
        """Within it, kernels are issued in order with the updates."""
        return self._lanes["U"].running()

    def end_updates(self) -> None:
        """Nothing more is issued in order with this step's updates."""
        self._updates_end = self._lanes["U"].mark(self._updates_end)
        self._updates_ended = self._updates

    def wait_all_updated(self) -> None:
        """Let what follows on the current stream start only after everything that was issued with the updates."""
        with self.waiting():
            uploaded = self.host.wait_all() if self.host is not None else None
            if uploaded is not None:
                self._lanes["C"].wait(uploaded)
            self.wait_device_updated()
        self._unseen.clear()

    def wait_moved(self) -> None:
        """Let what follows on the current stream start only after all copies and updates that were issued."""
        with self.iteration.waiting():
            for name in ("L", "U", "S"):
                self._lanes["C"].wait(self._lanes[name].mark())

    def wait_device_updated(self) -> None:
        """The same for what the device updates: not for the host's share."""
        if self._updates_end is not None and self._lanes["U"] is not self._lanes["C"]:
            with self.waiting():
                self._lanes["C"].wait(self._updates_end)
            self._note_awaited(self._link.key_of(None), self._updates_ended)
        if self.host is None:
            self._unseen.clear()

    def wait_updated(self, numbers: Collection[int], stream: torch.Stream | None = None) -> None:
        """Let what follows on ``stream`` (``None``: the current one) start only after the updates of these buckets.

        How long the current stream stands still for those that it has not waited for yet is noted.
        """
        key = current = self._link.key_of(None)
        if stream is not None:
            key = self._link.key_of(stream)
        unseen = self._unseen.intersection(numbers) if key == current else ()
        with self.iteration.waiting() if unseen else nullcontext():
            self._wait_device_updated(self._wait_host_updated(numbers, stream), stream, key)
        self._unseen.difference_update(unseen)

    def _wait_host_updated(self, numbers: Collection[int], stream: torch.Stream | None) -> Collection[int]:
        """Returns those that are not the host's."""
        if self.host is None:
            return numbers
        uploaded = {number: self.host.wait(number) for number in numbers}
        for mark in filter(None, uploaded.values()):
            wait_on(stream, self._lanes["C"], mark)
        return [number for number, mark in uploaded.items() if mark is None]

    def _wait_device_updated(self, numbers: Iterable[int], stream: torch.Stream | None, key: int) -> None:
        found = (self._spans.get(("U", number)) for number in numbers)
        # All updates are in order, so that waiting for the last is waiting for all.
        last = max((span for span in found if span is not None), key=lambda span: span.number, default=None)
        if last is not None and last.end is not None and last.number > self._awaited.get(key, 0):
            wait_on(stream, self._lanes["C"], last.end)
            self._note_awaited(key, last.number)

    def _note_awaited(self, key: int, number: int) -> None:
        self._awaited[key] = max(number, self._awaited.get(key, 0))

    def _issue(self, action: Action, update: Callable[[int], None]) -> None:
        lane, bucket = self._lanes[action.kind], self.buckets[action.bucket]
        if action.kind == "L" and self.before_load is not None:
            self.before_load(action.bucket)
        for wait in action.waits:
            if wait.bucket in self._skipped and wait.kind == "S" and not wait.earlier:
                # This store is not coming, and its last one was in an earlier step. It stood for all stores before it,
                # which may still read the place that is entered, or write the home that is loaded.
                lane.wait(self._lanes["S"].mark())
                continue
            awaited = self._spans.get((wait.kind, wait.bucket))
            if awaited is not None and awaited.end is not None:
                lane.wait(awaited.end)
        if action.kind == "U":
            self._wait_before_update(bucket, lane)
            if lane is not self._lanes["C"] and self._creates(bucket):
                # Memory that is taken on the updates' own stream stays in that stream's pool of torch's allocator, and
                # an optimizer takes as much as the bucket is large, once. On the current stream it is free for all.
                lane = self._after(lane, self._lanes["C"])
        span = self._spans.setdefault((action.kind, action.bucket), Span())
        # A trace then reads like the schedule.
        with recorded(f"fsdp_offload {action.kind}{action.bucket}"):
            span.begin = lane.mark(span.begin)
            if action.kind == "L":
                self._load(bucket, action.bucket, lane)
            elif action.kind == "S":
                self._store(bucket, action.bucket, lane)
            else:
                self._updates = span.number = self._updates + 1
                self._update(bucket, action.bucket, lane, update)
            span.end = lane.mark(span.end)
        if lane is not self._lanes[action.kind]:
            self._after(lane, self._lanes[action.kind])  # for whose work others wait
        if bucket.placement is not None:
            self.ring.note_use(bucket.placement.block, lane if lane is not self._lanes["C"] else None, span.end)

    def _load(self, bucket: StagedBucket, number: int, lane: Lane) -> None:
        assert bucket.placement is not None
        bucket.weights_loaded = self.weights is None or not bucket.has_weights or not self.weights.will_hold(number)
        lane.copy_pieces(bucket.loads(lane, self.ring.memory(bucket.placement.block)))
        bucket.move_to(Residency.LOADING)

    def _store(self, bucket: StagedBucket, number: int, lane: Lane) -> None:
        assert bucket.placement is not None
        if self.weights is not None and bucket.has_weights:
            self.weights.before_store(number, lane)
        lane.copy_pieces(bucket.stores(lane, self.ring.memory(bucket.placement.block)))
        bucket.move_to(Residency.STORING)

    def _update(self, bucket: StagedBucket, number: int, lane: Lane, update: Callable[[int], None]) -> None:
        slot = self._slot_of(bucket) if bucket.has_weights else None
        if self.weights is not None and slot is not None and not bucket.weights_loaded:
            self.weights.fill(number, slot, lane)
        with lane.running():
            update(number)
        if self.weights is not None:
            self.weights.updated(number, slot, lane)
        if self._beside_compute:
            self._unseen.add(number)
        if bucket.placement is not None:
            bucket.move_to(Residency.IN_SLOT)

    def _slot_of(self, bucket: StagedBucket) -> Tensor:
        assert bucket.placement is not None
        return self.ring.memory(bucket.placement.block)[bucket.placement.offset :][: bucket.placement.nbytes]

    @staticmethod
    def _after(lane: Lane, other: Lane) -> Lane:
        """``other``, to go on only when ``lane`` has done what it was given so far."""
        other.wait(lane.mark())
        return other

    def _wait_before_update(self, bucket: StagedBucket, lane: Lane) -> None:
        for mark in self._before_updates:
            lane.wait(mark)
        self._before_updates = []
        if self._creates(bucket):
            # A load that nobody uses any more, of a schedule that was given up, of a
            # skipped bucket or of somebody else, may still be on its way there, and no store comes after it.
            lane.wait(self._lanes["L"].mark())

    @staticmethod
    def _creates(bucket: StagedBucket) -> bool:
        """Whether an update that is issued now makes state, in the ring."""
        return bucket.placement is not None and bucket.residency is not Residency.LOADING

    def stored_mark(self, number: int) -> Mark | None:
        """From when on the last store of a bucket has ended; ``None`` if there was none."""
        store = self._spans.get(("S", number))
        return None if store is None else store.end

    def wait_home(self, number: int) -> None:
        """Block the host until the arena holds the newest bytes of this bucket: wait for its store, and no other."""
        if self.host is not None:
            self.host.wait(number)
        self._wait_stored(number)

    def _wait_stored(self, number: int) -> None:
        # Whatever its residency: a load for the next step, even one that has been given up since, is ordered behind the
        # store on the device only. Whoever reads the arena meanwhile would see the store half done.
        store = self._spans.get(("S", number))
        if store is not None and store.end is not None:
            store.end.synchronize()
        if self.buckets[number].residency is Residency.STORING:
            self.buckets[number].move_to(Residency.HOME)

    def stored(self, numbers: Iterable[int]) -> set[int]:
        """Those of ``numbers`` whose newest bytes are in the arena, or on their way there."""
        return {n for n in numbers if self.buckets[n].residency in (Residency.STORING, Residency.HOME)}

    def abandon(self) -> None:
        """After a failed step: whatever is half way counts as what the arena holds."""
        self.synchronize()
        self._queue, self._issued = deque(), []
        for bucket in self.buckets:
            bucket.residency = Residency.HOME
        if self.weights is not None:
            self.weights.release()  # it may hold what has been updated and is not stored

    def synchronize(self) -> None:
        """Block the host until every transfer and update has finished; a failure on the host is not raised here."""
        if self.host is not None:
            self.host.wait_quietly()
        self._link.synchronize()
        for bucket in self.buckets:
            if bucket.residency is Residency.STORING:
                bucket.move_to(Residency.HOME)

    def mark(self) -> Mark:
        """A mark at what the current stream has been given so far."""
        return self._lanes["C"].mark()

    def ms_since_begin(self, mark: Mark) -> float:
        """When the current stream passed ``mark``, since the last schedule was taken up; waits for it."""
        assert self._step_begin is not None
        mark.synchronize()
        return mark.elapsed_ms_since(self._step_begin)

    def bucket_times(self) -> dict[int, BucketTimes]:
        """Of the last step that has been issued whole; waits for it to finish."""
        issued = {(action.kind, action.bucket) for action in self._last_actions}
        times = {}
        for number in {bucket for kind, bucket in issued if kind == "U"}:
            update = self._spans["U", number]
            moves = [self._spans[kind, number].ms() for kind in ("L", "S") if (kind, number) in issued]
            assert update.end is not None
            times[number] = BucketTimes(max(moves, default=0.0), update.ms(), self.ms_since_begin(update.end))
        return times

    def last_step_times(self) -> StepTimes:
        """Durations of the last step that ended without an exception; waits for it to finish."""
        if not self._last_actions:
            return StepTimes()
        ms = {"L": 0.0, "U": 0.0, "S": 0.0}
        moved = {"L": 0, "U": 0, "S": 0}
        last_update: Mark | None = None
        for action in self._last_actions:
            span = self._spans[action.kind, action.bucket]
            ms[action.kind] += span.ms()
            moved[action.kind] += self.buckets[action.bucket].copied_bytes
            if action.kind == "U":
                last_update = span.end
        assert last_update is not None and self._step_begin is not None
        return StepTimes(
            loaded_bytes=moved["L"],
            stored_bytes=moved["S"],
            load_ms=ms["L"],
            store_ms=ms["S"],
            update_ms=ms["U"],
            step_ms=last_update.elapsed_ms_since(self._step_called or self._step_begin),
        )
