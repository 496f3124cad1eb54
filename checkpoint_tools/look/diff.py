"""Compare two checkpoints. How their tensors are divided into chunks is no difference.

::

    Checkpoint, Checkpoint ──▶ keys, shapes, dtypes ──▶ Difference
                           ──▶ blocks of a tensor, put together from the chunks of each side ──compare──▶ Difference

A block is a range of elements of the whole tensor in row-major order that is also one range in every chunk it meets:
rows, or a part of one row where a row is too large. So every chunk is read once, from start to end.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ..core.regions import stretches, whole_of
from ..core.text import CheckpointError, counted, dtype_name, human_shape, natural_order, short_repr, table
from ..core.values import Comparison, compare_parts, compare_values, same_values
from ..fuse.names import sorted_out
from ..stored.checkpoint import Checkpoint, StoredTensor
from ..stored.items import ItemReader
from .verify import UNSEEN, Progress, check_coverage

MAX_BLOCK_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10
_PAIRED_BYTES = 1 << 20  # of small tensors are compared together: an operation of torch takes longer than elements


class Difference(NamedTuple):
    """Difference of one key, as :class:`~checkpoint_tools.core.values.Comparison` counts it.

    ``kind``: ``only in A``, ``only in B``, ``kind``, ``shape``, ``dtype``, ``values`` or ``object``.
    """

    key: str
    kind: str
    detail: str
    differing: int | None = None
    numel: int | None = None
    max_abs_diff: float | None = None


class _Pair(NamedTuple):
    """The elements of a small tensor on both sides, whose bytes differ."""

    key: str
    dtype: torch.dtype
    a: memoryview
    b: memoryview


def diff(
    first: Checkpoint,
    second: Checkpoint,
    keys: Sequence[str],
    rtol: float = 0.0,
    atol: float = 0.0,
    max_memory_bytes: int = 2 << 30,
    threads: int = 4,
    progress: Progress = UNSEEN,
) -> list[Difference]:
    """Compare ``keys``, bit by bit or by ``|a - b| <= atol + rtol * |b|``; return the differences in their order."""
    sides = _Sides((first, second), (rtol, atol), max_memory_bytes // threads)
    nbytes = {key: sum(each.tensors[key].nbytes for each in (first, second) if key in each.tensors) for key in keys}

    def compare(some: Sequence[str]) -> list[Difference]:
        found: list[Difference] = []
        pairs: dict[torch.dtype, list[_Pair]] = {}
        paired_bytes = Counter[torch.dtype]()
        for key in some:
            each = sides.difference(key)
            if isinstance(each, _Pair):
                pairs.setdefault(each.dtype, []).append(each)
                paired_bytes[each.dtype] += len(each.a)
                if paired_bytes[each.dtype] >= _PAIRED_BYTES:
                    found += sides.of_pairs(pairs.pop(each.dtype))
                    del paired_bytes[each.dtype]
            elif each is not None:
                found.append(each)
            advance(nbytes[key])
        return [*found, *(each for same in pairs.values() for each in sides.of_pairs(same))]

    # All small tensors in one thread: several would mostly wait for each other. Large ones in whichever thread is free.
    small = [key for key in keys if nbytes[key] <= _SMALL_BYTES]
    parts = [small, *([key] for key in keys if nbytes[key] > _SMALL_BYTES)]
    with progress("values", sum(nbytes.values())) as advance, ThreadPoolExecutor(max_workers=threads) as pool:
        found = {each.key: each for part in pool.map(compare, parts) for each in part}
    return [found[key] for key in keys if key in found]


def without_prefix(first: Checkpoint, second: Checkpoint, key_prefix: str) -> tuple[Checkpoint, Checkpoint]:
    """Return both, the model's keys of one side without what they begin with there, and not on the other side."""
    sides = [first, second]
    others = [sorted_out([*each.tensors, *each.objects], each.paths).others for each in sides]
    models = [frozenset(each.tensors.keys() & found) for each, found in zip(sides, others, strict=True)]
    counts = [sum(f"{key_prefix}{key}" in models[n] for key in models[1 - n]) for n in range(2)]
    if not any(counts):
        raise CheckpointError(
            f"--key-prefix {key_prefix}: no key of one side is that and a key of the other; see the command inspect"
        )
    at = int(counts[1] > counts[0])
    names = [key.removeprefix(key_prefix) if key in models[at] else key for key in sides[at].tensors]
    if len({*names}) < len(names):
        raise CheckpointError(f"{sides[at].path} would have two values of one name without {key_prefix!r}")
    tensors = dict(zip(names, sides[at].tensors.values(), strict=True))
    sides[at] = dataclasses.replace(sides[at], tensors=tensors)
    return sides[0], sides[1]


def all_keys(first: Checkpoint, second: Checkpoint) -> list[str]:
    """List the keys of either, in natural order."""
    return sorted({*first.tensors, *first.objects, *second.tensors, *second.objects}, key=natural_order)


class _Sides:
    def __init__(self, both: tuple[Checkpoint, Checkpoint], tolerance: tuple[float, float], memory_bytes: int) -> None:
        self._both, self._tolerance, self._memory_bytes = both, tolerance, memory_bytes  # for one key
        self._readers = tuple(ItemReader(checkpoint, memory_bytes // 4) for checkpoint in both)

    def difference(self, key: str) -> Difference | _Pair | None:
        kinds = ["tensor" if key in e.tensors else "object" if key in e.objects else None for e in self._both]
        if None in kinds:
            name, kind = ("A", kinds[0]) if kinds[1] is None else ("B", kinds[1])
            return Difference(key, f"only in {name}", str(kind))
        if kinds[0] != kinds[1]:
            return Difference(key, "kind", f"{kinds[0]} in A, {kinds[1]} in B")
        if kinds[0] == "object":
            return self._of_objects(key)
        a, b = (checkpoint.tensors[key] for checkpoint in self._both)
        if a.shape != b.shape:
            return Difference(key, "shape", f"{human_shape(a.shape)} in A, {human_shape(b.shape)} in B")
        if a.dtype != b.dtype:
            return Difference(key, "dtype", f"{dtype_name(a.dtype)} in A, {dtype_name(b.dtype)} in B")
        readers = self._readers
        if _is_one_small_item(a) and _is_one_small_item(b) and a.chunks[0][5:] == b.chunks[0][5:]:
            views = readers[0].view(a.chunks[0]), readers[1].view(b.chunks[0])
            if views[0] == views[1]:
                return None
            both = [
                reader.elements(tensor.chunks[0], tensor.dtype, view)
                for reader, tensor, view in zip(readers, (a, b), views, strict=True)
            ]
            if isinstance(both[0], memoryview) and isinstance(both[1], memoryview) and both[0]:
                return _Pair(key, a.dtype, both[0], both[1])
        else:
            for checkpoint, tensor in zip(self._both, (a, b), strict=True):
                for text in check_coverage(tensor):
                    raise CheckpointError(f"{tensor.key} in {checkpoint.path}: {text}; see the command verify")
        # A quarter for two blocks, and for their parts. The rest is for items that can only be read as a whole: one
        # side's is kept while the other side's is there twice, as stored and in row-major order.
        block_numel = min(MAX_BLOCK_BYTES, self._memory_bytes // 16) // a.dtype.itemsize
        total = Comparison(0, 0, None)
        for block in stretches(whole_of(a.shape), block_numel) if a.nbytes else ():
            values = readers[0].read_region(a, block), readers[1].read_region(b, block)
            total = total.plus(compare_values(*values, *self._tolerance))
        return _of_values(key, total)

    def of_pairs(self, pairs: Sequence[_Pair]) -> list[Difference]:
        """Compare pairs of one dtype."""
        dtype = pairs[0].dtype
        sides = zip(*(pair[2:] for pair in pairs), strict=True)
        a, b = (torch.frombuffer(bytearray().join(side), dtype=torch.uint8).view(dtype) for side in sides)
        numels = [len(pair.a) // dtype.itemsize for pair in pairs]
        found = zip(pairs, compare_parts(a, b, numels, *self._tolerance), strict=True)
        return [each for pair, total in found if (each := _of_values(pair.key, total)) is not None]

    def _of_objects(self, key: str) -> Difference | None:
        a, b = (checkpoint.objects[key] for checkpoint in self._both)
        if self._readers[0].view(a) == self._readers[1].view(b):
            return None
        try:
            objects = self._readers[0].read_object(a), self._readers[1].read_object(b)
            is_same = same_values(*objects)
        except (CheckpointError, RecursionError):
            return Difference(key, "object", "their bytes differ; they cannot be looked into")
        detail = f"{short_repr(objects[0])} in A, {short_repr(objects[1])} in B"
        return None if is_same else Difference(key, "object", detail)


def _of_values(key: str, found: Comparison) -> Difference | None:
    if not found.differing:
        return None
    return Difference(key, "values", f"{found.differing:,} of {found.numel:,} differ", *found)


def _is_one_small_item(tensor: StoredTensor) -> bool:
    if len(tensor.chunks) != 1:
        return False
    chunk = tensor.chunks[0]
    return chunk.sizes == tensor.shape and not any(chunk.offsets) and chunk.length_bytes <= _SMALL_BYTES


def as_table(differences: Sequence[Difference]) -> list[str]:
    """Return a table with a row for each difference."""
    gaps = ("" if found.max_abs_diff is None else f"{found.max_abs_diff:.6g}" for found in differences)
    rows = ((*found[:3], gap) for found, gap in zip(differences, gaps, strict=True))
    return table(("key", "difference", "detail"), ("max |A - B|",), rows)


def headline(differences: Sequence[Difference], keys: int, *, exact: bool) -> str:
    """Say the result in a line."""
    if not differences:
        return f"the same: {counted(keys, 'key')}, {'bit by bit' if exact else 'within the tolerance'}"
    return f"different: {len(differences):,} of {counted(keys, 'key')}"
