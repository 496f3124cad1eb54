"""Parameters with homes on the host: one item for each ``fully_shard`` group, whose gathers read the item's place.

The home of a group has the layout of its place, each parameter padded as a gather reads it, so that a load is one copy.
Frozen parameters of the model get homes as well; parameters that another optimizer updates are not touched.
"""

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..core.items import BytesAtHome, Home, Item
from ..core.packing import Packed, Range, ShardSpec, lay_out, place_homes
from ..fsdp.dtensor import holders_of, local_shard, version_of
from ..fsdp.homed import Look, ShardedParameter, uses_of
from ..state.layout import LeafLayout
from ..state.shard import EntryOf, Housed, ShardHome
from .homes import Arena, ArenaHome, Lending, TakeRegion


@dataclass(eq=False)
class Part(Housed):
    """A parameter with a home on the host: the number of its group, and its offset (bytes) in the group's place.

    It does not refer to its group's item, whose home refers to it.
    """

    number: int
    offset: int
    sharded: ShardedParameter

    @property
    def local(self) -> Tensor:
        return local_shard(self.sharded.param)

    @property
    def leaf_layouts(self) -> list[LeafLayout]:
        return [LeafLayout(tuple(self.local.shape), self.local.stride(), self.local.dtype)]

    def home_over(self, leaves: Sequence[Tensor]) -> ShardHome:
        return ShardHome({}, {}, leaves[0])

    def moved(self, old: ShardHome, entry_of: EntryOf) -> None:
        self.live_at_home()

    def live_at_home(self) -> None:
        home = self.home
        assert home.weights is not None
        home.stand_in = self.sharded.live_at(home.weights, home.stand_in)


class GroupHome(ArenaHome[Part]):
    """The home of the parameters of a group. Updates change only the ``trained`` ones."""

    def __init__(self, packed: Packed, arena: Arena[Part], lending: Lending, trained: Container[Tensor]) -> None:
        super().__init__(packed, arena, lending)
        self._trained = trained
        self._params = [part.sharded.param for part in self.shards]

    def follow(self, *, anew: bool = False) -> None:
        super().follow(anew=anew)
        self._own = {part: holders_of(local) for part in self.shards if (local := part.local).numel()}

    def changing(self) -> Sequence[Part]:
        return [part for part in self.shards if part.sharded.param in self._trained]

    def changed(self) -> BytesAtHome:
        changing = self.changing()
        return self.bytes if len(changing) == len(self.shards) else self.bytes_of(changing, self._lending.moving)

    def is_held(self) -> bool:
        return any(holders_of(part.local) > own for part, own in self._own.items())

    def version(self) -> object:
        """Return versions and counts of uses: both, since versions miss some writes of others."""
        return [(version_of(param), uses_of(param)) for param in self._params]


class FixedHome(Home):
    """Records tensors that others hold over a group's parameters, which stay on the device; it has no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._handed_out: dict[Tensor, list[TensorWeakRef]] = {}

    def hand_out(self, param: Tensor, value: object, step: int) -> None:
        """Note that others have got ``value``, a tensor over ``param``, after ``step`` steps."""
        if isinstance(value, Tensor) and value is not param:
            alive = [one for one in self._handed_out.get(param, ()) if one() is not None]
            # Views of a local tensor keep it alive, so that the weak reference to it stays valid.
            self._handed_out[param] = [*alive, *map(TensorWeakRef, (value, local_shard(value)))]
            self.expose(step)

    def is_held(self) -> bool:
        return any(one() is not None for of_param in self._handed_out.values() for one in of_param)


class Weights:
    """The parameters of one optimizer whose home is on the host; none before :meth:`move_home`.

    Attributes:
        groups: by group number, the group's parameters that have a home here.
        items: by group number, the item of ``groups[number]``.
        parts: by parameter, its group and offset.
        fixed: by group number, homes of parameters that stay on the device.
    """

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self.groups: dict[int, Sequence[ShardedParameter]] = {}
        self.items: dict[int, Item] = {}
        self.parts: dict[Tensor, Part] = {}
        self.fixed: dict[int, FixedHome] = {}

    def move_home(
        self,
        groups: Sequence[Sequence[ShardedParameter]],
        look: Look,
        take: TakeRegion,
        spare_bytes: int,
        trained: Container[Tensor],
    ) -> Arena[Part]:
        """Move the parameters of ``groups`` to homes; return their arena. An exception leaves them where they were.

        Args:
            groups: the parameters of each ``fully_shard`` group.
            look: context in which the home of a parameter is up to date, for reads by the user.
            take: takes host memory.
            spare_bytes: most bytes for spare homes.
            trained: parameters that updates may change; it may grow.
        """
        found = {number: group for number, group in enumerate(groups) if group}
        together = [one for group in found.values() for one in group]
        specs = [ShardSpec(one.padded_numel, (_padded_nbytes(one),), cuttable=False) for one in together]
        homes = place_homes(spec.leaf_nbytes for spec in specs)
        numbers = itertools.count()
        packed: dict[int, Packed] = {}
        parts: dict[Tensor, Part] = {}
        for number, group in found.items():
            ranges = tuple(Range(index, 0, specs[index].numel) for index in itertools.islice(numbers, len(group)))
            packed[number] = lay_out(ranges, specs, homes)
            for one, (offset,) in zip(group, packed[number].leaf_offsets, strict=True):
                parts[one.param] = Part(number, offset, one)
        arena = Arena(list(parts.values()), homes, spare_bytes, take)
        undo = [part.sharded.undoing() for part in parts.values()]
        try:
            for part in parts.values():
                assert part.home.weights is not None
                part.home.weights.copy_(part.local)
                part.sharded.look = look
                part.live_at_home()
            for number, its in packed.items():
                home = GroupHome(its, arena, self._lending, trained)
                self.items[number] = Item(f"parameters of group {number}", its.nbytes, home=home)
            self.groups = dict(found)
            self.parts.update(parts)  # in place: Plan.streamed is a view of this dict
        except BaseException:  # an interrupt, too
            for put_back in undo:
                put_back()
            self.items.clear()
            raise
        return arena

    @property
    def nbytes(self) -> int:
        return sum(local_shard(param).nbytes for param in self.parts)

    def place(self, param: Tensor, start: int, stop: int) -> Tensor | None:
        """Return elements ``[start, stop)`` of a parameter in its place; ``None`` if the parameter is not streamed.

        If these are all elements, the result has the local shape; else it is flat.
        """
        part = self.parts.get(param)
        if part is None:
            return None
        local = local_shard(param)
        flat = self._padded(part)[: local.numel()]
        return flat.as_strided(local.shape, local.stride()) if stop - start == local.numel() else flat[start:stop]

    def _padded(self, part: Part) -> Tensor:
        """Return a parameter in its place as a gather reads it: flat, of shape ``(padded_numel,)``."""
        block = self.items[part.number].block
        assert block is not None, "its group is on the device"
        return block.memory[part.offset :][: _padded_nbytes(part.sharded)].view(part.local.dtype)

    def lend(self, number: int) -> None:
        """Let the next gather of a group read its place."""
        block, group = self.items[number].block, self.groups[number]
        assert block is not None, "its group is on the device"
        if number not in block.views:
            block.views[number] = [self._padded(self.parts[one.param]) for one in group]
        for one, data in zip(group, block.views[number], strict=True):
            if self._is_ours(one):
                one.lend(data)

    def take_back(self, number: int) -> None:
        """End :meth:`lend`: the gather has been issued."""
        for one in filter(self._is_ours, self.groups[number]):
            one.take_back()

    def _is_ours(self, one: ShardedParameter) -> bool:
        """Return whether a parameter is still ours: another optimizer may have taken over one that was frozen.

        An empty shard always is: ``fully_shard`` exchanges its tensor at the first forward, and gathers need the
        padding. A parameter whose local tensor is its place on the device is ours, too.
        """
        local, part = local_shard(one.param), self.parts[one.param]
        if local is part.home.weights or not local.numel():
            return True
        return self.items[part.number].block is not None and local.data_ptr() == self._padded(part).data_ptr()

    def return_to_device(self, device: torch.device) -> None:
        """Move all parameters from their homes, which are up to date, back to the device; after an error, none."""
        ours = [part for part in self.parts.values() if self._is_ours(part.sharded)]
        try:
            for part in ours:
                part.sharded.live_on(device)
        except BaseException:  # most likely, there is no room
            for part in ours:
                part.live_at_home()
            raise
        self.groups = {}
        self.items.clear()
        self.parts.clear()


def _padded_nbytes(one: ShardedParameter) -> int:
    """Return the bytes of a parameter with the padding that a gather reads after it."""
    return one.padded_numel * local_shard(one.param).itemsize
