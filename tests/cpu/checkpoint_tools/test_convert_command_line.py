"""Converting from the shell: the plan, bad input in one line, kills, memory, other places."""

import io
import json
import os
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import STATE, changed, run_here, run_tool, save
from tests.checkpoint_tools.converted import converted, safetensors_file
from tests.checkpoint_tools.offline import assert_same, tiled
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line
from tests.cpu.checkpoint_tools.test_offline_command_line import contents


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "source", STATE)


# As people use it ----------------------------------------------------------------------------------------------------


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    (source / "README").write_text("ours")
    planned = run_here("convert", source, tmp_path / "made", "--dry-run")
    as_json = run_here("convert", source, tmp_path / "made", "--dry-run", "--json", "--what", "model")
    assert planned.returncode == 0, planned.stderr
    assert "model-00001-of-00001.safetensors" in planned.stdout
    assert "note: copied as it is: README" in planned.stdout
    assert "to be written: 7 tensors as safetensors" in planned.stdout
    found = json.loads(as_json.stdout)
    assert (list(found["files"]), found["key_prefix"]) == (["model-00001-of-00001.safetensors"], "model.")
    assert "7 keys not of the model, left out" in found["notes"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    made = run_tool("convert", "source", "made", "--shard-size", "100", "--threads", 1, cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines()[-1].startswith("made: 7 tensors as safetensors, ")
    back = run_tool("convert", "made", "back", "--to", "dcp", cwd=tmp_path)
    assert (back.returncode, back.stderr) == (0, "")
    assert_same(open_checkpoint(tmp_path / "back"), open_checkpoint(source))
    assert contents(source).items() >= before.items()
    assert (tmp_path / "back" / "README").read_text() == "ours"
    made_at, back_at = tmp_path / "made", tmp_path / "back"
    for command in (("diff", source, made_at), ("diff", made_at, back_at), ("verify", made_at, "--finite")):
        same = run_here(*command)
        assert same.returncode == 0, same.stdout + same.stderr
        assert "note" not in same.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "made", "source"]


def test_inspect_and_verify_what_hugging_face_has(tmp_path: Path) -> None:
    save_file({"a.weight": torch.tensor([1.0, torch.nan])}, tmp_path / "model.safetensors")
    shown = run_here("inspect", tmp_path)
    checked = run_here("verify", tmp_path / "model.safetensors", "--finite")
    assert "a.weight  2" in shown.stdout
    assert checked.returncode == 1
    assert "a.weight: 1 of 2 values are not finite" in checked.stdout


def test_flat_to_nd(tmp_path: Path) -> None:
    flat = tiled(torch.arange(12.0), [((0,), (5,)), ((5,), (7,))])
    state = {"model": {"a": torch.ones(3, 4)}, "optim": {"state": {"a": {"exp_avg": flat}}}}
    source = save(tmp_path / "source", state)
    arguments = ("convert", source, tmp_path / "made", "--flat-to-nd")
    shown = run_here(*arguments, "--dry-run", "--json")
    assert json.loads(shown.stdout)["flat"] == ["optim.state.a.exp_avg"]
    run = run_here(*arguments)
    assert run.returncode == 0, run.stderr
    assert "1 flat state tensor given the shape of the parameter" in run.stdout
    loaded: dict[str, Any] = {"optim": {"state": {"a": {"exp_avg": torch.zeros(3, 4)}}}}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(loaded, checkpoint_id=tmp_path / "made", no_dist=True)
    assert torch.equal(loaded["optim"]["state"]["a"]["exp_avg"], torch.arange(12.0).view(3, 4))


def test_help() -> None:
    run = run_here("convert", "--help")
    text = " ".join(run.stdout.split())
    for expected in (
        "Make safetensors of a checkpoint of DCP, or a checkpoint of safetensors, bit by bit.",
        "run the same command again after a kill",
        "Exit code: 0 done, 2 not done",
        "--shard-size SIZE",
        "--key-prefix TEXT",
        "--flat-to-nd",
    ):
        assert expected in text


# Bad input -----------------------------------------------------------------------------------------------------------


class Opaque:
    pass


def test_errors_are_one_line_and_leave_nothing_behind(source: Path, tmp_path: Path) -> None:
    made = Path(converted(source, tmp_path / "made").path)
    save(tmp_path / "complex", {"model": {"a": torch.ones(2, dtype=torch.complex128)}})
    save(tmp_path / "extra", {"model": {"a": torch.ones(2), "a._extra_state": io.BytesIO(b"x")}})
    save(tmp_path / "object", {"model": {"a": torch.ones(2)}, "thing": Opaque()})
    save(tmp_path / "named", {"model": {"__metadata__": torch.ones(2)}})
    save(tmp_path / "only", {"optim": {"state": {"a": {"exp_avg": torch.ones(6)}}}})
    save(tmp_path / "flat", {"model": {"a": torch.ones(2, 2)}, "optim": {"state": {"a": {"exp_avg": torch.ones(6)}}}})

    def uncover(metadata: Any) -> None:
        metadata.state_dict_metadata["model.layers.2.weight"].size = torch.Size([4])

    uncovered = changed(source, "uncovered", uncover)

    class Trap:
        def __reduce__(self) -> object:
            return os.system, (f"touch {tmp_path / 'trap'}",)

    hostile = changed(source, "hostile", lambda metadata: setattr(metadata, "planner_data", Trap()))
    save(tmp_path / "hostile-object", {"model": {"a": torch.ones(2)}, "thing": Trap()})
    (tmp_path / "empty").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    files = contents(source)
    new = tmp_path / "new"
    cases: dict[tuple[object, ...], str] = {
        (tmp_path / "nowhere", new): "is not a folder",
        (tmp_path / "empty", new): "has no .metadata",
        (tmp_path / "nowhere.safetensors", new): "nowhere.safetensors cannot be read",
        (uncovered, new): "model.layers.2.weight: 1 of 4 elements are in no chunk",
        (hostile, new): "asks for posix.system",
        (tmp_path / "extra", new, "--what", "model"): "model.a._extra_state is an object of the model",
        (tmp_path / "complex", new): "model.a is complex128, which safetensors do not have; leave it out",
        (tmp_path / "named", new): "would be named '__metadata__'",
        (tmp_path / "only", new, "--what", "model"): "has no tensor of a model",
        (tmp_path / "only", new, "--flat-to-nd"): "has no model, whose shapes are needed",
        (tmp_path / "flat", new, "--flat-to-nd"): "optim.state.a.exp_avg has 6 elements",
        (source, new, "--flat-to-nd"): "has no flat state",
        (made, new, "--flat-to-nd"): "--flat-to-nd is for checkpoints of DCP",
        (source, new, "--flat-to-nd", "--to", "safetensors"): "convert that to safetensors afterwards",
        (source, new, "--flat-to-nd", "--what", "model"): "takes neither --what nor --key-prefix",
        (source, new, "--shapes-from", source): "--shapes-from is for --flat-to-nd",
        (source, new, "--to", "dcp"): "is a checkpoint of DCP already",
        (made, new, "--to", "safetensors"): "is safetensors already",
        (source, new, "--to", "gguf"): "--to is safetensors or dcp",
        (source, new, "--what", "nothing"): "--what is model, optimizer or all",
        (source, new, "--key-prefix", "net."): "has no tensor of a model whose key begins with 'net.'",
        (source, new, "--exclude", "*"): "has nothing that would be converted",
        (made, new, "--exclude", "*"): "has nothing that would be converted",
        (source, new, "--exclude", "*.weight", "--exclude", "x"): "--exclude that matches nothing: x.",
        (made, new, "--exclude", "x"): "--exclude that matches nothing: x.",
        (tmp_path / "flat", new, "--flat-to-nd", "--exclude", "x"): "--exclude that matches nothing: x.",
        (source, ""): "DST is empty",
        (source, new, "--max-memory", "1"): "--max-memory is at least 256 bytes for 4 threads",
        (source, new, "--shard-size", "large"): "'large' is not a size",
        (source, new, "--json"): "--json is for --dry-run",
        (source, made): "made exists; give a name that is not taken",
        (source, source / "new"): "lies inside of",
        (made, made / "new"): "lies inside of",
        (made, f"file://{made}/new"): "lie inside of each other",
        (source, tmp_path / "no" / "new"): "is not a folder; make it first",
        (source, "unheard-of://x"): "cannot be opened",
    }
    for case, match in cases.items():
        assert_one_line(run_here("convert", *case), match)
    assert_one_line(run_here("convert", source, made), "made exists")
    assert not (tmp_path / "trap").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert contents(source) == files
    left = run_here("convert", tmp_path / "extra", new, "--exclude", "*_extra_state")
    assert left.returncode == 0, left.stderr


def tensor(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


_NOT_WHOLE = "is not a whole safetensors file"
HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "not-json": (b"{'a'", b"", _NOT_WHOLE),
    "not-utf8": (b"\xff\xfe{}", b"", _NOT_WHOLE),
    "nested": (b"[" * 100_000, b"", _NOT_WHOLE),
    "a-list": ([], b"", _NOT_WHOLE),
    "repeated": (b'{"a": {}, "a": {}}', b"", _NOT_WHOLE),
    "no-fields": ({"a": {}}, b"", _NOT_WHOLE),
    "negative": ({"a": tensor(0, 8, [-2])}, b"", _NOT_WHOLE),
    "not-whole": ({"a": tensor(0, 8, [True])}, b"", _NOT_WHOLE),
    "three-offsets": ({"a": tensor(0, 8) | {"data_offsets": [0, 8, 9]}}, b"", _NOT_WHOLE),
    "unknown-dtype": ({"a": tensor(0, 8, dtype="F6_E2M3")}, bytes(8), _NOT_WHOLE),
    "odd-float4": ({"a": tensor(0, 8, [3], "F4")}, bytes(8), _NOT_WHOLE),
    "short": ({"a": tensor(0, 7)}, bytes(7), _NOT_WHOLE),
    "backwards": ({"a": tensor(8, 0)}, bytes(8), _NOT_WHOLE),
    "overlapping": ({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12), _NOT_WHOLE),
    "a-gap": ({"a": tensor(0, 8), "b": tensor(9, 17)}, bytes(17), _NOT_WHOLE),
    "cut-short": ({"a": tensor(0, 8)}, bytes(7), _NOT_WHOLE),
    "too-long": ({"a": tensor(0, 8)}, bytes(9), _NOT_WHOLE),
    "metadata": ({"__metadata__": {"a": 3}}, b"", _NOT_WHOLE),
    "other-dimensions": (
        {"__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0, 0]}}'}, "a": tensor(0, 8)},
        bytes(8),
        "has DCP_SHARDING_INFO that do not fit (offsets of other dimensions)",
    ),
    "no-offsets": (
        {"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "a": tensor(0, 8)},
        bytes(8),
        "has DCP_SHARDING_INFO that do not fit (KeyError: 'a')",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_wrong(tmp_path: Path, name: str) -> None:
    header, data, match = HEADERS[name]
    path = safetensors_file(tmp_path / "source" / "model.safetensors", header, data)
    for source in (path, path.parent):
        assert_one_line(run_here("convert", source, tmp_path / "new"), "model.safetensors", match)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_lengths_of_headers_that_are_wrong(tmp_path: Path) -> None:
    for number, length in enumerate((0, 1, 3, 10**8 + 1, 2**63)):
        path = safetensors_file(tmp_path / f"{number}.safetensors", {}, length=length)
        assert_one_line(run_here("convert", path, tmp_path / "new"), "is not a whole safetensors file")
    (tmp_path / "short.safetensors").write_bytes(b"\0\0")
    assert_one_line(run_here("convert", tmp_path / "short.safetensors", tmp_path / "new"), "is not a whole")


def test_folders_that_are_wrong(source: Path, tmp_path: Path) -> None:
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


# Other places, and memory --------------------------------------------------------------------------------------------


def test_urls(source: Path, tmp_path: Path) -> None:
    assert run_here("convert", f"file://{source}", "memory://converted").returncode == 0
    found = sorted(file.rpartition("/")[2] for file in fsspec.filesystem("memory").ls("/converted", detail=False))
    assert found[-2:] == ["optimizer.json", "optimizer.safetensors.index.json"]
    assert run_here("convert", "memory://converted", tmp_path / "back").returncode == 0
    assert_same(open_checkpoint(tmp_path / "back"), open_checkpoint(source))
    assert_one_line(run_here("convert", source, "memory://converted"), "exists")
    assert run_here("diff", "memory://converted", source).returncode == 0
    one = "memory://converted/model-00001-of-00001.safetensors"
    assert run_here("convert", one, tmp_path / "one").returncode == 0
    assert set(open_checkpoint(tmp_path / "one").tensors) == {"model.layers.2.weight", "model.layers.10.weight"}
