"""Find the role of each name in a split or merge: the fused tensor, one of its parts, or neither.

::

    model tensors ──rules──▶ Match ─▶ Role by key
    state by FQN ──owners──▶ whose tensor? ─▶ the Role of that, or by the rules alone ─▶ Role by optimizer and FQN

State of a parameter has the role of the parameter, under its own names. State without a model is matched by its own
FQNs. What could be read in two ways is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..core.errors import CheckpointError
from ..core.patterns import check_excluded, is_excluded
from ..fused.fusions import Shape
from ..fused.keys import Names, StateName
from ..fused.owners import Owners
from ..fused.rules import ALL, Match, MatchKey, Rule, Wanted, find_matches, find_parts, nothing_matches
from ..stored.reading import Checkpoint
from .param_groups import Groups, listed


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
