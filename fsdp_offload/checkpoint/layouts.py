"""The two forms in which a checkpoint has the state of optimizers, and their common denominator: by FQN.

========= =============================================================================================================
nested    ``{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], entry: value}]}``
flattened ``{"state.{fqn}.{name}": value, "param_groups.{fqn}.{entry}": value}``
========= =============================================================================================================

As ``torch.distributed.checkpoint.state_dict`` has them (``flatten_optimizer_state_dict``), read in torch 2.13.
"""

from collections.abc import Iterator, Mapping, Sequence
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


def _flat_items(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_items(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


def by_fqn(state_dict: Mapping[str, Any]) -> SavedByFqn:
    """Either form, by FQN.

    Raises:
        ValueError: it is neither.
    """
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
            "not the state dict of an optimizer: expected {'state': ..., 'param_groups': ...} or keys that begin with "
            f"'{_FLAT_STATE}' and '{_FLAT_GROUPS}', as get_optimizer_state_dict gives them; got {strange[:5]}."
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
