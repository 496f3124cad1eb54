"""What an attached optimizer consists of, and how one logical step uses it.

    optimizer.state ──▶ Plan: shards, buckets, homes ──▶ which buckets have gradients now
                                                               │
              new parameters ◀── pipeline ◀── schedule ◀───────┘

The engine never refers to the optimizer (it is handed in on each call), so dropping the optimizer frees everything.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .adopt import adopt, is_exchanged
from .forms import as_kept, as_saved, drop_master, rebuild_master
from .fsdp import foreach_supports, unsupported_gradient
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
from .transfer import DeviceLink, device_link
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
        self._pipeline = Pipeline(self._link, serial=policy.serial)
        self.plan = Plan(self.layouts, policy, device, pin=self._pin, staged=self._pipeline.buckets)
        self.lending = Lending(self.plan, self._pipeline)
        self._ring: Tensor | None = None
        self._bound: dict[int, list[BoundRange]] = {}
        self._schedules: dict[tuple[BucketStep, ...], list[Action]] = {}
        self._param_ids: list[int] = []
        self._unplanned: list[Tensor] = []  # in the groups, but without room: they never had a gradient
        self._layout_keys: list[object] = []  # of each group, when its state was last planned
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
        self._param_ids = []  # look at the groups again
        self._layout_keys += self._keys(optimizer)[len(self._layout_keys) :]
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

        Returns when everything is issued (parameters are new in the order of the current stream): whether there was
        any gradient.
        """
        self.check_usable("step()")
        self._follow_groups(optimizer, states)
        updated = self._shards_with_grad(optimizer, states)
        steps = self._bucket_steps(updated, states)
        logical = self.habits.begin(optimizer, kwargs)
        shared = self._shared_values(optimizer, logical)
        shadow = Shadow(self.cls)
        group_count = len(optimizer.param_groups)
        if not steps:
            # Groups whose parameters have no gradient count the step all the same.
            shadow.run(shared, [[] for _ in range(group_count)], {}, logical.kwargs)
            self._commit(shared, logical, optimizer)
            self._pipeline.run([], lambda number: None)  # for the report: this step moved nothing
            return False
        created = [shard.param for shard in updated if not states.get(shard.param)]
        moving = self.lending.make_way(updated, steps)
        done: list[int] = []

        def update(number: int) -> None:
            for ranges in same_order_on_ranks(self._bind(number), group_by_group=self.habits.group_by_group):
                update_bucket(shadow, shared, self.habits, ranges, group_count, states, logical.kwargs)
            done.append(number)

        try:
            with self._link.in_use:  # another thread's optimizer may want a larger ring
                self._take_ring()
                self._pipeline.run(self._schedule(steps), update)
        except BaseException as error:
            stored = self._pipeline.stored(done)
            self.lending.settle([shard for shard in moving if stored.issuperset(shard.buckets)], steps, states)
            self._note_failure(error, done, steps)
            raise
        self.lending.settle(moving, steps, states)
        if created:
            # In the order of the param groups: as without offload, and the same on every rank, whatever its buckets.
            new = set(created)
            states.move_last([param for group in optimizer.param_groups for param in group["params"] if param in new])
        self._commit(shared, logical, optimizer)
        return True

    def _shared_values(self, optimizer: Optimizer, logical: LogicalStep) -> SharedValues:
        implementations = _pinned_implementations(optimizer)
        pinned = [{**one, **other} for one, other in zip(implementations, logical.pinned, strict=True)]
        return SharedValues(optimizer, pinned, logical.attributes, self.habits.attributes_by_param)

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
        ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
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

    def _commit(self, shared: SharedValues, logical: LogicalStep, optimizer: Optimizer) -> None:
        shared.commit(optimizer)
        logical.finish()
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
            self._schedules.clear()  # one pattern of gradients at a time is the rule
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

    def check_usable(self, what: str) -> None:
        """Refuse to go on with half updated state.

        Raises:
            RuntimeError: an exception ended an earlier step; says which parameters are new.
        """
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

    def wait_all_home(self) -> None:
        """Block the host until every home is up to date."""
        for number in range(len(self._pipeline.buckets)):
            self._pipeline.wait_home(number)

    def synchronize(self) -> None:
        """Block the host until every transfer and every update has finished."""
        self._pipeline.synchronize()

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
