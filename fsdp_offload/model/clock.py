"""Where a training loop is, by what the hooks on its model see; everything that tunes reads the time here.

::

    step 1 ends ──▶ forward ──▶ backward (reductions) ──▶ [forward ──▶ backward: micro-batches] ──▶ step 2 ends

How many reductions of a group come before a step is not known beforehand: micro-batches, and modules that are used
several times. The clock expects what the steps before have had; before the first one, nothing, unless it is told to.
"""

from collections import deque
from collections.abc import Sequence

_REMEMBERED_STEPS = 4


class Clock:
    """Counts steps, and the reductions of each group since the last one.

    Attributes:
        steps: how many have ended since attaching.
        in_backward: since the last forward, a backward has begun.
        order: groups by their last reduction since the last step.
    """

    def __init__(self, groups: int) -> None:
        self.steps = 0
        self.in_backward = False
        self.order: list[int] = []
        self._seen = [0] * groups
        # A step with fewer, in which a module went unused for once, must not let the next one update too early.
        self._seen_before: deque[Sequence[int]] = deque(maxlen=_REMEMBERED_STEPS)
        self._expected: list[int] = []  # the most in any of these

    def forward(self) -> None:
        """A forward uses a group."""
        self.in_backward = False

    def reduced(self, number: int) -> None:
        """The gradients of a group have been reduced."""
        self.in_backward = True
        self._seen[number] += 1
        self.order = [*(other for other in self.order if other != number), number]

    def forget_reductions(self) -> None:
        """Gradients have been cleared without a step: what has been reduced counts for nothing."""
        self._seen = [0] * len(self._seen)
        self.order = []

    def step_ended(self) -> None:
        """A step has used what has been reduced."""
        self.steps += 1
        self._seen_before.append(self._seen)
        self._expected = [max(seen) for seen in zip(*self._seen_before, strict=True)]
        self.forget_reductions()

    def expect_one(self) -> None:
        """Expect one reduction of each group before the first step."""
        self._expected = [1] * len(self._seen)

    @property
    def has_reduced(self) -> bool:
        """Whether any group has been, since the last step."""
        return any(self._seen)

    @property
    def expects_reductions(self) -> bool:
        """Whether recent steps had any. Not before the first one has ended, but for :meth:`expect_one`."""
        return any(self._expected)

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several backwards, or of several uses in one, are added up before a step."""
        return any(count > 1 for count in self._expected)

    @property
    def in_last_backward(self) -> bool:
        """Whether no further one comes before the step, as it was in the steps before: loads begin in that one."""
        return all(seen >= expected - 1 for seen, expected in zip(self._seen, self._expected, strict=True))

    def is_final(self, number: int) -> bool:
        """Whether a group has had all its reductions before the step, and there are some."""
        return bool(self._expected) and self._seen[number] >= self._expected[number] > 0
