"""The benchmark ``front`` trains the models it names, each row in a process of its own, and compares it with plain."""

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from examples.benchmarks import front
from examples.benchmarks.front import Row, compare, row_of
from examples.benchmarks.front_row import HostTimes
from examples.benchmarks.models import MODELS, Trained, build
from examples.benchmarks.timeline import read_trace
from fsdp_offload.device.copy_queues import VARIABLE

COMMON = Row(
    name="plain",
    policy=None,
    listener="",
    model="lean-tiny",
    tokens=24,
    recomputed=None,
    dtype="fp32",
    masters="none",
    lr=1e-4,
    batch=1,
    accumulate=1,
    warm=1,
    iterations=1,
    host=False,
    link=False,
    trace="",
    ranks=1,
)
SMALL = ["--tokens", "24", "--warm", "3", "--iterations", "2"]

# Models ---------------------------------------------------------------------------------------------------------------

TINY = [name for name in MODELS if name.endswith("-tiny")]


def gradients_of(trained: Trained) -> list[torch.Tensor]:
    tokens = torch.randint(trained.vocabulary, (2, 24), generator=torch.Generator().manual_seed(7))
    loss = trained.loss(tokens)
    loss.backward()
    return [loss.detach(), *(param.grad.to_local() for param in trained.model.parameters())]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each forward of a block, also within the backward."""
    found: list[str] = []
    call = nn.functional.scaled_dot_product_attention  # once in a block

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append("block")
        return call(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    return found


@pytest.mark.parametrize("name", TINY)
def test_recomputed_blocks_run_twice_and_give_the_same_bits(name: str, mesh: DeviceMesh, forwards: list[str]) -> None:
    results = {}
    for recomputed, ran in ((0, 3), (2, 5), (None, 6)):
        forwards.clear()
        trained = build(name, mesh, dtype=torch.float32, tokens=24, recomputed=recomputed)
        results[recomputed] = gradients_of(trained)
        assert len(forwards) == ran
    plain = results.pop(0)
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in plain)
    assert all(all(map(torch.equal, plain, other)) for other in results.values())


@pytest.mark.parametrize("name", [name for name in TINY if not name.startswith("lean")])
def test_buffers_have_the_values_and_embeddings_the_ties_of_transformers_own(name: str, mesh: DeviceMesh) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shape = MODELS[name]
    usual = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    built = build(name, mesh, dtype=torch.bfloat16, tokens=24, recomputed=0).model
    buffers = dict(built.named_buffers())
    assert buffers.keys() == dict(usual.named_buffers()).keys()
    for key, buffer in usual.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    assert [key for key, _ in built.named_parameters()] == [key for key, _ in usual.named_parameters()]
    assert built.get_input_embeddings().weight is built.get_output_embeddings().weight
    assert {param.dtype for param in built.parameters()} == {torch.bfloat16}


# Rows -----------------------------------------------------------------------------------------------------------------


def test_names_of_rows() -> None:
    row = row_of("iteration:1.5GiB:bucket_bytes=64MiB:serial=1", COMMON)
    asked = {"overlap": "iteration", "device_bytes": 3 << 29, "bucket_bytes": 64 << 20, "serial": True}
    assert row.policy is not None
    assert asked.items() <= row.policy.items()
    assert not row.policy["parameters"]
    assert row_of("parameters", COMMON).policy["parameters"]  # type: ignore[index]
    for text, count in (("plain:recompute=4", 4), ("step:640MiB:recompute=all", None), ("plain", COMMON.recomputed)):
        assert row_of(text, COMMON).recomputed == count
    for text in ("iterations", "plain:640MiB", "plain:commits", "step:device_byte=1", "step:few"):
        with pytest.raises(typer.BadParameter, match=re.escape(text)):
            row_of(text, COMMON)


def test_the_faster_plain_row_counts_and_freed_bytes_are_compared_with_what_can_hide() -> None:
    same: dict[str, Any] = {"losses": [["0x1p+1"]], "parameters": ["a"], "backward_ms": 200.0, "all_ms": [300.0]}
    state = {"host_state_bytes": 30e9, "loaded_bytes": 20e9, "stored_bytes": 22e9}
    link = {"two_way_gb_per_s": 100.0}
    found = [
        {"row": "plain", "ms": 320.0, "peak_bytes": 50e9, **same, "all_ms": [280.0, 320.0, 400.0], "link": link},
        {"row": "iteration", "ms": 462.0, "peak_bytes": 42e9, **same, **state, "all_ms": [420.0, 462.0]},
        {"row": "step", "error": "rank 0 ended with -9: "},
        {"row": "forward", "ms": 300.0, "peak_bytes": 45e9, **same, "losses": [["0x1p+2"]], "parameters": ["b"]},
        {"row": "plain", "ms": 300.0, "peak_bytes": 50e9, **same},
    ]
    compare(found)
    iteration, forward = found[1], found[3]
    assert iteration["over_plain"] == pytest.approx(1.54)
    assert iteration["least_over_plain"] == pytest.approx(1.5)
    assert iteration["freed_bytes"] == 8e9
    assert iteration["freed_of_hideable"] == pytest.approx(0.8)  # of 200 ms at 50 GB/s, which is less than 30 GB
    assert iteration["link_bound_ms"] == pytest.approx(420)
    assert iteration["over_bound"] == pytest.approx(1.1)
    assert (iteration["same_losses"], iteration["same_parameters"]) == (True, True)
    assert (forward["same_losses"], forward["same_parameters"]) == (False, False)
    assert found[2].keys() == {"row", "error"}


def test_our_time_is_that_of_outer_calls_less_the_steps_of_the_class_in_them() -> None:
    def class_step() -> None:
        time.sleep(0.02)

    def hook() -> None:
        time.sleep(0.01)
        timed_class_step()

    def step() -> None:
        time.sleep(0.01)
        timed_hook()

    times = HostTimes(SimpleNamespace())  # type: ignore[arg-type]
    timed_class_step = times._counted("class_step", class_step)
    timed_hook, timed_step = times._entered("hooks", hook), times._entered("step", step)
    threads = [threading.Thread(target=one) for one in (timed_step, timed_hook, timed_class_step)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = times.per_iteration(1, offloaded=True)
    assert found["hooks_calls"] == 1  # the hook in step() is part of that
    assert found["class_step_calls"] == 2
    assert 40 <= found["class_step_ms"] < 60
    assert 20 <= found["class_step_beside_ms"] < 40
    assert 30 <= found["ms"] < 50  # 20 in step() with its hook, 10 in the other hook


# Whole calls ----------------------------------------------------------------------------------------------------------


def measured(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[list[dict[str, Any]], list[str], str]:
    """All rows, the names of the lines about costs, and the table."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    front.main([*SMALL, *options])
    printed = capfd.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    rows = [line for line in lines if line["bench"] == "front"]
    return rows, [line["row"] for line in lines if line["bench"] == "front-cost"], printed.err


def test_each_row_trains_in_a_process_of_its_own_and_has_plain_bits(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture, policies = tmp_path / "front.svg", "iteration:bucket_bytes=65536:commits,parameters:deltas"
    options = ("--model", "llama-tiny", "--policies", policies, "--recompute", "1", "--host")
    rows, costs, table = measured(capfd, monkeypatch, *options, "--picture", str(picture), "--trace", str(tmp_path))
    names = ["plain", *policies.split(","), "plain"]
    assert [row["row"] for row in rows] == costs == names
    assert all(row["same_losses"] and row["same_parameters"] for row in rows)
    assert 0 < rows[2]["changed"] <= rows[2]["params"]
    assert len(rows[0]["losses"][0]) == 3 + 2
    assert len(set(rows[0]["losses"][0])) > 1
    assert rows[0]["ms"] > rows[0]["backward_ms"] > 0
    state_bytes = 8 * rows[1]["params"]
    for row in rows[1:3]:
        assert row["host_state_bytes"] == state_bytes
        assert row["loaded_bytes"] > 0.5 * state_bytes
        ours = row["ours"]
        assert 1 < ours["updates_calls"] == ours["class_step_calls"] <= row["updates"]
        assert 0 < ours["class_step_ms"] < ours["hooks_ms"] + ours["step_ms"]
    assert "host_parameter_bytes" in rows[2]
    assert rows[2]["host_parameter_bytes"] == 4 * rows[2]["params"]
    assert all(read_trace(tmp_path / f"{name.replace(':', '-')}-0.json.gz")["traceEvents"] for name in names)
    header, *shown = table.splitlines()
    assert {"peak GB", "res GB", "freed GB"} <= set(re.split(r"  +", header.strip()))
    assert [line.split()[0] for line in shown[:4]] == names
    assert all(line.endswith("equal") for line in shown[:4])
    text = picture.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    (tmp_path / "front.json").write_text("\n".join(json.dumps(row) for row in rows))
    front.main(["--record", str(tmp_path / "front.json"), "--picture", str(tmp_path / "again.svg")])
    drawn = [re.findall(r"<!-- (.*) -->", one) for one in (text, (tmp_path / "again.svg").read_text(encoding="utf-8"))]
    assert drawn[0] == drawn[1]
    labels = {"without offload", "GB freed: plain's peak less the row's"}
    assert {*(name for name in names if not name.startswith("plain")), *labels} <= set(drawn[0])


def test_several_ranks_and_a_row_that_fails(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--model", "lean-tiny", "--ranks", "2", "--accumulate", "2", "--no-again", "--policies")
    monkeypatch.setenv(VARIABLE, "8")  # which no row inherits
    rows, costs, table = measured(capfd, monkeypatch, *options, "iteration step:host_limit_bytes=1000")
    assert costs == ["plain", "iteration"]
    assert [row.get("copy_queues") for row in rows] == ["default", "default", None]
    _, iteration, failed = rows
    assert iteration["same_losses"]
    assert iteration["same_parameters"]
    one, other = iteration["losses"]
    assert len(one) == len(other) == 2 * (3 + 2)
    assert one != other  # other tokens
    assert len(set(iteration["parameters"])) == 2  # other shards
    assert "MemoryError: " in failed["error"]
    assert "host_limit_bytes" in table


def test_options_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.BadParameter, match="there are llama-3b"):
        front.main(["--model", "llama-4b"])
    with pytest.raises(typer.BadParameter, match="a number of blocks; got some"):
        front.main(["--recompute", "some"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="leave torchrun out, and say --ranks N"):
        front.main(["--model", "lean-tiny"])
