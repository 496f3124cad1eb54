"""Names in checkpoints: layouts of optimizer state, their common denominator by FQN, and global names of experts.

============ ==========================================================================================================
nested       ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], entry: value}]}``
flattened    ``{"state.{fqn}.{name}": value, "param_groups.{fqn}.{entry}": value}``
fsdp_dtensor ``{"state": {fqn: {name: value}}, "param_to_group_meta": {fqn: {entry: value}}}``
============ ==========================================================================================================

The first two are those of ``torch.distributed.checkpoint.state_dict``; the third is Megatron-LM's (read at d98e8a64),
whose FQNs have ``module.`` in front more often than those of the model. Under expert parallelism, local experts have
the same names on every rank, and DCP keeps those of one rank: :class:`Experts` gives each a global name. It recognises
these names, also with prefixes of wrappers:

=============================================  ========================================================================
``experts.linear_fc1.weight2``, ``….bias2``    Transformer Engine's ``GroupedLinear``, in any module, as in Megatron's
                                               ``TEGroupedMLP``; if split, with suffix ``_w`` or ``_v``
``experts.local_experts.2.linear_fc1.weight``  Megatron's ``SequentialMLP``
``experts.2.up_proj.weight``                   a ``ModuleList`` of experts
=============================================  ========================================================================
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..fsdp.dtensor import canonical_fqn, is_dtensor, may_be_another_ranks
from ..fsdp.fully_shard import parameter_names
from ..policy import check_is
from .chunks import is_whole

StateDict = dict[str, Any]

GROUP_META = "param_to_group_meta"  # Megatron's name for entries of param groups by parameter
_FLAT_STATE, _FLAT_GROUPS = "state.", "param_groups."
_NUMBERED = re.compile(r"(?:^|\.)(?:weight|bias|experts\.(?:local_experts\.)?)(?P<number>\d+)(?!\d)")


class SavedByFqn(NamedTuple):
    """A state dict by FQN."""

    state: dict[str, dict[str, Any]]
    entries: dict[str, dict[str, Any]]  # of the param group that lists it

    def with_names_of(self, known: Iterable[str]) -> "SavedByFqn":
        """Return the same state dict with each name replaced by the ``known`` name that differs only in wrappers."""
        same, own = by_bare_name(known), [by_bare_name(part) for part in self]
        new: dict[str, str] = {}
        for fqn in itertools.chain(*self):
            bare = bare_name(fqn)
            is_one = all(names.get(bare, fqn) for names in own)  # state and groups may spell a name differently
            new[fqn] = same.get(bare) or fqn if is_one else fqn
        return SavedByFqn(*({new[fqn]: values for fqn, values in part.items()} for part in self))


def parameter_of(key: str, parameters: Set[str]) -> str | None:
    """Return the parameter to whose state ``key`` belongs: the longest match, as values may be dicts."""
    while key := key.rpartition(".")[0]:
        if key in parameters:
            return key
    return None


def without_wrappers(key: str) -> str:
    """Return ``key`` without the prefixes of compiled and checkpointed modules, at any level."""
    return re.sub(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module)\.", "", key)


def bare_name(name: str) -> str:
    """Return ``name`` without wrappers and leading ``module.``."""
    return re.sub(r"^(?:module\.)+", "", without_wrappers(name))


def by_bare_name(names: Iterable[str], bare: Callable[[str], str] = bare_name) -> dict[str, str | None]:
    """Map each bare name to the name that has it, or to ``None`` if several have."""
    found: dict[str, str | None] = {}
    for name in dict.fromkeys(names):
        found[bare(name)] = None if bare(name) in found else name
    return found


def flattened(nested: StateDict) -> StateDict:
    """Return the flattened form of ``nested``; values that are dicts get dotted names."""

    def flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            yield from flat(f"{prefix}{name}.", value) if isinstance(value, dict) else [(f"{prefix}{name}", value)]

    groups = by_fqn(nested).entries.items()
    of_groups = {f"{_FLAT_GROUPS}{fqn}.{name}": value for fqn, entries in groups for name, value in entries.items()}
    return dict(flat(_FLAT_STATE, nested["state"])) | of_groups


def is_fsdp_dtensor(state_dict: Mapping[str, Any]) -> bool:
    """Return whether ``state_dict`` has Megatron's form."""
    return isinstance(state_dict.get("state"), Mapping) and isinstance(state_dict.get(GROUP_META), Mapping)


def by_fqn(state_dict: Mapping[str, Any]) -> SavedByFqn:
    """Convert a state dict in any of the layouts; raise a ValueError for others."""
    line = "load({'optimizer': state_dict}, checkpoint_id=path), where state_dict is what get_optimizer_state_dict"
    check_is(state_dict, Mapping, "expected the state dict of an optimizer", f"{line}(for_load=True) gives")
    groups: Any = state_dict.get("param_groups")
    is_list = isinstance(groups, Sequence) and all(isinstance(one, Mapping) and "params" in one for one in groups)
    keys = [*(one for of in groups for one in of["params"]), *(state_dict.get("state") or ())] if is_list else []
    if any(isinstance(one, int) for one in keys):
        raise ValueError(
            "this state dict has numbers in the place of names, as that of optimizer.state_dict(). Load it with "
            "optimizer.load_state_dict(), or replace them by the names of the optimizer's parameters, in their order."
        )
    entries: Any = state_dict.get(GROUP_META)
    if not is_fsdp_dtensor(state_dict) and is_list:
        entries = {fqn: {n: v for n, v in of.items() if n != "params"} for of in groups for fqn in of["params"]}
    parts = [state_dict.get("state"), entries]
    if all(isinstance(part, Mapping) and all(isinstance(of, Mapping) for of in part.values()) for part in parts):
        return SavedByFqn(*({fqn: dict(of) for fqn, of in part.items()} for part in parts))
    strange = [key for key in state_dict if not str(key).startswith((_FLAT_STATE, _FLAT_GROUPS))]
    if strange or not state_dict:
        inner = [key for key, of in state_dict.items() if isinstance(of, Mapping) and "state" in of]
        hint = f" Give its entry {inner[0]!r}." if inner else ""
        raise ValueError(
            "not the state dict of an optimizer: expected {'state': {name: {...}}, 'param_groups': [{'params': "
            f"[name]}}]}}, or Megatron's {{'state': ..., '{GROUP_META}': ...}}, or keys that begin with "
            f"'{_FLAT_STATE}' and '{_FLAT_GROUPS}', as get_optimizer_state_dict gives them; got {strange[:5]}.{hint}"
        )
    found = SavedByFqn({}, {})
    for key in (one for one in state_dict if one.startswith(_FLAT_GROUPS)):
        fqn, _, name = key.removeprefix(_FLAT_GROUPS).rpartition(".")
        found.entries.setdefault(fqn, {})[name] = state_dict[key]
    for key in (one for one in state_dict if one.startswith(_FLAT_STATE)):
        rest = key.removeprefix(_FLAT_STATE)
        fqn = parameter_of(rest, found.entries.keys()) or rest.rpartition(".")[0]
        *outer, last = rest.removeprefix(f"{fqn}.").split(".")
        values: dict[str, Any] = found.state.setdefault(fqn, {})
        for name in outer:
            values = values.setdefault(name, {})
        values[last] = state_dict[key]
    return found


# --- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """The local experts of this rank: ``count`` of them, from the global number ``first`` on."""

    first: int
    count: int

    def __post_init__(self) -> None:
        _check_numbers("Experts(first, count)", first=(self.first, 0), count=(self.count, 1))

    @classmethod
    def of_rank(cls, expert_parallel_rank: int, num_local_experts: int) -> "Experts":
        """Return the experts of one rank; every rank has equally many.

        Args:
            expert_parallel_rank: Megatron's ``parallel_state.get_expert_model_parallel_rank()``.
            num_local_experts: number on each rank: ``config.num_moe_experts`` divided by the expert-parallel size.
        """
        given = {"expert_parallel_rank": (expert_parallel_rank, 0), "num_local_experts": (num_local_experts, 1)}
        _check_numbers("Experts.of_rank(expert_parallel_rank, num_local_experts)", **given)
        return cls(expert_parallel_rank * num_local_experts, num_local_experts)

    def global_name(self, name: str) -> str:
        """Return the ``name`` of a parameter with the global number of its expert; other names unchanged.

        Raises:
            ValueError: a number is not that of a local expert.
        """
        check_is(name, str, "Experts.global_name: expected a parameter's name", "experts.global_name(name)")
        found = _NUMBERED.search(name)
        if found is None:
            return name
        number = int(found["number"])
        if number >= self.count:
            raise ValueError(
                f"{name}: local experts are 0 to {self.count - 1}. Has it been renumbered already, or is the number of "
                "local experts another one?"
            )
        begin, end = found.span("number")
        return f"{name[:begin]}{number + self.first}{name[end:]}"


def _check_numbers(line: str, **given: tuple[Any, int]) -> None:
    for name, (value, least) in given.items():
        if not is_whole(value):
            raise TypeError(f"{line}: {name} must be a whole number, got {value!r}. Write int({name}) if it is text.")
        if value < least:
            raise ValueError(f"{line}: {name} must be {least} or more, got {value!r}.")


def check_model(model: object, line: str) -> None:
    """Raise if ``model`` is no module, with the line to write."""
    check_is(model, nn.Module, "expected a torch.nn.Module first", line)


def fqns_of(model: nn.Module, experts: Experts | None) -> dict[Tensor, str]:
    """Map parameters to their names in checkpoints, with global numbers of experts; tied ones to their first name."""
    names = {param: canonical_fqn(model, name) for param, name in parameter_names(model).items()}
    check_experts(((name, param) for param, name in names.items()), experts)
    return names if experts is None else {param: experts.global_name(name) for param, name in names.items()}


def check_experts(named: Iterable[tuple[str, Any]], experts: Experts | None) -> None:
    """Raise for experts whose numbers may be local: ranks outside of their mesh may use the same name."""
    if not isinstance(experts, Experts | None):
        raise TypeError(f"expected experts=Experts(first, count), got {experts!r}. Write Experts.of_rank(rank, count).")
    lacking = [name for name, value in named if may_be_local(name, value)] if experts is None else []
    if lacking:
        raise ValueError(
            f"{lacking[0]} and {len(lacking) - 1} other parameters of experts are on a mesh that is not all ranks: "
            "a checkpoint would keep those that one rank has under these names. Give experts=Experts.of_rank("
            "expert_parallel_rank, num_local_experts), or Experts(0, num_experts) if their numbers are global already."
        )


def may_be_local(name: str, value: object) -> bool:
    """Return whether ``name`` has an expert's number, and ``value`` a mesh that does not span all ranks."""
    is_numbered = _NUMBERED.search(name) is not None
    return is_numbered and isinstance(value, Tensor) and is_dtensor(value) and may_be_another_ranks(value)
