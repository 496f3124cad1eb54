"""Make the bytes that ``torch.save`` puts around a contiguous tensor's elements, before there are any elements.

::

    shape, dtype ──envelope_of──▶ head │ elements │ tail(checksum of the elements)
                                   ▲                ▲
                   a pickle that says what           a few small records, and the
                   the tensor is, and padding        directory of the zip file

The same bytes as ``torch.save`` of torch 2.13 writes, so an item of a given shape and dtype has a given length, and
its elements can be written in any order and in parts. ``tests/cpu/checkpoint_tools/test_offline_envelope.py`` compares.
"""

import collections
import functools
import io
import math
import pickle
import struct
import sys
import zipfile
import zlib
from typing import Any, NamedTuple

import torch

from fsdp_offload.checkpoint.rectangles import contiguous_strides

from .archive import STORAGE_DTYPES
from .torch_private import rebuild_function

_ALIGNMENT_BYTES = 64  # of the records' contents, from the start of the item
_UINT32_MAX = 0xFFFFFFFF
_UINT64_MASK = (1 << 64) - 1
_VERSION = b"3\n"
_ID_RECORD = ".data/serialization_id"

_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


class Envelope(NamedTuple):
    """The bytes around the elements.

    Attributes:
        head: before them.
        data_bytes: how many bytes the elements have.
        tail_bytes: how many bytes come after them.
        records: what is needed to make the tail.
    """

    head: bytes
    data_bytes: int
    tail_bytes: int
    records: tuple["_Record", ...]

    @property
    def length_bytes(self) -> int:
        """Return the length of the whole item."""
        return len(self.head) + self.data_bytes + self.tail_bytes

    def descriptor(self, crc: int) -> bytes:
        """Return the first bytes of the tail, which contain the CRC-32."""
        return _descriptor(self.records[-1]._replace(crc=crc))

    def tail(self, crc: int) -> bytes:
        """After the elements, whose CRC-32 is ``crc``."""
        return _tail(self, crc) if self.records else b""


class _Record(NamedTuple):
    """A record of the zip file, ``crc`` as far as it is known."""

    name: str
    header_at: int
    length_bytes: int
    crc: int


@functools.lru_cache(1024)
def envelope_of(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """Return the envelope of a contiguous tensor."""
    data_bytes = math.prod(shape) * dtype.itemsize
    contents = (
        ("data.pkl", _pickled(shape, dtype)),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT_BYTES).encode()),
        ("byteorder", sys.byteorder.encode()),
    )
    head, records = b"", []
    for name, content in contents:
        record = _Record(name, len(head), len(content), zlib.crc32(content))
        records.append(record)
        head += _local_header(record) + content + _descriptor(record)
    records.append(_Record("data/0", len(head), data_bytes, 0))
    head += _local_header(records[-1])
    made = Envelope(head, data_bytes, 0, tuple(records))
    return made._replace(tail_bytes=len(made.tail(0)))


def bare(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """Return an empty envelope, for elements alone."""
    return Envelope(b"", math.prod(shape) * dtype.itemsize, 0, ())


def _tail(envelope: Envelope, crc: int) -> bytes:
    start = len(envelope.head) + envelope.data_bytes
    records = [*envelope.records[:-1], envelope.records[-1]._replace(crc=crc)]
    tail = _descriptor(records[-1])
    for name, content in (("version", _VERSION), (_ID_RECORD, b"")):
        content = content or _serialization_id(records)
        records.append(_Record(name, start + len(tail), len(content), zlib.crc32(content)))
        tail += _local_header(records[-1]) + content + _descriptor(records[-1])
    return tail + _directory(records, start + len(tail))


# --- the pickle ------------------------------------------------------------------------------------------------------


class _Token:
    """Stands for the storage, which is a record of its own."""


class _Pickled:
    """Stands for the tensor: pickled as the call that makes it."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


def _pickled(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    call: Any
    # The pickle refers to equal objects that are one object, so what are two objects in torch.save are two here.
    sizes, strides = (tuple(map(int, each)) for each in (shape, contiguous_strides(shape)))
    arguments = (_Token(), 0, sizes, strides, False)
    if dtype in _STORAGE_NAMES:
        storage_class = getattr(torch, _STORAGE_NAMES[dtype])
        storage_numel = math.prod(shape)
        call = rebuild_function("_rebuild_tensor_v2"), (*arguments, collections.OrderedDict())
    else:  # dtypes without a storage class of their own: their storage counts bytes
        storage_class, storage_numel = torch.storage.UntypedStorage, math.prod(shape) * dtype.itemsize
        call = rebuild_function("_rebuild_tensor_v3"), (*arguments, collections.OrderedDict(), dtype)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            if isinstance(value, _Token):
                return ("storage", storage_class, "0", "cpu", storage_numel)
            return None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(_Pickled(call))
    return buffer.getvalue()


# --- the zip file, as PyTorchFileWriter makes it ---------------------------------------------------------------------


def _filename(name: str) -> bytes:
    return b"archive/" + name.encode()


def _local_header(record: _Record) -> bytes:
    name = _filename(record.name)
    zip64 = _zip64_extra(record, 0)  # zero in the header, the true size in the directory: so torch has it
    # The padding is computed with more room than it takes, as torch does it.
    wide = record.length_bytes >= _UINT32_MAX, record.header_at >= _UINT32_MAX
    start = record.header_at + 30 + len(name) + 4 + (4 + 16 * wide[0] + 8 * wide[1] if any(wide) else 0)
    padding_bytes = -start % _ALIGNMENT_BYTES
    padding = b"FB" + struct.pack("<H", padding_bytes) + b"Z" * padding_bytes
    extra = zip64 + padding
    fixed = struct.pack("<4s5H3I2H", b"PK\3\4", 0, _flags(record), 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return fixed + name + extra


def _flags(record: _Record) -> int:
    """Names are UTF-8, and sizes come after the content, if there is any."""
    return 0x0808 if record.length_bytes else 0x0800


def _zip64_extra(record: _Record, stored_bytes: int) -> bytes:
    fields = b""
    if record.length_bytes >= _UINT32_MAX:
        fields += struct.pack("<2Q", record.length_bytes, stored_bytes)
    if record.header_at >= _UINT32_MAX:
        fields += struct.pack("<Q", record.header_at)
    return struct.pack("<2H", 1, len(fields)) + fields if fields else b""


def _descriptor(record: _Record) -> bytes:
    if not record.length_bytes:
        return b""
    sizes = "<4sI2Q" if _zip64_extra(record, 0) else "<4s3I"
    return struct.pack(sizes, b"PK\7\10", record.crc, record.length_bytes, record.length_bytes)


def _directory(records: list[_Record], start: int) -> bytes:
    entries = b"".join(map(_directory_entry, records))
    end = start + len(entries)
    short = (min(len(entries), _UINT32_MAX), min(start, _UINT32_MAX))
    return (
        entries
        + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, len(records), len(records), len(entries), start)
        + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(records), len(records), *short, 0)
    )


def _directory_entry(record: _Record) -> bytes:
    name, extra = _filename(record.name), _zip64_extra(record, record.length_bytes)
    length = min(record.length_bytes, _UINT32_MAX)
    at = min(record.header_at, _UINT32_MAX)
    fixed = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\1\2", 0, 0, _flags(record), 0, 0, 0),
        *(record.crc, length, length),
        *(len(name), len(extra), 0, 0, 0),
        *(0, at),
    )
    return fixed + name + extra


# --- the identity of its content -------------------------------------------------------------------------------------


def _serialization_id(records: list[_Record]) -> bytes:
    combined = 0
    for record in filter(lambda record: record.length_bytes, records):
        mixed = record.crc + 0x9E3779B9 + (combined << 6) + (combined >> 2)
        combined ^= mixed & _UINT64_MASK
    return f"{_hash_of_names()}{combined:020d}".encode()


@functools.cache
def _hash_of_names() -> str:
    """Return the half of the id that depends on the records' names alone, as torch computes it."""
    buffer = io.BytesIO()
    torch.save(torch.empty(0), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(f"archive/{_ID_RECORD}").decode()[:20]


# --- checksums of what is written in parts ---------------------------------------------------------------------------


def combined_crc(first: int, second: int, second_bytes: int) -> int:
    """Combine the CRC-32 of two adjacent ranges: zlib's ``crc32_combine``, which Python lacks."""
    if second_bytes == 0:
        return first
    operator, crc = _one_zero_bit(), first
    for _ in range(3):  # bits → a byte of zeros
        operator = _squared(operator)
    remaining = second_bytes
    while remaining:
        if remaining & 1:
            crc = _times(operator, crc)
        remaining >>= 1
        if remaining:
            operator = _squared(operator)
    return crc ^ second


def _one_zero_bit() -> tuple[int, ...]:
    return (0xEDB88320, *(1 << bit for bit in range(31)))


def _times(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    for row in matrix:
        if vector & 1:
            result ^= row
        vector >>= 1
    return result


@functools.lru_cache(128)
def _squared(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, row) for row in matrix)
