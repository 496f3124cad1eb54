"""Values that the buckets of one logical step share: param groups, the optimizer's attributes, and changes to them."""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..state.layout import tensors_in
from .capabilities import LogicalStep

ENGINE_ATTRIBUTE = "_offload_engine"
"""Where an offloaded optimizer keeps its engine; never copied to a shadow, which would be a reference cycle."""

_OWN_ATTRIBUTES = frozenset({"param_groups", "state", "step", ENGINE_ATTRIBUTE})

_SCHEDULED = frozenset({"lr", "betas"})
"""Entries of param groups that schedulers write, perhaps into tensors, and that optimizers of torch only read."""

_SCALERS = frozenset({"grad_scale", "found_inf"})  # a GradScaler sets them for one step, and writes them after it


class SharedValues:
    """Changes by one logical step to param groups and optimizer, however many buckets it has."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: LogicalStep,
        by_param: Iterable[str] = (),
        *,
        writes_any_entry: bool = False,
        copy_scheduled: bool = False,
    ) -> None:
        """Note where the step starts.

        Args:
            optimizer: the user's.
            step: what the optimizer's conventions make of it.
            by_param: names of attributes that are dicts with parameters as keys.
            writes_any_entry: a step of this class may write into entries of a group, so that each bucket needs its own.
                Otherwise buckets share tensors among them.
            copy_scheduled: copy them, and a GradScaler's, when the step begins: they may be written before it ends.
        """
        self.step = step
        self._start = entries_of(optimizer)
        self._start_versions = _versions(self._start)
        self._groups = self._start
        self._attributes = instance_attributes(optimizer)
        self._scaler: dict[str, Any] = {}
        self.copies: list[Tensor] = []  # in memory of the current stream: kept until updates on others have read them
        if copy_scheduled:
            self._groups = [
                {name: _own(value) if name in _SCHEDULED else value for name, value in group.items()}
                for group in self._start
            ]
            self._scaler = {name: _own(self._attributes[name]) for name in _SCALERS & self._attributes.keys()}
            scheduled = [group.get(name) for group in self._groups for name in _SCHEDULED]
            self.copies = list(tensors_in([*scheduled, self._scaler]))
        self._writes_any_entry = writes_any_entry
        self._unwatched = {*step.attributes(), *self._scaler, *by_param}
        self.by_param: dict[str, dict[Tensor, Any]] = {name: self._attributes[name] for name in by_param}
        self._changes: dict[tuple[int | None, str], Any] = {}  # by group and entry; of attributes, the group is None
        self._exchanged: set[tuple[int | None, str]] = set()  # entries that a step has not written into
        self._given: dict[int, dict[str, Any]] = {}  # entries of groups that the step that runs was given
        self.unvisited = set(range(len(self._groups)))  # groups that no bucket has had parameters of

    def lists(self) -> list[list[Tensor]]:
        """An empty list for each group."""
        return [[] for _ in self._groups]

    def groups_for(
        self, params: Sequence[list[Tensor]], counting: Collection[int] | None = None
    ) -> list[dict[str, Any]]:
        """Param groups for one step: those that have some of ``params``.

        Args:
            params: for each group of the optimizer.
            counting: numbers of the groups to show, and whose changes count, if not those with parameters. A plain step
                does not see its groups emptied, and some classes fail on that.
        """
        shown = {number for number, of_group in enumerate(params) if of_group} if counting is None else counting
        self._given = {
            number: {n: _own(v) if self._writes_any_entry else v for n, v in self._groups[number].items()}
            for number in sorted(shown)
        }
        return [
            {
                **given,
                **{name: _own(value) for name, value in self.step.pinned[number].items()},
                "params": params[number],
            }
            for number, given in self._given.items()
        ]

    def group(self, number: int) -> dict[str, Any]:
        """The entries of a param group that a bucket's step is given; nobody writes into them."""
        return {**self._groups[number], **self.step.pinned[number]}

    @property
    def attributes(self) -> dict[str, Any]:
        """The optimizer's own attributes, for a shadow."""
        return {**self._attributes, **self._scaler, **self.step.attributes()}

    def collect(self, groups: Sequence[Mapping[str, Any]], attributes: Mapping[str, Any]) -> None:
        """Note what a bucket's step has changed.

        Raises:
            RuntimeError: the change differs from that of an earlier bucket of the same step.
        """
        for (number, given), group in zip(self._given.items(), groups, strict=True):
            for name, value in group.items():
                pinned = name == "params" or name in self.step.pinned[number]
                if not pinned and _changed(self._groups[number].get(name), given.get(name), value):
                    self._note(number, name, value, f"param_groups[{number}][{name!r}]")
                    if value is not given.get(name):
                        self._exchanged.add((number, name))
        self.unvisited -= self._given.keys()
        for name, value in attributes.items():
            # Tensors and containers are the real optimizer's own objects, so writing into them needs no commit.
            start = self._attributes.get(name)
            if name not in self._unwatched and value is not start and _changed(start, start, value):
                self._note(None, name, value, f"optimizer.{name}")

    def _note(self, number: int | None, name: str, value: Any, place: str) -> None:
        before = self._changes.setdefault((number, name), value)
        if not same_values(before, value):
            ends = [text if len(text) <= 80 else f"{text[:80]}..." for text in map(repr, (before, value))]
            raise RuntimeError(
                f"{place} ended at {ends[0]} in one bucket and at {ends[1]} in another of the same step: this "
                "optimizer's step cannot be divided by parameter. Leave out trust_separable=True."
            )
        self._changes[number, name] = value

    def still_starts_from(self, optimizer: Optimizer) -> bool:
        """Return whether the param groups are what they were when this was made."""
        groups = entries_of(optimizer)
        if [group.keys() for group in groups] != [group.keys() for group in self._start]:
            return False
        return _versions(groups) == self._start_versions and all(
            value is start[name] if isinstance(value, Tensor) else same_values(value, start[name])
            for group, start in zip(groups, self._start, strict=True)
            for name, value in group.items()
        )

    @property
    def changed_entries(self) -> dict[str, Any]:
        """What this step changes in any param group, by name."""
        return {name: value for (number, name), value in self._changes.items() if number is not None}

    def commit(self, optimizer: Optimizer) -> None:
        """Give the changes of the whole step to the user's optimizer, once."""
        for (number, name), value in self._changes.items():
            target = optimizer.__dict__ if number is None else optimizer.param_groups[number]
            is_own = number is None or (number, name) in self._exchanged
            if is_own or not _write_into(target.get(name), value):
                target[name] = value
        self.step.finish()


def entries_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of each param group."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _write_into(current: Any, value: Any) -> bool:
    """Write an entry as the step did with its copy, as others may hold it; ``False``: this is no tensor, list, dict."""
    if isinstance(value, Tensor) and isinstance(current, Tensor):
        current.copy_(value)
    elif type(value) is type(current) is list:
        current[:] = value
    elif type(value) is type(current) is dict:
        current.clear()
        current.update(value)
    else:
        return False
    return True


def instance_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Attributes that a shadow shares with ``optimizer``: all but its own, and its hooks."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in _OWN_ATTRIBUTES and not name.startswith("_optimizer_")
    }


def _versions(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[tensor._version for tensor in tensors_in(list(group.values()))] for group in groups]


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
    """Return whether a step that was ``given`` an own copy of ``start`` has left something else."""
    if end is given:
        # The copy is fresh, so that the versions of its tensors count the writes of this bucket.
        written = given is not start and any(tensor._version > 0 for tensor in tensors_in(end))
        return written or not (isinstance(end, Tensor) or same_values(start, end))
    return isinstance(start, Tensor) or isinstance(end, Tensor) or not same_values(start, end)


def same_values(one: Any, other: Any) -> bool:
    """Return whether two entries or attributes are equal, also where tensors are inside.

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
