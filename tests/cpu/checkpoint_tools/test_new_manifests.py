"""Checkpoints that the tools write have a manifest of checksums, so that ``verify --data`` of them is complete."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.stored.item_archive import open_item
from checkpoint_tools.stored.manifest import MANIFEST_FILE, Item, parse_manifest
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


def items_in(folder: Path) -> dict[str, set[Item]]:
    """As a manifest has them, read from the files themselves."""
    found: dict[str, set[Item]] = {}
    for _, item in open_checkpoint(folder).items():  # noqa: PERF102  # no dict: a key has many items
        with (folder / item.file).open("rb") as stream:
            content = stream.read()[item.offset_bytes : item.offset_bytes + item.length_bytes]
        (folder / "item").write_bytes(content)
        with (folder / "item").open("rb") as stream:
            crc = open_item(stream, len(content)).directory_crc
        found.setdefault(item.file, set()).add(Item(item.offset_bytes, item.length_bytes, crc))
    (folder / "item").unlink()
    return found


def assert_has_manifest(folder: Path) -> None:
    manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes())
    assert {file: set(items) for file, items in manifest.files.items()} == items_in(folder)
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


def test_after_a_run_that_was_interrupted(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first run has written, the second one reads back."""
    with monkeypatch.context() as patch:
        patch.setattr("checkpoint_tools.write.rewrite._fill", _interrupted(2))
        patch.setattr("checkpoint_tools.write.rewrite.unit_bytes_of", lambda nbytes: 50_000)
        with pytest.raises(KeyboardInterrupt):
            rewritten("split", source, tmp_path / "new", rule(), threads=1)
        assert len((tmp_path / "new.partial" / "journal").read_text().splitlines()) > 2
        patch.undo()
        patch.setattr("checkpoint_tools.write.rewrite.unit_bytes_of", lambda nbytes: 50_000)
        rewritten("split", source, tmp_path / "new", rule(), threads=1)
    assert_has_manifest(tmp_path / "new")


def _interrupted(units: int) -> Callable[..., None]:
    from checkpoint_tools.write import rewrite

    fill = rewrite._fill

    def some(*args: object, **options: object) -> None:
        record, done = options["record"], []

        def counted(*unit: object) -> None:
            record(*unit)  # type: ignore[operator]
            done.append(unit)
            if len(done) == units:
                raise KeyboardInterrupt

        fill(*args, **{**options, "record": counted})  # type: ignore[arg-type]

    return some


def test_behind_a_url(source: Path, tmp_path: Path) -> None:
    rewritten("split", source, "memory://manifest", rule())
    fsspec.filesystem("memory").get("/manifest", str(tmp_path / "new"), recursive=True)
    assert_has_manifest(tmp_path / "new")


def test_safetensors_have_none(source: Path, tmp_path: Path) -> None:
    assert run_here("convert", source, tmp_path / "files").returncode == 0
    assert not (tmp_path / "files" / MANIFEST_FILE).exists()
