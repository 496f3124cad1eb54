"""Files that are gone, cut short or something else are noticed before anything is read, on every way to a reader."""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload.checkpoint.load_files import CheckedReader
from fsdp_offload.checkpoint.load_planner import LoadPlanner, load
from tests.loading import WHOLE, edit_metadata, one_rank, refused


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    yield from one_rank(tmp_path_factory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def two_files(folder: Path) -> dict[str, Any]:
    """A checkpoint whose tensors are in a file each; gives what to load into."""
    dcp.save({"a": WHOLE, "b": WHOLE + 1}, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False))
    assert len(list(folder.glob("*.distcp"))) == 2
    return {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4)}


def by_path(folder: Path) -> dict[str, Any]:
    return {"checkpoint_id": folder}


def by_string(folder: Path) -> dict[str, Any]:
    return {"checkpoint_id": str(folder)}


def by_reader(folder: Path) -> dict[str, Any]:
    return {"storage_reader": dcp.FileSystemReader(folder)}


def by_reader_elsewhere(folder: Path) -> dict[str, Any]:
    return {"storage_reader": dcp.FileSystemReader("nowhere"), "checkpoint_id": folder}


WAYS = pytest.mark.parametrize("way", [by_path, by_string, by_reader, by_reader_elsewhere])


@WAYS
def test_a_data_file_is_gone(folder: Path, two_files: dict[str, Any], way: Callable[[Path], dict[str, Any]]):
    file = file_of(folder, "b")
    file.unlink()
    refused(two_files, None, rf"{file.name} is not there", **way(folder))


@WAYS
def test_a_data_file_is_cut_short(folder: Path, two_files: dict[str, Any], way: Callable[[Path], dict[str, Any]]):
    file = file_of(folder, "b")
    whole_bytes = file.stat().st_size
    os.truncate(file, whole_bytes - 1)
    refused(two_files, None, rf"{file.name} has {whole_bytes - 1} bytes of at least {whole_bytes}", **way(folder))


def test_only_files_that_are_needed_count(folder: Path, two_files: dict[str, Any]):
    file_of(folder, "b").unlink()
    load({"a": two_files["a"]}, checkpoint_id=folder, planner=LoadPlanner(allow_extra=True))
    assert torch.equal(two_files["a"], WHOLE)


def test_the_end_of_what_is_needed_counts(folder: Path):
    """In whatever order it is requested. What follows in the file is not needed."""
    dcp.save({"x": {"a": WHOLE, "b": WHOLE + 1}}, checkpoint_id=folder)
    storage_data = dcp.FileSystemReader(folder).read_metadata().storage_data
    end_of = {index.fqn.removeprefix("x."): info.offset + info.length for index, info in storage_data.items()}
    first, last = sorted(end_of, key=lambda key: end_of[key])
    os.truncate(folder / "__0_0.distcp", end_of[first])
    load({"x": {first: torch.zeros(6, 4)}}, checkpoint_id=folder, planner=LoadPlanner(allow_extra=True))
    for keys in ((first, last), (last, first)):
        loaded = {"x": {key: torch.zeros(6, 4) for key in keys}}
        refused(loaded, folder, f"__0_0.distcp has {end_of[first]} bytes of at least {end_of[last]}")


def test_chunks_that_are_nowhere(folder: Path, two_files: dict[str, Any]):
    def forget(metadata: Metadata) -> None:
        metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "b"}

    edit_metadata(folder, forget)
    refused(two_files, folder, "does not say where it has b")


@pytest.mark.filterwarnings("ignore::UserWarning")
@WAYS
@pytest.mark.parametrize("kept_bytes", [0, 1, 100])
def test_metadata_cut_short(
    folder: Path, two_files: dict[str, Any], way: Callable[[Path], dict[str, Any]], kept_bytes: int
):
    os.truncate(folder / ".metadata", kept_bytes)
    refused(two_files, None, rf"{folder}/\.metadata cannot be read as the metadata of a checkpoint", **way(folder))


def test_metadata_of_something_else(folder: Path, two_files: dict[str, Any]):
    for content in (pickle.dumps({"a": 1}), b"# notes\n", pickle.dumps(Metadata(None))):
        (folder / ".metadata").write_bytes(content)
        refused(two_files, folder, "cannot be read as the metadata of a checkpoint|expected .*metadata.Metadata")


def test_no_metadata_file(folder: Path, two_files: dict[str, Any]):
    (folder / ".metadata").unlink()
    refused(two_files, folder, rf"there is no \.metadata in {folder}\.")
    refused(two_files, folder / "elsewhere", r"there is no \.metadata in .*elsewhere\.")


def test_what_one_rank_saved_does_not_stand_in_for_damaged_metadata(folder: Path, two_files: dict[str, Any]):
    """DCP reads ``__0.metadata`` if ``.metadata`` cannot be read: of another save, it may be."""
    (folder / "__0.metadata").write_bytes((folder / ".metadata").read_bytes())
    os.truncate(folder / ".metadata", 100)
    refused(two_files, folder, r"/\.metadata cannot be read")
    (folder / ".metadata").unlink()
    load(two_files, checkpoint_id=folder)  # as dcp.save(use_collectives=False) leaves it
    assert torch.equal(two_files["b"], WHOLE + 1)


def test_files_elsewhere(two_files: dict[str, Any]):
    """Through fsspec."""
    fsspec = pytest.importorskip("fsspec")
    url = "memory://test_files_elsewhere"
    dcp.save({"a": WHOLE, "b": WHOLE + 1}, checkpoint_id=url)
    load(two_files, checkpoint_id=url)
    assert torch.equal(two_files["a"], WHOLE)
    files = fsspec.filesystem("memory")
    content = files.cat_file(f"{url}/__0_0.distcp")
    files.pipe_file(f"{url}/__0_0.distcp", content[:-1])
    refused(two_files, url, f"has {len(content) - 1} bytes of at least {len(content)}")
    files.rm(f"{url}/__0_0.distcp")
    refused(two_files, url, "__0_0.distcp is not there")
    files.rm(f"{url}/.metadata")
    refused(two_files, url, r"there is no \.metadata in memory:")


def test_readers_of_other_kinds_are_used_as_they_are(folder: Path, two_files: dict[str, Any]):
    class Reader(dcp.StorageReader):
        """Not a FileSystemReader; written before DCP gave keywords."""

        def __init__(self) -> None:
            self.inner = dcp.FileSystemReader(folder)

        def reset(self, checkpoint_id: object = None) -> None:
            raise AssertionError("no checkpoint_id was given")

        def read_metadata(self) -> Metadata:
            return self.inner.read_metadata()

        def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
            self.inner.set_up_storage_reader(metadata, is_coordinator)

        def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
            return plan

        def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
            return plans

        def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
            return self.inner.read_data(plan, planner)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
            return False

    load(two_files, storage_reader=Reader())
    assert torch.equal(two_files["a"], WHOLE)


def test_safetensors(tmp_path: Path):
    """A FileSystemReader by class, but its metadata are in the files themselves."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": WHOLE}, tmp_path / "model.safetensors")
    loaded = {"a": torch.zeros(6, 4)}
    load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(loaded["a"], WHOLE)
    refused(
        {"a": torch.zeros(4)}, None, "1 of another shape", storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path))
    )


def test_a_reader_of_ones_own(folder: Path, two_files: dict[str, Any]):
    """A FileSystemReader with an older signature: checked, and otherwise used as it is."""

    class Reader(dcp.FileSystemReader):
        reads = 0

        def read_metadata(self) -> Metadata:
            return super().read_metadata()

        def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
            super().set_up_storage_reader(metadata, is_coordinator)

        def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
            self.reads += 1
            return super().read_data(plan, planner)

    reader = Reader(folder)
    load(two_files, storage_reader=reader)
    assert torch.equal(two_files["a"], WHOLE)
    file_of(folder, "b").unlink()
    refused(two_files, None, "is not there", storage_reader=reader)
    (folder / ".metadata").unlink()
    refused(two_files, None, r"there is no \.metadata", storage_reader=reader)
    assert reader.reads == 1


def test_another_planner_can_be_given(folder: Path, two_files: dict[str, Any]):
    load({"a": two_files["a"]}, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner())
    assert CheckedReader.validate_checkpoint_id(folder)


# --- helpers ----------------------------------------------------------------------------------------------------------


def file_of(folder: Path, key: str) -> Path:
    storage_data = dcp.FileSystemReader(folder).read_metadata().storage_data
    return next(folder / info.relative_path for index, info in storage_data.items() if index.fqn == key)
