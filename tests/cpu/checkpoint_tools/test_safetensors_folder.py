"""Safetensors that are damaged, hostile or not all there: one line, and nothing is made of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint_tools.checkpoints import STATE, assert_one_line, run_here, save
from tests.checkpoint_tools.converted import converted, safetensors_file
from tests.checkpoint_tools.limited import Limited, limited


@pytest.fixture(scope="module")
def tool() -> Iterator[Limited]:
    with limited() as process:
        yield process


def tensor(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NOT_WHOLE: dict[str, tuple[Any, bytes]] = {
    "not-json": (b"{'a'", b""),
    "not-utf8": (b"\xff\xfe{}", b""),
    "nested": (b"[" * 100_000, b""),
    "repeated": (b'{"a": {}, "a": {}}', b""),
    "negative": ({"a": tensor(0, 8, [-2])}, b""),
    "unknown-dtype": ({"a": tensor(0, 8, dtype="F6_E2M3")}, bytes(8)),
    "odd-float4": ({"a": tensor(0, 8, [3], "F4")}, bytes(8)),
    "overlapping": ({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)),
    "cut-short": ({"a": tensor(0, 8)}, bytes(7)),
    "too-long": ({"a": tensor(0, 8)}, bytes(9)),
    "10^400": ({"x\x1b[2J": tensor(0, 4, [10**400])}, bytes(4)),
    "5000 dimensions": ({"x\x1b[2J": tensor(0, 4, [1] * 5000)}, bytes(4)),
    "an offset of 10^400": ({"x\x1b[2J": tensor(0, 10**400, [1])}, bytes(4)),
    "a long text": ({"x\x1b[2J": tensor(0, 4, ["x" * 9999])}, bytes(4)),
    "many digits": (b'{"x": ' + b"9" * 5000 + b"}", bytes(4)),
}
PARTS = {
    '{"a": {"saved_offsets": [0, 0]}}': "offsets of other dimensions",
    "{}": "KeyError: 'a'",
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_headers_that_are_wrong(tool: Limited, tmp_path: Path, name: str) -> None:
    path = safetensors_file(tmp_path / "source" / "model.safetensors", *NOT_WHOLE[name])
    for command in (("convert", path, tmp_path / "new"), ("convert", path.parent, tmp_path / "new"), ("verify", path)):
        run = tool.run(*command)
        assert run.code == 2
        assert "model.safetensors is not a whole safetensors file" in run.output
        assert len(run.output.splitlines()) == 1
        assert len(run.output) < 1000
        assert "\x1b" not in run.output
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_lengths_and_parts_that_are_wrong(tmp_path: Path) -> None:
    for number, length in enumerate((0, 1, 3, 10**8 + 1, 2**63)):
        path = safetensors_file(tmp_path / f"{number}.safetensors", {}, length=length)
        assert_one_line(run_here("convert", path, tmp_path / "new"), "is not a whole safetensors file")
    (tmp_path / "short.safetensors").write_bytes(b"\0\0")
    assert_one_line(run_here("convert", tmp_path / "short.safetensors", tmp_path / "new"), "is not a whole")
    for said, match in PARTS.items():
        header = {"__metadata__": {"DCP_SHARDING_INFO": said}, "a": tensor(0, 8)}
        path = safetensors_file(tmp_path / "model.safetensors", header, bytes(8))
        message = f"has DCP_SHARDING_INFO that do not fit ({match})"
        assert_one_line(run_here("convert", path, tmp_path / "new"), message)


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index, objects = "model.safetensors.index.json", "optimizer.json"

    def folder(name: str, **files: Any) -> Path:
        made = Path(converted(source, tmp_path / name, shard_bytes=80).path)
        for file, content in files.items():
            (made / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return made

    gone = folder("gone")
    (gone / second).unlink()
    no_optimizer = folder("no-optimizer")
    (no_optimizer / objects).unlink()
    twice = folder("twice")
    (twice / index).unlink()
    save_file(load_file(twice / first), twice / "copy.safetensors")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a", "b"):
        (several / f"{name}.safetensors.index.json").write_text("{}")
    cases = {
        gone: f"names {second}, which is not there (1 keys); fetch it as well",
        twice: "is in copy.safetensors and in model-00001-of-00002.safetensors",
        several: "has several indices (a.safetensors.index.json, b.safetensors.index.json)",
        folder("no-map", **{index: {}}): "has no weight_map",
        folder("no-json", **{index: "{"}): f"{index} is no JSON",
        folder("outside", **{index: {"weight_map": {"a": "../made/x.safetensors"}}}): "which is outside of the folder",
        folder("lost", **{index: {"weight_map": {"lost": first}}}): "does not have lost, which",
        folder("other-json", **{objects: {}}): f"{objects} is not what these tools write",
        folder("damaged", **{objects: {"format": "checkpoint_tools 2"}}): "optimizer.json is damaged (KeyError",
        folder(
            "no-value", **{objects: {"format": "checkpoint_tools 2", "stored": {"a": "?"}, "paths": {}}}
        ): "optimizer.json is damaged (Error: ",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    for path, match in cases.items():
        assert_one_line(run_here("convert", path, tmp_path / "new"), match)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert run_here("convert", no_optimizer, tmp_path / "new").returncode == 0
