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


class Rates(NamedTuple):
    """Rates of both sides in bytes per second, measured alone and beside each other.

    Attributes:
        cpu: state that the CPU updates.
        cpu_beside: the same while the link is busy.
        one_way: what the link moves in one direction.
        two_way: in both at once, added.
        two_way_beside: the same while the CPU updates.
    """

    cpu: float
    cpu_beside: float
    one_way: float
    two_way: float
    two_way_beside: float


class Traffic(NamedTuple):
    """Bytes that the host's share moves for each byte of its state: gradients down, parameters up."""

    down: float
    up: float


def step_seconds(fraction: float, state_bytes: int, rates: Rates, traffic: Traffic) -> float:
    """About how long a step takes in which the host updates ``fraction`` of the state and nothing hides anything.

    Both sides begin together; when one has ended, the other goes on as if it were alone.
    """
    down = state_bytes * (1 - fraction + fraction * traffic.down)
    up = state_bytes * (1 - fraction + fraction * traffic.up)
    link_alone = max(max(down, up) / rates.one_way, (down + up) / rates.two_way)
    link = link_alone * rates.two_way / rates.two_way_beside
    cpu_alone = fraction * state_bytes / rates.cpu
    cpu = fraction * state_bytes / rates.cpu_beside
    if link < cpu:
        return link + (cpu - link) / cpu * cpu_alone
    return cpu + (link - cpu) / link * link_alone if link else 0.0


_WORTH_A_SPLIT = 0.95
_WORTH_THE_HOST = 0.9
"""So much of the time of the simpler way has to be left: the CPU's rate varies from step to step by a fifth."""


def best_fraction(rates: Rates, traffic: Traffic) -> float:
    """The share with which both sides end together, in whole percents; 0 or 1 where that is not clearly faster.

    All on the host has to be clearly faster than all through the device as well: it is the CPU that varies.
    """
    state_bytes = 1 << 30
    percents = [percent / 100 for percent in range(101)]
    seconds = {fraction: step_seconds(fraction, state_bytes, rates, traffic) for fraction in percents}
    alone = 1.0 if seconds[1.0] < _WORTH_THE_HOST * seconds[0.0] else 0.0
    best = min(percents, key=lambda fraction: seconds[fraction])
    return best if seconds[best] < _WORTH_A_SPLIT * min(seconds[0.0], seconds[1.0]) else alone
