"""The zip file that ``torch.save`` makes of one tensor: where in it the elements are."""

import struct
import sys
import zipfile
from typing import Any, NamedTuple

import torch

from .storage import Window
from .unpickle import TENSOR_NAMES, ForbiddenNameError, Record, unpickle

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the name and of the padding, which follow

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
    """What a stored tensor turned out to be.

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
        return torch.Size(self.shape).numel()

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


def read_layout(window: Window) -> Layout | None:
    """Where the elements of the tensor in ``window`` are in its file; ``None`` where only ``torch.load`` knows.

    Raises:
        DamagedError: it is not a whole file of ``torch.save``.
    """
    archive = open_archive(window)
    prefix = _prefix(archive)
    try:
        pickled = unpickle(_read(archive, window, f"{prefix}data.pkl"), TENSOR_NAMES, _storage_of)
    except ForbiddenNameError:
        return None
    except DamagedError:
        raise
    except Exception as error:  # bytes that are no pickle can raise anything
        raise DamagedError(f"its data.pkl is no pickle: {error}") from error
    tensor = _tensor_of(pickled)
    return None if tensor is None else _find(tensor, archive, window, prefix)


def open_archive(window: Window) -> zipfile.ZipFile:
    """The zip file, checked for being of ``torch.save``, and for having all of its records.

    Raises:
        DamagedError: it is not, or has not.
    """
    try:
        archive = zipfile.ZipFile(window)
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
        raise DamagedError(str(error)) from error
    infos = archive.infolist()
    if not infos or infos[0].header_offset != 0:
        raise DamagedError("its records do not begin at its start")
    for info in infos:
        if info.header_offset + _LOCAL_HEADER.size + info.compress_size > archive.start_dir:
            raise DamagedError(f"its record {info.filename} is cut short")
    _prefix(archive)
    return archive


def read_pickle(window: Window) -> bytes:
    """The pickle in a file of ``torch.save``, whatever it was made of; the bytes of its tensors are not read.

    Raises:
        DamagedError: it is no such file.
    """
    archive = open_archive(window)
    return _read(archive, window, f"{_prefix(archive)}data.pkl")


def _prefix(archive: zipfile.ZipFile) -> str:
    for name in archive.namelist():
        if name.endswith("/data.pkl"):
            return name.removesuffix("data.pkl")
    raise DamagedError("it has no data.pkl")


def _read(archive: zipfile.ZipFile, window: Window, name: str) -> bytes:
    # Not archive.read: it insists on checksums, which torch.serialization.set_crc32_options(False) leaves out.
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        return archive.read(name)
    window.seek(_start(window, info))
    return window.read(info.file_size) or b""


def _start(window: Window, info: zipfile.ZipInfo) -> int:
    # The padding differs between the record's own header and the directory at the end, so the former has to be read.
    window.seek(info.header_offset)
    header = window.read(_LOCAL_HEADER.size) or b""
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
        raise DamagedError(f"its record {info.filename} is not where it should be")
    _, name_length, padding_length = _LOCAL_HEADER.unpack(header)
    return int(info.header_offset + _LOCAL_HEADER.size + name_length + padding_length)


def _storage_of(pid: Any) -> _Storage:
    kind, storage_class, name, _, numel = pid
    if kind != "storage" or not issubclass(storage_class, Record):
        raise DamagedError(f"it refers to a {kind}")
    return _Storage(str(name), STORAGE_DTYPES.get(storage_class.name), int(numel))


def _tensor_of(pickled: object) -> _Tensor | None:
    if isinstance(pickled, Record) and pickled.name == "_rebuild_parameter":
        pickled = pickled.arguments[0]
    if not isinstance(pickled, Record) or not pickled.name.startswith("_rebuild_tensor"):
        return None
    storage, offset, shape, strides, _, _, *rest = pickled.arguments
    dtype = storage.dtype if pickled.name == "_rebuild_tensor_v2" else rest.pop(0)
    if not isinstance(dtype, torch.dtype) or len(shape) != len(strides):
        return None
    return _Tensor(storage, dtype, int(offset), tuple(shape), tuple(strides), bool(rest and rest[0]))


def _find(tensor: _Tensor, archive: zipfile.ZipFile, window: Window, prefix: str) -> Layout:
    try:
        info = archive.getinfo(f"{prefix}data/{tensor.storage.name}")
    except KeyError as error:
        raise DamagedError(f"it has no data/{tensor.storage.name}") from error
    storage_bytes = tensor.storage.numel * (tensor.storage.dtype.itemsize if tensor.storage.dtype else 1)
    if info.file_size != storage_bytes:
        raise DamagedError(f"its record {info.filename} has {info.file_size} bytes where {storage_bytes} are expected")
    first = tensor.offset * tensor.dtype.itemsize
    if not tensor.is_row_major or tensor.is_view_of_bits or info.compress_type != zipfile.ZIP_STORED:
        return Layout(tensor.dtype, tensor.shape, None)
    if first + tensor.numel * tensor.dtype.itemsize > storage_bytes:
        raise DamagedError(f"its record {info.filename} is smaller than the tensor in it")
    if not _has_our_byte_order(archive, window, prefix):
        return Layout(tensor.dtype, tensor.shape, None)
    return Layout(tensor.dtype, tensor.shape, window.offset_bytes + _start(window, info) + first)


def _has_our_byte_order(archive: zipfile.ZipFile, window: Window, prefix: str) -> bool:
    name = f"{prefix}byteorder"  # torch writes it since 2.1
    order = _read(archive, window, name).decode("ascii") if name in archive.namelist() else "little"
    return order == sys.byteorder
