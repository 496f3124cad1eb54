"""Device memory for offloaded items: a cache that knows the future, which is the uses of the last iteration.

``fetch`` loads an item, ``put`` stores it home, ``drop`` frees its place for another. ``fetch`` does nothing for an
item with a valid place, and ``drop`` nothing for one without a place; ``put`` always stores.
"""

import bisect
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ..device.lanes import Lanes, Mark, recorded
from .items import Block, Item, Pool, Use
from .room import Stopwatch

NEVER = 1 << 30
_NOTHING = nullcontext()
_NUMBER = operator.attrgetter("number")


class Timeline:
    """Predicts the next uses: training repeats one sequence of them. A wrong prediction only costs time.

    Attributes:
        cycle: uses of the last iteration that had any, in order.
        repeats: that iteration had the same uses as the one before.
        at: index into ``cycle`` of the next use.
        there: items of all uses before this index are on the device. May be too low; may exceed ``len(cycle)``.
    """

    def __init__(self) -> None:
        self.cycle: list[Use] = []
        self.repeats = False
        self._positions: dict[Item, list[int]] = {}
        self._index: dict[Use, list[int]] = {}
        self._noted: list[Use] = []
        self.at = self.there = 0
        self.gathers = False  # some uses of the cycle are gathers

    @property
    def noted(self) -> int:
        """Return the number of uses in this iteration so far."""
        return len(self._noted)

    def note(self, use: Use) -> None:
        self._noted.append(use)
        found = self._index.get(use, ())
        later = bisect.bisect_left(found, self.at)
        if later < len(found):
            self.at = found[later] + 1

    def end(self) -> None:
        """End the iteration, and expect its uses in the next one."""
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
            self.gathers = any(use.gathers for use in self.cycle)
        self.there = max(0, self.there - len(self.cycle)) if self.repeats else 0
        self._noted, self.at = [], 0

    def abandon(self) -> None:
        """Begin a new iteration, and learn nothing from the unfinished one."""
        self._noted, self.at, self.there = [], 0, 0

    def forget(self) -> None:
        """Forget the learned order; the items were replaced."""
        self.__init__()  # type: ignore[misc]

    def upcoming(self, most: int) -> range:
        """Return the indices of the next uses; those beyond the end of the cycle belong to the next iteration.

        If the cycle has gathers, return ``most`` uses; else a whole cycle, from the first use that may lack an item.
        """
        count = len(self.cycle)
        first, most = (self.at, min(count, most)) if self.gathers else (max(self.at, self.there), count)
        return range(first, self.at + most)

    def distances(self, items: Iterable[Item]) -> list[int]:
        """Count, for each of ``items``, the uses before its next one; ``NEVER`` without a use."""
        found = []
        for item in items:
            positions, ahead = self._positions.get(item), NEVER
            if positions:
                index = bisect.bisect_left(positions, self.at)
                later = positions[index] if index < len(positions) else positions[0] + len(self.cycle)
                ahead = later - self.at
            found.append(ahead)
        return found


@dataclass
class Moved:
    """Bytes and operations in one iteration.

    Attributes:
        updates: buckets updated, on the device or on the CPU.
        held_updates: buckets that waited for ``step()``, since others held tensors over their bytes.
    """

    loaded_bytes: int = 0
    stored_bytes: int = 0
    loads: int = 0
    stores: int = 0
    updates: int = 0
    held_updates: int = 0


class Cache:
    """Holds all places of one optimizer.

    Attributes:
        pools: pools of all items; those that gain most from another block come first.
        held: items that have a place.
        pinned: items that an update is about to use; they are not evicted.
        moved: bytes and operations of this iteration.
        bound: ``Bucket.bound`` of each bucket; without ``keeps_bound``, giving back a block deletes its entries.
        stopwatch: times copies and waits; ``None``: nothing is timed.
        copies_alone: items move only in ``step()``, while the model makes no copies.
        is_full: the device had no memory for a block in this iteration.
        peak_bytes, last_peak_bytes: largest size of all blocks, in this iteration and in the last one.
        keeps_bound: tensors bound to a block stay valid when the block's memory is freed and allocated again.
    """

    def __init__(self, device: torch.device, lanes: Lanes, timeline: Timeline) -> None:
        self.device, self.lanes, self.timeline = device, lanes, timeline
        self.pools: list[Pool] = []
        self.held: dict[Item, None] = {}
        self.pinned: tuple[Item, ...] = ()
        self.moved = Moved()
        self.bound: list[dict[tuple[Block | None, ...], object]] = []
        self.stopwatch: Stopwatch | None = None
        self.copies_alone = self.is_full = self.keeps_bound = False
        self.peak_bytes = self.last_peak_bytes = 0
        self._lowered: Pool | None = None

    @property
    def nbytes(self) -> int:
        """Return the device memory that blocks take now."""
        return sum([pool.made * pool.nbytes for pool in self.pools])

    @property
    def lasting_bytes(self) -> int:
        """Return the device memory of blocks within ``Pool.count``, which exist throughout the iteration."""
        return sum([min(pool.made, pool.count) * pool.nbytes for pool in self.pools])

    def fetch(self, item: Item, *, must: bool = True, distance: int = -1) -> bool:
        """Load ``item`` if it has no valid place; return whether it has one now.

        Evict only items whose next use is farther than ``distance``. ``must``: evict any, or exceed the pool's limit.
        """
        if item.block is not None:
            if item.is_fresh():
                return True
            self.drop(item)  # others have written the home since the place was filled
        block = self._room_for(item, must, distance)
        if block is None:
            return False
        item.block, self.held[item] = block, None
        try:
            load = self.lanes.load
            load.wait(*block.free)  # R1: the last users may still be reading or storing these bytes
            if item.exists:
                load.wait(item.home.stored)  # R2: the last store into this home may still be running
                timed = _NOTHING if self.stopwatch is None else self.stopwatch.copying(load, item.nbytes)
                with recorded(f"fsdp_offload L {item.name}"), timed:
                    pairs = item.copies(item.home.bytes)
                    load.copy([(target, source) for source, target in pairs], alone=self.copies_alone)
                item.ready = item.home.read["load"] = load.mark()
                self.moved.loads += len(item.home.bytes)
                self.moved.loaded_bytes += item.nbytes
            else:
                item.ready = load.mark()  # nothing to load; but the update that fills the place has to wait, too (R1)
            if item.home.exposed_at is not None:  # otherwise only we can have written the home, and versions cost time
                item.home.see()
            item.used.clear()
            item.known_to.clear()
        except BaseException:  # an interrupt, too: the place would count as filled
            self.lanes.load.wait(*block.free)
            item.ready = self.lanes.load.mark()
            self.forget([item])
            raise
        return True

    def changed(self, item: Item, mark: Mark) -> None:
        """Note an update of the place of ``item`` that ends at ``mark``."""
        home = item.home
        if (spare := home.turn()) is not None:
            # R4: a checkpoint's writer, or a roll-back, needs the old home, so the next store writes the spare one. No
            # load or store of ours is left in that: the update has waited for them.
            home.bytes, home.read = spare, {}
        item.written(mark)

    def put(self, item: Item) -> None:
        """Store ``item`` home."""
        home, store = item.home, self.lanes.store
        home.wait_unread()  # R4: a checkpoint's writer may still be reading this home, and there is no spare one
        store.wait(item.ready)  # R3: the update may still be writing the place
        store.wait(*home.read.values())  # R4: a load, or a checkpoint, may still be reading this home
        copies = item.copies(home.changed())
        nbytes = sum([one.numel() for one, _ in copies])
        timed = _NOTHING if self.stopwatch is None else self.stopwatch.copying(store, nbytes)
        with recorded(f"fsdp_offload S {item.name}"), timed:
            store.copy(copies)
        home.stored = item.used["store"] = store.mark()
        home.read.clear()
        item.dirty = False
        if home.exposed_at is not None:
            home.see()
        self.moved.stores += len(copies)
        self.moved.stored_bytes += nbytes

    def drop(self, item: Item, *, is_used: bool = False) -> None:
        """Free the place of ``item`` for another, after a store if the home is older.

        ``is_used``: its use in this iteration is over.
        """
        if item.block is None:
            self.held.pop(item, None)  # an interrupted ``drop`` has left it there
            return
        if not is_used:
            self.timeline.there = 0
        if item.dirty:
            self.put(item)
        assert item.pool is not None, item.name
        block, item.block = item.block, None
        self.held.pop(item, None)
        block.free = [mark for mark in (item.ready, *item.used.values()) if mark is not None]
        item.pool.free.append(block)  # last: an interrupt may lose a block, but give none to two items

    def flush(self, items: Iterable[Item] | None = None) -> None:
        """Store those of ``items`` (``None``: of all) whose home is older than their place."""
        for item in list(self.held if items is None else items):
            if item.block is not None and item.dirty:
                self.put(item)

    def forget(self, items: Iterable[Item]) -> None:
        """Give up the places of ``items`` without a store: after an exception, their contents are unknown."""
        for item in items:
            item.dirty = False
            self.drop(item)

    def release(self) -> None:
        """Free all blocks, in the order of the compute stream."""
        for item in list(self.held):
            self.drop(item)
        for pool in self.pools:
            while pool.free:
                self._give_back(pool)
            pool.apart.clear()
        for bound in self.bound:
            bound.clear()

    # Blocks ---------------------------------------------------------------------------------------------------------

    def take_all(self) -> None:
        for pool in self.pools:
            while pool.made < pool.count:
                self._take(pool)

    def leave_room(self, pool: Pool) -> None:
        """Allow ``pool`` one block less while an optimizer creates state, which takes as much memory."""
        if self._lowered is None and pool.count > pool.least:
            self._lowered = pool
            self.resize(pool, pool.count - 1)

    def restore_room(self) -> bool:
        """Undo :meth:`leave_room`; return whether a pool had been lowered."""
        if self._lowered is None:
            return False
        self._lowered.count += 1
        self._lowered = None
        return True

    def resize(self, pool: Pool, count: int) -> None:
        """Set the ``count`` of ``pool``; if it has more blocks, evict the items that are needed last.

        Call it only while compute is the current stream, as in a reduction's hook: blocks are allocated on that.
        Autograd may run a hook that accumulates a gradient on another stream.
        """
        pool.count = count
        self._shrink(pool)

    def allow(self, beyond: Sequence[int], lasting: Sequence[int]) -> None:
        """Set ``beyond`` and ``lasting`` of each pool, and shrink it as :meth:`resize` does."""
        for pool, more, come in zip(self.pools, beyond, lasting, strict=True):
            pool.beyond, pool.lasting = more, come
            self._shrink(pool)

    def _shrink(self, pool: Pool) -> None:
        if pool.made <= pool.count + pool.beyond:
            return
        with _NOTHING if self.stopwatch is None else self.stopwatch.waiting():
            while pool.made > pool.count + pool.beyond and (pool.free or self._evict(pool, None)):
                self._give_back(pool)
        # Reuse blocks in one order: iterations begin with the same ones, and items get blocks they are bound to.
        pool.apart.sort(key=_NUMBER, reverse=True)
        if len(pool.free) == pool.made:
            pool.free.sort(key=_NUMBER)

    def _give_back(self, pool: Pool) -> None:
        # R1: the memory may go to the next kernel on the stream that allocated the block, so that stream waits. The
        # current stream may be another one, as in an evaluation.
        block = pool.free.pop(0)
        block.lane.wait(*block.free)
        self.lanes.freed(block.memory, block.lane)
        if self.keeps_bound:
            self.lanes.resize(block.memory, 0)
            pool.apart.append(block)
        for bound in self.bound if not self.keeps_bound else ():
            for blocks in [blocks for blocks in bound if block in blocks]:
                del bound[blocks]
        pool.made -= 1

    def _room_for(self, item: Item, must: bool, distance: int) -> Block | None:
        pool = item.pool
        assert pool is not None, item.name
        while not pool.free:
            if pool.made < pool.count + pool.lasting and not self.is_full:
                try:
                    self._take(pool)
                    break
                except torch.OutOfMemoryError:
                    self.is_full = True  # each further attempt would make the allocator wait for the device
            if not self._evict(pool, None if must else distance):
                if not must:
                    return None
                self._take(pool)  # the update needs a block, even if that exceeds the count
        return pool.free.pop(0)

    def _take(self, pool: Pool) -> None:
        lane = self.lanes.here()
        with torch.inference_mode(mode=False):  # blocks made in an evaluation's inference mode could not be written
            if pool.apart:
                self.lanes.resize(pool.apart[-1].memory, pool.nbytes)
                block = pool.apart.pop()
            else:
                memory = torch.empty(pool.nbytes, dtype=torch.uint8, device=self.device)
                block = Block(memory, lane, number=pool.made)
        self.lanes.made([block.memory], lane)
        block.lane, block.free = lane, [lane.mark()]  # R1: a kernel there may still read an activation in this memory
        pool.made += 1
        pool.free.append(block)  # last: an interrupt may lose a block, but leaves none that is not counted
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def _evict(self, pool: Pool, distance: int | None) -> bool:
        """Drop the item of ``pool`` whose next use is last; return whether there was one to drop.

        ``distance``: drop no kept item, and none used within that many uses. ``None``: drop kept items last.
        """
        fits = [one for one in self.held if one.pool is pool and one not in self.pinned]
        left = [one for one in fits if not one.kept] or (fits if distance is None else [])
        ahead = self.timeline.distances(left)
        farthest = max(ahead, default=-1)
        if farthest <= (-1 if distance is None else distance):
            return False
        self.drop(left[ahead.index(farthest)])
        return True
