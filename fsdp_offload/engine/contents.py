"""The parameters of an optimizer whose state has homes, and how they follow its param groups.

It never refers to the optimizer (which is handed in on each call), so dropping the optimizer frees everything.
"""

import itertools
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..cpu_update.updates import HostUpdates
from ..device.link import DeviceLink, device_link
from ..fsdp.dtensor import local_shard, over_local
from ..fsdp.gradients import is_zeroed
from ..fsdp.optim import unsupported_gradient
from ..optimizers import Capabilities
from ..optimizers.kept_state import LayoutKey, Layouts, layout_key, zero_like
from ..optimizers.masters import MASTER, can_rebuild
from ..policy import OffloadPolicy
from ..state.layout import StateLayout, in_dtypes_of, is_trained
from ..state.shard import StateShard
from ..state.store import StateStore, UserState, adopt, is_exchanged
from .homes import Plan
from .lending import Lending


class Contents:
    """The parameters of one optimizer whose state is offloaded.

    Attributes:
        cls: the user's optimizer class.
        policy: in force.
        device: of the parameters.
        names: of all its parameters, for messages.
        layouts: of their state.
        conventions: of the class.
        pinned: whether host memory is page-locked.
        host: updates the CPU's share of its state; ``None`` if there is none.
        plan: shards, homes and buckets.
        lending: who reads which homes.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        capabilities: Capabilities,
        policy: OffloadPolicy,
        device: torch.device,
        names: dict[Tensor, str],
        together: Mapping[Tensor, int],
        bucket_bytes: int,
        host: HostUpdates | None,
    ) -> None:
        self.cls, self.policy, self.device, self.names, self.host = cls, policy, device, names, host
        self.layouts = Layouts(cls, capabilities)
        self.conventions = capabilities.conventions
        self.pinned = policy.pins(device.type)
        self._link: DeviceLink = device_link(device)
        self.plan = Plan(
            self.layouts, policy, device, bucket_bytes=bucket_bytes, pin=self.pinned, together=together, host=host
        )
        self.lending = Lending(self.plan, partial(_settle, weakref.ref(self)))
        self._param_ids: list[list[int]] = []  # of each group
        self._unplanned: list[Tensor] = []  # in the groups, but without room: they never had a gradient
        self._layout_keys: list[LayoutKey] = []  # of each group, when its state was last planned
        # Homes and places must not go while a copy still uses them. This runs before the attributes are dropped.
        weakref.finalize(self, _let_go, self._link).atexit = False

    def settle(self) -> None:
        """Bring everything home: homes are about to be written, or planned anew. A failure of the CPU is not raised."""
        raise NotImplementedError

    def add(self, optimizer: Optimizer, params: Iterable[Tensor], states: StateStore) -> None:
        """Take over the state of ``params``: what exists moves home, and the rest gets room there.

        Raises:
            MemoryError: host memory does not suffice; nothing has changed.
            ValueError: the optimizer cannot be offloaded with these parameters.
        """
        params = list(params)
        if not params:
            return
        self._layout_keys += self._keys(optimizer)[len(self._layout_keys) :]
        self._param_ids = []  # look at the groups again
        for param in params:
            state = states.get(param)
            for name in state.keys() - self.conventions.without_dispensable(param, state).keys():
                del state[name]
        self.settle()
        self.plan.add(optimizer, params, states, self.names)
        if self.host is not None:
            self.host.forget()  # buckets are others from now on
        adopt((self.plan.shards[param], states.get(param)) for param in params)
        for param in params:
            self.plan.shards[param].existed = bool(states.get(param))

    def clear(self) -> None:
        """Drop all homes, after the last store."""
        self.settle()
        self.plan.clear()
        if self.host is not None:
            self.host.forget()

    def rebuild(self, optimizer: Optimizer, states: StateStore, as_made: Set[Tensor] = frozenset()) -> None:
        """Plan anew, for state whose layout changed. Old and new homes exist side by side until this returns.

        Args:
            optimizer: whose state.
            states: all of it.
            as_made: parameters whose state has the layout that somebody gave it, rather than one that is learnt.
        """
        self.settle()
        self._counters_as_made(states)
        dead = [param for param, shard in self.plan.shards.items() if self._is_dead(shard, states)]
        kept = [param for param in self.plan.shards if self.plan.shards[param].group >= 0]
        old = {param: dict(states.get(param)) for param in kept}
        for param in dead:
            self.names.pop(param, None)
        self.clear()
        for param in old.keys() - as_made:
            states.get(param).clear()  # so that the layout is learnt under the new hyperparameters
        try:
            self.add(optimizer, old, states)
        finally:
            for param, state in old.items():
                if state and param not in as_made:
                    states.of(param).update(state)
        adopt((self.plan.shards[param], states.get(param)) for param in old)

    def install(self, optimizer: Optimizer, states: StateStore, loaded: Mapping[Tensor, UserState]) -> None:
        """Make ``loaded`` the whole state; ``states`` is empty, and param groups are those loaded with it.

        Tensors of ``loaded`` are as in a state dict. What the optimizer keeps in another form is made one parameter at
        a time, so that it takes no more device memory than that.
        """
        self.settle()
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in loaded if param not in self.plan.shards], states)
        self.lending.wait()
        if self.conventions.keeps_raw_state:
            for param, saved in loaded.items():
                states.of(param).update(saved)
            adopt((self.plan.shards[param], states.of(param)) for param in loaded)
        for param, saved in loaded.items():
            shard, state = self.plan.shards[param], states.of(param)
            if not self.conventions.keeps_raw_state:
                state.update(self.conventions.as_kept(optimizer, param, saved, shard.homes))
                adopt([(shard, state)])
            home = shard.homes.get(MASTER)
            if home is not None and state.get(MASTER) is None and can_rebuild(local_shard(home).dtype):
                weights = over_local(home, local_shard(param).detach().float())
                state.update(self.conventions.as_kept(optimizer, param, {MASTER: weights}, shard.homes))
                adopt([(shard, state)])

    def as_saved(self, optimizer: Optimizer, param: Tensor, state: UserState, *, empty: bool = False) -> UserState:
        """As :meth:`Conventions.as_saved`."""
        homes = self.plan.shards[param].homes if param in self.plan.shards else {}
        return self.conventions.as_saved(optimizer, param, state, homes, empty=empty)

    def reserved_state(self, optimizer: Optimizer, states: StateStore) -> dict[Tensor, UserState]:
        """Return the room of parameters without state: their homes, and counters like those they will get, at zero.

        For a load to write into. Nothing of it is in ``states``, and what the homes hold means nothing. A parameter
        that was frozen when the optimizer was attached, and no longer is, gets room now.
        """
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in self._unplanned if is_trained(param)], states)
        self._follow_groups(optimizer, states)
        if self.layouts.capabilities.moves_whole and not any(states.get(param) for param in self.plan.shards):
            raise ValueError(
                f"for_load=True: {self.cls.__name__} has no state yet, and which it keeps is not known before its "
                "first step, so there is nothing to load into. Call get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict once, which makes the state by a step that changes nothing; "
                "or load with load_state_dict()."
            )
        return {
            param: {name: zero_like(example) for name, example in shard.layout.scalars.items()} | shard.homes
            for param, shard in self.plan.shards.items()
            if shard.group >= 0 and not states.get(param)
        }

    def has_left_device(self) -> None:
        """Empty the cache of the device's allocator: what is home now has left blocks that activations do not fit."""
        self._link.empty_cache()

    def return_to_device(self, states: StateStore) -> None:
        """Replace every home in ``states`` by a tensor on the device, of the type that the optimizer made."""
        self.settle()
        # What the user has exchanged since the last step counts.
        self.lending.wait()
        adopt((shard, states.get(param)) for param, shard in self.plan.shards.items())
        for param, shard in self.plan.shards.items():
            state = states.get(param)
            for name in shard.homes.keys() & state.keys():
                state[name] = shard.on_device(name, self.device)
        self._make_zeroed_gradients(self.plan.shards)
        self._counters_as_made(states)

    def _make_zeroed_gradients(self, params: Iterable[Tensor]) -> bool:
        """Make zeros for gradients that were zeroed once freed, if none has come since; returns whether any were."""
        zeroed = list(filter(is_zeroed, params))
        for param in zeroed:
            param.grad = over_local(param, torch.zeros_like(local_shard(param), device=self.device))
        return bool(zeroed)

    def _counters_as_made(self, states: StateStore) -> None:
        if self.host is not None:
            self.host.counters_as_made(self.plan.host_shards(), states)

    # What a step is about ---------------------------------------------------------------------------------------------

    def _other_layout(self, param: Tensor) -> str:
        """Say why the ranges in the buckets of ``param`` are not its elements any more; empty: they are."""
        shard = self.plan.shards.get(param)
        if shard is None or len(shard.buckets) < 2 or local_shard(param).is_contiguous():
            return ""
        return (
            "it was contiguous when its state was divided into buckets, and now has strides "
            f"{local_shard(param).stride()}; attach again, or give it the layout that it had"
        )

    def _shards_with_grad(self, optimizer: Optimizer, states: StateStore) -> list[StateShard]:
        """The shards to update. Takes over parameters that have a gradient for the first time, and exchanged state."""
        eager, gradient = self.conventions.state_without_gradient, self.conventions.gradient
        new = [param for param in self._unplanned if eager or gradient(param) is not None]
        if new:
            self.add(optimizer, new, states)
        shards = self.plan.shards.values()
        updated = [
            shard
            for shard in shards
            if shard.group >= 0 and (gradient(shard.param) is not None or (eager and not states.get(shard.param)))
        ]
        # Also of neighbours without a gradient, whose bytes move as well.
        self.lending.adopt_user_tensors(shards, states)
        return updated

    def _check_gradients(self, used: Container[Tensor], outcome: str) -> None:
        """Refuse gradients that cannot be updated with; not those that the backward has ``used`` and let go."""
        for param in (*self._unplanned, *self.plan.shards):
            grad = None if param in used else self.conventions.gradient(param)
            problem = grad is not None and (unsupported_gradient(param, grad) or self._other_layout(param))
            if problem:
                name = self.names.get(param, "a parameter")
                raise RuntimeError(f"{name} cannot be updated: {problem}. {outcome}")

    def _follow_groups(self, optimizer: Optimizer, states: StateStore) -> None:
        """Follow param groups that were edited, and hyperparameters that decide which state there is."""
        ids = _param_ids(optimizer)
        regrouped = ids != self._param_ids
        if regrouped:
            self.settle()  # the host may be at an update that looks at the groups
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
            try:
                self._check_state_is_complete(optimizer, live, states)
                still_fit = all(self._still_fits(optimizer, shard) for shard in live)
            except ValueError as error:
                cause = error.__cause__
                why = error if cause is None else f"{type(cause).__name__}: {str(cause).strip()}."
                raise ValueError(
                    f"step() cannot run with {_changed_entries(self._layout_keys, keys, optimizer)}: {why} Correct it "
                    "and call step() again. Nothing has been changed."
                ) from None
            self._layout_keys = keys
            if not still_fit:
                self.rebuild(optimizer, states)
        elif regrouped and self._mostly_dead(states):
            self.rebuild(optimizer, states)
        made = {param for param, shard in self.plan.shards.items() if not shard.existed and states.get(param)}
        if any(self._made_otherwise(self.plan.shards[param], states) for param in made):
            self.rebuild(optimizer, states, as_made=made)
        for param in made:
            self.plan.shards[param].existed = True

    def _made_otherwise(self, shard: StateShard, states: StateStore) -> bool:
        """Return whether a hook of the step, as torchtitan has, made the first state of a parameter in other dtypes."""
        state = states.get(shard.param)
        if shard.group < 0 or not is_exchanged(shard, state):
            return False
        return in_dtypes_of(shard.layout, state).values != shard.layout.values

    def _check_state_is_complete(self, optimizer: Optimizer, shards: Sequence[StateShard], states: StateStore) -> None:
        """The optimizers of torch look for all of their state once there is some; better before a step than in it."""
        if not self.layouts.capabilities.known:
            return
        for shard in shards:
            state = states.get(shard.param)
            missing = [name for name in self._learnt(optimizer, shard).values if name not in state]
            if state and missing:
                raise RuntimeError(
                    f"The hyperparameters of param_groups[{shard.group}] now need state {missing}, which {shard.name} "
                    "does not have: it was created under other ones. Set them back, or add that state. Nothing has "
                    "been changed."
                )

    def _mostly_dead(self, states: StateStore) -> bool:
        """Return whether most of the memory belongs to parameters that the user has taken out, with their state."""
        shards = self.plan.shards.values()
        dead_bytes = sum(shard.nbytes for shard in shards if self._is_dead(shard, states))
        return 2 * dead_bytes > sum(shard.nbytes for shard in shards)

    def _is_dead(self, shard: StateShard, states: StateStore) -> bool:
        return shard.group < 0 and not states.get(shard.param)

    def _keys(self, optimizer: Optimizer) -> list[LayoutKey]:
        return [layout_key(group, self.layouts.counters) for group in optimizer.param_groups]

    def _still_fits(self, optimizer: Optimizer, shard: StateShard) -> bool:
        if len(shard.buckets) > 1 and not self.plan.may_cut(shard, optimizer.param_groups[shard.group]):
            return False  # another implementation now, which rounds pieces differently
        # State that exists keeps its place, also where the new hyperparameters would no longer create it.
        return self._learnt(optimizer, shard).values.keys() <= shard.layout.values.keys()

    def _learnt(self, optimizer: Optimizer, shard: StateShard) -> StateLayout:
        return self.layouts.learn(optimizer, shard.param, optimizer.param_groups[shard.group], shard.name)

    def _groups_as_before(self, optimizer: Optimizer) -> bool:
        """Return whether parameters of groups, and hyperparameters that decide on state, are those of the last plan."""
        return _param_ids(optimizer) == self._param_ids and self._keys(optimizer) == self._layout_keys


def _param_ids(optimizer: Optimizer) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def _changed_entries(before: Sequence[LayoutKey], after: Sequence[LayoutKey], optimizer: Optimizer) -> str:
    """Name the entries of param groups that differ, with their values."""
    return ", ".join(
        f"param_groups[{number}][{name!r}] = {optimizer.param_groups[number][name]!r}"
        for number, (old, new) in enumerate(itertools.zip_longest(before, after, fillvalue=()))
        for name, kind in new
        if (name, kind) not in old
    )


def _settle(contents: "weakref.ref[Contents]") -> None:
    found = contents()
    if found is not None:
        found.settle()


def _let_go(link: DeviceLink) -> None:
    link.synchronize()
