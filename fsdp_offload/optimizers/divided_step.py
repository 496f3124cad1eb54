"""One logical step of the user's optimizer, run on one bucket after the other.

The step of a bucket changes its parameters and their state, and perhaps entries of param groups (``group["k"]``) and
attributes of the optimizer. Each bucket starts from the same entries and attributes, and must end with equal ones. The
user's optimizer gets these once.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from ..fsdp.optim import no_global_step_hooks, plain_step_of
from ..state.layout import tensors_in
from ..state.store import UserState
from .capabilities import Capabilities

ENGINE_ATTRIBUTE = "_offload_engine"  # of an offloaded optimizer
_OWN_ATTRIBUTES = frozenset({"param_groups", "state", "step", ENGINE_ATTRIBUTE})  # not copied to a shadow
_SCHEDULED = frozenset({"lr", "betas"})  # entries that schedulers write, perhaps into tensors; torch only reads them
_PLAIN = frozenset({bool, int, float, str, type(None)})
_SCALERS = frozenset({"grad_scale", "found_inf"})  # a GradScaler sets them for one step, and writes them after it


class DividedStep:
    """One logical step of an optimizer over any number of buckets, and its changes of groups and attributes."""

    def __init__(
        self,
        cls: type[Optimizer],
        capabilities: Capabilities,
        optimizer: Any,
        kwargs: Mapping[str, Any] | None = None,
        pinned: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Record the start of a step with ``kwargs``. ``pinned``: as :attr:`LogicalStep.pinned`, whose entries win."""
        self.conventions, self._cls, self._is_known = capabilities.conventions, cls, capabilities.known
        self._step = self.conventions.begin(optimizer, kwargs or {})
        pairs = itertools.zip_longest(pinned, self._step.pinned, fillvalue=dict[str, Any]())
        self._pinned = [{**first, **own} for first, own in pairs]
        groups = entries_of(optimizer)
        self._start = tree_flatten(groups)
        self._versions = _versions(self._start[0])
        # Schedulers and a GradScaler may write their entries before the step ends.
        self._groups = [{n: _own(v) if n in _SCHEDULED else v for n, v in group.items()} for group in groups]
        self._attributes = instance_attributes(optimizer)
        scaler = {name: _own(self._attributes[name]) for name in _SCALERS & self._attributes.keys()}
        self._attributes |= scaler
        # Kept until updates on other streams have read them; the originals may be written earlier.
        self.copies = tensors_in([[group.get(name) for group in self._groups for name in _SCHEDULED], scaler])
        by_param = self.conventions.attributes_by_param
        self.by_param: dict[str, dict[Tensor, Any]] = {name: self._attributes[name] for name in by_param}
        self._unwatched = {*self._step.attributes(), *self.by_param, *scaler}
        self._made: dict[str, Any] = {}  # attributes that torch adds to an instance: hook tables, which stay empty
        self._changes: dict[tuple[int | None, str], Any] = {}  # by group and entry; the group is None for attributes
        self._rebound: set[tuple[int | None, str]] = set()  # entries that a step has replaced, not written in place
        self.unvisited = set(range(len(self._groups)))  # groups whose parameters no bucket has had

    def run(
        self,
        params: Mapping[int, list[Tensor]],
        state: Mapping[Tensor, UserState],
        by_param: Mapping[str, dict[Tensor, Any]] | None = None,
    ) -> dict[Tensor, UserState]:
        """Run the plain step of the class on ``params``, by number of group; return their ``state`` after it.

        It runs on a *shadow*: an instance that the user never sees, with live hyperparameters and attributes, and only
        with the groups in ``params``, as some classes fail on empty groups. Changes outside of state are recorded.
        ``by_param`` replaces attributes that have parameters as keys, and gets their new entries.

        Raises:
            RuntimeError: a change differs from that of an earlier bucket of the same step, or a key of the state is no
                parameter.
        """
        # A class without a tested row may write into entries of a group, so each bucket gets copies of them.
        given = {number: self._groups[number] for number in sorted(params)}
        if not self._is_known:
            given = {number: {n: _own(v) for n, v in entries.items()} for number, entries in given.items()}
        groups = [
            {**entries, **{n: _own(v) for n, v in self._pinned[number].items()}, "params": params[number]}
            for number, entries in given.items()
        ]
        attributes = {**self._attributes, **self._step.attributes(), **(by_param or {})}
        attributes |= {"param_groups": groups, "state": defaultdict(dict, state)}
        shadow: Optimizer = object.__new__(self._cls)
        if not self._made:
            # Makes the (empty) hook tables that step() may look at, as unpickling does. It also writes into
            # ``defaults``, which are therefore not the real optimizer's.
            Optimizer.__setstate__(shadow, {**attributes, "defaults": {}})
            self._made = {name: value for name, value in shadow.__dict__.items() if name not in attributes}
        shadow.__dict__.update(self._made | attributes)
        try:
            # An unknown step may call a hooked one of its parent class; the logical step has fired hooks already.
            with nullcontext() if self._is_known else no_global_step_hooks():
                plain_step_of(self._cls)(shadow, **self._step.kwargs)
            if foreign := [key for key in list[object](shadow.state) if not isinstance(key, Tensor)]:
                raise RuntimeError(
                    "the optimizer keeps state of its own, apart from that of parameters "
                    f"(optimizer.state[{foreign[0]!r}]); it cannot be divided among buckets"
                )
            self._collect(given, shadow)
            return dict(shadow.state)
        finally:
            shadow.__dict__.clear()  # else a reference to it would keep gradients and places after the step

    def _collect(self, given: Mapping[int, dict[str, Any]], shadow: Optimizer) -> None:
        """Record the changes of a bucket's step in the entries that it was ``given``, and in attributes."""
        for (number, entries), group in zip(given.items(), shadow.param_groups, strict=True):
            starts, pinned = self._groups[number], self._pinned[number]
            for name, value in group.items():
                start, was = starts.get(name), entries.get(name)
                if (value is was and was is start) or name == "params" or name in pinned:
                    continue
                if _changed(start, was, value):
                    self._note(number, name, value, f"param_groups[{number}][{name!r}]")
                    if value is not was:
                        self._rebound.add((number, name))
        self.unvisited -= given.keys()
        # Tensors and containers are the real optimizer's own objects, so writing into them needs no commit.
        for name, value in instance_attributes(shadow).items():
            start = self._attributes.get(name)
            if value is not start and name not in self._unwatched and _changed(start, start, value):
                self._note(None, name, value, f"optimizer.{name}")

    def _note(self, number: int | None, name: str, value: Any, place: str) -> None:
        before = self._changes.setdefault((number, name), value)
        if not _same_values(before, value):
            raise RuntimeError(
                f"{place} ended at {before!r:.80} in one bucket and at {value!r:.80} in another of the same step: this "
                "optimizer's step cannot be divided by parameter. Leave out trust_separable=True."
            )
        self._changes[number, name] = value

    def still_starts_from(self, optimizer: Optimizer) -> bool:
        """Return whether the param groups are unchanged since this was made."""
        (now, form), (start, before) = tree_flatten(entries_of(optimizer)), self._start
        if form != before or _versions(now) != self._versions:
            return False
        others = [(one, other) for one, other in zip(now, start, strict=True) if one is not other]
        return all(not isinstance(one, Tensor) and one == other for one, other in others)

    @property
    def changes_tensors(self) -> bool:
        return bool(tensors_in([*self._changes.values()]))

    @property
    def changed_entries(self) -> dict[str, Any]:
        return {name: value for (number, name), value in self._changes.items() if number is not None}

    def commit(self, optimizer: Optimizer) -> None:
        """Apply the changes of the whole step to the user's optimizer, once."""
        for (number, name), value in self._changes.items():
            target = optimizer.__dict__ if number is None else optimizer.param_groups[number]
            current = target.get(name)
            is_written = number is not None and (number, name) not in self._rebound
            if is_written and isinstance(value, Tensor) and isinstance(current, Tensor):
                current.copy_(value)  # in place, since the user may hold it
            else:
                target[name] = value
        self._step.finish()


def entries_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def instance_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that a shadow shares with ``optimizer``: all but groups, state, step and hooks."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in _OWN_ATTRIBUTES and not name.startswith("_optimizer_")
    }


def _versions(values: Iterable[Any]) -> list[object]:
    """Return values that change with writes into tensors; on the CPU also with those through ``.data``."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [(one._version, one.tolist() if one.device.type == "cpu" else None) for one in tensors]


def _own(value: Any) -> Any:
    """Copy a param group's entry, so that a step may write it without changing the user's."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, nn.Parameter) else leaf.clone()
        return leaf.copy() if type(leaf) is set else leaf

    return value if type(value) in _PLAIN else tree_map(own, value)  # tree_map takes 4 us


def _changed(start: object, given: object, end: object) -> bool:
    """Return whether a step has written into ``given``, its copy of ``start``, or has left another value, ``end``."""
    if end is given:
        # The copy is new: versions of its tensors count the writes of this bucket.
        written = given is not start and any(tensor._version > 0 for tensor in tensors_in(end))
        return written or not (isinstance(end, Tensor) or _same_values(start, end))
    return isinstance(start, Tensor) or isinstance(end, Tensor) or not _same_values(start, end)


def _same_values(one: Any, other: Any) -> bool:
    """Return whether entries or attributes are equal. Tensors on a device count as equal: their arithmetic repeats."""
    if one is other:
        return True
    (leaves, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(
        leaf is own or leaf.device.type != "cpu" or torch.equal(leaf, own)
        if isinstance(leaf, Tensor) and isinstance(own, Tensor)
        else bool(leaf == own)
        for leaf, own in zip(leaves, others, strict=True)
    )
