"""Training that is killed at random lines, on one rank and on two, is recovered and ends as training in peace does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = int(os.environ.get("KILLS", "8"))
"""Random programs on one rank, each killed once or twice; a quarter as many on two."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_that_is_killed_ends_as_training_in_peace(ranks: int) -> None:
    last = max(1, PROGRAMS // ranks**2)
    command = [sys.executable, "-m", "tests.recovering", str(ranks), "0", str(last)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
