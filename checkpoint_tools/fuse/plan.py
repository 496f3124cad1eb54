"""Plan splits of fused tensors and merges of parts, key by key: *keys × rules → plan*.

::

    keys ──names.sorted_out──▶ tensors of the model ──rules──▶ Match ──┐
                               state by FQN ────whose tensor is it?────┴──▶ Exchange: fusions, copies, new names

One plan serves checkpoints in files (:mod:`checkpoint_tools.fuse.files`) and state dicts in memory
(:mod:`checkpoint_tools.fuse.live`). State follows its parameter: if the keys include the model's tensors, state is
exchanged like its tensor, even if FQNs have other prefixes (``model.module.x`` and ``module.module.x``). Without a
model, rules match the FQNs of the state. The plan reads shapes, and only the values that it has to copy or compare.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.regions import Comb, Shape
from ..core.text import CheckpointError, check_patterns, is_excluded, short_repr, some_of
from ..core.values import same_values, values_in
from ..stored.checkpoint import Path
from .names import GroupName, Names, Owners, StateName
from .rules import ALL, MAX_KEY, Match, Rule, Wanted, Way, find_matches, match_of, presets_for


class Fusion(NamedTuple):
    """One fused tensor and its parts; a checkpoint stores either the fused tensor or the parts."""

    fused: str
    parts: tuple[str, ...]
    shape: Shape  # of the fused tensor
    dtype: torch.dtype
    dim: int
    combs: tuple[Comb, ...]
    is_flat: bool = False  # stored flat, in one dimension
    owner: str | None = None  # the model's fused key: its own, or for state its parameter's; None without a model

    def part_shapes(self) -> list[tuple[str, Shape]]:
        """List the key and the shape of each part."""
        shapes = [comb.part_shape(self.shape, self.dim) for comb in self.combs]
        return list(zip(self.parts, shapes, strict=True))


Fqn = tuple[str, str]
"""An optimizer's prefix, and the FQN of one of its parameters."""


@dataclass
class Exchange:
    """The plan: new keys and values for old keys. Keys that the plan does not name stay."""

    fusions: list[Fusion] = field(default_factory=list)  # to split or to merge; the model's come first
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)  # old key → new keys with its value
    objects: dict[str, Any] = field(default_factory=dict)  # key → new value: param groups that list the new FQNs
    paths: dict[str, Path] = field(default_factory=dict)  # new key → its path in the nested state dict, if known
    parameters: int = 0  # number of fusions that are tensors of the model
    matched: tuple[str, ...] = ()  # names of fused tensors as rules matched them: keys, or FQNs without a model
    listed: dict[Fqn, tuple[str, ...]] = field(default_factory=dict)  # FQN → its replacement in param groups
    owners: dict[Fqn, str] = field(default_factory=dict)  # FQN of state → key of the model's tensor
    notes: tuple[str, ...] = ()  # for people

    def copy(self, name: StateName, fqns: Sequence[str]) -> None:
        """Plan a copy of an entry of state for each of the parameters ``fqns``."""
        self.copies[name.key] = tuple(self.renamed(name, fqn) for fqn in fqns)

    def renamed(self, name: StateName, fqn: str) -> str:
        """Return the key of the same entry for the parameter ``fqn``, and record its path."""
        key, path = name.renamed(fqn)
        if path:
            self.paths[key] = path
        return key

    def relist(self, name: GroupName, content: Any, new: Mapping[str, Sequence[str]]) -> None:
        """Replace FQNs in the param groups stored under ``name``; ``new``: old FQN → its replacements."""

        def relisted(value: Any, *, is_list: bool) -> Any:
            if is_list:
                return [fqn for old in value for fqn in new.get(str(old), (old,))]
            if isinstance(value, dict):
                return {**value, "params": relisted(value.get("params", ()), is_list=True)}
            return [relisted(each, is_list=False) for each in value] if isinstance(value, list | tuple) else value

        if not new.keys().isdisjoint(listed(content, name)):
            self.objects[name.key] = relisted(content, is_list=name.is_list)

    def check_new_keys(self, before: Set[str], old: Set[str] = frozenset()) -> None:
        """Raise if a new key is taken. ``before``: all keys of the checkpoint; ``old``: keys that fusions remove."""
        fused = (key for fusion in self.fusions for key in (fusion.fused, *fusion.parts) if key not in old)
        new = Counter([*fused, *(key for keys in self.copies.values() for key in keys)])
        left = before - old - self.copies.keys()
        taken = sorted(key for key, count in new.items() if count > 1 or key in left)
        if taken:
            raise CheckpointError(f"there would be two values named {taken[0]} ({len(taken)} such names)")


Layout = tuple[Shape, int, tuple[Comb, ...]]
"""Shape of a fused tensor, its fused dimension, and the comb of each part along it."""


@dataclass
class Source:
    """Input of a plan, by flat key; ``tensors``: objects with shape and dtype; ``values``: the config's, by name."""

    names: Names
    tensors: Mapping[str, Any]
    paths: Mapping[str, Path]
    groups: Mapping[GroupName, Any]
    values: Mapping[str, float]

    def value(self, key: str) -> Any:
        """Return the object or scalar of ``key``, to copy or compare it."""
        raise NotImplementedError

    def values_for(self, rule: Rule, key: str) -> Mapping[str, float]:
        """Return the config values for the tensor ``key``."""
        del rule, key
        return self.values

    def joined(self, match: Match, keys: Sequence[str], where: str) -> Layout:
        """Return the layout of the tensor that is merged from ``keys``; see :meth:`Match.joined`."""
        shapes = [tuple(self.tensors[key].shape) for key in keys]
        return match.joined(shapes, self.values_for(match.rule, keys[0]), where)

    def check_state(self, key: str, shape: Shape, fused: str) -> None:
        """Raise if state cannot be split like its parameter, which has ``shape``."""


def plan_exchange(
    way: Way, source: Source, rules: Sequence[Rule], excluded: Sequence[str] = (), wanted: Wanted = ALL
) -> Exchange:
    """Plan which tensors to split, or which parts to merge. Rules that are not optional must match."""
    planner = _Planner(way, source, rules, excluded, wanted)
    (planner.split if way == "split" else planner.merge)()
    found = planner.found
    old = {key for each in found.fusions for key in ((each.fused,) if way == "split" else each.parts)}
    found.check_new_keys(planner.keys, old)
    for name, content in source.groups.items():
        own = {fqn: new for (optimizer, fqn), new in found.listed.items() if optimizer == name.optimizer}
        found.relist(name, content, own)
    return found


class _Role(NamedTuple):
    """The role of a name in a match: the fused tensor (``number`` is None), or part ``number``.

    ``fused`` and ``parts`` are spelled as in the model, or as in this optimizer. ``owner``: for state, the model's key.
    """

    match: Match
    fused: str
    parts: tuple[str, ...]
    number: int | None
    owner: str | None


class _Planner:
    def __init__(
        self, way: Way, source: Source, rules: Sequence[Rule], excluded: Sequence[str], wanted: Wanted
    ) -> None:
        self.way, self.source, self.rules, self.excluded, self.wanted = way, source, rules, excluded, wanted
        names = source.names
        model = [key for key in names.others if key in source.tensors]
        self.shapes: Mapping[str, Shape] = {key: tuple(source.tensors[key].shape) for key in model}
        fqns = dict.fromkeys((name.optimizer, name.fqn) for name in names.states)
        for group, content in source.groups.items():
            fqns.update(dict.fromkeys((group.optimizer, fqn) for fqn in listed(content, group)))
        self.fqns = tuple(fqns)
        keys = [*names.others, *(name.key for name in names.states), *(name.key for name in names.groups)]
        check_patterns("--exclude", excluded, [*keys, *(name for fqn in fqns for name in (fqn[1], _key_of(fqn)))])
        self.keys = frozenset(keys)
        self.found = Exchange()
        self.layouts: dict[str, Layout] = {}  # of the model's fused tensors
        self.used: set[int] = set()  # numbers of rules that match
        self.whole: dict[str, None] = {}  # matched tensors that are not fused (no gate)
        self.of_model = self._roles(model, self.shapes)
        self.of_state = self._roles_of_state(fqns, Owners(key for key in model if len(key) <= MAX_KEY))
        idle = [rule.fused for n, rule in enumerate(self.rules) if n not in self.used and not rule.optional]
        if not self.used or (idle and self.wanted is ALL):
            nothing = ", ".join(idle or dict.fromkeys(rule.fused for rule in self.rules))
            if way == "split" and any(match_of("merge", rule, key) for rule in rules for key in self.keys):
                nothing += ", but their parts: they are split already"
            raise CheckpointError(
                f"rules that match nothing: {nothing}. Look at the keys, and take out what is not there; "
                f"{presets_for(way, [*model, *(fqn for _, fqn in self.fqns)])}"
            )
        if self.whole:
            stay = some_of([*self.whole], 3)
            self.found.notes = (f"left as they are: {stay}: no gate, as the next layer takes all of each",)
        self._check_ambiguity()
        roles = [*self.of_model.values(), *(role for role in self.of_state.values() if role.owner is None)]
        self.found.matched = tuple(dict.fromkeys(role.match.fused for role in roles))
        for fqn, role in self.of_state.items():  # in param groups, a merged tensor takes the place of its first part
            self.found.listed[fqn] = role.parts if role.number is None else () if role.number else (role.fused,)

    def _roles(self, names: Iterable[str], shapes: Mapping[str, Shape]) -> dict[str, _Role]:
        known = [name for name in names if not is_excluded(name, self.excluded)]
        roles = {}
        for match in find_matches(self.way, known, self.rules, self.wanted):
            self.used.update(number for number, rule in enumerate(self.rules) if rule is match.rule)
            if self.way == "split" and match.is_whole(shapes):
                self.whole[match.fused] = None
            elif self.way == "split":
                roles[match.fused] = _Role(match, match.fused, match.parts, None, None)
            else:
                for number, part in enumerate(match.parts):
                    roles[part] = _Role(match, match.fused, match.parts, number, None)
        return roles

    def _roles_of_state(self, fqns: Iterable[Fqn], owners: Owners) -> dict[Fqn, _Role]:
        roles: dict[Fqn, _Role] = {}
        alone: dict[str, list[str]] = {}
        for optimizer, fqn in fqns:
            owner = owners.of(fqn, self._outcome)
            if owner is None:
                if not is_excluded(_key_of((optimizer, fqn)), self.excluded):  # --exclude matches keys
                    alone.setdefault(optimizer, []).append(fqn)
                continue
            self.found.owners[optimizer, fqn] = owner.key
            role = self.of_model.get(owner.key)
            if role is not None:
                own = [owner.own(key, fqn) for key in (role.fused, *role.parts)]
                roles[optimizer, fqn] = _Role(role.match, own[0], tuple(own[1:]), role.number, owner.key)
        shapes = self._shapes_of_state()
        for optimizer, names in alone.items():
            found = self._roles(names, shapes.get(optimizer, {}))
            roles.update(((optimizer, fqn), role) for fqn, role in found.items())
        return roles

    def _outcome(self, key: str) -> object:
        """Return a value that is equal for model tensors whose state would be exchanged in the same way."""
        role = self.of_model.get(key)
        return role and (id(role.match.rule), role.number, self.shapes[key], self.source.tensors[key].dtype)

    def _check_ambiguity(self) -> None:
        for optimizer, param in self.fqns:
            if param.isdecimal() and self.of_model:
                raise CheckpointError(
                    f"the parameters of the optimizer {optimizer or '(at the top)'} are numbered ({param}), and "
                    "which state is of which is not known; save it as torch.distributed.checkpoint.state_dict gives it"
                )
        for name in self.source.names.states:
            fqn = name.optimizer, name.fqn
            is_known = fqn in self.of_state or fqn in self.found.owners or name.fqn in self.whole
            is_left = not is_known and name.key in self.source.tensors
            found = (match_of(self.way, rule, name.key) for rule in self.rules if is_left)
            is_matched = any(match is not None and self.wanted(match) for match in found)
            if is_matched and not is_excluded(name.key, self.excluded):
                raise CheckpointError(
                    f"{name.key} may be a tensor of a model, or state of {name.fqn}; rename the one or --exclude it"
                )

    def split(self) -> None:
        tensors = self.source.tensors
        for key, own in self.of_model.items():
            shape, dtype = self.shapes[key], tensors[key].dtype
            dim, combs = own.match.divided(shape, self.source.values_for(own.match.rule, key), self.shapes)
            self._fuse_model(Fusion(key, own.parts, shape, dtype, dim, combs, owner=key), key, own.parts)
        alone = self._shapes_of_state()
        for name in self.source.names.states:
            role = self.of_state.get((name.optimizer, name.fqn))
            if role is None:
                continue
            inside = values_in(self.source.value(name.key)) if name.key not in tensors else ()
            if any(isinstance(each, Tensor) and each.dim() > 0 for each in inside):
                raise CheckpointError(
                    f"{name.key} is an object with tensors in it, and it is not known how to split that; --exclude its "
                    "parameter"
                )
            if name.key not in tensors or tensors[name.key].shape == ():
                self.found.copy(name, role.parts)
                continue
            tensor = tensors[name.key]
            if role.owner is not None:
                shape, dim, combs = self.layouts[role.owner]
            else:
                shape = alone[name.optimizer][name.fqn]
                values = self.source.values_for(role.match.rule, name.key)
                dim, combs = role.match.divided(shape, values, alone[name.optimizer])
            self.source.check_state(name.key, shape, role.fused)
            parts = tuple(self.found.renamed(name, part) for part in role.parts)
            is_flat = len(shape) > 1 and tensor.shape == (torch.Size(shape).numel(),)
            self.found.fusions.append(Fusion(name.key, parts, shape, tensor.dtype, dim, combs, is_flat, role.owner))

    def _fuse_model(self, fusion: Fusion, old: str, new: Iterable[str]) -> None:
        """Plan a fusion of the model; put the ``new`` keys next to ``old`` in the nested state dict."""
        self.found.fusions.append(fusion)
        self.found.parameters += 1
        self.layouts[fusion.fused] = fusion.shape, fusion.dim, fusion.combs
        path = self.source.paths.get(old, ())
        for key in new if path and ".".join(map(str, path)) == old else ():
            # Find the longest prefix of the old path that the new key begins with.
            leads = ((at, "".join(f"{part}." for part in path[:at])) for at in reversed(range(len(path))))
            at, lead = next((at, lead) for at, lead in leads if key.startswith(lead))
            self.found.paths[key] = (*path[:at], key.removeprefix(lead))

    def _shapes_of_state(self) -> dict[str, dict[str, Shape]]:
        """Return parameter shapes by optimizer and FQN: the shape of each one's state with the most dimensions."""
        shapes: dict[str, dict[str, Shape]] = {name.optimizer: {} for name in self.source.names.states}
        for name in self.source.names.states:
            is_state = bool(name.kind) or name.before.endswith("state.")  # not an entry of a group
            if is_state and name.key in self.source.tensors:
                shape = tuple(self.source.tensors[name.key].shape)
                known = shapes[name.optimizer].setdefault(name.fqn, shape)
                if len(shape) > len(known):
                    shapes[name.optimizer][name.fqn] = shape
        return shapes

    def merge(self) -> None:
        for match in {role.fused: role.match for role in self.of_model.values()}.values():
            fusion = self._fused(match, match.fused, match.parts, match.fused)
            self._fuse_model(fusion, match.parts[0], [match.fused])
        self._check_options()
        entries: dict[tuple[str, str, str], dict[int, tuple[StateName, _Role]]] = {}
        for name in self.source.names.states:
            role = self.of_state.get((name.optimizer, name.fqn))
            if role is not None and role.number is not None:
                entries.setdefault((name.before, role.fused, name.after), {})[role.number] = name, role
        for by_number in entries.values():
            entry, role = next(iter(by_number.values()))
            missing = [part for number, part in enumerate(role.parts) if number not in by_number]
            if missing:
                raise CheckpointError(
                    f"{role.fused} cannot be merged: some of its parts have {entry.name}, and {', '.join(missing)} "
                    "have not; save them with the same state"
                )
            names = [by_number[number][0] for number in range(len(role.parts))]
            keys = tuple(name.key for name in names)
            if all(key in self.source.tensors and self.source.tensors[key].shape != () for key in keys):
                fused = self.found.renamed(names[0], role.fused)
                fusion = self._fused(role.match, fused, keys, role.owner and role.match.fused)
                param = None if role.owner is None else self.layouts[role.match.fused][0]
                if param is not None and param != fusion.shape:
                    raise CheckpointError(
                        f"{fused} would have shape {fusion.shape}, its parameter {param}: it is not known how to merge "
                        f"that; --exclude {role.fused}"
                    )
                self.found.fusions.append(fusion)
                continue
            first, *others = (self.source.value(key) for key in keys)
            for key, value in zip(keys[1:], others, strict=True):
                if not same_values(first, value):
                    raise CheckpointError(
                        f"{keys[0]} is {short_repr(first)} and {key} is {short_repr(value)}; one fused value cannot be "
                        "both"
                    )
            self.found.copy(names[0], [role.fused])
            self.found.copies.update((key, ()) for key in keys[1:])

    def _fused(self, match: Match, fused: str, keys: tuple[str, ...], owner: str | None) -> Fusion:
        dtypes = {key: self.source.tensors[key].dtype for key in keys}
        first = dtypes[keys[0]]
        for key, dtype in dtypes.items():
            if dtype != first:
                raise CheckpointError(
                    f"{fused} cannot be merged: {key} is {dtype} and {keys[0]} {first}, and a fused tensor is all of "
                    "one dtype; convert one of them first"
                )
        shape, dim, combs = self.source.joined(match, keys, fused)
        return Fusion(fused, keys, shape, first, dim, combs, owner=owner)

    def _check_options(self) -> None:
        """Check that the parts of a tensor have equal param-group options: the fused tensor can have only one set."""
        options: dict[Fqn, Mapping[str, Any]] = {}
        for name, content in self.source.groups.items():
            for group in groups_in(content, name):
                entries = {entry: value for entry, value in group.items() if entry != "params"}
                if name.is_list:  # the options are under other keys: treat each group's as different
                    entries = {"listed in": name.key}
                options.update(((name.optimizer, str(fqn)), entries) for fqn in group.get("params", ()))
        roles = {(optimizer, role.fused): role.parts for (optimizer, _), role in self.of_state.items()}
        for (optimizer, fused), parts in roles.items():
            known = {part: options[optimizer, part] for part in parts if (optimizer, part) in options}
            missing = [part for part in parts if part not in known]
            if known and missing:
                raise CheckpointError(
                    f"{fused} cannot be merged: param groups list {list(known)}, and not {missing}. Exclude it"
                )
            first: Mapping[str, Any] = known.get(parts[0], {})
            for part, own in known.items():
                if not same_values(first, own):
                    shown = [", ".join(f"{name}={value}" for name, value in each.items()) for each in (first, own)]
                    raise CheckpointError(
                        f"{fused} cannot be merged: {parts[0]} and {part} are in param groups with different options, "
                        f"{shown[0]} and {shown[1]}; one parameter has one of each. Exclude it, with --exclude"
                    )


def _key_of(fqn: Fqn) -> str:
    """Return the prefix of the keys of a parameter's state."""
    return f"{fqn[0]}.state.{fqn[1]}".removeprefix(".")


def listed(content: Any, name: GroupName) -> list[str]:
    """List the FQNs in the param groups stored under ``name``."""
    return [str(fqn) for group in groups_in(content, name) for fqn in group.get("params", ())]


def groups_in(content: Any, name: GroupName) -> list[dict[str, Any]]:
    """List the param groups in ``content``; a bare list of FQNs becomes a group without options."""
    groups = content if isinstance(content, list | tuple) else [content]
    if name.is_list:
        return [{"params": groups}] if groups is content else []
    return [group for group in groups if isinstance(group, dict)]
