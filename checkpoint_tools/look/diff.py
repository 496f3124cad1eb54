"""Compare two checkpoints; how tensors are divided into chunks does not matter.

::

    Checkpoint, Checkpoint ──▶ keys, shapes, dtypes ──▶ Difference
                           ──▶ blocks of a tensor, assembled from the chunks of each side ──compare──▶ Difference

A block is a range of the whole tensor's elements in row-major order: some rows, or part of a row that is too large. In
each chunk that a block meets, it is one range as well. So every chunk is read once, from start to end.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.regions import stretches, whole_of
from ..core.text import CheckpointError, counted, dtype_name, human_shape, natural_order, short_repr, table
from ..core.values import compare, same_values
from ..fuse.files import read_record
from ..fuse.names import sorted_out
from ..stored.checkpoint import Checkpoint
from ..stored.items import ItemReader
from .verify import UNSEEN, Progress, check_coverage

MAX_BLOCK_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10
_COMPARED_NUMEL = 1 << 18  # elements compared at a time, which takes masks and float64 copies


class Difference(NamedTuple):
    """Difference of one key; for the kind ``values``, with the figures of :func:`checkpoint_tools.core.values.compare`.

    ``kind``: ``only in A``, ``only in B``, ``kind``, ``shape``, ``dtype``, ``values`` or ``object``.
    """

    key: str
    kind: str
    detail: str
    differing: int | None = None
    numel: int | None = None
    max_abs_diff: float | None = None


def diff(
    first: Checkpoint,
    second: Checkpoint,
    keys: Sequence[str],
    rtol: float = 0.0,
    atol: float = 0.0,
    max_memory_bytes: int = 2 << 30,
    threads: int = 2,
    progress: Progress = UNSEEN,
) -> list[Difference]:
    """Compare bit by bit, or by ``|a - b| <= atol + rtol * |b|``; return the differences in the order of ``keys``."""
    sides = _Sides((first, second), max_memory_bytes // threads)
    nbytes = {key: sum(each.tensors[key].nbytes for each in (first, second) if key in each.tensors) for key in keys}

    def compared(some: Sequence[str]) -> list[Difference]:
        found: list[Difference] = []
        values = _Values((rtol, atol))
        for key in some:
            difference = sides.difference(key)
            if difference is not None:
                found.append(difference)
            elif key in first.tensors:
                for a, b in sides.unlike_values(key):
                    values.add(key, first.tensors[key].dtype, a, b)
            advance(nbytes[key])
        return [*found, *values.differences(first)]

    # One thread compares all small tensors: several would mostly wait for each other. Large ones go to any thread.
    small = [key for key in keys if nbytes[key] <= _SMALL_BYTES]
    parts = [small, *([key] for key in keys if nbytes[key] > _SMALL_BYTES)]
    with progress("values", sum(nbytes.values())) as advance, ThreadPoolExecutor(max_workers=threads) as pool:
        found = {each.key: each for part in pool.map(compared, parts) for each in part}
    return [found[key] for key in keys if key in found]


def split_notes(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Note if one side's record says that it split tensors that the other side has fused, and how to compare them."""
    notes = []
    sides = (("A", first), ("B", second))
    for (fused_name, fused), (name, parted) in (sides, sides[::-1]):
        split = frozenset[str]().union(*(one.fused for one in read_record(parted)))
        if count := len(split & fused.tensors.keys() - parted.tensors.keys()):
            notes.append(
                f"{name} is split, and {fused_name} is not: {counted(count, 'fused tensor')}, with their state. To "
                f"compare values: checkpoint-tools merge {parted.path} MERGED, then checkpoint-tools diff {fused.path} "
                "MERGED"
            )
    return notes


def without_prefix(first: Checkpoint, second: Checkpoint, key_prefix: str) -> tuple[Checkpoint, Checkpoint]:
    """Return both checkpoints; remove ``key_prefix`` from the model's keys of the side that has it."""
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
    """List the keys of both checkpoints, in natural order."""
    return sorted({*first.tensors, *first.objects, *second.tensors, *second.objects}, key=natural_order)


class _Values:
    """Counts different elements; compares many small tensors of a dtype in one call, as calls cost more than data."""

    def __init__(self, tolerance: tuple[float, float]) -> None:
        self._tolerance = tolerance
        self._waiting: dict[torch.dtype, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        self._nbytes = Counter[torch.dtype]()  # dtype → bytes that wait to be compared
        self._found: dict[str, tuple[int, float | None]] = {}

    def add(self, key: str, dtype: torch.dtype, a: Tensor, b: Tensor) -> None:
        """Add a part of ``key`` that differs: the bytes of its elements on both sides."""
        self._waiting[dtype].append((key, a, b))
        self._nbytes[dtype] += len(a)
        if self._nbytes[dtype] >= _COMPARED_NUMEL * dtype.itemsize:
            self._compare(dtype)

    def _compare(self, dtype: torch.dtype) -> None:
        keys, *sides = zip(*self._waiting.pop(dtype), strict=True)
        del self._nbytes[dtype]
        a, b = (torch.cat(side).view(dtype) for side in sides)
        numels = [len(each) // dtype.itemsize for each in sides[0]]
        for key, (count, gap) in zip(keys, compare(a, b, numels, *self._tolerance), strict=True):
            before, known = self._found.get(key, (0, None))
            self._found[key] = before + count, max((each for each in (known, gap) if each is not None), default=None)

    def differences(self, first: Checkpoint) -> Iterator[Difference]:
        for dtype in [*self._waiting]:
            self._compare(dtype)
        for key, (count, gap) in self._found.items():
            numel = math.prod(first.tensors[key].shape)
            if count:
                yield Difference(key, "values", f"{count:,} of {numel:,} differ", count, numel, gap)


class _Sides:
    def __init__(self, both: tuple[Checkpoint, Checkpoint], memory_bytes: int) -> None:
        self._both, self._memory_bytes = both, memory_bytes  # limit for the comparison of one key
        self._readers = tuple(ItemReader(checkpoint, memory_bytes // 4) for checkpoint in both)

    def difference(self, key: str) -> Difference | None:
        """Compare kinds, shapes and dtypes, and objects entirely; the values of tensors are compared later."""
        kinds = ["tensor" if key in e.tensors else "object" if key in e.objects else None for e in self._both]
        if None in kinds:
            name, kind = ("A", kinds[0]) if kinds[1] is None else ("B", kinds[1])
            return Difference(key, f"only in {name}", str(kind))
        if kinds[0] != kinds[1]:
            return Difference(key, "kind", f"{kinds[0]} in A, {kinds[1]} in B")
        if kinds[0] == "object":
            one, other = (checkpoint.objects[key] for checkpoint in self._both)
            if self._readers[0].view(one) == self._readers[1].view(other):
                return None
            try:
                objects = self._readers[0].read_object(one), self._readers[1].read_object(other)
                is_same = same_values(*objects)
            except (CheckpointError, RuntimeError):  # nested too deeply, or with sparse tensors
                return Difference(key, "object", "their bytes differ; they cannot be looked into")
            detail = f"{short_repr(objects[0])} in A, {short_repr(objects[1])} in B"
            return None if is_same else Difference(key, "object", detail)
        a, b = (checkpoint.tensors[key] for checkpoint in self._both)
        if a.shape != b.shape:
            return Difference(key, "shape", f"{human_shape(a.shape)} in A, {human_shape(b.shape)} in B")
        if a.dtype != b.dtype:
            return Difference(key, "dtype", f"{dtype_name(a.dtype)} in A, {dtype_name(b.dtype)} in B")
        return None

    def unlike_values(self, key: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a tensor that differ: the bytes of their elements on both sides."""
        tensors = [checkpoint.tensors[key] for checkpoint in self._both]
        readers, dtype = self._readers, tensors[0].dtype
        items = [tensor.chunks[0] for tensor in tensors if len(tensor.chunks) == 1]
        are_whole = all(each.sizes == tensors[0].shape and not any(each.offsets) for each in items)
        if len(items) == 2 and are_whole and all(each.length_bytes <= _SMALL_BYTES for each in items):
            a, b = items
            is_same = a.bare_dtype == b.bare_dtype and readers[0].view(a) == readers[1].view(b)  # as stored
            if tensors[0].nbytes and not is_same:
                yield readers[0].bits(a, dtype).flatten(), readers[1].bits(b, dtype).flatten()
            return
        for checkpoint, tensor in zip(self._both, tensors, strict=True):
            for text in check_coverage(tensor):
                raise CheckpointError(f"{tensor.key} in {checkpoint.path}: {text}; see the command verify")
        # A quarter of the memory is for two blocks and their parts; three quarters are for items that can only be read
        # whole: one item of the first side, and one of the second side twice, as stored and in row-major order.
        block_numel = min(MAX_BLOCK_BYTES, self._memory_bytes // 16) // dtype.itemsize
        for block in stretches(whole_of(tensors[0].shape), block_numel) if tensors[0].nbytes else ():
            found = zip(readers, tensors, strict=True)
            flat = [reader.read_region(tensor, block).flatten().view(torch.uint8) for reader, tensor in found]
            if not torch.equal(*flat):
                nbytes = _COMPARED_NUMEL * dtype.itemsize
                yield from zip(*(each.split(nbytes) for each in flat), strict=True)


def as_table(differences: Sequence[Difference]) -> list[str]:
    """Return a table with a row for each difference."""
    gaps = ("" if found.max_abs_diff is None else f"{found.max_abs_diff:.6g}" for found in differences)
    rows = ((*found[:3], gap) for found, gap in zip(differences, gaps, strict=True))
    return table(("key", "difference", "detail"), ("max |A - B|",), rows)
