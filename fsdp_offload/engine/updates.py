"""The user's own optimizer, run on one bucket after the other of a logical step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.buckets import LARGEST_BYTES, Bucket
from ..cpu_update import HostUpdates
from ..device.lanes import Mark
from ..fsdp.dtensor import version_of
from ..fsdp.gradients import bare
from ..fsdp.optim import pinned_implementations
from ..optimizers import Conventions
from ..optimizers.bucket_update import BoundRange, update_bucket
from ..optimizers.divided_step import DividedStep
from ..optimizers.kept_state import Layouts
from ..state.shard import StateShard
from ..state.store import OwnCounters, StateStore
from .homes import Lending, Plan, home_of
from .weights import Weights

UPDATED_BYTES = 4 * LARGEST_BYTES
"""The most state that one update covers, more than a block of 100 M parameters has: each call costs the host time."""


class BucketUpdates:
    """Updates of one optimizer. It never refers to the optimizer between steps.

    Attributes:
        shared: what the buckets of this step share; ``None`` between steps.
        states: what they update: ``optimizer.state``, or copies of its counters; ``None`` between steps.
        without_state: parameters that had none when the step began.
        used: by bucket, shards whose gradients this step has used.
        host: updates buckets on the CPU, if it has any.
        writes_gradients: an update has written the gradients that it was given, so none can be repeated.
        joined_bytes: as :class:`Updates`, of this step.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        layouts: Layouts,
        plan: Plan,
        lending: Lending,
        weights: Weights,
        host: HostUpdates | None,
    ) -> None:
        self._cls, self._layouts, self._plan, self.lending, self.host = cls, layouts, plan, lending, host
        self._weights = weights
        self._conventions: Conventions = layouts.capabilities.conventions
        self.shared: DividedStep | None = None
        self.without_state: list[Tensor] = []
        self.states: StateStore | None = None
        self.writes_gradients = False
        self.joined_bytes = 0
        self.used: dict[int, set[StateShard]] = {}

    def start(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> None:
        """Note where a logical step starts."""
        pinned = pinned_implementations(optimizer)
        # What foreach allocates grows with what a call updates.
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        most_bytes = UPDATED_BYTES if is_fused else LARGEST_BYTES
        self.joined_bytes = most_bytes if self._layouts.capabilities.joins else 0
        self.shared = DividedStep(self._cls, self._layouts.capabilities, optimizer, kwargs, pinned)
        if self.host is not None:
            self.host.begin(optimizer, self._plan.host_shards())
        self.states = states
        self.without_state = [param for param in self._plan.shards if not states.get(param)]

    def leave_out(self, params: Iterable[Tensor]) -> None:
        """Gradients of ``params`` have been used, by a step that did not come to its end."""
        for shard in (self._plan.shards[param] for param in params if param in self._plan.shards):
            for number in shard.buckets:
                self.used.setdefault(number, set()).add(shard)

    def finish(self) -> None:
        """The step is over, and its values have been taken."""
        if self.states is not None:
            self.lending.commit(self.states)
        self.shared = self.states = None
        self.without_state, self.used = [], {}

    def abandon(self, buckets: Sequence[Bucket], done: Iterable[Bucket]) -> None:
        if self.states is not None and self.lending.moving:
            self.lending.commit(self.states, {bucket.number for bucket in done})
            for bucket in buckets:
                home_of(bucket).follow()
        self.finish()

    def _bind(self, bucket: Bucket) -> list[BoundRange]:
        """Bind the ranges of a bucket where they are now, for the optimizer to see."""
        block = bucket.state.block
        blocks = tuple([item.block for item in bucket.streamed])
        bound: list[BoundRange] | None = bucket.bound.get(blocks)  # type: ignore[assignment]
        if bound is None or any(map(BoundRange.has_moved, bound)):
            if len(bucket.bound) > 32:
                bucket.bound.clear()  # blocks that came and went
            memory = None if block is None else block.memory
            bound = self._plan.bind(bucket, memory, self._weights.place)
            bucket.bound[blocks] = bound
        return bound

    def is_late(self, bucket: Bucket) -> bool:
        """Return whether a gradient came after the update of ``bucket``."""
        used = self.used.get(bucket.number)
        late = [] if used is None else [one.param for one in home_of(bucket).shards if one not in used]
        return bool(late) and any(self._conventions.gradient(param) is not None for param in late)

    def _to_update(self, bucket: Bucket) -> list[tuple[BoundRange, Tensor | None]]:
        """The ranges of a bucket whose gradients this step has not used: all, unless some came late. And these."""
        used, gradient = self.used.setdefault(bucket.number, set()), self._conventions.gradient
        found = [(one, gradient(one.shard.param)) for one in self._bind(bucket) if one.shard not in used]
        used.update([one.shard for one, grad in found if grad is not None])
        return found

    def on_host(self, bucket: Bucket, after: Sequence[Mark]) -> Mark:
        assert self.host is not None and self.states is not None
        moving = self.lending.turn(home_of(bucket).shards)
        bucket.state.home.wait_unread()  # R4: a save may still be reading this home, and there is no spare one
        ranges = [one for one, _ in self._to_update(bucket)]
        return self.host.update(bucket.number, ranges, self.states, moving, after)

    def job(self, buckets: Sequence[Bucket]) -> tuple[list[Tensor], Callable[[], None]]:
        """Bind what an update needs now: when it runs, the user may have gone on."""
        assert self.shared is not None and self.states is not None
        found = [each for bucket in buckets for each in self._to_update(bucket)]
        ranges = [one for one, _ in found]
        read = list(self.shared.copies)  # if they were freed now, compute might write there before the update reads
        read += [grad for _, grad in found if grad is not None]
        seen = [each for one, grad in found if not one.is_alias for each in (one.param, grad) if each is not None]
        shared, states = self.shared, self.states

        def job() -> None:
            if isinstance(states, OwnCounters):
                states.copy([one.shard.param for one in ranges])
            for one, grad in found:
                one.gradient = one.part_of(grad)  # R3: in this lane, as it copies gradients that are not contiguous
            before = _versions(ranges)
            with torch.no_grad(), bare(seen) if seen else nullcontext():
                update_bucket(shared, ranges, states)
            self.writes_gradients |= before != _versions(ranges)
            for one in ranges:
                one.gradient = None  # keeps no gradient

        return read, job


def _versions(ranges: Iterable[BoundRange]) -> list[object]:
    """Change with what an update writes into the gradients that it was given."""
    given = [(grad, one.shard.on_locals) for one in ranges if (grad := one.gradient) is not None]
    return [grad._version if is_local else version_of(grad) for grad, is_local in given]
