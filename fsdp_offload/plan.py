"""Which state lives where: from parameters to shards with homes, and to buckets with places in the ring.

Grows when parameters are added, and is made anew when a hyperparameter changes the layout of the state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arena import Region
from .buckets import Bucket, BucketPlan, ShardSpec, plan_buckets
from .fsdp import local_shard
from .host_memory import check_host_memory
from .learn import Layouts, layout_key
from .pipeline import StagedBucket
from .policy import OffloadPolicy
from .schedule import place_in_ring
from .shards import LeafLayout, StateShard
from .update import BoundRange, StateStore, bind_range, slot_values


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket, and the shards its numbers refer to."""

    bucket: Bucket
    shards: Sequence[StateShard]

    def covers(self) -> Iterator[StateShard]:
        """The shards of which it holds at least a range."""
        return (self.shards[piece.shard] for piece in self.bucket.ranges)


class Plan:
    """All state shards of one optimizer, their homes and their buckets.

    Attributes:
        shards: by parameter, in planning order: the same on every rank.
        regions: the host memory of the homes.
        ring_bytes: device memory that buckets pass through.
        resident_bytes: device memory of the homes that never leave it, padding included.
    """

    def __init__(
        self, layouts: Layouts, policy: OffloadPolicy, device: torch.device, *, pin: bool, staged: list[StagedBucket]
    ) -> None:
        self.shards: dict[Tensor, StateShard] = {}
        self.regions: list[Region] = []
        self.ring_bytes = 0
        self.resident_bytes = 0
        self._layouts = layouts
        self._policy = policy
        self._device = device
        self._pin = pin
        self._buckets: list[PlannedBucket] = []
        self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._staged = staged  # the pipeline's list: one entry for each of ours

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
        group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        shards = []
        for param in params:
            group, name = group_of[param], names.get(param, "a parameter")
            state = states.get(param)
            layout = (
                self._layouts.of_existing(param, state) if state else self._layouts.learn(optimizer, param, group, name)
            )
            on_locals = self._layouts.traits.elementwise
            shard = StateShard(param, name, on_locals, False, layout, layout_key(group))
            shard.cuttable = self._may_cut(shard, group)
            shards.append(shard)
        self._take_homes(*self._choose_resident(shards))
        self.shards.update((shard.param, shard) for shard in shards)
        self._place()

    def _may_cut(self, shard: StateShard, group: Mapping[str, object]) -> bool:
        local = local_shard(shard.param)
        implementation = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for-loop"
        return (
            shard.on_locals
            and local.numel() > 0
            and local.is_contiguous()
            and not shard.layout.left_out
            and (implementation, local.device.type, local.dtype) in self._layouts.traits.cuttable
        )

    def _choose_resident(self, shards: Sequence[StateShard]) -> tuple[list[StateShard], list[StateShard]]:
        left_bytes = self._policy.resident_bytes - self.resident_bytes
        for shard in shards:
            # Padding counts, so that the device memory taken stays below what was allowed.
            nbytes = _home_nbytes([shard])
            if 0 < nbytes <= left_bytes:
                shard.resident, shard.cuttable = True, False
                left_bytes -= nbytes
        return [s for s in shards if s.resident], [s for s in shards if not s.resident]

    def _take_homes(self, resident: Sequence[StateShard], offloaded: Sequence[StateShard]) -> None:
        on_host = plan_buckets([_spec(shard) for shard in offloaded], self._policy.bucket_bytes)
        check_host_memory(on_host.home_nbytes, self._policy.host_limit_bytes)
        if resident:
            # Buckets here too, although nothing moves: they bound the temporaries of an update.
            on_device = plan_buckets([_spec(shard) for shard in resident], self._policy.bucket_bytes)
            block = torch.empty(on_device.home_nbytes, dtype=torch.uint8, device=self._device)
            self.resident_bytes += on_device.home_nbytes
            _settle(resident, on_device, lambda offset, leaf: _device_leaf(block, offset, leaf))
            self._add_buckets(on_device, resident, None)
        region = Region(on_host.home_nbytes, device=self._device, pin=self._pin)
        _settle(offloaded, on_host, lambda at, leaf: region.range(at, leaf.nbytes, leaf.dtype, leaf.shape, leaf.stride))
        self.regions.append(region)
        self._add_buckets(on_host, offloaded, region)

    def _add_buckets(self, plan: BucketPlan, shards: Sequence[StateShard], region: Region | None) -> None:
        for bucket in plan.buckets:
            for shard in {piece.shard: shards[piece.shard] for piece in bucket.ranges}.values():
                shard.buckets.append(len(self._buckets))
            copies = [] if region is None else [(region.bytes[c.home_offset :][: c.nbytes], c) for c in bucket.copies]
            self._buckets.append(PlannedBucket(bucket, shards))
            self._staged.append(StagedBucket(None, [(home, copy.slot_offset) for home, copy in copies]))

    def _place(self) -> None:
        """Give every bucket that moves its place in the ring, anew: a larger bucket may have made the ring larger."""
        moving = [number for number, staged in enumerate(self._staged) if staged.copies]
        nbytes = [self._buckets[number].bucket.nbytes for number in moving]
        self.ring_bytes = min(sum(nbytes), max([self._policy.ring_bytes, *nbytes])) if nbytes else 0
        for number, placement in zip(moving, place_in_ring(nbytes, self.ring_bytes), strict=True):
            self._staged[number].placement = placement
            self._staged[number].slot_views = []

    def bind(self, number: int, ring: Tensor | None) -> list[BoundRange]:
        """What the optimizer sees of a bucket whose slot is in ``ring``."""
        planned, staged = self._buckets[number], self._staged[number]
        bound = []
        for piece, offsets in zip(planned.bucket.ranges, planned.bucket.leaf_offsets, strict=True):
            shard = planned.shards[piece.shard]
            if shard.resident:
                values = {n: shard.home_leaves[n][0] if shard.on_locals else h for n, h in shard.homes.items()}
            else:
                begin = staged.placement.offset if staged.placement else 0
                places = [begin + offset for offset in offsets]
                take = partial(_slot_leaf, ring if ring is not None else self._no_bytes, places)
                values = slot_values(shard, piece.start, piece.stop, take)
            bound.append(bind_range(shard, piece.start, piece.stop, values))
        return bound

    def clear(self) -> None:
        """Drop all buckets and homes. Whoever still holds a state tensor keeps its region alive."""
        self.shards.clear()
        self.regions.clear()
        self._buckets.clear()
        self._staged.clear()
        self.ring_bytes = self.resident_bytes = 0


def _spec(shard: StateShard) -> ShardSpec:
    return ShardSpec(shard.local_numel, tuple(leaf.nbytes for leaf in shard.leaf_layouts), shard.cuttable)


def _home_nbytes(shards: Sequence[StateShard]) -> int:
    return plan_buckets([_spec(shard) for shard in shards], 1 << 62).home_nbytes


def _settle(shards: Sequence[StateShard], plan: BucketPlan, make: Callable[[int, LeafLayout], Tensor]) -> None:
    for shard, offsets in zip(shards, plan.home_offsets, strict=True):
        shard.settle([make(offset, leaf) for offset, leaf in zip(offsets, shard.leaf_layouts, strict=True)])


def _device_leaf(block: Tensor, offset: int, leaf: LeafLayout) -> Tensor:
    return _own_storage(block, offset, leaf.nbytes).view(leaf.dtype).as_strided(leaf.shape, leaf.stride)


def _slot_leaf(ring: Tensor, places: Sequence[int], leaf: int, nbytes: int) -> Tensor:
    return _own_storage(ring, places[leaf], nbytes)


def _own_storage(block: Tensor, offset: int, nbytes: int) -> Tensor:
    """Bytes of ``block`` as a tensor with a storage of its own, at storage offset 0.

    So optimizers see separate tensors as they do without offload: torch.compile refuses to update several views of one
    storage through a tensor subclass, and a DTensor mirrors its local tensor's storage offset.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=block.device)
    return torch.utils.dlpack.from_dlpack(block[offset : offset + nbytes])
