"""How much of the state has to stay on the device for the transfers of the rest to hide. Pure arithmetic.

An iteration is measured with everything passing through: when each bucket was updated, when the next forward wanted the
parameters of each group, and so how long it stood still. Then the same iteration is computed with the state of the
first groups kept on the device, which a forward needs first: one group more each time, until nothing stands still and
the link has time to spare.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from .update_order import update_order


@dataclass(frozen=True)
class IterationTimes:
    """One measured iteration; all times in milliseconds since its step began to be issued.

    Attributes:
        groups: the buckets of each group of the model, in the order in which the forward wants them.
        wanted_ms: when it wanted each, before it waited for it.
        updated_ms: when each bucket had been updated.
        move_ms: how long the link was busy with each bucket.
        final_ms: when each bucket's gradients were final; empty where all updates come after the backward.
        window_ms: how long the model computes while the link may be busy: in all of the iteration where ``final_ms``
            are given, in the forward otherwise.
    """

    groups: Sequence[AbstractSet[int]]
    wanted_ms: Sequence[float]
    updated_ms: Mapping[int, float]
    move_ms: Mapping[int, float]
    final_ms: Mapping[int, float]
    window_ms: float = math.inf

    @property
    def stall_ms(self) -> float:
        """How long the forward stood still for parameters that were not new yet."""
        return _stall_ms(self.groups, self.undisturbed_wanted_ms(), self.updated_ms)

    def undisturbed_wanted_ms(self) -> list[float]:
        """When the forward would have wanted each group if it had never stood still."""
        lost_ms, wanted = 0.0, []
        for buckets, at_ms in zip(self.groups, self.wanted_ms, strict=True):
            wanted.append(at_ms - lost_ms)
            lost_ms += max(0.0, _latest(buckets, self.updated_ms) - at_ms)
        return wanted


def expected_iteration(
    groups: Sequence[AbstractSet[int]],
    undisturbed_wanted_ms: Sequence[float],
    move_ms: Mapping[int, float],
    final_ms: Mapping[int, float],
    *,
    ahead_ms: float = 0.0,
    window_ms: float = math.inf,
) -> IterationTimes:
    """What would be measured of an iteration of which only the parts are known.

    Args:
        groups: as in the result; as ``move_ms``, ``final_ms`` and ``window_ms``.
        undisturbed_wanted_ms: when a forward that never stands still would want each group.
        move_ms: of each bucket.
        final_ms: as in the result.
        ahead_ms: by so much loads are ahead: of gradients, or of a step.
        window_ms: as in the result.
    """
    alone = IterationTimes(groups, undisturbed_wanted_ms, {}, move_ms, final_ms, window_ms)
    moved = _updated_ms(alone, range(0), 1.0)
    updated = {bucket: max(final_ms.get(bucket, 0.0), ms - ahead_ms) for bucket, ms in moved.items()}
    lost_ms, wanted = 0.0, []
    for buckets, at_ms in zip(groups, undisturbed_wanted_ms, strict=True):
        wanted.append(at_ms + lost_ms)
        lost_ms += max(0.0, _latest(buckets, updated) - (at_ms + lost_ms))
    return replace(alone, wanted_ms=wanted, updated_ms=updated)


STALL_TOLERANCE = 0.01
"""Share of the time that all transfers take: less of a wait is not worth any memory."""

_BACKWARD_LINK_SHARE, _FORWARD_LINK_SHARE = 0.5, 0.75
"""Of the window. A busier link shows, although nothing waits for it in this arithmetic: what comes a little late makes
what follows late as well. Measured on H200s, 2 % of an iteration are left with a share of 0.6 of all of it, or of 0.85
of the forward."""


def groups_to_keep(times: IterationTimes, tolerance_ms: float) -> tuple[int, float]:
    """The fewest groups, from the first, whose state has to stay on the device.

    Args:
        times: measured with what is on the device now.
        tolerance_ms: how long the forward may stand still.

    Returns:
        How many groups, and how long the forward is expected to stand still then.
    """
    wanted_ms = times.undisturbed_wanted_ms()
    computed = _updated_ms(times, range(0), 1.0)
    # What moving takes beyond the link's own time shows in the whole; it shrinks with what is moved. Where updates wait
    # for gradients, the whole says nothing about the link.
    slower = 1.0
    if not times.final_ms and max(computed.values(), default=0.0) > 0:
        slower = max(times.updated_ms.values(), default=0.0) / max(computed.values())
    link_ms = times.window_ms * (_BACKWARD_LINK_SHARE if times.final_ms else _FORWARD_LINK_SHARE)
    # Where the ring is small or the host late, more was waited for than the arithmetic knows of. That goes, at best,
    # one millisecond for each that the link has less to do. The next measurement tells.
    explained_ms = _stall_ms(times.groups, wanted_ms, _updated_ms(times, range(0), slower))
    unexplained_ms, all_moving_ms = max(0.0, times.stall_ms - explained_ms), _moving_ms(times, 0)
    stall_ms = 0.0
    for kept in range(len(times.groups) + 1):
        moving_ms = _moving_ms(times, kept)
        stall_ms = _stall_ms(times.groups, wanted_ms, _updated_ms(times, range(kept), slower))
        stall_ms += max(0.0, unexplained_ms - (all_moving_ms - moving_ms))
        if stall_ms <= tolerance_ms and moving_ms <= link_ms:
            return kept, stall_ms
    return len(times.groups), stall_ms


def groups_to_keep_beside_gathers(times: IterationTimes, late_ms: float) -> int:
    """The fewest groups, from the first, that have to stay where the link also loads parameters for gathers.

    When these loads wait for what is not computed here: each millisecond that the link has less to do is expected to
    give one back, and the next measurement tells.

    Args:
        times: measured with what is on the device now.
        late_ms: how much longer the iteration took than the model alone.
    """
    all_ms = _moving_ms(times, 0)
    enough = (kept for kept in range(len(times.groups)) if all_ms - _moving_ms(times, kept) >= late_ms)
    return next(enough, len(times.groups))


def _moving_ms(times: IterationTimes, kept: int) -> float:
    """How long the link is busy with all groups but the first."""
    return sum(times.move_ms.get(bucket, 0.0) for bucket in set[int]().union(*times.groups[kept:]))


def _updated_ms(times: IterationTimes, kept: range, slower: float) -> dict[int, float]:
    """When each bucket that moves would be updated."""
    moved = [bucket for number, buckets in enumerate(times.groups) if number not in kept for bucket in sorted(buckets)]
    move_ms = {bucket: times.move_ms.get(bucket, 0.0) * slower for bucket in moved}
    order = moved
    if times.final_ms:
        order = update_order({bucket: times.final_ms.get(bucket, 0.0) for bucket in moved}, move_ms, moved)
    now_ms, updated = 0.0, {}
    for bucket in order:
        now_ms = updated[bucket] = max(now_ms, times.final_ms.get(bucket, 0.0)) + move_ms[bucket]
    return updated


def _stall_ms(groups: Sequence[AbstractSet[int]], wanted_ms: Sequence[float], updated_ms: Mapping[int, float]) -> float:
    """Of a forward that wants its groups at these times as long as it does not stand still."""
    lost_ms = 0.0
    for buckets, at_ms in zip(groups, wanted_ms, strict=True):
        lost_ms += max(0.0, _latest(buckets, updated_ms) - (at_ms + lost_ms))
    return lost_ms


def _latest(buckets: AbstractSet[int], updated_ms: Mapping[int, float]) -> float:
    return max((updated_ms.get(bucket, 0.0) for bucket in buckets), default=0.0)
