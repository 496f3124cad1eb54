"""Which state lives where: from parameters to shards with homes in host memory, and to buckets.

Grows when parameters are added, and is made anew when a hyperparameter changes the layout of the state.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..cpu_update.updates import HostUpdates
from ..device.arena import PAGE_BYTES, Region, aligned
from ..device.host_limits import check_host_memory
from ..fsdp.dtensor import has_inner_tensors, largest_local_numel, local_shard
from ..optimizers.bucket_update import BoundRange, bind_range, slot_values
from ..optimizers.kept_state import Layouts
from ..policy import OffloadPolicy
from ..state.layout import LeafLayout, in_dtypes_of
from ..state.shard import StateShard
from ..state.store import StateStore
from .items import BytesAtHome
from .packing import Homes, Packed, ShardSpec, Taken, choose_host_share, join_copies, place_homes, plan_buckets


@dataclass(frozen=True)
class Arena:
    """The host memory of some shards' homes.

    Attributes:
        regions: their home, a spare one for the shards at its beginning, and perhaps one for the rest of them.
        breaks: offsets that no copy crosses.
        begins: the offset of each region's first byte.
    """

    regions: tuple[Region, ...]
    breaks: frozenset[int]
    begins: tuple[int, ...] = (0, 0)


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket, and the shards its numbers refer to; ``arena`` is ``None`` where the CPU updates it in its home."""

    bucket: Packed
    shards: Sequence[StateShard]
    arena: Arena | None
    _known_copies: dict[tuple[int, ...], BytesAtHome] = field(default_factory=dict, init=False)

    def covers(self) -> Iterator[StateShard]:
        """The shards of which it holds at least a range."""
        return (self.shards[piece.shard] for piece in self.bucket.ranges)

    @property
    def on_host(self) -> bool:
        """Whether it is updated on the host."""
        return any(shard.on_host for shard in self.covers())

    def copies(self, side_of: Callable[[StateShard], int]) -> BytesAtHome:
        """The bytes at home, and the offset of each in a place. ``side_of``: which home of a shard."""
        if self.arena is None:
            return []
        regions = {piece.shard: _region_of(self.shards[piece.shard], side_of) for piece in self.bucket.ranges}
        key = tuple(regions.values())
        if key not in self._known_copies:  # state that moves to and fro comes back to the same few
            self._known_copies[key] = self._copies_of(self.arena, regions)
        return self._known_copies[key]

    def _copies_of(self, arena: Arena, regions: Mapping[int, int]) -> list[tuple[Tensor, int]]:
        found: list[tuple[Tensor, int]] = []
        for number, run in itertools.groupby(self.bucket.leaf_copies, key=lambda part: regions[part[0]]):
            region, begin = arena.regions[number].bytes, arena.begins[number]
            copies = join_copies((copy for _, copy in run), arena.breaks)
            found += [(region[copy.home_offset - begin :][: copy.nbytes], copy.slot_offset) for copy in copies]
        return found

    def home(self) -> BytesAtHome:
        """The bytes at home where the state lives now, and the offset of each in a place."""
        return self.copies(lambda shard: shard.side)


class Plan:
    """All state shards of one optimizer, their homes and their buckets.

    Attributes:
        shards: by parameter, in planning order: the same on every rank.
        regions: the host memory of the homes, and of those of parameters.
        spare_bytes: of ``regions``, what is second homes.
        generation: grows whenever buckets are added or dropped; not where a shard moves among the places that it has.
    """

    def __init__(
        self,
        layouts: Layouts,
        policy: OffloadPolicy,
        device: torch.device,
        *,
        bucket_bytes: int,
        pin: bool,
        together: Mapping[Tensor, int],
        host: HostUpdates | None = None,
    ) -> None:
        self._host = host
        self._host_taken = Taken()
        self.generation = 0
        self.shards: dict[Tensor, StateShard] = {}
        self.regions: list[Region] = []
        self.spare_bytes = 0
        self._layouts = layouts
        self._policy = policy
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._pin = pin
        self._together = together
        self._buckets: list[PlannedBucket] = []
        self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def host_shards(self) -> Iterator[StateShard]:
        """Those that the host updates."""
        return (shard for shard in self.shards.values() if shard.on_host)

    def __getitem__(self, number: int) -> PlannedBucket:
        return self._buckets[number]

    def add(
        self,
        optimizer: Optimizer,
        params: Iterable[Tensor],
        states: StateStore,
        names: Mapping[Tensor, str],
    ) -> None:
        """Learn the layouts of ``params``, check and take memory for their state, and divide it into buckets.

        Raises:
            MemoryError: host memory does not suffice; nothing has been taken.
            ValueError: the optimizer cannot be offloaded with these parameters.
        """
        group_of = {param: number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
        shards = []
        for param in params:
            group, name = optimizer.param_groups[group_of[param]], names.get(param, "a parameter")
            state = states.get(param)
            # State of a 0-dim parameter looks like a counter, so which of it is one is learnt.
            is_clear = param.dim() > 0 or self._layouts.capabilities.moves_whole
            described = bool(state) and is_clear
            layout = (
                self._layouts.of_existing(param, state)
                if described
                else self._layouts.learn(optimizer, param, group, name)
            )
            if state and not described:
                layout = in_dtypes_of(layout, state)
            on_locals = self._layouts.capabilities.elementwise
            together = self._together.get(param, -1)
            shards.append(StateShard(param, name, on_locals, False, layout, group_of[param], together))
        self._choose_host(shards)
        for shard in shards:
            shard.cuttable = self.may_cut(shard, optimizer.param_groups[shard.group])
        self._take_homes(shards)
        self.shards.update((shard.param, shard) for shard in shards)
        self.generation += 1

    def may_cut(self, shard: StateShard, group: Mapping[str, object]) -> bool:
        """Whether the tested table says that this shard gives the same bits in pieces, in this group."""
        local = local_shard(shard.param)
        dtype = shard.param.dtype
        device_type = self._device.type
        if shard.on_host:
            group = {**group, **self._layouts.capabilities.host_options(group, {dtype})}
            device_type = "cpu"
        implementation = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for-loop"
        return (
            shard.on_locals
            and local.numel() > 0
            and local.is_contiguous()
            and not shard.layout.left_out
            and (implementation, device_type, dtype) in self._layouts.capabilities.cuttable
        )

    def _choose_host(self, shards: Sequence[StateShard]) -> None:
        """Choose by the largest shard of each parameter, as every rank has to choose the same."""
        if not self._policy.host_fraction:
            return
        sizes = [_largest_nbytes(shard) for shard in shards]
        eligible = [size if not has_inner_tensors(s.param) else 0 for s, size in zip(shards, sizes, strict=True)]
        chosen = choose_host_share(eligible, self._policy.host_fraction, self._host_taken)
        for shard, on_host in zip(shards, chosen, strict=True):
            shard.on_host = on_host
        host_bytes = sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host)
        self._host_taken = Taken(self._host_taken.host_bytes + host_bytes, self._host_taken.total_bytes + sum(sizes))

    def _take_homes(self, shards: Sequence[StateShard]) -> None:
        cpu_shards = [shard for shard in shards if shard.on_host]
        streamed = [shard for shard in shards if not shard.on_host]
        # For each bucket the CPU's kernel stands still for about 0.4 ms, and only gradients pass through buffers.
        cpu_buckets, cpu_homes = plan_buckets([_spec(shard) for shard in cpu_shards], 4 * self._bucket_bytes)
        cpu_gradients = [_gradient_nbytes(bucket, cpu_shards) for bucket in cpu_buckets]
        buckets, homes = plan_buckets([_spec(shard) for shard in streamed], self._bucket_bytes)
        spare = _shards_within(homes, streamed, self._policy.snapshot_bytes - self.spare_bytes)
        left_bytes = self._policy.snapshot_bytes - self.spare_bytes - spare.nbytes
        cpu_spare = _shards_within(cpu_homes, cpu_shards, left_bytes)
        mirror_nbytes = [local_shard(shard.param).numel() * shard.param.itemsize for shard in cpu_shards]
        mirrors = place_homes([nbytes] for nbytes in mirror_nbytes)
        needed_bytes = homes.nbytes + spare.nbytes + cpu_homes.nbytes + cpu_spare.nbytes + mirrors.nbytes
        if self._host is not None:
            needed_bytes += self._host.missing_bytes(cpu_gradients)
        self.check_host_memory(needed_bytes)
        # First what may fail (the driver may refuse to lock pages), so that nothing has to be undone.
        if self._host is not None and cpu_gradients:
            self._host.reserve(cpu_gradients)
        cpu_regions = [self._region(nbytes, cpu_homes.breaks) for nbytes in (cpu_homes.nbytes, cpu_spare.nbytes)]
        regions = tuple(self._region(nbytes, homes.breaks) for nbytes in (homes.nbytes, spare.nbytes))
        mirror_region = self._region(mirrors.nbytes, mirrors.breaks)
        for shard, (offset,), nbytes in zip(cpu_shards, mirrors.offsets, mirror_nbytes, strict=True):
            shard.mirror = mirror_region.range(offset, nbytes, torch.uint8, (nbytes,), (1,))
        _settle(streamed, homes, partial(_host_leaf, regions[0]))
        _settle(streamed, homes, partial(_host_leaf, regions[1]), spare.shards)
        _settle(cpu_shards, cpu_homes, partial(_host_leaf, cpu_regions[0]))
        _settle(cpu_shards, cpu_homes, partial(_host_leaf, cpu_regions[1]), cpu_spare.shards)
        self.spare_bytes += cpu_spare.nbytes
        self._add_buckets(cpu_buckets, cpu_shards, None)  # nothing of it ever moves
        self.regions += [region for region in (*regions, *cpu_regions, mirror_region) if region.nbytes]
        self.spare_bytes += spare.nbytes
        self._add_buckets(buckets, streamed, Arena(regions, frozenset(homes.breaks)))

    def spare_nbytes(self) -> int:
        """Host memory that :meth:`take_spare_homes` would take."""
        return sum(arena.regions[0].nbytes - begin for arena, _, begin in self._without_spare())

    def take_spare_homes(self) -> None:
        """Give all state a second home, where it has none. Nothing is moving.

        Raises:
            RuntimeError: the driver refuses to lock the memory; nothing has been taken.
        """
        found = self._without_spare()
        taken = [self._region(arena.regions[0].nbytes - begin, _after(begin, arena)) for arena, _, begin in found]
        for (arena, shards, begin), region in zip(found, taken, strict=True):
            number, first = len(arena.regions), arena.regions[0].bytes.data_ptr()
            for shard in shards:
                leaves = list(shard.home.all_leaves())
                offsets = [leaf.data_ptr() - first - begin if leaf.numel() else 0 for leaf in leaves]
                layouts = zip(offsets, shard.leaf_layouts, strict=True)
                shard.places.append(shard.home_over([_host_leaf(region, offset, leaf) for offset, leaf in layouts]))
                shard.spare_region = number
            grown = replace(arena, regions=(*arena.regions, region), begins=(*arena.begins, begin))
            self._buckets = [replace(one, arena=grown) if one.arena is arena else one for one in self._buckets]
            self.regions.append(region)
            self.spare_bytes += region.nbytes

    def _without_spare(self) -> list[tuple[Arena, list[StateShard], int]]:
        """Arenas with shards that have one home only, these shards, and the offset of the first of their bytes."""
        found = []
        for arena in {id(one.arena): one.arena for one in self._buckets if one.arena is not None}.values():
            covered = (shard for one in self._buckets if one.arena is arena for shard in one.covers())
            shards = [shard for shard in dict.fromkeys(covered) if len(shard.places) == 1]
            leaves = [leaf for shard in shards for leaf in shard.home.all_leaves()]
            first = arena.regions[0].bytes.data_ptr() if arena.regions[0].nbytes else 0
            begins = [leaf.data_ptr() - first for leaf in leaves if leaf.numel()]
            if begins:
                found.append((arena, shards, min(begins) // PAGE_BYTES * PAGE_BYTES))  # else breaks would not be pages
        return found

    @property
    def bucket_count(self) -> int:
        """How many there are, whether they move or not."""
        return len(self._buckets)

    def check_host_memory(self, nbytes: int) -> None:
        """Raise a MemoryError if there is no host memory for so much beside what is held."""
        check_host_memory(nbytes, self._policy.host_limit_bytes, sum(region.nbytes for region in self.regions))

    def take_region(self, nbytes: int, breaks: Sequence[int]) -> Region:
        """Take host memory for parameters, with offsets that no copy crosses; whoever takes it adds it to ``regions``.

        Raises:
            MemoryError: host memory does not suffice.
            RuntimeError: the driver refuses to lock it.
        """
        self.check_host_memory(nbytes)
        return self._region(nbytes, breaks)

    def _region(self, nbytes: int, breaks: Sequence[int]) -> Region:
        within = [at for at in breaks if at < nbytes]
        return Region(nbytes, device=self._device, pin=self._pin, breaks=within)

    def _add_buckets(self, buckets: Sequence[Packed], shards: Sequence[StateShard], arena: Arena | None) -> None:
        for bucket in buckets:
            for shard in {piece.shard: shards[piece.shard] for piece in bucket.ranges}.values():
                shard.buckets.append(len(self._buckets))
            self._buckets.append(PlannedBucket(bucket, shards, arena))

    def bind(
        self,
        number: int,
        block: Tensor | None,
        weights_at: Callable[[Tensor, int, int], Tensor | None] | None = None,
    ) -> list[BoundRange]:
        """Bind the ranges of a bucket whose place is ``block``, for the optimizer to see.

        ``weights_at``: the range of a parameter on the device, if its home is on the host.
        """
        planned = self._buckets[number]
        bound = []
        for piece, offsets in zip(planned.bucket.ranges, planned.bucket.leaf_offsets, strict=True):
            shard = planned.shards[piece.shard]
            if shard.on_host:
                values = shard.values_at(shard.side, piece.start, piece.stop)
            else:
                # Optimizers of others may look at storages; those of torch that work on local tensors do not.
                leaf = _view_leaf if self._layouts.capabilities.known and shard.on_locals else _slot_leaf
                take = partial(leaf, block if block is not None else self._no_bytes, offsets)
                values = slot_values(shard, piece.start, piece.stop, take)
            weights = None if weights_at is None else weights_at(shard.param, piece.start, piece.stop)
            bound.append(bind_range(shard, piece.start, piece.stop, values, weights))
        return bound

    def clear(self) -> None:
        """Drop all buckets and homes. Whoever still holds a state tensor keeps its region alive."""
        self.generation += 1
        self.shards.clear()
        self.regions.clear()
        self._buckets.clear()
        self.spare_bytes = 0
        self._host_taken = Taken()


def _region_of(shard: StateShard, side_of: Callable[[StateShard], int]) -> int:
    """Which region of its arena a place of ``shard`` is in."""
    return shard.spare_region if (side := side_of(shard)) else side


def _after(begin: int, arena: Arena) -> list[int]:
    """The breaks of a region of ``arena`` that begins at ``begin``."""
    return sorted(at - begin for at in arena.breaks if at > begin)


class _WithSpare(NamedTuple):
    shards: int  # how many, from the first
    nbytes: int


def _shards_within(homes: Homes, shards: Sequence[StateShard], nbytes: int) -> _WithSpare:
    """How many of ``shards`` have all of their home within the first ``nbytes`` bytes, and where those end."""
    end = 0
    for count, offsets in enumerate(homes.offsets):
        leaves = zip(offsets, shards[count].leaf_layouts, strict=True)
        shard_end = max((offset + aligned(leaf.nbytes) for offset, leaf in leaves), default=end)
        if shard_end > nbytes:
            return _WithSpare(count, end)
        end = max(end, shard_end)
    return _WithSpare(len(shards), end)


def _spec(shard: StateShard) -> ShardSpec:
    leaf_nbytes = tuple(leaf.nbytes for leaf in shard.leaf_layouts)
    return ShardSpec(shard.local_numel, leaf_nbytes, shard.cuttable, shard.together)


def _largest_nbytes(shard: StateShard) -> int:
    """Bytes of the largest shard of this state over all ranks: the same figure on each of them."""
    local = local_shard(shard.param)
    largest = largest_local_numel(shard.param)
    sizes = [leaf.dtype.itemsize * largest if leaf.shape == local.shape else leaf.nbytes for leaf in shard.leaf_layouts]
    return sum(map(aligned, sizes))


def _gradient_nbytes(bucket: Packed, shards: Sequence[StateShard]) -> list[int]:
    """Bytes of the gradients of a bucket, if they have the dtype of their parameters."""
    return [(piece.stop - piece.start) * shards[piece.shard].param.element_size() for piece in bucket.ranges]


def _settle(
    shards: Sequence[StateShard],
    homes: Homes,
    make: Callable[[int, LeafLayout], Tensor],
    count: int | None = None,
) -> None:
    """Give a home to the first ``count`` of ``shards``, which are the first of ``homes``, or to all."""
    for shard, offsets in zip(shards[:count], homes.offsets, strict=False):
        leaves = zip(offsets, shard.leaf_layouts, strict=True)
        shard.places.append(shard.home_over([make(offset, leaf) for offset, leaf in leaves]))


def _host_leaf(region: Region, offset: int, leaf: LeafLayout) -> Tensor:
    return region.range(offset, leaf.nbytes, leaf.dtype, leaf.shape, leaf.stride)


def _slot_leaf(block: Tensor, places: Sequence[int], leaf: int, nbytes: int) -> Tensor:
    return _own_storage(block, places[leaf], nbytes)


def _view_leaf(block: Tensor, places: Sequence[int], leaf: int, nbytes: int) -> Tensor:
    return block[places[leaf] : places[leaf] + nbytes]


def _own_storage(block: Tensor, offset: int, nbytes: int) -> Tensor:
    """Bytes of ``block`` as a tensor with a storage of its own, at storage offset 0.

    So optimizers see separate tensors as they do without offload: torch.compile refuses to update several views of one
    storage through a tensor subclass, and a DTensor mirrors its local tensor's storage offset.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=block.device)
    return torch.utils.dlpack.from_dlpack(block[offset : offset + nbytes])
