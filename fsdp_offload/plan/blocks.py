"""Device memory for offloaded state and parameters: blocks, computed by the same functions as when attaching.

In training, ``device_bytes="auto"`` learns how many more to take; here the same :class:`~..core.room.Room` learns it
from iterations whose waits are estimated.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

from ..core.buckets import Bucket, bucketing, choose_kept, pools_for, share_out
from ..core.items import Item, Pool
from ..core.packing import Packed, ShardSpec, plan_buckets
from ..core.room import Reading, Room
from ..device.arena import aligned
from ..policy import OffloadPolicy
from .memory import Sizes

MOST_READINGS = 300  # after which "auto" has settled


class Blocks:
    """Buckets of state, groups of parameters, and the blocks of both (``pools``), on the first rank."""

    def __init__(self, policy: OffloadPolicy, sizes: Sizes) -> None:
        self.policy = policy
        together, weight_bytes, bucket_bytes, planned, home_bytes = _planned(policy, sizes)
        each = enumerate(nbytes * policy.parameters for nbytes in weight_bytes)
        weights, buckets = [Item(f"parameters of group {number}", nbytes) for number, nbytes in each], []
        for number, one in enumerate(planned):
            theirs = tuple(dict.fromkeys(together[piece.shard] for piece in one.ranges))
            state = Item(f"state {number}", one.nbytes)
            buckets.append(Bucket(number, state, theirs, tuple(weights[group] for group in theirs)))
        self.uses = len(buckets) + 2 * len(weights) * policy.parameters  # updates, and gathers from the host
        self._state = [bucket.state for bucket in buckets if bucket.state.nbytes]
        self._weights = [item for item in weights if item.nbytes]
        self.host_bytes = home_bytes + sum(item.nbytes for item in weights)
        limit = None if policy.device_bytes == "auto" else policy.device_bytes
        joins = policy.updates_in_backward
        self.pools = pools_for(self._state, self._weights, buckets, bucket_bytes, limit, joins=joins)
        share_out(self.pools, limit)
        self._pools_of_state = _pools_of(self._state)
        self.learns = limit is None and policy.moves_beside_model  # "auto" takes more blocks if compute waits
        self.is_full = not self.learns  # no more blocks are allowed, or free, though compute waits
        self._gives_way = limit is None and policy.updates_in_backward
        self._choose_kept()

    @property
    def nbytes(self) -> int:
        """Device memory of all blocks."""
        return sum(pool.count * pool.nbytes for pool in self.pools)

    @property
    def passing_bytes(self) -> int:
        """Device memory of the blocks through which state passes."""
        return sum(min(pool.transit, pool.count) * pool.nbytes for pool in self._pools_of_state)

    @property
    def leaving_bytes(self) -> int:
        """Device memory of state's blocks that are freed at the model's own peak: all but those of kept items."""
        return sum(pool.passing * pool.nbytes for pool in self._pools_of_state) * self._gives_way

    @property
    def turning_bytes(self) -> int:
        """Bytes of parameters that a forward leaves in blocks for the backward."""
        return sum(pool.passing * pool.nbytes for pool in _pools_of(self._weights))

    def again_bytes(self, room_bytes: Sequence[int]) -> int:
        """Return the bytes of parameters that leave the device between their update and the next forward.

        ``room_bytes``: room in each turn of the forward, the root's first. A group's parameters stay if they fit in
        every turn up to the group's own, together with those of earlier groups whose turns are still to come.
        """
        moving, turning_bytes = [0 if item.kept else item.nbytes for item in self._weights], self.turning_bytes
        for number in range(len(moving)):
            needed = [*itertools.accumulate(moving[number::-1])][::-1]  # in each turn up to its own
            if any(nbytes > room + turning_bytes for nbytes, room in zip(needed, room_bytes, strict=False)):
                moving[number] = 0
        return sum(item.nbytes for item in self._weights if not item.kept) - sum(moving)

    def _choose_kept(self) -> None:
        choose_kept(self._state)
        choose_kept(self._weights)
        self.kept_state, self.kept_params = (  # bytes
            sum(item.nbytes for item in items if item.kept) for items in (self._state, self._weights)
        )

    def learn(self, read: Callable[[], Reading], free_bytes: Callable[[], int]) -> None:
        """Find a number of blocks as training does; ``free_bytes``: what the device has left at the peak."""
        room, reading = Room.for_pools(self.pools, [*self._state, *self._weights]), read()
        for _ in range(MOST_READINGS if self.learns else 0):
            if room is not None and room.end(reading, steady=True, free_bytes=free_bytes):
                for pool, count in zip(self.pools, room.counts(self.pools), strict=True):
                    pool.count = count
                self._choose_kept()
                reading = read()
        self.is_full |= room is not None and room.is_full


@functools.lru_cache
def _planned(policy: OffloadPolicy, sizes: Sizes) -> tuple[dict[int, int], list[int], int, tuple[Packed, ...], int]:
    """Return each parameter's group, the groups' bytes, the bytes of a bucket, the buckets, and the bytes of homes."""
    groups = (sizes.numels[-1], *sizes.numels[:-1])  # the root is gathered first
    numels = [numel for group in groups for numel in group]
    together = dict(enumerate(number for number, group in enumerate(groups) for _ in group))
    state_itemsize = sum(sizes.state_itemsizes)
    bytes_of = {param: (sizes.itemsize * numels[param], state_itemsize * numels[param]) for param in together}
    bucket_bytes, joined = bucketing(policy, together=together, sizes=bytes_of)
    specs = [
        ShardSpec(numel, tuple(size * numel for size in sizes.state_itemsizes), True, joined[param])
        for param, numel in enumerate(numels)
    ]
    planned, homes = plan_buckets(specs, bucket_bytes)
    weight_bytes = [sum(aligned(sizes.itemsize * numel) for numel in group) for group in groups]
    return together, weight_bytes, bucket_bytes, planned, homes.nbytes


def _pools_of(items: Sequence[Item]) -> list[Pool]:
    return [pool for pool in dict.fromkeys(item.pool for item in items) if pool is not None]
