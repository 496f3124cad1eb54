"""inspect and verify: what a checkpoint has, as torch reads it; and everything that is wrong with it, all at once."""

import contextlib
import io
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties

from checkpoint_tools import cli
from checkpoint_tools.core.text import CheckpointError, human_bytes, natural_order, parse_bytes
from tests.checkpoint_tools.saves import PLAIN, WEIGHT, changed, entry_of, save, save_on_two_ranks, without_checksums
from tests.checkpoint_tools.tool import as_json, assert_one_line, load, metadata_of, place_of, run, shown

LR, OTHER = "optim.param_groups.0.lr", "model.layers.2.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each item."""
    return save(tmp_path_factory.mktemp("saved") / "checkpoint", PLAIN, single_file_per_rank=False)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def problems_of(folder: Path, *options: object) -> list[tuple[str, str]]:
    found = as_json("verify", folder, *options, code=int(run("verify", folder, *options).returncode))
    return [(each["where"], each["text"]) for each in found["problems"]]


def file_of(folder: Path, key: str) -> Path:
    return folder / place_of(folder, key).relative_path


# What is there -------------------------------------------------------------------------------------------------------


def test_the_same_as_torch_reads(saved: Path) -> None:
    found, metadata = as_json("inspect", saved), metadata_of(saved)
    assert {**found, "path": ""} == {**as_json("inspect", f"file://{saved}"), "path": ""}
    assert found["version"] == metadata.version
    rows = {row["key"]: row for row in found["keys"]}
    assert rows.keys() == metadata.state_dict_metadata.keys()
    assert list(rows) == sorted(rows, key=natural_order)
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            assert rows[key]["shape"] == list(entry.size)
            assert f"torch.{rows[key]['dtype']}" == str(entry.properties.dtype)
            places = [
                (chunk["offsets"], chunk["sizes"]) for chunk in as_json("inspect", saved, "--tiling", key)["chunks"]
            ]
            assert places == [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks]
    assert {*found["files"]} == {info.relative_path for info in metadata.storage_data.values()}
    assert rows[OTHER] == {**rows[OTHER], "group": "model", "chunks": 1, "nbytes": 6}
    assert rows[LR] == {**rows[LR], "group": "optim param_groups", "shape": None, "dtype": None}
    groups = as_json("inspect", saved, "model.*", "*.exp_avg", "*.step")["groups"]
    assert [tuple(row.values()) for row in groups] == [
        ("model", 2, 2, 6 + 20 * 4),
        ("optim exp_avg", 2, 2, (24 + 20) * 4),
        ("optim step", 2, 2, 2 * 4),
    ]
    assert as_json("inspect", saved, LR)["files"] == [file_of(saved, LR).name]


def test_groups(tmp_path: Path) -> None:
    one = torch.ones(1)
    state = {
        "model": {"layers.0.weight": one},
        "nested": {"state": {"layers.0.weight": {"exp_avg": one}}},
        "state": {0: {"exp_avg": one}},
        "bare": {"state": one},
    }
    flat = ("layers.0.weight", "step", "flat.state.layers.0.weight.exp_avg", "adam.state.exp_avg.decoder.weight")
    folder = save(tmp_path / "checkpoint", {**state, **dict.fromkeys(flat, one), "param_groups.layers.0.lr": 0.5})
    groups = [row["group"] for row in as_json("inspect", folder)["groups"]]
    of_state = ["adam exp_avg", "bare", "flat exp_avg", "layers", "model", "nested exp_avg"]
    assert groups == [*of_state, "param_groups", "state exp_avg", "step"]


def test_sizes_and_order() -> None:
    counts = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 1024: "1.0 KiB", 1048575: "1.0 MiB", 3 << 39: "1.5 TiB"}
    assert {count: human_bytes(count) for count in counts} == counts
    sizes = {"4096": 4096, "2GiB": 2 << 30, "1.5 k": 1536, "2GB": 2 * 10**9, "7 bytes": 7}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("1", "0.5", "1023"):
        with pytest.raises(CheckpointError, match=f"{text} is {text} bytes; write {text}MiB or {text}GiB"):
            parse_bytes(text)
    for text in ("", "much", "-1", "0", "2XB", "GiB", "9" * 5000):
        with pytest.raises(CheckpointError, match="is not a size"):
            parse_bytes(text)
    for ordered in (["9", "10", "a", "a.2", "a.10", "a.x", "b"], ["x", "x.9", "x.10", "x.010", "x." + "9" * 5000]):
        assert sorted(ordered, key=natural_order) == ordered


# As others wrote it --------------------------------------------------------------------------------------------------


class _AsGetattr:
    """An enum's value as Python 3.11.2 pickles it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return getattr, (type(self.value), self.value.name)


@pytest.mark.parametrize("how", ["getattr", "attributes"])
def test_metadata_of_another_python_and_torch(
    saved: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state = TensorProperties.__getstate__

    def enums_as_getattr(self: TensorProperties) -> Any:
        return tuple(_AsGetattr(value) if hasattr(value, "_name_") else value for value in state(self))

    def attributes(self: TensorProperties) -> Any:
        return {"dtype": self.dtype, "pin_memory": False}

    monkeypatch.setattr(TensorProperties, "__getstate__", enums_as_getattr if how == "getattr" else attributes)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata_of(saved)))
    monkeypatch.undo()
    assert (b"getattr" in (copy / ".metadata").read_bytes()) == (how == "getattr")
    assert as_json("inspect", copy)["keys"] == as_json("inspect", saved)["keys"]


def test_versions(copy: Path) -> None:
    for version in (None, "1.7.2"):
        folder = changed(copy, f"of {version}", lambda metadata, v=version: setattr(metadata, "version", v))
        assert as_json("inspect", folder)["version"] == version


def test_metadata_that_are_cut_short_or_something_else(saved: Path, tmp_path: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    cases = {content[:length]: "" for length in [*range(0, len(content), 97), len(content) - 1]} | {
        b"{}": "KeyError",
        b"\xff" * 100: "KeyError",
        pickle.dumps({"a": 1}): "it has a dict where Metadata are expected",
        pickle.dumps(MetadataIndex("a")): "it has a MetadataIndex",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n.": "it has a type",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(tR.": "which keys there are",
    }
    for damaged, match in cases.items():
        (tmp_path / ".metadata").write_bytes(damaged)
        assert_one_line(run("inspect", tmp_path), "cannot be read as the metadata of a checkpoint", match)


# Metadata that contradict themselves, or the data --------------------------------------------------------------------


def info_of(metadata: Metadata, key: str, *offsets: int) -> Any:
    return metadata.storage_data[MetadataIndex(key, offsets)]


def contradictions(metadata: Metadata) -> None:
    storage = metadata.storage_data
    entry_of(metadata, WEIGHT).chunks.append(ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([1, 5])))
    entry_of(metadata, WEIGHT).chunks.append(ChunkStorageMetadata(torch.Size([4]), torch.Size([1])))
    del storage[MetadataIndex(LR)]
    storage[MetadataIndex("unknown", (0,))] = next(iter(storage.values()))


def an_empty_chunk(metadata: Metadata) -> None:
    """Inside of a chunk that is not empty; torch itself puts them at the end."""
    entry_of(metadata, WEIGHT).chunks.append(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([0, 5])))
    metadata.storage_data[MetadataIndex(WEIGHT, (2, 0))] = info_of(metadata, "nothing", 0, 0)


def another_dtype(metadata: Metadata) -> None:
    entry_of(metadata, WEIGHT).properties.dtype = torch.int32


def another_shape(metadata: Metadata) -> None:
    entry_of(metadata, WEIGHT).size = torch.Size([5, 4])
    entry_of(metadata, WEIGHT).chunks[0].sizes = torch.Size([5, 4])


def another_item(metadata: Metadata) -> None:
    info_of(metadata, WEIGHT, 0, 0).relative_path = info_of(metadata, OTHER, 0).relative_path


CONTRADICTIONS: list[tuple[Any, list[str]]] = [
    (
        contradictions,
        [
            f"{WEIGHT}: a chunk of 1 dimensions in a tensor of 2",
            f"{WEIGHT}: the metadata do not say where the data are for its chunk at (4, 0)",
            f"{LR}: the metadata do not say where the data are",
            "unknown: is stored, but the metadata do not say what they are",
        ],
    ),
    (an_empty_chunk, []),
    (another_dtype, ["is stored as torch.float32 in __0_"]),
    (another_shape, ["shape (4, 5) where one of (5, 4) is expected"]),
    (another_item, ["are in the same bytes, from 0 on"]),
    *(
        (
            lambda metadata, path=path: setattr(info_of(metadata, WEIGHT, 0, 0), "relative_path", path),
            [f"{WEIGHT}: its data would be in {path!r}, outside of the checkpoint", f"{WEIGHT}: 20 of 20 elements"],
        )
        for path in ("../outside", "/etc/passwd", "a/../../outside", "", "c:\\file", "s3://bucket/file")
    ),
]


def test_contradictions_are_listed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "load")  # no data are read
    assert problems_of(copy) == []
    for number, (edit, expected) in enumerate(CONTRADICTIONS):
        texts = [": ".join(each) for each in problems_of(changed(copy, f"{number}", edit))]
        assert all(any(match in text for text in texts) for match in expected), texts
        assert not any("overlap" in text for text in texts)
    for value in ("3", -1, None, 2.5):
        wrong = changed(
            copy, f"of {value}", lambda found, v=value: setattr(entry_of(found, WEIGHT).chunks[0], "sizes", (v, 5))
        )
        assert_one_line(run("verify", wrong), f"a size or an offset is {value!r}")


def gone(metadata: Metadata) -> None:
    chunk = entry_of(metadata, "model.fused").chunks.pop()
    del metadata.storage_data[MetadataIndex("model.fused", chunk.offsets)]


def overlapping(metadata: Metadata) -> None:
    second = entry_of(metadata, "model.fused").chunks[1]
    place = metadata.storage_data.pop(MetadataIndex("model.fused", second.offsets))
    second.offsets = torch.Size([3, 0])
    metadata.storage_data[MetadataIndex("model.fused", (3, 0))] = place


def outside(metadata: Metadata) -> None:
    entry_of(metadata, "model.fused").size = torch.Size([6, 6])


def in_the_same_bytes(metadata: Metadata) -> None:
    """Empty chunks may share their bytes with another; two with elements would have the same values."""
    first, second = entry_of(metadata, "model.fused").chunks
    second.offsets, second.sizes = torch.Size([4, 0]), torch.Size([4, 6])
    entry_of(metadata, "model.fused").size = torch.Size([8, 6])
    metadata.storage_data[MetadataIndex("model.fused", (4, 0))] = info_of(metadata, "model.fused", *first.offsets)


CHUNKS = [
    (gone, ("model.fused", "18 of 42 elements are in no chunk")),
    (overlapping, ("model.fused", "the chunks of (4, 6) at (0, 0) and of (3, 6) at (3, 0) overlap")),
    (outside, ("model.fused", "a chunk of (3, 6) at (4, 0) does not fit into (6, 6)")),
    (in_the_same_bytes, ("__0_0.distcp", "two chunks of model.fused are in the same bytes, from 0 on")),
]


@pytest.mark.distributed
def test_chunks_of_two_ranks(tmp_path: Path) -> None:
    rows, columns = save_on_two_ranks(tmp_path)
    assert problems_of(rows) == []
    for number, (edit, expected) in enumerate(CHUNKS):
        assert expected in problems_of(changed(rows, f"edited-{number}", edit))
    picture = shown("inspect", rows, "--tiling", "model.fused")
    assert "model.fused: 7 × 6 of float32 in 2 chunks" in picture
    assert "4, 0     3 × 6  __1_0.distcp" in picture
    found = as_json("inspect", columns, "--tiling", "model.fused")
    assert [chunk["offsets"] for chunk in found["chunks"]] == [[0, 0], [0, 3]]
    assert_one_line(run("inspect", rows, "--tiling", "model.nothing"), "model.nothing is not in the checkpoint")
    broken = changed(rows, "broken", lambda metadata: entry_of(metadata, "model.fused").chunks.pop())
    assert_one_line(run("diff", broken, columns), "model.fused in ", "elements are in no chunk; see the command verify")


# Files and items -----------------------------------------------------------------------------------------------------


def test_files_of_other_sizes_gone_left_and_damaged(copy: Path) -> None:
    (copy / "__77_0.distcp").write_bytes(b"")
    found = as_json("verify", copy)
    assert found["whole"]
    assert found["notes"] == ["__77_0.distcp is not part of the checkpoint; was another one saved here before?"]
    (copy / "__77_0.distcp").unlink()
    first, second = file_of(copy, WEIGHT), file_of(copy, LR)
    content = first.read_bytes()
    for more in (-len(content), -1, 1, 2048):
        size = len(content) + more
        first.write_bytes(content)
        os.truncate(first, size)
        told = f"has {size:,} bytes of {len(content):,}; cut off: {WEIGHT}"
        if more > 0:
            told = (
                f"has {size:,} bytes, and its items end at {len(content):,}: something was appended, or items are lost"
            )
        assert problems_of(copy) == [(first.name, told)]
    for file in (first, second):
        file.write_bytes(bytes(len(content) if file is first else file.stat().st_size))
    damaged = problems_of(copy)
    assert [where for where, _ in damaged] == [WEIGHT, LR]
    assert all("not what torch.save writes" in text for _, text in damaged)
    first.unlink()
    assert (first.name, f"is not there; it has {WEIGHT}") in problems_of(copy)
    for other in (files := sorted(copy.glob("*.distcp"))):
        other.unlink()
    assert {where for where, _ in problems_of(copy)} == {file.name for file in (*files, first)}


IN_ORDER = {
    "float32": torch.arange(35.0).view(7, 5),
    "float8": torch.arange(14.0).view(7, 2).to(torch.float8_e4m3fn),
    "int64": torch.arange(7),
    "one": torch.arange(7.0).view(1, 7).t(),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3, dtype=torch.bfloat16),
}
OTHERWISE = {
    "transposed": torch.arange(35.0).view(5, 7).t(),
    "channels": torch.arange(7 * 24.0).view(7, 2, 3, 4).to(memory_format=torch.channels_last),
    "view": torch.arange(40.0)[8:20].view(3, 4),  # DCP clones such tensors; others may not
    "conjugated": (torch.arange(4) * (1 + 2j)).conj(),
    "parameter": torch.nn.Parameter(torch.arange(4.0)),
}


def other_items(folder: Path, tensors: dict[str, Tensor], way: str) -> None:
    """Exchange the items for what torch.save makes by itself, with other bytes around."""
    metadata, written = metadata_of(folder), io.BytesIO()
    written.write(b"before")
    for index, info in metadata.storage_data.items():
        buffer = io.BytesIO()
        with without_checksums() if way == "without checksums" else contextlib.nullcontext():
            torch.save(tensors[index.fqn], buffer)
        info.offset, info.length = written.tell(), len(buffer.getvalue())
        written.write(buffer.getvalue() + b"between")
    (folder / "__0_0.distcp").write_bytes(written.getvalue()[: -len(b"between")])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("way", ["as it is", "without checksums"])
def test_items_of_all_kinds_are_read(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and in pieces; only what is in another order needs torch.load."""
    everything = IN_ORDER | OTHERWISE
    plain = {key: value.detach().resolve_conj().contiguous() for key, value in everything.items()}
    a, b = save(tmp_path / "a", plain), save(tmp_path / "b", plain)
    other_items(a, everything, way)
    assert problems_of(a, "--data", "--finite") == []
    for memory in ("1GiB", 1 << 15):
        assert "the same: 11 keys" in shown("diff", a, b, "--max-memory", memory)
    monkeypatch.delattr(torch, "load")
    assert "the same: 6 keys" in shown("diff", a, b, *IN_ORDER, "--max-memory", 512)


def test_a_pickle_that_is_overwritten(tmp_path: Path) -> None:
    """Where checksums say nothing."""
    for key, after, old, new, match in (
        ("float32", b"", b"torch._utils", b"\xff\xff\xffch._utils", "data.pkl is no pickle"),
        ("int64", b"cpu", b"K\x07", b"K\x09", "56 bytes where 72 are expected"),  # more elements than there are
    ):
        with without_checksums():
            folder = save(tmp_path / key, IN_ORDER)
        info = place_of(folder, key)
        content = bytearray((folder / info.relative_path).read_bytes())
        at = content.index(old, content.index(after, info.offset))
        content[at : at + len(new)] = new
        (folder / info.relative_path).write_bytes(content)
        ((where, text),) = problems_of(folder)
        assert where == key
        assert match in text


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the structure and the values: the process goes on."""
    folder = save(tmp_path / "checkpoint", {"large": torch.zeros(1024, 1024)})

    @contextlib.contextmanager
    def cut(*_: object) -> Any:
        os.truncate(folder / "__0_0.distcp", 100_000)
        yield lambda done: None

    monkeypatch.setattr(cli, "progress", cut)
    assert "is cut short" in shown("verify", folder, "--finite", code=1)


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


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    large, counts = torch.zeros(1 << 22), ("3 of 4", "1 of 2", "1 of 2", "2 of 3", "1 of 4")
    large[-1] = torch.nan
    one_each: dict[str, Tensor] = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for at in [*range(0, 1000, 37), 999]:
            one_each[f"{dtype} at {at}"] = torch.zeros(1000, dtype=dtype).index_fill(0, torch.tensor(at), torch.nan)
    folder = save(tmp_path / "checkpoint", {**BAD, **GOOD, **one_each, "large": large})
    expected = dict(zip(BAD, counts, strict=True)) | dict.fromkeys(one_each, "1 of 1000") | {"large": "1 of 4,194,304"}
    found = {where: text.split(" values")[0] for where, text in problems_of(folder, "--finite")}
    assert found == {key: count.replace("1000", "1,000") for key, count in expected.items()}


# A damaged .metadata that nothing is compared with ---------------------------------------------------------------


def small_state(factor: int = 1) -> dict[str, Any]:
    """Nested, since a key of one word is in the metadata once, so that nothing tells what it was before the damage."""
    model = {"a.weight": factor * torch.arange(12.0).view(3, 4), "b": factor * torch.ones(5, dtype=torch.bfloat16)}
    return {"model": model, "args": {"x": factor, "y": "hello"}}


def is_loaded(folder: Path) -> bool | None:
    """Whether DCP loads what was saved; None, if it says that it cannot."""
    found, expected = small_state(0), small_state()
    with warnings.catch_warnings():
        try:
            load(found, folder)
        except dcp.api.CheckpointException:
            return None
    same = all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
    return same and {**found, "model": None} == {**expected, "model": None}


@pytest.mark.parametrize(
    "mask", [0x04, 0x20, *(pytest.param(1 << n, marks=pytest.mark.long) for n in (0, 1, 3, 4, 6, 7))]
)
def test_no_flipped_bit_is_whole_and_loaded_as_something_else(mask: int, tmp_path: Path) -> None:
    folder = save(tmp_path / "small", small_state())
    file = folder / ".metadata"
    content = file.read_bytes()
    assert run("verify", folder).returncode == 0
    assert is_loaded(folder)
    for at in range(len(content)):
        file.write_bytes(bytes([*content[:at], content[at] ^ mask, *content[at + 1 :]]))
        around = content[max(at - 20, 0) : at + 10]
        assert run("verify", folder).returncode or is_loaded(folder) is not False, f"byte {at}, {around!r}"
