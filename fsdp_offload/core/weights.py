"""Parameters that live on the host: for each group of ``fully_shard`` one item, whose place its gathers read.

The home of a group has the layout of its place, each parameter padded as a gather reads it, so that a load is one copy.
Frozen parameters of the model are among them; those that another optimizer updates stay where they are.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..device.arena import Region
from ..planning.buckets import HomeOffsets, ShardSpec
from ..state.shard import Home
from ..torch_compat.dtensor import local_shard, version_of
from ..torch_compat.homed import holders_of, uses_of
from ..torch_compat.sharded_parameter import ShardedParameter
from .items import BytesAtHome, Item


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
        items: likewise.
        parts: by parameter.
        regions: their host memory, and that of their spare homes.
        spare_bytes: of these, what is spare homes.
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
        homes = HomeOffsets([_spec(one) for group in groups for one in group])
        shards = itertools.count()
        offsets, ends = {}, {}
        for number, group in self.groups.items():
            offsets[number] = [homes.of_shard(next(shards))[0] for _ in group]
            ends[number] = homes.nbytes
        spare_end = max((end for end in ends.values() if end <= spare_bytes), default=0)
        breaks = sorted(homes.breaks)
        self.regions = [take(n, [at for at in breaks if at < n]) for n in (homes.nbytes, spare_end)]
        self.spare_bytes = spare_end
        self.items: dict[int, Item] = {}
        self.parts: dict[Tensor, Part] = {}
        for number, group in self.groups.items():
            begin, end = offsets[number][0], ends[number]
            regions = [region for region in self.regions if end <= region.nbytes]
            within = [at for at in breaks if begin < at < end]
            homes_of_item = [_bytes_in(region, [(begin, end)], within, begin) for region in regions]
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
                one.live_at(places[0].weights.copy_(local))
            parts = [self.parts[one.param] for one in group]
            holders = [holders_of(local_shard(one.param)) for one in group]
            item.is_held = partial(_is_held, group, holders)
            item.wait_unread = partial(_wait_unread, parts)
            item.spare_home = partial(_spare_home, parts, homes_of_item)
            if len(regions) == 1 and not all(one.param in trained for one in group):  # a spare home needs all of it
                ends_of_group = [*offsets[number][1:], end]
                ranges = list(zip((one.param for one in group), offsets[number], ends_of_group, strict=True))
                item.stored = partial(_stored, regions[0], ranges, trained, within)

    def homes(self) -> Iterator[tuple[Home, bool]]:
        """All homes, and whether parameters live there now."""
        return ((home, number == 0) for part in self.parts.values() for number, home in enumerate(part.homes))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(local_shard(param).nbytes for param in self.parts)

    def place(self, param: Tensor, start: int, stop: int) -> Tensor | None:
        """The elements ``[start, stop)`` of a parameter on the device, where it is now; ``None``: it does not stream.

        All of them have its shape.
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
        """The gather has been issued."""
        for one in self.groups[number]:
            one.take_back()

    def return_to_device(self, device: torch.device) -> None:
        """Let all of them live on the device again, out of their homes, which are up to date."""
        for param, part in self.parts.items():
            if local_shard(param) is part.homes[0].weights:  # another optimizer may have taken over what nobody trained
                part.sharded.live_on(device)


def _bytes_in(region: Region, ranges: Iterable[tuple[int, int]], breaks: Sequence[int], begin: int) -> BytesAtHome:
    """Bytes of these ranges of offsets in a region, cut at its breaks; and offsets in a place that begins there."""
    cuts = ((a, [at for at in breaks if a < at < b], b) for a, b in ranges)
    pairs = (pair for a, between, b in cuts for pair in itertools.pairwise([a, *between, b]))
    return [(region.bytes[a:b], a - begin) for a, b in pairs]


def _stored(
    region: Region,
    ranges: Sequence[tuple[Tensor, int, int]],
    trained: Container[Tensor],
    breaks: Sequence[int],
) -> BytesAtHome:
    """The bytes of those of a group's parameters that updates may change; neighbours are one copy."""
    runs = itertools.groupby(ranges, key=lambda one: one[0] in trained)
    wanted = [list(run) for is_trained, run in runs if is_trained]
    return _bytes_in(region, [(run[0][1], run[-1][2]) for run in wanted], breaks, ranges[0][1])


def _padded(part: Part) -> Tensor:
    """A parameter in its place, as a gather reads it: flat."""
    assert part.item.block is not None, part.item.name
    dtype = local_shard(part.sharded.param).dtype
    nbytes = part.sharded.padded_numel * dtype.itemsize
    return part.item.block.memory[part.offset : part.offset + nbytes].view(dtype)


def _spec(one: ShardedParameter) -> ShardSpec:
    """Describe a parameter with the padding that a gather reads behind it."""
    local = local_shard(one.param)
    return ShardSpec(
        local.numel(), (local.nbytes,), False, padding_nbytes=one.padded_numel * local.itemsize - local.nbytes
    )


def _versions(params: Sequence[Tensor]) -> Callable[[], object]:
    """Changes when somebody else writes one of them, or has been given it: not all writes are counted."""
    return lambda: [(version_of(param), uses_of(param)) for param in params]


def _is_held(group: Sequence[ShardedParameter], holders: Sequence[int]) -> bool:
    """Return whether anybody else has tensors over the homes of these, which have so many ``holders`` among us."""
    return any(holders_of(local_shard(one.param)) > count for one, count in zip(group, holders, strict=True))


def _wait_unread(parts: Sequence[Part]) -> None:
    for part in parts:
        part.homes[0].wait_unread()


def _spare_home(parts: Sequence[Part], homes: list[BytesAtHome]) -> BytesAtHome | None:
    if len(homes) == 1 or not any(part.homes[0].is_read() for part in parts):
        return None
    homes.reverse()
    for part in parts:
        part.homes.reverse()
        part.homes[0].wait_unread()
        assert part.homes[0].weights is not None
        part.sharded.live_at(part.homes[0].weights)
    return homes[0]
