"""Compare two checkpoints. How their tensors are divided into chunks is no difference.

::

    Checkpoint, Checkpoint ──▶ keys, shapes, dtypes ──▶ Difference
                           ──▶ blocks of a tensor, put together from the chunks of each side ──compare──▶ Difference

A block is a range of elements of the whole tensor in row-major order that is also one range in every chunk it meets:
rows, or a part of one row where a row is too large. So every chunk is read once, from start to end.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.regions import TensorRegion, common, position_in, stretches, whole_of
from ..core.sizes import MAX_ITEM_BYTES, block_bounds, counted, human_shape, natural_order, short_repr, thread_bytes
from ..core.tables import Table
from ..core.values import Comparison, compare_each, compare_values, same_values
from ..fused.keys import sorted_out
from ..stored.envelope import envelope_of
from ..stored.item_archive import crc32
from ..stored.items import ItemReader
from ..stored.reading import Checkpoint, StoredTensor
from .verify import check_coverage

LEAST_THREAD_BYTES = 16 * MAX_ITEM_BYTES
"""Least memory of a thread: a block's share of it holds one element."""

MAX_BLOCK_BYTES = 32 << 20
_SMALL_BYTES = 64 << 10
_BATCH_BYTES = 1 << 20  # of small tensors that are compared at once


class Difference(NamedTuple):
    """Difference of one key.

    Attributes:
        key: of both, or of the one that has it.
        kind: ``only in A``, ``only in B``, ``kind``, ``shape``, ``dtype``, ``values`` or ``object``.
        detail: for people.
        differing: how many elements differ, for values.
        numel: of how many.
        max_abs_diff: the largest difference; infinite where only one is a number; ``None`` if it has no meaning.
    """

    key: str
    kind: str
    detail: str
    differing: int | None = None
    numel: int | None = None
    max_abs_diff: float | None = None


class Tolerance(NamedTuple):
    """Values are equal if ``|a - b| <= atol + rtol * |b|``; with zeros, if their bits are.

    That is for tensors. Objects are always compared as :func:`~checkpoint_tools.core.values.same_values` does.
    """

    rtol: float = 0.0
    atol: float = 0.0


EXACT = Tolerance()


def diff(
    first: Checkpoint,
    second: Checkpoint,
    keys: Sequence[str],
    tolerance: Tolerance = EXACT,
    max_memory_bytes: int = 2 << 30,
    threads: int = 4,
    advance: Callable[[int], object] = lambda done: None,
) -> list[Difference]:
    """Compare ``keys`` (see :func:`all_keys`); return at most one difference for each, in their order.

    Raises:
        CheckpointError: one of the two is damaged, or does not fit into the memory.
    """
    memory_bytes = thread_bytes(max_memory_bytes, threads, LEAST_THREAD_BYTES)
    readers = _Readers(first, second, memory_bytes // 4)

    def compare(some: Sequence[str]) -> list[Difference]:
        found: dict[str, Difference | None] = {}
        small = _Small(readers, tolerance, min(_BATCH_BYTES, memory_bytes // 4))
        for key in some:
            found[key] = _diff_entries(first, second, key)
            if found[key] is None and key in first.objects:
                found[key] = _diff_objects(readers, key)
            elif found[key] is not None or small.takes(key):
                advance(_bytes_of(first, key) + _bytes_of(second, key))
            else:
                found[key] = _diff_tensors(readers, key, tolerance, memory_bytes, advance)
        found |= small.differences()
        return [each for each in found.values() if each is not None]

    # Many keys at a time: with a hundred thousand small tensors, handing each to a thread would take longest.
    parts = [keys[start:stop] for start, stop in block_bounds(len(keys), max(1, min(512, len(keys) // (4 * threads))))]
    with contextlib.closing(readers), ThreadPoolExecutor(max_workers=threads) as pool:
        return [found for part in pool.map(compare, parts) for found in part]


class _Readers:
    """Keeps both checkpoints' files open, for each thread its own."""

    def __init__(self, first: Checkpoint, second: Checkpoint, max_whole_bytes: int) -> None:
        self.checkpoints = first, second
        self._max_whole_bytes = max_whole_bytes
        self._local = threading.local()
        self._all: list[ItemReader] = []

    def mine(self) -> tuple[ItemReader, ItemReader]:
        """Return the calling thread's readers."""
        if not hasattr(self._local, "readers"):
            a, b = (ItemReader(checkpoint, self._max_whole_bytes) for checkpoint in self.checkpoints)
            self._local.readers = a, b
            self._all += [a, b]
        mine: tuple[ItemReader, ItemReader] = self._local.readers
        return mine

    def close(self) -> None:
        for reader in self._all:
            reader.close()


def aligned(
    first: Checkpoint, second: Checkpoint, key_prefix: str | None = None
) -> tuple[Checkpoint, Checkpoint, list[str]]:
    """Both, with the same keys for the model also where those of one begin with a prefix, and what was done.

    Args:
        first: one of them.
        second: the other one.
        key_prefix: what the model's keys of one begin with; without it, it is found out where no key is in both.

    Raises:
        CheckpointError: the given prefix tells no key of the one from a key of the other.
    """
    models = [_model_keys(checkpoint) for checkpoint in (first, second)]
    if key_prefix is None:
        key_prefix = None if models[0] & models[1] else _prefix_of(*models) or _prefix_of(*reversed(models))
        if key_prefix is None:
            return first, second, []
    elif key_prefix == "":
        return first, second, []
    in_a, in_b = (sum(f"{key_prefix}{key}" in others for key in keys) for others, keys in (models, reversed(models)))
    if not in_a and not in_b:
        raise CheckpointError(
            f"--key-prefix {key_prefix}: no key of one side is that and a key of the other; see the command inspect"
        )
    note = f"keys of the model begin with {key_prefix!r} in {'A' if in_a > in_b else 'B'} alone, compared without"
    if in_a > in_b:
        return _without_prefix(first, models[0], key_prefix), second, [note]
    return first, _without_prefix(second, models[1], key_prefix), [note]


def _model_keys(checkpoint: Checkpoint) -> frozenset[str]:
    names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
    return frozenset(key for key in names.others if key in checkpoint.tensors)


def _prefix_of(keys: Set[str], others: Set[str]) -> str | None:
    """Find the prefix of most of ``others``, if it alone tells them from ``keys``."""
    sample = min(keys, default=None)
    found = [key.removesuffix(sample) for key in others if sample is not None and key.endswith(f".{sample}")]
    counts = {prefix: sum(f"{prefix}{key}" in others for key in keys) for prefix in found}
    best = max(counts, key=lambda prefix: counts[prefix], default=None)
    return best if best is not None and 2 * counts[best] >= len(keys) else None


def _without_prefix(checkpoint: Checkpoint, model: Set[str], prefix: str) -> Checkpoint:
    new = {key: key.removeprefix(prefix) if key in model else key for key in checkpoint.tensors}
    if len(set(new.values())) < len(new):
        raise CheckpointError(f"{checkpoint.path} would have two values of one name without {prefix!r}")
    tensors = {new[key]: tensor for key, tensor in checkpoint.tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


def all_keys(first: Checkpoint, second: Checkpoint) -> list[str]:
    """List the keys of either, in natural order."""
    return sorted({*first.tensors, *first.objects, *second.tensors, *second.objects}, key=natural_order)


def bytes_to_compare(first: Checkpoint, second: Checkpoint, keys: Sequence[str]) -> int:
    """Return the total of bytes that ``advance`` will be told."""
    return sum(_bytes_of(first, key) + _bytes_of(second, key) for key in keys)


def _bytes_of(checkpoint: Checkpoint, key: str) -> int:
    return checkpoint.tensors[key].nbytes if key in checkpoint.tensors else 0


# --- keys, shapes, dtypes --------------------------------------------------------------------------------------------


def _diff_entries(first: Checkpoint, second: Checkpoint, key: str) -> Difference | None:
    kinds = [_kind(checkpoint, key) for checkpoint in (first, second)]
    if None in kinds:
        name, kind = ("A", kinds[0]) if kinds[1] is None else ("B", kinds[1])
        return Difference(key, f"only in {name}", str(kind))
    if kinds[0] != kinds[1]:
        return Difference(key, "kind", f"{kinds[0]} in A, {kinds[1]} in B")
    if kinds[0] == "object":
        return None
    a, b = first.tensors[key], second.tensors[key]
    if a.shape != b.shape:
        return Difference(key, "shape", f"{human_shape(a.shape)} in A, {human_shape(b.shape)} in B")
    if a.dtype != b.dtype:
        return Difference(key, "dtype", f"{a.dtype} in A, {b.dtype} in B".replace("torch.", ""))
    return None


def _kind(checkpoint: Checkpoint, key: str) -> str | None:
    if key in checkpoint.tensors:
        return "tensor"
    return "object" if key in checkpoint.objects else None


# --- values ----------------------------------------------------------------------------------------------------------


def _diff_tensors(
    readers: _Readers, key: str, tolerance: Tolerance, memory_bytes: int, advance: Callable[[int], object]
) -> Difference | None:
    a, b = (checkpoint.tensors[key] for checkpoint in readers.checkpoints)
    for checkpoint, tensor in zip(readers.checkpoints, (a, b), strict=True):
        for _, text in check_coverage(tensor):
            raise CheckpointError(f"{tensor.key} in {checkpoint.path}: {text}; see the command verify")
    # A quarter for two blocks, and for the parts of them that are read. The rest is for items that can only be read as
    # a whole: one side's is kept while the other side's is there twice, as stored and in row-major order.
    block_numel = min(MAX_BLOCK_BYTES, memory_bytes // 16) // a.dtype.itemsize
    total = Comparison(0, 0, None)
    reader_a, reader_b = readers.mine()
    for block in stretches(whole_of(a.shape), block_numel) if a.nbytes else ():
        here = compare_values(read_block(reader_a, a, block), read_block(reader_b, b, block), *tolerance)
        total = total.plus(here)
        advance(2 * block.numel * a.dtype.itemsize)
    for reader in (reader_a, reader_b):
        reader.forget()
    return _of_values(key, total)


def _of_values(key: str, total: Comparison) -> Difference | None:
    if not total.differing:
        return None
    detail = f"{total.differing:,} of {total.numel:,} differ"
    return Difference(key, "values", detail, total.differing, total.numel, total.max_abs_diff)


class _Small:
    """Small tensors that are in one item in both checkpoints: their bytes are compared, and many of them at once.

    Args:
        readers: of both.
        tolerance: of their values.
        most_bytes: so much is collected before it is compared.
    """

    def __init__(self, readers: _Readers, tolerance: Tolerance, most_bytes: int) -> None:
        self._readers = readers
        self._tolerance = tolerance
        self._most_bytes = most_bytes
        self._bytes = 0
        self._waiting: dict[torch.dtype, list[tuple[str, bytes, bytes]]] = {}
        self._found: dict[str, Difference | None] = {}

    def takes(self, key: str) -> bool:
        """Take a tensor if it is small; its differences then come with :meth:`differences`."""
        tensors = [checkpoint.tensors[key] for checkpoint in self._readers.checkpoints]
        if not all(map(_is_one_small_item, tensors)):
            return False
        chunks = [tensor.chunks[0] for tensor in tensors]
        if chunks[0].transforms != chunks[1].transforms or chunks[0].bare_dtype != chunks[1].bare_dtype:
            return False
        a, b = (reader.read_bytes(chunk) for reader, chunk in zip(self._readers.mine(), chunks, strict=True))
        if a == b:
            return True
        of_a, of_b = _elements(a, tensors[0]), _elements(b, tensors[1])
        if of_a is None or of_b is None:
            return False
        self._waiting.setdefault(tensors[0].dtype, []).append((key, of_a, of_b))
        self._bytes += len(of_a) + len(of_b)
        if self._bytes > self._most_bytes:
            self._compare()
        return True

    def differences(self) -> dict[str, Difference | None]:
        """Compare all that were taken."""
        self._compare()
        return self._found

    def _compare(self) -> None:
        for dtype, waiting in self._waiting.items():
            _, *sides = zip(*waiting, strict=True)
            a, b = (torch.frombuffer(bytearray().join(side), dtype=dtype) for side in sides)
            numels = [len(each[1]) // dtype.itemsize for each in waiting]
            for (key, _, _), found in zip(waiting, compare_each(a, b, numels, *self._tolerance), strict=True):
                self._found[key] = _of_values(key, found)
        self._waiting.clear()
        self._bytes = 0


def _is_one_small_item(tensor: StoredTensor) -> bool:
    if len(tensor.chunks) != 1:
        return False
    chunk = tensor.chunks[0]
    return chunk.sizes == tensor.shape and not any(chunk.offsets) and chunk.length_bytes <= _SMALL_BYTES


def _elements(item: bytes, tensor: StoredTensor) -> bytes | None:
    """Return the elements of an item, if it begins as ``torch.save`` does and their CRC-32 follows them."""
    chunk = tensor.chunks[0]
    if chunk.transforms or not tensor.nbytes or chunk.bare_dtype not in (None, tensor.dtype):
        return None
    if chunk.bare_dtype is not None:
        return item if len(item) == tensor.nbytes else None
    around = envelope_of(tensor.shape, tensor.dtype)
    stop = len(around.head) + around.data_bytes
    if len(item) != around.length_bytes or not item.startswith(around.head):
        return None
    elements = item[len(around.head) : stop]
    return elements if item.startswith(around.descriptor(crc32(elements)), stop) else None


def read_block(reader: ItemReader, tensor: StoredTensor, block: TensorRegion) -> Tensor:
    """Read the elements of a block from all chunks that it meets.

    Raises:
        CheckpointError: they cannot be read, or are of another dtype than the metadata say.
    """
    result: Tensor | None = None
    for chunk in tensor.chunks:
        met = common(chunk, block)
        if met is None:
            continue
        first = position_in(chunk, met.offsets)
        part = reader.read_elements(chunk, first, first + met.numel)
        if part.dtype != tensor.dtype:
            raise CheckpointError(
                f"{tensor.key} is stored as {part.dtype}, not as {tensor.dtype}; see the command verify"
            )
        if met == block:
            return part.reshape(block.sizes)
        if result is None:
            result = torch.empty(block.sizes, dtype=tensor.dtype)
        at = tuple(
            slice(offset - start, offset - start + size)
            for offset, start, size in zip(met.offsets, block.offsets, met.sizes, strict=True)
        )
        result[at] = part.reshape(met.sizes)
    assert result is not None  # no block is empty, and all elements are in chunks
    return result


# --- objects ---------------------------------------------------------------------------------------------------------


def _diff_objects(readers: _Readers, key: str) -> Difference | None:
    a, b = (checkpoint.objects[key] for checkpoint in readers.checkpoints)
    reader_a, reader_b = readers.mine()
    if reader_a.read_bytes(a) == reader_b.read_bytes(b):
        return None
    try:
        objects = reader_a.read_object(a), reader_b.read_object(b)
        is_same = same_values(*objects)
    except (CheckpointError, RecursionError):
        return Difference(key, "object", "their bytes differ; they cannot be looked into")
    detail = f"{short_repr(objects[0])} in A, {short_repr(objects[1])} in B"
    return None if is_same else Difference(key, "object", detail)


# --- shown -----------------------------------------------------------------------------------------------------------


def as_table(differences: Sequence[Difference]) -> Table:
    """Return a table with a row for each difference."""
    table = Table("key", "difference", "detail", numbers=("max |A - B|",))
    for found in differences:
        gap = "" if found.max_abs_diff is None else f"{found.max_abs_diff:.6g}"
        table.add_row(found.key, found.kind, found.detail, gap)
    return table


def headline(differences: Sequence[Difference], keys: int, *, exact: bool) -> str:
    """Say the result in a line."""
    if not differences:
        return f"the same: {counted(keys, 'key')}, {'bit by bit' if exact else 'within the tolerance'}"
    return f"different: {len(differences):,} of {counted(keys, 'key')}"
