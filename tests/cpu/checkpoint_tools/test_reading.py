"""What the metadata of a checkpoint say, and metadata that are damaged, of something else, or hostile."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.stored.reading import CheckpointProblem, open_checkpoint
from tests.checkpoint_tools.checkpoints import STATE, chunks_in, save
from tests.loading import edit_metadata

WEIGHT = "model.layers.10.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "checkpoint", STATE)


def refused(folder: Path | str, *matches: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for match in matches:
        assert match in str(caught.value)
    assert "\n" not in str(caught.value)


# What is there -------------------------------------------------------------------------------------------------------


def test_the_same_as_torch_reads(saved: Path) -> None:
    checkpoint, remote = open_checkpoint(saved), open_checkpoint(f"file://{saved}")
    assert (checkpoint.tensors, checkpoint.objects) == (remote.tensors, remote.objects)
    assert checkpoint.folder.files() == remote.folder.files()
    metadata = dcp.FileSystemReader(saved).read_metadata()
    for key, tensor in checkpoint.tensors.items():
        entry: Any = metadata.state_dict_metadata[key]
        assert (tensor.key, tensor.shape, tensor.dtype) == (key, tuple(entry.size), entry.properties.dtype)
        assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [
            (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
        ]
    assert {*checkpoint.tensors, *checkpoint.objects} == set(metadata.state_dict_metadata)
    assert checkpoint.paths == metadata.planner_data
    assert checkpoint.version == metadata.version
    found = {
        (key, getattr(item, "offsets", None)): (item.file, item.offset_bytes, item.length_bytes)
        for key, item in checkpoint.items()
    }
    assert found == {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for index, info in metadata.storage_data.items()
    }
    assert checkpoint.problems == ()
    keys = list(checkpoint.tensors)
    assert keys.index("model.layers.2.weight") < keys.index(WEIGHT)  # in natural order


# As others wrote it --------------------------------------------------------------------------------------------------


class _AsGetattr:
    """An enum's value as Python 3.11.2 pickles it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return getattr, (type(self.value), self.value.name)


@pytest.mark.parametrize("how", ["getattr", "attributes"])
def test_metadata_of_another_python_and_torch(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state = TensorProperties.__getstate__

    def enums_as_getattr(self: TensorProperties) -> Any:
        return tuple(_AsGetattr(value) if hasattr(value, "_name_") else value for value in state(self))

    def attributes(self: TensorProperties) -> Any:
        return {"dtype": self.dtype, "pin_memory": False}

    monkeypatch.setattr(TensorProperties, "__getstate__", enums_as_getattr if how == "getattr" else attributes)
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    (folder / ".metadata").write_bytes(pickle.dumps(pickle.loads((saved / ".metadata").read_bytes())))
    assert (b"getattr" in (folder / ".metadata").read_bytes()) == (how == "getattr")
    assert open_checkpoint(folder).tensors == open_checkpoint(saved).tensors


def copied(saved: Path, tmp_path: Path, edit: Any) -> Path:
    folder = Path(shutil.copytree(saved, tmp_path / "copy", dirs_exist_ok=True))
    edit_metadata(folder, edit)
    return folder


def test_versions(saved: Path, tmp_path: Path) -> None:
    for version in (None, "1.7.2"):
        folder = copied(saved, tmp_path, lambda metadata, version=version: setattr(metadata, "version", version))
        assert open_checkpoint(folder).version == version
    newer = copied(saved, tmp_path, lambda metadata: setattr(metadata, "version", "2.0.0"))
    refused(newer, "version 2.0.0", "newer tools")


# Not there -----------------------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file", f"file://{tmp_path}/nowhere"):
        refused(path, "is not a folder")
    refused("unheard-of://nowhere", "cannot be opened")
    refused(tmp_path, "has no .metadata", "its save did not end")
    refused(saved.parent, "it contains checkpoint/: give one of these")
    (tmp_path / "__0.metadata").write_bytes(b"")
    refused(tmp_path, "use_collectives=False")


# Damaged -------------------------------------------------------------------------------------------------------------


def test_cut_short_anywhere(saved: Path, tmp_path: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        (tmp_path / ".metadata").write_bytes(content[:length])
        refused(tmp_path, "cannot be read as the metadata of a checkpoint")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{}", "UnpicklingError"),
        (b"\xff" * 100, "UnpicklingError"),
        (pickle.dumps({"a": 1}), "it has a dict where Metadata are expected"),
        (pickle.dumps(MetadataIndex("a")), "it has a MetadataIndex"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n.", "it has a type"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n(tR.", "which keys there are"),
    ],
)
def test_something_else(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    refused(tmp_path, "cannot be read as the metadata of a checkpoint", match)


def test_contradictions_are_listed(saved: Path, tmp_path: Path) -> None:
    for value in ("3", -1, None, 2.5):
        wrong = copied(
            saved, tmp_path, lambda found, value=value: setattr(chunks_in(found, WEIGHT)[0], "sizes", (value, 5))
        )
        refused(wrong, f"a size or an offset is {value!r}")

    def edit(metadata: Any) -> None:
        storage = metadata.storage_data
        chunks_in(metadata, WEIGHT).append(ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([1, 5])))
        chunks_in(metadata, WEIGHT).append(ChunkStorageMetadata(torch.Size([4]), torch.Size([1])))
        del storage[MetadataIndex("optim.param_groups.0.lr")]
        storage[MetadataIndex("unknown", (0,))] = next(iter(storage.values()))

    assert open_checkpoint(copied(saved, tmp_path, edit)).problems == (
        CheckpointProblem(WEIGHT, "a chunk of 1 dimensions in a tensor of 2"),
        CheckpointProblem(WEIGHT, "the metadata do not say where the data are for its chunk at (4, 0)"),
        CheckpointProblem("optim.param_groups.0.lr", "the metadata do not say where the data are"),
        CheckpointProblem("unknown", "is stored, but the metadata do not say what they are"),
    )


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside", "", "c:\\file", "s3://bucket/file"])
def test_data_outside_of_the_folder_are_not_touched(saved: Path, tmp_path: Path, path: str) -> None:
    def edit(metadata: Any) -> None:
        metadata.storage_data[MetadataIndex(WEIGHT, (0, 0))].relative_path = path

    assert open_checkpoint(copied(saved, tmp_path, edit)).problems == (
        CheckpointProblem(WEIGHT, f"its data would be in {path!r}, outside of the checkpoint"),
    )
    assert open_checkpoint(tmp_path / "copy").tensors[WEIGHT].chunks == ()
