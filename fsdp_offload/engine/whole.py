"""Steps of an optimizer that nobody may divide: the user's own plain ``step()``, on all of its state at once.

::

    copy everything ──▶ optimizer.state holds the copies ──▶ plain step() ──▶ store, and it holds the homes again
                                                                 │
                                    tensors that it has made or exchanged: copied into the homes, or planned anew

Exact for any optimizer, and at a price: all of its state is on the device during ``step()``, where activations are
gone. What is not a dense tensor of its own (lists, what shares memory with something else) stays on the device.
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
from ..state.store import StateStore, UserState, adopt, is_exchanged, span_of
from .engine import Engine
from .homes import Turning


class WholeEngine(Engine):
    """The engine of an optimizer that moves as a whole."""

    @contextmanager
    def step_whole(self, optimizer: Optimizer, get_states: Callable[[], StateStore]) -> Iterator[None]:
        """Within it, ``optimizer`` makes one plain step on everything.

        ``get_states`` returns its state; it is asked again after the step, which may exchange it.

        Raises:
            RuntimeError: an earlier step stopped half way.
        """
        with self.core.lock, torch.no_grad():
            states = get_states()
            self.check_usable("step()")
            self.lending.check_unspoiled()
            self.core.away = False
            self._follow_groups(optimizer, states)
            self.add(optimizer, [param for param in self.groups.unplanned if states.get(param)], states)
            self._adopt_fitting(optimizer, states)
            self._note_made(states)
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
        """As :meth:`Engine.add`; state that exists is planned as it is, and there is no room for other."""
        params = list(params)
        if params:
            self.layouts.staying = staying(optimizer, states, [*self.plan.shards, *params])
        super().add(optimizer, params, states)

    def take_over(self, optimizer: Optimizer, states: StateStore) -> None:
        """Bring home what of the state is not there: into homes that fit, or into others that are planned anew."""
        shards = self.plan.shards
        known = params_of(optimizer)
        self.add(optimizer, [param for param in known if param not in shards and states.get(param)], states)
        self._adopt_fitting(optimizer, states)
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
                self.take_staging()

    def _adopt_fitting(self, optimizer: Optimizer, states: StateStore) -> None:
        """Copy what is in the place of homes into these, where it is laid out as they are."""
        exchanged = [shard for shard in self.plan.shards.values() if is_exchanged(shard, states.get(shard.param))]
        if not exchanged:
            return
        self.settle()  # what is written there may still be being stored
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

    def install(self, optimizer: Optimizer, states: StateStore, loaded: Mapping[Tensor, UserState]) -> None:
        """As :meth:`Engine.install`, whatever its layout is. What has no home comes to where a plain load puts it.

        Counters that the optimizer has had come to where it has kept them.
        """
        examples = {param: _devices_of(shard.layout.scalars) for param, shard in self.plan.shards.items()}
        self.settle()
        self.lending.wait()
        self._follow_groups(optimizer, states)
        for param, saved in loaded.items():
            states.of(param).update(saved)
        self.take_over(optimizer, states)
        copies = _Copies(_kept_beside(optimizer), staying(optimizer, states, self.plan.shards))
        for group in optimizer.param_groups:
            stays = () if group.get("fused") or group.get("capturable") else ("step",)
            for param in group["params"]:
                shard, state = self.plan.shards.get(param), states.get(param)
                homes = {} if shard is None else shard.homes
                others = {name: value for name, value in state.items() if value is not homes.get(name)}
                state.update(copies.of(others, self.device, stays, examples.get(param, {})))
                if shard is not None:  # where counters are now says where the next load puts them
                    counters = shard.layout.scalars
                    counters |= {name: state[name] for name in counters.keys() & state.keys()}
        self.failure = ""

    def _wait(self, items: Sequence[Item], *, may_write: bool = True) -> None:
        if self.core.updates is None:
            super()._wait(items, may_write=may_write)


class _Visit(Turning):
    """A step: ``optimizer.state`` holds copies of all homes, with memory of their own: optimizers may keep them.

    They are made, stored and freed in the order of the compute stream.
    """

    def __init__(self, engine: WholeEngine, optimizer: Optimizer, states: StateStore) -> None:
        super().__init__(engine.lending, states)
        self._engine, self._optimizer, core = engine, optimizer, engine.core
        core.lanes.compute.wait(*core.updated.values())  # R2: the last step may still be storing, on another stream
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
        """Send home what is on the device, and let ``optimizer.state`` hold the homes again."""
        engine, core, self.states = self._engine, self._engine.core, states
        if error is not None and self._is_torn(states):
            engine.failure = self._failure(error)
        try:
            self._store(states)
        except BaseException as failed:
            engine.failure = self._failure(failed)
            raise
        mark = core.lanes.compute.mark()  # R2: stores run up to there
        core.updated = {core.lanes.compute.name: mark}
        self.commit()
        if error is None:
            core.cache.moved.updates += len(core.buckets)
        core.end()
        if error is None:
            engine.take_over(self._optimizer, states)

    def _store(self, states: StateStore) -> None:
        """Store copies, and what the step has put in their place, unless the optimizer keeps their memory."""
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
                # On the host it may be another home, which is about to be written.
                leaves = [leaf.clone() if leaf.device.type == "cpu" else leaf for leaf in leaves]
            home = shard.sides[shard.side ^ (shard in self.moving)]
            home.wait_unread()  # R4: a checkpoint's writer may still be reading this home
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

    # What the step has done -------------------------------------------------------------------------------------------

    def _is_torn(self, states: StateStore) -> bool:
        """Return whether a failed step has written anything. Versions count most writes; the bits of state show all."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for (shard, name), value in self._lent.items():
            pairs += zip(shard.home.leaves[name], leaves_of(value), strict=True)
        is_written = self._versions != self._written(states)
        return is_written or not all(same_bits(home, copy.to(home.device)) for home, copy in pairs)

    def _written(self, states: StateStore) -> list[object]:
        """Changes with what the step writes or exchanges."""
        found: list[object] = []
        for param in params_of(self._optimizer):
            found.append(version_of(param))
            for name, value in states.get(param).items():
                if isinstance(value, Tensor):
                    found.append((name, id(value), version_of(value), [leaf._version for leaf in _dense(value)]))
        return found

    def _kept(self, states: StateStore) -> Iterator[Tensor]:
        """Yield what the optimizer keeps beside what was put into its state, or under another name there."""
        shards, others = self._engine.plan.shards, list(_kept_beside(self._optimizer))
        for param in params_of(self._optimizer):
            for name, value in states.get(param).items():
                if param not in shards or value is not self._lent.get((shards[param], name)):
                    others += tensors_in(value)
        yield from (leaf for tensor in others for leaf in _dense(tensor))


# Which values move ----------------------------------------------------------------------------------------------------


def staying(optimizer: Optimizer, states: StateStore, more: Iterable[Tensor] = ()) -> frozenset[int]:
    """Values of the state, by their ``id``, that are not tensors of their own: moving them would divide what is one.

    Those share memory with another value, a parameter, a gradient, or what the optimizer keeps beside; or autograd, or
    somebody's attributes, hang on them.
    """
    owners: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by storage: begin, end, and whose
    values: list[object] = [None]  # whose numbers these are; 0 are all others

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
        return False  # what wrappers know beside their tensors is part of the layout
    try:
        found = describe_value(value)
    except NotUnderstoodError:
        return False
    same = found.leaves == planned.leaves and found.type is planned.type and value.shape == home.shape
    return same and placements_of(value) == placements_of(home)


def _kept_beside(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors in attributes of the optimizer and in entries of its groups, parameters aside."""
    params = {id(param) for param in params_of(optimizer)}
    for tensor in tensors_in([list(instance_attributes(optimizer).values()), entries_of(optimizer)]):
        if id(tensor) not in params:
            yield tensor


def _dense(tensor: Tensor) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tensor) if leaf.layout == torch.strided and not leaf.is_meta]


def _devices_of(scalars: Mapping[str, object]) -> dict[Any, torch.device]:
    """Where counters lie, by their paths in ``scalars``."""
    return {path: one.device for path, one in tree_leaves_with_path(dict(scalars)) if isinstance(one, Tensor)}


class _Copies:
    """Copies of loaded values. What was one tensor is one again, and what shared memory shares it.

    Tensors that the optimizer keeps beside its state are not copied: they are what it goes on with. Views that go to
    another device come apart, as in a plain load.
    """

    def __init__(self, kept: Iterable[Tensor], shared: Container[int]) -> None:
        self._made: dict[int, Tensor] = {id(tensor): tensor for tensor in kept}
        self._shared = shared
        self._storages: dict[int, Any] = {}  # as copy.deepcopy notes what it has copied

    def of(
        self, values: UserState, device: torch.device, stays: Container[str], examples: Mapping[Any, torch.device]
    ) -> UserState:
        """Copy ``values``, in containers of their types: tensors to where ``examples`` are, or else to ``device``.

        Those by names that are in ``stays`` stay where they are.
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
