"""One safetensors file: what its header says, checked; and the header of a new one. No data are read or written.

::

    8 bytes      how long the header is
    header       JSON: key → dtype, shape, and from which byte to which; ``__metadata__``: strings
    data         the elements of one tensor after the other, in row-major order, without gaps

The safetensors package checks what is read, and loads what is written here.
"""

import json
import math
import struct
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from ..core.errors import CheckpointError
from ..core.sizes import MAX_DIMS, human_bytes, shortened
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
    """Read a file's header, which the safetensors package has checked.

    Raises:
        CheckpointError: it is not a whole safetensors file.
    """
    try:
        file_bytes = folder.size_bytes(file)
        with folder.open(file) as stream:
            start = stream.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
            content = stream.read(min(header_bytes, MAX_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{folder.path}/{file} cannot be read: {error}") from error
    try:
        _check(start + content, file_bytes)
        found = json.loads(content)
        metadata = found.pop(METADATA_KEY, None) or {}
        tensors = sorted((_tensor(key, entry) for key, entry in found.items()), key=lambda each: each.begin_bytes)
        return Header(tuple(tensors), metadata, _LENGTH.size + header_bytes)
    except Exception as error:  # the package has errors of its own, and what it takes may be too much for others
        raise CheckpointError(
            f"{folder.path}/{file} is not a whole safetensors file ({shortened(str(error))}); fetch it again, or use "
            "another one"
        ) from error


def _check(header: bytes, file_bytes: int) -> None:
    """Let the package look at a file of that length that begins so, wherever the true one is."""
    with tempfile.NamedTemporaryFile(suffix=SUFFIX) as stream:
        stream.write(header)
        stream.truncate(file_bytes)
        stream.flush()
        with safe_open(stream.name, framework="pt"):
            pass


def _tensor(key: str, entry: Any) -> FileTensor:
    dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
    if dtype is None or len(shape) > MAX_DIMS:
        raise ValueError(f"{key} has the dtype {entry['dtype']} and {len(shape)} dimensions, which torch does not have")
    if dtype == torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{key} has shape {shape}, and two float4 are one byte")
        shape = [*shape[:-1], shape[-1] // 2]
    return FileTensor(key, tuple(shape), dtype, entry["data_offsets"][0])


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
