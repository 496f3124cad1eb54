"""Which state lives where: from parameters to shards with homes, and to buckets with places in the ring.

Grows when parameters are added, and is made anew when a hyperparameter changes the layout of the state.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device.arena import Region, normal_tensors
from ..device.host_limits import check_host_memory
from ..optimizers.bound_range import BoundRange, bind_range, slot_values, slot_weights
from ..optimizers.kept_state import Layouts
from ..planning.buckets import PAGE_BYTES, Bucket, BucketPlan, Copy, ShardSpec, aligned, join_copies, plan_buckets
from ..planning.cpu_share import NOTHING_YET, Taken, choose_host_share, host_bucket_bytes
from ..planning.device_share import DeviceShare
from ..planning.ring_layout import Placement, RingBlocks, divide_ring, place_in_ring
from ..policy import OffloadPolicy
from ..state.layout import LeafLayout, in_dtypes_of, is_wrapper
from ..state.shard import Home, StateShard
from ..state.store import StateStore
from ..torch_compat.dtensor import is_dtensor, largest_local_numel, local_shard
from ..torch_compat.sharded_parameter import ShardedParameter
from .bucket import StagedBucket
from .cpu_updates import CpuUpdates

_LASTING_SHARE = 25
"""One part in so many of all that moves is the most that may be on the device all the time, of staging that comes and
goes: the rest of the state is to leave it for good."""


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


class WeightRange(NamedTuple):
    """The elements ``[start, stop)`` of a parameter, and the byte of a slot at which they begin."""

    shard: StateShard
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket, and the shards its numbers refer to; ``arena`` is ``None`` for state that is resident."""

    bucket: Bucket
    shards: Sequence[StateShard]
    arena: Arena | None
    _known_copies: dict[tuple[bool | int | None, ...], list[tuple[Tensor, int]]] = field(
        default_factory=dict, init=False
    )

    def covers(self) -> Iterator[StateShard]:
        """The shards of which it holds at least a range."""
        return (self.shards[piece.shard] for piece in self.bucket.ranges)

    @property
    def on_host(self) -> bool:
        """Whether it is updated on the host."""
        return any(shard.on_host for shard in self.covers())

    def copies(
        self, side_of: Callable[[StateShard], int | None], *, with_weights: bool = True
    ) -> list[tuple[Tensor, int]]:
        """The transfers between the arena and a slot: bytes at home, and an offset in the slot.

        Args:
            side_of: which home of a shard; ``None`` leaves it out.
            with_weights: the parameters that live with their state, too.
        """
        if self.arena is None:
            return []
        regions = {piece.shard: _region_of(self.shards[piece.shard], side_of) for piece in self.bucket.ranges}
        key = with_weights, *regions.values()
        if key not in self._known_copies:  # state that moves to and fro comes back to the same few
            self._known_copies[key] = self._copies_of(self.arena, regions, with_weights=with_weights)
        return self._known_copies[key]

    def _copies_of(
        self, arena: Arena, regions: Mapping[int, int | None], *, with_weights: bool
    ) -> list[tuple[Tensor, int]]:
        weights = set() if with_weights else {part.offset for part in self.weights}
        wanted = [part for part in self.bucket.leaf_copies if part[1].slot_offset not in weights]
        found: list[tuple[Tensor, int]] = []
        for number, run in itertools.groupby(wanted, key=lambda part: regions[part[0]]):
            if number is not None:
                region, begin = arena.regions[number].bytes, arena.begins[number]
                copies: Iterator[Copy] = join_copies((copy for _, copy in run), arena.breaks)
                found += [(region[copy.home_offset - begin :][: copy.nbytes], copy.slot_offset) for copy in copies]
        return found

    def live_copies(self) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]] | None]:
        """The transfers from and to where the state lives now; and those without parameters, if there are any."""
        with_weights = self.arena is not None and bool(self.weights)
        return self.copies(home_side), self.copies(home_side, with_weights=False) if with_weights else None

    @cached_property
    def weights(self) -> tuple[WeightRange, ...]:
        """Where in a slot the elements of parameters lie that live with their state."""
        pieces = zip(self.bucket.ranges, self.bucket.leaf_offsets, strict=True)
        return tuple(
            WeightRange(self.shards[piece.shard], piece.start, piece.stop, offsets[0])
            for piece, offsets in pieces
            if self.shards[piece.shard].weights is not None and piece.stop > piece.start
        )


class Plan:
    """All state shards of one optimizer, their homes and their buckets.

    Attributes:
        shards: by parameter, in planning order: the same on every rank.
        regions: the host memory of the homes.
        spare_bytes: of ``regions``, what is second homes.
        frozen_bytes: of ``regions``, what is parameters that nobody updates.
        ring: the blocks of the ring: of the device memory that buckets pass through.
        resident_bytes: device memory of the homes that never leave it, padding included.
        generation: grows whenever buckets are added or dropped, come to stay on the device, or have another ring to
            pass through; not where a shard moves among the places that it has. Whatever was derived from buckets and
            ring is derived anew then: bound ranges and schedules (:meth:`Stepping.forget_places`), the buckets of a
            model's groups, and which updates can be taken back.
    """

    def __init__(
        self,
        layouts: Layouts,
        policy: OffloadPolicy,
        share: DeviceShare,
        device: torch.device,
        *,
        pin: bool,
        staged: list[StagedBucket],
        together: Mapping[Tensor, int],
        sharded: Mapping[Tensor, ShardedParameter],
        host: CpuUpdates | None = None,
    ) -> None:
        self._host = host
        self._host_taken = NOTHING_YET
        self.generation = 0
        self.shards: dict[Tensor, StateShard] = {}
        self.regions: list[Region] = []
        self._of_resident: list[tuple[Region, list[StateShard]]] = []  # those of the regions that only these may use
        self.spare_bytes = 0
        self.frozen_bytes = 0
        self.ring = RingBlocks(())
        self.resident_bytes = 0
        self._passing_limit_bytes: int | None = None  # of what comes and goes, once it is known
        # One block, or blocks for one large bucket each. Smaller ones would take up more of the memory of activations,
        # each of which is an allocation of its own, but no bucket would fit into them.
        self._comes_and_goes = share.passing_is_learnt
        self._lasts = not self._comes_and_goes
        self._block_bytes = policy.bucket_bytes if self._comes_and_goes else 1 << 62
        self._layouts = layouts
        self._policy = policy
        self._share = share
        self._device = device
        self._pin = pin
        self._together = together
        self._sharded = sharded
        self._buckets: list[PlannedBucket] = []
        self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._staged = staged  # the pipeline's list: one entry for each of ours

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
            master = self._layouts.master_of(param)
            is_clear = param.dim() > 0 or self._layouts.capabilities.moves_whole
            described = bool(state) and is_clear and master == "none"
            layout = (
                self._layouts.of_existing(param, state)
                if described
                else self._layouts.learn(optimizer, param, group, name)
            )
            if state and not described and master == "none":
                layout = in_dtypes_of(layout, state)
            on_locals = self._layouts.capabilities.elementwise
            together = self._together.get(param, -1)
            shard = StateShard(param, name, on_locals, False, layout, group_of[param], master, together)
            shard.sharded = self._sharded.get(param)
            if shard.sharded is not None:
                local = local_shard(param)
                shard.weights = LeafLayout(tuple(local.shape), local.stride(), local.dtype)
            shards.append(shard)
        self._choose_host(shards)
        for shard in shards:
            shard.cuttable = self.may_cut(shard, optimizer.param_groups[shard.group])
        self._take_homes(*self._choose_resident(shards))
        self.shards.update((shard.param, shard) for shard in shards)
        self._place()

    def add_frozen(self, frozen: Sequence[ShardedParameter]) -> None:
        """Let parameters without state live on the host.

        Raises:
            MemoryError: host memory does not suffice; nothing has been taken.
        """
        specs = [ShardSpec(one.param.numel(), (local_shard(one.param).nbytes,), False) for one in frozen]
        plan = plan_buckets(specs, 1 << 62)
        held_bytes = sum(region.nbytes for region in self.regions)
        check_host_memory(plan.home_nbytes, self._policy.host_limit_bytes, held_bytes)
        region = self._region(plan.home_nbytes, plan.home_breaks)
        for one, (offset,) in zip(frozen, plan.home_offsets, strict=True):
            local = local_shard(one.param)
            layout = LeafLayout(tuple(local.shape), local.stride(), local.dtype)
            home = _host_leaf(region, offset, layout)
            home.copy_(local)
            one.live_at(home)
        self.regions += [region] if region.nbytes else []
        self.frozen_bytes += region.nbytes

    def may_cut(self, shard: StateShard, group: Mapping[str, object]) -> bool:
        """Whether the tested table says that this shard gives the same bits in pieces, in this group."""
        local = local_shard(shard.param)
        dtype = shard.updated_dtype
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
        eligible = [size if not is_wrapper(local_shard(s.param)) else 0 for s, size in zip(shards, sizes, strict=True)]
        chosen = choose_host_share(eligible, self._policy.host_fraction, self._host_taken)
        for shard, on_host in zip(shards, chosen, strict=True):
            shard.on_host = on_host
        host_bytes = sum(size for size, on_host in zip(sizes, chosen, strict=True) if on_host)
        self._host_taken = Taken(self._host_taken.host_bytes + host_bytes, self._host_taken.total_bytes + sum(sizes))

    def _choose_resident(self, shards: Sequence[StateShard]) -> tuple[list[StateShard], list[StateShard]]:
        left_bytes = self._share.staying_bytes - self.resident_bytes
        for shard in shards:
            nbytes = _resident_nbytes(shard)
            if 0 < nbytes <= left_bytes and not shard.on_host:
                shard.resident = True
                left_bytes -= nbytes
        return [s for s in shards if s.resident], [s for s in shards if not s.resident]

    def _take_homes(self, resident: Sequence[StateShard], offloaded: Sequence[StateShard]) -> None:
        updated_there = [shard for shard in offloaded if shard.on_host]
        offloaded = [shard for shard in offloaded if not shard.on_host]
        there_bytes = host_bucket_bytes(self._policy.bucket_bytes)
        there = plan_buckets([_spec(shard) for shard in updated_there], there_bytes)
        there_gradients = [_gradient_nbytes(bucket, updated_there) for bucket in there.buckets]
        on_host = plan_buckets([_spec(shard) for shard in offloaded], self._policy.bucket_bytes)
        held_bytes = sum(region.nbytes for region in self.regions)
        with_spare = _shards_within(on_host, offloaded, self._policy.snapshot_bytes - self.spare_bytes)
        left_bytes = self._policy.snapshot_bytes - self.spare_bytes - with_spare.nbytes
        there_spare = _shards_within(there, updated_there, left_bytes)
        needed_bytes = on_host.home_nbytes + with_spare.nbytes + there.home_nbytes + there_spare.nbytes
        mirrors = plan_buckets([_mirror_spec(shard) for shard in updated_there], 1 << 62)
        needed_bytes += mirrors.home_nbytes
        if self._host is not None:
            needed_bytes += self._host.missing_bytes(there_gradients)
        check_host_memory(needed_bytes, self._policy.host_limit_bytes, held_bytes)
        # First what may fail (the driver may refuse to lock pages), so that nothing has to be undone.
        if self._host is not None and there_gradients:
            self._host.reserve(there_gradients)
        there_regions = [self._region(n, there.home_breaks) for n in (there.home_nbytes, there_spare.nbytes)]
        regions = tuple(
            self._region(nbytes, on_host.home_breaks) for nbytes in (on_host.home_nbytes, with_spare.nbytes)
        )
        mirror_region = self._region(mirrors.home_nbytes, mirrors.home_breaks)
        for shard, (offset,) in zip(updated_there, mirrors.home_offsets, strict=True):
            (nbytes,) = _mirror_spec(shard).leaf_nbytes
            shard.mirror = mirror_region.range(offset, nbytes, torch.uint8, (nbytes,), (1,))
        if resident:
            # Buckets here too, although nothing moves: they bound the temporaries of an update.
            on_device, homes = self._homes_on_device(resident, self._policy.bucket_bytes)
            self.resident_bytes += on_device.home_nbytes
            for shard, home in zip(resident, homes, strict=True):
                shard.places.append(home)
            self._add_buckets(on_device, resident, None)
        _settle(offloaded, on_host, partial(_host_leaf, regions[0]))
        _settle(offloaded, on_host, partial(_host_leaf, regions[1]), with_spare.shards)
        _settle(updated_there, there, partial(_host_leaf, there_regions[0]))
        _settle(updated_there, there, partial(_host_leaf, there_regions[1]), there_spare.shards)
        self.spare_bytes += there_spare.nbytes
        self._add_buckets(there, updated_there, None)  # nothing of it ever moves
        self.regions += [region for region in (*regions, *there_regions, mirror_region) if region.nbytes]
        self.spare_bytes += with_spare.nbytes
        self._add_buckets(on_host, offloaded, Arena(regions, frozenset(on_host.home_breaks)))

    def spare_nbytes(self) -> int:
        """Host memory that :meth:`take_spare_homes` would take."""
        return sum(arena.regions[0].nbytes - begin for arena, _, begin in self._without_spare())

    def take_spare_homes(self) -> None:
        """Give all state that passes through the ring a second home, where it has none. Nothing is moving.

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
            shards = [shard for shard in dict.fromkeys(covered) if len(shard.places) == 1 and not shard.resident]
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

    def resident_nbytes(self, numbers: Iterable[int]) -> int:
        """Device bytes that :meth:`keep_on_device` would take."""
        return _home_nbytes(self._shards_in(numbers))

    def keep_on_device(self, numbers: Iterable[int]) -> list[StateShard]:
        """Give the state of whole buckets a home on the device, for good; nothing is copied.

        Args:
            numbers: buckets that together have all of each of their shards. Nothing of them is moving.

        Returns:
            Their shards, whose old homes stay reserved.
        """
        numbers = sorted(numbers)
        shards = self._shards_in(numbers)
        assert {number for shard in shards for number in shard.buckets} == set(numbers), "a shard would be divided"
        plan, homes = self._homes_on_device(shards)
        for shard, home in zip(shards, homes, strict=True):
            shard.leave_host()
            shard.move([home])
        for number in numbers:
            self._buckets[number] = replace(self._buckets[number], arena=None)
            self._staged[number] = StagedBucket(None, [])
        self.resident_bytes += plan.home_nbytes
        self._place()
        return shards

    def resident_shards(self) -> list[StateShard]:
        """Those whose home is on the device, except while everything has left it."""
        return [shard for shard in self.shards.values() if shard.resident]

    def homes_on_device(self, shards: Sequence[StateShard]) -> list[Home]:
        """A home on the device for each, in one block that goes with the last of them."""
        return self._homes_on_device(shards)[1]

    @normal_tensors()
    def _homes_on_device(
        self, shards: Sequence[StateShard], bucket_bytes: int = 1 << 62
    ) -> tuple[BucketPlan, list[Home]]:
        plan = plan_buckets([_device_spec(shard) for shard in shards], bucket_bytes)
        block = torch.empty(plan.home_nbytes, dtype=torch.uint8, device=self._device)
        homes = []
        for shard, offsets in zip(shards, plan.home_offsets, strict=True):
            padding = [shard.padding_nbytes, *[0] * len(offsets)]  # of the parameter, which is the first leaf
            leaves = zip(offsets, shard.leaf_layouts, padding, strict=False)
            homes.append(shard.home_over([_device_leaf(block, *leaf) for leaf in leaves]))
        return plan, homes

    def take_host_places(self, shards: Sequence[StateShard]) -> None:
        """Give ``shards``, which are resident, the host memory to go to. It is kept from then on.

        Raises:
            MemoryError: host memory does not suffice; nothing has been taken.
        """
        homeless = [shard for shard in shards if not shard.host_places]
        if not homeless:
            return
        plan = plan_buckets([_spec(shard) for shard in homeless], 1 << 62)
        held_bytes = sum(region.nbytes for region in self.regions)
        check_host_memory(plan.home_nbytes, self._policy.host_limit_bytes, held_bytes)
        region = self._region(plan.home_nbytes, plan.home_breaks)
        self.regions += [region] if region.nbytes else []
        self._of_resident.append((region, homeless))
        for shard, home in zip(homeless, _homes(homeless, plan, partial(_host_leaf, region)), strict=True):
            shard.host_places = [home]

    def give_back_host_places(self) -> None:
        """Let go of the host memory that :meth:`take_host_places` has taken, where nobody reads it any more.

        What became resident after it had lived on the host keeps its place among the others, in one region with them.
        """
        kept = []
        for region, shards in self._of_resident:
            if any(home.is_read() for shard in shards for home in shard.host_places):
                kept.append((region, shards))
                continue
            for shard in shards:
                shard.host_places = []
            self.regions = [other for other in self.regions if other is not region]
        self._of_resident = kept

    def _shards_in(self, numbers: Iterable[int]) -> list[StateShard]:
        covered = (shard for number in numbers for shard in self._buckets[number].covers())
        return [shard for shard in dict.fromkeys(covered) if not shard.resident]

    def _region(self, nbytes: int, breaks: Sequence[int]) -> Region:
        within = [at for at in breaks if at < nbytes]
        return Region(nbytes, device=self._device, pin=self._pin, breaks=within)

    def _add_buckets(self, plan: BucketPlan, shards: Sequence[StateShard], arena: Arena | None) -> None:
        for bucket in plan.buckets:
            for shard in {piece.shard: shards[piece.shard] for piece in bucket.ranges}.values():
                shard.buckets.append(len(self._buckets))
            planned = PlannedBucket(bucket, shards, arena)
            self._buckets.append(planned)
            self._staged.append(StagedBucket(None, *planned.live_copies()))

    def _place(self) -> None:
        """Choose the blocks of the ring. Where in it a bucket passes through depends on the order of each step."""
        self.generation += 1
        moving = [number for number, staged in enumerate(self._staged) if staged.copies]
        nbytes = [self._buckets[number].bucket.nbytes for number in moving]
        limit_bytes = self._share.ring_bytes(self._policy.bucket_bytes)
        if self._comes_and_goes and self._lasts:
            limit_bytes = max(limit_bytes, sum(nbytes) // _LASTING_SHARE)
        self.ring = self._ring_for(nbytes, limit_bytes)
        if self._passing_limit_bytes is not None:
            limit_bytes = self.ring.lasting_bytes + self._passing_limit_bytes
            self.ring = self._ring_for(nbytes, limit_bytes)
            excess_bytes = self.ring.passing_bytes - self._passing_limit_bytes
            if excess_bytes > 0:  # blocks that are cut to all buckets are smaller, those that last as well
                self.ring = self._ring_for(nbytes, limit_bytes - excess_bytes)
        for number in moving:
            self._staged[number].place(Placement(0, self._buckets[number].bucket.nbytes))

    def _ring_for(self, bucket_nbytes: Sequence[int], limit_bytes: int) -> RingBlocks:
        if not bucket_nbytes:
            return RingBlocks(())
        ring_bytes = min(sum(bucket_nbytes), max([limit_bytes, *bucket_nbytes]))
        blocks = divide_ring(bucket_nbytes, ring_bytes, self._block_bytes)
        if self._lasts:
            return RingBlocks(blocks, len(blocks))
        # These cost memory at the peak of the device, to which the others add nothing.
        return RingBlocks(blocks, bisect_right(list(accumulate(blocks)), sum(bucket_nbytes) // _LASTING_SHARE))

    def places_for(self, order: Iterable[int]) -> dict[int, Placement]:
        """A place in the ring for each bucket that moves, in the order of a step."""
        moving = [number for number in order if self._staged[number].copies]
        nbytes = [self._buckets[number].bucket.nbytes for number in moving]
        return dict(zip(moving, place_in_ring(nbytes, self.ring.nbytes), strict=True))

    def resize_ring(self, passing_bytes: int) -> None:
        """Let the ring have, beside the blocks that last, at most so much in others. Nothing is moving."""
        self._passing_limit_bytes = passing_bytes
        self._place()

    def let_ring_last(self) -> None:
        """Let no block of the ring come and go, and have as many as may last. Nothing is moving."""
        self._lasts, self._passing_limit_bytes = True, None
        self._place()

    @property
    def ring_bytes(self) -> int:
        """Device memory that buckets pass through."""
        return sum(self.ring.nbytes)

    @property
    def moving_buckets(self) -> int:
        """How many buckets pass through the ring."""
        return sum(bool(one.copies) for one in self._staged)

    def moving_bytes(self, numbers: Iterable[int] | None = None) -> int:
        """Of all slots, or of these, if each bucket that moves had one of its own."""
        numbers = range(len(self._staged)) if numbers is None else numbers
        return sum(self._buckets[number].bucket.nbytes for number in numbers if self._staged[number].copies)

    def bind(
        self,
        number: int,
        block: Tensor | None,
        weights_at: Callable[[Tensor, int, int], Tensor | None] | None = None,
    ) -> list[BoundRange]:
        """Bind the ranges of a bucket whose slot is in this block of the ring, for the optimizer to see.

        ``weights_at``: the range of a parameter on the device, if that is not with its state.
        """
        planned, staged = self._buckets[number], self._staged[number]
        bound = []
        for piece, offsets in zip(planned.bucket.ranges, planned.bucket.leaf_offsets, strict=True):
            shard = planned.shards[piece.shard]
            weights = None
            if shard.resident or shard.on_host:
                values = shard.values_at(shard.side, piece.start, piece.stop)
            else:
                begin = staged.placement.offset if staged.placement else 0
                places = [begin + offset for offset in offsets]
                # Optimizers of others may look at storages; those of torch that work on local tensors do not.
                leaf = _view_leaf if self._layouts.capabilities.known and shard.on_locals else _slot_leaf
                take = partial(leaf, block if block is not None else self._no_bytes, places)
                values = slot_values(shard, piece.start, piece.stop, take)
                weights = slot_weights(shard, piece.start, piece.stop, take)
            if weights_at is not None:
                weights = weights_at(shard.param, piece.start, piece.stop)
            bound.append(bind_range(shard, piece.start, piece.stop, values, weights))
        return bound

    def clear(self) -> None:
        """Drop all buckets and homes. Whoever still holds a state tensor keeps its region alive."""
        self.generation += 1
        self.shards.clear()
        self.regions.clear()
        self._of_resident.clear()
        self._buckets.clear()
        self._staged.clear()
        self.ring = RingBlocks(())
        self.resident_bytes = self.spare_bytes = 0
        self._host_taken = NOTHING_YET


def _region_of(shard: StateShard, side_of: Callable[[StateShard], int | None]) -> int | None:
    """Which region of its arena a place of ``shard`` is in."""
    return shard.spare_region if (side := side_of(shard)) else side


def _after(begin: int, arena: Arena) -> list[int]:
    """The breaks of a region of ``arena`` that begins at ``begin``."""
    return sorted(at - begin for at in arena.breaks if at > begin)


def home_side(shard: StateShard) -> int:
    """Which of its places is the home of ``shard`` now: the usual argument of :meth:`PlannedBucket.copies`."""
    return shard.side


class _WithSpare(NamedTuple):
    shards: int  # how many, from the first
    nbytes: int


def _shards_within(plan: BucketPlan, shards: Sequence[StateShard], nbytes: int) -> _WithSpare:
    """How many of ``shards`` have all of their home within the first ``nbytes`` bytes, and where those end."""
    end = 0
    for count, offsets in enumerate(plan.home_offsets):
        leaves = zip(offsets, shards[count].leaf_layouts, strict=True)
        shard_end = max((offset + aligned(leaf.nbytes) for offset, leaf in leaves), default=end)
        if shard_end > nbytes:
            return _WithSpare(count, end)
        end = max(end, shard_end)
    return _WithSpare(len(shards), end)


def _spec(shard: StateShard) -> ShardSpec:
    leaf_nbytes = tuple(leaf.nbytes for leaf in shard.leaf_layouts)
    return ShardSpec(shard.local_numel, leaf_nbytes, shard.cuttable, shard.together)


def _device_spec(shard: StateShard) -> ShardSpec:
    """Gathers read a parameter that lives on the device where it is, padding included."""
    return _spec(shard)._replace(padding_nbytes=shard.padding_nbytes)


def _home_nbytes(shards: Sequence[StateShard]) -> int:
    return plan_buckets([_device_spec(shard) for shard in shards], 1 << 62).home_nbytes


def _resident_nbytes(shard: StateShard) -> int:
    """What it takes to keep ``shard`` on the device. Padding counts: what is taken stays below what was allowed."""
    if shard.on_locals or not is_dtensor(shard.param):
        return _home_nbytes([shard])
    # Resident state is updated first. Steps that see DTensors may issue collectives, so every rank has to choose the
    # same parameters.
    return _largest_nbytes(shard)


def _largest_nbytes(shard: StateShard) -> int:
    """Bytes of the largest shard of this state over all ranks: the same figure on each of them."""
    local = local_shard(shard.param)
    largest = largest_local_numel(shard.param)
    sizes = [leaf.dtype.itemsize * largest if leaf.shape == local.shape else leaf.nbytes for leaf in shard.leaf_layouts]
    return plan_buckets([ShardSpec(largest, tuple(sizes), False)], 1 << 62).home_nbytes


def _mirror_spec(shard: StateShard) -> ShardSpec:
    local = local_shard(shard.param)
    return ShardSpec(local.numel(), (local.numel() * local.element_size(),), False)


def _gradient_nbytes(bucket: Bucket, shards: Sequence[StateShard]) -> list[int]:
    """Bytes of the gradients of a bucket, if they have the dtype of their parameters."""
    return [(piece.stop - piece.start) * shards[piece.shard].param.element_size() for piece in bucket.ranges]


def _settle(
    shards: Sequence[StateShard],
    plan: BucketPlan,
    make: Callable[[int, LeafLayout], Tensor],
    count: int | None = None,
) -> None:
    """Give a home to the first ``count`` of ``shards``, or to all."""
    for shard, home in zip(shards[:count], _homes(shards[:count], plan, make), strict=True):
        shard.places.append(home)


def _homes(shards: Sequence[StateShard], plan: BucketPlan, make: Callable[[int, LeafLayout], Tensor]) -> list[Home]:
    """A home for each of ``shards``, which are the first of ``plan``."""
    places = zip(shards, plan.home_offsets, strict=False)
    return [
        shard.home_over([make(offset, leaf) for offset, leaf in zip(offsets, shard.leaf_layouts, strict=True)])
        for shard, offsets in places
    ]


def _host_leaf(region: Region, offset: int, leaf: LeafLayout) -> Tensor:
    return region.range(offset, leaf.nbytes, leaf.dtype, leaf.shape, leaf.stride)


def _device_leaf(block: Tensor, offset: int, leaf: LeafLayout, padding_nbytes: int) -> Tensor:
    storage = _own_storage(block, offset, leaf.nbytes + padding_nbytes)
    return storage.view(leaf.dtype).as_strided(leaf.shape, leaf.stride)


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
