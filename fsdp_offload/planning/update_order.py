"""In which order buckets are updated in a backward. Pure arithmetic on times that were measured in earlier steps.

The first gradients to be final belong to the last layers, which the next forward needs last. Where all transfers fit
into the backward, buckets are taken as their gradients become final. Where they do not, those that have to wait should
be the ones with the latest deadline: of the buckets whose gradients are there, the one that became final *last* is
taken, and when the backward is over the rest follows in the order of the forward.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence


def update_order(final_ms: Mapping[int, float], move_ms: Mapping[int, float], forward: Sequence[int]) -> list[int]:
    """The order in which to load, update and store the buckets of a step whose updates begin in the backward.

    Args:
        final_ms: for each bucket when its gradients are final, on any clock.
        move_ms: for each bucket how long the link is busy with it, when both directions are in use.
        forward: the buckets in the order in which a forward needs them.

    Returns:
        The keys of ``final_ms``; those that become final together in the order of the forward, since the ranges of one
        parameter must be updated in order. A bucket is taken only when its gradients are final before its load would
        begin, so that one that is a little late does not hold up those behind it.
    """
    deadline = {bucket: position for position, bucket in enumerate(forward)}

    def by_deadline(bucket: int) -> int:
        return deadline.get(bucket, len(deadline))

    waiting = deque(enumerate(sorted(final_ms, key=lambda bucket: (final_ms[bucket], by_deadline(bucket)))))
    ready: list[tuple[float, int, int, int]] = []  # the newest first; of those, what a forward needs first
    order: list[int] = []
    now_ms = min(final_ms.values(), default=0.0)
    while waiting:
        if not ready:
            now_ms = max(now_ms, final_ms[waiting[0][1]])
        while waiting and final_ms[waiting[0][1]] <= now_ms:
            number, bucket = waiting.popleft()
            heapq.heappush(ready, (-final_ms[bucket], by_deadline(bucket), number, bucket))
        if waiting:
            newest = heapq.heappop(ready)[-1]
            order.append(newest)
            now_ms += move_ms[newest]
    return order + [bucket for *_, bucket in sorted(ready, key=lambda one: one[1:3])]
