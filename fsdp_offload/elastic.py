"""Staging memory that comes and goes with the room that training leaves: ``staging_bytes="auto"``.

::

    forward:   activations grow ──▶ the staging memory is given back before they need its room
    backward:  activations are freed ──▶ as soon as there is room for it below the peak, it is taken and loads begin

When to do either is learnt once, from what is allocated at each group of the model in one iteration. The allocator
counts in program order, as the host issues; what the device has done by then plays no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .engine import Engine


@dataclass(frozen=True)
class StagingPlan:
    """When to have how much staging memory.

    Attributes:
        nbytes: its size.
        peak_bytes: below which training stays with it.
        first_reduction: which reduction of gradients in a backward finds room for it.
        last_use: which group's turn in a forward is the last that leaves room for it.
    """

    nbytes: int
    peak_bytes: int
    first_reduction: int
    last_use: int


def plan_staging(
    uses_bytes: list[int], reductions_bytes: list[int], peak_bytes: int, wanted_bytes: int
) -> StagingPlan | None:
    """Choose size and time for the staging memory.

    Args:
        uses_bytes: device memory allocated when each group's turn in the forward comes, without staging.
        reductions_bytes: the same when each group's gradients have been reduced.
        peak_bytes: the most that is allocated in the iteration, without staging.
        wanted_bytes: no more is of any use.

    Returns:
        ``None`` if there is no room at all. Of sizes that differ by less than a quarter the one that can be had first.
    """
    room = [peak_bytes - allocated for allocated in reductions_bytes]
    most_bytes = min(max(room, default=0), wanted_bytes)
    if most_bytes <= 0:
        return None
    first = next(number for number, free_bytes in enumerate(room) if 4 * free_bytes >= 3 * most_bytes)
    nbytes = min(room[first], wanted_bytes)
    # At its turn a group allocates what is there at the next one's.
    later = [*uses_bytes[1:], peak_bytes]
    too_late = next(number for number, allocated in enumerate(later) if allocated + nbytes > peak_bytes)
    return StagingPlan(nbytes, peak_bytes, first, too_late)


class Elastic:
    """Takes and gives back the staging memory of one optimizer."""

    def __init__(self, engine: Engine, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = groups
        self._wanted = engine.policy.staging_bytes == "auto"
        self._peak_at_attach_bytes = engine.allocated_bytes().peak if self._wanted else 0
        self._steps = 0
        self._plan: StagingPlan | None = None
        self._uses_bytes: list[int] = []
        self._reductions_bytes: list[int] = []
        self._uses = 0

    @property
    def _learns(self) -> bool:
        return self._wanted and self._steps == _LEARNS_AFTER

    def before_use(self, engine: Engine) -> None:
        """The turn of the next group in a forward has come."""
        if self._learns:
            self._uses_bytes.append(engine.allocated_bytes().now)
        elif self._plan is not None:
            if self._uses == self._plan.last_use:
                engine.give_back_staging()
            self._uses += 1

    def may_load(self, engine: Engine, reductions: int) -> bool:
        """Whether loads may begin or go on in this backward.

        Args:
            engine: whose.
            reductions: how many groups have been reduced since the last step, before this one.
        """
        if self._learns:
            self._reductions_bytes.append(engine.allocated_bytes().now)
        if self._plan is None or engine.has_staging:
            return True
        if reductions < self._plan.first_reduction:
            return False
        # A batch of a shape not seen before leaves less room: then the step loads.
        return engine.allocated_bytes().now + self._plan.nbytes <= self._plan.peak_bytes

    def step_ended(self, engine: Engine) -> None:
        """``step()`` has issued everything."""
        self._uses = 0
        if self._learns and self._reductions_bytes:
            self._conclude(engine)
        if self._wanted and not engine.phases.away:
            self._steps += 1

    def _conclude(self, engine: Engine) -> None:
        seen_bytes = max([*self._uses_bytes, *self._reductions_bytes])
        since_attach_bytes = engine.allocated_bytes().peak
        # What was there before attaching held state that is offloaded now.
        peak_bytes = since_attach_bytes if since_attach_bytes > self._peak_at_attach_bytes else seen_bytes
        moving_bytes = engine.plan.moving_bytes()
        wanted_bytes = moving_bytes
        if engine.policy.updates_beside_compute:
            # Loads and stores have the forward, or the backward, to hide behind: no more is of use than what lets the
            # state of one group, the one that is final last and needed first, be loaded ahead beside what passes. More
            # would only have to be stored before the forward needs its room.
            buckets = (engine.steps.buckets_of(group) for group in self._groups)
            largest_bytes = max(map(engine.plan.moving_bytes, buckets), default=0)
            wanted_bytes = min(moving_bytes, largest_bytes + engine.policy.ring_bytes)
        self._plan = plan_staging(self._uses_bytes, self._reductions_bytes, peak_bytes, wanted_bytes)
        if self._plan is not None and self._plan.nbytes > engine.plan.ring_bytes:
            engine.resize_staging(self._plan.nbytes)
        else:
            self._plan = None
        nbytes = engine.plan.ring_bytes
        engine.tuning_of_staging = (
            f"staging_bytes='auto': {nbytes / 1e9:.2f} GB for {moving_bytes / 1e9:.2f} GB of state, "
            + (
                "taken in the backward and given back in the forward."
                if self._plan
                else "always there: there is no room for more."
            )
        )


_LEARNS_AFTER = 2
"""Steps: the first creates the state, and the second is the first that moves all of it."""
