"""Parameters that live on the host: for each group of ``fully_shard`` one item, whose place its gathers read.

The home of a group has the layout of its place, each parameter padded as a gather reads it, so that a load is one copy.
Frozen parameters of the model are among them; those that another optimizer updates stay where they are.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..device.arena import Region
from ..planning.buckets import HomeOffsets, ShardSpec
from ..torch_compat.dtensor import local_shard, version_of
from ..torch_compat.homed import uses_of
from ..torch_compat.sharded_parameter import ShardedParameter
from .items import Item


class Part(NamedTuple):
    """A parameter, and its offset in the place of ``item``."""

    item: Item
    offset: int
    sharded: ShardedParameter


class Weights:
    """The parameters of one model for one optimizer.

    Attributes:
        items: by number of the group, those that have any of them.
        parts: by parameter.
        region: their host memory.
    """

    def __init__(self, groups: Sequence[Sequence[ShardedParameter]], wait: Callable[[Tensor], None]) -> None:
        """Plan the homes of ``groups``. ``wait`` blocks the host until that of a parameter is up to date."""
        self.items: dict[int, Item] = {}
        self.parts: dict[Tensor, Part] = {}
        self.groups = groups
        self.region: Region | None = None
        self._begins: dict[int, int] = {}
        self._homes = homes = HomeOffsets([_spec(one) for group in groups for one in group])
        shards = itertools.count()
        for number, group in enumerate(groups):
            if not group:
                continue
            item = Item(f"parameters of group {number}", version=_versions([one.param for one in group]))
            offsets = [homes.of_shard(next(shards))[0] for _ in group]
            for one, offset in zip(group, offsets, strict=True):
                one.wait = wait
                self.parts[one.param] = Part(item, offset - offsets[0], one)
            item.nbytes = homes.nbytes - offsets[0]
            self.items[number], self._begins[number] = item, offsets[0]
        self.nbytes = homes.nbytes

    def move_home(self, device: torch.device, *, pin: bool) -> None:
        """Take the host memory, and let the parameters live there.

        Raises:
            RuntimeError: the driver refuses to lock the memory; nothing has changed.
        """
        breaks = sorted(self._homes.breaks)
        self.region = region = Region(self.nbytes, device=device, pin=pin, breaks=breaks)
        for number, item in self.items.items():
            begin = self._begins[number]
            cuts = [begin, *(at for at in breaks if begin < at < begin + item.nbytes), begin + item.nbytes]
            item.home = [(region.bytes[a:b], a - begin) for a, b in itertools.pairwise(cuts)]
            for one in self.groups[number]:
                local = local_shard(one.param)
                offset = begin + self.parts[one.param].offset
                home = region.range(offset, local.nbytes, local.dtype, tuple(local.shape), local.stride())
                home.copy_(local)
                one.live_at(home)

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
        for _, _, one in self.parts.values():
            one.live_on(device)


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
