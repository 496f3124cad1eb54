"""The zip file that ``torch.save`` makes of one tensor: where in it the elements are."""

import functools
import math
import sys
from typing import Any, NamedTuple

import torch

from ..core.sizes import MAX_DIMS, MAX_INT64, shortened
from .item_archive import (
    SMALL_BYTES,
    STORED,
    Archive,
    DamagedItemError,
    Record,
    check_record,
    open_item,
    read_record,
)
from .storage import Window
from .unpickle import TENSOR_NAMES, ForbiddenNameError, unpickle, unpickle_plain
from .unpickle import PickledObject as Named

MAX_INFLATED_BYTES = 256 << 20
"""Limit on compressed content of one item in bytes. ``torch.save`` does not compress."""

PICKLE = "data.pkl"
_KNOWN_PICKLES = 256

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
"""By the class of storage that ``torch.save`` names; storages of other dtypes count bytes."""


class Layout(NamedTuple):
    """Dtype, shape, strides and place of a stored tensor.

    Attributes:
        dtype: of its elements.
        shape: as stored.
        start_bytes: of the first element in the file, if all elements follow in row-major order; else ``None``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int | None


class DamagedError(Exception):
    """Not what ``torch.save`` writes; the message says in which way."""


class _Storage(NamedTuple):
    name: str
    dtype: torch.dtype | None  # None: untyped, and counted in bytes
    numel: int


class _Tensor(NamedTuple):
    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_view_of_bits: bool  # conjugated or negated lazily

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_row_major(self) -> bool:
        if self.numel == 0:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def read_layout(window: Window) -> tuple[Layout | None, Archive]:
    """Locate the elements of the tensor in ``window``; None where only ``torch.load`` knows.

    And what the item consists of, all of it compared but large contents.

    Raises:
        DamagedError: it is not a whole file of ``torch.save``.
    """
    archive = open_archive(window)
    pickled = archive.record(PICKLE)
    assert pickled is not None
    if pickled.size_bytes > SMALL_BYTES:
        return None, archive
    tensor = _tensor_in(_content(window, archive, pickled))
    return None if tensor is None else _find(tensor, archive, window), archive


def open_archive(window: Window) -> Archive:
    """Open the item in ``window``, checked to be from ``torch.save``.

    Raises:
        DamagedError: it is not, or not all of it is there.
    """
    try:
        archive = open_item(window, window.length_bytes)
    except (DamagedItemError, OSError) as error:
        raise DamagedError(str(error)) from error
    if archive.record(PICKLE) is None:
        raise DamagedError(f"it has no {PICKLE}")
    return archive


def check_contents(window: Window, archive: Archive, max_inflated_bytes: int = MAX_INFLATED_BYTES) -> None:
    """Compare all of its contents with their checksums; for those who read it as a whole.

    Raises:
        DamagedError: one is another, or what is compressed is too large to be inflated.
    """
    inflated = sum(record.size_bytes for record in archive.records if record.method != STORED)
    if inflated > max_inflated_bytes:
        raise DamagedError(f"it would be inflated to {inflated:,} bytes; torch.save compresses nothing")
    try:
        for record in archive.records:
            check_record(window, archive, record)
    except (DamagedItemError, OSError) as error:
        raise DamagedError(str(error)) from error


def read_pickle(window: Window, archive: Archive) -> bytes:
    """Read an item's pickle, without the bytes of its tensors.

    Raises:
        DamagedError: it is damaged.
    """
    pickled = archive.record(PICKLE)
    assert pickled is not None
    try:
        return read_record(window, archive, pickled, max(pickled.stored_bytes, MAX_INFLATED_BYTES))
    except DamagedItemError as error:
        raise DamagedError(str(error)) from error


def check_pickle(window: Window, archive: Archive) -> None:
    """Check that ``torch.load`` can take the pickle without harm to this process.

    Raises:
        DamagedError: it is no pickle, or would take more memory or a deeper stack than there is.
    """
    try:
        unpickle_plain(read_pickle(window, archive))
    except DamagedError:
        raise
    except Exception as error:  # bytes that are no pickle can raise anything
        raise DamagedError(f"its {PICKLE} is no pickle: {shortened(str(error))}") from error


def _content(window: Window, archive: Archive, record: Record) -> bytes:
    try:
        return read_record(window, archive, record)
    except DamagedItemError as error:
        raise DamagedError(str(error)) from error


@functools.lru_cache(_KNOWN_PICKLES)
def _tensor_in(content: bytes) -> _Tensor | None:
    """Read what a ``data.pkl`` says; that of each layer's tensors is the same."""
    try:
        return _tensor_of(unpickle(content, TENSOR_NAMES, _storage_of))
    except ForbiddenNameError:
        return None
    except DamagedError:
        raise
    except Exception as error:  # bytes that are no pickle can raise anything
        raise DamagedError(f"its {PICKLE} is no pickle: {shortened(str(error))}") from error


def _storage_of(pid: Any) -> _Storage:
    kind, storage_class, name, _, numel = pid
    if kind != "storage" or not isinstance(storage_class, type) or not issubclass(storage_class, Named):
        raise DamagedError("it refers to something that is no storage")
    if not isinstance(name, str):
        raise DamagedError("the name of its storage is no text")
    return _Storage(name, STORAGE_DTYPES.get(storage_class.name), _count(numel))


def _tensor_of(pickled: object) -> _Tensor | None:
    if isinstance(pickled, Named) and pickled.name == "_rebuild_parameter":
        pickled = pickled.arguments[0]
    if not isinstance(pickled, Named) or not pickled.name.startswith("_rebuild_tensor"):
        return None
    storage, offset, shape, strides, _, _, *rest = pickled.arguments
    dtype = storage.dtype if pickled.name == "_rebuild_tensor_v2" else rest.pop(0)
    if not isinstance(dtype, torch.dtype) or len(shape) != len(strides):
        return None
    return _Tensor(storage, dtype, _count(offset), _counts(shape), _counts(strides), bool(rest and rest[0]))


def _counts(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMS:
        raise DamagedError("a shape in it is not one")
    return tuple(map(_count, values))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        raise DamagedError("a size in it is not one")
    return value


def _find(tensor: _Tensor, archive: Archive, window: Window) -> Layout:
    record = archive.record(f"data/{tensor.storage.name}")
    if record is None:
        raise DamagedError(f"it has no data/{tensor.storage.name}")
    storage_bytes = tensor.storage.numel * (tensor.storage.dtype.itemsize if tensor.storage.dtype else 1)
    if record.size_bytes != storage_bytes:
        raise DamagedError(f"its record {record.name} has {record.size_bytes} bytes where {storage_bytes} are expected")
    first = tensor.offset * tensor.dtype.itemsize
    if not tensor.is_row_major or tensor.is_view_of_bits or record.method != STORED:
        return Layout(tensor.dtype, tensor.shape, None)
    if first + tensor.numel * tensor.dtype.itemsize > storage_bytes:
        raise DamagedError(f"its record {record.name} is smaller than the tensor in it")
    if not _has_our_byte_order(archive, window):
        return Layout(tensor.dtype, tensor.shape, None)
    return Layout(tensor.dtype, tensor.shape, window.offset_bytes + record.start_bytes + first)


def _has_our_byte_order(archive: Archive, window: Window) -> bool:
    record = archive.record("byteorder")  # torch writes it since 2.1
    order = "little" if record is None else _content(window, archive, record).decode("ascii", "replace")
    return order == sys.byteorder
