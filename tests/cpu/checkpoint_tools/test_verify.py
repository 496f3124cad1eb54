"""Everything that can be wrong with a checkpoint is found, and all of it at once."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.look.verify import check_finite, check_structure, count_not_finite, finite_bytes
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import STATE, changed, chunks_in, save, save_on_two_ranks

WEIGHT = "model.layers.10.weight"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_on_two_ranks(tmp_path_factory.mktemp("ranks"))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", STATE, single_file_per_rank=False)


def problems_of(folder: Path) -> list[tuple[str, str]]:
    return [tuple(problem) for problem in check_structure(open_checkpoint(folder))[0]]


def file_of(folder: Path, key: str) -> Path:
    item = next(item for name, item in open_checkpoint(folder).items() if name == key)
    return folder / item.file


# Coverage ------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_chunks_of_two_ranks(two_ranks: Path) -> None:
    problems, files = check_structure(open_checkpoint(two_ranks))
    assert (problems, files.notes, files.sound) == ([], (), ("__0_0.distcp", "__1_0.distcp"))
    assert files.nbytes == sum(file.stat().st_size for file in two_ranks.glob("*.distcp"))
    for number, (edit, expected) in enumerate(CHUNKS):
        assert expected in problems_of(changed(two_ranks, f"edited-{number}", edit))


def place_of(metadata: Metadata, key: str, *offsets: int) -> Any:
    return metadata.storage_data[MetadataIndex(key, offsets)]


def gone(metadata: Metadata) -> None:
    chunk = chunks_in(metadata, "model.fused").pop()
    del metadata.storage_data[MetadataIndex("model.fused", chunk.offsets)]


def overlapping(metadata: Metadata) -> None:
    second = chunks_in(metadata, "model.fused")[1]
    place = metadata.storage_data.pop(MetadataIndex("model.fused", second.offsets))
    second.offsets = torch.Size([3, 0])
    metadata.storage_data[MetadataIndex("model.fused", (3, 0))] = place


def outside(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.fused"].size = torch.Size([6, 6])  # type: ignore[union-attr]


def in_the_same_bytes(metadata: Metadata) -> None:
    """Empty chunks may share their bytes with another; two with elements would have the same values."""
    first, second = chunks_in(metadata, "model.fused")
    second.offsets, second.sizes = torch.Size([4, 0]), torch.Size([4, 6])
    metadata.state_dict_metadata["model.fused"].size = torch.Size([8, 6])  # type: ignore[union-attr]
    metadata.storage_data[MetadataIndex("model.fused", (4, 0))] = place_of(metadata, "model.fused", *first.offsets)


CHUNKS = [
    (gone, ("model.fused", "18 of 42 elements are in no chunk")),
    (overlapping, ("model.fused", "the chunks of (4, 6) at (0, 0) and of (3, 6) at (3, 0) overlap")),
    (outside, ("model.fused", "a chunk of (3, 6) at (4, 0) does not fit into (6, 6)")),
    (in_the_same_bytes, ("__0_0.distcp", "two chunks of model.fused are in the same bytes, from 0 on")),
]


def with_an_empty_chunk(metadata: Metadata) -> None:
    """Inside of a chunk that is not empty; torch itself puts them at the end."""
    chunks_in(metadata, WEIGHT).append(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([0, 5])))
    metadata.storage_data[MetadataIndex(WEIGHT, (2, 0))] = place_of(metadata, "nothing", 0, 0)


def of_another_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].properties.dtype = torch.int32  # type: ignore[union-attr]


def of_another_shape(metadata: Metadata) -> None:
    metadata.state_dict_metadata[WEIGHT].size = torch.Size([5, 4])  # type: ignore[union-attr]
    chunks_in(metadata, WEIGHT)[0].sizes = torch.Size([5, 4])


def in_another_item(metadata: Metadata) -> None:
    place_of(metadata, WEIGHT, 0, 0).relative_path = place_of(metadata, "model.layers.2.weight", 0).relative_path


ITEMS: dict[str, tuple[Any, str]] = {
    "an empty chunk": (with_an_empty_chunk, ""),
    "dtype": (of_another_dtype, "is stored as torch.float32 in __0_"),
    "shape": (of_another_shape, "shape (4, 5) where one of (5, 4) is expected"),
    "in the same bytes": (in_another_item, "are in the same bytes, from 0 on"),
}


@pytest.mark.parametrize("case", ITEMS)
def test_metadata_that_are_wrong_about_an_item(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "load")  # no data are read
    monkeypatch.delattr("checkpoint_tools.stored.items.ItemReader.bits")
    assert problems_of(folder) == []
    edit, expected = ITEMS[case]
    texts = [text for _, text in problems_of(changed(folder, "edited", edit))]
    if expected:
        assert any(expected in text for text in texts), texts
    assert not [text for text in texts if "overlap" in text or "no chunk" in text]


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [None, -1, 1, 2048])
def test_a_file_is_cut_short_or_longer_than_its_items(folder: Path, more: int | None) -> None:
    file = file_of(folder, WEIGHT)
    needed = file.stat().st_size
    size = 0 if more is None else needed + more
    os.truncate(file, size)
    told = f"has {size:,} bytes of {needed:,}; cut off: {WEIGHT}"
    if size > needed:
        told = f"has {size:,} bytes, and its items end at {needed:,}: something was appended, or items are lost"
    assert problems_of(folder) == [(file.name, told)]


def test_files_that_are_gone_or_left(folder: Path) -> None:
    (folder / "__7_0.distcp").write_bytes(b"")
    problems, found = check_structure(open_checkpoint(folder))
    assert problems == []
    assert found.notes == ("__7_0.distcp is not part of the checkpoint; was another one saved here before?",)
    (folder / "__7_0.distcp").unlink()
    files, first = list(folder.glob("*.distcp")), file_of(folder, WEIGHT)
    first.unlink()
    assert problems_of(folder) == [(first.name, f"is not there; it has {WEIGHT}")]
    for other in files:
        other.unlink(missing_ok=True)
    assert sorted(where for where, _ in problems_of(folder)) == sorted(file.name for file in files)


# Items ---------------------------------------------------------------------------------------------------------------


def test_damage_is_found_in_each_item(folder: Path) -> None:
    keys = [WEIGHT, "optim.param_groups.0.lr"]
    for key in keys:
        file = file_of(folder, key)
        file.write_bytes(bytes(file.stat().st_size))
    found = problems_of(folder)
    assert [where for where, _ in found] == keys
    assert all("not what torch.save writes" in text for _, text in found)


# Values --------------------------------------------------------------------------------------------------------------

BAD = {
    "float32": torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]),
    "bfloat16": torch.tensor([1.0, torch.nan]).bfloat16(),
    "float8": torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1.0, complex(0, torch.nan), complex(torch.inf, torch.nan)]),
    "strided": torch.tensor([[1.0, 2.0], [3.0, torch.nan]]).t(),
}
GOOD = {
    "int": torch.arange(4),
    "largest": torch.full((3,), torch.finfo(torch.float32).max),
    "smallest": torch.full((3,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
    "float8 largest": torch.full((3,), 448.0).to(torch.float8_e4m3fn),
    "complex good": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0),
    "object": "nan",
}


@pytest.mark.parametrize("max_memory_bytes", [1 << 30, 4 * 4096])
def test_values_that_are_not_finite(tmp_path: Path, max_memory_bytes: int) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "checkpoint", {**BAD, **GOOD, "large": torch.zeros(1 << 22)}))
    advanced: list[int] = []
    problems = check_finite(checkpoint, ["__0_0.distcp"], 4, max_memory_bytes, advanced.append)
    assert max(advanced) <= max_memory_bytes // 4 // 2
    assert sum(advanced) == finite_bytes(checkpoint)
    assert {where: text.split(" values")[0] for where, text in problems} == {
        "float32": "3 of 4",
        "bfloat16": "1 of 2",
        "float8": "1 of 2",
        "complex": "2 of 3",
        "strided": "1 of 4",
    }


def test_one_bad_value_anywhere() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for at in [*range(0, 1000, 37), 999]:
            values = torch.zeros(1000, dtype=dtype)
            values[at] = torch.nan
            assert count_not_finite(values) == 1


# A damaged .metadata, and no manifest -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("small") / "checkpoint", small_state())


def small_state(factor: int = 1) -> dict[str, Any]:
    """Nested, since a key of one word is in the metadata once, so that nothing tells what it was before the damage."""
    model = {"a.weight": factor * torch.arange(12.0).view(3, 4), "b": factor * torch.ones(5, dtype=torch.bfloat16)}
    return {"model": model, "args": {"x": factor, "y": "hello"}}


def is_loaded(folder: Path) -> bool:
    """Whether DCP loads what was saved."""
    found, expected = small_state(0), small_state()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(found, checkpoint_id=folder, no_dist=True)
    except dcp.api.CheckpointException:
        return False
    same = all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
    return same and {**found, "model": None} == {**expected, "model": None}


def is_whole(folder: Path) -> bool:
    try:
        return not problems_of(folder)
    except CheckpointError:
        return False


@pytest.mark.parametrize(
    "mask", [0x04, 0x20, *(pytest.param(1 << n, marks=pytest.mark.long) for n in (0, 1, 3, 4, 6, 7))]
)
def test_no_flipped_bit_is_whole_and_not_loaded(mask: int, small: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "damaged"))
    file = folder / ".metadata"
    content = file.read_bytes()
    assert is_whole(folder)
    assert is_loaded(folder)
    for at in range(len(content)):
        file.write_bytes(bytes([*content[:at], content[at] ^ mask, *content[at + 1 :]]))
        assert not is_whole(folder) or is_loaded(folder), f"byte {at}, {content[max(at - 20, 0) : at + 10]!r}"
