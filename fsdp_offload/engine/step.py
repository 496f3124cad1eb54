"""One logical step, in the parts in which it is issued: by the backward, by ``step()``, or by both.

::

    begin ──▶ advance, advance, ... (what may be issued by now) ──▶ finish ──▶ gradients held until they have been read
       │         └────▶ take_back (gradients have been changed that updates had used: speculation.py)
       └────▶ drop (only loads were issued, or the state is to be replaced)

What is left unfinished by an exception is noted in :attr:`Stepping.failure`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device.link import DeviceLink
from ..optimizers import LogicalStep
from ..optimizers.bound_range import BoundRange
from ..optimizers.bucket_update import FirstUpdate, same_order_on_ranks, update_bucket
from ..optimizers.kept_state import Layouts
from ..optimizers.scratch import without_gradient
from ..optimizers.shadow import Shadow
from ..optimizers.shared_values import SharedValues
from ..planning.ring_layout import Placement
from ..planning.schedule import Action, BucketStep, build_schedule
from ..policy import OffloadPolicy
from ..state.shard import StateShard
from ..state.store import StateStore
from ..torch_compat.dtensor import version_of
from ..torch_compat.homed import uses_of
from ..torch_compat.optim import foreach_supports
from ..torch_compat.spent_gradient import is_spent, note_freed, restore, spend, without_gradients
from ..torch_compat.watched_gradient import bare
from .begun_step import BegunStep, StepPhase
from .cpu_updates import Submit
from .executor import Pipeline
from .homes import Plan
from .lending import Lending
from .speculation import Speculated, Speculation

_REDUCTIONS_BEHIND = 4
"""How many groups an update may lag behind its gradients before the model waits for it, where these are freed then."""


class Stepping:
    """The steps of one optimizer over its plan.

    Attributes:
        begun: in a backward, and not ended by ``step()`` yet.
        last: what the last step updated.
        backward_order: buckets as their gradients became final in the last backward.
        measured_order: a better order for the same, if the rehearsal has found one.
        speculation: whether updates may run ahead of what the loop does with gradients.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        layouts: Layouts,
        policy: OffloadPolicy,
        names: Mapping[Tensor, str],
        plan: Plan,
        pipeline: Pipeline,
        lending: Lending,
        link: DeviceLink,
        *,
        pin: bool,
    ) -> None:
        self.begun: BegunStep | None = None
        self.looks = 0  # how often somebody has asked for homes
        self._failure = ""
        self.last: tuple[BucketStep, ...] = ()
        self.backward_order: list[int] = []
        self._unused: set[int] = set()  # buckets without gradients in this backward, as far as is known
        self.measured_order: list[int] = []
        self._cls = cls
        self._policy = policy
        self._names = names
        self._layouts = layouts
        self._conventions = layouts.capabilities.conventions
        self._plan = plan
        self._pipeline = pipeline
        self._lending = lending
        self._link = link
        self.speculation = Speculation(
            *(plan, pipeline, layouts, policy, link.device), pin=pin, take_back=self.take_back
        )
        self._bound: dict[int, tuple[Placement | None, Tensor | None, list[BoundRange]]] = {}
        self._schedules: dict[tuple[BucketStep, ...], tuple[list[Action], dict[int, Placement]]] = {}
        self._held: dict[int, list[tuple[Tensor, Tensor | None, BegunStep]]] = {}  # by bucket: what updates still read
        self._stand_ins: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # for parameters without a gradient

    @property
    def failure(self) -> str:
        """Why the state is only half updated, by the device or by the host."""
        return self._failure or (self._pipeline.host.failure if self._pipeline.host is not None else "")

    @failure.setter
    def failure(self, failure: str) -> None:
        self._failure = failure
        if self._pipeline.host is not None and not failure:
            self._pipeline.host.failure = ""

    def forget_places(self) -> None:
        """There is another generation of the plan: let go of what was derived from the last one."""
        if self._pipeline.host is not None:
            self._pipeline.host.forget()
        self._bound.clear()
        self._schedules.clear()
        self.last, self._unused = (), set()

    # One after the other -----------------------------------------------------------------------------------------

    def begin(
        self,
        optimizer: Optimizer,
        kwargs: Mapping[str, Any],
        steps: tuple[BucketStep, ...],
        states: StateStore,
        *,
        early: bool = False,
    ) -> BegunStep:
        """Note where a logical step starts, and take up its schedule; ``early``: before ``step()`` is called."""
        self.wait_for_all()  # the gradients of the last step are let go
        phase = StepPhase.BACKWARD if early else StepPhase.STEP
        start = self._start(optimizer, kwargs)
        begun = BegunStep(Shadow(self._cls), *start, len(optimizer.param_groups), steps, phase)
        self._start_schedule(steps)
        if early:
            shards = self._plan.shards.values()
            begun.watched = [shard for shard in shards if _is_offloaded(shard) and states.get(shard.param)]
            begun.without_state = [shard for shard in shards if not states.get(shard.param)]
            begun.versions, begun.looks = self._home_versions(begun, states), self._looks_of(begun)
            self._pipeline.updates_after_compute()
            begun.speculated = self.speculation.begin(states)
            self.begun = begun
        return begun

    def _start(
        self, optimizer: Optimizer, kwargs: Mapping[str, Any]
    ) -> tuple[SharedValues, LogicalStep, Submit | None]:
        """What updates start from, beside parameters and state."""
        logical = self._conventions.begin(optimizer, kwargs)
        host = self._pipeline.host
        submit = None if host is None else host.begin(optimizer, self._plan.host_shards())
        return self._shared_values(optimizer, logical), logical, submit

    def advance(
        self,
        begun: BegunStep,
        states: StateStore,
        may_update: Callable[[int], bool] = lambda number: True,
        room_bytes: float = math.inf,
    ) -> None:
        """Issue what of a step may be issued now, with at most so much staging memory as there is room for."""
        conventions = self._conventions
        first: list[FirstUpdate] = []

        def update(number: int) -> None:
            speculated = begun.speculated
            if begun.moving is None:
                # In the backward, more gradients are still to come: whatever is loaded may be stored elsewhere.
                shards = self._covered(begun.steps, with_gradient=not begun.awaits_gradients)
                elsewhere = () if speculated is None else self.speculation.stores_elsewhere(shards)
                begun.moving = self._lending.redirect_stores(shards, begun.steps, elsewhere)
                begun.redirected = begun.steps
            if speculated is not None:
                self.speculation.before_update(speculated, number)
            self._note_used(begun, number)
            if begun.submit is not None and self._plan[number].on_host:
                begun.submit(number, self._bind(number), states, begun.moving or ())
                begun.note_updated(number)
                return  # the gradients are held there
            if not begun.has_updated and speculated is None:
                first.append(FirstUpdate(begun.shadow, begun.shared, self._bind(number), states))
            with bare(self._seen(number)):
                for ranges in same_order_on_ranks(self._bind(number), group_by_group=conventions.group_by_group):
                    update_bucket(
                        *(begun.shadow, begun.shared, conventions, ranges, begun.group_count),
                        *(states if speculated is None else speculated.states, begun.logical.kwargs),
                    )
            begun.note_updated(number)
            if speculated is not None:
                self.speculation.after_update(speculated, self._plan[number].covers(), number)
            if self._policy.runs_on_into_forward:
                # Whoever clears gradients meanwhile must not free what an update is still to read.
                covers = [shard.param for shard in self._plan[number].covers()]
                self._held.setdefault(number, []).extend((p, conventions.gradient(p), begun) for p in covers)

        try:
            with self._link.in_use:  # another thread's optimizer may want a larger ring
                self._pipeline.advance(update, may_update, room_bytes)
        except BaseException as error:
            if begun.speculated is not None and begun.speculated.started:
                self.take_back()  # as if the backward had updated nothing
                raise
            if not begun.has_updated and (begun.moving is None or (first and first[0].undo())):
                # No update has written anything: whatever it was, no room say, nothing is lost.
                self._lending.store_home(begun.redirected)
                self._pipeline.cancel()
                self.begun = None
                raise
            stored = self._pipeline.stored(begun.done)
            moved = [shard for shard in begun.moving or () if stored.issuperset(shard.buckets)]
            self._lending.commit_moves(moved, begun.steps, states)
            self._restore_gradients(begun)
            self._note_failure(error, begun.done, begun.steps)
            self.begun = None
            raise

    def _note_used(self, begun: BegunStep, number: int) -> None:
        """An update of this bucket is about to be issued."""
        for shard in self._plan[number].covers():
            grad = self._conventions.gradient(shard.param)
            if grad is not None:
                whole = all(one == number or one in begun.done for one in shard.buckets)
                begun.used[shard.param] = None if whole else (grad, version_of(grad))

    def _seen(self, number: int) -> list[Tensor]:
        """What of a bucket the optimizer sees itself: what it does with that is not what the loop does."""
        params = [shard.param for shard in self._plan[number].covers() if not shard.on_locals]
        grads = [self._conventions.gradient(param) for param in params]
        return [*params, *(grad for grad in grads if grad is not None)]

    def finish(self, begun: BegunStep, states: StateStore) -> None:
        """Everything has been issued: homes that moved are the homes from now on."""
        self._pipeline.finish()
        begun.enter(StepPhase.ISSUED)
        self._lending.commit_moves(_moved(begun), begun.redirected, states)

    def _enter_step(self, begun: BegunStep) -> None:
        idle = {step.bucket for step in begun.steps if not self._covered([step])} - set(begun.done)
        self._pipeline.skip(idle)
        begun.steps = tuple(step for step in begun.steps if step.bucket not in idle)
        self._pipeline.updates_after_compute()
        begun.enter(StepPhase.STEP)

    def end(self, begun: BegunStep, states: StateStore) -> None:
        """All gradients that there are going to be are there: the rest of what the backward has begun."""
        if begun.phase is not StepPhase.ISSUED:
            with without_gradients(begun.late):
                self._enter_step(begun)
                self.advance(begun, states)
                self.finish(begun, states)
        # Each gradient goes with the update that reads it, not with the last of them.
        begun.spent = {param: one for param, one in begun.spent.items() if one[0] is None}
        for param in begun.spent:
            note_freed(param)
        self.begun = None

    def fits(self, begun: BegunStep, steps: Sequence[BucketStep], states: StateStore) -> bool:
        """Whether what has been loaded is what a step over these buckets needs."""
        # Whoever has looked since may have written, and torch._foreach_* counts no write into DTensors.
        looked = not begun.has_updated and begun.looks != self._looks_of(begun)
        same = not looked and begun.versions == self._home_versions(begun, states)
        return same and sorted(begun.steps) == sorted(steps)

    def count_rest(self, begun: BegunStep, optimizer: Optimizer) -> None:
        """Let groups of which no bucket was updated count the step: a plain step sees them as well."""
        rest = begun.shared.unvisited
        if rest:
            groups = enumerate(optimizer.param_groups)
            lists = [self._without_gradient(group["params"]) if number in rest else [] for number, group in groups]
            begun.shadow.run(begun.shared, lists, {}, begun.logical.kwargs, counting=rest)

    def _without_gradient(self, params: Sequence[Tensor]) -> list[Tensor]:
        """What stands for the parameters of a group none of which has a gradient; made once."""
        if not params or self._conventions.state_without_gradient:
            return []
        key = params[0].dim(), params[0].dtype
        if key not in self._stand_ins:
            self._stand_ins[key] = without_gradient(params)
        return self._stand_ins[key]

    def start_from(self, begun: BegunStep, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
        """Only loads have been issued: hyperparameters, attributes and gradients count as they are now.

        GradScaler, for one, hands over its scale in attributes that there are during ``step()`` only.
        """
        begun.shared, begun.logical, begun.submit = self._start(optimizer, kwargs)
        begun.group_count = len(optimizer.param_groups)

    def left_of(self, begun: BegunStep, needed: tuple[BucketStep, ...]) -> tuple[BucketStep, ...]:
        """Select what ``step()`` still has to update, where no update came before, or one without a late gradient."""
        again = self.buckets_of(begun.late)
        return tuple(step for step in needed if step.bucket in again or step.bucket not in begun.done)

    def go_on(self, begun: BegunStep, left: tuple[BucketStep, ...]) -> None:
        """More is to be updated than the backward had known of."""
        begun.enter(StepPhase.STEP)
        begun.steps, begun.moving = left, None
        self._start_schedule(left)

    def end_left(self, begun: BegunStep, states: StateStore) -> None:
        """Update what nothing has yet."""
        with without_gradients(list(begun.used)):
            self._pipeline.updates_after_compute()
            self.advance(begun, states)
            self.finish(begun, states)

    def drop(self) -> None:
        """Forget what the backward has begun: it is to be done again, or the state is to be replaced."""
        self.take_back()
        begun = self.begun
        if begun is not None:
            self.speculation.forget(begun.speculated)
            if begun.has_updated:
                for param in filter(is_spent, begun.spent):
                    param.grad = None  # used; in a step after this it would be used twice
                self._pipeline.abandon()
                self._lending.store_home(begun.redirected)  # else the next step stores into places that nobody settles
            else:
                self._pipeline.cancel()
            self.begun = None

    def take_back(self) -> None:
        """Undo what the backward has updated before it was certain, if it has: state and parameters are as before it.

        Gradients stay. The host does not wait; the current stream waits for the parameters.
        """
        begun = self.begun
        if begun is None or begun.speculated is None or not begun.speculated.started:
            return
        with self._link.in_use, torch.no_grad():
            self._pipeline.take_back()
            self._lending.store_home(begun.redirected)
            self.speculation.restore(begun.speculated)
        self.begun = None

    def skip(self) -> None:
        """Gradients are about to be cleared: if there was no ``step()``, there is none for them.

        Raises:
            RuntimeError: they have been used, and there is no way back.
        """
        self.take_back()
        self.speculation.blocked = False
        if self.begun is not None and self.begun.has_updated:
            self._refuse(
                "gradients were cleared instead of stepping, after the backward had updated parameters with them",
                "zero_grad() before step(), with OffloadPolicy(overlap='iteration'): parameters have been updated in "
                "the backward, and a step cannot be skipped any more. A loop that skips steps, or clears the gradients "
                "that another loss has left (GANs), has to use overlap='forward'.",
            )

    def _covered(self, steps: Iterable[BucketStep], *, with_gradient: bool = True) -> list[StateShard]:
        """The shards in these buckets, once each; only those with a gradient, or all."""
        shards = dict.fromkeys(shard for step in steps for shard in self._plan[step.bucket].covers())
        gradient = self._conventions.gradient
        return [s for s in shards if s.group >= 0 and not (with_gradient and gradient(s.param) is None)]

    # In the backward ---------------------------------------------------------------------------------------------

    def is_whole(self, steps: Sequence[BucketStep]) -> bool:
        """Whether these are all buckets of some groups that can have gradients, with state in each.

        A parameter of which only some buckets were updated in the backward would be counted too early for the others.
        """
        numbers = {step.bucket for step in steps}
        touched = {s.together for number in numbers for s in self._plan[number].covers() if self._is_trained(s)}
        trained = (s for s in self._plan.shards.values() if s.together in touched and self._is_trained(s))
        needed = {number for shard in trained for number in shard.buckets}
        return bool(steps) and needed <= numbers and all(step.load or not step.store for step in steps)

    def _is_trained(self, shard: StateShard) -> bool:
        """Whether a step may update it. Frozen parameters may have gradients from before."""
        param = shard.param
        return shard.group >= 0 and (param.requires_grad or self._conventions.gradient(param) is not None)

    def in_backward_order(self, steps: Sequence[BucketStep]) -> tuple[BucketStep, ...]:
        """As their gradients become final, and better if that is known: learnt in earlier steps."""
        position = {number: at for at, number in enumerate(self.measured_order)}
        if not all(step.bucket in position for step in steps):
            # Each order keeps the ranges of a parameter in order; a mixture would not.
            position = {number: at for at, number in enumerate(self.backward_order)}
        in_order = sorted(steps, key=lambda step: position.get(step.bucket, len(position)))
        in_order.sort(key=lambda step: step.bucket in self._unused)
        if self.speculation.is_ready:
            in_order.sort(key=lambda step: not self.speculation.may_update(step.bucket))  # the others wait for step()
        return tuple(in_order)

    def expect_none_of(self, params: Set[Tensor]) -> None:
        """The next backward will not make gradients of these: no update has to wait for them, which come in order."""
        shards = [self._plan.shards[param] for param in params if param in self._plan.shards]
        alone = {n for s in shards for n in s.buckets if all(other.param in params for other in self._plan[n].covers())}
        self._unused = {number for s in shards if alone.issuperset(s.buckets) for number in s.buckets}

    @property
    def updates_early(self) -> bool:
        """Whether the backward may update, of what is begun in it."""
        speculation = self.speculation
        return self._policy.updates_in_backward and (not speculation.announced or speculation.is_ready)

    def may_update_early(self, begun: BegunStep, number: int) -> bool:
        """Whether a bucket may be updated before ``step()`` once its gradients are final."""
        if begun.speculated is not None:
            return self.speculation.may_update(number)
        return self._policy.updates_in_backward and not self.speculation.announced

    def hide_spent(self, begun: BegunStep) -> None:
        """Hide gradients whose buckets are all updated."""
        if begun.speculated is not None:
            return  # they may be clipped yet
        done, new = set(begun.done), begun.done[begun.hidden :]
        begun.hidden = len(begun.done)
        for shard in dict.fromkeys(shard for number in new for shard in self._plan[number].covers()):
            grad = shard.param.grad
            if grad is not None and shard.param not in begun.spent and done.issuperset(shard.buckets):
                begun.spent[shard.param] = None if self._policy.parameters else grad, version_of(shard.param)
                spend(shard.param)

    def let_go_of_spent(self, begun: BegunStep) -> None:
        """Free gradients where parameters live on the host: there is no room for all of them. After a reduction.

        Their memory is allocated anew behind what the current stream waits for here, for updates that ended long ago
        unless the link is late. Then the model waits for it, rather than more gradients for their updates.
        """
        if not self._policy.parameters or begun.speculated is not None:
            return
        begun.updated_by.append(len(begun.done))
        if len(begun.updated_by) > _REDUCTIONS_BEHIND:
            done = begun.done[: begun.updated_by[-1 - _REDUCTIONS_BEHIND]]
            self.wait_for([number for number in done if number in self._held])

    @property
    def has_been_seen(self) -> bool:
        """Tell whether a forward has used what the backward had updated: a backward that follows is another one."""
        return self.begun is not None and self.begun.seen

    def refuse_second_backward(self) -> None:
        """A backward is about to add to gradients that an update may have used.

        Raises:
            RuntimeError: it has, and there is no way back.
        """
        self.take_back()
        if self.begun is None or not self.begun.has_updated:
            return
        self._refuse(
            "a backward came after the one whose gradients had been updated with already",
            "a second backward before step(), with OffloadPolicy(overlap='iteration'): parameters have been updated "
            "with the gradients of the first one. The number of backwards before each step must not change (it was "
            "learnt in the first steps; one is expected where not all gradients fit on the device); use "
            "overlap='forward', or one step for each backward.",
        )

    def refuse_recomputation(self, buckets: Collection[int]) -> None:
        """A backward is about to compute again what it has updated already: a block that was used twice, checkpointed.

        Raises:
            RuntimeError: it has updated some of ``buckets``, in which the state of its parameters is.
        """
        if self.begun is None or set(self.begun.done).isdisjoint(buckets):
            return
        if self.begun.speculated is not None:
            self.take_back()
            return
        self._refuse(
            "a backward computed a block again whose parameters it had updated already",
            "activation checkpointing of a block that runs twice before one backward, with "
            "OffloadPolicy(overlap='iteration'): it is computed again with parameters that have been updated since. "
            "Use overlap='forward', use_reentrant=False, or one backward for each forward.",
        )

    def _refuse(self, failure: str, message: str) -> NoReturn:
        """Abort the step: some parameters were updated from wrong gradients."""
        self.drop()
        self.failure = failure
        raise RuntimeError(message)

    def resume(
        self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any], *, same_groups: bool
    ) -> BegunStep | None:
        """The step of which the backward has updated a part. One of which it has only loaded some is kept or dropped.

        Args:
            optimizer: whose ``step()`` this is.
            states: its state.
            kwargs: of ``step()``.
            same_groups: its param groups have the parameters that they had.

        Raises:
            RuntimeError: it cannot go on, and parameters have been updated.
        """
        begun = self.begun
        if begun is None:
            return None
        if not begun.has_updated:
            self.speculation.forget(begun.speculated)
            begun.speculated = None
            if same_groups:
                self.start_from(begun, optimizer, kwargs)
                begun.enter(StepPhase.STEP)
                self._pipeline.step_is_called()
            else:
                self.drop()  # loads only; they are made again
            return None
        begun.late = self._late(begun)
        problem = self._problem_of(begun, optimizer, states, kwargs, same_groups=same_groups)
        if begun.speculated is not None:
            return self._resume_speculated(begun, begun.speculated, problem)
        self._restore_gradients(begun)
        if problem:
            self._refuse(
                f"the update began in the backward, and {problem}",
                f"step(), with OffloadPolicy(overlap='iteration'): parameters have been updated in the backward, and "
                f"{problem}. Load a checkpoint, and use overlap='forward' for a loop that does this.",
            )
        return begun

    def _problem_of(
        self,
        begun: BegunStep,
        optimizer: Optimizer,
        states: StateStore,
        kwargs: Mapping[str, Any],
        *,
        same_groups: bool,
    ) -> str:
        """Say why the updates of the backward cannot stand: what was done since. Empty if they can."""
        if not (same_groups and begun.shared.still_starts_from(optimizer)):
            return "hyperparameters have changed since then"
        if scaler_decides(optimizer, kwargs):
            return "a GradScaler decides only now whether there is a step"
        if begun.speculated is not None and begun.late:
            return "a gradient has come since then"
        exchanged = [param for param in begun.spent if not is_spent(param)]
        exchanged += [
            p for p, one in begun.used.items() if one and (p.grad is not one[0] or version_of(one[0]) != one[1])
        ]
        if exchanged:
            return f"the gradient of {self._names.get(exchanged[0], 'a parameter')} has been exchanged since then"
        written = [param for param, (_, version) in begun.spent.items() if version_of(param) != version]
        if written:
            return f"{self._names.get(written[0], 'a parameter')} has been written since then"
        return "optimizer.state has changed since then" if begun.versions != self._home_versions(begun, states) else ""

    def _late(self, begun: BegunStep) -> list[Tensor]:
        """Parameters with gradients that came after the updates of their buckets, or of some of these."""
        done, gradient = set(begun.done), self._conventions.gradient
        shards = (s for s in self._plan.shards.values() if s.group >= 0 and not done.isdisjoint(s.buckets))
        return [s.param for s in shards if s.param not in begun.used and gradient(s.param) is not None]

    def _resume_speculated(self, begun: BegunStep, speculated: Speculated, problem: str) -> BegunStep | None:
        """The step if what it has updated may stand; else it has not begun."""
        self.speculation.unwatch()
        for param, used in speculated.used.items():
            if version_of(param) != used.param_version:
                written = f"{self._names.get(param, 'a parameter')} has been written since then"
                self._refuse(
                    f"the update began in the backward, and {written}",
                    f"step(), with OffloadPolicy(overlap='iteration'): parameters have been updated in the backward, "
                    f"and {written}. Load a checkpoint, and use overlap='forward' for a loop that does this.",
                )
        if problem:
            self.take_back()
            return None
        return begun

    def settle(self, begun: BegunStep, states: StateStore) -> BegunStep | None:
        """Let what the backward has updated stand, or take it back: the factor of clipping is waited for.

        Whatever can be done ahead is: until the next forward is issued the device has nothing to compute.
        """
        speculated = begun.speculated
        if speculated is None:
            return begun
        if self.begun is not begun:
            return None  # something in between has taken it back
        changes = speculated.states.compare()
        is_issued = self._pipeline.is_issued
        if is_issued:
            self._enter_step(begun)
            self.finish(begun, states)
        if self.speculation.problem_of(speculated):
            if is_issued:
                self._lending.move_back(_moved(begun), states)
            self.take_back()
            return None
        self.speculation.commit(speculated, changes, states)
        begun.speculated = None
        return begun

    def _restore_gradients(self, begun: BegunStep) -> None:
        restore((param, grad) for param, (grad, _) in begun.spent.items() if grad is not None)

    def _home_versions(self, begun: BegunStep, states: StateStore) -> list[object]:
        """Changes when somebody writes into the state that there was when the step began."""
        loaded = (*begun.watched, *filter(_is_offloaded, begun.without_state))
        found: list[object] = [version_of(shard.param) for shard in loaded if shard.weights is not None]
        for shard in begun.watched:
            state, leaves = states.get(shard.param), shard.home_leaves
            for name, home in shard.homes.items():
                found += (state.get(name) is home, *version_of(home), *[leaf._version for leaf in leaves[name]])
        done = set(begun.done)
        for shard in filter(_is_offloaded, begun.without_state):
            state = states.get(shard.param)
            # Only an update may have made some by now.
            made = not state or not done.isdisjoint(shard.buckets)
            homes = shard.homes
            found.append(made and all(state.get(name) is None or state[name] is homes[name] for name in homes))
        return found

    def _looks_of(self, begun: BegunStep) -> list[int]:
        return [self.looks, *(uses_of(shard.param) for shard in begun.watched if shard.weights is not None)]

    # New parameters ----------------------------------------------------------------------------------------------

    def buckets_of(self, params: Iterable[Tensor]) -> set[int]:
        """The buckets in which the state of any of these is."""
        return {number for param in params if param in self._plan.shards for number in self._plan.shards[param].buckets}

    def before_gather(self, buckets: Collection[int], stream: torch.Stream | None, *, in_backward: bool) -> None:
        """As :meth:`wait_for`. A model that runs between backward and ``step()`` sees the parameters from before."""
        begun = self.begun
        speculates = begun is not None and begun.speculated is not None
        if begun is not None and speculates and not (in_backward and set(begun.done).isdisjoint(buckets)):
            self.take_back()
        elif begun is not None and not in_backward and not set(begun.done).isdisjoint(buckets):
            begun.seen = True
        self.wait_for(buckets, stream)

    def wait_for(self, buckets: Collection[int], stream: torch.Stream | None = None) -> None:
        """Let what follows on ``stream`` (``None``: the current one) see the parameters of these buckets new."""
        self._pipeline.wait_updated(buckets, stream)
        if stream is None:
            for number in buckets:
                self._held.pop(number, None)

    def wait_for_all(self) -> None:
        """Let what follows on the current stream see all parameters and counters new."""
        self._pipeline.wait_all_updated()
        self._held.clear()

    def wait_counted(self) -> None:
        """Let what follows on the current stream see counters and resident state new, where an update may still run."""
        if self._held:
            self._pipeline.wait_device_updated()

    # What an update needs ----------------------------------------------------------------------------------------

    def _shared_values(self, optimizer: Optimizer, logical: LogicalStep) -> SharedValues:
        implementations = pinned_implementations(optimizer)
        pinned = [{**one, **other} for one, other in zip(implementations, logical.pinned, strict=True)]
        return SharedValues(
            optimizer,
            pinned,
            logical.attributes,
            self._conventions.attributes_by_param,
            writes_any_entry=not self._layouts.capabilities.known,
            copy_scheduled=self._policy.runs_on_into_forward,
        )

    def _start_schedule(self, steps: tuple[BucketStep, ...]) -> None:
        if steps not in self._schedules:
            if len(self._schedules) >= _KEPT_SCHEDULES:
                self._schedules.clear()
            places = self._plan.places_for(step.bucket for step in steps)
            self._schedules[steps] = build_schedule(steps, places), places
        self._pipeline.begin(*self._schedules[steps], self._plan.ring)

    def forget_bound(self) -> None:
        """Resident state has other homes from now on."""
        self._bound.clear()

    def give_back_ring(self, keep_bytes: int | None = None) -> None:
        """Free the staging memory; or what comes and goes of it, down to ``keep_bytes``. No schedule is in progress."""
        gone = self._pipeline.give_back_ring(keep_bytes)
        if gone:
            self._bound = {n: one for n, one in self._bound.items() if one[0] is None or one[0].block not in gone}

    def _bind(self, number: int) -> list[BoundRange]:
        """What the optimizer sees of a bucket; kept from step to step while the storages stay where they are."""
        placement, block = self._pipeline.buckets[number].placement, self._pipeline.block_of(number)
        known, known_block, bound = self._bound.get(number, (None, None, []))
        moved = known != placement or known_block is not block
        if not bound or moved or any(not part.still_valid() for part in bound):
            bound = self._plan.bind(number, block)
            self._bound[number] = placement, block, bound
        return bound

    # Faults ------------------------------------------------------------------------------------------------------

    def give_up(self, ended: BegunStep | None, error: BaseException) -> None:
        """An exception ends ``step()`` before it issues anything; ``ended`` is what the backward has done of it."""
        if ended is not None and ended.speculated is None:
            self.note_not_taken_over(ended, error)
        else:
            self.drop()  # loads and guesses only: they are made again

    def note_not_taken_over(self, begun: BegunStep, error: BaseException) -> None:
        """Everything has been issued, but state or counters that the updates made will be missing."""
        if begun.has_updated and not self.failure:  # the host says itself what has failed there
            self._note_failure(error, begun.done, begun.steps)
        self.begun = None

    def _note_failure(self, error: BaseException, done: Sequence[int], steps: Sequence[BucketStep]) -> None:
        self._pipeline.abandon()
        torn = [step.bucket for step in steps if step.bucket not in done][:1]
        self.failure = (
            f"an earlier step() stopped with {type(error).__name__}: {error}. {len(done)} of {len(steps)} buckets had "
            f"been updated (parameters {self._names_in(done)}); {self._names_in(torn)} may be half updated; the others "
            "are as before that step"
        )

    def _names_in(self, buckets: Sequence[int]) -> str:
        names = list(dict.fromkeys(shard.name for number in buckets for shard in self._plan[number].covers()))
        if not names:
            return "none"
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def check_whole(self, what: str) -> None:
        """Refuse to hand out, or to go on with, what an earlier step has half updated.

        Raises:
            RuntimeError: an exception ended an earlier step; says which parameters are new.
        """
        if self._pipeline.host is not None:
            self._pipeline.host.raise_failure()
        if self.failure:
            raise RuntimeError(
                f"{what} refused: {self.failure}. Load a checkpoint of the model and of this optimizer "
                "(load_state_dict) before going on."
            )

    def check_usable(self, what: str, *, mid_step: bool = False) -> None:
        """Refuse to go on with half updated state.

        Args:
            what: is about to be done.
            mid_step: it is the end of a step that the backward has begun.

        Raises:
            RuntimeError: an exception ended an earlier step; says which parameters are new.
        """
        self.check_whole(what)
        if not mid_step:
            self.take_back()
        if self.begun is not None and self.begun.has_updated and not mid_step:
            raise RuntimeError(
                f"{what} refused: the backward has updated part of the state (OffloadPolicy(overlap='iteration')). "
                "Call step() first."
            )


def _moved(begun: BegunStep) -> list[StateShard]:
    """Whose state has been stored elsewhere, all of it."""
    done = set(begun.done)
    return [shard for shard in begun.moving or () if done.issuperset(shard.buckets)]


def scaler_decides(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether this step depends on what a GradScaler has found."""
    return bool(kwargs) or getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf")


def _is_offloaded(shard: StateShard) -> bool:
    """Updates write other state where it is, on the device or on the host, which counts as well."""
    return not shard.resident and not shard.on_host


_KEPT_SCHEDULES = 4
"""One pattern of gradients at a time is the rule, in the order of ``step()`` and in that of the backward."""


def pinned_implementations(optimizer: Optimizer) -> list[dict[str, object]]:
    """For each group what keeps torch from choosing another implementation for a shadow than for the real optimizer.

    Left to itself (``foreach=None, fused=None``) torch takes foreach on accelerators if it supports the types of all
    parameters with a gradient; the shadow has plain tensors where the user's optimizer may have other types.
    """
    pinned: list[dict[str, object]] = []
    for group in optimizer.param_groups:
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        supported = not undecided or foreach_supports(param for param in group["params"] if param.grad is not None)
        pinned.append({} if supported else {"foreach": False})
    return pinned
