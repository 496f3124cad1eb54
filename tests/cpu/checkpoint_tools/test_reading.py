"""What the metadata of a checkpoint say, and metadata that are damaged, of something else, or hostile."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.core.text import human_bytes, natural_order, parse_bytes
from checkpoint_tools.look.inspect import FileRow, GroupRow, KeyRow, as_json, group_of, rank_of, summarize
from checkpoint_tools.stored.checkpoint import CheckpointProblem
from checkpoint_tools.stored.reading import open_checkpoint
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
    refused(tmp_path / "file", "is not a folder")
    refused(f"file://{tmp_path}/nowhere", "is not a folder")
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


# Rows ----------------------------------------------------------------------------------------------------------------


def test_rows_of_keys_and_totals(saved: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved)
    rows = summarize(checkpoint).keys
    assert rows[0] == KeyRow("model.layers.2.weight", "model", (3,), "bfloat16", 1, 6)
    assert rows[4][:5] == ("optim.param_groups.0.lr", "optim param_groups", None, None, 1)
    assert summarize(checkpoint, ["model.*", "*.exp_avg", "*.step"]).groups == (
        GroupRow("model", 2, 2, 6 + 20 * 4),
        GroupRow("optim exp_avg", 2, 2, (24 + 20) * 4),
        GroupRow("optim step", 2, 2, 2 * 4),
    )
    folder = save(tmp_path / "checkpoint", {f"x{i}": torch.zeros(4) for i in range(11)}, single_file_per_rank=False)
    files = summarize(open_checkpoint(folder), ["x1*"]).files
    assert [row.file for row in files] == ["__0_1.distcp", "__0_10.distcp"]
    assert files[0] == FileRow("__0_1.distcp", 0, 1, (folder / "__0_1.distcp").stat().st_size)
    read = json.loads(json.dumps(as_json(summarize(checkpoint))))
    assert read["nbytes"] == sum(row.nbytes for row in rows)
    assert (read["keys"][1]["shape"], read["files"][0]["rank"]) == ([4, 5], 0)


def test_groups_and_ranks() -> None:
    for key, path, group in (
        ("layers.0.weight", (), "layers"),
        ("model.layers.0.weight", ("model", "layers.0.weight"), "model"),
        ("optim.state.layers.0.weight.exp_avg", ("optim", "state", "layers.0.weight", "exp_avg"), "optim exp_avg"),
        ("optim.state.layers.0.weight.exp_avg", (), "optim exp_avg"),
        ("state.0.exp_avg", ("state", 0, "exp_avg"), "state exp_avg"),
        ("optim.param_groups.0.lr", ("optim", "param_groups", 0, "lr"), "optim param_groups"),
        ("param_groups.layers.0.weight.lr", (), "param_groups"),
        ("step", ("step",), "step"),
        ("optim.state", ("optim", "state"), "optim"),
        ("optimizer.state.exp_avg.decoder.weight", (), "optimizer exp_avg"),
    ):
        assert group_of(key, path) == group
    assert [rank_of(file) for file in ("__12_3.distcp", "model.distcp", "x/__1_0.distcp")] == [12, None, None]


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    counts = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 1024: "1.0 KiB", 1048575: "1.0 MiB", 3 << 39: "1.5 TiB"}
    assert {count: human_bytes(count) for count in counts} == counts
    sizes = {"4096": 4096, "2GiB": 2 << 30, "1.5 k": 1536, "2GB": 2 * 10**9, "7 bytes": 7}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "much", "-1", "0", "2XB", "GiB", "9" * 5000):
        with pytest.raises(CheckpointError, match="is not a size"):
            parse_bytes(text)


def test_order() -> None:
    assert sorted(["a.10", "a.2", "a", "b", "a.x", "10", "9"], key=natural_order) == [
        *("9", "10", "a", "a.2", "a.10", "a.x", "b")
    ]
    digits = ["x." + "9" * 5000, "x.10", "x.9", "x.010", "x"]
    assert sorted(digits, key=natural_order) == ["x", "x.9", "x.10", "x.010", digits[0]]
