"""Times of a step: spans of its actions on their lanes, and their sums by step (:class:`StepTimes`) and by bucket."""

from dataclasses import dataclass

from .lanes import Mark


class Span:
    """Begin and end of an action on its lane.

    Attributes:
        number: of an update, among all that were ever issued; each runs behind those before it.
    """

    def __init__(self) -> None:
        self.begin: Mark | None = None
        self.end: Mark | None = None
        self.number = 0

    def ms(self) -> float:
        """Duration in milliseconds; waits for the action to finish."""
        assert self.begin is not None and self.end is not None
        self.end.synchronize()
        return self.end.elapsed_ms_since(self.begin)


@dataclass(frozen=True)
class StepTimes:
    """Use of the lanes in the last step.

    Attributes:
        loaded_bytes, stored_bytes: moved each way.
        load_ms, store_ms: busy time of the copies, without waits.
        update_ms: time in which the optimizer ran.
        step_ms: from ``step()``, or from the first update if that was earlier, to the end of the last update.
    """

    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_ms: float = 0.0
    store_ms: float = 0.0
    update_ms: float = 0.0
    step_ms: float = 0.0

    @property
    def exposed_ms(self) -> float:
        """Time in which the compute stream stood still for transfers (or for the host to issue the next action)."""
        return max(0.0, self.step_ms - self.update_ms)


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step.

    Attributes:
        move_ms: the longer of its load and its store.
        update_ms: how long the optimizer ran on it.
        updated_ms: when that had ended, since the step's schedule was taken up.
    """

    move_ms: float
    update_ms: float
    updated_ms: float
