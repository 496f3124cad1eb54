"""What the parts of an iteration take alone: now and then one iteration has nothing beside the model.

::

    end of step k - 1: the model waits for all stores ──▶ forward, backward, with nothing beside ──▶
    step k: loads, updates and stores, with no model beside ──▶ the model waits for all of them ──▶ the parts

Measured in an iteration in which everything overlaps, each part would contain what the others cost it, and what an
iteration takes at least would be what it takes. The second iteration overlaps with little anyway; in the seventeenth
the allocator has settled, compilers have compiled, and what "auto" learns is in force. Such an iteration has all
gradients when ``step()`` begins: there is none where they have no room, and no later one where they would take more of
the device than all others do.
"""

from ..engine.engine import Engine
from ..planning.bound import PartsAlone, parts_alone
from .clock import Clock
from .peak import Peak

MEASURED_STEPS = (2, 17)


class Alone:
    """Makes and measures the iterations of one model that have nothing beside them."""

    def __init__(self, clock: Clock, peak: Peak) -> None:
        self._clock = clock
        self._peak = peak

    def step_ended(self, engine: Engine) -> None:
        """``step()`` has issued everything; the mark at the end of the iteration is still to come."""
        engine.holds_back = self._measures(engine, self._clock.steps + 1)
        if engine.holds_back or self._measures(engine, self._clock.steps):
            engine.wait_moved()

    def _measures(self, engine: Engine, step: int) -> bool:
        return step in MEASURED_STEPS and self._peak.gradients_fit and not engine.frees_all_gradients

    def iteration_ended(self, engine: Engine) -> None:
        """The mark at the end of the iteration has been made. Waits for the device if this one is measured."""
        if not self._measures(engine, self._clock.steps):
            return
        last, step = engine.iteration.last(), engine.step_times()
        if last is None or not step.update_ms:
            return
        in_step = not engine.policy.runs_on_into_forward
        # Updates in the compute stream itself wait there for their loads.
        stalled_ms = min(last.ms, last.stalled_ms + (step.exposed_ms if in_step else 0.0))
        times = parts_alone(
            busy_ms=last.ms - stalled_ms,
            forward_ms=last.forward_ms,
            update_ms=step.update_ms,
            load_ms=step.load_ms,
            store_ms=step.store_ms,
            beside_compute=not in_step,
        )
        engine.alone = PartsAlone(times, step.loaded_bytes, step.stored_bytes)
