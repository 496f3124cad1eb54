"""What is in a checkpoint: rows of keys, groups and files. Their tables are in test_commands.py."""

import json
from pathlib import Path

import pytest
import torch

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.core.text import human_bytes, natural_order, parse_bytes
from checkpoint_tools.look.inspect import (
    FileRow,
    GroupRow,
    KeyRow,
    as_json,
    group_of,
    rank_of,
    summarize,
)
from checkpoint_tools.stored.reading import Checkpoint, open_checkpoint
from tests.checkpoint_tools.checkpoints import STATE, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(tmp_path_factory.mktemp("saved") / "checkpoint", STATE))


# Rows ----------------------------------------------------------------------------------------------------------------


def test_rows_of_keys_and_totals(checkpoint: Checkpoint, tmp_path: Path) -> None:
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
