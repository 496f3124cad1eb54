"""What is learnt from the first iterations: in which order to update in a backward, and what to keep on the device.

::

    iteration k:  step() issued ──▶ the forward wants each group ──▶ the backward ends, or step() comes ──▶ conclude

Marks on the compute stream cost nothing; reading them waits for the device, which is why only a few iterations are
measured. What is concluded is applied between two steps.
"""

import math
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from ..device.bucket_times import BucketTimes
from ..device.lanes import Mark
from ..engine.engine import Engine
from ..planning.resident import STALL_TOLERANCE, IterationTimes, groups_to_keep, groups_to_keep_beside_gathers
from ..planning.update_order import update_order
from ..state.shard import StateShard
from ..state.store import StateStore
from ..torch_compat.dtensor import local_shard
from .clock import Clock
from .peak import Peak

_MEASURED_STEPS = (2, 5, 8, 11, 14)
"""The first step creates the state, and moves half of what later ones do. When gradients become final is measured in
the second, which updates nothing in its backward; what has to stay on the device, in the later ones. After a measured
step come two others: what is concluded in the backward of the first waits for the device, so the host issues it late,
and what is then to stay on the device moves before the second one."""

_BESIDE_TRANSFERS = 1.06
"""How much longer an iteration takes beside transfers for which it never waits, than without any: on H200s 1.05."""

_UNDISTURBED_STEPS = _MEASURED_STEPS[2], _MEASURED_STEPS[4]
"""Whose iteration repeats the one before: the others come too soon after something has changed."""

_BESIDE_GATHERS = 1.1
"""How much longer a bucket takes in a backward whose gathers load parameters, than in ``step()``."""


class Rehearsal:
    """Measures some iterations of one model for one optimizer."""

    def __init__(self, engine: Engine, groups: Sequence[Sequence[Tensor]], clock: Clock, peak: Peak) -> None:
        # With DTensors updates may issue collectives: their order must be the same on every rank, whatever it measures.
        elementwise = engine.layouts.capabilities.elementwise
        self._orders = engine.policy.updates_in_backward and elementwise
        self._keeps = engine.share.staying_is_learnt and elementwise
        self._groups = groups
        self._clock = clock
        self._peak = peak
        self._final_ms: dict[int, float] = {}  # by group, since the first of them
        self._all_ms = 0.0  # what moving all of the state takes
        self._window_ms = math.inf  # in which the link may be busy; the shortest, in which the host was not late
        self._keep: set[int] = set()
        self._keep_of: set[StateShard] = set()  # what is in these buckets
        self._final: dict[int, Mark] = {}  # in the backward that runs
        self._last_final: dict[int, Mark] = {}  # in the one whose step is measured
        self._wanted: dict[int, Mark] = {}
        self._step_began: Mark | None = None
        self._measured = True  # nothing is to be concluded

    def _measures(self, step: int) -> bool:
        return (self._orders or self._keeps) and step in _MEASURED_STEPS

    def final(self, engine: Engine, number: int) -> None:
        """The gradients of a group have been reduced, perhaps not for the last time before the step."""
        if self._measures(self._clock.steps + 1):
            self._final[number] = engine.mark()

    def step_begins(self, engine: Engine) -> None:
        """``step()`` is about to issue the rest of it."""
        if self._measures(self._clock.steps + 1):
            self._step_began = engine.mark()

    def step_ended(self, engine: Engine, states: StateStore) -> None:
        """``step()`` has issued everything, and nothing is in progress: what was concluded is applied."""
        if self._keeps and self._clock.steps <= _MEASURED_STEPS[-1]:
            engine.note_peak()
        self._last_final = self._final
        self._final, self._wanted, self._measured = {}, {}, not self._measures(self._clock.steps)
        keep, self._keep = self._keep, set()
        if keep and not self._keep_of <= set(engine.plan.shards.values()):
            # The step has laid the state out anew: other buckets have these numbers now.
            engine.tuning_of_residents = ""
        elif keep:
            self._measured = True  # what it was measured with has changed
            try:
                engine.keep_on_device(keep, states)
            except torch.OutOfMemoryError:
                engine.tuning_of_residents = (
                    f"{_asked(engine)}: more of the state should stay on the device, and there is no room for it."
                )

    def wanted(self, engine: Engine, number: int) -> None:
        """A forward is about to use the parameters of a group."""
        if not self._measured and number not in self._wanted:
            self._wanted[number] = engine.mark()

    def conclude(self, engine: Engine) -> None:
        """The iteration after the measured step is over, up to its first gradients. Waits for the device."""
        if self._measured:
            return
        self._measured = True
        times = engine.bucket_times()
        # Beside loads for gathers, which share the link with them.
        slower = 1.0 if engine.window is None else _BESIDE_GATHERS
        move_ms = {number: slower * one.move_ms for number, one in times.items()}
        self._all_ms = max(self._all_ms, sum(move_ms.values()))
        if self._clock.steps == _MEASURED_STEPS[0]:
            if self._orders:
                at_ms = {group: engine.ms_since_begin(mark) for group, mark in self._last_final.items()}
                self._final_ms = {group: ms - min(at_ms.values()) for group, ms in at_ms.items()}
                params = {param for group in at_ms for param in self._groups[group] if param.requires_grad}
                self._peak.find_room(sum(local_shard(param).nbytes for param in params), engine)
                if self._peak.gradients_fit:
                    groups = range(len(self._groups))
                    forward = [one for group in groups for one in sorted(self._buckets(engine, group))]
                    final_ms = self._bucket_final_ms(engine, times)
                    engine.steps.measured_order = update_order(final_ms, move_ms, forward)
        elif self._keeps and engine.policy.runs_on_into_forward and not self._wanted:
            engine.tuning_of_residents = (
                f"{_asked(engine)}: what should stay is not known, as reload_states() was called before the forward. "
                "Call it after."
            )
        elif self._keeps and (engine.window is None or self._clock.steps in _UNDISTURBED_STEPS):
            # Undisturbed by updates, on the clock of this step: its loads began ahead of the gradients, or with them.
            first_ms = min((engine.ms_since_begin(mark) for mark in self._last_final.values()), default=0.0)
            final_ms = {number: first_ms + ms for number, ms in self._bucket_final_ms(engine, times).items()}
            self._choose(engine, self._iteration(engine, times, final_ms))

    def _bucket_final_ms(self, engine: Engine, updated: Container[int]) -> dict[int, float]:
        return {
            number: ms
            for group, ms in self._final_ms.items()
            for number in self._buckets(engine, group)
            if number in updated
        }

    def _iteration(
        self, engine: Engine, times: Mapping[int, BucketTimes], final_ms: dict[int, float]
    ) -> IterationTimes:
        if engine.policy.runs_on_into_forward:
            groups = [self._buckets(engine, group) for group in self._wanted]
            wanted_ms = [engine.ms_since_begin(mark) for mark in self._wanted.values()]
        else:
            # step() itself waits for all of them.
            groups = [self._buckets(engine, group) for group in range(len(self._groups))]
            assert self._step_began is not None
            update_ms = 0.0 if final_ms else sum(one.update_ms for one in times.values())
            wanted_ms = [engine.ms_since_begin(self._step_began) + update_ms] * len(groups)
        last = engine.iteration.last()
        if last is not None and (engine.policy.updates_in_backward or engine.window is not None):
            self._window_ms = min(self._window_ms, last.ms - last.stalled_ms)
        elif last is not None and engine.policy.runs_on_into_forward:
            self._window_ms = min(self._window_ms, last.forward_ms)
        return IterationTimes(
            groups=groups,
            wanted_ms=wanted_ms,
            updated_ms={number: one.updated_ms for number, one in times.items()},
            move_ms={number: one.move_ms for number, one in times.items()},
            final_ms=final_ms,
            window_ms=self._window_ms,
        )

    def _choose(self, engine: Engine, iteration: IterationTimes) -> None:
        busy_ms = sum(iteration.move_ms.values())
        stall_ms = iteration.stall_ms
        if engine.window is None:
            count, left_ms = groups_to_keep(iteration, STALL_TOLERANCE * self._all_ms)
        else:
            stall_ms = self._late_ms(engine)
            count, left_ms = groups_to_keep_beside_gathers(iteration, stall_ms), 0.0
        limit = engine.share.staying_limit_bytes
        limit_bytes = engine.room_bytes() if limit is None else limit - engine.plan.resident_bytes
        keep: set[int] = set()
        fits = True
        for group in iteration.groups[:count]:
            buckets = {number for number in group if not engine.plan[number].on_host}  # whose state never moves
            if engine.plan.resident_nbytes(keep | buckets) > limit_bytes:
                left_ms, fits = stall_ms, False
                if engine.window is None:
                    break
                continue  # whatever does not move is time of the link
            keep |= buckets
        moving = {number for number in keep if any(not shard.resident for shard in engine.plan[number].covers())}
        self._keep, self._keep_of = moving, {shard for number in moving for shard in engine.plan[number].covers()}
        kept_bytes = engine.plan.resident_bytes + engine.plan.resident_nbytes(moving)
        kept = f"{kept_bytes / 1e9:.2f} GB stay on the device"
        if engine.window is None:
            measured = (
                f"In an iteration of measured transfers of {busy_ms:.0f} ms the model waited {stall_ms:.1f} ms for "
            )
            found = measured + "new parameters" + (f"; {left_ms:.1f} ms are expected from now on" if moving else "")
        else:
            found = f"An iteration measured with less there took {stall_ms:.1f} ms longer than the model alone"
        engine.tuning_of_residents = f"{_asked(engine)}: {kept}. {found}" + (
            "." if fits else "; more would help, and does not fit (device_bytes)."
        )

    def _late_ms(self, engine: Engine) -> float:
        """How much longer the last iteration took than the model alone."""
        last = engine.iteration.last()
        if last is None or engine.alone is None:
            return 0.0
        alone = engine.alone.times
        # Measured alone in an iteration in which compilers and the allocator may still have been busy.
        computes_ms = min(alone.forward_ms + alone.backward_ms, self._window_ms)
        if not engine.policy.updates_in_backward:
            computes_ms += alone.update_ms
        late_ms = last.ms - _BESIDE_TRANSFERS * computes_ms
        return late_ms if late_ms > STALL_TOLERANCE * last.ms else 0.0

    def _buckets(self, engine: Engine, group: int) -> set[int]:
        return engine.steps.buckets_of(self._groups[group])


def _asked(engine: Engine) -> str:
    return f"device_bytes={engine.policy.device_bytes!r}"
