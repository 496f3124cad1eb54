"""What is written around elements: the bytes that torch.save writes, for every shape, dtype and size."""

import io
import itertools
import math
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from checkpoint_tools.stored.envelope import combined_crc, envelope_of

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]
SHAPES = [(), (1,), (7,), (0, 3), (3, 0), (2, 3, 4), (1, 1, 5), (300, 70), (70_000, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bytes_of_torch_save(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        nbytes = math.prod(shape) * dtype.itemsize
        content = torch.randint(0, 2, (nbytes,), dtype=torch.uint8, generator=generator)
        saved = io.BytesIO()
        torch.save(content.view(dtype).view(shape), saved)
        data = content.numpy().tobytes()
        envelope = envelope_of(shape, dtype)
        made = envelope.head + data + envelope.tail(zlib.crc32(data))
        assert made == saved.getvalue(), shape
        assert len(made) == envelope.length_bytes
        with zipfile.ZipFile(io.BytesIO(made)) as archive:
            assert archive.testzip() is None
        loaded = torch.load(io.BytesIO(made), weights_only=True)
        assert (loaded.shape, loaded.dtype) == (shape, dtype)


@pytest.mark.parametrize("nbytes", [(1 << 32) + 4, 1 << 32, (1 << 32) - 1, (1 << 32) - 2, (1 << 32) - 700])
def test_the_bytes_of_torch_save_beyond_4_gib(nbytes: int, tmp_path: Path) -> None:
    """A file with a hole where the data would be; torch then has no checksum of them either."""
    with torch.serialization.skip_data():
        torch.save(torch.empty(nbytes, dtype=torch.uint8), tmp_path / "archive")
    envelope = envelope_of((nbytes,), torch.uint8)
    assert (tmp_path / "archive").stat().st_size == envelope.length_bytes
    with (tmp_path / "archive").open("rb") as stream:
        assert stream.read(len(envelope.head)) == envelope.head
        stream.seek(envelope.length_bytes - envelope.tail_bytes)
        # The serialization id is made of checksums, and that of the data is not there.
        assert len(stream.read()) == len(envelope.tail(0))


def test_checksums_of_two_stretches_together() -> None:
    content = torch.randint(0, 256, (100_001,), dtype=torch.uint8).numpy().tobytes()
    for first, second in itertools.pairwise([0, 0, 1, 50, 99_999, 100_001]):
        parts = content[:first], content[first:second]
        crcs = map(zlib.crc32, parts)
        assert combined_crc(*crcs, len(parts[1])) == zlib.crc32(content[:second])
