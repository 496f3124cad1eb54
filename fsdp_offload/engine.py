"""What an attached optimizer consists of, and how one logical step uses it.

    optimizer.state ──▶ Plan: shards, buckets, homes ──▶ which buckets have gradients now
                                                               │
              new parameters ◀── pipeline ◀── schedule ◀───────┘

The engine never refers to the optimizer (it is handed in on each call), so dropping the optimizer frees everything.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .adopt import adopt, is_exchanged
from .forms import as_kept, as_saved, drop_master, rebuild_master
from .fsdp import foreach_supports, unsupported_gradient, version_of
from .learn import Layouts, layout_key
from .lending import Lending
from .masters import MASTER
from .optimizers import LogicalStep, Traits
from .pipeline import Pipeline
from .plan import Plan
from .policy import OffloadPolicy
from .report import OffloadReport
from .schedule import Action, BucketStep, build_schedule
from .shards import StateLayout, StateShard, leaves_of
from .spent import is_spent, restore, spend
from .transfer import DeviceLink, EventMark, device_link
from .update import (
    ENGINE_ATTRIBUTE,
    BoundRange,
    Shadow,
    SharedValues,
    StateStore,
    UserState,
    same_order_on_ranks,
    update_bucket,
)


class Engine:
    """The offloaded state of one optimizer, and its steps.

    Attributes:
        cls: the user's optimizer class.
        failure: why the state is only half updated; empty if it is whole.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        traits: Traits,
        policy: OffloadPolicy,
        device: torch.device,
        names: dict[Tensor, str],
        together: Mapping[Tensor, int],
    ) -> None:
        self.cls = cls
        self.policy = policy
        self.device = device
        self.names = names
        self.failure = ""
        self.layouts = Layouts(cls, traits, policy.master_weights)
        self.habits = traits.habits
        self._pin = device.type != "cpu" if policy.pin_memory is None else policy.pin_memory
        self._link: DeviceLink = device_link(device)
        self._pipeline = Pipeline(self._link, serial=policy.serial, beside_compute=policy.updates_beside_compute)
        self.plan = Plan(self.layouts, policy, device, pin=self._pin, staged=self._pipeline.buckets, together=together)
        self.lending = Lending(self.plan, self._pipeline)
        self._ring: Tensor | None = None
        self._bound: dict[int, list[BoundRange]] = {}
        self._schedules: dict[tuple[BucketStep, ...], list[Action]] = {}
        self._param_ids: list[int] = []
        self._unplanned: list[Tensor] = []  # in the groups, but without room: they never had a gradient
        self._layout_keys: list[object] = []  # of each group, when its state was last planned
        self._begun: _BegunStep | None = None  # in a backward, and not ended by step() yet
        self._last_steps: tuple[BucketStep, ...] = ()  # what the last step updated
        self._held: dict[int, list[tuple[Tensor, Tensor | None, _BegunStep]]] = {}  # by bucket: what updates still read
        self.backward_order: list[int] = []  # buckets as their gradients became final in the last backward
        self._link.join()
        # Ring and arena must not go while a copy still uses them. This runs before the attributes are dropped.
        weakref.finalize(self, _let_go, self._link).atexit = False

    # What is offloaded -------------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer, params: Iterable[Tensor], states: StateStore) -> None:
        """Take over the state of ``params``: what exists moves home, for the rest there is room.

        Raises:
            MemoryError: host memory does not suffice; nothing has changed.
            ValueError: the optimizer cannot be offloaded with these parameters.
        """
        params = list(params)
        if not params:
            return
        if self._begun is not None and self._begun.done:
            self.check_usable("taking over more parameters")
        self._drop_begun()
        self._layout_keys += self._keys(optimizer)[len(self._layout_keys) :]
        self._param_ids = []  # look at the groups again
        for param in params:
            state = states.get(param)
            for name in state.keys() - self.habits.without_dispensable(param, state).keys():
                del state[name]
        self._pipeline.synchronize()  # places in the ring may change, and waits know only the new ones
        self.plan.add(optimizer, params, states, self.names)
        self._bound.clear()
        self._schedules.clear()
        adopt((self.plan.shards[param], states.get(param)) for param in params)

    def clear(self) -> None:
        """Drop all homes, after the last store."""
        self._drop_begun()
        self._pipeline.synchronize()
        self.plan.clear()
        self._bound.clear()
        self._schedules.clear()

    def rebuild(self, optimizer: Optimizer, states: StateStore) -> None:
        """Plan anew, for state whose layout changed. Old and new homes exist side by side until this returns."""
        self._pipeline.synchronize()
        dead = [param for param, shard in self.plan.shards.items() if self._is_dead(shard, states)]
        kept = [param for param in self.plan.shards if self.plan.shards[param].group >= 0]
        old = {param: dict(states.get(param)) for param in kept}
        for param in dead:
            self.names.pop(param, None)
        self.clear()
        for param in old:
            states.get(param).clear()  # so that the layout is learnt under the new hyperparameters
        try:
            self.add(optimizer, old, states)
        finally:
            for param, state in old.items():
                if state:
                    states.of(param).update(state)
        adopt((self.plan.shards[param], states.get(param)) for param in old)

    def install(self, optimizer: Optimizer, states: StateStore, loaded: Mapping[Tensor, UserState]) -> None:
        """Make ``loaded`` the whole state; ``states`` is empty, and param groups are those loaded with it.

        Tensors of ``loaded`` are as in a state dict. What the optimizer keeps in another form is made one parameter at
        a time, so that it takes no more device memory than that.
        """
        self._drop_begun()
        self.wait_for_all()
        self._pipeline.synchronize()
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in loaded if param not in self.plan.shards], states)
        self.lending.wait()
        if self.habits.keeps_raw_state:
            for param, saved in loaded.items():
                states.of(param).update(saved)
            adopt((self.plan.shards[param], states.of(param)) for param in loaded)
        for param, saved in loaded.items():
            shard, state = self.plan.shards[param], states.of(param)
            if not self.habits.keeps_raw_state:
                state.update(as_kept(self.habits, optimizer, shard, saved))
                adopt([(shard, state)])
            if rebuild_master(self.habits, optimizer, shard, state):
                adopt([(shard, state)])
        self.failure = ""

    def as_saved(self, optimizer: Optimizer, param: Tensor, state: UserState, *, empty: bool = False) -> UserState:
        """The state of one parameter as a state dict has it: homes, or tensors in host memory made from them.

        Args:
            optimizer: whose.
            param: of which.
            state: as the optimizer keeps it.
            empty: what it holds means nothing; it is to be loaded into.
        """
        homes = self.plan.shards[param].homes if param in self.plan.shards else {}
        return as_saved(self.habits, optimizer, param, state, homes, empty=empty)

    def reserved_state(self, optimizer: Optimizer, states: StateStore) -> dict[Tensor, UserState]:
        """What parameters without state have room for: their homes, and counters like those they will get, at zero.

        For a load to write into. Nothing of it is in ``states``, and what the homes hold means nothing.
        """
        self._follow_groups(optimizer, states)
        return {
            param: {name: _zero_like(example) for name, example in shard.layout.scalars.items()} | shard.homes
            for param, shard in self.plan.shards.items()
            if shard.group >= 0 and not states.get(param)
        }

    def return_to_device(self, states: StateStore) -> None:
        """Replace every home in ``states`` by a tensor on the device, of the type that the optimizer made."""
        self._drop_begun()
        self.wait_for_all()
        self._pipeline.synchronize()
        # What the user has exchanged since the last step counts.
        self.lending.wait()
        adopt((shard, states.get(param)) for param, shard in self.plan.shards.items())
        for param, shard in self.plan.shards.items():
            state = states.get(param)
            for name in shard.homes.keys() & state.keys():
                state[name] = shard.on_device(name, self.device)
            if shard.master != "none":
                drop_master(shard, state)

    # A step ------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> bool:
        """Update every parameter that has a gradient, and count the step as the optimizer would.

        Returns when everything is issued: whether there was any gradient. Parameters are new in the order of the
        current stream; under ``overlap_forward`` only once :meth:`wait_for` has been called for them.
        """
        self.check_usable("step()", mid_step=True)
        ended = self._resume(optimizer, states, kwargs)
        if ended is not None:
            self._end(ended, states)
        self._follow_groups(optimizer, states)
        updated = self._shards_with_grad(optimizer, states)
        steps = self._bucket_steps(updated, states)
        created = [shard.param for shard in updated if not states.get(shard.param)]
        if self._begun is not None:
            fits = sorted(self._begun.steps) == sorted(steps) and self._begun.versions == self._home_versions(
                self._begun, states
            )
            if not fits:
                self._drop_begun()
        begun = ended or self._begun or self._begin(optimizer, kwargs, steps, states)
        if not steps:
            # Groups whose parameters have no gradient count the step all the same.
            begun.shadow.run(begun.shared, [[] for _ in optimizer.param_groups], {}, begun.logical.kwargs)
        left = tuple(step for step in steps if step.bucket not in begun.done)
        if begun.done and left:  # the backward had not known that these would have gradients
            begun.steps, begun.moving, begun.in_backward = left, None, False
            self._pipeline.begin(self._schedule(left))
        if left or not steps:
            self._pipeline.updates_after_compute()
            self._advance(begun, states)
            self._finish(begun, states)
        if created:
            # In the order of the param groups: as without offload, and the same on every rank, whatever its buckets.
            new = set(created)
            states.move_last([param for group in optimizer.param_groups for param in group["params"] if param in new])
        with self._pipeline.updating():
            self._commit(begun, optimizer)
        self._pipeline.end_updates()
        self._begun, self._last_steps = None, steps
        if not self.policy.overlap_forward:
            self.wait_for_all()
        return bool(steps)

    def _end(self, begun: "_BegunStep", states: StateStore) -> None:
        """All gradients that there are going to be are there: the rest of what the backward has begun."""
        idle = {step.bucket for step in begun.steps if not self._covered([step])} - set(begun.done)
        self._pipeline.skip(idle)
        begun.steps = tuple(step for step in begun.steps if step.bucket not in idle)
        self._pipeline.updates_after_compute()
        self._advance(begun, states)
        self._finish(begun, states)
        self._begun = None

    def _drop_begun(self) -> None:
        """Forget what the backward has begun: it is to be done again, or the state is to be replaced."""
        if self._begun is not None:
            if self._begun.done:
                for param in filter(is_spent, self._begun.spent):
                    param.grad = None  # used; in a step after this it would be used twice
                self._pipeline.abandon()
            else:
                self._pipeline.cancel()
            self._begun = None

    def _begin(
        self, optimizer: Optimizer, kwargs: Mapping[str, Any], steps: tuple[BucketStep, ...], states: StateStore
    ) -> "_BegunStep":
        """Note where a logical step starts, and take up its schedule."""
        self.wait_for_all()  # the gradients of the last step are let go
        logical = self.habits.begin(optimizer, kwargs)
        shared = self._shared_values(optimizer, logical)
        begun = _BegunStep(Shadow(self.cls), shared, logical, len(optimizer.param_groups), steps)
        self._pipeline.begin(self._schedule(steps))
        if self.policy.uses_backward:
            # Updates write resident state where it is, which counts as well.
            offloaded = (shard for shard in self.plan.shards.values() if not shard.resident)
            begun.watched = [shard for shard in offloaded if states.get(shard.param)]
            begun.versions = self._home_versions(begun, states)
        return begun

    def _advance(
        self,
        begun: "_BegunStep",
        states: StateStore,
        may_update: Callable[[int], bool] = lambda number: True,
        most_loads: int | None = None,
    ) -> None:
        """Issue what of a step may be issued now."""
        habits = self.habits

        def update(number: int) -> None:
            if begun.moving is None:
                # In the backward, more gradients are still to come: whatever is loaded may be stored elsewhere.
                shards = self._covered(begun.steps, with_gradient=not begun.in_backward)
                begun.moving, begun.made_way = self.lending.make_way(shards, begun.steps), begun.steps
            for ranges in same_order_on_ranks(self._bind(number), group_by_group=habits.group_by_group):
                update_bucket(
                    begun.shadow, begun.shared, habits, ranges, begun.group_count, states, begun.logical.kwargs
                )
            begun.done.append(number)
            if self.policy.updates_beside_compute:
                # Whoever clears gradients meanwhile must not free what an update is still to read.
                covers = [shard.param for shard in self.plan[number].covers()]
                self._held[number] = [(param, habits.gradient(param), begun) for param in covers]

        try:
            with self._link.in_use:  # another thread's optimizer may want a larger ring
                self._take_ring()
                self._pipeline.advance(update, may_update, most_loads)
        except BaseException as error:
            stored = self._pipeline.stored(begun.done)
            moved = [shard for shard in begun.moving or () if stored.issuperset(shard.buckets)]
            self.lending.settle(moved, begun.steps, states)
            self._restore_gradients(begun)
            self._note_failure(error, begun.done, begun.steps)
            self._begun = None
            raise

    def _finish(self, begun: "_BegunStep", states: StateStore) -> None:
        self._pipeline.finish()
        done = set(begun.done)
        self.lending.settle([s for s in begun.moving or () if done.issuperset(s.buckets)], begun.made_way, states)

    def _covered(self, steps: Iterable[BucketStep], *, with_gradient: bool = True) -> list[StateShard]:
        """The shards in these buckets, once each; only those with a gradient, or all."""
        shards = dict.fromkeys(shard for step in steps for shard in self.plan[step.bucket].covers())
        gradient = self.habits.gradient
        return [s for s in shards if s.group >= 0 and not (with_gradient and gradient(s.param) is None)]

    # In the backward ---------------------------------------------------------------------------------------------

    def gradients_reduced(self, optimizer: Optimizer, states: StateStore, final: Set[Tensor], event: object) -> None:
        """The backward has reduced more gradients: load, and update what may be updated.

        Args:
            optimizer: whose backward this may be.
            states: its state.
            final: all parameters whose gradients are final by now, once ``event`` has passed.
            event: of torch, or ``None``.
        """
        begun = self._begun
        if begun is None:
            begun = self._begin_early(optimizer, states)
            if begun is None:
                return
        if event is not None:
            self._pipeline.updates_after(EventMark(event))  # type: ignore[arg-type]
        updates = self.policy.update == "backward"

        def may_update(number: int) -> bool:
            return updates and all(shard.param in final for shard in self.plan[number].covers() if shard.group >= 0)

        with torch.no_grad():
            self._advance(begun, states, may_update, None if updates else _LOADS_FOR_EACH_GROUP)
        self._spend(begun)

    def _spend(self, begun: "_BegunStep") -> None:
        """Put gradients out of reach of which nothing is left to be used."""
        done = set(begun.done)
        for shard in dict.fromkeys(shard for number in begun.done for shard in self.plan[number].covers()):
            grad = shard.param.grad
            if grad is not None and shard.param not in begun.spent and done.issuperset(shard.buckets):
                begun.spent[shard.param] = grad, version_of(shard.param)
                spend(shard.param)

    def refuse_second_backward(self) -> None:
        """A backward is about to add to gradients that an update may have used.

        Raises:
            RuntimeError: it has.
        """
        if self._begun is None or not self._begun.done:
            return
        self._drop_begun()
        self.failure = "a backward came after the one whose gradients had been updated with already"
        raise RuntimeError(
            "a second backward before step(), with OffloadPolicy(update='backward'): parameters have been updated with "
            "the gradients of the first one. The number of backwards before each step must not change (it was learnt "
            "in the first steps); use update='step', or one step for each backward."
        )

    def _begin_early(self, optimizer: Optimizer, states: StateStore) -> "_BegunStep | None":
        """Begin a step in the backward, if it will be like the last one."""
        ids = _param_ids(optimizer)
        as_before = ids == self._param_ids and self._keys(optimizer) == self._layout_keys
        if self.failure or not as_before or not self._is_whole(self._last_steps):
            return None
        if self.policy.update == "backward":
            order = self._backward_order(self._last_steps)
        else:
            order = self._last_steps
        self._begun = self._begin(optimizer, {}, order, states)
        self._begun.in_backward = True
        self._pipeline.updates_after_compute()
        return self._begun

    def _is_whole(self, steps: Sequence[BucketStep]) -> bool:
        """Whether these are all buckets of some groups, with state in each.

        A parameter of which only some buckets were updated in the backward would be counted too early for the others.
        """
        numbers = {step.bucket for step in steps}
        touched = {shard.together for number in numbers for shard in self.plan[number].covers()}
        needed = {n for s in self.plan.shards.values() if s.together in touched for n in s.buckets if s.group >= 0}
        return bool(steps) and needed <= numbers and all(step.load or not step.store for step in steps)

    def _backward_order(self, steps: Sequence[BucketStep]) -> tuple[BucketStep, ...]:
        """As their gradients become final: learnt in the last backward."""
        known = {number: at for at, number in enumerate(self.backward_order)}
        return tuple(sorted(steps, key=lambda step: known.get(step.bucket, len(known))))

    def _resume(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> "_BegunStep | None":
        """The step of which the backward has updated a part. One of which it has only loaded some is kept or dropped.

        Raises:
            RuntimeError: it cannot go on, and parameters have been updated.
        """
        begun = self._begun
        if begun is None:
            return None
        ids = _param_ids(optimizer)
        unchanged = ids == self._param_ids and begun.shared.still_starts_from(optimizer)
        if not begun.done:
            if not unchanged or kwargs:
                self._drop_begun()  # loads only; they are made again
            return None
        problem = ""
        if not unchanged:
            problem = "hyperparameters have changed since then"
        elif kwargs or getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf"):
            problem = "a GradScaler decides only now whether there is a step"
        elif begun.versions != self._home_versions(begun, states):
            problem = "optimizer.state has changed since then"
        else:
            for param, (_, version) in begun.spent.items():
                if not is_spent(param):
                    problem = f"the gradient of {self.names.get(param, 'a parameter')} has been exchanged since then"
                elif version_of(param) != version:
                    problem = f"{self.names.get(param, 'a parameter')} has been written since then"
        self._restore_gradients(begun)
        if problem:
            self._drop_begun()
            self.failure = f"the update began in the backward, and {problem}"
            raise RuntimeError(
                f"step(), with OffloadPolicy(update='backward'): parameters have been updated in the backward, and "
                f"{problem}. Use update='step' for a loop that does this."
            )
        return begun

    def _restore_gradients(self, begun: "_BegunStep") -> None:
        for param, (grad, _) in begun.spent.items():
            restore(param, grad)

    def _home_versions(self, begun: "_BegunStep", states: StateStore) -> list[object]:
        """Changes when somebody writes into the state that there was when the step began."""
        found: list[object] = []
        for shard in begun.watched:
            state = states.get(shard.param)
            for name, home in shard.homes.items():
                leaves = [leaf._version for leaf in shard.home_leaves[name]]
                found.append(state.get(name) is home and (version_of(home), leaves))
        return found

    # New parameters ----------------------------------------------------------------------------------------------

    def buckets_of(self, params: Iterable[Tensor]) -> set[int]:
        """The buckets in which the state of any of these is."""
        return {number for param in params if param in self.plan.shards for number in self.plan.shards[param].buckets}

    def wait_for(self, buckets: Iterable[int], stream: torch.Stream | None = None) -> None:
        """Let what follows on ``stream`` (``None``: the current one) see the parameters of these buckets new."""
        for number in buckets:
            self._pipeline.wait_updated(number, stream)
            if stream is None:
                self._held.pop(number, None)

    def wait_for_all(self) -> None:
        """Let what follows on the current stream see all parameters and counters new."""
        self._pipeline.wait_all_updated()
        self._held.clear()

    def _shared_values(self, optimizer: Optimizer, logical: LogicalStep) -> SharedValues:
        implementations = _pinned_implementations(optimizer)
        pinned = [{**one, **other} for one, other in zip(implementations, logical.pinned, strict=True)]
        return SharedValues(
            optimizer,
            pinned,
            logical.attributes,
            self.habits.attributes_by_param,
            # A scheduler may write a tensor before an update beside the compute stream has read it.
            own_read_only=self.policy.updates_beside_compute,
        )

    def _shards_with_grad(self, optimizer: Optimizer, states: StateStore) -> list[StateShard]:
        """The shards to update. Takes over parameters that have a gradient for the first time, and exchanged state."""
        eager, gradient = self.habits.state_without_gradient, self.habits.gradient
        new = [param for param in self._unplanned if eager or gradient(param) is not None]
        for param in (*new, *self.plan.shards):
            grad = gradient(param)
            problem = grad is not None and unsupported_gradient(param, grad)
            if problem:
                name = self.names.get(param, "a parameter")
                raise RuntimeError(f"{name} cannot be updated: {problem}. Nothing has been changed.")
        if new:
            self.add(optimizer, new, states)
        shards = self.plan.shards.values()
        updated = [
            shard
            for shard in shards
            if shard.group >= 0 and (gradient(shard.param) is not None or (eager and not states.get(shard.param)))
        ]
        entries = [(shard, states.get(shard.param)) for shard in updated]
        exchanged = [(shard, state) for shard, state in entries if state and is_exchanged(shard, state)]
        if exchanged:
            self._pipeline.synchronize()  # what was put there may be another parameter's home, still being stored
            self.lending.wait()
            adopt(exchanged)
        return updated

    def _follow_groups(self, optimizer: Optimizer, states: StateStore) -> None:
        """Follow param groups that were edited, and hyperparameters that decide which state there is."""
        ids = _param_ids(optimizer)
        regrouped = ids != self._param_ids
        if regrouped:
            self._param_ids = ids
            self._unplanned = []
            for shard in self.plan.shards.values():
                shard.group = -1  # no longer in any group, unless found below
            for number, group in enumerate(optimizer.param_groups):
                for param in group["params"]:
                    if param in self.plan.shards:
                        self.plan.shards[param].group = number
                    else:
                        self._unplanned.append(param)
        keys = self._keys(optimizer)
        if keys != self._layout_keys:
            live = [shard for shard in self.plan.shards.values() if shard.group >= 0]
            self._check_state_is_complete(optimizer, live, states)
            self._layout_keys = keys
            if not all(self._still_fits(optimizer, shard) for shard in live):
                self.rebuild(optimizer, states)
        elif regrouped and self._mostly_dead(states):
            self.rebuild(optimizer, states)

    def _check_state_is_complete(self, optimizer: Optimizer, shards: Sequence[StateShard], states: StateStore) -> None:
        """The optimizers of torch look for all of their state once there is some; better before a step than in it."""
        if not self.layouts.traits.known:
            return
        for shard in shards:
            state = states.get(shard.param)
            # A master of ours is made in the next step, whenever that is.
            needed = self._learnt(optimizer, shard).values.keys() - ({MASTER} if shard.master != "none" else set())
            missing = [name for name in needed if name not in state]
            if state and missing:
                raise RuntimeError(
                    f"The hyperparameters of param_groups[{shard.group}] now need state {missing}, which {shard.name} "
                    "does not have: it was created under other ones. Set them back, or add that state. Nothing has "
                    "been changed."
                )

    def _mostly_dead(self, states: StateStore) -> bool:
        """Whether most of the memory belongs to parameters that the user has taken out, with their state."""
        shards = self.plan.shards.values()
        dead_bytes = sum(shard.nbytes for shard in shards if self._is_dead(shard, states))
        return 2 * dead_bytes > sum(shard.nbytes for shard in shards)

    def _is_dead(self, shard: StateShard, states: StateStore) -> bool:
        return shard.group < 0 and not states.get(shard.param)

    def _keys(self, optimizer: Optimizer) -> list[object]:
        return [layout_key(group, self.layouts.counters) for group in optimizer.param_groups]

    def _commit(self, begun: "_BegunStep", optimizer: Optimizer) -> None:
        shared = begun.shared
        shared.commit(optimizer)
        begun.logical.finish()
        if not shared.changed_entries <= self.layouts.counters:
            self.layouts.count(shared.changed_entries)
            self._layout_keys = self._keys(optimizer)

    def _still_fits(self, optimizer: Optimizer, shard: StateShard) -> bool:
        if len(shard.buckets) > 1 and not self.plan.may_cut(shard, optimizer.param_groups[shard.group]):
            return False  # another implementation now, which rounds pieces differently
        # State that exists keeps its place, also where the new hyperparameters would no longer create it.
        return self._learnt(optimizer, shard).values.keys() <= shard.layout.values.keys()

    def _learnt(self, optimizer: Optimizer, shard: StateShard) -> StateLayout:
        return self.layouts.learn(optimizer, shard.param, optimizer.param_groups[shard.group], shard.name)

    def _bucket_steps(self, updated: Sequence[StateShard], states: StateStore) -> tuple[BucketStep, ...]:
        active = {number for shard in updated for number in shard.buckets}
        steps = []
        for number in active:
            moves = bool(self._pipeline.buckets[number].copies)
            # Also for state of parameters without a gradient: the whole bucket is stored afterwards.
            exists = moves and any(states.get(shard.param) for shard in self.plan[number].covers())
            steps.append(BucketStep(number, load=exists, store=moves))
        # State that is on the device already is updated while the first loads arrive. Not where the optimizer sees
        # DTensors: which buckets move differs between ranks, and its collectives must come in the same order.
        resident_first = self.layouts.traits.elementwise
        return tuple(sorted(steps, key=lambda step: (resident_first and step.store, step.bucket)))

    def _schedule(self, steps: tuple[BucketStep, ...]) -> list[Action]:
        if steps not in self._schedules:
            if len(self._schedules) >= _KEPT_SCHEDULES:
                self._schedules.clear()
            staged = enumerate(self._pipeline.buckets)
            placements = {number: bucket.placement for number, bucket in staged if bucket.placement is not None}
            self._schedules[steps] = build_schedule(steps, placements)
        return self._schedules[steps]

    def _take_ring(self) -> None:
        ring = self._pipeline.ring(self.plan.ring_bytes) if self.plan.ring_bytes else None
        if ring is not self._ring:
            self._bound.clear()
            self._ring = ring

    def _bind(self, number: int) -> list[BoundRange]:
        """What the optimizer sees of a bucket; kept from step to step while the storages stay where they are."""
        bound = self._bound.get(number)
        if bound is None or any(not part.still_valid() for part in bound):
            bound = self._bound[number] = self.plan.bind(number, self._ring)
        return bound

    # Faults ------------------------------------------------------------------------------------------------------

    def _note_failure(self, error: BaseException, done: Sequence[int], steps: Sequence[BucketStep]) -> None:
        self._pipeline.abandon()
        torn = [step.bucket for step in steps if step.bucket not in done][:1]
        self.failure = (
            f"an earlier step() stopped with {type(error).__name__}: {error}. {len(done)} of {len(steps)} buckets had "
            f"been updated (parameters {self._names_in(done)}); {self._names_in(torn)} may be half updated; the others "
            "are as before that step"
        )

    def _names_in(self, buckets: Sequence[int]) -> str:
        names = list(dict.fromkeys(shard.name for number in buckets for shard in self.plan[number].covers()))
        if not names:
            return "none"
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def check_usable(self, what: str, *, mid_step: bool = False) -> None:
        """Refuse to go on with half updated state.

        Args:
            what: is about to be done.
            mid_step: it is the end of a step that the backward has begun.

        Raises:
            RuntimeError: an exception ended an earlier step; says which parameters are new.
        """
        if self._begun is not None and self._begun.done and not mid_step:
            raise RuntimeError(
                f"{what} refused: the backward has updated part of the state (OffloadPolicy(update='backward')). Call "
                "step() first."
            )
        if self.failure:
            raise RuntimeError(
                f"{what} refused: {self.failure}. Load a checkpoint of the model and of this optimizer "
                "(load_state_dict) before going on."
            )

    # Looking at it -----------------------------------------------------------------------------------------------

    def wait_home(self, param: Tensor) -> None:
        """Block the host until the home of this parameter's state is up to date."""
        shard = self.plan.shards.get(param)
        if shard is not None:
            for number in shard.buckets:
                self._pipeline.wait_home(number)
        self._wait_counted()

    def _wait_counted(self) -> None:
        # Counters on the device, and state that is resident, are new when the update has run.
        if self._held:
            self._pipeline.wait_all_updated()

    def wait_all_home(self) -> None:
        """Block the host until every home is up to date."""
        for number in range(len(self._pipeline.buckets)):
            self._pipeline.wait_home(number)
        self._wait_counted()

    def synchronize(self) -> None:
        """Block the host until every transfer and every update has finished."""
        self._pipeline.synchronize()
        self.wait_for_all()

    def report(self, states: StateStore) -> OffloadReport:
        """Bytes by place, and the times of the last step; waits for that step."""
        times = self._pipeline.last_step_times()
        shards = list(self.plan.shards.values())
        host_state_bytes = sum(shard.nbytes for shard in shards if not shard.resident)
        return OffloadReport(
            optimizer=self.cls.__name__,
            host_state_bytes=host_state_bytes,
            resident_state_bytes=sum(shard.nbytes for shard in shards if shard.resident),
            other_state_bytes=sum(_other_bytes(shard, states.get(shard.param)) for shard in shards),
            left_out=tuple(dict.fromkeys(name for shard in shards for name in shard.layout.left_out)),
            host_bytes=sum(region.nbytes for region in self.plan.regions),
            snapshot_bytes=self.plan.spare_bytes,
            pinned=self._pin,
            ring_bytes=self.plan.ring_bytes,
            buckets=sum(bool(bucket.copies) for bucket in self._pipeline.buckets),
            device_peak_bytes=torch.accelerator.max_memory_allocated(self.device) if self.device.type != "cpu" else 0,
            loaded_bytes=times.loaded_bytes,
            stored_bytes=times.stored_bytes,
            load_gb_per_s=_gb_per_s(times.loaded_bytes, times.load_ms),
            store_gb_per_s=_gb_per_s(times.stored_bytes, times.store_ms),
            step_ms=times.step_ms,
            update_ms=times.update_ms,
            exposed_ms=times.exposed_ms,
            notes=tuple(self.notes()),
        )

    def notes(self) -> Iterable[str]:
        """What the user should know about this offload."""
        shards = self.plan.shards.values()
        if not any(shard.nbytes for shard in shards if not shard.resident):
            if any(shard.resident for shard in shards):
                yield "NOTHING IS OFFLOADED: all of the state fits into resident_bytes."
            else:
                why = (
                    f"{self.cls.__name__} keeps no state for these parameters" if shards else "no parameter is trained"
                )
                yield f"NOTHING IS OFFLOADED: {why}."
        if self.device.type == "cpu":
            yield "The parameters are on the CPU: offloading works, but there is nothing to gain."
        if self.plan.ring_bytes > self.policy.ring_bytes:
            yield (
                f"The largest bucket that cannot be cut needs {self.plan.ring_bytes} bytes of staging, more than "
                f"staging_bytes={self.policy.staging_bytes} leaves ({self.policy.ring_bytes})."
            )
        left_out = list(dict.fromkeys(name for shard in shards for name in shard.layout.left_out))
        if left_out:
            yield f"State {left_out} is not made of dense tensors and stays where the optimizer put it."
        if self.failure:
            yield f"Not usable: {self.failure}."


@dataclass(eq=False)
class _BegunStep:
    """A logical step of which something has been issued.

    Attributes:
        steps: the buckets of its schedule.
        moving: shards that are stored in their other place; ``None`` before the first update.
        made_way: the buckets that this was decided for.
        in_backward: begun before all gradients are there.
        done: the buckets that have been updated.
        watched: shards that had state when loading began.
        versions: of their homes at that time.
        spent: the gradients used in the backward, which are out of the user's reach until ``step()``; and the version
            of the parameter after its update.
    """

    shadow: Shadow
    shared: SharedValues
    logical: LogicalStep
    group_count: int
    steps: tuple[BucketStep, ...]
    moving: list[StateShard] | None = None
    made_way: tuple[BucketStep, ...] = ()
    in_backward: bool = False
    done: list[int] = field(default_factory=list)
    watched: list[StateShard] = field(default_factory=list)
    versions: list[object] = field(default_factory=list)
    spent: dict[Tensor, tuple[Tensor, tuple[int, int]]] = field(default_factory=dict)


_KEPT_SCHEDULES = 4
"""One pattern of gradients at a time is the rule, in the order of ``step()`` and in that of the backward."""

_LOADS_FOR_EACH_GROUP = 1
"""More at once would hold up the small copies that fully_shard makes for its next reduction."""


def engine_of(optimizer: object) -> Engine | None:
    """The engine of an offloaded optimizer; ``None`` for anything else."""
    attachment = getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE)
    engine: Engine | None = None if attachment is None else attachment.engine
    return engine


def _pinned_implementations(optimizer: Optimizer) -> list[dict[str, object]]:
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


def _param_ids(optimizer: Optimizer) -> list[int]:
    return [id(param) for group in optimizer.param_groups for param in group["params"]]


def _zero_like(example: object) -> object:
    return torch.zeros_like(example) if isinstance(example, Tensor) else type(example)()


def _other_bytes(shard: StateShard, state: UserState) -> int:
    tensors = [value for name, value in state.items() if isinstance(value, Tensor) and name not in shard.homes]
    return sum(leaf.numel() * leaf.element_size() for value in tensors for leaf in leaves_of(value))


def _gb_per_s(nbytes: int, ms: float) -> float:
    return nbytes / ms / 1e6 if ms > 0 else 0.0


def _let_go(link: DeviceLink) -> None:
    link.synchronize()
    link.leave()
