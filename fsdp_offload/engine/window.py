"""Parameters that live on the host, on the device for as long as they are used: a cache with a known future.

::

    home ──load──▶ window ──▶ gather of the forward, of the backward ──▶ (dropped: home is as new)
                     └──────▶ slot of a bucket ──update──▶ home (with its state), and back into the window if the
                                                           next forward begins with it

What ``fully_shard`` gathers together is loaded together. The order of the gathers is that of the iteration before: what
is needed soonest is loaded, and what is needed last makes room for it (Belady's rule). A gather that nobody expected is
loaded when it comes, so that a wrong order costs time and nothing else.

The window never owns the newest bytes: an update reads it, or home, and writes a slot, which is stored home. Every
update of ours tells the window (:meth:`Window.updated`); what somebody else writes at home shows in version counters.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..device.arena import normal_tensors
from ..device.lanes import Lane, Mark, stream_mark, wait_on
from ..device.link import DeviceLink
from ..planning.buckets import aligned
from ..planning.gathers import Gather, GatherOrder
from ..torch_compat.dtensor import local_shard, version_of
from ..torch_compat.homed import uses_of
from ..torch_compat.sharded_parameter import ShardedParameter
from .bucket import Residency
from .executor import Pipeline
from .homes import Plan, WeightRange


@dataclass(eq=False)
class _Entry:
    """A group in the window.

    Attributes:
        begin, end: its bytes of the window, in one block of its memory.
        views: copies of the parameters that live on the host: flat, padded, on the device.
        versions: of these parameters when they were loaded; others mean that somebody else has written them at home.
        loaded: from when on the bytes are there.
        used: until when they are read.
        held: an update is still to read it.
        outdated: buckets whose update has not been written back.
    """

    begin: int
    end: int
    views: dict[Tensor, Tensor]
    versions: dict[Tensor, object]
    loaded: Mark
    used: list[Mark] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    outdated: set[int] = field(default_factory=set)


class Window:
    """The parameters of one model for one optimizer, on the device.

    Attributes:
        groups: what it streams, group by group.
        capacity_bytes: device memory that it takes for good, from the first gather on.
        passing_bytes: what else there is now.
        held_for_updates: gathers of a backward whose gradients are used in it: parameters stay for their update.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ShardedParameter]],
        plan: Plan,
        pipeline: Pipeline,
        link: DeviceLink,
        capacity_bytes: int,
        *,
        serial: bool,
    ) -> None:
        """Take the parameters of each group that are to be streamed."""
        self._group_nbytes = [group_nbytes(group) for group in groups]
        self.capacity_bytes = max([capacity_bytes, *self._group_nbytes])
        self.passing_bytes = 0
        self._block_bytes = sorted(self._group_nbytes)[len(groups) // 2]  # of what comes and goes
        self.held_for_updates = False
        self.groups = groups
        self._plan = plan
        self._pipeline = pipeline
        self._device = link.device
        self._lanes: Mapping[str, Lane] = link.lanes(serial=serial, beside_compute=True)
        self._loads = link.window_lane(serial=serial)
        self._order = GatherOrder()
        self._memory: dict[int, Tensor] = {}  # by the first byte; those behind the first come and go
        self._entries: dict[int, _Entry] = {}  # in the order of their last gather
        self._freed: list[tuple[int, int, list[Mark]]] = []  # bytes that may still be read or written until then
        self._last_load: dict[int, Mark] = {}  # by group: until when its homes may still be read

    # Gathers -----------------------------------------------------------------------------------------------------

    def lend(self, number: int, stream: torch.Stream | None, *, in_backward: bool) -> None:
        """A gather is about to read the parameters of a group on ``stream`` (``None``: the current one)."""
        self._order.note(Gather(number, in_backward), counts=in_backward or torch.is_grad_enabled())
        entry = self._entries.pop(number, None)
        if entry is not None and not self._is_new(number, entry):
            self._free(entry)
            entry = None
        if entry is None:
            entry = self._load(number, math.inf, must=True)
        assert entry is not None
        self._entries[number] = entry
        if in_backward and self.held_for_updates:
            entry.held = set(self._buckets(number))
        owned = [self._own(weights) for weights in self.groups[number]]
        # After a reload, parameters that are kept may still be loading, and no update has waited for them.
        back = self._pipeline.moved if any(own is not None for own in owned) else None
        for mark in (entry.loaded, back):
            if mark is not None and stream is None:
                with self._pipeline.iteration.waiting():
                    self._lanes["C"].wait(mark)
            elif mark is not None:
                wait_on(stream, self._lanes["C"], mark)
        for weights, own in zip(self.groups[number], owned, strict=True):
            weights.lend(entry.views[weights.param] if own is None else own)

    def take_back(self, number: int, stream: torch.Stream | None) -> None:
        """The gather has been issued."""
        for weights in self.groups[number]:
            weights.take_back()
        self._entries[number].used.append(stream_mark(stream, self._lanes["C"]))
        self._prefetch()

    def step_ended(self) -> None:
        """All updates and stores of a step have been issued."""
        self.held_for_updates = False
        for entry in self._entries.values():
            entry.held.clear()
        self._order.step_ended()
        self._prefetch()

    def _prefetch(self) -> None:
        loads_left = _LOADS_AT_ONCE
        for distance, gather in itertools.islice(self._order.upcoming(), _GATHERS_AHEAD):
            entry = self._entries.get(gather.group)
            if entry is not None and not entry.outdated:
                continue  # what somebody writes at home is noticed by the gather
            if any(self._pipeline.buckets[n].residency is Residency.IN_SLOT for n in self._buckets(gather.group)):
                return  # home is older than the slot
            if entry is not None:
                self._free(self._entries.pop(gather.group))
            loaded = self._load(gather.group, distance) if loads_left else None
            if loaded is None:
                return
            self._entries[gather.group] = loaded
            loads_left -= 1

    def mark_loaded(self) -> Mark:
        """From when on everything has been loaded that gathers have asked for."""
        return self._loads.mark()

    # Updates -----------------------------------------------------------------------------------------------------

    def will_hold(self, bucket: int) -> bool:
        """Whether the parameters of a bucket will be in the window at its update, so that no load need bring them."""
        if not self.held_for_updates:
            return False
        number = self._group_of(bucket)
        entry = self._entries.get(number)
        return (entry is not None and bucket in entry.held) or self._order.expects(Gather(number, in_backward=True))

    def fill(self, bucket: int, slot: Tensor, lane: Lane) -> None:
        """Bring the parameters of a bucket into its slot, for an update that is about to be issued in ``lane``."""
        ranges = self._plan[bucket].weights
        number = self._group_of(bucket)
        entry = self._entries.get(number)
        targets = [_typed(slot, part) for part in ranges]
        seen = entry is not None and bucket in entry.held  # since the gather before
        if entry is not None and bucket not in entry.outdated and (seen or self._is_new(number, entry)):
            lane.wait(entry.loaded)
            with lane.running():
                torch._foreach_copy_(targets, [_of_view(entry.views, part) for part in ranges])
            entry.used.append(lane.mark())
            return
        # It had to make room for others, or was never gathered in this backward.
        load = self._lanes["L"]
        self._wait_stored(bucket, load)
        homes = [_flat(local_shard(part.shard.param))[part.start : part.stop] for part in ranges]
        load.copy_pieces(load.cut([(_bytes(one), _bytes(other)) for one, other in zip(targets, homes, strict=True)]))
        lane.wait(load.mark())

    def updated(self, bucket: int, slot: Tensor | None, lane: Lane) -> None:
        """An update of a bucket has been issued in ``lane``: what the window holds of it is old."""
        ranges = self._plan[bucket].weights
        if not ranges:
            return
        number = self._group_of(bucket)
        entry = self._entries.get(number)
        if slot is None:
            if entry is not None and any(part.shard.param in entry.views for part in ranges):
                self._free(self._entries.pop(number))  # copied while the parameters that stay were away
            return
        left_bytes = self.nbytes
        if next(self._order.upcoming(), None) is not None:
            left_bytes -= 2 * self._block_bytes  # gathers that are still to come before the forward
        keep = self._order.begins_with(number, self._group_nbytes, left_bytes)
        if entry is None and keep:
            entry = self._enter_outdated(number)
        if entry is None:
            return
        entry.held.discard(bucket)
        if not keep and not entry.held:
            self._free(self._entries.pop(number))
            return
        # While other updates are still to read it, there may come to be room for it until the next forward.
        entry.outdated.discard(bucket)
        for mark in (entry.loaded, *entry.used):
            lane.wait(mark)
        entry.used.clear()  # the mark below comes after all of them
        with lane.running():
            torch._foreach_copy_([_of_view(entry.views, part) for part in ranges], [_typed(slot, p) for p in ranges])
        entry.loaded = lane.mark()

    def _enter_outdated(self, number: int) -> _Entry | None:
        """Room for a group that no backward has gathered (the root's), for its updates to write back into.

        Else the next forward would begin with it once all stores have ended that were issued before those of it.
        """
        buckets = set(self._buckets(number))
        updated = all(self._own(one) is not None or self._is_updated(one) for one in self.groups[number])
        # What is needed later makes room, even if an update is still to read it: that takes it from home.
        entry = self._load(number, self._order.distance(number), copies=False, over_held=True) if updated else None
        if entry is not None:
            entry.outdated = buckets
            self._entries[number] = entry
        return entry

    def _is_updated(self, weights: ShardedParameter) -> bool:
        shard = self._plan.shards.get(weights.param)
        return shard is not None and not shard.resident and local_shard(weights.param).numel() == weights.padded_numel

    def before_store(self, bucket: int, lane: Lane) -> None:
        """A store into the homes of a bucket is about to be issued: loads may still read them."""
        mark = self._last_load.get(self._group_of(bucket))
        if mark is not None:
            lane.wait(mark)

    def _wait_stored(self, bucket: int, lane: Lane) -> None:
        """What follows in ``lane`` loads from the homes of a bucket, which its last store may still be writing."""
        mark = self._pipeline.stored_mark(bucket)
        if mark is not None:
            lane.wait(mark)

    # Memory ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the memory, in the order of the current stream. The next gather takes it again."""
        for number in list(self._entries):
            self._free(self._entries.pop(number))
        for _, _, marks in self._freed:
            for mark in marks:
                self._lanes["C"].wait(mark)
        self._freed, self._memory, self.passing_bytes = [], {}, 0

    def return_to_device(self) -> None:
        """Let parameters that have no state here live on the device again: those with state have been moved."""
        self.release()
        for weights in {id(one): one for group in self.groups for one in group}.values():
            if weights.param not in self._plan.shards:
                weights.live_on(self._device)

    @property
    def nbytes(self) -> int:
        """Device memory that is taken now."""
        return sum(memory.numel() for memory in self._memory.values())

    @property
    def wanted_bytes(self) -> int:
        """All that could be of use, of memory that comes and goes."""
        return max(0, sum(self._group_nbytes) - self.capacity_bytes)

    @property
    def may_grow(self) -> bool:
        """Whether :meth:`grow` would find something to take, if there were room."""
        return 0 < self._block_bytes <= self.wanted_bytes - self.passing_bytes

    def grow(self, room_bytes: float) -> None:
        """Take more memory that comes and goes, in whole blocks, as far as there is room for it. In a backward."""
        wanted_bytes = min(room_bytes, self.wanted_bytes)
        while self._block_bytes and self.passing_bytes + self._block_bytes <= wanted_bytes:
            begin = next(at for at in itertools.count(1) if at * _APART not in self._memory) * _APART
            try:
                self._take(begin, self._block_bytes)
            except torch.OutOfMemoryError:
                return  # the backward has it; without this block it only waits for more loads
            self.passing_bytes += self._block_bytes

    def shrink(self, keep_bytes: int) -> None:
        """Free memory that comes and goes, in the order of the current stream, until so much is left. In a forward."""
        while self.passing_bytes > max(0, keep_bytes):
            last = {begin: math.inf for begin in self._memory if begin}
            for number, entry in self._entries.items():
                if entry.end >= _APART:
                    last[entry.begin - entry.begin % _APART] = self._order.distance(number)
            self._give_back(max(last, key=lambda begin: last[begin]))

    def _give_back(self, begin: int) -> None:
        for number in [n for n, one in self._entries.items() if begin <= one.begin < one.end <= begin + _APART]:
            self._free(self._entries.pop(number))
        for freed in [freed for freed in self._freed if begin <= freed[0] < begin + _APART]:
            self._freed.remove(freed)
            for mark in freed[2]:
                self._lanes["C"].wait(mark)
        self.passing_bytes -= self._memory.pop(begin).numel()

    @normal_tensors()
    def _take(self, begin: int, nbytes: int) -> None:
        self._memory[begin] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # It may have been an activation that a kernel on the current stream is still reading.
        self._loads.wait(self._lanes["C"].mark())

    @normal_tensors()
    def _load(
        self, number: int, distance: float, *, must: bool = False, copies: bool = True, over_held: bool = False
    ) -> _Entry | None:
        """Load a group that is needed ``distance`` gathers from now; ``None`` if there is no room before that."""
        inside = [weights for weights in self.groups[number] if self._own(weights) is None]
        nbytes = group_nbytes(inside)
        begin = self._room(nbytes, distance, must=must, over_held=over_held)
        if begin is None:
            return None
        loads, block = self._loads, begin - begin % _APART
        self._wait_until_free(begin, begin + nbytes)
        for bucket in self._buckets(number):
            self._wait_stored(bucket, loads)
        if self._pipeline.moved is not None:  # resident parameters that have left may still be on their way
            loads.wait(self._pipeline.moved)
        views, pieces, at = {}, [], begin - block
        for weights in inside:
            home = _flat(local_shard(weights.param))
            views[weights.param] = self._memory[block][at : at + weights.padded_numel * home.itemsize].view(home.dtype)
            if home.numel() and copies:
                pieces.append((self._memory[block][at : at + home.nbytes], _bytes(home)))
            at += aligned(weights.padded_numel * home.itemsize)
        loads.copy_pieces(loads.cut(pieces))
        mark = self._last_load[number] = loads.mark()
        return _Entry(begin, begin + nbytes, views, {param: _version(param) for param in views}, mark)

    def _own(self, weights: ShardedParameter) -> Tensor | None:
        """What a gather reads of a parameter that is on the device with its state; ``None``: it needs a copy."""
        shard = self._plan.shards.get(weights.param)
        stays = shard is not None and shard.resident and local_shard(weights.param).device.type == self._device.type
        return weights.padded_shard() if stays else None

    def _room(self, nbytes: int, distance: float, *, must: bool, over_held: bool) -> int | None:
        """Where so many bytes are free, or can be made so by dropping what is needed later."""
        if not nbytes:  # all of it is resident
            return 0
        if nbytes > self.capacity_bytes:  # resident state has left the device, and its parameters with it
            self.release()
            self.capacity_bytes = nbytes
        if 0 not in self._memory:
            self._take(0, self.capacity_bytes)
        while True:
            begin = self._gap(nbytes)
            if begin is not None:
                return begin
            later = {n: self._order.distance(n) for n, one in self._entries.items() if over_held or not one.held}
            victim = max(later, key=lambda n: later[n], default=None)
            if victim is None or (not must and later[victim] <= distance):
                if not must:
                    return None
                victim = next(iter(self._entries))  # updates that lag behind: theirs come from home
            self._free(self._entries.pop(victim))

    def _gap(self, nbytes: int) -> int | None:
        """Where so many bytes are free: in what comes and goes rather than in what stays."""
        taken = sorted((entry.begin, entry.end) for entry in self._entries.values() if entry.end > entry.begin)
        for first, memory in sorted(self._memory.items(), reverse=True):
            end = first + memory.numel()
            inside = [one for one in taken if first <= one[0] < end]
            for (_, begin), (until, _) in pairwise([(first, first), *inside, (end, end)]):
                if until - begin >= nbytes:
                    return begin
        return None

    def _free(self, entry: _Entry) -> None:
        if entry.end > entry.begin:
            self._freed.append((entry.begin, entry.end, [entry.loaded, *entry.used]))

    def _wait_until_free(self, begin: int, end: int) -> None:
        left = []
        for other_begin, other_end, marks in self._freed:
            if other_begin < end and begin < other_end:
                for mark in marks:
                    self._loads.wait(mark)
                if begin <= other_begin and other_end <= end:
                    continue
            left.append((other_begin, other_end, marks))
        self._freed = left

    def _is_new(self, number: int, entry: _Entry) -> bool:
        """Whether it holds what homes do. A parameter that has left the device since then has no version there."""
        copied = (weights.param for weights in self.groups[number] if self._own(weights) is None)
        return not entry.outdated and all(entry.versions.get(param) == _version(param) for param in copied)

    # Which bucket is whose ---------------------------------------------------------------------------------------

    def _group_of(self, bucket: int) -> int:
        return self._plan[bucket].weights[0].shard.together

    def _buckets(self, number: int) -> Iterator[int]:
        """Those through which parameters of a group pass."""
        for weights in self.groups[number]:
            shard = self._plan.shards.get(weights.param)
            if shard is not None and not shard.resident:
                yield from shard.buckets


_GATHERS_AHEAD, _LOADS_AT_ONCE = 4, 2
"""How far loads run ahead of gathers, and how many a gather releases. More would hold up what else uses the link: the
state that updates wait for, and the small copies of ``fully_shard`` itself."""

_APART = 1 << 48
"""Between the first bytes of two blocks of memory, as the window counts them."""


def group_nbytes(group: Iterable[ShardedParameter]) -> int:
    """What parameters that are gathered together take in the window."""
    return sum(aligned(weights.padded_numel * local_shard(weights.param).itemsize) for weights in group)


def _version(param: Tensor) -> object:
    """Changes when somebody writes a parameter at home, or it moves to another one. Stores of ours do not count."""
    return local_shard(param).data_ptr(), version_of(param), uses_of(param)


def _typed(slot: Tensor, part: WeightRange) -> Tensor:
    assert part.shard.weights is not None
    dtype = part.shard.weights.dtype
    return slot[part.offset : part.offset + (part.stop - part.start) * dtype.itemsize].view(dtype)


def _of_view(views: Mapping[Tensor, Tensor], part: WeightRange) -> Tensor:
    return views[part.shard.param][part.start : part.stop]


def _flat(local: Tensor) -> Tensor:
    return local.detach().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
