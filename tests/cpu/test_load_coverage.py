"""Every element of this rank is loaded exactly once, or nothing is: holes and overlaps in what is stored.

Made by changing the ``.metadata`` of a real checkpoint: unpickled, edited, pickled again.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from fsdp_offload.checkpoint import chunks_of, load_checks, with_chunks
from fsdp_offload.checkpoint.load_checks import ReadPart, overlapping
from fsdp_offload.checkpoint.load_planner import load
from tests.loading import WHOLE, edit_metadata, memory_of, one_rank, ragged, refused, sharded


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    yield from one_rank(tmp_path_factory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("destination", ["plain", "sharded", "ragged", "whole"])
def test_a_hole(folder: Path, mesh: DeviceMesh, destination: str):
    dcp.save({"a": ragged(WHOLE, mesh, 5, 11), "b": WHOLE}, checkpoint_id=folder)

    def lose(metadata: Metadata) -> None:
        lost = metadata.state_dict_metadata["a"].chunks.pop(2)
        assert (lost.offsets, lost.sizes) == ((1, 1), (1, 3))

    edit_metadata(folder, lose)
    loaded = {"a": DESTINATIONS[destination](mesh), "b": torch.zeros(6, 4)}
    refused(loaded, folder, r"1 only partly in the checkpoint: a \(21 of the 24 elements")


def test_a_hole_outside_of_this_rank(folder: Path, mesh: DeviceMesh):
    """What somebody else lacks is theirs to report."""
    dcp.save({"a": ragged(WHOLE, mesh, 12)}, checkpoint_id=folder)
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata["a"].chunks.pop(1))
    first_rows = with_chunks(sharded(WHOLE, mesh), torch.zeros(8), chunks_of((6, 4), (0, 8)))
    load({"a": first_rows}, checkpoint_id=folder)
    assert torch.equal(memory_of(first_rows), WHOLE.flatten()[:8])
    last_rows = with_chunks(sharded(WHOLE, mesh), torch.zeros(14), chunks_of((6, 4), (10, 24)))
    refused({"a": last_rows}, folder, r"2 of the 14 elements")


@pytest.mark.parametrize("value", ["counter", "tensor"])
def test_no_chunk_at_all(folder: Path, value: str):
    whole = {"counter": torch.tensor(3.0), "tensor": WHOLE}[value]
    dcp.save({"a": whole, "b": WHOLE}, checkpoint_id=folder)
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata["a"].chunks.clear())
    refused({"a": torch.zeros_like(whole), "b": torch.zeros(6, 4)}, folder, rf"a \(0 of the {whole.numel()} elements")


@pytest.mark.parametrize("destination", ["plain", "sharded", "ragged", "whole"])
def test_an_overlap(folder: Path, mesh: DeviceMesh, destination: str):
    dcp.save({"a": ragged(WHOLE, mesh, 8, 16)}, checkpoint_id=folder)

    def grow(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([3, 4])

    edit_metadata(folder, grow)
    loaded = {"a": DESTINATIONS[destination](mesh)}
    error = refused(loaded, folder, r"1 stored twice in part: a \(by the stored chunks at \(0, 0\) and \(2, 0\)\)")
    assert "only partly" not in error


def test_an_overlap_that_hides_a_hole(folder: Path, mesh: DeviceMesh):
    """As many elements are stored as there should be; row 2 twice and row 5 never."""
    dcp.save({"a": ragged(WHOLE, mesh, 8, 20)}, checkpoint_id=folder)

    def shift(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata["a"].chunks
        assert chunks.pop().offsets == (5, 0)
        chunks[0].sizes = torch.Size([3, 4])

    edit_metadata(folder, shift)
    refused({"a": torch.zeros(6, 4)}, folder, r"stored twice in part: a")


def test_a_counter_that_is_stored_twice(folder: Path):
    dcp.save({"step": torch.tensor(3.0)}, checkpoint_id=folder)
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata["step"].chunks.append(chunk((), ())))
    refused({"step": torch.tensor(0.0)}, folder, "stored twice in part: step")


def test_chunks_without_elements_do_no_harm(folder: Path, mesh: DeviceMesh):
    """Empty shards have the dimension's size as their offset; some writers put them elsewhere."""
    dcp.save({"a": sharded(WHOLE, mesh)}, checkpoint_id=folder)

    def add(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].chunks += [chunk((row, 0), (0, 4)) for row in (6, 0, 3)]
        metadata.storage_data[MetadataIndex("a", (3, 0))] = metadata.storage_data[MetadataIndex("a", (0, 0))]

    edit_metadata(folder, add)
    loaded = {"a": torch.zeros(6, 4)}
    load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"], WHOLE)
    empty = with_chunks(sharded(WHOLE, mesh), torch.zeros(0), chunks_of((6, 4), (24, 24)))
    load({"a": empty}, checkpoint_id=folder)


def test_overlaps_are_found_as_by_painting():
    """Random rectangles of up to 3 dimensions, against elements counted one by one."""
    generator = random.Random(0)
    found = 0
    for _ in range(3000):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 3)))
        regions = [random_region(generator, shape) for _ in range(generator.randint(0, 5))]
        painted = [set(elements(region)) for region in regions]
        expected = sum(map(len, painted)) != len(set().union(*painted))
        pair = overlapping(regions)
        assert (pair is not None) == expected, regions
        if pair is not None:
            first, second = pair
            assert set(elements(first)) & set(elements(second))
            found += 1
    assert 500 < found < 2500  # both answers are common


def test_overlaps_in_many_chunks_are_found_without_comparing_pairs(monkeypatch: pytest.MonkeyPatch):
    """Rows, a grid of 4096 chunks, and a column of 4000 ragged parts."""
    compared = []
    overlap = load_checks._overlap
    monkeypatch.setattr(load_checks, "_overlap", lambda *pair: compared.append(pair) or overlap(*pair))
    assert overlapping([ReadPart((i, 0), (1, 7), (i, 0)) for i in range(4096)]) is None
    grid = [ReadPart((8 * i, 8 * j), (8, 8), (8 * i, 8 * j)) for i in range(64) for j in range(64)]
    assert overlapping(grid) is None
    bounds = range(0, 4001 * 5, 5)
    flat = [chunks_of((2001, 10), pair).chunks for pair in itertools.pairwise(bounds)]
    column = [ReadPart(c.offsets, c.sizes, c.offsets) for chunks in flat for c in chunks]
    assert overlapping(column) is None
    assert compared == []
    extra = ReadPart((503, 503), (2, 2), (503, 503))
    assert extra in (overlapping([*grid, extra]) or ())
    assert 0 < len(compared) < 20


# --- helpers ----------------------------------------------------------------------------------------------------------

DESTINATIONS: dict[str, Callable[[DeviceMesh], Tensor]] = {
    "plain": lambda mesh: torch.zeros(6, 4),
    "sharded": lambda mesh: sharded(torch.zeros(6, 4), mesh),
    "ragged": lambda mesh: ragged(torch.zeros(6, 4), mesh, 3, 6, 13),
    "whole": lambda mesh: distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()]),
}


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def random_region(generator: random.Random, shape: tuple[int, ...]) -> ReadPart:
    offsets = tuple(generator.randrange(size) for size in shape)
    sizes = tuple(generator.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))
    return ReadPart(offsets, sizes, offsets)


def elements(region: ReadPart) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True)))
