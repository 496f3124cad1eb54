"""Options of param groups and other non-tensor state of parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_same_options(fused: str, options: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Check that parts may become one parameter, which has one learning rate and one weight decay.

    Args:
        fused: what they become, for messages.
        options: the entries of the param group that lists each part; ``None`` where none does.

    Raises:
        ValueError: the groups differ, or list only some of the parts.
    """
    listed = {part: entries for part, entries in options.items() if entries is not None}
    if listed and len(listed) < len(options):
        missing = [part for part in options if part not in listed]
        raise ValueError(f"{fused} cannot be merged: param groups list {list(listed)}, and not {missing}")
    first, *others = listed.values() if listed else ({},)
    for part, entries in zip(list(listed)[1:], others, strict=True):
        if first.keys() != entries.keys() or not all(_equal(first[name], entries[name]) for name in first):
            raise ValueError(
                f"{fused} cannot be merged: {next(iter(listed))} and {part} are in param groups with different "
                f"options, {_shown(first)} and {_shown(entries)}; one parameter has one of each. Exclude it"
            )


def holds_tensors(value: Any) -> bool:
    """Tell whether an object of state contains tensors that may be shaped like the parameter."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, Mapping):
        return any(map(holds_tensors, value.values()))
    return isinstance(value, list | tuple | set) and any(map(holds_tensors, value))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _shown(entries: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in entries.items())
