"""What an iteration takes at least under a policy (docs/plan.md). Pure arithmetic; all times in milliseconds.

With forward F, backward B, clipping, update U; all loads L and all stores S of what is offloaded, both at once T; and
r, the share of what is offloaded that staging holds::

    the plain optimizer                          F + B + clip + U
    in the step                                  F + B + clip + max(U, (1 - r) T)
    overlap="forward"                            B + clip + max(F + U, (1 - r) T)
    the same, ring given back in the forward     B + clip + max(F + U, r S + (1 - r) T)
    overlap="iteration"                          max(F + B + U, T)
    the same where gradients are clipped         max(F + B + clip + U, T)

In the last one, T has the old parameters that go down beside the state. What staging holds is loaded behind the
backward, as far as that lasts, and stored behind the next one, unless the forward needs its room.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..policy import OffloadPolicy


@dataclass(frozen=True)
class Times:
    """What an iteration consists of, in milliseconds; the copies of all of the state.

    Each part alone, as a bench measures them, or as :func:`parts_alone` finds them in a live one.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float
    clip_ms: float
    load_ms: float
    store_ms: float
    two_way_ms: float

    def within(self, busy_ms: float, *, updates: bool) -> "Times":
        """The same parts where an iteration computed for no longer than ``busy_ms``, so that none takes more alone.

        The one that was measured alone may be the second of all, in which allocators and compilers were still busy.

        Args:
            busy_ms: in which the compute stream did not wait for state.
            updates: whether updates ran in that stream.
        """
        rest_ms = self.forward_ms + self.clip_ms + (self.update_ms if updates else 0.0)
        return replace(self, backward_ms=min(self.backward_ms, max(0.0, busy_ms - rest_ms)))


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
    ring_is_given_back: bool = False,
    clips: bool = False,
) -> Bound:
    """What an iteration takes at least.

    Args:
        policy: ``None`` for the plain optimizer.
        times: of the parts.
        offloaded: the share of the copies of ``times`` that is made, from 0 to 1; the rest of the state is resident.
        staged: the share of what is offloaded that staging holds, from 0 to 1.
        ring_is_given_back: whether the forward takes the memory of staging back.
        clips: with ``overlap="iteration"``, whether updates may be taken back, since gradients are clipped after them.
    """
    forward, backward, update, clip = times.forward_ms, times.backward_ms, times.update_ms, times.clip_ms
    load, store, two_way = (offloaded * ms for ms in (times.load_ms, times.store_ms, times.two_way_ms))
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
    if ring_is_given_back:
        hidden = max(forward + update, ahead * store + two_way)
        return Bound("B + clip + max(F + U, r S + (1 - r) T)", rest + hidden)
    return Bound("B + clip + max(F + U, (1 - r) T)", rest + max(forward + update, two_way))


def staged_share(ring_bytes: int, moving_bytes: int) -> float:
    """r: the share of ``moving_bytes``, all that passes through, that a ring of ``ring_bytes`` holds."""
    return min(1.0, ring_bytes / moving_bytes) if moving_bytes else 0.0


@dataclass(frozen=True)
class PartsAlone:
    """The parts of a live iteration in which nothing ran beside anything else, but loads beside stores.

    Attributes:
        times: ``backward_ms`` stands for B and clip and all else that is not the first forward; ``clip_ms`` is 0.
        loaded_bytes, stored_bytes: what it moved.
    """

    times: Times
    loaded_bytes: int
    stored_bytes: int

    def moving(self, loaded_bytes: int, stored_bytes: int) -> Times:
        """The same parts where other amounts are moved."""
        load_ms = self.times.load_ms * loaded_bytes / max(self.loaded_bytes, 1)
        store_ms = self.times.store_ms * stored_bytes / max(self.stored_bytes, 1)
        return replace(self.times, load_ms=load_ms, store_ms=store_ms, two_way_ms=max(load_ms, store_ms))


def parts_alone(
    *, busy_ms: float, forward_ms: float, update_ms: float, load_ms: float, store_ms: float, beside_compute: bool
) -> Times:
    """The parts of a measured iteration that had nothing beside the model.

    Args:
        busy_ms: of the compute stream: the iteration without the time in which it stood still for state.
        forward_ms: of that, until the backward began: the first forward, and whatever came before it.
        update_ms: in which the optimizer ran.
        load_ms: in which copies to the device ran.
        store_ms: in which copies to the host ran.
        beside_compute: updates ran on a stream of their own, so that they are not in ``busy_ms``.
    """
    in_stream_ms = 0.0 if beside_compute else update_ms
    return Times(
        forward_ms=forward_ms,
        backward_ms=max(0.0, busy_ms - forward_ms - in_stream_ms),
        update_ms=update_ms,
        clip_ms=0.0,
        load_ms=load_ms,
        store_ms=store_ms,
        two_way_ms=max(load_ms, store_ms),  # they ran together
    )
