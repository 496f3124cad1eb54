"""Compare two tensors element by element, by bits or within a tolerance, and two objects by their types and bits."""

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def compare(
    a: Tensor, b: Tensor, numels: Sequence[int], rtol: float = 0.0, atol: float = 0.0
) -> list[tuple[int, float | None]]:
    """Compare flat tensors of the same dtype, part by part; ``numels``: elements of each part.

    Elements are the same if their bits are; with a tolerance, also if ``torch.isclose`` with ``equal_nan`` says so.

    Returns:
        For each part, the number of different elements, and the largest difference: infinite if one side is infinite or
        only one is NaN; ``None`` if no element differs, or if elements of the dtype cannot be subtracted (float4).
    """
    differs = _bits(a) != _bits(b)
    where = (differs.view(len(a), -1).any(dim=1) if a.itemsize == 16 else differs).nonzero().flatten()
    # Index the bits: tensors of packed dtypes such as float4 cannot be indexed.
    part_a, part_b = (_bits(each).view(len(each), -1)[where].flatten().view(a.dtype) for each in (a, b))
    gaps = _gaps(part_a, part_b)
    if gaps is not None and (rtol or atol):
        too_far = (gaps > atol + rtol * _wide(part_b).abs()) | gaps.isinf()
        gaps, where = gaps[too_far], where[too_far]
    parts = torch.bucketize(where, torch.tensor(numels).cumsum(0), right=True)
    counts = torch.bincount(parts, minlength=len(numels)).tolist()
    if gaps is None:
        return [(count, None) for count in counts]
    largest = torch.zeros(len(numels), dtype=gaps.dtype).scatter_reduce(0, parts, gaps, "amax").tolist()
    return [(count, gap if count else None) for count, gap in zip(counts, largest, strict=True)]


def _gaps(a: Tensor, b: Tensor) -> Tensor | None:
    """Return |a - b| in float64: infinite if one is infinite or only one NaN; None for packed dtypes (float4)."""
    try:
        wide = _wide(a), _wide(b)
    except (RuntimeError, NotImplementedError):  # packed dtypes such as float4 cannot be cast
        return None
    gaps = (wide[0] - wide[1]).abs()
    if not (a.is_floating_point() or a.is_complex()):
        # float64 holds 53 bits exactly, so subtract in int64; in differences beyond int64, rounding does not matter.
        exact = a.to(torch.int64) - b.to(torch.int64)
        return torch.where(gaps < 2.0**62, exact.to(torch.float64).abs(), gaps)
    both_nan = wide[0].isnan() & wide[1].isnan()
    return gaps.masked_fill(gaps.isnan(), torch.inf).masked_fill(both_nan, 0.0)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().flatten().view(_BITS[values.itemsize])


MAX_VALUES = 10_000_000
"""Limit of values in an object: a few lists that repeat each other can hold more than could ever be visited."""


def values_in(value: Any) -> Iterator[Any]:
    """Yield all values of a tree, including dict keys; yield a shared value once per place."""
    pending = [value]
    while pending:
        each = pending.pop()
        yield each
        if isinstance(each, Mapping):
            pending += [*each, *each.values()]
        elif isinstance(each, list | tuple | set):
            pending += each


def flattened(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, value) pairs, flattened as by DCP: through dicts, and through lists that hold dicts or tensors."""
    if not _is_nested(value):
        yield path, value
        return
    inside = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, each in inside:
        yield from flattened(each, (*path, str(name) if isinstance(value, Mapping) else name))


def _is_nested(value: Any) -> bool:
    is_list = isinstance(value, list)
    return isinstance(value, Mapping) or (is_list and any(isinstance(v, Tensor) or _is_nested(v) for v in value))


def has_more_values(value: Any, most: int) -> bool:
    """Tell whether a tree holds more than ``most`` values."""
    return any(True for _ in itertools.islice(values_in(value), most, most + 1))


def same_values(a: Any, b: Any, seen: dict[tuple[int, int], Any] | None = None) -> bool:
    """Tell whether two objects have the same types, and the same bits in their numbers and tensors.

    1, 1.0 and True differ, 0.0 and -0.0 differ, and NaN are the same if their bits are, in sets and dict keys too. The
    order of dicts does not matter. ``seen``: pairs of containers that need no second comparison. Raises a
    RecursionError for objects that are nested too deeply.
    """
    seen = {} if seen is None else seen
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict | list | tuple):
        if (id(a), id(b)) in seen:
            return True  # the first visit of this pair finds any difference
        seen[id(a), id(b)] = a, b
    if isinstance(a, dict):
        of_a, of_b = ({_identity(key): value for key, value in each.items()} for each in (a, b))
        return of_a.keys() == of_b.keys() and all(same_values(of_a[key], of_b[key], seen) for key in of_a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_values(*pair, seen) for pair in zip(a, b, strict=True))
    return bool(_identity(a) == _identity(b))


def _identity(value: Any) -> Any:
    """Return a key that is equal only for values of the same type and bits; hashable if ``value`` is."""
    kind = type(value)
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<2d", value.real, value.imag)
    if isinstance(value, tuple):
        return kind, tuple(map(_identity, value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(_identity, value))
    return kind, value
