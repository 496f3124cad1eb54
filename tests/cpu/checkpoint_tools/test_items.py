"""Elements of stored chunks: looked at where they lie in order, loaded where not; and damaged items."""

import contextlib
import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.core.regions import TensorRegion, whole_of
from checkpoint_tools.stored.checkpoint import Checkpoint, StoredChunk
from checkpoint_tools.stored.items import ItemReader
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import save, without_checksums
from tests.checkpoint_tools.offline import same_bits

IN_ORDER = {
    "float32": torch.arange(35.0).view(7, 5),
    "float8": torch.arange(14.0).view(7, 2).to(torch.float8_e4m3fn),
    "int64": torch.arange(7),
    "one": torch.arange(7.0).view(1, 7).t(),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 3, dtype=torch.bfloat16),
}
OTHERWISE = {
    "transposed": torch.arange(35.0).view(5, 7).t(),
    "channels": torch.arange(7 * 24.0).view(7, 2, 3, 4).to(memory_format=torch.channels_last),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(tmp_path_factory.mktemp("saved") / "checkpoint", {**IN_ORDER, **OTHERWISE}))


def chunk_of(checkpoint: Checkpoint, key: str) -> StoredChunk:
    (chunk,) = checkpoint.tensors[key].chunks
    return chunk


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*IN_ORDER, *OTHERWISE])
def test_wholes_and_regions(checkpoint: Checkpoint, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is in another order needs torch.load."""
    if key in IN_ORDER:
        monkeypatch.delattr(torch, "load")
    expected, tensor = {**IN_ORDER, **OTHERWISE}[key], checkpoint.tensors[key]
    reader = ItemReader(checkpoint)
    layout = reader.check(chunk_of(checkpoint, key))
    assert layout is not None
    assert (layout.start_bytes is None) == (key in OTHERWISE)
    assert same_bits(reader.read_chunk(chunk_of(checkpoint, key), expected.dtype), expected)
    assert same_bits(reader.read_region(tensor, whole_of(tensor.shape)), expected)
    if expected.dim():
        for start, stop in [(0, 0), (len(expected) // 2, len(expected))]:
            region = TensorRegion((start, *(0 for _ in tensor.shape[1:])), (stop - start, *tensor.shape[1:]))
            assert same_bits(reader.read_region(tensor, region), expected[start:stop]), (start, stop)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(40.0)[8:20].view(3, 4),  # DCP clones such tensors. Others may not.
        (torch.arange(4) * (1 + 2j)).conj(),
        torch.nn.Parameter(torch.arange(4.0)),
    ],
    ids=["view", "conjugated", "parameter"],
)
@pytest.mark.parametrize("way", ["as it is", "compressed", "without checksums"])
def test_what_torch_saved_by_itself(tmp_path: Path, tensor: Tensor, way: str) -> None:
    """With other bytes around it."""
    buffer = io.BytesIO()
    with without_checksums() if way == "without checksums" else contextlib.nullcontext():
        torch.save(tensor, buffer)
    if way == "compressed":
        written = io.BytesIO()
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        buffer = written
    content = buffer.getvalue()
    folder = save(tmp_path / "checkpoint", {"x": torch.empty(tensor.shape, dtype=tensor.dtype)})
    (folder / "__0_0.distcp").write_bytes(b"before" + content + b"after")
    checkpoint = open_checkpoint(folder)
    chunk = chunk_of(checkpoint, "x")._replace(offset_bytes=6, length_bytes=len(content))
    assert same_bits(ItemReader(checkpoint).read_chunk(chunk, tensor.dtype), tensor.detach().resolve_conj())


# Damaged -------------------------------------------------------------------------------------------------------------


def test_a_pickle_that_is_overwritten(tmp_path: Path) -> None:
    """Where checksums say nothing."""
    for key, after, old, new, match in (
        ("float32", b"", b"torch._utils", b"\xff\xff\xffch._utils", "data.pkl is no pickle"),
        ("int64", b"cpu", b"K\x07", b"K\x09", "56 bytes where 72 are expected"),  # more elements than there are
    ):
        with without_checksums():
            saved = save(tmp_path / key, {**IN_ORDER, **OTHERWISE})
        chunk = chunk_of(open_checkpoint(saved), key)
        content = bytearray((saved / chunk.file).read_bytes())
        at = content.index(old, content.index(after, chunk.offset_bytes))
        content[at : at + len(new)] = new
        (saved / chunk.file).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"\A.*{match}.*\Z"):  # in one line
            ItemReader(open_checkpoint(saved)).check(chunk)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint", {"large": torch.zeros(1024, 1024)})
    checkpoint = open_checkpoint(folder)
    chunk = chunk_of(checkpoint, "large")
    reader = ItemReader(checkpoint)
    reader.check(chunk)
    with (folder / "__0_0.distcp").open("r+b") as stream:
        stream.truncate(100_000)
    with pytest.raises(CheckpointError, match="is cut short"):
        reader.read_chunk(chunk, torch.float32)
