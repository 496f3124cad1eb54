"""Which keys of a checkpoint are exchanged for which, when fused tensors are split or parts are merged.

::

    keys, shapes ──names.sorted_out──▶ model tensors ──rules──▶ Match ─┐
                                       state by FQN ───whose tensor?───┴──▶ Exchange: fusions, copies, new objects

The state of a parameter follows the parameter: where a model's tensors are in the same checkpoint, its optimizers'
state is exchanged as they are, even if the FQNs have other prefixes (``model.module.x`` and ``module.module.x``). State
without a model is matched by its own FQNs. Only metadata are looked at, and objects and counters that have to be
changed or compared.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_offload.masters import MASTER

from .diff import same_values
from .errors import CheckpointError
from .inspect import matches as is_like
from .items import Reader
from .names import GroupName, Names, Path, StateName, sorted_out
from .options import check_same_options, holds_tensors
from .parts import Comb
from .reading import Checkpoint
from .rules import Match, Rule, find_matches, find_parts

Shape = tuple[int, ...]


class Fusion(NamedTuple):
    """One fused tensor and its parts, of which one or the other is in the checkpoint.

    Attributes:
        fused: its key.
        parts: their keys, in the order in which they lie in the fused tensor.
        shape: of the fused tensor.
        dtype: of all.
        dim: the fused dimension, not negative.
        combs: where each part lies along it.
        is_flat: it is stored as one dimension of all of its elements.
    """

    fused: str
    parts: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    dim: int
    combs: tuple[Comb, ...]
    is_flat: bool = False


class Exchange(NamedTuple):
    """What becomes of the keys of a checkpoint; those that are not named here stay.

    Attributes:
        fusions: fused tensors that are split, or parts that are merged.
        copies: key → the keys under which its bytes are in the new checkpoint: several, one or none.
        objects: key → the bytes that are there instead.
        paths: new key → where the value is in the nested state dict, if that is known.
        parameters: how many of the fusions are tensors of a model; the others are state.
    """

    fusions: tuple[Fusion, ...]
    copies: Mapping[str, tuple[str, ...]]
    objects: Mapping[str, bytes]
    paths: Mapping[str, Path]
    parameters: int


def split_exchange(
    checkpoint: Checkpoint, rules: Sequence[Rule], values: Mapping[str, float], excluded: Sequence[str] = ()
) -> Exchange:
    """Exchange fused tensors for their parts.

    Raises:
        CheckpointError: rules do not fit, state is of another shape than its parameter, names are taken or ambiguous.
    """
    return _guarded(lambda: _Split(checkpoint, rules, values, excluded).exchange())


def merge_exchange(
    checkpoint: Checkpoint, rules: Sequence[Rule], values: Mapping[str, float], excluded: Sequence[str] = ()
) -> Exchange:
    """Exchange parts for the fused tensors: the inverse.

    Raises:
        CheckpointError: as above; or parts are missing, or differ in what there can be only one of.
    """
    return _guarded(lambda: _Merge(checkpoint, rules, values, excluded).exchange())


def _guarded(work: Callable[[], Exchange]) -> Exchange:
    try:
        return work()
    except (ValueError, KeyError) as error:  # the rules' own errors
        raise CheckpointError(str(error)) from error


# --- whose state -----------------------------------------------------------------------------------------------------


class Owner(NamedTuple):
    """The tensor of a model that state belongs to: ``key = lead + same``, and the state's ``fqn = own_lead + same``."""

    key: str
    lead: str
    own_lead: str

    def own(self, other_key: str, fqn: str) -> str:
        """What the state calls another tensor of the same model."""
        if not other_key.startswith(self.lead):
            raise CheckpointError(
                f"state of {fqn} belongs to {self.key}, but what becomes of it, {other_key}, does not begin with "
                f"{self.lead!r} as well; write the rule with a placeholder for the prefix"
            )
        return self.own_lead + other_key.removeprefix(self.lead)


class Owners:
    """Finds them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_end: dict[str, list[str]] = {}
        for key in keys:
            at = 0
            while at >= 0:
                self._by_end.setdefault(key[at:], []).append(key)
                at = key.find(".", at) + 1 or -1

    def of(self, fqn: str, same: Callable[[str, str], bool]) -> Owner | None:
        """The owner of state of ``fqn``; of several, the one with the shortest prefix before it.

        Args:
            fqn: as the optimizer has it; it may have ``module.`` in front more often than the model.
            same: whether the same would become of two of the model's keys. If not, which is it?
        """
        own_lead, end = "", fqn
        while True:
            found = self._by_end.get(end, [])
            if found:
                depth = min(key.removesuffix(end).count(".") for key in found)
                nearest = [key for key in found if key.removesuffix(end).count(".") == depth]
                if not all(same(nearest[0], other) for other in nearest[1:]):
                    raise CheckpointError(
                        f"state of {fqn} may belong to {' or '.join(nearest[:3])}, of which not the same becomes; use "
                        "rules that match all of them, or --exclude them all"
                    )
                return Owner(nearest[0], nearest[0].removesuffix(end), own_lead)
            if not end.startswith("module."):
                return None
            own_lead, end = own_lead + "module.", end.removeprefix("module.")


# --- what both directions share --------------------------------------------------------------------------------------


class _Role(NamedTuple):
    """What a name is in a match: the fused tensor (no number), or one of the parts."""

    match: Match
    fused: str
    parts: tuple[str, ...]
    number: int | None
    owner: str | None  # the tensor of a model


class _Direction:
    """Splitting or merging."""

    find: Callable[[Iterable[str], Sequence[Rule]], list[Match]]

    def __init__(
        self, checkpoint: Checkpoint, rules: Sequence[Rule], values: Mapping[str, float], excluded: Sequence[str]
    ) -> None:
        self.checkpoint = checkpoint
        self.values = values
        self.tensors = checkpoint.tensors
        self.names: Names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
        self.excluded = excluded
        self._rules = rules
        self._used: set[int] = set()
        self._owned: set[str] = set()
        self.fusions: list[Fusion] = []
        self.copies: dict[str, tuple[str, ...]] = {}
        self.objects: dict[str, bytes] = {}
        self.paths: dict[str, Path] = {}

    def exchange(self) -> Exchange:
        model = [key for key in self.names.others if key in self.tensors]
        self.model_shapes = {key: self.tensors[key].shape for key in model}
        self._roles = self._roles_in(model)
        self._owners = Owners(model)
        groups = self._read_groups()
        self._state_roles: dict[str, dict[str, _Role | None]] = {}
        for optimizer, fqns in self._fqns(groups).items():
            self._state_roles[optimizer] = self._roles_of_state(optimizer, fqns)
        self._check_rules()
        self._check_ambiguity()
        self.exchange_model()
        parameters = len(self.fusions)
        self.exchange_states()
        self.check_groups(groups)
        for name, content in groups.items():
            self._exchange_group(name, content)
        self._check_new_keys()
        self._check_left()
        return Exchange(tuple(self.fusions), self.copies, self.objects, self.paths, parameters)

    def exchange_model(self) -> None:
        raise NotImplementedError

    def exchange_states(self) -> None:
        raise NotImplementedError

    def check_groups(self, groups: Mapping[GroupName, Any]) -> None:
        """Whether param groups allow it. Splitting they always do: every part has the options of the whole."""

    # --- roles ---

    def is_excluded(self, key: str) -> bool:
        return bool(self.excluded) and is_like(key, self.excluded)

    def model_matches(self) -> list[Match]:
        return list({role.fused: role.match for role in self._roles.values()}.values())

    def role(self, name: StateName) -> _Role | None:
        return self._state_roles[name.optimizer].get(name.fqn)

    def _roles_in(self, keys: Iterable[str]) -> dict[str, _Role]:
        """By the rules alone. Rules that match nothing are for :meth:`_check_rules`."""
        known = [key for key in keys if not self.is_excluded(key)]
        active = [
            number
            for number, rule in enumerate(self._rules)
            if any(self.matched(rule, key) is not None for key in known)
        ]
        self._used.update(active)
        roles = {}
        for match in type(self).find(known, [self._rules[number] for number in active]) if active else ():
            roles.update(self.roles_of(match, match.fused, match.parts, None))
        return roles

    def matched(self, rule: Rule, key: str) -> Match | None:
        raise NotImplementedError

    def roles_of(self, match: Match, fused: str, parts: tuple[str, ...], owner: str | None) -> dict[str, _Role]:
        raise NotImplementedError

    def _roles_of_state(self, optimizer: str, fqns: Iterable[str]) -> dict[str, _Role | None]:
        roles: dict[str, _Role | None] = dict.fromkeys(fqns)
        alone = []
        for fqn in fqns:
            owner = self._owners.of(fqn, self._become_the_same)
            if owner is None:
                alone.append(fqn)
                continue
            self._owned.add(fqn)
            role = self._roles.get(owner.key)
            if role is not None:
                parts = tuple(owner.own(part, fqn) for part in role.parts)
                role = _Role(role.match, owner.own(role.fused, fqn), parts, role.number, owner.key)
            roles[fqn] = role
        # Excluded by its own key, too: a person excludes what they see.
        known = [fqn for fqn in alone if not self.is_excluded(f"{optimizer}.state.{fqn}")]
        roles.update(self._roles_in(known))
        return roles

    def _become_the_same(self, one: str, other: str) -> bool:
        roles = [self._roles.get(key) for key in (one, other)]
        if roles[0] is None or roles[1] is None:
            return roles[0] is roles[1]
        return (
            roles[0].match.rule is roles[1].match.rule
            and roles[0].number == roles[1].number
            and self.tensors[one][1:3] == self.tensors[other][1:3]
        )

    def _fqns(self, groups: Mapping[GroupName, Any]) -> dict[str, list[str]]:
        found: dict[str, dict[str, None]] = {}
        for name in self.names.states:
            found.setdefault(name.optimizer, {})[name.fqn] = None
        for group, content in groups.items():
            for fqn in _listed(content, group):
                found.setdefault(group.optimizer, {})[str(fqn)] = None
        return {optimizer: list(fqns) for optimizer, fqns in found.items()}

    def _check_rules(self) -> None:
        idle = [r.fused for n, r in enumerate(self._rules) if n not in self._used and not r.optional]
        if idle or not self._used:
            raise CheckpointError(
                f"rules that match nothing: {', '.join(idle) or 'all of them'}. Look at the keys with the command "
                "inspect, and take out what is not there"
            )

    def _check_ambiguity(self) -> None:
        for optimizer, roles in self._state_roles.items():
            numbers = [fqn for fqn in roles if fqn.isdecimal()]
            if numbers and self._roles:
                raise CheckpointError(
                    f"the parameters of the optimizer {optimizer or '(at the top)'} are numbered ({numbers[0]}), so it "
                    "is not known which state is of which; save it as torch.distributed.checkpoint.state_dict gives it"
                )
        for name in self.names.states:
            is_left = name.key in self.tensors and self.role(name) is None and not self.is_excluded(name.key)
            if is_left and name.fqn not in self._owned and any(self.matched(rule, name.key) for rule in self._rules):
                raise CheckpointError(
                    f"{name.key} may be a tensor of a model, or state of {name.fqn}; rename the one or --exclude it"
                )

    # --- param groups ---

    def _read_groups(self) -> dict[GroupName, Any]:
        groups = [name for name in self.names.groups if name.key in self.checkpoint.objects]
        with Reader(self.checkpoint) as reader:
            return {name: reader.read_object(self.checkpoint.objects[name.key]) for name in groups}

    def _exchange_group(self, name: GroupName, content: Any) -> None:
        roles = self._state_roles.get(name.optimizer, {})
        if any(roles.get(str(fqn)) is not None for fqn in _listed(content, name)):
            buffer = io.BytesIO()
            torch.save(_relisted(content, name, lambda fqn: self.listed_as(fqn, roles.get(str(fqn)))), buffer)
            self.objects[name.key] = buffer.getvalue()

    def listed_as(self, fqn: Any, role: _Role | None) -> Sequence[Any]:
        raise NotImplementedError

    # --- results ---

    def copy(self, name: StateName, fqns: Sequence[str]) -> None:
        renamed = [name.renamed(fqn) for fqn in fqns]
        self.copies[name.key] = tuple(key for key, _ in renamed)
        self.paths.update((key, path) for key, path in renamed if path)

    def path_beside(self, key: str, other: str) -> None:
        """The new key ``other`` is where ``key`` was."""
        path = self.checkpoint.paths.get(key, ())
        if not path or ".".join(map(str, path)) != key:
            return
        for at in range(len(path), 0, -1):  # the longest beginning that both have
            lead = "".join(f"{part}." for part in path[: at - 1])
            if other.startswith(lead):
                self.paths[other] = (*path[: at - 1], other.removeprefix(lead))
                return

    def _check_new_keys(self) -> None:
        new = [key for keys in self.copies.values() for key in keys]
        new += [key for fusion in self.fusions for key in self.new_keys(fusion)]
        gone = set(self.copies) | {key for fusion in self.fusions for key in self.old_keys(fusion)}
        left = (set(self.tensors) | set(self.checkpoint.objects)) - gone
        taken = sorted(
            {key for key in new if key in left}
            | ({key for key in new if new.count(key) > 1} if len(set(new)) < len(new) else set())
        )
        if taken:
            raise CheckpointError(f"there would be two values named {taken[0]} ({len(taken)} such names)")

    def _check_left(self) -> None:
        """What nobody recognised as state of a tensor that is exchanged would stay as it was, without a word."""
        gone = {key for fusion in self.fusions for key in self.old_keys(fusion)}
        known = gone & self.model_shapes.keys()
        known |= {key.partition(".")[2] for key in known if "." in key}
        for key in self.names.others:
            if key in gone or key not in self.tensors or self.is_excluded(key):
                continue
            inside = next((name for name in _beginnings(key) if name in known), None)
            if inside is not None:
                raise CheckpointError(
                    f"{key} looks as if it belongs to {inside}, and it is not known how; --exclude the one to leave it "
                    "as it is, or the other"
                )

    def new_keys(self, fusion: Fusion) -> Sequence[str]:
        raise NotImplementedError

    def old_keys(self, fusion: Fusion) -> Sequence[str]:
        raise NotImplementedError


def _beginnings(key: str) -> Iterator[str]:
    """Every run of words of a key that another word follows."""
    words = key.split(".")
    for start in range(len(words)):
        for stop in range(start + 1, len(words)):
            yield ".".join(words[start:stop])


def _listed(content: Any, name: GroupName) -> list[Any]:
    """The FQNs in a param group, in several, or in the list of one."""
    return [fqn for group in _groups_in(content, name) for fqn in group.get("params", ())]


def _groups_in(content: Any, name: GroupName) -> list[dict[str, Any]]:
    if name.is_list:
        return [{"params": list(content)}] if isinstance(content, list | tuple) else []
    groups = content if isinstance(content, list | tuple) else [content]
    return [group for group in groups if isinstance(group, dict)]


def _relisted(content: Any, name: GroupName, listed_as: Callable[[Any], Sequence[Any]]) -> Any:
    if name.is_list:
        return [new for fqn in content for new in listed_as(fqn)]
    if isinstance(content, dict):
        return {**content, "params": [new for fqn in content.get("params", ()) for new in listed_as(fqn)]}
    return [_relisted(group, name, listed_as) if isinstance(group, dict) else group for group in content]


# --- splitting -------------------------------------------------------------------------------------------------------


class _Split(_Direction):
    find = staticmethod(find_matches)

    def matched(self, rule: Rule, key: str) -> Match | None:
        return rule.match(key)

    def roles_of(self, match: Match, fused: str, parts: tuple[str, ...], owner: str | None) -> dict[str, _Role]:
        return {fused: _Role(match, fused, parts, None, owner)}

    def listed_as(self, fqn: Any, role: _Role | None) -> Sequence[Any]:
        return (fqn,) if role is None else role.parts

    def new_keys(self, fusion: Fusion) -> Sequence[str]:
        return fusion.parts

    def old_keys(self, fusion: Fusion) -> Sequence[str]:
        return (fusion.fused,)

    def exchange_model(self) -> None:
        for match in self.model_matches():
            tensor = self.tensors[match.fused]
            dim, combs = self._divided(match, tensor.shape, self.model_shapes)
            self.fusions.append(Fusion(match.fused, match.parts, tensor.shape, tensor.dtype, dim, combs))
            for part in match.parts:
                self.path_beside(match.fused, part)

    def _divided(self, match: Match, shape: Shape, shapes: Mapping[str, Shape]) -> tuple[int, tuple[Comb, ...]]:
        dim = match.rule.dim_of(shape, match.fused)
        combs = match.rule.combs(shape[dim], self.values, match.fused)
        match.check_sibling(shapes, combs[0].size)
        return dim, combs

    def exchange_states(self) -> None:
        shapes = _shapes_of_state(self.names.states, self.tensors)
        for name in self.names.states:
            role = self.role(name)
            if role is None:
                continue
            tensor = self.tensors.get(name.key)
            param = None if role.owner is None else self.tensors[role.owner]
            if tensor is None or tensor.shape == ():
                if tensor is None:
                    self._check_object(name)
                self.copy(name, role.parts)
            elif name.name == MASTER and param is not None and tensor.dtype == param.dtype:
                self.copies[name.key] = ()  # it repeats the parameter
            else:
                shape = shapes[name.optimizer, name.fqn] if param is None else param.shape
                self._split_state(name, role, shape, shapes if param is None else None)

    def _check_object(self, name: StateName) -> None:
        with Reader(self.checkpoint) as reader:
            if holds_tensors(reader.read_object(self.checkpoint.objects[name.key])):
                raise CheckpointError(
                    f"{name.key} is an object with tensors in it, and it is not known how to split that; leave its "
                    "parameter out, with --exclude"
                )

    def _split_state(
        self, name: StateName, role: _Role, shape: Shape, siblings: Mapping[tuple[str, str], Shape] | None
    ) -> None:
        tensor = self.tensors[name.key]
        numel = torch.Size(shape).numel()
        is_flat = len(shape) > 1 and tensor.shape == (numel,)
        if tensor.shape != shape and not is_flat:
            raise CheckpointError(
                f"{name.key} has shape {tensor.shape}, its parameter {shape}: it is not known how to split that; "
                f"leave {role.fused} out, with --exclude"
            )
        known = self.model_shapes
        if siblings is not None:
            known = {fqn: each for (optimizer, fqn), each in siblings.items() if optimizer == name.optimizer}
        dim, combs = self._divided(role.match, shape, known)
        renamed = [name.renamed(part) for part in role.parts]
        parts = tuple(key for key, _ in renamed)
        self.fusions.append(Fusion(name.key, parts, shape, tensor.dtype, dim, combs, is_flat))
        self.paths.update((key, path) for key, path in renamed if path)


def _shapes_of_state(states: Iterable[StateName], tensors: Mapping[str, Any]) -> dict[tuple[str, str], Shape]:
    """The shape of each parameter, as far as its state tells: that of most dimensions."""
    shapes: dict[tuple[str, str], Shape] = {}
    for name in states:
        if name.is_state and name.key in tensors:
            shape = tensors[name.key].shape
            known = shapes.setdefault((name.optimizer, name.fqn), shape)
            if len(shape) > len(known):
                shapes[name.optimizer, name.fqn] = shape
    return shapes


# --- merging ---------------------------------------------------------------------------------------------------------


class _Merge(_Direction):
    find = staticmethod(find_parts)

    def matched(self, rule: Rule, key: str) -> Match | None:
        return rule.match_part(key)

    def roles_of(self, match: Match, fused: str, parts: tuple[str, ...], owner: str | None) -> dict[str, _Role]:
        return {part: _Role(match, fused, parts, number, owner) for number, part in enumerate(parts)}

    def listed_as(self, fqn: Any, role: _Role | None) -> Sequence[Any]:
        if role is None:
            return (fqn,)
        return (role.fused,) if role.number == 0 else ()

    def new_keys(self, fusion: Fusion) -> Sequence[str]:
        return (fusion.fused,)

    def old_keys(self, fusion: Fusion) -> Sequence[str]:
        return fusion.parts

    def exchange_model(self) -> None:
        for match in self.model_matches():
            self.fusions.append(self._fused(match, match.fused, match.parts))
            self.path_beside(match.parts[0], match.fused)

    def exchange_states(self) -> None:
        entries: dict[tuple[str, str], dict[str, dict[int, StateName]]] = {}
        roles: dict[tuple[str, str], _Role] = {}
        for name in self.names.states:
            role = self.role(name)
            if role is not None and role.number is not None:
                of = (name.before, role.fused)
                roles[of] = role
                entries.setdefault(of, {}).setdefault(name.after, {})[role.number] = name
        with Reader(self.checkpoint) as reader:
            for of, by_entry in entries.items():
                self._merge_state(roles[of], by_entry, reader)

    def check_groups(self, groups: Mapping[GroupName, Any]) -> None:
        options: dict[tuple[str, str], dict[str, Any]] = {}
        for name, content in groups.items():
            for group in _groups_in(content, name):
                entries = {entry: value for entry, value in group.items() if entry != "params"}
                if name.is_list:  # the options are under keys of their own; groups are taken to differ
                    entries = {"listed in": name.key}
                options.update(((name.optimizer, str(fqn)), entries) for fqn in group.get("params", ()))
        for optimizer, roles in self._state_roles.items():
            fused: dict[str, dict[str, Mapping[str, Any] | None]] = {}
            for role in roles.values():
                if role is not None:
                    fused[role.fused] = {part: options.get((optimizer, part)) for part in role.parts}
            for key, of_parts in fused.items():
                try:
                    check_same_options(key, of_parts)
                except ValueError as error:
                    raise CheckpointError(f"{error}, with --exclude") from error

    def _merge_state(self, role: _Role, by_entry: Mapping[str, Mapping[int, StateName]], reader: Reader) -> None:
        for entry, by_number in by_entry.items():
            if len(by_number) < len(role.parts):
                missing = [part for number, part in enumerate(role.parts) if number not in by_number]
                raise CheckpointError(
                    f"{role.fused} cannot be merged: some of its parts have {entry.removeprefix('.')}, and "
                    f"{', '.join(missing)} have not; save them with the same state"
                )
            names = [by_number[number] for number in range(len(role.parts))]
            tensors = [self.tensors.get(name.key) for name in names]
            if all(tensor is not None and tensor.shape != () for tensor in tensors):
                self._merge_tensors(role, names)
            else:
                self._check_equal(names, reader)
                self.copy(names[0], [role.fused])
                self.copies.update((name.key, ()) for name in names[1:])

    def _merge_tensors(self, role: _Role, names: Sequence[StateName]) -> None:
        fused, path = names[0].renamed(role.fused)
        fusion = self._fused(role.match, fused, tuple(name.key for name in names))
        param = None if role.owner is None else self._param_shape(role.owner)
        if param is not None and param != fusion.shape:
            raise CheckpointError(
                f"{fused} would have shape {fusion.shape}, its parameter {param}: it is not known how to merge that; "
                f"leave {role.fused} out, with --exclude"
            )
        self.fusions.append(fusion)
        if path:
            self.paths[fused] = path

    def _param_shape(self, owner: str) -> Shape | None:
        return next((fusion.shape for fusion in self.fusions if owner in fusion.parts), None)

    def _fused(self, match: Match, fused: str, parts: tuple[str, ...]) -> Fusion:
        tensors = [self.tensors[part] for part in parts]
        first = tensors[0]
        for tensor in tensors[1:]:
            if tensor.dtype != first.dtype:
                raise CheckpointError(
                    f"{fused} cannot be merged: {tensor.key} is {tensor.dtype} and {first.key} {first.dtype}; convert "
                    "one of them first"
                )
        shapes = [tensor.shape for tensor in tensors]
        shape, dim = _fused_shape(match, shapes, fused)
        combs = match.rule.combs(shape[dim], self.values, fused)
        expected = [comb.part_shape(shape, dim) for comb in combs]
        if shapes != expected:
            raise CheckpointError(f"{fused}: the rule gives its parts the shapes {expected}, and they have {shapes}")
        return Fusion(fused, parts, shape, first.dtype, dim, combs)

    def _check_equal(self, names: Sequence[StateName], reader: Reader) -> None:
        values = [self._value(name.key, reader) for name in names]
        for name, value in zip(names[1:], values[1:], strict=True):
            if not same_values(values[0], value):
                raise CheckpointError(
                    f"{names[0].key} is {_short(values[0])} and {name.key} is {_short(value)}; one fused value cannot "
                    "be both"
                )

    def _value(self, key: str, reader: Reader) -> Any:
        if key in self.checkpoint.objects:
            return reader.read_object(self.checkpoint.objects[key])
        tensor = self.tensors[key]
        if tensor.shape != ():
            raise CheckpointError(f"{key} has shape {tensor.shape}, and other parts have a number there")
        return reader.read_chunk(tensor.chunks[0])


def _fused_shape(match: Match, shapes: Sequence[Shape], where: str) -> tuple[Shape, int]:
    """The shape of the fused tensor, and its fused dimension."""
    first = shapes[0]
    stacked = match.rule.layout == "stacked"
    ndim = len(first) + stacked
    dim = match.rule.dim_of((1,) * ndim, where)
    if any(len(shape) != len(first) for shape in shapes):
        raise CheckpointError(f"{where} cannot be merged: its parts have the shapes {list(shapes)}")
    size = len(shapes) if stacked else sum(shape[dim] for shape in shapes)
    return (*first[:dim], size, *first[dim + (not stacked) :]), dim


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
