"""Runs a step of the user's own optimizer on one bucket after the other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.buckets import LARGEST_BYTES, Bucket
from ..core.loop import Core, WayBack
from ..cpu_update import HostUpdates
from ..device.lanes import Mark
from ..fsdp.dtensor import local_shard, version_of
from ..fsdp.gradients import bare
from ..fsdp.optim import pinned_implementations
from ..optimizers.bucket_update import BoundRange, update_bucket
from ..optimizers.divided_step import DividedStep
from ..optimizers.kept_state import Layouts
from ..state.layout import params_of
from ..state.shard import StateShard
from ..state.store import Counted, OwnCounters, StateStore, counters_of
from .groups import ParamGroups
from .homes import Lending, Plan, Turning, home_of
from .weights import Weights

MOST_BOUND = 32
"""Most places for which a bucket keeps bound tensors. Moving tensors costs the host a tenth of making them."""

UPDATED_BYTES = 4 * LARGEST_BYTES
"""Most bytes of state in one update, more than a layer of 100 M parameters has: each call costs the host time."""


class Heard(Protocol):
    """A listener's view of one step. A step that fails, or is rolled back, is dropped without :meth:`committed`."""

    def update(self, ranges: Sequence[BoundRange], run: Callable[[], None]) -> None:
        """Call ``run``, which updates ``ranges`` on the current stream; their parameters are on the device."""

    def committed(self) -> None:
        """Handle the end of the step, whose last updates may not have run yet."""


class Listener(Protocol):
    """Hears of the steps of one optimizer.

    Attributes:
        stores_kept: kept items are stored right after each update, too.
    """

    stores_kept: bool

    def begin(self) -> Heard | None:
        """Begin a step; return the object that hears of its updates, if one does."""

    def before_reduction(self) -> None:
        """Handle that a group's gradients are about to be reduced: no rank reduces them before all have come here."""


@dataclass(eq=False)
class Contents:
    """The parts of an :class:`Engine` that its steps use. It never refers to the optimizer.

    ``writes_gradients``: an update has written the gradients that it was given, so that updates cannot be repeated.
    ``listeners``: hear of its updates on the device.
    """

    cls: type[Optimizer]
    layouts: Layouts
    plan: Plan
    groups: ParamGroups
    lending: Lending
    weights: Weights
    host: HostUpdates | None
    writes_gradients: bool = False
    listeners: list[Listener] = field(default_factory=list)


class Step(Turning):
    """One logical step: opened by its first update, in the backward or in ``step()``, and dropped when it ends.

    Attributes:
        divided: param groups and counters that the buckets of this step share.
        without_state: parameters that had no state when the step began.
        used: by bucket number, shards whose gradients this step has used.
        counted: by shard that was updated in the backward, :func:`counters_of` the user's entry: after the last update,
            or, in a speculative step, after the first one, for which they were copied.
        heard: objects of listeners that hear of its updates.
    """

    def __init__(
        self,
        contents: Contents,
        optimizer: Optimizer,
        states: StateStore,
        kwargs: Mapping[str, Any],
        *,
        way_back: WayBack | None = None,
    ) -> None:
        self._contents, plan, layouts = contents, contents.plan, contents.layouts
        pinned = pinned_implementations(optimizer)
        # The memory that foreach allocates grows with the state that a call updates.
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        own = None if way_back is None else OwnCounters(states, plan.shards)
        super().__init__(contents.lending, states, own, way_back)
        self.divided = DividedStep(contents.cls, layouts.capabilities, optimizer, kwargs, pinned)
        if contents.host is not None:
            contents.host.begin(optimizer, plan.host_shards())
        self.without_state = [param for param in plan.shards if not states.get(param)]
        self._empty = set(filter(states.has, self.without_state))  # parameters with an entry all the same
        self.used: dict[int, set[StateShard]] = {}
        self.counted: Counted = {}
        self.stores_kept = any(one.stores_kept for one in contents.listeners)
        self.heard = [heard for one in contents.listeners if (heard := one.begin()) is not None]
        if layouts.capabilities.joins:
            # A listener may copy the parameters of an update first.
            self.joined_bytes = UPDATED_BYTES if is_fused and not self.heard else LARGEST_BYTES

    def are_counters_written(self) -> bool:
        """Return whether the user has changed counters that updates in the backward have used."""
        theirs, counted = self.states if self.own is None else self.own.states, self.counted.copy()
        now = [counters_of(theirs.get(shard.param), shard.homes) for shard in counted]
        return [seen for _, seen in now] != [seen for _, seen in counted.values()]

    def used_shards(self) -> set[StateShard]:
        """Return shards whose gradients this step has used."""
        return set[StateShard]().union(*self.used.values())

    def leave_out(self, params: Iterable[Tensor]) -> None:
        """Skip the gradients of ``params``: a step that a load has discarded used them."""
        for shard in (self._contents.plan.shards[param] for param in params if param in self._contents.plan.shards):
            for number in shard.buckets:
                self.used.setdefault(number, set()).add(shard)

    def certain(self) -> None:
        """Make a speculative step certain: later updates write the entries of ``optimizer.state``."""
        assert self.own is not None
        self.states, self.own = self.own.states, None
        self.move_parameters()

    def finish(self, core: Core, optimizer: Optimizer, states: StateStore, created: list[Tensor]) -> None:
        """Finish a step after its last update: put ``created`` state in order, and write changed entries."""
        if created:
            new = set(created) - self._empty
            states.move_last([param for param in params_of(optimizer) if param in new])
        for param in created:
            self._contents.plan.shards[param].existed = True
        rest = self.divided.unvisited
        if rest:  # groups without an updated bucket: a plain step sees them as well
            groups, device = optimizer.param_groups, core.cache.device
            self.divided.run({number: self._stand_in(groups[number]["params"], device) for number in rest}, {})
        if self.divided.changes_tensors:
            core.lanes.compute.wait(*core.updated.values())  # R3: other lanes may still be writing these tensors
        self.divided.commit(optimizer)
        contents, changed = self._contents, self.divided.changed_entries.keys()
        if not changed <= contents.layouts.counters:
            contents.layouts.count(changed)
            contents.groups.keys = contents.groups.keys_of(optimizer)

    def _stand_in(self, params: list[Tensor], device: torch.device) -> list[Tensor]:
        """Return dummy parameters without a gradient for a group of which no bucket was updated."""
        if not params or self._contents.layouts.capabilities.conventions.state_without_gradient:
            return []
        local = local_shard(params[0])
        return [torch.zeros((1,) * local.dim(), dtype=local.dtype, device=device)]

    def abandon(self, buckets: Sequence[Bucket]) -> None:
        if self.moving:
            self.commit({bucket.number for bucket in self.done})
            for bucket in buckets:
                home_of(bucket).follow()

    def is_late(self, bucket: Bucket) -> bool:
        """Return whether a gradient came after the update of ``bucket``."""
        used = self.used.get(bucket.number)
        late = [] if used is None else [one.param for one in home_of(bucket).shards if one not in used]
        return bool(late) and any(self._lending.gradient(param) is not None for param in late)

    def _to_update(self, bucket: Bucket) -> list[tuple[BoundRange, Tensor | None]]:
        """Pair ranges of a bucket with their gradients, except for gradients that this step has used already."""
        used, gradient = self.used.setdefault(bucket.number, set()), self._lending.gradient
        block = bucket.state.block
        blocks = tuple([item.block for item in bucket.streamed])
        bound: list[BoundRange] | None = bucket.bound.get(blocks)  # type: ignore[assignment]
        if bound is None or any(map(BoundRange.has_moved, bound)):
            memory, place = None if block is None else block.memory, self._contents.weights.place
            if len(bucket.bound) >= MOST_BOUND:  # blocks were freed and made anew
                bound = bucket.bound.pop(next(iter(bucket.bound)))  # type: ignore[assignment]
            known = self._contents.layouts.capabilities.known  # else its state has memory of its own: ``place_values``
            if not (bound and memory is not None and known and all(one.move_to(memory, place) for one in bound)):
                bound = self._contents.plan.bind(bucket, memory, place)
            bucket.bound[blocks] = bound
        found = [(one, gradient(one.shard.param)) for one in bound if one.shard not in used]
        used.update([one.shard for one, grad in found if grad is not None])
        return found

    def on_host(self, bucket: Bucket, after: Sequence[Mark]) -> Mark:
        host = self._contents.host
        assert host is not None
        moving = self.turn(home_of(bucket).shards)
        bucket.state.home.wait_unread()  # R4: a save may still be reading a home that has no spare one
        ranges = [one for one, _ in self._to_update(bucket)]
        counted = None if self.stepping is not None or self.own is not None else self.counted
        for one in ranges if counted is not None else ():
            self.counted.pop(one.shard, None)  # until the CPU has written them
        return host.update(bucket.number, ranges, self.states, moving, after, counted)

    def job(self, buckets: Sequence[Bucket]) -> tuple[list[Tensor], Callable[[], None]]:
        """Bind the tensors of an update now: the user may exchange them before it runs."""
        found = [each for bucket in buckets for each in self._to_update(bucket)]
        ranges = [one for one, _ in found]
        read = list(self.divided.copies)  # else compute might get their memory, and write it, before the update reads
        read += [grad for _, grad in found if grad is not None]
        seen = [each for one, grad in found if not one.is_alias for each in (one.param, grad) if each is not None]
        shared, states, heard = self.divided, self.states, self.heard

        def job() -> None:
            if isinstance(states, OwnCounters):
                states.copy([one.shard.param for one in ranges])
            try:
                for one, grad in found:
                    one.gradient = one.part_of(grad)  # R3: ``part_of`` may copy, so it runs in this lane
                before = _versions(ranges)
                with torch.no_grad(), bare(seen) if seen else nullcontext():
                    if not heard:
                        update_bucket(shared, ranges, states)
                    else:
                        run = partial(update_bucket, shared, ranges, states)
                        for one_heard in heard:
                            run = partial(one_heard.update, ranges, run)
                        run()
                self._contents.writes_gradients |= before != _versions(ranges)
                if self.stepping is None:
                    theirs = states.states if isinstance(states, OwnCounters) else states
                    shards = {one.shard: None for one in ranges if theirs is states or one.shard not in self.counted}
                    self.counted |= {one: counters_of(theirs.get(one.param), one.homes) for one in shards}
            finally:
                for one in ranges:
                    one.gradient = None  # a range outlives its update, and the step

        return read, job


def _versions(ranges: Iterable[BoundRange]) -> list[object]:
    """Return versions of the ranges' gradients, which change when an update writes into them."""
    given = [(grad, one.shard.on_locals) for one in ranges if (grad := one.gradient) is not None]
    return [grad._version if is_local else version_of(grad) for grad, is_local in given]
