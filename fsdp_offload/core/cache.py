"""Device memory for what is offloaded: a cache that knows the future, which is the uses of the last iteration.

``fetch`` loads an item, ``put`` stores it home, ``drop`` frees its place for another. ``fetch`` and ``drop`` do nothing
where there is nothing to do; ``put`` always stores.
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
    """Training repeats one sequence of uses, so what comes next is known. A wrong guess costs time only.

    Attributes:
        cycle: the uses of the last iteration that had any.
        repeats: whether that iteration had the same uses as the one before.
        at: the number of the next use, in this iteration.
        there: the number of the next use whose items may not all be on the device, at least.
    """

    def __init__(self) -> None:
        self.cycle: list[Use] = []
        self.repeats = False
        self._positions: dict[Item, list[int]] = {}
        self._index: dict[Use, list[int]] = {}
        self._noted: list[Use] = []
        self.at = self.there = 0
        self.gathers = False  # some uses are gathers

    @property
    def noted(self) -> int:
        """Return how many uses this iteration has had."""
        return len(self._noted)

    def note(self, use: Use) -> None:
        self._noted.append(use)
        found = self._index.get(use, ())
        later = bisect.bisect_left(found, self.at)
        if later < len(found):
            self.at = found[later] + 1

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
            self.gathers = any(use.gathers for use in self.cycle)
        self.there = max(0, self.there - len(self.cycle)) if self.repeats else 0
        self._noted, self.at = [], 0

    def abandon(self) -> None:
        """Begin the iteration anew: it did not come to its end."""
        self._noted, self.at, self.there = [], 0, 0

    def forget(self) -> None:
        """Expect nothing: the items are others now."""
        self.__init__()  # type: ignore[misc]

    def upcoming(self, most: int) -> range:
        """Return the numbers of what comes next in this iteration, which goes on into the next one.

        Among gathers, ``most`` are looked at; where there are none, those whose items are on the device are left out.
        """
        count = len(self.cycle)
        first, most = (self.at, min(count, most)) if self.gathers else (max(self.at, self.there), count)
        return range(first, self.at + most)

    def distances(self, items: Iterable[Item]) -> list[int]:
        """Count uses until the next one of each of ``items``."""
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
        updates: buckets that were updated, also those on the CPU.
        held_updates: of them, those that waited for ``step()`` since others held tensors over what they change.
    """

    loaded_bytes: int = 0
    stored_bytes: int = 0
    loads: int = 0
    stores: int = 0
    updates: int = 0
    held_updates: int = 0


class Cache:
    """All places of one optimizer.

    Attributes:
        pools: of all items, those that profit most from another block in front.
        held: items that have a place.
        pinned: items that an update is about to use; nobody evicts them.
        moved: in this iteration.
        bound: ``Bucket.bound`` of each bucket; entries are deleted when one of their blocks is given back.
        stopwatch: times it; ``None``: nothing is timed.
        copies_alone: items move in ``step()`` only, where nobody else copies.
        is_full: the device had no memory for a block in this iteration.
        peak_bytes, last_peak_bytes: of blocks at once, in this iteration and in the last one.
        keeps_bound: what is bound to a block finds its memory also when that is other memory.
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
        """Device memory that is taken now."""
        return sum([pool.made * pool.nbytes for pool in self.pools])

    @property
    def lasting_bytes(self) -> int:
        """Device memory that is taken now, and is not given back at some point of an iteration."""
        return sum([min(pool.made, pool.count) * pool.nbytes for pool in self.pools])

    def fetch(self, item: Item, *, must: bool = True, distance: int = -1) -> bool:
        """Have ``item`` on the device, and return whether it is. Evicts only what is used after ``distance`` uses.

        ``must``: evicts whatever has to leave.
        """
        if item.block is not None:
            if item.is_fresh():
                return True
            self.drop(item)  # somebody has written it at home since
        block = self._room_for(item, must, distance)
        if block is None:
            return False
        item.block, self.held[item] = block, None
        try:
            self._fill(item, block)
        except BaseException:  # an interrupt, too: the place would count as filled
            self.lanes.load.wait(*block.free)
            item.ready = self.lanes.load.mark()
            self.forget([item])
            raise
        return True

    def _fill(self, item: Item, block: Block) -> None:
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
            item.ready = load.mark()  # nothing to load; but the update that fills the place has to come after R1
        if item.home.exposed_at is not None:  # otherwise only we can have written it, and counting costs time
            item.home.see()
        item.used.clear()
        item.known_to.clear()

    def changed(self, item: Item, mark: Mark) -> None:
        """Note that an update has changed the place of ``item``, up to ``mark``."""
        home = item.home
        if (spare := home.turn()) is not None:
            # R4: a checkpoint's writer reads the old home, and the spare one may be written. The item's loads and
            # stores ended before the update, which has waited for them.
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
        """Give the place of ``item`` to another; what is newer there than at home is stored first.

        ``is_used``: its use in this iteration is over.
        """
        if item.block is None:
            return
        if not is_used:
            self.timeline.there = 0
        if item.dirty:
            self.put(item)
        assert item.pool is not None, item.name
        block, item.block = item.block, None
        del self.held[item]
        block.free = [mark for mark in (item.ready, *item.used.values()) if mark is not None]
        item.pool.free.append(block)  # last: an interrupt may lose a block, but give none to two items

    def flush(self, items: Iterable[Item] | None = None) -> None:
        """Store what is newer on the device than at home."""
        for item in list(self.held if items is None else items):
            if item.block is not None and item.dirty:
                self.put(item)

    def forget(self, items: Iterable[Item]) -> None:
        """Give up places without storing them: what an exception has left there is not known."""
        for item in items:
            item.dirty = False
            self.drop(item)

    def release(self) -> None:
        """Give all device memory back, in the order of the compute stream."""
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
        """Allow ``pool`` a block less while an optimizer creates state, which takes as much memory."""
        if self._lowered is None and pool.count > pool.least:
            self._lowered = pool
            self.resize(pool, pool.count - 1)

    def restore_room(self) -> bool:
        """Undo :meth:`leave_room`; returns whether there is anything to undo."""
        if self._lowered is None:
            return False
        self._lowered.count += 1
        self._lowered = None
        return True

    def resize(self, pool: Pool, count: int) -> None:
        """Allow ``pool`` ``count`` blocks from now on; if it has more, the items that are needed last are evicted.

        To be called on the compute stream, where blocks are allocated, as in a reduction's hook; not in a hook of
        autograd's that accumulates a gradient, which may run on another.
        """
        pool.count = count
        self._shrink(pool)

    def allow(self, beyond: Sequence[int], lasting: Sequence[int]) -> None:
        """Allow so many blocks ``beyond`` the count of each pool, of which ``lasting`` may come. As :meth:`resize`."""
        for pool, more, come in zip(self.pools, beyond, lasting, strict=True):
            pool.beyond, pool.lasting = more, come
            self._shrink(pool)

    def _shrink(self, pool: Pool) -> None:
        if pool.made <= pool.count + pool.beyond:
            return
        with _NOTHING if self.stopwatch is None else self.stopwatch.waiting():
            while pool.made > pool.count + pool.beyond and (pool.free or self._evict(pool, None)):
                self._give_back(pool)
        # Each iteration begins with the same ones, so that each item comes to a place to which it is bound already.
        pool.apart.sort(key=_NUMBER, reverse=True)
        if len(pool.free) == pool.made:
            pool.free.sort(key=_NUMBER)

    def _give_back(self, pool: Pool) -> None:
        # Blocks are allocated on the compute stream, whose next kernel may get this memory: so compute waits (R1).
        block = pool.free.pop(0)
        self.lanes.compute.wait(*block.free)
        self.lanes.freed(block.memory)
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
            if pool.made < pool.count + pool.lasting and self._may_take(pool):
                break
            if not self._evict(pool, None if must else distance):
                if not must:
                    return None
                self._take(pool)  # the update needs it, whatever was allowed
        return pool.free.pop(0)

    def _may_take(self, pool: Pool) -> bool:
        """Take a block, unless the device has no memory for it in this iteration: activations may have it."""
        try:
            if not self.is_full:
                self._take(pool)
        except torch.OutOfMemoryError:
            self.is_full = True  # to try again each time would have the allocator wait for the device each time
        return not self.is_full

    def _take(self, pool: Pool) -> None:
        with torch.inference_mode(mode=False):  # an evaluation in between must not make blocks that nobody may write
            if pool.apart:
                self.lanes.resize(pool.apart[-1].memory, pool.nbytes)
                block = pool.apart.pop()
            else:
                memory = torch.empty(pool.nbytes, dtype=torch.uint8, device=self.device)
                block = Block(memory, number=pool.made)
        self.lanes.made([block.memory])
        block.free = [self.lanes.compute.mark()]  # it may have been an activation that a kernel there still reads
        pool.free.append(block)
        pool.made += 1
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def _evict(self, pool: Pool, distance: int | None) -> bool:
        """Drop the item of ``pool`` that is used last, and return whether there was one.

        ``distance``: only one that is not kept, and is used after more uses than that. ``None``: any, kept ones last.
        """
        fits = [one for one in self.held if one.pool is pool and one not in self.pinned]
        left = [one for one in fits if not one.kept] or (fits if distance is None else [])
        ahead = self.timeline.distances(left)
        farthest = max(ahead, default=-1)
        if farthest <= (-1 if distance is None else distance):
            return False
        self.drop(left[ahead.index(farthest)])
        return True
