"""Turns scratch optimizers into plain data that ``==`` compares: bits of tensors, states of generators, counters."""

import collections
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..state.layout import leaves_of
from .scratch import is_counter


def bits(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, bytes]]:
    """Shape, dtype and bytes of each."""
    dense = [one.detach() if one.layout == torch.strided else one.detach().to_dense() for one in tensors]
    return [
        (one.shape, one.dtype, one.resolve_conj().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        for one in dense
    ]


def plain(value: Any, seen: set[int] | None = None) -> Any:
    """``value`` as dicts, lists and texts; of objects that hold no numbers of their own, the type alone."""
    if isinstance(value, Tensor):
        return bits(leaves_of(value))
    if isinstance(value, torch.Generator):
        return bits([value.get_state()])
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return plain(value.bit_generator.state)
    if isinstance(value, np.ndarray | np.generic):
        return value.shape, value.dtype.str, value.tobytes()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # of which NaN equals itself, and 1 is not 1.0
    seen = set() if seen is None else seen
    if id(value) in seen:
        return "again"
    seen.add(id(value))
    if isinstance(value, dict):
        if any(isinstance(key, Tensor) for key in value):  # by parameter: each has scratch parameters of its own
            return [plain(one, seen) for one in value.values()]
        return {key: plain(one, seen) for key, one in value.items()}
    if isinstance(value, list | tuple | collections.deque):
        return [plain(one, seen) for one in value]
    if isinstance(value, set | frozenset):
        return len(value)
    return type(value).__name__, plain(vars(value), seen) if is_counter(value) else {}


def difference(one: dict[Any, Any], other: dict[Any, Any], place: str = "") -> str:
    """Where two of :func:`plain` are not equal; empty if they are."""
    for key in [*one, *(key for key in other if key not in one)]:
        here = f"{place}[{key!r}]" if place else str(key)
        a, b = one.get(key), other.get(key)
        if a != b:
            return difference(a, b, here) if isinstance(a, dict) and isinstance(b, dict) else here
    return ""
