"""A logical step of which something has been issued, and how far it has come.

::

    begin ─┬─▶ AHEAD ◀──▶ BACKWARD ──▶ UPDATING ──┐
           │      └───────────┴─────────────┐     │
           └──────────────────────────────▶ STEP ◀┘ ──▶ ISSUED (──▶ STEP: more is left than the backward had known of)

Before UPDATING nothing but loads has been issued, and the step may be given up without a trace.
"""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ..optimizers import LogicalStep
from ..optimizers.shadow import Shadow
from ..optimizers.shared_values import SharedValues
from ..planning.schedule import BucketStep
from ..state.shard import StateShard
from .cpu_updates import Submit
from .speculation import Speculated


class StepPhase(Enum):
    """How far a step has come."""

    AHEAD = "loading before there is any gradient, perhaps long before a backward"
    BACKWARD = "gradients become final; nothing has been updated"
    UPDATING = "gradients become final; some buckets have been updated"
    STEP = "step() has been called: all gradients are there"
    ISSUED = "everything has been issued"


_NEXT = {
    StepPhase.AHEAD: {StepPhase.BACKWARD, StepPhase.STEP},
    # AHEAD again: another backward begins before step(), and nothing of this one has been used.
    StepPhase.BACKWARD: {StepPhase.AHEAD, StepPhase.UPDATING, StepPhase.STEP},
    StepPhase.UPDATING: {StepPhase.STEP},
    StepPhase.STEP: {StepPhase.ISSUED},
    StepPhase.ISSUED: {StepPhase.STEP},
}


@dataclass(eq=False)
class BegunStep:
    """A logical step of which something has been issued.

    Attributes:
        submit: has the CPU update a bucket in it; ``None`` if the CPU updates nothing.
        steps: the buckets of its schedule.
        phase: how far it has come; changed by :meth:`enter` only.
        moving: shards that are stored in their other place; ``None`` before the first update.
        redirected: the buckets that this was decided for.
        done: the buckets that have been updated.
        watched: shards that had state when loading began.
        without_state: shards that had none, resident ones and the host's included. Neighbours in a bucket may have been
            loaded.
        versions: of the homes of both at that time.
        looks: how often somebody had asked for homes by then, and for parameters that live there.
        used: parameters with a gradient that an update has used; and that gradient, with its version, where updates of
            other buckets are yet to come.
        late: parameters whose gradients came only after the updates of their buckets: these are made once more.
        spent: the gradients used in the backward, which are out of the user's reach until ``step()``, or ``None`` where
            they are let go; and the version of the parameter after its update.
        speculated: what was updated before it was certain that nothing changes the gradients; ``None`` if nothing is.
        updated_by: how many of ``done`` there were after each reduction.
        hidden: so many of ``done`` have been looked at for gradients that nothing is left to use of.
        uncleared: whether gradients of the step before are still hidden; ``None`` before the first reduction.
        seen: whether a forward has used parameters after their update. Gradients that come then may be of these.
    """

    shadow: Shadow
    shared: SharedValues
    logical: LogicalStep
    submit: Submit | None
    group_count: int
    steps: tuple[BucketStep, ...]
    phase: StepPhase = StepPhase.STEP
    moving: list[StateShard] | None = None
    redirected: tuple[BucketStep, ...] = ()
    done: list[int] = field(default_factory=list)
    watched: list[StateShard] = field(default_factory=list)
    without_state: list[StateShard] = field(default_factory=list)
    versions: list[object] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    used: dict[Tensor, tuple[Tensor, tuple[int, int]] | None] = field(default_factory=dict)
    late: list[Tensor] = field(default_factory=list)
    spent: dict[Tensor, tuple[Tensor | None, tuple[int, int]]] = field(default_factory=dict)
    speculated: Speculated | None = None
    updated_by: list[int] = field(default_factory=list)
    hidden: int = 0
    uncleared: bool | None = None
    seen: bool = False

    def enter(self, phase: StepPhase) -> None:
        """Come to ``phase``; staying where it is is no change."""
        assert phase is self.phase or phase in _NEXT[self.phase], f"a step cannot go from {self.phase} to {phase}"
        self.phase = phase

    def note_updated(self, bucket: int) -> None:
        """An update has been issued."""
        if self.phase is not StepPhase.STEP:
            self.enter(StepPhase.UPDATING)
        self.done.append(bucket)

    @property
    def has_updated(self) -> bool:
        """Whether any update has been issued: it cannot be given up any more."""
        return bool(self.done)

    @property
    def awaits_gradients(self) -> bool:
        """Whether more gradients may still become final."""
        return self.phase in (StepPhase.AHEAD, StepPhase.BACKWARD, StepPhase.UPDATING)
