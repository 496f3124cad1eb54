"""Splitting 80 MB: killed in the middle, on a disk that is too small, in little memory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.exchange.request import Request, complete
from checkpoint_tools.stored.reading import open_checkpoint
from checkpoint_tools.write import rewrite
from checkpoint_tools.write.execute import perform
from checkpoint_tools.write.partial import open_partial
from checkpoint_tools.write.rewrite_plan import unit_bytes_of, units_of
from checkpoint_tools.write.sinks import LocalSink
from tests.checkpoint_tools.checkpoints import ROOT, run_here, run_tool, save
from tests.checkpoint_tools.offline import (
    DOWN,
    FUSED,
    assert_same,
    check_zip_files,
    rule,
)
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line
from tests.cpu.checkpoint_tools.test_offline_command_line import RULES, contents


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 80 MB, which are 20 units."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "rules.toml").write_text(RULES)
    state = {FUSED: torch.randn(5000, 1000), DOWN: torch.randn(2500, 1000), f"x.{FUSED}": torch.randn(5000, 1000)}
    save(folder / "source", {"model": state, "optim": {"state": {FUSED: {"exp_avg": torch.randn(5000, 1000)}}}})
    assert run_tool("split", folder / "source", "made", "--rules", "rules.toml", cwd=folder).returncode == 0
    return folder


def started(folder: Path, cwd: Path, *options: str) -> subprocess.Popen[bytes]:
    """Splitting in a process of its own, in another folder, so that the new one has the same name."""
    tool = [sys.executable, "-m", "checkpoint_tools"]
    return subprocess.Popen(
        [*tool, "split", folder / "source", "made", "--rules", folder / "rules.toml", *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def lines_in(journal: Path) -> int:
    return len(journal.read_bytes().splitlines()) if journal.exists() else 0


def test_checksums_of_items_that_several_units_fill(large: Path) -> None:
    check_zip_files(open_checkpoint(large / "made"))


@pytest.mark.usefixtures("interrupts_reach_children")
@pytest.mark.parametrize(("units", "how"), [(0, signal.SIGKILL), (7, signal.SIGKILL), (3, signal.SIGINT)])
def test_the_same_command_goes_on_after_a_kill(large: Path, tmp_path: Path, units: int, how: signal.Signals) -> None:
    journal = tmp_path / "made.partial" / "journal"
    process = started(large, tmp_path, "--threads", "2")
    while lines_in(journal) <= units and process.poll() is None:
        pass
    process.send_signal(how)
    _, errors = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), errors
    assert how != signal.SIGINT or b"run the same command again" in errors
    assert not (tmp_path / "made").exists()
    done = lines_in(journal)
    assert done > units
    with journal.open("a") as stream:
        stream.write("[3, [[")  # as if it had been killed in mid-line
    again = started(large, tmp_path, "--threads", "3", "--max-memory", "5MiB")
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert contents(tmp_path / "made") == contents(large / "made")
    assert not journal.exists()


def test_what_is_recorded_is_not_done_again(large: Path, tmp_path: Path) -> None:
    journal = tmp_path / "made.partial" / "journal"
    process = started(large, tmp_path, "--threads", "1")
    while lines_in(journal) <= 3 and process.poll() is None:
        pass
    process.kill()
    process.communicate()
    file = tmp_path / "made.partial" / "checkpoint" / "__0_0.distcp"
    # Kept tensors come first; this one has more than two units.
    place = open_checkpoint(large / "made").tensors[f"model.{DOWN}"].chunks[0].offset_bytes + 5000
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(b"kept")
    assert started(large, tmp_path).communicate()[1] == b""
    expected = bytearray(contents(large / "made")["__0_0.distcp"])
    assert expected[place : place + 4] != b"kept"
    expected[place : place + 4] = b"kept"
    assert contents(tmp_path / "made")["__0_0.distcp"] == expected


def test_a_kill_between_the_last_unit_and_the_end_of_a_file(large: Path, tmp_path: Path) -> None:
    """What is around the elements of an item that several units fill is written last of all."""
    checkpoint = open_checkpoint(large / "source")
    planned = rewrite.plan(checkpoint, "split", complete(checkpoint, "split", Request([rule()], {})))
    units = units_of(planned, unit_bytes_of(planned.nbytes))
    options: dict[str, Any] = {"threads": 1, "max_memory_bytes": 1 << 24, "advance": lambda done: None}
    with open_partial(tmp_path / "made", {}) as partial:
        sink = LocalSink(partial.files)
        sink.prepare(planned.file_bytes())

        def record(unit: int, filled: Any) -> None:
            partial.record(unit, filled)
            if unit == len(units) - 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            perform(checkpoint, planned, units, sink, done={}, record=record, **options)
    with open_partial(tmp_path / "made", {}) as partial:
        assert len(partial.done) == len(units)
        sink = LocalSink(partial.files)
        perform(checkpoint, planned, units, sink, done=partial.done, record=partial.record, **options)
        made = partial.files / "__0_0.distcp"
        assert made.read_bytes() == (large / "made" / "__0_0.distcp").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("this user cannot mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_found_before_anything_is_written(large: Path, small_disk: Path) -> None:
    run = run_here("split", large / "source", small_disk / "new", "--rules", large / "rules.toml")
    assert_one_line(run, "are needed, and 20.0 MiB are free; make room")
    assert list(small_disk.iterdir()) == []


def test_a_limit_of_the_size_of_files(large: Path, tmp_path: Path) -> None:
    command = f"ulimit -f 30000; exec {sys.executable} -m checkpoint_tools split {large}/source new"
    run = subprocess.run(
        ["bash", "-c", f"{command} --rules {large}/rules.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_one_line(run, "cannot be written: File too large")
    assert list(tmp_path.iterdir()) == []


MEASURED = """
import sys
from pathlib import Path
import torch
import checkpoint_tools.write.execute
from checkpoint_tools.__main__ import app

def peak_mib():  # of this process alone; ru_maxrss begins with what the process before it had
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024

torch.ones(1000, 1000).t().contiguous()
before = peak_mib()
app(sys.argv[1:], standalone_mode=False)
print("grew", peak_mib() - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """One tensor of 320 MB, whose parts take turns in each row: the most that has to be moved about."""
    save(tmp_path / "source", {FUSED: torch.arange(80_000_000, dtype=torch.int32).view(200, 400_000)})
    (tmp_path / "rules.toml").write_text(RULES + "layout = 'interleaved'\ndim = 1\n")
    for way, old, new in (("split", "source", "split"), ("merge", "split", "merged")):
        run = subprocess.run(
            [sys.executable, "-c", MEASURED, way, old, new, "--rules", "rules.toml", "--max-memory", "64MiB"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(run.stdout.split()[-1]) < 64 + 36, run.stdout  # 36: stacks, the plan, allocators' slack
    assert_same(open_checkpoint(tmp_path / "merged"), open_checkpoint(tmp_path / "source"))
