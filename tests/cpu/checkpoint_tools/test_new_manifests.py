"""Checkpoints that the tools write have a manifest of checksums, so that ``verify --data`` of them is complete."""

from pathlib import Path

import fsspec
import pytest
import torch

from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.stored.metadata import MANIFEST_FILE, parse_manifest
from checkpoint_tools.stored.opening import open_checkpoint
from tests.checkpoint_tools.checkpoints import run_here, save
from tests.checkpoint_tools.offline import DOWN, FUSED, rewritten, rule

RULES = "[[rule]]\nfused = '{p}gate_up.weight'\nparts = ['{p}gate.weight', '{p}up.weight']\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {FUSED: torch.arange(60_000.0).view(600, 100), DOWN: torch.ones(300, 40), "empty": torch.zeros(0, 3)}
    (tmp_path / "rules.toml").write_text(RULES)
    torch.save({"model": state}, tmp_path / "model.pt")
    return save(tmp_path / "source", {"model": state, "steps": {"taken": 7}})


def assert_has_manifest(folder: Path) -> None:
    manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes())
    places = {(item.file, item.offset_bytes, item.length_bytes) for _, item in open_checkpoint(folder).items()}
    assert {(file, *item[:2]) for file, items in manifest.files.items() for item in items} == places
    assert manifest.why_not((folder / ".metadata").read_bytes()) is None
    assert check_structure(open_checkpoint(folder), 1)[0] == []


@pytest.mark.parametrize(
    "commands",
    [
        ["split source new --rules rules.toml"],
        ["split source parts --rules rules.toml", "merge parts new"],
        ["convert source files", "convert files new"],
        ["convert model.pt new"],
    ],
    ids=["split", "merge", "from safetensors", "from torch.save"],
)
def test_each_command_leaves_one(source: Path, tmp_path: Path, commands: list[str]) -> None:
    for command in commands:
        ran = run_here(*command.split(), cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
    new = tmp_path / "new"
    assert_has_manifest(new)
    metadata = bytearray((new / ".metadata").read_bytes())
    metadata[-20] ^= 1
    (new / ".metadata").write_bytes(metadata)
    assert run_here("verify", "new", "--data", cwd=tmp_path).returncode != 0


def test_behind_a_url(source: Path, tmp_path: Path) -> None:
    rewritten("split", source, "memory://manifest", rule())
    fsspec.filesystem("memory").get("/manifest", str(tmp_path / "new"), recursive=True)
    assert_has_manifest(tmp_path / "new")


def test_safetensors_have_none(source: Path, tmp_path: Path) -> None:
    assert run_here("convert", source, tmp_path / "files").returncode == 0
    assert not (tmp_path / "files" / MANIFEST_FILE).exists()
