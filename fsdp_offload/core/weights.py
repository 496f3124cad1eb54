"""Parameters that live on the host: for each group of ``fully_shard`` one item, whose place its gathers read.

The home of a group has the layout of its place, each parameter padded as a gather reads it, so that a load is one copy.
Frozen parameters of the model are among them; those that another optimizer updates stay where they are.
"""

import itertools
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..device.arena import PAGE_BYTES, Region
from ..fsdp.dtensor import local_shard, version_of
from ..fsdp.homed import holders_of, uses_of
from ..fsdp.sharded_parameter import ShardedParameter
from ..state.shard import Home
from .items import BytesAtHome, Item
from .packing import place_homes


class Part(NamedTuple):
    """A parameter, its offset in the place of ``item``, and its home, with a spare one where there is room for it."""

    item: Item
    offset: int
    sharded: ShardedParameter
    homes: list[Home]


class Weights:
    """The parameters of one model for one optimizer.

    Attributes:
        groups: those that have any of them, by number.
        items: by number, the item of each of these groups.
        parts: by parameter.
        regions: their host memory, and that of their spare homes.
        spare_bytes: of these, what is spare homes.
        guessed: groups that guesses of this step have changed; ``None``: updates are no guesses now.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ShardedParameter]],
        wait: Callable[[Tensor], None],
        take: Callable[[int, Sequence[int]], Region],
        spare_bytes: int,
        trained: Container[Tensor],
    ) -> None:
        """Move the parameters of ``groups`` home. After an exception they are where they were.

        Args:
            groups: of ``fully_shard``.
            wait: blocks the host until the home of a parameter is up to date.
            take: takes host memory of so many bytes, with offsets that no copy crosses.
            spare_bytes: as many at most are for spare homes.
            trained: those that updates may change; it may grow.
        """
        self.groups = {number: group for number, group in enumerate(groups) if group}
        homes = place_homes([_padded_nbytes(one)] for group in groups for one in group)
        shards = itertools.count()
        offsets, ends = {}, {}
        for number, group in self.groups.items():
            of_group = [next(shards) for _ in group]
            offsets[number], ends[number] = [homes.offsets[n][0] for n in of_group], homes.ends[of_group[-1]]
        spare_end = max((end for end in ends.values() if end <= spare_bytes), default=0)
        breaks = self._breaks = homes.breaks
        self.regions = [take(n, [at for at in breaks if at < n]) for n in (homes.nbytes, spare_end)]
        self.spare_bytes = spare_end
        self.guessed: dict[int, None] | None = None
        self._begins = {number: offsets[number][0] for number in offsets}
        self._homes: dict[int, list[BytesAtHome]] = {}  # of each group: where it is now, and a spare one
        self.items: dict[int, Item] = {}
        self.parts: dict[Tensor, Part] = {}
        for number, group in self.groups.items():
            begin, end = offsets[number][0], ends[number]
            regions = [region for region in self.regions if end <= region.nbytes]
            homes_of_item = self._homes[number] = [self._bytes(region.bytes, 0, begin, end) for region in regions]
            version = _versions([one.param for one in group])
            item = Item(f"parameters of group {number}", end - begin, home=homes_of_item[0], version=version)
            self.items[number] = item
            for one, offset in zip(group, offsets[number], strict=True):
                local = local_shard(one.param)
                layout = local.nbytes, local.dtype, tuple(local.shape), local.stride()
                places = [Home({}, {}, region.range(offset, *layout)) for region in regions]
                self.parts[one.param] = Part(item, offset - begin, one, places)
                one.wait = wait
                assert places[0].weights is not None
                places[0].stand_in = one.live_at(places[0].weights.copy_(local))
            parts = [self.parts[one.param] for one in group]
            holders = [holders_of(local_shard(one.param)) for one in group]
            item.is_held = partial(_is_held, group, holders)
            item.wait_unread = partial(_wait_unread, parts)
            item.spare_home = partial(_spare_home, weakref.ref(self), number, parts, homes_of_item)
            if len(regions) == 1 and not all(one.param in trained for one in group):
                ends_of_group = [*offsets[number][1:], end]
                ranges = list(zip((one.param for one in group), offsets[number], ends_of_group, strict=True))
                item.stored = partial(_stored, regions[0].bytes, ranges, trained, breaks)

    def _bytes(self, memory: Tensor, shift: int, begin: int, end: int) -> BytesAtHome:
        """Cut the home ``[begin, end)``, of which ``memory`` begins at ``shift``, into what one copy may be about."""
        return [(memory[a - shift : b - shift], a - begin) for a, b in _cuts(begin, end, self._breaks)]

    @property
    def missing_bytes(self) -> int:
        """Host memory that :meth:`take_spare_homes` would take."""
        first = self._first_without_spare()
        return 0 if first is None else self.regions[0].nbytes - first

    def _first_without_spare(self) -> int | None:
        begins = [begin for number, begin in self._begins.items() if len(self._homes[number]) == 1]
        return min(begins) // PAGE_BYTES * PAGE_BYTES if begins else None  # else breaks would not be pages

    def take_spare_homes(self, take: Callable[[int, Sequence[int]], Region]) -> Region | None:
        """Give each group a second home, where it has none; returns their memory.

        Raises:
            RuntimeError: the driver refuses to lock it; nothing has been taken.
        """
        first = self._first_without_spare()
        if first is None:
            return None
        region = take(self.missing_bytes, [at - first for at in self._breaks if at > first])
        for number, homes in self._homes.items():
            if len(homes) > 1:
                continue
            begin, nbytes = self._begins[number], self.items[number].nbytes
            homes.append(self._bytes(region.bytes, first, begin, begin + nbytes))
            self.items[number].stored = None  # parameters live in either, frozen ones too
            for one in self.groups[number]:
                part, local = self.parts[one.param], local_shard(one.param)
                layout = local.nbytes, local.dtype, tuple(local.shape), local.stride()
                part.homes.append(Home({}, {}, region.range(begin + part.offset - first, *layout)))
        self.regions.append(region)
        self.spare_bytes += region.nbytes
        return region

    def commit_guesses(self) -> None:
        """Let parameters live where updates have stored them."""
        guessed, self.guessed = self.guessed or {}, None
        for number in guessed:
            _flip([self.parts[one.param] for one in self.groups[number]], self._homes[number])

    def homes(self) -> Iterator[tuple[Home, bool]]:
        """All homes, and whether parameters live there now."""
        return ((home, number == 0) for part in self.parts.values() for number, home in enumerate(part.homes))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(local_shard(param).nbytes for param in self.parts)

    def place(self, param: Tensor, start: int, stop: int) -> Tensor | None:
        """The elements ``[start, stop)`` of a parameter on the device, where it is now; ``None``: it does not stream.

        If these are all of its elements, the result has its shape; else it is flat.
        """
        part = self.parts.get(param)
        if part is None:
            return None
        local = local_shard(param)
        flat = _padded(part)[: local.numel()]
        return flat.as_strided(local.shape, local.stride()) if stop - start == local.numel() else flat[start:stop]

    def lend(self, number: int) -> None:
        """Let the gather that follows read the place of a group."""
        for one in self.groups[number]:
            one.lend(_padded(self.parts[one.param]))

    def take_back(self, number: int) -> None:
        """End :meth:`lend`: the gather has been issued."""
        for one in self.groups[number]:
            one.take_back()

    def return_to_device(self, device: torch.device) -> None:
        """Let all of them live on the device again, out of their homes, which are up to date."""
        for param, part in self.parts.items():
            local = local_shard(param)
            # Another optimizer may have taken over what nobody trained. fully_shard exchanges the tensor of an empty
            # shard at the first forward; that needs its padding again, or gathers of this rank are too short.
            if local is part.homes[0].weights or not local.numel():
                part.sharded.live_on(device)


def _padded(part: Part) -> Tensor:
    """A parameter in its place, as a gather reads it: flat."""
    assert part.item.block is not None, part.item.name
    dtype = local_shard(part.sharded.param).dtype
    nbytes = part.sharded.padded_numel * dtype.itemsize
    return part.item.block.memory[part.offset : part.offset + nbytes].view(dtype)


def _padded_nbytes(one: ShardedParameter) -> int:
    """Bytes of a parameter with the padding that a gather reads behind it."""
    return one.padded_numel * local_shard(one.param).itemsize


def _versions(params: Sequence[Tensor]) -> Callable[[], object]:
    """Changes when somebody else writes one of them, or has been given it: not all writes are counted."""
    return lambda: [(version_of(param), uses_of(param)) for param in params]


def _is_held(group: Sequence[ShardedParameter], holders: Sequence[int]) -> bool:
    """Return whether anybody else has tensors over the homes of these, which have so many ``holders`` among us."""
    return any(holders_of(local_shard(one.param)) > count for one, count in zip(group, holders, strict=True))


def _wait_unread(parts: Sequence[Part]) -> None:
    for part in parts:
        part.homes[0].wait_unread()


def _cuts(begin: int, end: int, breaks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ``[begin, end)`` into what one copy may be about."""
    return itertools.pairwise([begin, *(at for at in breaks if begin < at < end), end])


def _stored(
    memory: Tensor, ranges: Sequence[tuple[Tensor, int, int]], trained: Container[Tensor], breaks: Sequence[int]
) -> BytesAtHome:
    """The bytes of those of a group's parameters that updates may change; neighbours are one copy."""
    found: list[tuple[Tensor, int]] = []
    for is_trained, run in itertools.groupby(ranges, key=lambda one: one[0] in trained):
        if is_trained:
            spans = [(begin, end) for _, begin, end in run]
            found += [(memory[a:b], a - ranges[0][1]) for a, b in _cuts(spans[0][0], spans[-1][1], breaks)]
    return found


def _spare_home(
    weights: "weakref.ref[Weights]", number: int, parts: Sequence[Part], homes: list[BytesAtHome]
) -> BytesAtHome | None:
    """As :attr:`Item.spare_home`. Until a guess is committed, parameters live where they were."""
    guessed = None if (owner := weights()) is None else owner.guessed
    if guessed is not None:
        known = number in guessed
        guessed[number] = None
        return None if known else homes[1]
    if len(homes) == 1 or not any(part.homes[0].is_read() for part in parts):
        return None
    _flip(parts, homes)
    return homes[0]


def _flip(parts: Sequence[Part], homes: list[BytesAtHome]) -> None:
    """Let parameters live in their other home."""
    homes.reverse()
    for part in parts:
        part.homes.reverse()
        part.homes[0].wait_unread()
        home = part.homes[0]
        assert home.weights is not None
        home.stand_in = part.sharded.live_at(home.weights, home.stand_in)
