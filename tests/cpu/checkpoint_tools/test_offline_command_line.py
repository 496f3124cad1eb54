"""Splitting and merging from the shell: the plan, bad input in one line, kills, full disks, other places."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint_tools import preset, split_state_dict
from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.fuse.rules import preset_names
from checkpoint_tools.look.diff import diff
from checkpoint_tools.look.verify import check_finite
from checkpoint_tools.rewrite import rewrite
from checkpoint_tools.rewrite.save import held, partial_of
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import changed, run_here, run_tool, save
from tests.checkpoint_tools.offline import (
    DOWN,
    FUSED,
    GATE,
    UP,
    assert_same,
    rewritten,
    rule,
)
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line, run_all

RULES = """
[[rule]]
fused = '{p}gate_up.weight'
parts = ['{p}gate.weight', '{p}up.weight']
"""
STATE = {
    "model": {FUSED: torch.arange(24.0).view(8, 3), DOWN: torch.ones(3, 4)},
    "optim": {
        "state": {FUSED: {"exp_avg": torch.arange(24.0).view(8, 3) + 1, "step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.5, "params": [FUSED, DOWN]}],
    },
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(RULES)
    return save(tmp_path / "source", STATE)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# As people use it ----------------------------------------------------------------------------------------------------


def test_split_and_merge(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    (source / "README").write_text("ours")
    planned, as_json = run_all(
        ("split", source, tmp_path / "split", "--rules", tmp_path / "rules.toml", "--dry-run"),
        ("split", source, tmp_path / "split", "--rules", tmp_path / "rules.toml", "--dry-run", "--json"),
    )
    assert (planned.returncode, planned.stderr) == (0, "")
    assert f"model.{UP}" in planned.stdout
    assert "to be written: 1 tensor and 1 state tensor split, 192 bytes of " in planned.stdout
    assert "note: copied as it is: README" in planned.stdout
    found = json.loads(as_json.stdout)
    assert found["fusions"][0]["parts"][0] == {"key": f"model.{GATE}", "shape": [4, 3], "chunks": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.toml", "source"]
    split = run_tool("split", "source", "split", "--rules", "rules.toml", "--threads", 1, cwd=tmp_path)
    assert (split.returncode, split.stderr) == (0, "")
    assert split.stdout.splitlines()[-1].startswith("split: 1 tensor and 1 state tensor split, 192 bytes of ")
    merged = run_tool("merge", "split", "merged", "--rules", "rules.toml", cwd=tmp_path)
    assert merged.returncode == 0
    assert_same(open_checkpoint(tmp_path / "merged"), open_checkpoint(source))
    assert contents(source).items() >= before.items()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "rules.toml", "source", "split"]
    dcp_to_torch_save(tmp_path / "split", tmp_path / "split.pt")
    nested = torch.load(tmp_path / "split.pt")
    assert nested["optim"]["param_groups"] == [{"lr": 0.5, "params": [GATE, UP, DOWN]}]
    assert torch.equal(nested["optim"]["state"][UP]["exp_avg"], STATE["optim"]["state"][FUSED]["exp_avg"][4:])


def test_presets_values_and_exclusions(tmp_path: Path) -> None:
    fused, down = "layers.0.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc2.weight"
    model = {fused: torch.ones(8, 3), down: torch.ones(3, 4), f"vision.{fused}": torch.ones(3, 3)}
    source = save(tmp_path / "source", {"model": model})
    options = ("--preset", "megatron-swiglu", "--value", "tp_size=2", "--exclude", "*vision*")
    made = run_here("split", source, tmp_path / "made", *options)
    wrong = run_here("split", source, tmp_path / "wrong", "--preset", "megatron-swiglu", "--exclude", "*vision*")
    also = run_here("split", source, tmp_path / "also", *options[:-2])
    assert made.returncode == 0, made.stderr
    keys = set(open_checkpoint(tmp_path / "made").tensors)
    assert keys == {f"model.{fused}_w", f"model.{fused}_v", f"model.{down}", f"model.vision.{fused}"}
    assert_one_line(wrong, "needs the config value 'tp_size'; give it with --value tp_size=NUMBER. Given are: none")
    assert_one_line(also, f"model.vision.{fused}")


def test_help() -> None:
    split, merge = run_here("split", "--help"), run_here("merge", "--help")
    for run, expected in ((split, "run the same command again after a kill"), (merge, "the inverse of split")):
        assert run.returncode == 0
        text = " ".join(run.stdout.split())
        assert expected in text
        assert "Exit code: 0 done, 2 not done" in text
        assert "--max-memory SIZE" in text


# Bad input -----------------------------------------------------------------------------------------------------------


def test_errors_are_one_line_and_leave_nothing_behind(source: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "bad.toml").write_text("[[rule]]\nfused = 'x'\n")
    (tmp_path / "other.toml").write_text(RULES.replace("gate_up", "qkv"))
    (tmp_path / "valued.toml").write_text(RULES + "sizes = ['n', 'rest']\n")
    (tmp_path / "uneven.toml").write_text(RULES + "sizes = [5, 4]\n")
    cut = shutil.copytree(source, tmp_path / "cut")
    os.truncate(cut / "__0_0.distcp", 3000)
    gone = shutil.copytree(source, tmp_path / "gone")
    (gone / "__0_0.distcp").unlink()

    class Trap:
        def __reduce__(self) -> object:
            return os.system, (f"touch {tmp_path / 'trap'}",)

    hostile = changed(source, "hostile", lambda metadata: setattr(metadata, "planner_data", Trap()))
    newer = changed(source, "newer", lambda metadata: setattr(metadata, "version", "2.0"))
    other_dtype = changed(
        source,
        "other-dtype",
        lambda metadata: setattr(metadata.state_dict_metadata[f"model.{FUSED}"].properties, "dtype", torch.int32),
    )
    before = sorted(path.name for path in tmp_path.iterdir())
    new, rules = tmp_path / "new", ("--rules", tmp_path / "rules.toml")
    valued = ("--rules", tmp_path / "valued.toml")
    cases: dict[tuple[object, ...], str] = {
        (tmp_path / "nowhere", new, *rules): "is not a folder",
        (tmp_path / "taken", new, *rules): "has no .metadata",
        (cut, new, *rules): "cut is not whole: __0_0.distcp: has 3,000 bytes of",
        (gone, new, *rules): "is not whole: __0_0.distcp: is not there",
        (hostile, new, *rules): "asks for posix.system",
        (newer, new, *rules): "has version 2.0",
        (other_dtype, new, *rules): "is stored as torch.float32",
        (source, tmp_path / "taken", *rules): "taken exists; give a name that is not taken",
        (source, source, *rules): "source exists",
        (source, source / "new", *rules): "lies inside of",
        (source, tmp_path / "link" / "new", *rules): "lies inside of",
        (source, tmp_path / "no" / "new", *rules): "is not a folder; make it first",
        (source, f"file://{source}/new", *rules): "lie inside of each other",
        (source, "unheard-of://x", *rules): "cannot be opened",
        (source, new): "no rules; give --preset",
        (source, new, "--preset", "nothing"): "no preset 'nothing'; there are",
        (source, new, "--rules", tmp_path / "no.toml"): "error: " + f"{tmp_path / 'no.toml'}: No such file",
        (source, new, "--rules", tmp_path / "bad.toml"): "bad.toml",
        (source, new, "--rules", tmp_path / "other.toml"): "rules that match nothing: {p}qkv.weight",
        (source, new, "--rules", tmp_path / "uneven.toml"): "its parts have sizes [5, 4], 9 together",
        (source, new, *rules, *rules): "is matched by several rules",
        (source, new, *rules, "--value", "tp_size"): "--value is NAME=NUMBER",
        (source, new, *rules, "--max-memory", "much"): "'much' is not a size",
        (source, new, *rules, "--json"): "--json is for --dry-run",
        (source, new, *rules, "--exclude", "*"): "rules that match nothing",
        (source, new, *rules, "--exclude", "x*", "--exclude", "*down*"): "--exclude that matches nothing: x*.",
        (source, new, *rules, "--value", "tp=2"): "--value that no rule uses: tp. The rules name none",
        (source, new, *valued, "--value", "n=4", "--value", "m=1"): "no rule uses: m. The rules name n",
        (source, new, *valued): "give it with --value n=NUMBER",
        (source, new, "--rules", tmp_path): f"{tmp_path} is a folder; --rules takes a TOML or JSON file",
        (source, "", *rules): "DST is empty; give the name of a new folder",
        (source, new, *rules, "--max-memory", "255"): "--max-memory is at least 256 bytes for 4 threads, not 255",
    }
    for case, match in cases.items():
        assert_one_line(run_here("split", *case), match)
    assert_one_line(run_here("merge", source, new, *rules), "rules that match nothing")
    assert not (tmp_path / "trap").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert contents(source).keys() == {".metadata", "__0_0.distcp"}


def test_an_item_of_another_order_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {FUSED: torch.randn(300, 400).t()}})
    with pytest.raises(CheckpointError, match="can only be read as a whole"):
        rewritten("split", source, tmp_path / "new", rule(), max_memory_bytes=100_000)
    assert not (tmp_path / "new").exists()
    assert not partial_of(tmp_path / "new").exists()
    split = rewritten("split", source, tmp_path / "new", rule(), max_memory_bytes=8_000_000)
    assert_same(rewritten("merge", tmp_path / "new", tmp_path / "merged", rule()), open_checkpoint(source))
    assert split.tensors[f"model.{GATE}"].shape == (200, 300)


def test_two_at_the_same_place(source: Path, tmp_path: Path) -> None:
    arguments = ("split", source, tmp_path / "new", "--rules", tmp_path / "rules.toml")
    with held(tmp_path / "new.partial"):
        assert_one_line(run_tool(*arguments), "another process is writing to")
    assert run_here(*arguments).returncode == 0


def test_a_folder_of_somebody_else(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.tex").write_text("")
    run = run_here("split", source, tmp_path / "new", "--rules", tmp_path / "rules.toml")
    assert_one_line(run, "is there, and not of these tools")
    assert (tmp_path / "new.partial" / "thesis.tex").exists()


def test_a_source_that_is_written_to_meanwhile(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "seal", lambda *args, **options: os.utime(source / "__0_0.distcp", ns=(1, 1)))
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        rewritten("split", source, tmp_path / "new", rule())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.toml", "source"]


# Other places --------------------------------------------------------------------------------------------------------


def test_behind_a_url(source: Path, tmp_path: Path) -> None:
    rules = ("--rules", tmp_path / "rules.toml")
    run = run_here("split", f"file://{source}", f"file://{tmp_path}/split", *rules)
    assert (run.returncode, run.stderr) == (0, "")
    local = rewritten("split", source, tmp_path / "local", rule())
    assert_same(open_checkpoint(tmp_path / "split"), local)
    again = run_here("split", source, f"file://{tmp_path}/split", *rules)
    assert_one_line(again, "exists; give a name that is not taken")
    made = rewritten("merge", tmp_path / "split", "memory://merged", rule())
    assert_same(made, open_checkpoint(source))
    loaded: dict[str, Any] = {"model": {FUSED: torch.zeros(8, 3)}}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(loaded, checkpoint_id="memory://merged", no_dist=True)
    assert torch.equal(loaded["model"][FUSED], STATE["model"][FUSED])


def test_nothing_is_left_behind_a_url_after_an_error(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {FUSED: torch.randn(300, 400).t()}})
    with pytest.raises(CheckpointError, match="can only be read as a whole"):
        rewritten("split", source, "memory://nothing", rule(), max_memory_bytes=100_000)
    assert not fsspec.filesystem("memory").exists("/nothing")


# Memory --------------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_inside_too(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    with pytest.raises(CheckpointError, match="at least 64 bytes for 2 threads"):
        check_finite(checkpoint, ["__0_0.distcp"], threads=2, max_memory_bytes=63)
    with pytest.raises(CheckpointError, match="at least 256 bytes for 1 threads"):
        diff(checkpoint, checkpoint, [], max_memory_bytes=255, threads=1)


def test_help_and_errors_name_the_presets(tmp_path: Path) -> None:
    for command in ("split", "merge"):
        lines = [line.strip() for line in run_here(command, "--help").stdout.splitlines()]
        for name in preset_names():
            assert sum(line.startswith(f"{name}: ") for line in lines) == 1
        assert any(line.startswith("megatron-swiglu: ") and "SwiGLU" in line for line in lines)
    state = {"mlp.linear_fc1.weight": torch.ones(8, 4), "mlp.linear_fc2.weight": torch.ones(4, 4)}
    source = save(tmp_path / "source", state)
    wrong = run_here("split", source, tmp_path / "new", "--preset", "hf-gate-up")
    assert wrong.returncode == 2
    assert "presets that match some of them: megatron-swiglu" in wrong.stderr
    with pytest.raises(ValueError, match=r"presets that match some of them: megatron-swiglu$"):
        split_state_dict(state, None, preset("hf-gate-up"))
