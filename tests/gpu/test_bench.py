"""The benches run, with small sizes, and print JSON lines: their figures are for people, not for tests."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "records"),
    [
        (["link", "--gib", "0.25", "--repeats", "2"], ["machine", "link", *["small-copies"] * 3, "pin"]),
        (
            ["step", "--params", "3000000", "--tensors", "20", "--bucket-mib", "4", "--repeats", "2"],
            ["machine", "step"],
        ),
        (
            ["step", "--params", "300000", "--tensors", "7", "--equal", "--no-sharded", "--implementation", "foreach"],
            None,
        ),
        (["step", "--params", "3000000", "--bucket-mib", "4", "--repeats", "2", "--masters", "fp32"], None),
        (["step", "--params", "300000", "--tensors", "9", "--repeats", "2", "--masters", "remainder"], None),
    ],
    ids=["link", "step", "step-foreach", "step-masters", "step-remainders"],
)
def test_bench(arguments, records):
    command = [sys.executable, "-m", "examples.benchmarks", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line)["bench"] for line in output.splitlines()]
    assert found == (records or ["machine", "step"])


def test_transformer_engine_keeps_three_states():
    pytest.importorskip("transformer_engine.pytorch")
    flags = ["step", "--optimizer", "te", "--params", "3000000", "--tensors", "20", "--repeats", "2"]
    command = [sys.executable, "-m", "examples.benchmarks", *flags, "--bucket-mib", "4"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    record = json.loads(output.splitlines()[1])
    assert (record["optimizer"], record["state_bytes_per_param"]) == ("te", 12)
