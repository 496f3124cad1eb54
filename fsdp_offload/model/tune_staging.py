"""Staging memory that comes and goes with the room that training leaves: ``DeviceShare.passing_is_learnt``.

Some blocks, a small part of the state, are always there: transfers go on through them while the others cannot be. All
that is said here of bytes of staging is said of the others. ::

    forward:   activations grow ──▶ block by block, the staging memory is given back before they need its room
    backward:  activations are freed ──▶ block by block, it is taken as there is room below the peak, and loads go on

How much may be there at each group of the model is learnt once, from what is allocated there in one iteration: in the
forward at each group's turn, in the backward at its *points*, which are its beginning and each reduction::

    allocated at each turn and point ──▶ StagingPlan: bytes of staging for each ──▶ the engine, in whole blocks

The allocator counts in program order, as the host issues; what the device has done by then plays no part.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..planning.staging import StagingPlan, plan_staging, why_not_behind_backward
from .peak import Peak


class Elastic:
    """Takes and gives back the staging memory of one optimizer."""

    def __init__(self, engine: Engine, groups: Sequence[Sequence[Tensor]], peak: Peak) -> None:
        self._groups = groups
        self._peak = peak
        # Ranks have different room. Where loads wait for that, the updates behind them come at another point of the
        # backward on each rank, and the updates of an optimizer that is run on whole DTensors are collectives.
        in_lockstep = engine.policy.updates_in_backward and not engine.layouts.capabilities.elementwise
        self._wanted = engine.share.passing_is_learnt and not in_lockstep
        self._steps = 0
        self._plan: StagingPlan | None = None
        self._window_plan: StagingPlan | None = None
        self._uses_bytes: list[int] = []
        self._points_bytes: list[int] = []
        self._first_group: int | None = None  # of a forward
        self._last_backward = 0  # its first point, of those noted
        self._in_forward = False  # after some of them
        self._uses = self._points = 0  # since the last step
        self._begins = False  # the last point was the beginning of a backward, without gradients so far

    @property
    def _learns(self) -> bool:
        return self._wanted and self._steps == _LEARNS_AFTER

    def before_use(self, engine: Engine, number: int) -> None:
        """The turn of a group in a forward has come."""
        self._forget_begin()
        if self._learns:
            self._learn_use(engine, number)
        elif self._plan is not None or self._window_plan is not None:
            if self._plan is not None:
                engine.give_back_staging(self._plan.at_use(self._uses))
            if self._window_plan is not None and engine.window is not None and torch.is_grad_enabled():
                engine.window.shrink(self._window_plan.at_use(self._uses))
            self._uses += 1

    def _learn_use(self, engine: Engine, number: int) -> None:
        if self._points_bytes:
            self._in_forward = True  # of a further micro-batch, or an evaluation
            return
        if number == self._first_group:
            self._uses_bytes = []  # that was an evaluation
        elif not self._uses_bytes:
            self._first_group = number
        self._uses_bytes.append(engine.allocated_bytes().now)

    def backward_begins(self, engine: Engine) -> float:
        """A group is gathered for a backward, the first one in it: how many bytes of staging there may be now.

        It need not be called in a model that stays gathered. A backward that ends without gradients does not count: in
        other iterations it may not come.
        """
        self._forget_begin()
        room_bytes = self._at_point(engine)
        self._begins = True
        return room_bytes

    def reduced(self, engine: Engine) -> float:
        """A group's gradients have been reduced: how many bytes of staging there may be now."""
        self._begins = False
        return self._at_point(engine)

    def _forget_begin(self) -> None:
        """Of a backward behind whose beginning no gradients came."""
        if self._begins:
            self._begins = False
            self._points -= self._plan is not None or self._window_plan is not None
            if self._learns:
                self._points_bytes.pop()

    def _at_point(self, engine: Engine) -> float:
        if self._learns:
            if self._in_forward:
                self._in_forward, self._last_backward = False, len(self._points_bytes)
            self._points_bytes.append(engine.allocated_bytes().now)
        if self._plan is None and self._window_plan is None:
            return math.inf
        number, self._points = self._points, self._points + 1
        if self._window_plan is not None and engine.window is not None and engine.window.may_grow:
            engine.window.grow(self._window_plan.at_point(number, engine.allocated_bytes().now))
        if self._plan is None:
            return math.inf
        allocated_bytes = 0 if engine.has_all_staging else engine.allocated_bytes().now
        return self._plan.at_point(number, allocated_bytes)

    def step_ended(self, engine: Engine) -> None:
        """``step()`` has issued everything."""
        self._uses = self._points = 0
        self._begins = False
        if self._learns and self._points_bytes:
            self._conclude(engine)
        if self._wanted and not engine.phases.away:
            self._steps += 1

    def _conclude(self, engine: Engine) -> None:
        peak_bytes = self._peak.highest_bytes(engine, max([*self._uses_bytes, *self._points_bytes]))
        moving_bytes = engine.plan.moving_bytes()
        lasting_bytes = engine.plan.ring.lasting_bytes
        # Loads and stores have the forward, or the backward, to hide behind: no more is of use than what lets the state
        # of one group, the one that is final last and needed first, be loaded ahead beside what passes. More would only
        # have to be stored before the forward needs its room.
        buckets = (engine.steps.buckets_of(group) for group in self._groups)
        largest_bytes = max(map(engine.plan.moving_bytes, buckets), default=0)
        wanted_bytes = min(moving_bytes, largest_bytes + engine.share.ring_bytes(engine.policy.bucket_bytes))
        if engine.window is not None:
            wanted_bytes += max(largest_bytes, _backlog_bytes(engine))
        why_not = _why_none_passes(engine) if engine.window is None else ""
        if not self._peak.gradients_fit:
            engine.let_staging_last()
            why_not = "there is no room for all gradients, and an update that waited for staging would keep its own"
        if why_not:
            wanted_bytes = 0
        plan = plan_staging(
            self._uses_bytes,
            self._points_bytes,
            peak_bytes,
            max(0, wanted_bytes - lasting_bytes),
            spread=engine.policy.updates_in_backward,
            last_backward=self._last_backward,
        )
        if engine.window is not None:
            self._window_plan = self._plan_window(plan, peak_bytes, engine.window.wanted_bytes)
        if plan is not None and lasting_bytes + plan.nbytes > engine.plan.ring_bytes:
            engine.resize_staging(plan.nbytes)
            self._plan = plan
        ring = engine.plan.ring
        engine.tuning_of_staging = (
            f"device_bytes='auto': {engine.plan.ring_bytes / 1e9:.2f} GB for {moving_bytes / 1e9:.2f} GB that pass, "
            + (
                f"of which {ring.lasting_bytes / 1e9:.2f} GB are always there, and the rest is taken in the backward "
                f"and given back in the forward, in {len(ring.nbytes) - ring.lasting} blocks."
                if self._plan
                else f"always there: {why_not or 'there is no room for more'}."
            )
        )

    def _plan_window(self, staging: StagingPlan | None, peak_bytes: int, wanted_bytes: int) -> StagingPlan | None:
        """In the room that staging leaves."""
        uses, points = self._uses_bytes, self._points_bytes
        if staging is not None:
            uses = list(map(operator.add, uses, staging.at_uses_bytes))
            points = list(map(operator.add, points, staging.at_points_bytes))
        plan = plan_staging(uses, points, peak_bytes, wanted_bytes, spread=False, last_backward=self._last_backward)
        return None if plan is None else replace(plan, points_bytes=tuple(self._points_bytes))


def _backlog_bytes(engine: Engine) -> int:
    """What is still to be stored when a backward ends that updates. Waits for the device.

    Beside parameters the link is busy in all of an iteration, so that it is the forward's share of the stores.
    """
    last = engine.iteration.last() if engine.policy.updates_in_backward else None
    if last is None:
        return 0
    computed_ms = last.ms - last.stalled_ms
    return int(engine.plan.moving_bytes() * min(1.0, last.forward_ms / computed_ms)) if computed_ms > 0 else 0


def _why_none_passes(engine: Engine) -> str:
    """Why staging that comes and goes would do harm; empty if not. Waits for the device."""
    last = engine.iteration.last() if engine.policy.updates_in_backward else None
    if last is None:
        return ""
    times = engine.step_times()
    backward_ms = last.ms - last.forward_ms - last.stalled_ms
    return why_not_behind_backward(max(times.load_ms, times.store_ms), backward_ms)


_LEARNS_AFTER = 2
"""Steps: the first creates the state, and the second is the first that moves all of it."""
