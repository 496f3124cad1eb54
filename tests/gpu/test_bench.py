"""The benches run, with small sizes, and print JSON lines: their figures are for people, not for tests."""

import json
import subprocess
import sys
from typing import Any

import pytest


def bench(arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "examples.benchmarks", *arguments.split()]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


STEP = ["machine", "step"]


@pytest.mark.parametrize(
    ("arguments", "records"),
    [
        ("link --gib 0.25 --repeats 2", ["machine", "link", *["small-copies"] * 3, "pin"]),
        ("step --params 3000000 --tensors 20 --bucket-mib 4 --repeats 2", STEP),
        ("step --params 300000 --tensors 7 --equal --no-sharded --implementation foreach", STEP),
        ("step --params 3000000 --bucket-mib 4 --repeats 2 --masters fp32", STEP),
        ("step --params 300000 --tensors 9 --repeats 2 --masters remainder", STEP),
    ],
)
def test_bench(arguments: str, records: list[str]) -> None:
    assert [record["bench"] for record in bench(arguments)] == records


def test_transformer_engine_keeps_three_states() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    _, record = bench("step --optimizer te --params 3000000 --tensors 20 --repeats 2 --bucket-mib 4")
    assert (record["optimizer"], record["state_bytes_per_param"]) == ("te", 12)


@pytest.mark.parametrize("flags", ["", "--no-sharded"], ids=["sharded", "plain"])
def test_sleep(flags: str) -> None:
    _, resident, home = bench(f"sleep --gigabytes 0.2 --tensors 9 --repeats 2 {flags}")
    assert [record["state"] for record in (resident, home)] == ["resident", "home"]
    param_bytes = 4 * home["params"]
    assert [home["moved_bytes"], resident["moved_bytes"]] == pytest.approx([param_bytes, 3 * param_bytes], rel=0.02)
    assert all(record["freed_bytes"] >= record["moved_bytes"] for record in (resident, home))
