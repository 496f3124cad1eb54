"""Sort the keys of a checkpoint into tensors of the model, optimizer state by FQN, and param groups.

====================================== ================================================================================
path or key                            kind
====================================== ================================================================================
``optim`` ``state`` FQN ``exp_avg``    state of a parameter, in a nested optimizer state dict
``optim`` ``state.FQN.exp_avg``        the same, in a flattened optimizer state dict
``optimizer.state.exp_avg.FQN``        the same, named by kind first, as Megatron's ``torch_dist`` has it
``optim`` ``param_groups.FQN.lr``      an entry of a param group for one parameter, flattened
``optim`` ``param_groups`` 0           a param group, or one entry of it: ``params`` lists FQNs
anything else                          a tensor of the model, or a value that is never split, such as Megatron's
                                       ``param_to_group_meta``, which always has the fused names
====================================== ================================================================================

DCP stores each value's path in the nested state dict; keys of other writers are divided at their dots. The last word is
the name of the state, and the words before it are the FQN. If flattened param groups list a shorter FQN, the rest is
part of the state's name, as in :mod:`fsdp_offload.checkpoint.names`.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple

from fsdp_offload.checkpoint.names import parameter_of, without_wrappers

from ..core.text import CheckpointError
from ..stored.checkpoint import Path

_BY_FQN = ("state", "param_groups")

KINDS = frozenset(("exp_avg", "exp_avg_sq", "momentum_buffer", "param", "fp32_param", "master_param"))
"""Megatron-Core's names of state, by which FQNs are found in a checkpoint without a model."""


class StateName(NamedTuple):
    """A key of an entry of one parameter's state or options: ``before`` + ``fqn`` + ``after``."""

    key: str
    optimizer: str  # prefix of this optimizer's keys
    before: str  # "optim.state.", or "optimizer.state.exp_avg."
    fqn: str
    after: str  # ".exp_avg", or nothing
    path: Path = ()  # the value's path in the nested state dict; empty if not known
    kind: str = ""  # the entry's name if it precedes the FQN, else empty

    @property
    def name(self) -> str:
        """Return the entry's name, such as ``exp_avg``."""
        return self.kind or self.after.removeprefix(".")

    def renamed(self, fqn: str) -> tuple[str, Path]:
        """Return key and path of the same entry for the parameter ``fqn``."""
        path: list[str | int] = []
        start = 0
        for part in self.path:
            text, at = str(part), len(self.before) - start
            path.append(text[:at] + fqn + text[at + len(self.fqn) :] if 0 <= at < len(text) else part)
            start += len(text) + 1
        return f"{self.before}{fqn}{self.after}", tuple(path)


class GroupName(NamedTuple):
    """A key that holds one param group, a list of all groups, or (``is_list``) the FQNs of one group."""

    key: str
    optimizer: str
    is_list: bool


class Names(NamedTuple):
    """The keys of a checkpoint, sorted by kind."""

    states: tuple[StateName, ...]
    groups: tuple[GroupName, ...]
    others: tuple[str, ...]


def sorted_out(keys: Iterable[str], paths: Mapping[str, Path]) -> Names:
    """Sort keys into state, param groups and others."""
    states, groups, others = [], [], []
    known_keys = dict.fromkeys(keys)
    for key in known_keys:
        path = paths.get(key, ())
        known = path if ".".join(map(str, path)) == key else ()
        name = _of_path(key, known, known)
        if name is None and len(known) < 2:  # not nested, or its nesting is unknown
            name = _by_kind_first(key, known, known_keys.keys()) or _of_path(key, _path_in(key), known)
        if isinstance(name, StateName):
            states.append(name)
        elif name is not None:
            groups.append(name)
        else:
            others.append(key)
    listed = defaultdict(set)
    for name in states:
        if name.before.endswith("param_groups."):
            listed[name.optimizer].add(name.fqn)
    # Shorten FQNs to those that flattened param groups list; the rest is the name of state that is a nested dict.
    for number, name in enumerate(states):
        fqn = None if name.kind else parameter_of(f"{name.fqn}.", listed[name.optimizer])
        if fqn is not None:
            states[number] = name._replace(fqn=fqn, after=f"{name.fqn.removeprefix(fqn)}{name.after}")
    return Names(tuple(states), tuple(groups), tuple(others))


def _of_path(key: str, path: Path, known: Path) -> StateName | GroupName | None:
    start = ""
    for at, component in enumerate(path):
        word, dot, text = str(component).partition(".")
        rest = path[at + 1 :]
        if component == "param_groups" and (not rest or isinstance(rest[0], int)):
            inside = [part for part in rest if isinstance(part, str)]
            if inside and inside != ["params"]:
                return None  # an entry that all parameters of the group share
            return GroupName(key, start.removesuffix("."), bool(inside))
        if word in _BY_FQN and (dot or rest):
            is_alone = not dot and len(rest) > 1  # the FQN is a component of its own; else FQN and entry share one
            if not dot:
                if not isinstance(rest[0], str):
                    return None
                text, rest = rest[0], rest[1:]
            fqn = text if is_alone else text.rpartition(".")[0]
            after = "".join((text.removeprefix(fqn), *(f".{part}" for part in rest)))
            return StateName(key, start.removesuffix("."), f"{start}{word}.", fqn, after, known) if fqn else None
        start += f"{component}."
    return None


def _path_in(key: str) -> Path:
    """Guess the path of a key of state or of a param group, if only FQNs contain dots."""
    words = key.split(".")
    for at, word in enumerate(words):
        lead, rest = words[: at + 1], words[at + 1 :]
        if word == "param_groups" and (not rest or _is_number(rest[0])):
            return (*lead, *(int(part) if _is_number(part) else part for part in rest))
        if word in _BY_FQN and len(rest) > 1:
            return (*lead, ".".join(rest[:-1]), rest[-1])
    return ()


def _by_kind_first(key: str, path: Path, known: Set[str]) -> StateName | None:
    """Parse a key of Megatron-Core's ``torch_dist``: ``...state.<kind>.<FQN>``; None for other keys."""
    lead, found, rest = key.partition("state.") if key.startswith("state.") else key.partition(".state.")
    kind, _, fqn = rest.partition(".")
    if not found or not fqn or not (fqn in known or (kind in KINDS and fqn.rpartition(".")[2] not in KINDS)):
        return None
    return StateName(key, lead, f"{lead}{found}{kind}.", fqn, "", path, kind)


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) < 10  # no optimizer has 10**9 param groups


# Whose state it is ----------------------------------------------------------------------------------------------------


class Owner(NamedTuple):
    """The model's tensor ``key`` that owns some state: ``key = lead + same``; the state's ``fqn = own_lead + same``."""

    key: str
    lead: str
    own_lead: str

    def own(self, other_key: str, fqn: str) -> str:
        """Return the FQN under which the same optimizer has the state of ``other_key``, a tensor of the same model."""
        if not other_key.startswith(self.lead):
            raise CheckpointError(
                f"state of {fqn} belongs to {self.key}, but what becomes of it, {other_key}, does not begin with "
                f"{self.lead!r} as well; write the rule with a placeholder for the prefix"
            )
        return self.own_lead + other_key.removeprefix(self.lead)


class Owners:
    """Index of the model's keys by all of their endings, in which the owner of state is looked up."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_end: dict[str, list[str]] = {}
        for key, name in [(each, name) for each in keys for name in {each, without_wrappers(each)}]:
            at = 0
            while at >= 0:
                self._by_end.setdefault(name[at:], []).append(key)
                at = name.find(".", at) + 1 or -1

    def of(self, fqn: str, outcome: Callable[[str], object]) -> Owner | None:
        """Return the owner of the state of ``fqn``, which may begin with ``module.`` more often than the model's key.

        An exact name wins; otherwise, names of wrappers in either name are ignored. Of several owners, the one with the
        shortest prefix wins; if several are equally short, ``outcome`` must be equal for all of them.
        """
        ends: list[str] = []
        for name in (fqn, without_wrappers(fqn)):
            ends.append(name)
            while ends[-1].startswith("module."):
                ends.append(ends[-1].removeprefix("module."))
        found = next((self._by_end[end] for end in ends if end in self._by_end), None)
        if found is None:
            return None
        depth = min(key.count(".") for key in found)
        nearest = [key for key in dict.fromkeys(found) if key.count(".") == depth]
        if any(outcome(nearest[0]) != outcome(other) for other in nearest[1:]):
            raise CheckpointError(
                f"state of {fqn} may belong to {' or '.join(nearest[:3])}, of which not the same becomes; use "
                "rules that match all of them, or --exclude them all"
            )
        both = zip(reversed(nearest[0].split(".")), reversed(fqn.split(".")), strict=False)
        words = [one for one, _ in itertools.takewhile(lambda each: each[0] == each[1], both)]
        common = ".".join(reversed(words))
        return Owner(nearest[0], nearest[0].removesuffix(common), fqn.removesuffix(common))
