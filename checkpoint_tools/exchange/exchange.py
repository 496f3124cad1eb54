"""Decide which keys of a checkpoint replace which, when fused tensors are split or parts are merged.

::

    keys, shapes ──names.sorted_out──▶ model tensors ──rules──▶ Match ─┐
                                       state by FQN ───whose tensor?───┴──▶ Exchange: fusions, copies, new objects
                                       (names)             (owners, roles)     (splitting or merging, draft)

The state of a parameter follows the parameter: where a model's tensors are in the same checkpoint, its optimizers'
state is exchanged as they are, even if the FQNs have other prefixes (``model.module.x`` and ``module.module.x``). State
without a model is matched by its own FQNs. Only metadata are looked at, and objects and counters that have to be
changed or compared.

Here is the order of the steps, and where errors of the rules become those of the command line.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..core.errors import CheckpointError
from ..core.parts import Comb
from ..core.patterns import check_excluded, is_excluded
from ..core.sizes import short_repr
from ..core.values import same_values
from ..fused.keys import (
    Exchange,
    Fusion,
    GroupName,
    Names,
    Owners,
    Path,
    Shape,
    StateName,
    check_same_options,
    holds_tensors,
    sorted_out,
)
from ..fused.rules import (
    ALL,
    Match,
    MatchKey,
    MissingValueError,
    Rule,
    Wanted,
    find_matches,
    find_parts,
    nothing_matches,
)
from ..stored.items import ItemReader
from ..stored.reading import Checkpoint
from .request import Way

# Param groups ---------------------------------------------------------------------------------------------------------


Groups = Mapping[GroupName, Any]
"""Name → content, as it was read."""


def read_groups(checkpoint: Checkpoint, names: Iterable[GroupName]) -> Groups:
    """Read the param groups that are stored as objects.

    Raises:
        CheckpointError: one cannot be read.
    """
    reader = ItemReader(checkpoint)
    return {name: reader.read_object(checkpoint.objects[name.key]) for name in names if name.key in checkpoint.objects}


def listed(content: Any, name: GroupName) -> list[Any]:
    """List the FQNs in a param group, in several, or in the list of one."""
    return [fqn for group in groups_in(content, name) for fqn in group.get("params", ())]


def groups_in(content: Any, name: GroupName) -> list[dict[str, Any]]:
    """Yield each param group; a bare list of names counts as a group without options."""
    if name.is_list:
        return [{"params": list(content)}] if isinstance(content, list | tuple) else []
    groups = content if isinstance(content, list | tuple) else [content]
    return [group for group in groups if isinstance(group, dict)]


def relisted(content: Any, name: GroupName, listed_as: Callable[[Any], Sequence[Any]]) -> bytes:
    """Pickle the content with other FQNs, as ``torch.save`` does; ``listed_as`` maps one to its new ones."""
    buffer = io.BytesIO()
    torch.save(_relisted(content, name, listed_as), buffer)
    return buffer.getvalue()


def _relisted(content: Any, name: GroupName, listed_as: Callable[[Any], Sequence[Any]]) -> Any:
    if name.is_list:
        return [new for fqn in content for new in listed_as(fqn)]
    if isinstance(content, dict):
        return {**content, "params": [new for fqn in content.get("params", ()) for new in listed_as(fqn)]}
    return [_relisted(group, name, listed_as) if isinstance(group, dict) else group for group in content]


# The role of each name ------------------------------------------------------------------------------------------------


class Role(NamedTuple):
    """Role of a name in a match: the fused tensor (no number), or one of the parts.

    Attributes:
        match: the rule, and the texts of its placeholders.
        fused: the fused tensor's name, as the model or this optimizer has it.
        parts: the same of the parts.
        number: which of the parts the name is.
        owner: the tensor of a model that state belongs to.
    """

    match: Match
    fused: str
    parts: tuple[str, ...]
    number: int | None
    owner: str | None


class Side(NamedTuple):
    """Side from which rules are read.

    Attributes:
        find: the matches among keys, all of which there have to be.
        match: the match of one key.
        names: those of a fused tensor and its parts that are looked for, each with its number.
    """

    find: Callable[[Iterable[str], Sequence[Rule], Wanted], list[Match]]
    match: MatchKey
    names: Callable[[str, tuple[str, ...]], Mapping[str, int | None]]


FUSED = Side(find_matches, Rule.match, lambda fused, parts: {fused: None})
"""Fused tensors are looked for: they are split."""

PARTS = Side(find_parts, Rule.match_part, lambda fused, parts: {part: number for number, part in enumerate(parts)})
"""Parts are looked for: they are merged."""


class Roles:
    """Finds them, once.

    Args:
        side: what is looked for.
        checkpoint: whose keys they are.
        names: of these.
        groups: which list FQNs, too.
        rules: some; those that are not optional match something.
        excluded: patterns of keys that have no role.
        wanted: which of the matches there are to be.

    Raises:
        CheckpointError: rules or patterns match nothing, or it is not known what a name is.
        ValueError: rules do not fit the names.
    """

    def __init__(
        self,
        side: Side,
        checkpoint: Checkpoint,
        names: Names,
        groups: Groups,
        rules: Sequence[Rule],
        excluded: Sequence[str],
        wanted: Wanted,
    ) -> None:
        self._side = side
        self._tensors = checkpoint.tensors
        self._names = names
        self._rules = rules
        self._excluded = excluded
        self._wanted = wanted
        self._used: set[int] = set()
        self._owned: set[str] = set()
        model = [key for key in names.others if key in self._tensors]
        self.model_shapes: Mapping[str, Shape] = {key: self._tensors[key].shape for key in model}
        fqns = self._fqns(groups)
        states = [
            name for optimizer, each in fqns.items() for fqn in each for name in (fqn, _key_of_state(optimizer, fqn))
        ]
        check_excluded(excluded, [*checkpoint.tensors, *checkpoint.objects, *states])
        self._of_model = self._by_rules(model)
        self._owners = Owners(model)
        self._of_state: dict[str, dict[str, Role | None]] = {}
        for optimizer, each in fqns.items():
            self._of_state[optimizer] = self._by_owner(optimizer, each)
        self._check_rules()
        self._check_ambiguity()

    # --- to ask ---

    def is_excluded(self, key: str) -> bool:
        """Tell whether the user has excluded the match."""
        return is_excluded(key, self._excluded)

    def matched(self) -> tuple[str, ...]:
        """Name the matched fused tensors; state of a model's tensor has no entry of its own."""
        alone = (role for _, roles in self.by_optimizer() for role in roles if role.owner is None)
        return tuple(dict.fromkeys(role.match.fused for role in (*self._of_model.values(), *alone)))

    def model_matches(self) -> list[Match]:
        """Yield each fused tensor of the model once."""
        return list({role.fused: role.match for role in self._of_model.values()}.values())

    def of_state(self, name: StateName) -> Role | None:
        """Find the role of an optimizer's key."""
        return self._of_state[name.optimizer].get(name.fqn)

    def of_fqn(self, optimizer: str, fqn: object) -> Role | None:
        """Find the role of a name in a param group."""
        return self._of_state.get(optimizer, {}).get(str(fqn))

    def by_optimizer(self) -> Iterator[tuple[str, list[Role]]]:
        """Group the state of parameters by optimizer."""
        for optimizer, roles in self._of_state.items():
            yield optimizer, [role for role in roles.values() if role is not None]

    # --- to find ---

    def _by_rules(self, names: Iterable[str]) -> dict[str, Role]:
        """Find roles by the rules alone. Rules that match nothing are left to :meth:`_check_rules`."""
        known = [name for name in names if not self.is_excluded(name)]
        active = [number for number, rule in enumerate(self._rules) if any(self._matches(rule, name) for name in known)]
        self._used.update(active)
        roles = {}
        for match in self._side.find(known, [self._rules[number] for number in active], self._wanted) if active else ():
            for name, number in self._side.names(match.fused, match.parts).items():
                roles[name] = Role(match, match.fused, match.parts, number, None)
        return roles

    def _matches(self, rule: Rule, name: str) -> bool:
        match = self._side.match(rule, name)
        return match is not None and self._wanted(match)

    def _by_owner(self, optimizer: str, fqns: Iterable[str]) -> dict[str, Role | None]:
        roles: dict[str, Role | None] = dict.fromkeys(fqns)
        alone = []
        for fqn in fqns:
            owner = self._owners.of(fqn, self._become_the_same)
            if owner is None:
                alone.append(fqn)
                continue
            self._owned.add(fqn)
            role = self._of_model.get(owner.key)
            if role is not None:
                parts = tuple(owner.own(part, fqn) for part in role.parts)
                role = Role(role.match, owner.own(role.fused, fqn), parts, role.number, owner.key)
            roles[fqn] = role
        # Excluded by its own key, too: a person excludes what they see.
        known = [fqn for fqn in alone if not self.is_excluded(_key_of_state(optimizer, fqn))]
        roles.update(self._by_rules(known))
        return roles

    def _become_the_same(self, one: str, other: str) -> bool:
        roles = [self._of_model.get(key) for key in (one, other)]
        if roles[0] is None or roles[1] is None:
            return roles[0] is roles[1]
        return (
            roles[0].match.rule is roles[1].match.rule
            and roles[0].number == roles[1].number
            and self._tensors[one][1:3] == self._tensors[other][1:3]
        )

    def _fqns(self, groups: Groups) -> dict[str, list[str]]:
        found: dict[str, dict[str, None]] = {}
        for name in self._names.states:
            found.setdefault(name.optimizer, {})[name.fqn] = None
        for group, content in groups.items():
            for fqn in listed(content, group):
                found.setdefault(group.optimizer, {})[str(fqn)] = None
        return {optimizer: list(fqns) for optimizer, fqns in found.items()}

    # --- to refuse ---

    def _check_rules(self) -> None:
        idle = [r.fused for n, r in enumerate(self._rules) if n not in self._used and not r.optional]
        if not self._used or (idle and self._wanted is ALL):
            keys = [*self.model_shapes, *(fqn for each in self._of_state.values() for fqn in each)]
            raise CheckpointError(nothing_matches(self._rules, idle, keys, self._side.match))

    def _check_ambiguity(self) -> None:
        for optimizer, roles in self._of_state.items():
            numbers = [fqn for fqn in roles if fqn.isdecimal()]
            if numbers and self._of_model:
                raise CheckpointError(
                    f"the parameters of the optimizer {optimizer or '(at the top)'} are numbered ({numbers[0]}), so it "
                    "is not known which state is of which; save it as torch.distributed.checkpoint.state_dict gives it"
                )
        for name in self._names.states:
            is_left = name.key in self._tensors and self.of_state(name) is None and not self.is_excluded(name.key)
            if is_left and name.fqn not in self._owned and any(self._matches(rule, name.key) for rule in self._rules):
                raise CheckpointError(
                    f"{name.key} may be a tensor of a model, or state of {name.fqn}; rename the one or --exclude it"
                )


def _key_of_state(optimizer: str, fqn: str) -> str:
    """Return what the keys of a parameter's state begin with."""
    return f"{optimizer}.state.{fqn}".removeprefix(".")


# An exchange that is being put together -------------------------------------------------------------------------------


class Draft:
    """Exchange under construction: what becomes of each key.

    Attributes:
        fusions, copies, objects, paths: those of the :class:`~checkpoint_tools.fused.keys.Exchange`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.fusions: list[Fusion] = []
        self.copies: dict[str, tuple[str, ...]] = {}
        self.objects: dict[str, bytes] = {}
        self.paths: dict[str, Path] = {}
        self._old: set[str] = set()
        self._new: list[str] = []

    def exchange(self, parameters: int, matched: tuple[str, ...]) -> Exchange:
        """Finish the exchange; its first ``parameters`` fusions are tensors of a model."""
        return Exchange(tuple(self.fusions), self.copies, self.objects, self.paths, parameters, matched)

    # --- to put together ---

    def fuse(self, fusion: Fusion, *, old: Iterable[str], new: Iterable[str]) -> None:
        """Record a fused tensor with its parts: those stored, and those that replace them."""
        self.fusions.append(fusion)
        self._old.update(old)
        self._new += new

    def copy(self, name: StateName, fqns: Sequence[str]) -> None:
        """Copy an entry of state to these parameters."""
        renamed = [name.renamed(fqn) for fqn in fqns]
        self.copies[name.key] = tuple(key for key, _ in renamed)
        self.paths.update((key, path) for key, path in renamed if path)

    def drop(self, key: str) -> None:
        """Drop a key without a replacement."""
        self.copies[key] = ()

    def path_beside(self, key: str, other: str) -> None:
        """Put the new key ``other`` where ``key`` was in the nested state dict."""
        path = self._checkpoint.paths.get(key, ())
        if not path or ".".join(map(str, path)) != key:
            return
        for at in range(len(path), 0, -1):  # the longest beginning that both have
            lead = "".join(f"{part}." for part in path[: at - 1])
            if other.startswith(lead):
                self.paths[other] = (*path[: at - 1], other.removeprefix(lead))
                return

    # --- to check ---

    def check_new_keys(self) -> None:
        """Check that every new key is free.

        Raises:
            CheckpointError: there would be two values of one name.
        """
        new = [*self._new, *(key for keys in self.copies.values() for key in keys)]
        left = {*self._checkpoint.tensors, *self._checkpoint.objects} - {*self._old, *self.copies}
        twice = {key for key in new if new.count(key) > 1} if len(set(new)) < len(new) else set()
        taken = sorted({key for key in new if key in left} | twice)
        if taken:
            raise CheckpointError(f"there would be two values named {taken[0]} ({len(taken)} such names)")

    def check_left(self, names: Names, roles: Roles) -> None:
        """Refuse state that seems to belong to an exchanged tensor and would silently stay as it was.

        Raises:
            CheckpointError: it does, and nobody has excluded it.
        """
        known = self._old & roles.model_shapes.keys()
        known |= {key.partition(".")[2] for key in known if "." in key}
        for key in names.others:
            if key in self._old or key not in self._checkpoint.tensors or roles.is_excluded(key):
                continue
            inside = next((name for name in _beginnings(key) if name in known), None)
            if inside is not None:
                raise CheckpointError(
                    f"{key} looks as if it belongs to {inside}, and it is not known how; --exclude the one to leave it "
                    "as it is, or the other"
                )


def _beginnings(key: str) -> Iterator[str]:
    """Yield every prefix of a key that ends before a dot."""
    words = key.split(".")
    for start in range(len(words)):
        for stop in range(start + 1, len(words)):
            yield ".".join(words[start:stop])


@dataclass(frozen=True)
class ExchangeWork:
    """Fields that splitting and merging have in common.

    Attributes:
        checkpoint: that has what is exchanged.
        names: its keys.
        roles: what they are.
        values: of the model's config, which the rules name.
        draft: gets what is found.
    """

    checkpoint: Checkpoint
    names: Names
    roles: Roles
    values: Mapping[str, float]
    draft: Draft


# Splitting ------------------------------------------------------------------------------------------------------------


class Splitting(ExchangeWork):
    """Exchange of fused tensors for parts."""

    side: ClassVar = FUSED

    def listed_as(self, fqn: Any, role: Role | None) -> Sequence[Any]:
        """Return what a param group lists instead of ``fqn``."""
        return (fqn,) if role is None else role.parts

    def check_groups(self, groups: Groups) -> None:
        """Accept all param groups: every part has the options of the whole."""

    def exchange_model(self) -> None:
        """Exchange the model's tensors.

        Raises:
            CheckpointError: see :func:`checkpoint_tools.exchange.exchange.find_exchange`, and for the next one.
            ValueError: from the rules.
        """
        for match in self.roles.model_matches():
            tensor = self.checkpoint.tensors[match.fused]
            dim, combs = self._divided(match, tensor.shape, self.roles.model_shapes)
            self._fuse(Fusion(match.fused, match.parts, tensor.shape, tensor.dtype, dim, combs))
            for part in match.parts:
                self.draft.path_beside(match.fused, part)

    def _fuse(self, fusion: Fusion) -> None:
        self.draft.fuse(fusion, old=(fusion.fused,), new=fusion.parts)

    def _divided(self, match: Match, shape: Shape, shapes: Mapping[str, Shape]) -> tuple[int, tuple[Comb, ...]]:
        dim = match.rule.dim_of(shape, match.fused)
        combs = match.rule.combs(shape[dim], self.values, match.fused)
        match.check_sibling(shapes, combs[0].size)
        return dim, combs

    def exchange_states(self) -> None:
        """Exchange the state of the optimizers."""
        shapes = _shapes_of_state(self.names.states, self.checkpoint.tensors)
        for name in self.names.states:
            role = self.roles.of_state(name)
            if role is None:
                continue
            tensor = self.checkpoint.tensors.get(name.key)
            param = None if role.owner is None else self.checkpoint.tensors[role.owner]
            if tensor is None or tensor.shape == ():
                if tensor is None:
                    self._check_object(name)
                self.draft.copy(name, role.parts)
            else:
                shape = shapes[name.optimizer, name.fqn] if param is None else param.shape
                self._split_state(name, role, shape, shapes if param is None else None)

    def _check_object(self, name: StateName) -> None:
        if holds_tensors(ItemReader(self.checkpoint).read_object(self.checkpoint.objects[name.key])):
            raise CheckpointError(
                f"{name.key} is an object with tensors in it, and it is not known how to split that; leave its "
                "parameter out, with --exclude"
            )

    def _split_state(
        self, name: StateName, role: Role, shape: Shape, siblings: Mapping[tuple[str, str], Shape] | None
    ) -> None:
        tensor = self.checkpoint.tensors[name.key]
        numel = torch.Size(shape).numel()
        is_flat = len(shape) > 1 and tensor.shape == (numel,)
        if tensor.shape != shape and not is_flat:
            raise CheckpointError(
                f"{name.key} has shape {tensor.shape}, its parameter {shape}: it is not known how to split that; "
                f"leave {role.fused} out, with --exclude"
            )
        known = self.roles.model_shapes
        if siblings is not None:
            known = {fqn: each for (optimizer, fqn), each in siblings.items() if optimizer == name.optimizer}
        dim, combs = self._divided(role.match, shape, known)
        renamed = [name.renamed(part) for part in role.parts]
        parts = tuple(key for key, _ in renamed)
        self._fuse(Fusion(name.key, parts, shape, tensor.dtype, dim, combs, is_flat))
        self.draft.paths.update((key, path) for key, path in renamed if path)


def _shapes_of_state(states: Iterable[StateName], tensors: Mapping[str, Any]) -> dict[tuple[str, str], Shape]:
    """Guess each parameter's shape from its state: the one of most dimensions."""
    shapes: dict[tuple[str, str], Shape] = {}
    for name in states:
        if name.is_state and name.key in tensors:
            shape = tensors[name.key].shape
            known = shapes.setdefault((name.optimizer, name.fqn), shape)
            if len(shape) > len(known):
                shapes[name.optimizer, name.fqn] = shape
    return shapes


# Merging --------------------------------------------------------------------------------------------------------------


class Merging(ExchangeWork):
    """Exchange of parts for fused tensors."""

    side: ClassVar = PARTS

    def listed_as(self, fqn: Any, role: Role | None) -> Sequence[Any]:
        """Return what a param group lists instead of ``fqn``."""
        if role is None:
            return (fqn,)
        return (role.fused,) if role.number == 0 else ()

    def check_groups(self, groups: Groups) -> None:
        """Check that param groups allow it: the parts of one tensor must have the same options.

        Raises:
            CheckpointError: they have not.
        """
        options: dict[tuple[str, str], dict[str, Any]] = {}
        for name, content in groups.items():
            for group in groups_in(content, name):
                entries = {entry: value for entry, value in group.items() if entry != "params"}
                if name.is_list:  # the options are under keys of their own; groups are taken to differ
                    entries = {"listed in": name.key}
                options.update(((name.optimizer, str(fqn)), entries) for fqn in group.get("params", ()))
        for optimizer, roles in self.roles.by_optimizer():
            fused: dict[str, dict[str, Mapping[str, Any] | None]] = {}
            for role in roles:
                fused[role.fused] = {part: options.get((optimizer, part)) for part in role.parts}
            for key, of_parts in fused.items():
                try:
                    check_same_options(key, of_parts)
                except ValueError as error:
                    raise CheckpointError(f"{error}, with --exclude") from error

    def exchange_model(self) -> None:
        """Exchange the model's tensors.

        Raises:
            CheckpointError: see :func:`checkpoint_tools.exchange.exchange.find_exchange`, and for the next one.
            ValueError: from the rules.
        """
        for match in self.roles.model_matches():
            self._fuse(self._fused(match, match.fused, match.parts))
            self.draft.path_beside(match.parts[0], match.fused)

    def _fuse(self, fusion: Fusion) -> None:
        self.draft.fuse(fusion, old=fusion.parts, new=(fusion.fused,))

    def exchange_states(self) -> None:
        """Exchange the state of the optimizers."""
        entries: dict[tuple[str, str], dict[str, dict[int, StateName]]] = {}
        roles: dict[tuple[str, str], Role] = {}
        for name in self.names.states:
            role = self.roles.of_state(name)
            if role is not None and role.number is not None:
                of = (name.before, role.fused)
                roles[of] = role
                entries.setdefault(of, {}).setdefault(name.after, {})[role.number] = name
        reader = ItemReader(self.checkpoint)
        for of, by_entry in entries.items():
            self._merge_state(roles[of], by_entry, reader)

    def _merge_state(self, role: Role, by_entry: Mapping[str, Mapping[int, StateName]], reader: ItemReader) -> None:
        for by_number in by_entry.values():
            if len(by_number) < len(role.parts):
                missing = [part for number, part in enumerate(role.parts) if number not in by_number]
                entry = next(iter(by_number.values())).name
                raise CheckpointError(
                    f"{role.fused} cannot be merged: some of its parts have {entry}, and {', '.join(missing)} have "
                    "not; save them with the same state"
                )
            names = [by_number[number] for number in range(len(role.parts))]
            tensors = [self.checkpoint.tensors.get(name.key) for name in names]
            if all(tensor is not None and tensor.shape != () for tensor in tensors):
                self._merge_tensors(role, names)
            else:
                self._check_equal(names, reader)
                self.draft.copy(names[0], [role.fused])
                for name in names[1:]:
                    self.draft.drop(name.key)

    def _merge_tensors(self, role: Role, names: Sequence[StateName]) -> None:
        fused, path = names[0].renamed(role.fused)
        fusion = self._fused(role.match, fused, tuple(name.key for name in names))
        param = None if role.owner is None else self._param_shape(role.owner)
        if param is not None and param != fusion.shape:
            raise CheckpointError(
                f"{fused} would have shape {fusion.shape}, its parameter {param}: it is not known how to merge that; "
                f"leave {role.fused} out, with --exclude"
            )
        self._fuse(fusion)
        if path:
            self.draft.paths[fused] = path

    def _param_shape(self, owner: str) -> Shape | None:
        return next((fusion.shape for fusion in self.draft.fusions if owner in fusion.parts), None)

    def _fused(self, match: Match, fused: str, parts: tuple[str, ...]) -> Fusion:
        tensors = [self.checkpoint.tensors[part] for part in parts]
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

    def _check_equal(self, names: Sequence[StateName], reader: ItemReader) -> None:
        values = [self._value(name.key, reader) for name in names]
        for name, value in zip(names[1:], values[1:], strict=True):
            if not same_values(values[0], value):
                raise CheckpointError(
                    f"{names[0].key} is {short_repr(values[0])} and {name.key} is {short_repr(value)}; one fused value "
                    "cannot be both"
                )

    def _value(self, key: str, reader: ItemReader) -> Any:
        if key in self.checkpoint.objects:
            return reader.read_object(self.checkpoint.objects[key])
        tensor = self.checkpoint.tensors[key]
        if tensor.shape != ():
            raise CheckpointError(f"{key} has shape {tensor.shape}, and other parts have a number there")
        return reader.read_chunk(tensor.chunks[0], tensor.dtype)


def _fused_shape(match: Match, shapes: Sequence[Shape], where: str) -> tuple[Shape, int]:
    """Compute the fused tensor's shape and fused dimension."""
    first = shapes[0]
    stacked = match.rule.layout == "stacked"
    ndim = len(first) + stacked
    dim = match.rule.dim_of((1,) * ndim, where)
    if any(len(shape) != len(first) for shape in shapes):
        raise CheckpointError(f"{where} cannot be merged: its parts have the shapes {list(shapes)}")
    size = len(shapes) if stacked else sum(shape[dim] for shape in shapes)
    return (*first[:dim], size, *first[dim + (not stacked) :]), dim


# All of it ------------------------------------------------------------------------------------------------------------


def find_exchange(
    way: Way,
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    values: Mapping[str, float],
    excluded: Sequence[str] = (),
    wanted: Wanted = ALL,
) -> Exchange:
    """Exchange fused tensors for their parts, or the other way round.

    Args:
        way: ``"split"``, or its inverse ``"merge"``.
        checkpoint: that has what is exchanged.
        rules: that match fused tensors.
        values: of the model's config, which the rules name.
        excluded: patterns of keys that stay.
        wanted: which of the matches are exchanged.

    Raises:
        CheckpointError: rules do not fit, state is of another shape than its parameter, names are taken or ambiguous;
            a rule, a value or a pattern is of no use; or parts are missing, or differ in what there can be only one of.
    """
    _check_values(rules, values)
    try:
        return _exchange(Splitting if way == "split" else Merging, checkpoint, rules, values, excluded, wanted)
    except MissingValueError as error:
        raise CheckpointError(error.told(f"--value {error.name}=NUMBER", values)) from error
    except (ValueError, KeyError) as error:  # the rules' own errors
        raise CheckpointError(str(error)) from error


def _check_values(rules: Sequence[Rule], values: Mapping[str, float]) -> None:
    """Refuse values that no rule uses: typing errors."""
    known = {name for rule in rules for name in rule.value_names}
    idle = [name for name in values if name not in known]
    if idle:
        raise CheckpointError(
            f"--value that no rule uses: {', '.join(idle)}. The rules name {', '.join(sorted(known)) or 'none'}"
        )


def _exchange(
    way: type[Splitting | Merging],
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    values: Mapping[str, float],
    excluded: Sequence[str],
    wanted: Wanted,
) -> Exchange:
    names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
    groups = read_groups(checkpoint, names.groups)
    roles = Roles(way.side, checkpoint, names, groups, rules, excluded, wanted)
    draft = Draft(checkpoint)
    worker = way(checkpoint, names, roles, values, draft)
    worker.exchange_model()
    parameters = len(draft.fusions)
    worker.exchange_states()
    worker.check_groups(groups)
    for name, content in groups.items():
        new = _new_group(name, content, roles, worker)
        if new is not None:
            draft.objects[name.key] = new
    draft.check_new_keys()
    draft.check_left(names, roles)
    return draft.exchange(parameters, roles.matched())


def _new_group(name: GroupName, content: Any, roles: Roles, worker: Splitting | Merging) -> bytes | None:
    """Return the new content of a param group that lists exchanged tensors, or None."""

    def listed_as(fqn: Any) -> Sequence[Any]:
        return worker.listed_as(fqn, roles.of_fqn(name.optimizer, fqn))

    if all(roles.of_fqn(name.optimizer, fqn) is None for fqn in listed(content, name)):
        return None
    return relisted(content, name, listed_as)
