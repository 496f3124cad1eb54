"""Gradients that updates in the backward have used: has somebody touched them since, and does the loop ever do so."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..core.loop import Core
from ..fsdp.dtensor import version_of
from ..fsdp.gradients import is_spent, note_freed, spend, unwatch, watch
from ..state.store import StateStore
from .guesses import Guesses, Version
from .homes import Plan
from .updates import BucketUpdates

logger = logging.getLogger(__name__)

_CLEAN_STEPS = 2
"""Updates move into the backward after so many steps in which nobody touched gradients before ``step()``."""


class Early:
    """Gradients that updates ahead of ``step()`` have used, or would have.

    Attributes:
        freed: parameters whose gradient was let go of with its update, and their versions then.
        ended: numbers of buckets updated in a step that a load has ended: ``step()`` leaves their used gradients out.
    """

    def __init__(
        self, core: Core, guesses: Guesses, updates: BucketUpdates, plan: Plan, names: Mapping[Tensor, str]
    ) -> None:
        self.freed: dict[Tensor, Version] = {}
        self.ended: set[int] = set()
        self._core, self._guesses, self._updates, self._plan, self._names = core, guesses, updates, plan, names
        self._touches = _Touches()
        self._clean_steps = 0  # -1: somebody has touched gradients, and updates stay in step() for good

    @property
    def is_clean(self) -> bool:
        """Return whether the first steps have shown that nobody touches gradients before ``step()``."""
        return self._clean_steps >= _CLEAN_STEPS

    def note(self, params: Iterable[Tensor]) -> None:
        """Watch gradients in a step that updates nothing early, to see whether somebody changes them."""
        if self._guesses.announced:
            if not (self._core.frees_all or self._guesses.unavailable):
                self._guesses.watch(
                    param.grad for param in params if param in self._plan.shards and param.grad is not None
                )
        elif self._core.mode.begin == "final" and 0 <= self._clean_steps < _CLEAN_STEPS and not self._core.frees_all:
            self.watch(params)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch gradients with which the backward has updated ``params``."""
        if self._guesses.made:
            self._guesses.watch((), [param for param in params if param not in self._plan.streamed])
        for param in params:
            if (grad := param.grad) is not None:
                if not self._guesses.made:
                    watch(grad, self._touches)
                self._guesses.used[param] = grad, version_of(grad), version_of(param)

    def unwatch(self) -> None:
        """Let everybody touch gradients again."""
        self._guesses.unwatch()
        for grad, _, _ in self._guesses.used.values():
            unwatch(grad)

    def spend(self, params: Iterable[Tensor]) -> None:
        """Let go of gradients whose updates have all been issued."""
        done = {bucket.number for bucket in self._core.done}
        for param in params:
            shard = self._plan.shards[param]
            if shard.group < 0:
                continue  # it has left the param groups: its gradient has not been used, and goes on adding up
            if param.grad is not None and not is_spent(param) and done.issuperset(shard.buckets):
                self.freed[param] = version_of(param)
                spend(param)

    def forget(self) -> None:
        """Forget which gradients updates of this step have used: for ``step()`` it is as if none had been."""
        self.unwatch()
        self._guesses.used, self.freed, self._touches.written = {}, {}, False

    def written(self) -> list[Tensor]:
        """List parameters that somebody else has written since their update, as their versions tell."""
        versions = [*((param, version) for param, (_, _, version) in self._guesses.used.items()), *self.freed.items()]
        return [param for param, version in versions if version_of(param) != version]

    def problem(self, states: StateStore) -> str:
        """Say what somebody has changed since the updates of this step; empty: nothing."""
        if written := self.written():
            return f"{self._names.get(written[0], 'a parameter')} has been written since then"
        exchanged = [*(param for param in self.freed if not is_spent(param)), *_exchanged(self._guesses.used)]
        if exchanged:
            return f"the gradient of {self._names.get(exchanged[0], 'a parameter')} has been exchanged since then"
        if self._touches.written:
            return "gradients have been changed since then"
        done = self._core.done
        used = {param for params in self._updates.used.values() for param in params}
        if self._guesses.made:  # all bytes of a bucket move to the spare home
            used = {param for bucket in done for param in bucket.params}
        items = (bucket.state for bucket in done)
        is_written = any(item.exposed and item.seen != item.version() for item in items)
        return "optimizer.state has changed since then" if is_written or self._are_exchanged(used, states) else ""

    def _are_exchanged(self, params: Iterable[Tensor], states: StateStore) -> bool:
        """Return whether somebody has put other tensors in the place of homes."""
        return any(
            states.get(param).get(name, home) is not home
            for param in params
            for name, home in self._plan.shards[param].homes.items()
        )

    def step_ended(self, scaler_decides: bool) -> None:
        """Forget the gradients of a step, and learn from it; a GradScaler that decides about it changes them."""
        for param in self.freed:
            note_freed(param)
        used, touched = self._guesses.used, self._touches.written
        self.freed, self._guesses.used, self._touches.written = {}, {}, False
        if not used or not 0 <= self._clean_steps < _CLEAN_STEPS or self._guesses.announced:
            return
        if touched or _exchanged(used) or scaler_decides:
            logger.info("gradients are changed between the backward and step(): all updates stay in step()")
            self._clean_steps = -1
        else:
            self._clean_steps += 1


def _exchanged(used: Mapping[Tensor, tuple[Tensor, Version, Version]]) -> list[Tensor]:
    """List the parameters whose gradient is another one, or another version of it, than was noted."""
    return [param for param, (grad, seen, _) in used.items() if param.grad is not grad or version_of(grad) != seen]


class _Touches:
    """Notes that somebody writes watched gradients, or may.

    Attributes:
        written: it has happened in this step.
    """

    written = False

    def reads(self, grads: Sequence[Tensor]) -> None:
        """Looking at gradients changes nothing."""

    def writes(self, grads: Sequence[Tensor]) -> None:
        """They are about to be written."""
        self.written = True

    shares = writes
