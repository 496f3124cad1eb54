"""Waits of a forward for state, and what ``device_bytes="auto"`` keeps so that there are none. Pure arithmetic.

The iteration is put together from the turns of the groups, bucket by bucket, and judged by the functions that judge
measured ones in training::

    turns of the backward ──▶ when gradients are final ──▶ when each bucket is new ──┐
    turns of the forward  ──▶ when each group is wanted ─────────────────────────────┴─▶ the waits, and what is kept
"""

from itertools import accumulate
from typing import NamedTuple

from ..planning.resident import STALL_TOLERANCE, IterationTimes, expected_iteration, groups_to_keep
from .choices import Choice
from .machine import Machine
from .timing import Parts, Turn, estimate


class Waits(NamedTuple):
    """Share of the state that is kept, and how long the forward waits then."""

    kept: float
    stall_ms: float


def waits_of(choice: Choice, parts: Parts, machine: Machine, *, room_bytes: int) -> Waits:
    """Compute what a choice keeps, and the waits of a forward beside which transfers run.

    Args:
        choice: whose state may run on into the forward.
        parts: of the iteration.
        machine: for its contention.
        room_bytes: of the device, that nothing else needs.
    """
    state_bytes = sum(parts.state_bytes)
    if not state_bytes:
        return Waits(0.0, 0.0)
    share = choice.share(state_bytes)
    if choice.overlap == "step":
        return Waits(min(1.0, share.staying_bytes / state_bytes), 0.0)
    times = _iteration_times(choice, parts, machine, kept=0)
    if not share.staying_is_learnt:
        return Waits(0.0, times.stall_ms)
    measured = _iteration_times(choice, parts.as_launched(choice), machine, kept=0)
    count, _ = groups_to_keep(measured, STALL_TOLERANCE * sum(times.move_ms.values()))
    kept_bytes = [0, *accumulate(parts.state_bytes[group] for group in _forward_order(parts))]
    limit_bytes = room_bytes if share.staying_limit_bytes is None else share.staying_limit_bytes
    count = min(count, sum(nbytes <= limit_bytes for nbytes in kept_bytes) - 1)
    stall_ms = _iteration_times(choice, parts, machine, kept=count).stall_ms
    return Waits(kept_bytes[count] / state_bytes, stall_ms)


def kept_with_parameters(choice: Choice, parts: Parts, *, room_bytes: int) -> float:
    """Compute the share of parameters and state that stays on the device where both live on the host.

    With ``"auto"``, groups of the forward, from the first, until what the link still moves takes no longer than what
    hides it.
    """
    whole_bytes = [sum(nbytes) for nbytes in zip(parts.state_bytes, parts.parameter_bytes, strict=True)]
    all_bytes = sum(whole_bytes)
    share = choice.share(all_bytes, parts.parameter_bytes)
    if not share.staying_is_learnt or not all_bytes:
        return min(1.0, share.staying_bytes / all_bytes) if all_bytes else 0.0
    launched = parts.as_launched(choice)
    kept_bytes = 0
    for group in _forward_order(parts):
        is_late = estimate(choice, launched, kept=kept_bytes / all_bytes).limit == "host link"
        if not is_late or kept_bytes + whole_bytes[group] > room_bytes:
            break
        kept_bytes += whole_bytes[group]
    return kept_bytes / all_bytes


def _iteration_times(choice: Choice, parts: Parts, machine: Machine, kept: int) -> IterationTimes:
    """An iteration in which the first groups are kept."""
    state_bytes = sum(parts.state_bytes)
    ms_per_byte = (1 + machine.contention) * parts.times.two_way_ms / state_bytes
    bucket_bytes = choice.policy(state_bytes).bucket_bytes
    groups: list[set[int]] = []
    move_ms: dict[int, float] = {}
    group_of: dict[int, int] = {}
    for position, group in enumerate(_forward_order(parts)):
        count = max(1, -(-parts.state_bytes[group] // bucket_bytes))
        buckets = set(range(len(move_ms), len(move_ms) + count))
        groups.append(buckets)
        move_ms.update(
            dict.fromkeys(buckets, 0.0 if position < kept else parts.state_bytes[group] / count * ms_per_byte)
        )
        group_of.update(dict.fromkeys(buckets, group))
    wanted_ms, times = list(_began_ms(parts.forward).values()), parts.times
    backward_ms = parts.last_backward_ms
    ahead_bytes = choice.ahead_bytes(max(parts.state_bytes), state_bytes)
    ahead_ms = min(ahead_bytes * ms_per_byte, backward_ms)  # which hides these loads
    if choice.overlap == "forward":
        return expected_iteration(groups, wanted_ms, move_ms, {}, ahead_ms=ahead_ms, window_ms=times.forward_ms)
    turn_ms = {turn.group: turn.ms for turn in parts.backward}
    group_final_ms = {group: ms + turn_ms[group] for group, ms in _began_ms(parts.backward).items()}
    group_final_ms[_forward_order(parts)[0]] = backward_ms  # of the root, whose embedding comes at the very end
    return expected_iteration(
        groups,
        [backward_ms + ms for ms in wanted_ms],
        move_ms,
        {bucket: group_final_ms.get(group, backward_ms) for bucket, group in group_of.items()},
        ahead_ms=ahead_ms,
        window_ms=times.forward_ms + times.backward_ms + times.update_ms,
    )


def _forward_order(parts: Parts) -> list[int]:
    return list(dict.fromkeys(turn.group for turn in parts.forward))


def _began_ms(turns: tuple[Turn, ...]) -> dict[int, float]:
    """Compute when the first turn of each group begins, in the order of these."""
    began = [0.0, *accumulate(turn.ms for turn in turns)]
    found: dict[int, float] = {}
    for turn, ms in zip(turns, began, strict=False):
        found.setdefault(turn.group, ms)
    return found
