"""The benches run, with small sizes, and print JSON lines: their figures are for people, not for tests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "examples.benchmarks", *arguments.split()]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


STEP = ["machine", "step"]
FRONT = ["machine", *["front"] * 4, *["front-cost"] * 4]


@pytest.mark.parametrize(
    ("arguments", "records"),
    [
        ("link --gib 0.25 --repeats 2", ["machine", "link", *["small-copies"] * 3, "pin"]),
        ("front --model lean-tiny --tokens 64 --warm 4 --iterations 2 --host --policies iteration,parameters", FRONT),
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


def test_a_row_of_the_front_has_its_memory_its_queues_and_plain_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = f"--model llama-tiny --tokens 64 --warm 4 --iterations 2 --policies iteration --trace {tmp_path}"
    lines = bench(f"front {options}")
    rows = [line for line in lines if line["bench"] == "front"]
    assert [row["copy_queues"] for row in rows] == ["default", "32", "default"]
    assert all(row["same_losses"] and row["same_parameters"] for row in rows)
    assert all(0 < row["peak_bytes"] <= row["reserved_bytes"] and "freed_bytes" in row for row in rows)
    assert all(row["idle_ms"] > row["longest_idle_ms"] / 3 > 0 for row in rows)
    assert rows[0]["link"]["two_way_gb_per_s"] > 1
