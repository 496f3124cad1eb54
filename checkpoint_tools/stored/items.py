"""Read items: ranges of a file that ``torch.save`` wrote, or the bare elements of a tensor.

The zip file of ``torch.save`` has a small pickle that describes the tensor, and the tensor's memory, uncompressed.
Usually the memory holds the elements in row-major order. Then the elements are read in place, in the mapped file, after
a comparison with their CRC-32. They are handled as bytes, since items follow each other without gaps, so that elements
are not aligned. Other tensors (strided, or of another byte order) are read by ``torch.load``.
"""

import bisect
import functools
import io
import itertools
import math
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsdp_offload.checkpoint.chunks import contiguous_strides

from ..core.regions import TensorRegion, common
from ..core.text import MAX_DIMS, MAX_INT64, CheckpointError, human_bytes, shortened
from ..core.values import MAX_VALUES, has_more_values, values_in
from .checkpoint import Checkpoint, Layout, Opened, Stored, StoredChunk, StoredObject, StoredTensor
from .unpickle import ForbiddenNameError, PickledObject, allowed, unpickle

try:
    from isal.isal_zlib import crc32 as _crc32  # ten times as fast as most builds of zlib
except ImportError:
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32
"""CRC-32 of bytes, optionally continued from earlier ones, as ``zlib.crc32``."""

_SMALL_BYTES = 64 << 10  # contents up to this size are compared when an item is opened
_PICKLE = "data.pkl"
_MOST_KNOWN = 1024  # limit of cached beginnings of items, and of cached indices of chunks


class DamagedError(Exception):
    """Raised for bytes that ``torch.save`` does not write; the message says why."""


# The zip file of an item ---------------------------------------------------------------------------------------------


class _View(io.RawIOBase):
    """Read-only file over memory, without a copy."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max((0, self._at, len(self._view))[whence] + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Record(NamedTuple):
    """A file in the zip file, whose content lies from ``start`` to ``stop`` in the item."""

    name: str
    info: zipfile.ZipInfo
    start: int
    stop: int


class Archive:
    """A zip file that ``torch.save`` made; its directory has been compared with the headers of its records."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        if not is_zip_end(view):
            raise DamagedError("its end is not that of a zip file")
        try:
            infos = zipfile.ZipFile(cast(Any, _View(view))).infolist()
            infos.sort(key=lambda info: info.header_offset)
            if not infos or infos[0].header_offset:
                raise DamagedError("its records are not where its directory says")
            prefix = infos[0].orig_filename.partition("/")[0] + "/"
            self.records: dict[str, _Record] = {}
            for info in infos:
                at, own = info.header_offset, info.orig_filename
                if bytes(self._view[at : at + 4]) != b"PK\3\4":
                    raise DamagedError(f"its record {own} is not where it should be")
                name_bytes, extra_bytes = struct.unpack_from("<2H", self._view, at + 26)
                if not own.startswith(prefix) or bytes(self._view[at + 30 : at + 30 + name_bytes]) != own.encode():
                    raise DamagedError(f"the header of its record {own} and its directory say two things")
                start = at + 30 + name_bytes + extra_bytes
                stop = start + info.file_size
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise DamagedError(f"its record {own} is compressed or encrypted, and torch.save does neither")
                if stop > len(self._view) or info.compress_size != info.file_size:
                    raise DamagedError(f"its record {own} is cut short")
                self.records[own.removeprefix(prefix)] = _Record(own.removeprefix(prefix), info, start, stop)
        except DamagedError:
            raise
        except Exception as error:  # bytes that are no zip file can raise anything
            raise DamagedError(f"it is no zip file: {shortened(str(error))}") from error
        if len(self.records) < len(infos) or _PICKLE not in self.records:
            raise DamagedError(f"it has two records of one name, or no {_PICKLE}")
        # After torch.serialization.set_crc32_options(False), all CRC-32 are zero.
        self.has_crcs = any(record.info.CRC for record in self.records.values())

    def read(self, record: _Record) -> memoryview:
        """Return a record's content, after a comparison with its CRC-32."""
        content = self._view[record.start : record.stop]
        if self.has_crcs and crc32(content) != record.info.CRC:
            text = f"the content of its record {record.name} has another CRC-32: its bytes have changed"
            raise DamagedError(text)
        return content

    def pickled(self) -> bytes:
        """Return the pickle, in which tensors refer to other records."""
        return bytes(self.read(self.records[_PICKLE]))

    def read_all(self) -> None:
        """Compare all contents with their CRC-32."""
        for record in self.records.values():
            self.read(record)


def is_zip_end(content: memoryview | bytes) -> bool:
    """Tell whether ``content`` ends with the last record of a zip file."""
    return bytes(content[-22:-18]) == b"PK\5\6"


def plain_pickle(content: bytes) -> Any:
    """Unpickle plain values; objects of any class become stand-ins, and none of their code runs."""
    try:
        return unpickle(content, None)
    except Exception as error:  # bytes that are no pickle can raise anything
        raise DamagedError(f"its {_PICKLE} is no pickle: {shortened(str(error) or type(error).__name__)}") from error


def plain_load(archive: Archive, file: Any, what: str, max_bytes: int, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` after a check of its checksums, unless its pickle would harm this process.

    Raise a CheckpointError that names ``what`` if the file has anything but tensors and plain values, too many values
    (lists that repeat each other), or a tensor that expands a small storage to more than ``max_bytes``.
    """
    archive.read_all()
    plain_pickle(archive.pickled())
    try:
        value = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged file can raise anything
        text = str(error)
        if "weights_only" in text or "Weights only" in text:
            raise CheckpointError(
                f"{what} has more than tensors and plain values, and is not loaded: unpickling it could run anything"
            ) from error
        raise DamagedError(shortened(text.partition("\n")[0])) from error
    if has_more_values(value, MAX_VALUES):
        raise CheckpointError(f"{what} has more than {MAX_VALUES:,} values")
    for each in values_in(value):
        if isinstance(each, Tensor) and each.layout == torch.strided:
            nbytes, stored_bytes = each.numel() * each.itemsize, each.untyped_storage().nbytes()
            if nbytes > max(max_bytes, stored_bytes):
                raise CheckpointError(
                    f"{what} has a tensor of {human_bytes(nbytes)} in {human_bytes(stored_bytes)}, which does not fit "
                    "into --max-memory; allow that much"
                )
    return value


# The pickle of a tensor ----------------------------------------------------------------------------------------------

_STORAGE_DTYPES = {  # without quantized dtypes, which only torch.load reads
    name: dtype for name, dtype in torch.storage._storage_type_to_dtype_map().items() if not name.startswith("Q")
}
"""Name of a storage class in pickles of ``torch.save`` → dtype; storages of other dtypes are counted in bytes."""

TENSOR_NAMES = {**allowed("tensor"), "torch": {*allowed("tensor")["torch"], *_STORAGE_DTYPES}}
"""Names in the pickles of ``torch.save`` that stand for tensors."""


class _Tensor(NamedTuple):
    record: str
    storage_bytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    is_row_major: bool


def tensor_of(pickled: Any) -> _Tensor | None:
    """Return the record and layout of the tensor in an unpickled ``data.pkl``; None for other values."""
    if isinstance(pickled, PickledObject) and pickled.name == "_rebuild_parameter":
        pickled = pickled.arguments[0]
    if not isinstance(pickled, PickledObject) or not pickled.name.startswith("_rebuild_tensor"):
        return None
    (kind, storage_class, name, _, numel), offset, shape, strides, _, _, *rest = pickled.arguments
    storage_dtype = _STORAGE_DTYPES.get(storage_class.name)
    dtype = storage_dtype if pickled.name == "_rebuild_tensor_v2" else rest.pop(0)
    if not isinstance(dtype, torch.dtype) or len(shape) != len(strides):
        return None
    if kind != "storage" or not isinstance(name, str) or len(shape) > MAX_DIMS:
        raise DamagedError("it refers to something that is no storage, or its shape is none")
    if not all(type(each) is int and 0 <= each <= MAX_INT64 for each in (numel, offset, *shape, *strides)):
        raise DamagedError("a size in it is not one")
    nbytes = numel * (storage_dtype.itemsize if storage_dtype else 1)
    is_view_of_bits = bool(rest and rest[0])  # conjugated or negated lazily
    steps = zip(shape, strides, contiguous_strides(tuple(shape)), strict=True)
    is_row_major = 0 in shape or all(size == 1 or one == other for size, one, other in steps)
    return _Tensor(f"data/{name}", nbytes, dtype, offset, tuple(shape), is_row_major and not is_view_of_bits)


@functools.lru_cache(256)
def _tensor_in(content: bytes) -> _Tensor | None:
    """Read the tensor of a ``data.pkl``; cached, since all layers have equal pickles."""
    try:
        return tensor_of(unpickle(content, TENSOR_NAMES))
    except ForbiddenNameError:
        return None
    except DamagedError:
        raise
    except Exception as error:  # bytes that are no pickle can raise anything
        raise DamagedError(f"its {_PICKLE} is no pickle: {shortened(str(error) or type(error).__name__)}") from error


def layout_of(archive: Archive, tensor: _Tensor) -> Layout:
    """Return where and how a tensor's elements lie in the item."""
    record = archive.records.get(tensor.record)
    if record is None:
        raise DamagedError(f"it has no {tensor.record}")
    if record.info.file_size != tensor.storage_bytes:
        sizes = f"{record.info.file_size} bytes where {tensor.storage_bytes} are expected"
        raise DamagedError(f"its record {record.name} has {sizes}")
    first = tensor.offset * tensor.dtype.itemsize
    if first + math.prod(tensor.shape) * tensor.dtype.itemsize > tensor.storage_bytes:  # an expanded tensor, too
        raise DamagedError(f"its record {record.name} is smaller than the tensor in it")
    order = archive.records.get("byteorder")  # torch writes it since 2.1
    is_ours = order is None or bytes(archive.read(order)) == sys.byteorder.encode()
    if not tensor.is_row_major or not is_ours:
        return Layout(tensor.dtype, tensor.shape, None)
    return Layout(tensor.dtype, tensor.shape, record.start + first)


# Reading -------------------------------------------------------------------------------------------------------------


class ItemReader:
    """Reads one checkpoint, from any thread. Raises for items above ``max_whole_bytes`` that are not row-major."""

    def __init__(self, checkpoint: Checkpoint, max_whole_bytes: int | None = None) -> None:
        self._checkpoint = checkpoint
        self._max_whole_bytes = max_whole_bytes
        self._heads: dict[tuple[tuple[int, ...], torch.dtype, int], tuple[bytes, int]] = {}
        self._indices: dict[str, _Index] = {}

    def view(self, item: Stored) -> memoryview:
        """Return the stored bytes of an item."""
        if isinstance(item, StoredObject) and item.content is not None:
            return memoryview(bytearray(item.content))
        try:
            return self._checkpoint.folder.view(item.file, item.offset_bytes, item.length_bytes)
        except (OSError, ValueError) as error:
            text = getattr(error, "strerror", None) or str(error)
            raise CheckpointError(
                f"{self._file(item)} cannot be read: {text}; fetch it again, or use another checkpoint"
            ) from error

    def check(self, item: Stored, *, data: bool = False) -> Layout | None:
        """Check that an item is a whole file of ``torch.save``; with ``data``, compare large contents' CRC-32 too.

        Return the layout of a tensor; ``None`` if only ``torch.load`` can read it.
        """
        if isinstance(item, StoredChunk) and item.bare_dtype is not None:
            return Layout(item.bare_dtype, item.sizes, 0)
        view = self.view(item)
        return self._compared_layout(item, view) if data else self._opened(item, view).layout

    def bits(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        """Return the bytes of a chunk's elements in row-major order, one row per element; do not write to them.

        The bytes have been compared with their CRC-32. They are a copy only if ``torch.load`` had to read the item.
        """
        view, nbytes = self.view(chunk), chunk.numel * dtype.itemsize
        layout = self._known_layout(chunk, dtype, view) if chunk.bare_dtype is None else self.check(chunk)
        if layout is not None and layout.dtype != dtype:
            raise self._damaged(chunk, f"stored as {layout.dtype}, not as {dtype}; see the command verify")
        if layout is None or layout.start_bytes is None:
            if self._max_whole_bytes is not None and chunk.length_bytes > self._max_whole_bytes:
                raise CheckpointError(
                    f"an item of {human_bytes(chunk.length_bytes)} in {self._file(chunk)} is not stored row by row, "
                    f"and can only be read as a whole; allow more than {human_bytes(self._max_whole_bytes)} for it"
                )
            tensor = self.read_object(chunk)
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
                raise self._damaged(chunk, f"a {type(tensor).__name__} where a tensor of {dtype} is expected")
            self._check_sizes(chunk, tuple(tensor.shape))
            whole = tensor.detach().resolve_conj().resolve_neg()
            flat = whole.contiguous().view(-1).view(torch.uint8)
        elif nbytes:
            flat = torch.frombuffer(view, dtype=torch.uint8, offset=layout.start_bytes, count=nbytes)
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        return flat.view(chunk.numel, dtype.itemsize)

    def read_region(self, tensor: StoredTensor, region: TensorRegion) -> Tensor:
        """Read the elements of a rectangle from all chunks that intersect it."""
        bits = torch.empty(*region.sizes, tensor.dtype.itemsize, dtype=torch.uint8)
        self.read_into(bits, tensor, region)
        return typed(bits, tensor.dtype)

    def read_into(self, bits: Tensor, tensor: StoredTensor, region: TensorRegion) -> None:
        """Read a rectangle into ``bits``: uint8 of shape ``(*region.sizes, itemsize)``, with any strides."""
        index = self._indices.get(tensor.key)
        if index is None:
            if len(self._indices) >= _MOST_KNOWN:
                self._indices.clear()
            index = self._indices[tensor.key] = _Index(tensor.chunks)
        for chunk, met in index.meeting(region):
            found = self.bits(chunk, tensor.dtype).view(*chunk.sizes, tensor.dtype.itemsize)
            bits[_inside(met, region)].copy_(found[_inside(met, chunk.region)])

    def read_object(self, item: Stored) -> Any:
        """Read an object, or a tensor, that ``torch.load(weights_only=True)`` accepts."""
        view = self.view(item)
        try:
            what = f"an object in {self._file(item)}"
            return plain_load(Archive(view), cast(Any, _View(view)), what, self._max_whole_bytes or 0)
        except DamagedError as error:
            raise self._damaged(item, str(error)) from error

    def _opened(self, item: Stored, view: memoryview) -> Opened:
        known = self._checkpoint.opened.get(item.place)
        if known is None or (isinstance(item, StoredObject) and item.content is not None):
            try:
                archive = Archive(view)
                contents, at, around = [], 0, 0
                for record in archive.records.values():  # in the order of their bytes
                    if archive.has_crcs and record.info.file_size > _SMALL_BYTES:
                        contents.append((record.start, record.stop, record.info.CRC))
                        around, at = crc32(view[at : record.start], around), record.stop
                    else:
                        archive.read(record)
                is_small = archive.records[_PICKLE].info.file_size <= _SMALL_BYTES
                tensor = _tensor_in(archive.pickled()) if isinstance(item, StoredChunk) and is_small else None
                layout = None if tensor is None else layout_of(archive, tensor)
                known = Opened(layout, tuple(contents), archive.has_crcs, crc32(view[at:], around))
            except DamagedError as error:
                raise self._damaged(item, str(error)) from error
            self._checkpoint.opened[item.place] = known
        if isinstance(item, StoredChunk) and known.layout is not None:
            self._check_sizes(item, known.layout.shape)
        return known

    def _compared_layout(self, item: Stored, view: memoryview) -> Layout | None:
        opened = self._opened(item, view)
        for start, stop, crc in opened.contents:
            if crc32(view[start:stop]) != crc:
                begin, end = item.offset_bytes + start, item.offset_bytes + stop
                raise CheckpointError(
                    f"bytes {begin} to {end} of {self._file(item)} are damaged: their CRC-32 is not the one that was "
                    "written with them; fetch the file again, or use another checkpoint"
                )
        if opened.contents:  # compare large contents only once
            self._checkpoint.opened[item.place] = opened._replace(contents=())
        return opened.layout

    def _known_layout(self, chunk: StoredChunk, dtype: torch.dtype, view: memoryview) -> Layout | None:
        # Fast path: small items of one shape have the same bytes before the elements; behind these is their CRC-32.
        shape = chunk.sizes, dtype, chunk.length_bytes
        head, stop = self._heads.get(shape, (b"", 0))
        if head and view[: len(head)] == head:
            crc = struct.pack("<4sI", b"PK\7\10", crc32(view[len(head) : stop]))
            if view[stop : stop + len(crc)] == crc:
                return Layout(dtype, chunk.sizes, len(head))
        layout = self._compared_layout(chunk, view)
        if layout is not None and layout.start_bytes and layout.dtype == dtype and chunk.length_bytes <= _SMALL_BYTES:
            if len(self._heads) >= _MOST_KNOWN:
                self._heads.clear()
            begin = layout.start_bytes
            self._heads[shape] = bytes(view[:begin]), begin + chunk.numel * dtype.itemsize
        return layout

    def _file(self, item: Stored) -> str:
        return f"{self._checkpoint.path}/{item.file}"

    def _damaged(self, item: Stored, what: str) -> CheckpointError:
        return CheckpointError(
            f"bytes {item.offset_bytes} to {item.offset_bytes + item.length_bytes} of {self._file(item)} are not what "
            f"torch.save writes ({what}); fetch the file again, or use another checkpoint"
        )

    def _check_sizes(self, chunk: StoredChunk, shape: tuple[int, ...]) -> None:
        if shape != chunk.sizes:
            raise self._damaged(chunk, f"a tensor of shape {shape} where one of {chunk.sizes} is expected")


class _Index:
    """Finds the chunks of a tensor that intersect a rectangle; fast if chunks divide dimension 0."""

    def __init__(self, chunks: Iterable[StoredChunk]) -> None:
        self._chunks = sorted((each for each in chunks if each.numel), key=lambda each: each.offsets)
        self._starts = [(*each.offsets, 0)[0] for each in self._chunks]
        ends = ((*each.offsets, 0)[0] + (*each.sizes, 1)[0] for each in self._chunks)
        self._ends = list(itertools.accumulate(ends, max))

    def meeting(self, region: TensorRegion) -> Iterator[tuple[StoredChunk, TensorRegion]]:
        begin = (*region.offsets, 0)[0]
        first = bisect.bisect_right(self._ends, begin)
        last = bisect.bisect_left(self._starts, begin + (*region.sizes, 1)[0])
        for each in self._chunks[first:last]:
            if (met := common(each.region, region)) is not None:
                yield each, met


def typed(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """View ``bits`` as elements; its last dimension has the bytes of one element."""
    *sizes, _ = bits.shape
    return bits.view(-1).view(dtype).view(sizes) if bits.numel() else torch.empty(sizes, dtype=dtype)


def _inside(region: TensorRegion, outer: TensorRegion) -> tuple[slice, ...]:
    starts = (at - first for at, first in zip(region.offsets, outer.offsets, strict=True))
    return tuple(slice(start, start + size) for start, size in zip(starts, region.sizes, strict=True))
