"""Lower bounds of an iteration under a policy (docs/benchmarks.md). Pure arithmetic; all times in milliseconds.

With forward F, backward B, clipping, update U; all loads L and all stores S of what is offloaded, both at once T; and
r, the share of what is offloaded that staging holds::

    the plain optimizer                          F + B + clip + U
    in the step                                  F + B + clip + max(U, (1 - r) T)
    overlap="forward"                            B + clip + max(F + U, (1 - r) T)
    overlap="iteration"                          max(F + B + U, T)
    the same where gradients are clipped         max(F + B + clip + U, T)

In the last one, T has the old parameters that go down beside the state. What staging holds is loaded behind the
backward, as far as that lasts, and stored behind the next one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fsdp_offload import OffloadPolicy


@dataclass(frozen=True)
class Times:
    """Parts of an iteration, in milliseconds; the copies are of all of the state.

    Each part alone, as a bench measures them.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float
    clip_ms: float
    load_ms: float
    store_ms: float
    two_way_ms: float


class Bound(NamedTuple):
    """A formula, in the letters of this file's docstring, and its value in milliseconds."""

    formula: str
    ms: float


def bound(
    policy: OffloadPolicy | None,
    times: Times,
    *,
    offloaded: float = 1.0,
    staged: float = 0.0,
    clips: bool = False,
) -> Bound:
    """Return the least time that an iteration takes.

    Args:
        policy: ``None`` for the plain optimizer.
        times: of the parts.
        offloaded: the share of the copies of ``times`` that is made, from 0 to 1; the rest of the state is resident.
        staged: the share of what is offloaded that staging holds, from 0 to 1.
        clips: with ``overlap="iteration"``, whether updates may be taken back, since gradients are clipped after them.
    """
    forward, backward, update, clip = times.forward_ms, times.backward_ms, times.update_ms, times.clip_ms
    load, two_way = offloaded * times.load_ms, offloaded * times.two_way_ms
    if policy is None:
        return Bound("F + B + clip + U", forward + backward + clip + update)
    if policy.updates_in_backward and clips:
        return Bound("max(F + B + clip + U, T)", max(forward + backward + clip + update, two_way))
    if policy.updates_in_backward:
        return Bound("max(F + B + U, T)", max(forward + backward + update, two_way))
    ahead = min(staged, backward / load) if load else staged
    rest = backward + clip
    two_way *= 1 - ahead
    if not policy.runs_on_into_forward:
        return Bound("F + B + clip + max(U, (1 - r) T)", forward + rest + max(update, two_way))
    return Bound("B + clip + max(F + U, (1 - r) T)", rest + max(forward + update, two_way))


def staged_share(ring_bytes: int, moving_bytes: int) -> float:
    """r: the share of ``moving_bytes``, all that passes through, that a ring of ``ring_bytes`` holds."""
    return min(1.0, ring_bytes / moving_bytes) if moving_bytes else 0.0
