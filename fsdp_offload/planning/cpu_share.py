"""Which parameters the CPU updates, and how large their share should be. Pure arithmetic.

The choice has to be the same on every rank that holds a copy of the same shard, as the CPU's kernels round differently
from the device's: it depends on sizes that are the same everywhere and on the order alone, and is saved nowhere.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Taken(NamedTuple):
    """Bytes of state that have been divided before."""

    host_bytes: int
    total_bytes: int


NOTHING_YET = Taken(0, 0)


def choose_host_share(sizes: Sequence[int], fraction: float, taken: Taken) -> list[bool]:
    """Choose which of some parameters the host updates.

    From the end: their gradients are there first in a backward, and the next forward needs them last. What is too large
    for what is left of the share is passed over.

    Args:
        sizes: bytes of state of each parameter, in forward order; 0 where it cannot be the host's.
        fraction: of all bytes, those of ``taken`` included.
        taken: what has been divided before.
    """
    left = round(fraction * (taken.total_bytes + sum(sizes))) - taken.host_bytes
    chosen = [False] * len(sizes)
    for index in reversed(range(len(sizes))):
        if 0 < sizes[index] <= left:
            chosen[index] = True
            left -= sizes[index]
    others = [index for index, size in enumerate(sizes) if size and not chosen[index]]
    if others:
        smallest = min(others, key=lambda index: (sizes[index], -index))
        chosen[smallest] = sizes[smallest] < 2 * left  # nearer to the share with it than without
    return chosen


def host_bucket_bytes(bucket_bytes: int) -> int:
    """Return the bytes of state in a bucket of the host, where those of the device have ``bucket_bytes``.

    For each the CPU's kernel stands still for about 0.4 ms, and only gradients pass through buffers.
    """
    return 4 * bucket_bytes
