"""One safetensors file: what its header says, checked; and the header of a new one. No data are read or written.

::

    8 bytes      how long the header is
    header       JSON: key → dtype, shape, and from which byte to which; ``__metadata__``: strings
    data         the elements of one tensor after the other, in row-major order, without gaps

The rules are those of the safetensors package, which loads what is written here, and refuses what is refused here.
"""

import json
import math
import reprlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..core.errors import CheckpointError
from ..core.sizes import MAX_DIMS, MAX_INT64, human_bytes
from .storage import Folder

SUFFIX = ".safetensors"
METADATA_KEY = "__metadata__"

MAX_HEADER_BYTES = 100_000_000  # of the safetensors package
_LENGTH = struct.Struct("<Q")
_ALIGNMENT_BYTES = 8  # of the data in the file, padded with spaces

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        key: its name.
        shape: as torch has it: float4 is two numbers for each element, which the header counts one by one.
        dtype: of its elements.
        begin_bytes: where they begin, from the start of the data.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Return the size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    """Header of a safetensors file.

    Attributes:
        tensors: in the order of their bytes.
        metadata: strings by name.
        data_at: the byte of the file at which the data begin.
    """

    tensors: tuple[FileTensor, ...]
    metadata: Mapping[str, str]
    data_at: int


# --- reading ---------------------------------------------------------------------------------------------------------


def read_header(folder: Folder, file: str) -> Header:
    """Read a file's header.

    Raises:
        CheckpointError: it is not a whole safetensors file.
    """
    try:
        file_bytes = folder.size_bytes(file)
        with folder.open(file) as stream:
            start = stream.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            room = min(file_bytes - _LENGTH.size, MAX_HEADER_BYTES)
            content = stream.read(header_bytes) if 0 < header_bytes <= room else b""
    except OSError as error:
        raise CheckpointError(f"{folder.path}/{file} cannot be read: {error}") from error
    try:
        if len(content) < max(header_bytes, 2):
            raise _DamagedError(f"its header would have {header_bytes:,} bytes, and the file has {file_bytes:,}")
        return _checked(_parsed(content), _LENGTH.size + header_bytes, file_bytes)
    except _DamagedError as error:
        raise CheckpointError(
            f"{folder.path}/{file} is not a whole safetensors file ({error}); fetch it again, or use another one"
        ) from error


class _DamagedError(Exception):
    pass


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"its header is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise _DamagedError("its header is no JSON object")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _checked(found: dict[str, Any], data_at: int, file_bytes: int) -> Header:
    metadata = found.pop(METADATA_KEY, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _DamagedError(f"its {METADATA_KEY} are not strings by name")
    tensors = [_tensor(key, entry) for key, entry in found.items()]
    tensors.sort(key=lambda tensor: (tensor.begin_bytes, tensor.nbytes))
    at, before = 0, "the header"
    for tensor in tensors:
        if tensor.begin_bytes != at:
            how = "overlaps with" if tensor.begin_bytes < at else "does not follow"
            raise _DamagedError(f"{tensor.key} begins at {tensor.begin_bytes:,}, and so {how} {before}")
        at, before = at + tensor.nbytes, tensor.key
    if data_at + at != file_bytes:
        raise _DamagedError(f"it has {file_bytes:,} bytes, and its header tells of {data_at + at:,}")
    return Header(tuple(tensors), metadata, data_at)


def _tensor(key: str, entry: Any) -> FileTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _DamagedError(f"{key} has no dtype, shape and data_offsets")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _DamagedError(f"{key} has shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise _DamagedError(f"{key} has the dtype {reprlib.repr(name)}, which torch does not have")
    if dtype == torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise _DamagedError(f"{key} has shape {shape}, and two float4 are one byte")
        shape = [*shape[:-1], shape[-1] // 2]
    made = FileTensor(key, tuple(shape), dtype, offsets[0])
    if offsets[1] - offsets[0] != made.nbytes:
        raise _DamagedError(f"{key} has {offsets[1] - offsets[0]:,} bytes where {made.nbytes:,} are expected")
    return made


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMS
        and all(type(value) is int and 0 <= value <= MAX_INT64 for value in values)
        and math.prod(values) <= MAX_INT64
    )


# --- writing ---------------------------------------------------------------------------------------------------------


def has_dtype(dtype: torch.dtype) -> bool:
    """Tell whether the format has the dtype."""
    return dtype in _NAMES


def in_file_order(tensors: Iterable[FileTensor]) -> list[FileTensor]:
    """Place tensors in a file: large elements first, so that all are aligned."""
    at, placed = 0, []
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        placed.append(tensor._replace(begin_bytes=at))
        at += tensor.nbytes
    return placed


def header_of(tensors: Iterable[FileTensor]) -> bytes:
    """Serialize all that comes before the data.

    Raises:
        CheckpointError: it would be longer than the format allows.
    """
    entries: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    for tensor in tensors:
        shape = list(tensor.shape)
        if tensor.dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2
        offsets = [tensor.begin_bytes, tensor.begin_bytes + tensor.nbytes]
        entries[tensor.key] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header of a file would have {human_bytes(len(text))}, and safetensors allow "
            f"{human_bytes(MAX_HEADER_BYTES)}; choose a smaller --shard-size"
        )
    return _LENGTH.pack(len(text)) + text
