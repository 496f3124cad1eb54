"""Worked out when parameters are added: bucket sizes, buckets and their items, blocks, and what is kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..policy import MIB
from .cache import Cache, Pool
from .items import Item, Use

LARGEST_BYTES, JOINED_BYTES = 512 * MIB, 64 * MIB
"""State of small groups is joined up to the one and of large groups cut at the other: few and large operations."""

PASSING = 3
"""Blocks that pass beside those that are kept: one is loaded, one updated, one stored."""

ELSEWHERE = -1
"""The group of parameters that ``fully_shard`` does not gather: they are new when ``step()`` returns."""


@dataclass(eq=False)
class Bucket:
    """Ranges of shards that are updated together.

    Attributes:
        number: in the plan.
        state: the item of their state.
        groups: numbers of the groups of ``fully_shard`` that have their parameters.
        weights: what marks the parameters of these groups.
        params: the parameters of which it has a range.
        bound: what the optimizer sees of it, by block.
    """

    number: int
    state: Item
    groups: tuple[int, ...]
    weights: tuple[Item, ...]
    params: tuple[Tensor, ...] = ()
    use: Use = field(init=False)
    bound: dict[object, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.use = Use(self.number, (self.state,))


def bucket_bytes_for(group_bytes: Iterable[int], device_bytes: int | None) -> int:
    """Choose bytes of state per bucket: one bucket for each group, but bounded.

    Args:
        group_bytes: state of each group of ``fully_shard``.
        device_bytes: what is allowed on the device; ``None``: not limited by a number.
    """
    sizes = sorted(size for size in group_bytes if size)
    most = max(LARGEST_BYTES, sum(sizes) // 64)
    if device_bytes is not None:
        most = min(most, device_bytes // (PASSING + 1))
    # Blocks have one size. So all are cut to the size of those groups that have most of the state, or to equal parts of
    # it; a little more, for padding and so that no small rest is cut off.
    usual = next((size for size in reversed(sizes) if 2 * sum(s for s in sizes if s >= size) >= sum(sizes)), 0)
    parts = max(1, -(-usual // most))
    return max(1024, min(most, -(-usual // parts) * 9 // 8) if usual else most)


def joined_groups(together: Mapping[Tensor, int], group_bytes: Mapping[int, int], most: int) -> dict[Tensor, int]:
    """Number the groups anew, with neighbours in forward order as one as long as their state stays within ``most``."""
    numbers: dict[int, int] = {}
    number, filled = -1, 0
    for group in sorted(set(together.values())):
        nbytes = group_bytes.get(group, 0)
        if number < 0 or filled + nbytes > most:
            number, filled = number + 1, 0
        numbers[group], filled = number, filled + nbytes
    return {param: numbers[group] for param, group in together.items()}


def make_pools(items: Sequence[Item], block_bytes: int, blocks: Callable[[int], int]) -> list[Pool]:
    """Plan blocks of one size for all items; one that is much larger than the others has a block of its own.

    ``blocks``: how many blocks of a size are allowed.
    """
    sizes = sorted((item.nbytes for item in items), reverse=True)
    usual = [size for size in sizes if size <= max(block_bytes * 3 // 2, 1)] or sizes
    pools = [Pool(usual[0], min(len(usual), blocks(usual[0])))] if usual else []
    if sizes and sizes[0] > usual[0]:
        pools.append(Pool(sizes[0], 1))
    return pools


def choose_kept(buckets: Sequence[Bucket], cache: Cache) -> None:
    """Keep the first buckets in forward order, which are needed first, and leave room for those that pass."""
    pool = cache.pools[0] if cache.pools else None
    inside = [bucket.state for bucket in buckets if bucket.state.nbytes and pool and bucket.state.nbytes <= pool.nbytes]
    all_fit = pool is not None and pool.count >= len(inside)
    left = len(inside) if all_fit or pool is None else max(0, pool.count - PASSING)
    for item in inside:
        item.kept, left = left > 0, left - 1
