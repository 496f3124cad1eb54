"""Between one file of ``torch.save`` and a checkpoint of DCP: everything, nested as it was."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint_tools.checkpoints import run_here, save
from tests.checkpoint_tools.offline import same_bits
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line

STATE: dict[str, Any] = {
    "model": {"a.weight": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(2).bfloat16(), "none": torch.empty(0, 3)},
    "list": [torch.zeros(2), {"x": torch.ones(1)}, 5],
    "step": 3,
    "betas": (0.9, 0.99),
}


def flat(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {at: each for key, inner in items for at, each in flat(inner, (*path, key)).items()}


def test_there_and_back(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    there = run_here("convert", tmp_path / "model.pt", tmp_path / "dcp")
    assert there.returncode == 0, there.stderr
    assert "4 values as a checkpoint of DCP" in there.stdout
    back = run_here("convert", tmp_path / "dcp", tmp_path / "back.pt", "--to", "torch")
    assert back.returncode == 0, back.stderr
    before, after = flat(STATE), flat(torch.load(tmp_path / "back.pt"))
    assert before.keys() == after.keys()
    assert all(same_bits(after[path], value) for path, value in before.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.pt", "dcp", "model.pt"]


def test_a_module_and_its_optimizer_load_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "model.pt")
    assert run_here("convert", tmp_path / "model.pt", tmp_path / "dcp").returncode == 0
    assert run_here("convert", tmp_path / "dcp", tmp_path / "back.pt", "--to", "torch").returncode == 0
    loaded = torch.load(tmp_path / "back.pt")
    other = nn.Linear(3, 2)
    other.load_state_dict(loaded["model"])
    again = torch.optim.AdamW(other.parameters(), lr=1.0)
    again.load_state_dict(loaded["optim"])
    assert torch.equal(again.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_file_without_checksums_is_taken_and_told_of(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    run = run_here("convert", tmp_path / "model.pt", tmp_path / "dcp")
    assert run.returncode == 0, run.stderr
    assert "model.pt cannot be compared with checksums: torch.serialization.set_crc32_options(False)" in run.stdout


def test_numbers_of_more_than_sixteen_bytes(tmp_path: Path) -> None:
    """As PCG64 of numpy has them."""
    state = {"a": torch.ones(1), "generator": ({"state": 2**128 - 1, "inc": -(2**127) - 1},)}
    torch.save(state, tmp_path / "model.pt")
    for command in (("model.pt", "dcp"), ("dcp", "back.pt", "--to", "torch")):
        run = run_here("convert", *(tmp_path / name for name in command[:2]), *command[2:])
        assert run.returncode == 0, run.stderr
    assert torch.load(tmp_path / "back.pt")["generator"] == state["generator"]


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.path}",)


def test_what_is_refused(tmp_path: Path) -> None:
    torch.save({"a": Trap(tmp_path / "trap")}, tmp_path / "trap.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK\3\4 nothing")
    large = save(tmp_path / "large", {"a": torch.ones(1 << 20)})
    hostile = save(tmp_path / "hostile", {"a": torch.ones(1), "b": Trap(tmp_path / "trap")})
    before = sorted(path.name for path in tmp_path.iterdir())
    new = tmp_path / "new.pt"
    cases: dict[tuple[object, ...], str] = {
        (tmp_path / "trap.pt", new): "has more than tensors and plain values, and is not loaded",
        (tmp_path / "list.pt", new): "has a list, and no state dict",
        (tmp_path / "damaged.pt", new): "is not what torch.save writes",
        (tmp_path / "nowhere.pt", new): "nowhere.pt is not there",
        (large, new, "--to", "torch", "--max-memory", "1MiB"): "4.0 MiB do not fit into --max-memory",
        (hostile, new, "--to", "torch"): "consists of more than tensors and plain values",
        (tmp_path / "list.pt", new, "--dtype", "bf16"): "between torch.save and DCP all is taken as it is",
        (large, "file:///tmp/x.pt", "--to", "torch"): "on this machine alone",
    }
    for arguments, message in cases.items():
        assert_one_line(run_here("convert", *arguments), message)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_nothing_stays_of_what_did_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    source = save(tmp_path / "dcp", STATE)

    def full(descriptor: int) -> None:
        del descriptor
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_one_line(run_here("convert", tmp_path / "model.pt", tmp_path / "new"), "No space left on device")
    assert_one_line(run_here("convert", source, tmp_path / "new.pt", "--to", "torch"), "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "model.pt"]


@pytest.mark.parametrize("pattern", ["model.*"])
def test_what_is_left_out(pattern: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    command = ("convert", source, tmp_path / "new.pt", "--to", "torch", "--exclude", pattern)
    assert run_here(*command).returncode == 0
    assert torch.load(tmp_path / "new.pt").keys() == STATE.keys() - {"model"}
