"""The benches run, with small sizes, and print JSON lines: their figures are for people, not for tests."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "records"),
    [
        (["link", "--gib", "0.25", "--repeats", "2"], ["machine", "link", "pin"]),
        (
            ["step", "--params", "3000000", "--tensors", "20", "--bucket-mib", "4", "--repeats", "2"],
            ["machine", "step"],
        ),
        (
            ["step", "--params", "300000", "--tensors", "7", "--equal", "--no-sharded", "--implementation", "foreach"],
            None,
        ),
    ],
    ids=["link", "step", "step-foreach"],
)
def test_bench(arguments, records):
    command = [sys.executable, "-m", "fsdp_offload.bench", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line)["bench"] for line in output.splitlines()]
    assert found == (records or ["machine", "step"])
