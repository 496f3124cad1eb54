"""Runs optimizers whose step cannot be divided: load all state, run the user's plain ``step()``, store the state.

::

    copy all homes ──▶ optimizer.state holds the copies ──▶ plain step() ──▶ store; optimizer.state holds the homes
                                                                 │
                                    tensors that it has made or exchanged: copied into the homes, or planned anew

Exact for any optimizer, at a price: all of its state is on the device during ``step()``, when activations are gone.
Values that are not dense tensors with memory of their own (lists, views of shared memory) stay on the device.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves_with_path, tree_map_with_path

from ..core.items import Item
from ..fsdp.dtensor import has_inner_tensors, local_shard, over_local, placements_of, version_of
from ..optimizers.divided_step import entries_of, instance_attributes
from ..optimizers.masters import same_bits
from ..policy import listed
from ..state.layout import NotUnderstoodError, describe_value, is_size, leaves_of, params_of, tensors_in
from ..state.shard import StateShard
from ..state.store import Entries, StateStore, UserState, adopt, is_exchanged, span_of
from .engine import Engine
from .homes import Turning


class WholeEngine(Engine):
    """The engine of an optimizer that moves as a whole."""

    @contextmanager
    def step_whole(self, optimizer: Optimizer, get_states: Callable[[], StateStore]) -> Iterator[None]:
        """Load all state for one plain step of ``optimizer`` inside the block; store it afterwards.

        ``get_states`` returns its state; it is called again after the step, which may exchange the mapping.

        Raises:
            RuntimeError: an earlier step has left the state half updated.
        """
        with self.core.lock, torch.no_grad():
            states = get_states()
            self.check_usable("step()")
            self.lending.check_unspoiled()
            self.core.away = False
            self._follow_groups(optimizer, states)
            self.add(optimizer, [param for param in self.groups.unplanned if states.get(param)], states)
            self._adopt_fitting(optimizer, states, {})
            self.note_made(states)
            self.core.updates = visit = _Visit(self, optimizer, states)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self.core.lock, torch.no_grad():
                try:
                    visit.end(get_states(), error)
                finally:
                    self.core.updates = None

    # What is planned --------------------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer, params: Iterable[Tensor], states: StateStore) -> None:
        """Take over parameters as :meth:`Engine.add` does, with homes only for state that exists, laid out as it is."""
        params = list(params)
        if params:
            self.layouts.staying = staying(optimizer, states, [*self.plan.shards, *params])
        super().add(optimizer, params, states)

    def take_over(self, optimizer: Optimizer, states: StateStore, before: Entries) -> None:
        """Copy state values that are not homes into homes: into those that fit, or else into newly planned ones.

        ``before``: entries of which those of ``states`` take the place, by parameter.
        """
        shards = self.plan.shards
        known = params_of(optimizer)
        self.add(optimizer, [param for param in known if param not in shards and states.get(param)], states)
        self._adopt_fitting(optimizer, states, before)
        entries = ((shard, *entry) for param, shard in shards.items() for entry in states.get(param).items())
        without_home = ((shard, name, value) for shard, name, value in entries if value is not shard.homes.get(name))
        if any(
            name not in shard.layout.left_out and (name in shard.homes or any(one.dim() for one in tensors_in(value)))
            for shard, name, value in without_home
            if value is not None
        ):
            is_first = not any(shard.homes for shard in shards.values())
            self.rebuild(optimizer, states, as_made=frozenset(shards))
            if is_first:
                self.take_all_blocks()

    def _adopt_fitting(self, optimizer: Optimizer, states: StateStore, before: Entries) -> None:
        """Copy values that have replaced homes into the homes, if their layouts are equal."""
        exchanged = [shard for shard in self.plan.shards.values() if is_exchanged(shard, states.get(shard.param))]
        if not exchanged:
            return
        self.leave_to_holders(((shard, states.get(shard.param)) for shard in exchanged), before)
        self.settle()  # R2: a store may still be writing these homes
        self.lending.wait()
        stay = staying(optimizer, states, self.plan.shards)
        fitting: list[tuple[StateShard, UserState]] = []
        for shard in exchanged:
            state = states.get(shard.param)
            fits = {name: state[name] for name in shard.homes if name in state and _fits(shard, name, state, stay)}
            fitting.append((shard, fits))
        adopt(fitting)  # all at once: a value may be the home of another parameter, which is about to be written
        for shard, adopted in fitting:
            states.get(shard.param).update(adopted)

    def install(self, optimizer: Optimizer, states: StateStore, loaded: Entries, before: Entries) -> None:
        """Make ``loaded`` the whole state, for any layout. Values without a home go where a plain load puts them.

        Counters that the optimizer already had go to the device on which it kept them.
        """
        examples = {  # by parameter, the device of each counter by its path
            param: {path: one.device for path, one in leaves if isinstance(one, Tensor)}
            for param, shard in self.plan.shards.items()
            for leaves in [tree_leaves_with_path(dict(shard.layout.scalars))]
        }
        self.settle()
        self.lending.wait()
        self._follow_groups(optimizer, states)
        for param, saved in loaded.items():
            states.of(param).update(saved)
        self.take_over(optimizer, states, before)
        copies = _Copies(_kept_beside(optimizer), staying(optimizer, states, self.plan.shards))
        for group in optimizer.param_groups:
            stays = () if group.get("fused") or group.get("capturable") else ("step",)
            for param in group["params"]:
                shard, state = self.plan.shards.get(param), states.get(param)
                homes = {} if shard is None else shard.homes
                others = {name: value for name, value in state.items() if value is not homes.get(name)}
                state.update(copies.of(others, self.device, stays, examples.get(param, {})))
                if shard is not None:  # examples for the next load, which puts counters where they are now
                    counters = shard.layout.scalars
                    counters |= {name: state[name] for name in counters.keys() & state.keys()}
        self.failure = ""

    def _wait(self, items: Sequence[Item], *, may_write: bool = True) -> None:
        if self.core.updates is None:
            super()._wait(items, may_write=may_write)


class _Visit(Turning):
    """A step during which ``optimizer.state`` holds device copies of all homes, each with memory of its own.

    The optimizer may keep them. They are made, stored and freed in the order of the compute stream.
    """

    def __init__(self, engine: WholeEngine, optimizer: Optimizer, states: StateStore) -> None:
        super().__init__(engine.lending, states)
        self._engine, self._optimizer, core = engine, optimizer, engine.core
        core.lanes.compute.wait(*core.updated.values())  # R2: the last step may still be storing on another stream
        self._lent = {
            (shard, name): shard.on_device(name, engine.device, non_blocking=True)
            for shard in engine.plan.shards.values()
            for name, home in shard.homes.items()
            if states.get(shard.param).get(name) is home
        }
        loaded = [leaf for value in self._lent.values() for leaf in leaves_of(value)]
        core.cache.moved.loads += len(loaded)
        core.cache.moved.loaded_bytes += sum(leaf.nbytes for leaf in loaded)
        for (shard, name), value in self._lent.items():
            states.get(shard.param)[name] = value
        self._versions = self._written(states)

    def end(self, states: StateStore, error: BaseException | None) -> None:
        """Store the copies, and let ``optimizer.state`` hold the homes again."""
        engine, core, self.states = self._engine, self._engine.core, states
        if error is not None and self._is_torn(states):
            engine.failure = self._failure(error)
        try:
            self._store(states)
        except BaseException as failed:
            engine.failure = self._failure(failed)
            raise
        mark = core.lanes.compute.mark()  # R2: the end of all stores
        core.updated = {core.lanes.compute.name: mark}
        self.commit()
        if error is None:
            core.cache.moved.updates += len(core.buckets)
        core.end()
        if error is None:
            engine.take_over(self._optimizer, states, {})

    def _store(self, states: StateStore) -> None:
        """Store the copies, or values that replaced them and fit; skip copies whose memory the optimizer keeps."""
        engine, moved = self._engine, self._engine.core.cache.moved
        kept = {leaf.untyped_storage().data_ptr() for leaf in self._kept(states) if leaf.numel()}
        self.turn([*engine.plan.shards.values()])
        changed = any(states.get(shard.param).get(name) is not value for (shard, name), value in self._lent.items())
        stay = staying(self._optimizer, states, engine.plan.shards) if changed else frozenset()
        copies: list[tuple[Tensor, Tensor]] = []
        for (shard, name), lent in self._lent.items():
            state = states.get(shard.param)
            value, leaves = state.get(name), leaves_of(state.get(name))
            if value is lent and any(leaf.untyped_storage().data_ptr() in kept for leaf in leaves):
                continue
            if value is not lent:
                if name not in state or not _fits(shard, name, state, stay):
                    continue
                # A value on the host may be another home, which is about to be written.
                leaves = [leaf.clone() if leaf.device.type == "cpu" else leaf for leaf in leaves]
            home = shard.all_homes[shard.which ^ (shard in self.moving)]
            home.wait_unread()  # R4: a checkpoint's writer may still be reading a home that has no spare one
            copies += zip(home.leaves[name], leaves, strict=True)
            state[name] = shard.homes[name]
        engine.core.lanes.compute.copy(copies)
        moved.stores += len(copies)
        moved.stored_bytes += sum(source.nbytes for _, source in copies)

    def _failure(self, error: BaseException) -> str:
        return (
            f"an earlier step() stopped with {type(error).__name__}: {error}. {self._engine.cls.__name__} moves as a "
            f"whole; {listed(self._engine.names.values())} and their state may be half updated"
        )

    # Writes of the step -----------------------------------------------------------------------------------------------

    def _is_torn(self, states: StateStore) -> bool:
        """Return whether a failed step has written anything. Versions miss some writes, so compare state by bits."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for (shard, name), value in self._lent.items():
            pairs += zip(shard.home.leaves[name], leaves_of(value), strict=True)
        is_written = self._versions != self._written(states)
        return is_written or not all(same_bits(home, copy.to(home.device)) for home, copy in pairs)

    def _written(self, states: StateStore) -> list[object]:
        """Return identities and versions that change when the step writes or exchanges a parameter or state."""
        found: list[object] = []
        for param in params_of(self._optimizer):
            found.append(version_of(param))
            for name, value in states.get(param).items():
                if isinstance(value, Tensor):
                    found.append((name, id(value), version_of(value), [leaf._version for leaf in _dense(value)]))
        return found

    def _kept(self, states: StateStore) -> Iterator[Tensor]:
        """Yield tensors that the optimizer keeps outside of its state, or that it has put there itself."""
        shards, others = self._engine.plan.shards, list(_kept_beside(self._optimizer))
        for param in params_of(self._optimizer):
            for name, value in states.get(param).items():
                if param not in shards or value is not self._lent.get((shards[param], name)):
                    others += tensors_in(value)
        yield from (leaf for tensor in others for leaf in _dense(tensor))


# Which values move ----------------------------------------------------------------------------------------------------


def staying(optimizer: Optimizer, states: StateStore, more: Iterable[Tensor] = ()) -> frozenset[int]:
    """Return ids of state values that must stay on the device, since moving them would separate shared data.

    They share memory with another value, a parameter, a gradient, or a tensor that the optimizer keeps outside of its
    state; or they require or have gradients; or attributes were set on them.
    """
    owners: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by storage: begin, end, owner's number
    values: list[object] = [None]  # state values by owner's number; 0 stands for all other owners

    def note(owner: int, tensors: Iterable[Tensor]) -> None:
        for leaf in (leaf for tensor in tensors for leaf in _dense(tensor)):
            if leaf.numel():
                owners[leaf.untyped_storage().data_ptr()].append((*span_of(leaf), owner))

    found = set()
    params = dict.fromkeys([*params_of(optimizer), *more])
    for tensor in (tensor for param in params for tensor in (param, param.grad) if tensor is not None):
        note(0, [] if has_inner_tensors(tensor) else [tensor])
    note(0, _kept_beside(optimizer))
    for value in (value for param in params for value in states.get(param).values()):
        values.append(value)
        note(len(values) - 1, tensors_in(value))
        if type(value) is Tensor and (value.requires_grad or value.grad is not None or vars(value)):
            found.add(id(value))
    for spans in owners.values():
        last, whose = 0, 0
        for begin, end, owner in sorted(spans) if len(spans) > 1 else ():
            if begin < last and owner != whose:
                found |= {id(values[owner]), id(values[whose])}
            if end > last:
                last, whose = end, owner
    return frozenset(found)


def _fits(shard: StateShard, name: str, state: UserState, stay: frozenset[int]) -> bool:
    planned, value, home = shard.layout.values[name], state[name], shard.homes[name]
    if not isinstance(value, Tensor) or value is home or id(value) in stay or has_inner_tensors(value):
        return False  # attributes of a tensor subclass are part of its layout, and would not be copied
    try:
        found = describe_value(value)
    except NotUnderstoodError:
        return False
    same = found.leaves == planned.leaves and found.type is planned.type and value.shape == home.shape
    return same and placements_of(value) == placements_of(home)


def _kept_beside(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield tensors in attributes of the optimizer and in entries of its groups, except parameters."""
    params = {id(param) for param in params_of(optimizer)}
    for tensor in tensors_in([list(instance_attributes(optimizer).values()), entries_of(optimizer)]):
        if id(tensor) not in params:
            yield tensor


def _dense(tensor: Tensor) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tensor) if leaf.layout == torch.strided and not leaf.is_meta]


class _Copies:
    """Copies loaded values: a tensor that occurs twice becomes one copy, and shared memory stays shared.

    Tensors that the optimizer keeps outside of its state are not copied: it continues with them. Views that go to
    another device no longer share memory, as in a plain load.
    """

    def __init__(self, kept: Iterable[Tensor], shared: Container[int]) -> None:
        self._made: dict[int, Tensor] = {id(tensor): tensor for tensor in kept}
        self._shared = shared
        self._storages: dict[int, Any] = {}  # memo of copy.deepcopy

    def of(
        self, values: UserState, device: torch.device, stays: Container[str], examples: Mapping[Any, torch.device]
    ) -> UserState:
        """Copy ``values``, in containers of their types, to the device of the example at the same path, or ``device``.

        Values named in ``stays`` remain on their device if there is no example.
        """

        def copied(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in self._made:
                local = local_shard(value).detach()
                there = examples.get(path, local.device if getattr(path[-1], "key", None) in stays else device)
                together = id(values[path[0].key]) in self._shared and local.device == there
                new = copy.deepcopy(local, self._storages) if together else local.to(there, copy=True)
                self._made[id(value)] = over_local(value, new)
            return self._made[id(value)]

        return tree_map_with_path(copied, values, is_leaf=is_size)  # type: ignore[no-any-return]
