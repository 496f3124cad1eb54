"""Splitting and converting: killed at each step, on a disk that is too small, and in little memory."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpoint_tools.saves import DOWN, FUSED, RULES, contents, save
from tests.checkpoint_tools.tool import assert_same, python, shown

KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoint_tools.__main__ import app
from checkpoint_tools.stored.items import ItemReader

left = int(sys.argv[1])

def counted(owner, name):
    run = getattr(owner, name)
    def either(*args, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*args, **options)
    setattr(owner, name, either)

counted(Path, "rename")
counted(Path, "unlink")
counted(os, "fsync")
counted(ItemReader, "bits")  # before each piece
app(sys.argv[2:])
"""


@pytest.mark.parametrize("command", [("split", "--rules", "rules.toml"), ("convert",)])
def test_a_kill_anywhere_leaves_the_whole_or_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    source = save(tmp_path / "source", {"model": {FUSED: torch.randn(50, 10), DOWN: torch.randn(25, 10)}})
    before = contents(source)
    name, *options = command
    shown(name, "source", "expected", *options, cwd=tmp_path)
    outcomes = []
    for number in (*range(8), *range(9, 40, 3)):
        killed = python("-c", KILLED, number, name, "source", "new", *options, cwd=tmp_path)
        assert killed.returncode in (0, -signal.SIGKILL), killed.stderr
        assert contents(source) == before
        is_there = (tmp_path / "new").exists()
        outcomes.append((killed.returncode, is_there))
        if not is_there:
            shown(name, "source", "new", *options, cwd=tmp_path)
        shown("diff", "new", "expected", cwd=tmp_path)
        shown("verify", "new", "--data", cwd=tmp_path)
        assert not (tmp_path / "new.partial").exists()
        shutil.rmtree(tmp_path / "new")
        if killed.returncode == 0:
            break
    assert (0, True) in outcomes
    assert outcomes.count((-signal.SIGKILL, False)) > 3


MEASURED = """
import sys
from pathlib import Path
import torch
import checkpoint_tools.rewrite
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
        command = (MEASURED, way, old, new, "--rules", "rules.toml", "--max-memory", "64MiB")
        ran = python("-c", *command, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        # The mapped files, one piece of at most 128 MiB as it is and as it is written, and what lies about.
        assert int(ran.stdout.split()[-1]) < 310 + 2 * 128 + 36, ran.stdout
    assert_same(tmp_path / "merged", tmp_path / "source")
