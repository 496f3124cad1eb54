"""The commands as people use them: from a shell, with errors in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint_tools.core.errors import NEED_EXTRA
from tests.checkpoint_tools.checkpoints import ROOT, STATE, changed, run_here, run_tool, save, save_on_two_ranks

Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "checkpoint", STATE)


def run_all(*commands: tuple[object, ...]) -> list[Run]:
    return [run_here(*command) for command in commands]


def assert_one_line(run: Run, *matches: str, code: int = 2) -> None:
    assert run.returncode == code, run.stdout + run.stderr
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: ")
    for match in matches:
        assert match in lines[0]


# inspect -------------------------------------------------------------------------------------------------------------


def test_inspect(saved: Path) -> None:
    everything, groups, some, as_json = run_all(
        ("inspect", saved, "--files"),
        ("inspect", saved, "--groups"),
        ("inspect", f"file://{saved}", "model.*"),
        ("inspect", saved, "--json"),
    )
    assert [run.returncode for run in (everything, groups, some, as_json)] == [0] * 4
    assert "model.layers.10.weight" in everything.stdout
    assert "__0_0.distcp" in everything.stdout
    assert "optim exp_avg" in groups.stdout
    assert "layers.10" not in groups.stdout
    assert "model.layers.10.weight" in some.stdout
    assert "optim" not in some.stdout
    assert len(json.loads(as_json.stdout)["keys"]) == 9
    assert everything.stderr == as_json.stderr == ""


@pytest.mark.distributed
def test_tiling_and_diff_on_two_ranks(tmp_path: Path) -> None:
    rows, columns = save_on_two_ranks(tmp_path)
    picture, as_json, same, nothing, of_an_object = run_all(
        ("inspect", rows, "--tiling", "model.fused"),
        ("inspect", columns, "--tiling", "model.fused", "--json"),
        ("diff", rows, columns),
        ("inspect", rows, "--tiling", "model.nothing"),
        ("verify", rows, "--finite", "--threads", 1),
    )
    assert "model.fused: 7 × 6 of float32 in 2 chunks" in picture.stdout
    assert "4, 0     3 × 6  __1_0.distcp" in picture.stdout
    assert [chunk["offsets"] for chunk in json.loads(as_json.stdout)["chunks"]] == [[0, 0], [0, 3]]
    assert (same.returncode, same.stdout) == (0, "the same: 3 keys, bit by bit\n")
    assert_one_line(nothing, "model.nothing is not in the checkpoint")
    assert of_an_object.returncode == 0


# verify --------------------------------------------------------------------------------------------------------------


def test_verify_what_is_whole(saved: Path) -> None:
    run = run_tool("verify", saved, "--finite")
    assert (run.returncode, run.stderr) == (0, "")
    assert "whole (7 tensors, 2 objects, " in run.stdout
    assert "checked: structure, files, finite values" in run.stdout


def test_verify_what_is_not(saved: Path, tmp_path: Path) -> None:
    bad = save(tmp_path / "bad", {"x": torch.tensor([torch.nan]), "y": torch.zeros(3)})
    cut = shutil.copytree(saved, tmp_path / "cut")
    with (cut / "__0_0.distcp").open("r+b") as stream:
        stream.truncate(100)
    finite, cut_short, as_json = run_all(("verify", bad, "--finite"), ("verify", cut), ("verify", cut, "--json"))
    assert [run.returncode for run in (finite, cut_short, as_json)] == [1] * 3
    assert "x: 1 of 1 values are not finite" in finite.stdout
    assert "1 problem (" in finite.stdout
    assert "__0_0.distcp: has 100 bytes of" in cut_short.stdout
    found = json.loads(as_json.stdout)
    assert (found["whole"], found["problems"][0]["where"]) == (False, "__0_0.distcp")


# diff ----------------------------------------------------------------------------------------------------------------


def test_diff(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"x": torch.zeros(4), "y": torch.ones(2), "lr": 0.1})
    b = save(tmp_path / "b", {"x": torch.tensor([0.0, 0.25, 0, 0]), "y": torch.ones(2), "z": torch.ones(1), "lr": 0.1})
    different, same, close, as_json = run_all(
        ("diff", a, b), ("diff", a, b, "y", "lr"), ("diff", a, b, "x", "--atol", 0.25), ("diff", a, b, "--json")
    )
    assert [run.returncode for run in (different, same, close, as_json)] == [1, 0, 0, 1]
    assert "1 of 4 differ" in different.stdout
    assert "0.25" in different.stdout
    assert "only in B" in different.stdout
    assert different.stdout.endswith("different: 2 of 4 keys\n")
    assert same.stdout == "the same: 2 keys, bit by bit\n"
    assert close.stdout == "the same: 1 key, within the tolerance\n"
    assert [found["key"] for found in json.loads(as_json.stdout)["differences"]] == ["x", "z"]


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors_are_one_line(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:-50])
    gone = shutil.copytree(saved, tmp_path / "gone")
    (gone / "__0_0.distcp").unlink()
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self) -> object:
            return os.system, (f"touch {trap}",)

    hostile = changed(saved, f"{tmp_path.name}-hostile", lambda metadata: setattr(metadata, "planner_data", Trap()))
    cases: dict[tuple[object, ...], str] = {
        ("inspect", tmp_path / "nowhere"): "is not a folder",
        ("verify", tmp_path / "empty"): "has no .metadata",
        ("diff", tmp_path / "cut", saved): "cannot be read as the metadata of a checkpoint",
        ("inspect", hostile): "asks for posix.system",
        ("verify", hostile): "asks for posix.system",
        ("diff", saved, hostile): "asks for posix.system",
        ("diff", saved, gone): "__0_0.distcp cannot be read",
        ("inspect", saved, "no.such.*"): "no key of",
        ("diff", saved, saved, "no.such.*"): "no key of either",
        ("inspect", saved, "model.*", "no.such.*"): "is like no.such.*;",
        ("diff", saved, saved, "model.*", "no.such.*"): "is like no.such.*;",
        ("verify", saved, "--max-memory", "127"): "--max-memory is at least 128 bytes for 4 threads, not 127",
        ("diff", saved, saved, "--max-memory", "511"): "--max-memory is at least 512 bytes for 2 threads, not 511",
        ("verify", saved, "--max-memory", "much"): "'much' is not a size",
        ("inspect", "unheard-of://x"): "cannot be opened",
    }
    for match, run in zip(cases.values(), run_all(*cases), strict=True):
        assert_one_line(run, match)
    assert not trap.exists()


def test_help_is_for_people() -> None:
    commands = ("inspect", "verify", "diff")
    above, *helps, none, wrong = run_all(
        ("--help",), *((command, "--help") for command in commands), (), ("inspect", "--no-such-option")
    )
    for command in commands:
        assert command in above.stdout
    for run, expected in zip(helps, ("--tiling KEY", "Exit code: 0 whole, 1", "Exit code: 0 the same"), strict=True):
        assert run.returncode == 0
        assert expected in " ".join(run.stdout.split())
        assert "CHECKPOINT" in run.stdout or " A " in run.stdout
    assert "Usage" in none.stdout + none.stderr
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize("package", ["typer", "rich", "safetensors"])
def test_the_extra_is_not_installed(package: str) -> None:
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['x', 'inspect', 'nowhere']; "
    code += "runpy.run_module('checkpoint_tools', None, '__main__')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.removeprefix("error: ") == f"{NEED_EXTRA}\n"
