"""Converting 60 MB: killed in the middle, and in little memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint_tools.checkpoints import ROOT, run_here, run_tool, save
from tests.checkpoint_tools.offline import tiled
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line
from tests.cpu.checkpoint_tools.test_offline_command_line import contents
from tests.slow.checkpoint_tools.test_split_kills import MEASURED, lines_in


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 60 MB, which are 15 units."""
    folder = tmp_path_factory.mktemp("large")
    model = {"a": torch.randn(5000, 1000), "b": torch.randn(2500, 1000)}
    save(folder / "dcp", {"model": model, "optim": {"state": {"a": {"exp_avg": torch.randn(7500, 1000)}}}})
    assert run_here("convert", folder / "dcp", folder / "made", "--shard-size", "25MB").returncode == 0
    assert run_here("convert", folder / "made", folder / "back", "--shard-size", "25MB").returncode == 0
    return folder


@pytest.mark.usefixtures("interrupts_reach_children")
@pytest.mark.parametrize(("old", "expected", "how"), [("dcp", "made", signal.SIGKILL), ("made", "back", signal.SIGINT)])
def test_the_same_command_goes_on_after_a_kill(
    large: Path, tmp_path: Path, old: str, expected: str, how: signal.Signals
) -> None:
    journal = tmp_path / f"{expected}.partial" / "journal"
    command = [sys.executable, "-m", "checkpoint_tools", "convert", large / old, expected, "--shard-size", "25MB"]
    process = subprocess.Popen(
        [*command, "--threads", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while lines_in(journal) <= 4 and process.poll() is None:
        pass
    process.send_signal(how)
    _, errors = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), errors
    assert not (tmp_path / expected).exists()
    assert lines_in(journal) > 4
    other = run_here("convert", large / old, tmp_path / expected, "--shard-size", "1GB")
    assert_one_line(other, "was begun with another source, rules or version")
    again = run_tool(*map(str, command[3:]), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    made, whole = contents(tmp_path / expected), contents(large / expected)
    for files in (made, whole):  # the metadata name the folder in which they are, and the manifest has their hash
        for name in (".metadata", ".checksums"):
            files.pop(name, None)
    assert made == whole
    assert not journal.exists()


def test_memory_is_bounded(tmp_path: Path) -> None:
    """One tensor of 120 MB, stored by columns, and as flat ranges."""
    whole = torch.arange(30_000_000, dtype=torch.int32).view(15_000, 2000)
    columns = tiled(whole, [((0, at), (15_000, 1000)) for at in (0, 1000)])
    save(tmp_path / "source", {"model": {"a": columns}})
    flat = tiled(whole.view(-1), [((0,), (13_333_333,)), ((13_333_333,), (16_666_667,))])
    save(tmp_path / "flat", {"optim": {"state": {"a": {"exp_avg": flat}}}})
    del whole, columns, flat
    for arguments in (("source", "made"), ("made", "back"), ("flat", "nd", "--flat-to-nd", "--shapes-from", "source")):
        run = subprocess.run(
            [sys.executable, "-c", MEASURED, "convert", *arguments, "--max-memory", "32MiB"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(run.stdout.split()[-1]) < 32 + 36, run.stdout  # 36: stacks, the plan, allocators' slack
    assert run_here("diff", tmp_path / "source", tmp_path / "back").returncode == 0
