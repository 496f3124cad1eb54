"""Divides state into buckets, and device memory into pools of blocks; chooses which items are kept."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import TypeVar

from torch import Tensor

from ..device.lanes import Copy
from ..policy import MIB, OffloadPolicy
from .items import PASSING, Block, Item, Pool, Use

LARGEST_BYTES, JOINED_BYTES = 256 * MIB, 64 * MIB
"""Bytes of state above which a group is cut, and up to which groups, or updates in ``step()`` alone, are joined."""

MOST_PASSING = 5
"""Limit of ``Pool.transit`` if one update takes several buckets of a group, since each update costs the host time."""

SMALL_BLOCKS, MOST_BUCKETS = 16, 288
"""With ``device_bytes`` and updates in the backward, a block is ``1 / SMALL_BLOCKS`` of the limit: fewer bytes are in
transit, and more state stays on the device. ``MOST_BUCKETS`` limits the buckets, each of which costs the host time."""

ELSEWHERE = -1
"""Group number of parameters that ``fully_shard`` does not gather; compute waits for their updates in ``step()``."""

Param = TypeVar("Param")


@dataclass(eq=False)
class Bucket:
    """Ranges of shards that are updated together.

    Attributes:
        number: index among all buckets.
        state: item of the ranges' state.
        groups: numbers of the ``fully_shard`` groups to which its parameters belong.
        weights: for each of ``groups``, the item of its parameters.
        params: parameters of which it has a range.
        on_host: the CPU updates it: its state is updated in its home, and never moves.
        after: numbers of buckets with earlier ranges of its parameters, to be updated first: all ranges start from the
            same values of the parameter's counters, and the last range writes the new ones.
        followers: buckets with later ranges of its parameters.
        streamed: items that its update needs on the device: its state, and parameters whose home is on the host.
        old: pairs of old parameter bytes on the host and their range on the device, to which a roll-back copies them.
        bound: by the blocks in which ``streamed`` lies, the bucket's ranges as tensors that the optimizer sees.
    """

    number: int
    state: Item
    groups: tuple[int, ...]
    weights: tuple[Item, ...] = ()
    params: tuple[Tensor, ...] = ()
    on_host: bool = False
    after: frozenset[int] = frozenset()
    old: Sequence[Copy] = ()
    followers: "tuple[Bucket, ...]" = ()
    streamed: tuple[Item, ...] = field(init=False)
    use: Use = field(init=False)
    bound: dict[tuple[Block | None, ...], object] = field(init=False)

    def __post_init__(self) -> None:
        self.connect(self.weights)

    def connect(self, weights: tuple[Item, ...]) -> None:
        """Set ``weights``, and with them ``streamed``, ``use`` and an empty ``bound``."""
        self.weights, self.bound = weights, {}
        self.streamed = tuple(item for item in (self.state, *self.weights) if item.nbytes)
        self.use = Use(self.number, self.streamed)


def bucket_bytes_for(group_bytes: Iterable[int], device_bytes: int | None, *, small: bool = False) -> int:
    """Choose bytes of state per bucket: one bucket for each group, within bounds.

    Args:
        group_bytes: bytes of state of each ``fully_shard`` group.
        device_bytes: bytes allowed on the device; ``None``: no number limits them.
        small: divide ``device_bytes`` into ``SMALL_BLOCKS``.
    """
    sizes = sorted(size for size in group_bytes if size)
    most = max(LARGEST_BYTES, sum(sizes) // 64)
    if device_bytes is not None:
        most = min(most, device_bytes // (PASSING + 1))
        if small:
            most = min(most, max(device_bytes // SMALL_BLOCKS, sum(sizes) // MOST_BUCKETS))
    # Blocks have one size, so one group size is chosen for all: the largest such that groups of at least that size have
    # at least half of the state. Buckets have that size or, if it exceeds ``most``, equal parts of it. A little is
    # added for padding, and for slightly larger groups, so that no small rest is cut off from them.
    usual = next((size for size in reversed(sizes) if 2 * sum(s for s in sizes if s >= size) >= sum(sizes)), 0)
    alike = max((size for size in sizes if size <= usual * 9 // 8), default=0)
    parts = max(1, -(-alike // max(1, most)))  # the limit may be a few bytes
    return max(1024, min(most, -(-alike // parts) * 33 // 32) if usual else most)


def bucketing(
    policy: OffloadPolicy, *, together: Mapping[Param, int], sizes: Mapping[Param, tuple[int, int]]
) -> tuple[int, dict[Param, int]]:
    """Choose bytes of state per bucket, and renumber the groups: groups with the same new number may share a bucket.

    Args:
        policy: the policy in force.
        together: number of the ``fully_shard`` group of each parameter, in forward order.
        sizes: bytes of each parameter and of its state.
    """
    own_bytes, group_bytes = Counter[int](), Counter[int]()
    for param, (nbytes, state_bytes) in sizes.items():
        own_bytes[together.get(param, ELSEWHERE)] += nbytes
        group_bytes[together.get(param, ELSEWHERE)] += state_bytes
    limit = None if policy.device_bytes == "auto" else policy.device_bytes
    if limit is not None and policy.parameters:  # parameters take a part of the limit, in one item per group
        usual = sorted(own_bytes.values())[len(own_bytes) // 2]
        limit = max(limit // 4, limit - (PASSING + 1) * usual)
    bucket_bytes = policy.bucket_bytes
    if bucket_bytes == "auto":
        small = policy.updates_in_backward and not policy.parameters
        bucket_bytes = bucket_bytes_for(group_bytes.values(), limit, small=small)
    if policy.updates_in_backward and policy.parameters:
        # Do not join groups: gradients must be freed early, and would wait for those of a group that may get none.
        return bucket_bytes, dict(together)
    # Count parameters too: an update needs all those of its bucket on the device, even if the class has no state.
    joined_bytes = group_bytes | own_bytes if policy.parameters else group_bytes  # the larger of both
    return bucket_bytes, joined_groups(together, joined_bytes, min(JOINED_BYTES, bucket_bytes))


def joined_groups(together: Mapping[Param, int], group_bytes: Mapping[int, int], most: int) -> dict[Param, int]:
    """Renumber the groups: neighbours in forward order get one number while their state stays within ``most`` bytes."""
    numbers: dict[int, int] = {}
    number, filled = -1, 0
    for group in sorted(set(together.values())):
        nbytes = group_bytes.get(group, 0)
        if number < 0 or filled + nbytes > most:
            number, filled = number + 1, 0
        numbers[group], filled = number, filled + nbytes
    return {param: numbers[group] for param, group in together.items()}


def make_pools(items: Sequence[Item], usual_bytes: int) -> list[Pool]:
    """Make a pool for ``items`` of one kind, and another for items of more than 1.5 times ``usual_bytes``."""
    sizes = [item.nbytes for item in items]
    inside = [size for size in sizes if size <= usual_bytes * 3 // 2] or sizes
    pools = []
    for least, most in ((0, max(inside, default=0)), (max(inside, default=0), max(sizes, default=0))):
        those = [item for item in items if least < item.nbytes <= most]
        if those:
            pools.append(Pool(most, 1, most=len(those)))
            for item in those:
                item.pool = pools[-1]
    return pools


def pools_for(
    state: Sequence[Item],
    weights: Sequence[Item],
    buckets: Sequence[Bucket],
    bucket_bytes: int,
    nbytes: int | None,
    *,
    joins: bool = False,
) -> list[Pool]:
    """Make pools for all items. Pools of parameters come first: each iteration loads these twice, and stores them once.

    The blocks that one update needs fit ``nbytes`` if possible.
    ``joins``: an update in the backward takes all buckets of a group, as far as they fit.
    """
    sizes = sorted(item.nbytes for item in weights)
    usual_bytes = sizes[len(sizes) // 2] if sizes else 0
    pools = [*make_pools(weights, usual_bytes), *make_pools(state, bucket_bytes)]
    need(pools, buckets)
    if nbytes is not None and nbytes < sum(pool.least * pool.nbytes for pool in pools):
        # One block that fits all items of a kind takes less than one block of each size.
        pools = [*make_pools(weights, sizes[-1] if sizes else 0), *make_pools(state, 1 << 62)]
        need(pools, buckets)
    for pool in pools if joins else ():
        alike = Counter(one.groups for one in buckets if one.state.pool is pool and one.groups != (ELSEWHERE,))
        usual = median_high(alike.values()) if alike else 0
        pool.transit = max(PASSING, min(MOST_PASSING, usual + 1))
    return pools


def need(pools: Sequence[Pool], buckets: Iterable[Bucket]) -> None:
    """Raise ``least`` of each pool to the blocks that one update needs: a bucket may have parameters of many groups."""
    for bucket in buckets:
        for pool in pools:
            pool.least = max(pool.least, sum(item.pool is pool for item in bucket.streamed))


def share_out(pools: Sequence[Pool], nbytes: int | None) -> None:
    """Divide ``nbytes`` among ``pools``, given in the order of their gain; ``None``: use few blocks.

    Each pool first gets its ``least``, even if that exceeds ``nbytes``; then blocks for items in transit; then, with
    ``nbytes``, blocks for kept items.
    """
    left = 1 << 62 if nbytes is None else nbytes - sum(pool.least * pool.nbytes for pool in pools)
    for pool in pools:
        pool.count = pool.least
        if nbytes is None or left < 0:  # keep ``count`` below ``most``, so that even a single bucket is not kept
            pool.most = max(pool.most, pool.least + 1)
    for beyond in (0, 1 if nbytes is None else 1 << 30):
        for pool in pools:
            more = min(pool.transit + beyond, pool.most) - pool.count
            more = max(0, min(more, left // pool.nbytes))
            pool.count += more
            left -= more * pool.nbytes
    if nbytes is None:
        for pool in pools:
            pool.count = pool.least = max(pool.least, min(pool.count, pool.most - 1))


def choose_kept(items: Sequence[Item]) -> None:
    """Keep the first of ``items``, in forward order: all if they fit; otherwise leave blocks for items in transit."""
    left: dict[Pool, int] = {}
    for item in items:
        pool = item.pool
        if pool is not None:
            if pool not in left:
                left[pool] = pool.most if pool.count >= pool.most else max(0, pool.count - pool.transit)
                pool.passing = pool.count
            item.kept, left[pool] = left[pool] > 0, left[pool] - 1
            pool.passing -= item.kept
