"""Runs the user's own optimizer on one bucket.

The optimizer's class is given a *shadow*: an instance that the user never sees, with the live hyperparameters and
attributes of the real one, whose parameters are this bucket's and whose state is the bucket's slot. What a step changes
beside parameters and state tensors is collected and handed back once for the whole step:

- 0-dim tensors and numbers of a parameter (``step``): each range of a cut parameter starts from the same value;
- values of a param group (``group["k"]``) and of the optimizer object: each bucket starts from the same value, and all
  must end at the same.
"""

import collections
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..state.shard import StateShard, is_wrapper, leaves_of
from ..state.store import StateStore, UserState
from ..torch_compat.fsdp import local_shard, no_global_step_hooks
from . import Habits
from .fused_masters import AdamWStep, MasterRange, fits, is_exact, step_of_group, update_masters
from .masters import MASTER, close_master, is_only_copy, let_weights_win, open_master

ENGINE_ATTRIBUTE = "_offload_engine"
"""Where an offloaded optimizer keeps its engine; never copied to a shadow, which would be a reference cycle."""

_OWN_ATTRIBUTES = frozenset({"param_groups", "state", "step", ENGINE_ATTRIBUTE})

_SCHEDULED = frozenset({"lr", "betas"})
"""Entries of param groups that schedulers write, perhaps into tensors, and that optimizers of torch only read."""


@dataclass(eq=False)
class BoundRange:
    """A range of a shard, bound to what the optimizer sees while it is on the device.

    Attributes:
        param: the parameter itself, or an alias of its local tensor, flat for a range of a cut shard. The optimizer
            sees it, or the master of it that we keep.
        values: the state tensors in the slot, by name.
        last: no later range of the same shard follows: this one commits the parameter's scalars.
        address: of the local shard when it was bound; another one means that the storage was exchanged.
        gradient: of this range, where it is not the parameter's own that is to be used (but a copy of it on the host).
    """

    shard: StateShard
    start: int
    stop: int
    param: Tensor
    values: dict[str, Tensor]
    last: bool
    address: int
    gradient: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether it covers all of the shard."""
        return self.start == 0 and self.last

    def still_valid(self) -> bool:
        """Whether the local shard is still the memory it was bound to."""
        return local_shard(self.shard.param).data_ptr() == self.address

    @property
    def is_alias(self) -> bool:
        """Whether the gradient has to be handed over, since the optimizer does not see the user's own tensor."""
        return self.param is not self.shard.param

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a master that we keep, and ``param`` is written from it."""
        return self.shard.master != "none"


def bind_range(shard: StateShard, start: int, stop: int, values: dict[str, Tensor]) -> BoundRange:
    """Bind the elements ``[start, stop)`` of ``shard`` to ``values``, its state tensors on the device."""
    local = local_shard(shard.param)
    last = stop == shard.local_numel
    whole = start == 0 and last
    own = not shard.on_locals or (whole and local is shard.param and shard.master == "none")
    param = shard.param if own else _alias(local, start, stop, whole=whole)
    return BoundRange(shard, start, stop, param, values, last, local.data_ptr())


def slot_values(shard: StateShard, start: int, stop: int, take: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """State tensors over the slot of the elements ``[start, stop)`` of ``shard``.

    ``take(leaf, nbytes)`` is a flat ``uint8`` tensor over the first ``nbytes`` bytes of that leaf's place.
    """
    whole = start == 0 and stop == shard.local_numel
    numbers = itertools.count()
    values = {}
    for name, value in shard.layout.values.items():
        parts = []
        for layout in value.leaves:
            nbytes = layout.nbytes if whole else (stop - start) * layout.dtype.itemsize
            typed = take(next(numbers), nbytes).view(layout.dtype)
            parts.append(typed.as_strided(layout.shape, layout.stride) if whole else typed)
        values[name] = parts[0] if shard.on_locals else value.build(parts)
    return values


def _alias(local: Tensor, start: int, stop: int, *, whole: bool) -> Tensor:
    alias = local.detach()
    return alias if whole else alias.view(-1)[start:stop]


class SharedValues:
    """What one logical step changes in the param groups and in the optimizer object, however many buckets it has."""

    def __init__(
        self,
        optimizer: Optimizer,
        pinned: Sequence[Mapping[str, Any]],
        fresh_attributes: Callable[[], dict[str, Any]] = dict,
        by_param: Iterable[str] = (),
        *,
        writes_any_entry: bool = False,
        copy_scheduled: bool = False,
        all_groups: bool = False,
    ) -> None:
        """Note where the step starts.

        Args:
            optimizer: the user's.
            pinned: overrides entries of each group for the shadow only. Tensors are copied for each bucket.
            fresh_attributes: makes what overrides attributes for the shadow only.
            by_param: names of attributes that are dicts with parameters as keys.
            writes_any_entry: a step of this class may write the learning rate or betas of a group, so that each bucket
                needs its own. Otherwise buckets share those tensors.
            copy_scheduled: copy them when the step begins: a scheduler may write them before the last bucket has read
                them.
            all_groups: show each bucket all param groups, those without parameters in it empty, and not only its own.
        """
        self._start = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._start_versions = _versions(self._start)
        self._groups = self._start
        if copy_scheduled:
            self._groups = [
                {name: _own(value) if name in _SCHEDULED else value for name, value in group.items()}
                for group in self._start
            ]
        self._pinned = pinned
        self._writes_any_entry = writes_any_entry
        self._all_groups = all_groups
        self._attributes = instance_attributes(optimizer)
        self._fresh_attributes = fresh_attributes
        self._unwatched = {*fresh_attributes(), *by_param}
        self.by_param: dict[str, dict[Tensor, Any]] = {name: self._attributes[name] for name in by_param}
        self._group_changes: list[dict[str, Any]] = [{} for _ in self._groups]
        self._replaced: set[tuple[int, str]] = set()  # entries that a step has exchanged, and not written into
        self._attribute_changes: dict[str, Any] = {}
        self._given: dict[int, dict[str, Any]] = {}
        self._counting: set[int] = set()  # groups whose changes count in the step that runs
        self.unvisited = set(range(len(self._groups)))  # groups that no bucket has had parameters of

    def groups_for(
        self, params: Sequence[list[Tensor]], counting: Collection[int] | None = None
    ) -> list[dict[str, Any]]:
        """Param groups for one step: those that have some of ``params``; all of them where the class needs that.

        Args:
            params: for each group of the optimizer.
            counting: numbers of the groups to show, and whose changes count, if not those with parameters. A plain step
                does not see its groups emptied, and some classes fail on that.
        """
        filled = {number for number, of_group in enumerate(params) if of_group}
        self._counting = filled if counting is None else set(counting)
        shown = range(len(params)) if self._all_groups else sorted(self._counting)
        self._given = {
            number: {
                name: _own(value) if self._may_write(name, value) else value
                for name, value in self._groups[number].items()
            }
            for number in shown
        }
        return [
            {**given, **{name: _own(value) for name, value in self._pinned[number].items()}, "params": params[number]}
            for number, given in self._given.items()
        ]

    def _may_write(self, name: str, value: object) -> bool:
        """Whether a step may write into an entry: an unknown class into any, torch's into tensors that count."""
        return self._writes_any_entry or (isinstance(value, Tensor) and name not in _SCHEDULED)

    def group(self, number: int) -> dict[str, Any]:
        """The entries of a param group that a bucket's step is given; nobody writes into them."""
        return {**self._groups[number], **self._pinned[number]}

    @property
    def attributes(self) -> dict[str, Any]:
        """The optimizer's own attributes, for a shadow."""
        return {**self._attributes, **self._fresh_attributes()}

    def collect(self, groups: Sequence[Mapping[str, Any]], attributes: Mapping[str, Any]) -> None:
        """Note what a bucket's step has changed. What it did to a group without parameters is nobody's.

        Raises:
            RuntimeError: the change differs from that of an earlier bucket of the same step.
        """
        for (number, given), group in zip(self._given.items(), groups, strict=True):
            if number not in self._counting:
                continue
            for name, value in group.items():
                if name == "params" or name in self._pinned[number]:
                    continue
                if _changed(self._groups[number].get(name), given.get(name), value):
                    _note(self._group_changes[number], name, value, f"param_groups[{number}][{name!r}]")
                    if value is not given.get(name):
                        self._replaced.add((number, name))
        self.unvisited -= self._counting
        for name, value in attributes.items():
            if name in self._unwatched:
                continue
            # Tensors and containers are the real optimizer's own objects, so writing into them needs no commit.
            start = self._attributes.get(name)
            if value is not start and _changed(start, start, value):
                _note(self._attribute_changes, name, value, f"optimizer.{name}")

    def still_starts_from(self, optimizer: Optimizer) -> bool:
        """Whether the param groups are what they were when this was made."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if [group.keys() for group in groups] != [group.keys() for group in self._start]:
            return False
        return _versions(groups) == self._start_versions and all(
            value is start[name] if isinstance(value, Tensor) else same_values(value, start[name])
            for group, start in zip(groups, self._start, strict=True)
            for name, value in group.items()
        )

    @property
    def changed_entries(self) -> set[str]:
        """Names of what this step changes in any param group."""
        return {name for changes in self._group_changes for name in changes}

    def commit(self, optimizer: Optimizer) -> None:
        """Give the changes of the whole step to the user's optimizer, once."""
        for number, (group, changes) in enumerate(zip(optimizer.param_groups, self._group_changes, strict=True)):
            for name, value in changes.items():
                if (number, name) in self._replaced:
                    group[name] = value
                else:
                    _write_into(group, name, value)
        optimizer.__dict__.update(self._attribute_changes)


def _write_into(group: dict[str, Any], name: str, value: Any) -> None:
    """Change an entry in place, as the step did with its copy: others may hold this tensor, list or dict."""
    current = group.get(name)
    if isinstance(value, Tensor) and isinstance(current, Tensor):
        current.copy_(value)
    elif type(value) is type(current) is list:
        current[:] = value
    elif type(value) is type(current) is dict:
        current.clear()
        current.update(value)
    else:
        group[name] = value


def instance_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes that a shadow shares with ``optimizer``: all but its own, and its hooks."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in _OWN_ATTRIBUTES and not name.startswith("_optimizer_")
    }


def _versions(groups: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], tuple[int, ...]]:
    return {
        (number, name): tuple(tensor._version for tensor in _tensors_in(value))
        for number, group in enumerate(groups)
        for name, value in group.items()
        if _tensors_in(value)
    }


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a param group's entry: betas may be a tuple of them."""
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors_in(one)]
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in _tensors_in(one)]
    return [value] if isinstance(value, Tensor) else []


def _own(value: Any) -> Any:
    """A copy of a param group's entry that a step may write without anybody else seeing it."""
    kind = type(value)
    if kind in (tuple, list):
        return kind(map(_own, value))
    if kind is dict:
        return {name: _own(one) for name, one in value.items()}
    if kind in (set, collections.deque):
        return value.copy()
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def _changed(start: object, given: object, end: object) -> bool:
    """Whether a step that was ``given`` an own copy of ``start`` has left something else."""
    if end is given:
        # The copy is fresh, so that the versions of its tensors count the writes of this bucket.
        written = given is not start and any(tensor._version > 0 for tensor in _tensors_in(end))
        return written or not (isinstance(end, Tensor) or same_values(start, end))
    return isinstance(start, Tensor) or isinstance(end, Tensor) or not same_values(start, end)


def _note(changes: dict[str, Any], name: str, value: Any, place: str) -> None:
    if name in changes and not same_values(changes[name], value):
        raise RuntimeError(
            f"{place} ended at {_short(changes[name])} in one bucket and at {_short(value)} in another of the same "
            "step: this optimizer's step is not separable by parameter, and it cannot be offloaded."
        )
    changes[name] = value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


_SHORT = 80


def same_values(one: Any, other: Any) -> bool:
    """Whether two entries or attributes are equal, also where tensors are inside.

    Tensors on a device count as equal: comparing them would wait for it, and every bucket runs the same arithmetic on
    the same start there.
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device.type != "cpu" or torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool(one == other)


def fill_bare(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    """Make an object of an optimizer's class, made without its constructor, into an optimizer with ``attributes``."""
    defaults = attributes.get("defaults")
    known = set(defaults) if isinstance(defaults, dict) else set()
    # As if unpickled: creates the (empty) hook tables that step() may look at.
    Optimizer.__setstate__(optimizer, attributes)
    if isinstance(defaults, dict):
        for name in defaults.keys() - known:  # what torch adds to old pickles; this dict is the real optimizer's
            del defaults[name]


class Shadow:
    """The optimizer's own class, run on what it is given."""

    def __init__(self, cls: type[Optimizer], *, without_hooks: Callable[[], Any] = no_global_step_hooks) -> None:
        """Take the class; ``without_hooks`` makes the context in which hooks for all optimizers do not fire."""
        self.cls = cls
        self._without_hooks = without_hooks
        step = cls.step
        # torch wraps step() to fire hooks; for a bucket they must not fire, since the logical step fires them once.
        self._step: Callable[..., object] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        self._object: Optimizer = object.__new__(cls)

    def run(
        self,
        shared: SharedValues,
        params: Sequence[list[Tensor]],
        state: Mapping[Tensor, UserState],
        kwargs: Mapping[str, Any],
        by_param: Mapping[str, dict[Tensor, Any]] | None = None,
        counting: Collection[int] | None = None,
    ) -> dict[Tensor, UserState]:
        """One step on ``params`` (a list for each group). Returns the state after it, by parameter.

        ``by_param`` overrides attributes that are dicts with parameters as keys; what the step adds is found there.
        ``counting`` is as for :meth:`SharedValues.groups_for`.
        """
        shadow = self._object
        groups = shared.groups_for(params, counting)
        shadow.__dict__.clear()
        filled: defaultdict[Tensor, UserState] = defaultdict(dict, state)
        fill_bare(shadow, {**shared.attributes, **(by_param or {}), "param_groups": groups, "state": filled})
        try:
            with self._without_hooks():  # a subclass's step may call a hooked one of its parent
                self._step(shadow, **kwargs)
            keys: list[object] = list(shadow.state)
            foreign = [key for key in keys if not isinstance(key, Tensor)]
            if foreign:
                raise RuntimeError(
                    "the optimizer keeps state of its own beside that of parameters "
                    f"(optimizer.state[{foreign[0]!r}]); it cannot be divided among buckets"
                )
            shared.collect(shadow.param_groups, instance_attributes(shadow))
            return filled if shadow.state is filled else dict(shadow.state)
        finally:
            shadow.__dict__.clear()  # holds no gradient, no slot and no attribute beyond the step


def same_order_on_ranks(ranges: Sequence[BoundRange], *, group_by_group: bool = False) -> Iterator[list[BoundRange]]:
    """Divide a bucket so that an optimizer that sees DTensors meets parameters in the same order on every rank.

    Its step may issue collectives and goes through its parameters group by group, while how many shards share a bucket
    depends on their sizes on this rank. So each step there has parameters of one group only; with ``group_by_group``
    any step has.
    """
    together = not group_by_group
    for _, run in itertools.groupby(
        ranges, key=lambda bound: None if together and bound.shard.on_locals else bound.shard.group
    ):
        yield list(run)


def update_bucket(
    shadow: Shadow,
    shared: SharedValues,
    habits: Habits,
    ranges: Sequence[BoundRange],
    group_count: int,
    user_states: StateStore,
    kwargs: Mapping[str, Any],
) -> None:
    """Run the optimizer on the ranges of one bucket, and commit what it created into slot and ``user_states``.

    Runs on the current stream. Gradients are taken from the user's parameters and are not kept.
    """
    ranges = [bound for bound in ranges if bound.shard.group >= 0]  # the user may have taken others out of their group
    ranges = _with_gradient(ranges, habits)
    ranges = _update_in_one_pass(shadow, shared, habits, ranges, user_states, kwargs)
    if not ranges:
        return
    params: list[list[Tensor]] = [[] for _ in range(group_count)]
    state: dict[Tensor, UserState] = {}
    existing = [user_states.get(bound.shard.param) for bound in ranges]
    seen = [_seen_by_optimizer(bound, user_state) for bound, user_state in zip(ranges, existing, strict=True)]
    for bound, param, user_state in zip(ranges, seen, existing, strict=True):
        _hand_gradient(bound, param, habits)
        params[bound.shard.group].append(param)
        if user_state:
            state[param] = _in_slot(bound, user_state)
    by_param = _seen_by_param(shared, ranges, seen)
    try:
        after = shadow.run(shared, params, state, kwargs, by_param)
    finally:
        for bound, param in zip(ranges, seen, strict=True):
            if bound.is_alias:
                habits.hand_gradient(param, None)
    for name, given in by_param.items():
        for bound, param in zip(ranges, seen, strict=True):
            if param in given:
                shared.by_param[name][bound.shard.param] = given[param]
    for bound, param, user_state in zip(ranges, seen, existing, strict=True):
        result = after.get(param)
        if bound.has_master:
            close_master(bound.shard.master, param, bound.param, bound.values[MASTER])
            result = {**(result or {}), MASTER: bound.values[MASTER]}
        if result is not None:
            result = habits.without_dispensable(bound.param, result)
            _commit(bound, result, user_state or user_states.of(bound.shard.param))


def _with_gradient(ranges: list[BoundRange], habits: Habits) -> list[BoundRange]:
    """Without parameters that have no gradient: who shares a bucket with them differs between ranks."""
    if habits.state_without_gradient:
        return ranges
    return [b for b in ranges if b.gradient is not None or habits.gradient(b.shard.param) is not None]


def _seen_by_param(
    shared: SharedValues, ranges: Sequence[BoundRange], seen: Sequence[Tensor]
) -> dict[str, dict[Tensor, Any]]:
    """Attributes that are dicts by parameter, with what the optimizer sees in place of the user's parameters."""
    pairs = list(zip(ranges, seen, strict=True))
    return {
        name: {param: real[bound.shard.param] for bound, param in pairs if bound.shard.param in real}
        for name, real in shared.by_param.items()
    }


def _update_in_one_pass(
    shadow: Shadow,
    shared: SharedValues,
    habits: Habits,
    ranges: Sequence[BoundRange],
    user_states: StateStore,
    kwargs: Mapping[str, Any],
) -> list[BoundRange]:
    """Update what has a master that we keep by one kernel, where there is one with the same bits. Returns the rest."""
    if kwargs or not any(bound.has_master for bound in ranges):
        return list(ranges)
    rest = []
    asked: dict[int, AdamWStep | None] = {}
    for bound in ranges:
        number, state = bound.shard.group, user_states.get(bound.shard.param)
        if not bound.has_master or any(state.get(name) is None for name in (MASTER, *_MOMENTS, "step")):
            rest.append(bound)
            continue
        if number not in asked:
            asked[number] = step_of_group(shadow.cls, shared.group(number), shared.attributes)
        step, grad = asked[number], _gradient(bound, habits)
        first, second = (bound.values[name] for name in _MOMENTS)
        part = MasterRange(bound.param, grad, bound.values[MASTER], first, second, state["step"])  # type: ignore[arg-type]
        if step is None or not fits(part) or not is_exact(step, bound.shard.master, part):
            rest.append(bound)
            continue
        update_masters(step, bound.shard.master, [part])
        shared.unvisited.discard(number)
        if bound.last:
            state["step"].add_(1)
    return rest


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _seen_by_optimizer(bound: BoundRange, user_state: UserState) -> Tensor:
    """What the optimizer is to update: the bound parameter, or its master."""
    if bound.has_master:
        exists = user_state.get(MASTER) is not None
        return open_master(bound.shard.master, bound.param, bound.values[MASTER], exists=exists)
    _follow_weights(bound, user_state)
    return bound.param


def _hand_gradient(bound: BoundRange, param: Tensor, habits: Habits) -> None:
    grad = _gradient(bound, habits) if bound.is_alias else None
    if grad is not None:
        habits.hand_gradient(param, grad.to(param.dtype) if bound.has_master else grad)


def _gradient(bound: BoundRange, habits: Habits) -> Tensor | None:
    """This rank's gradient of a range."""
    if bound.gradient is not None:
        return bound.gradient
    grad = habits.gradient(bound.shard.param)
    if grad is None:
        return None
    return local_shard(grad) if bound.whole else local_range(local_shard(grad), bound.start, bound.stop)


def local_range(local: Tensor, start: int, stop: int) -> Tensor:
    """The elements ``[start, stop)`` of a flattened local tensor."""
    return local.reshape(-1)[start:stop]


def _in_slot(bound: BoundRange, user_state: UserState) -> UserState:
    """What the shadow finds: the slot, and the user's scalars (copies of them if a later range needs them too)."""
    if bound.has_master:  # which the optimizer does not know of
        user_state = {name: value for name, value in user_state.items() if name != MASTER}
    if bound.last:
        return user_state | {name: value for name, value in bound.values.items() if user_state.get(name) is not None}
    return {
        name: bound.values[name] if name in bound.values and value is not None else _own_scalar(value)
        for name, value in user_state.items()
    }


def _follow_weights(bound: BoundRange, user_state: UserState) -> None:
    master = bound.values.get(MASTER)
    if master is not None and user_state.get(MASTER) is not None:
        param, slot = local_shard(bound.param).detach(), local_shard(master)
        if not is_wrapper(param) and is_only_copy(param, slot):
            let_weights_win(param, slot)


def _own_scalar(value: Any) -> Any:
    """A copy of a counter; tensors of any other size are the user's, and no optimizer writes them."""
    return value.clone() if isinstance(value, Tensor) and value.numel() == 1 else value


def _commit(bound: BoundRange, after: UserState, user_state: UserState) -> None:
    for name, slot in bound.values.items():
        value = after.get(name)
        if value is not None and value is not slot:
            _fill_slot(bound, name, value)
    if bound.last:
        for name in user_state.keys() - after.keys():
            del user_state[name]
        for name, value in after.items():
            user_state[name] = bound.shard.homes[name] if name in bound.values else value
        return
    for name, value in after.items():
        if name not in bound.values and name not in user_state and isinstance(value, Tensor) and value.numel() > 1:
            raise RuntimeError(
                f"state {name!r} of {bound.shard.name} appeared in a step, was not there when the optimizer was "
                "attached, and cannot be divided; attach again with remove_offload() and offload_optimizer()."
            )


def _fill_slot(bound: BoundRange, name: str, value: Tensor) -> None:
    """Move state that the optimizer has just created (or exchanged for a new tensor) into the slot."""
    created, slot = leaves_of(value), leaves_of(bound.values[name])
    if [(leaf.shape, leaf.dtype) for leaf in created] != [(leaf.shape, leaf.dtype) for leaf in slot]:
        raise RuntimeError(
            f"state {name!r} of {bound.shard.name} was expected as "
            f"{[(tuple(leaf.shape), leaf.dtype) for leaf in slot]} and is now "
            f"{[(tuple(leaf.shape), leaf.dtype) for leaf in created]}; hyperparameters that change the layout of the "
            "state must be changed before step()."
        )
    for source, target in zip(created, slot, strict=True):
        if source is not target:
            target.copy_(source)
