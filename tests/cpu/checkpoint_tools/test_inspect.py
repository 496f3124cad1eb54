"""What is in a checkpoint: rows of keys, groups and files; and pictures of how tensors are tiled."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console, RenderableType

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.core.text import block_bounds, human_bytes, natural_order, parse_bytes
from checkpoint_tools.look.inspect import (
    FileRow,
    GroupRow,
    KeyRow,
    as_json,
    as_tables,
    chunk_table,
    group_of,
    rank_of,
    summarize,
)
from checkpoint_tools.stored.reading import Checkpoint, StoredChunk, StoredTensor, open_checkpoint
from tests.checkpoint_tools.checkpoints import STATE, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(tmp_path_factory.mktemp("saved") / "checkpoint", STATE))


def text_of(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


# Rows ----------------------------------------------------------------------------------------------------------------


def test_rows_of_keys(checkpoint: Checkpoint) -> None:
    rows = summarize(checkpoint).keys
    assert [row.key for row in rows] == [
        "model.layers.2.weight",
        "model.layers.10.weight",
        "nothing",
        "optim.param_groups.0.betas",
        "optim.param_groups.0.lr",
        "optim.state.layers.2.weight.exp_avg",
        "optim.state.layers.2.weight.step",
        "optim.state.layers.10.weight.exp_avg",
        "optim.state.layers.10.weight.step",
    ]
    assert rows[0] == KeyRow("model.layers.2.weight", "model", (3,), "bfloat16", 1, 6)
    assert rows[4][:5] == ("optim.param_groups.0.lr", "optim param_groups", None, None, 1)


def test_totals_of_groups(checkpoint: Checkpoint) -> None:
    groups = summarize(checkpoint, ["model.*", "*.exp_avg", "*.step"]).groups
    assert groups == (
        GroupRow("model", 2, 2, 6 + 20 * 4),
        GroupRow("optim exp_avg", 2, 2, (24 + 20) * 4),
        GroupRow("optim step", 2, 2, 2 * 4),
    )


def test_totals_of_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint", {f"x{i}": torch.zeros(4) for i in range(11)}, single_file_per_rank=False)
    files = summarize(open_checkpoint(folder), ["x1*"]).files
    assert [row.file for row in files] == ["__0_1.distcp", "__0_10.distcp"]
    assert files[0] == FileRow("__0_1.distcp", 0, 1, (folder / "__0_1.distcp").stat().st_size)


@pytest.mark.parametrize(
    ("key", "path", "group"),
    [
        ("layers.0.weight", (), "layers"),
        ("model.layers.0.weight", ("model", "layers.0.weight"), "model"),
        ("optim.state.layers.0.weight.exp_avg", ("optim", "state", "layers.0.weight", "exp_avg"), "optim exp_avg"),
        ("optim.state.layers.0.weight.exp_avg", (), "optim exp_avg"),
        ("state.0.exp_avg", ("state", 0, "exp_avg"), "state exp_avg"),
        ("optim.param_groups.0.lr", ("optim", "param_groups", 0, "lr"), "optim param_groups"),
        ("param_groups.layers.0.weight.lr", (), "param_groups"),
        ("step", ("step",), "step"),
        ("optim.state", ("optim", "state"), "optim"),
    ],
)
def test_groups(key: str, path: tuple[str | int, ...], group: str) -> None:
    assert group_of(key, path) == group


@pytest.mark.parametrize(("file", "rank"), [("__12_3.distcp", 12), ("model.distcp", None), ("x/__1_0.distcp", None)])
def test_ranks(file: str, rank: int | None) -> None:
    assert rank_of(file) == rank


def test_json_has_all_of_it(checkpoint: Checkpoint) -> None:
    summary = summarize(checkpoint)
    read = json.loads(json.dumps(as_json(summary)))
    assert read["nbytes"] == sum(row.nbytes for row in summary.keys)
    assert [entry["key"] for entry in read["keys"]] == [row.key for row in summary.keys]
    assert read["keys"][1]["shape"] == [4, 5]
    assert read["files"][0]["rank"] == 0


def test_tables(checkpoint: Checkpoint) -> None:
    shown = text_of(as_tables(summarize(checkpoint), files=True))
    assert "7 tensors, 2 objects in 1 file" in shown
    assert "optim exp_avg" in shown
    assert "4 × 5" in shown
    assert "__0_0.distcp" in shown
    assert "model.layers.10.weight" not in text_of(as_tables(summarize(checkpoint), keys=False))


def test_keys_are_no_markup(tmp_path: Path) -> None:
    shown = text_of(as_tables(summarize(open_checkpoint(save(tmp_path / "c", {"model.[red]x[/]": torch.zeros(1)})))))
    assert "[red]x[/]" in shown


# Tiling --------------------------------------------------------------------------------------------------------------


def tensor(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> StoredTensor:
    stored = (StoredChunk(offsets, sizes, f"f{number}", 0, 0) for number, (offsets, sizes) in enumerate(chunks))
    return StoredTensor("key", shape, torch.float32, tuple(stored))


def test_each_chunk_is_a_row() -> None:
    shown = text_of(chunk_table(tensor((6, 4), ((0, 0), (2, 4)), ((2, 0), (4, 4))))).splitlines()
    rows = [line.split() for line in shown]
    assert [" ".join(row) for row in rows[1:]] == ["0, 0 2 × 4 f0 32 bytes", "2, 0 4 × 4 f1 64 bytes"]


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1048575, "1.0 MiB"),
        (3 << 39, "1.5 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("2GiB", 2 << 30), ("1.5 k", 1536), ("2GB", 2 * 10**9), ("7 bytes", 7)]
)
def test_sizes_from_people(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "2XB", "GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not a size"):
        parse_bytes(text)


def test_order_and_blocks() -> None:
    assert sorted(["a.10", "a.2", "a", "b", "a.x", "10", "9"], key=natural_order) == [
        *("9", "10", "a", "a.2", "a.10", "a.x", "b")
    ]
    assert block_bounds(5, 2) == [(0, 2), (2, 4), (4, 5)]
    assert block_bounds(0, 2) == []
