"""The forms in which a checkpoint has the state of optimizers, and their common denominator: by FQN.

============ ==========================================================================================================
nested       ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], entry: value}]}``
flattened    ``{"state.{fqn}.{name}": value, "param_groups.{fqn}.{entry}": value}``
fsdp_dtensor ``{"state": {fqn: {name: value}}, "param_to_group_meta": {fqn: {entry: value}}}``
============ ==========================================================================================================

The first two are those of ``torch.distributed.checkpoint.state_dict`` (``flatten_optimizer_state_dict``), read in torch
2.13; the third is Megatron-LM's (``DistributedOptimizer.sharded_param_state_fsdp_dtensor``), read at d98e8a64. Its FQNs
have ``module.`` in front more often than those of the model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch.utils.weak import WeakIdKeyDictionary

StateDict = dict[str, Any]


class LeftOut(Enum):
    """Why a load has left a tensor as it was."""

    HAD_NONE = "the checkpoint knows its parameter, which had no state"
    ALLOWED = "it is not in the checkpoint, and the caller allows that"


LEFT_OUT: Any = WeakIdKeyDictionary()
"""Tensors that the last checked load into them has left as they were, and why."""

_FLAT_STATE, _FLAT_GROUPS = "state.", "param_groups."

GROUP_META = "param_to_group_meta"
"""Megatron's name for what param groups say, by parameter."""

_WRAPPED = "module."


class SavedByFqn(NamedTuple):
    """A state dict by FQN."""

    state: dict[str, dict[str, Any]]
    entries: dict[str, dict[str, Any]]  # of the param group that lists it


def flattened(nested: StateDict) -> StateDict:
    """The flattened form of ``nested``; values that are dicts themselves get dotted names."""
    flat: StateDict = {}
    for fqn, state in nested["state"].items():
        flat.update(_flat_items(f"{_FLAT_STATE}{fqn}", state))
    for group in nested["param_groups"]:
        entries = {name: value for name, value in group.items() if name != "params"}
        for fqn in group["params"]:
            flat.update((f"{_FLAT_GROUPS}{fqn}.{name}", value) for name, value in entries.items())
    return flat


def as_fsdp_dtensor(nested: StateDict) -> StateDict:
    """Megatron's form of ``nested``."""
    entries = by_fqn(nested).entries
    return {"state": nested["state"], GROUP_META: {fqn: dict(of_group) for fqn, of_group in entries.items()}}


def bare_name(name: str) -> str:
    """``name`` without the ``module.`` of wrappers in front."""
    while name.startswith(_WRAPPED):
        name = name.removeprefix(_WRAPPED)
    return name


def with_names_of(saved: "SavedByFqn", known: Iterable[str]) -> "SavedByFqn":
    """``saved`` under those of the ``known`` names that differ from its own in the ``module.`` in front alone."""
    same = set(known)
    by_bare: dict[str, str | None] = {}
    for name in same:
        by_bare[bare_name(name)] = None if bare_name(name) in by_bare else name  # of two, neither
    own = {fqn: fqn if fqn in same else by_bare.get(bare_name(fqn)) or fqn for fqn in (*saved.state, *saved.entries)}
    return SavedByFqn(*({own[fqn]: values for fqn, values in part.items()} for part in saved))


def _flat_items(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_items(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


def is_fsdp_dtensor(state_dict: Mapping[str, Any]) -> bool:
    """Return whether ``state_dict`` has Megatron's form."""
    return isinstance(state_dict.get("state"), Mapping) and isinstance(state_dict.get(GROUP_META), Mapping)


def by_fqn(state_dict: Mapping[str, Any]) -> SavedByFqn:
    """Any of the forms, by FQN.

    Raises:
        ValueError: it is none of them.
    """
    if is_fsdp_dtensor(state_dict):
        return SavedByFqn(*({fqn: dict(of) for fqn, of in state_dict[key].items()} for key in ("state", GROUP_META)))
    if isinstance(state_dict.get("state"), Mapping) and isinstance(state_dict.get("param_groups"), Sequence):
        entries = {
            fqn: {name: value for name, value in group.items() if name != "params"}
            for group in state_dict["param_groups"]
            for fqn in group["params"]
        }
        return SavedByFqn({fqn: dict(state) for fqn, state in state_dict["state"].items()}, entries)
    strange = [key for key in state_dict if not str(key).startswith((_FLAT_STATE, _FLAT_GROUPS))]
    if strange or not state_dict:
        raise ValueError(
            "not the state dict of an optimizer: expected {'state': ..., 'param_groups': ...}, or Megatron's "
            f"{{'state': ..., '{GROUP_META}': ...}}, or keys that begin with '{_FLAT_STATE}' and '{_FLAT_GROUPS}', as "
            f"get_optimizer_state_dict gives them; got {strange[:5]}."
        )
    return SavedByFqn(_split_keys(state_dict, _FLAT_STATE), _split_keys(state_dict, _FLAT_GROUPS))


def _split_keys(flat: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """``{fqn: {name: value}}``; names have no dots, FQNs have."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(prefix):
            fqn, _, name = key.removeprefix(prefix).rpartition(".")
            found.setdefault(fqn, {})[name] = value
    return found
