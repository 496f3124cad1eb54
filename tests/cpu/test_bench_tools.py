"""The bench of the checkpoint tools runs, with small sizes; its figures are for people, not for tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_bench_of_the_checkpoint_tools(tmp_path: Path) -> None:
    flags = ["--gigabytes", "0.002", "--files", "2", "--layers", "2", "--repeats", "1", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "fsdp_offload.bench", "tools", *flags, "--keep-caches"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    machine, *figures = map(json.loads, output.splitlines())
    assert machine["bench"] == "machine"
    assert [line["way"] for line in figures] == [
        *("copy", "split", "cat", "verify", "verify, data", "verify, finite values", "load", "load, checked")
    ]
    assert all(line["cold_cache"] is False for line in figures)
    assert list(tmp_path.iterdir()) == []
