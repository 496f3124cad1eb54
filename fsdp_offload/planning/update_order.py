"""In which order buckets are updated in a backward. Pure arithmetic on times that were measured in earlier steps.

The first gradients to be final belong to the last layers, which the next forward needs last. Where all transfers fit
into the backward, buckets are taken as their gradients become final. Where they do not, those that have to wait should
be the ones with the latest deadline: of the buckets whose gradients are there, the one that became final *last* is
taken, and when the backward is over the rest follows in the order of the forward.

Those that wait keep their gradients, which lie in one tensor for all that became final together. Where there is little
room for these, a few such tensors may wait, whole, and the backward waits for the link.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby


def update_order(
    final_ms: Mapping[int, float],
    move_ms: Mapping[int, float],
    forward: Sequence[int],
    most_waiting: float = math.inf,
) -> list[int]:
    """The order in which to load, update and store the buckets of a step whose updates begin in the backward.

    Args:
        final_ms: for each bucket when its gradients are final, on any clock.
        move_ms: for each bucket how long the link is busy with it, when both directions are in use.
        forward: the buckets in the order in which a forward needs them.
        most_waiting: how many times at which gradients became final may be passed over for later ones. Where that is
            limited, what became final together is updated together.

    Returns:
        The keys of ``final_ms``; those that become final together in the order of the forward, since the ranges of one
        parameter must be updated in order. A bucket is taken only when its gradients are final before its load would
        begin, so that one that is a little late does not hold up those behind it.
    """
    deadline = {bucket: position for position, bucket in enumerate(forward)}
    in_order = sorted(final_ms, key=lambda bucket: (final_ms[bucket], deadline.get(bucket, len(deadline))))
    waiting = deque(_together(in_order, final_ms, whole=most_waiting < math.inf))
    ready: list[deque[int]] = []  # the newest last
    taken: deque[int] = deque()
    order: list[int] = []
    now_ms = min(final_ms.values(), default=0.0)
    while True:
        if not ready and not taken and waiting:
            now_ms = max(now_ms, final_ms[waiting[0][0]])
        while waiting and final_ms[waiting[0][0]] <= now_ms and len(ready) <= most_waiting:
            insort(ready, waiting.popleft(), key=lambda one: (final_ms[one[0]], -deadline.get(one[0], len(deadline))))
        if not waiting:
            rest = [*taken, *(bucket for one in ready for bucket in one)]
            return order + sorted(rest, key=lambda bucket: deadline.get(bucket, len(deadline)))
        taken = taken or ready.pop()
        order.append(taken.popleft())
        now_ms += move_ms[order[-1]]


def _together(in_order: Sequence[int], final_ms: Mapping[int, float], *, whole: bool) -> Iterator[deque[int]]:
    """The buckets that became final at a time; each for itself unless these are to stay ``whole``."""
    if not whole:
        yield from (deque([bucket]) for bucket in in_order)
        return
    for _, buckets in groupby(in_order, key=lambda bucket: final_ms[bucket]):
        yield deque(buckets)
