"""The benchmarks read their options; where nothing can be measured they say so. Figures are drawn on the CPU too.

Iterations of any loop are recorded through hooks alone.
"""

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from examples.benchmarks import figures
from examples.benchmarks.figures import record_iterations
from examples.benchmarks.timeline import Lane, Timeline, read_trace, timeline_of
from examples.benchmarks.train import Bench
from fsdp_offload import OffloadPolicy, offload_optimizer
from tests.overlapping import Loop, adamw, same
from tests.policies import with_share

POLICY = OffloadPolicy(bucket_bytes=16 << 10)


OPTIONS = {
    "checkpoint": ["--params", "3000", "--tensors", "3", "--repeats", "1"],
    "link": ["--gib", "0.25", "--repeats", "2"],
    "sleep": ["--gigabytes", "0.01", "--no-sharded"],
    "step": ["--params", "3000", "--implementation", "foreach", "--masters", "remainder"],
    "train": ["--layers", "1", "--width", "128", "--only", "forward,iteration_always", "--no-clip"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_known_and_a_machine_without_an_accelerator_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    main = importlib.import_module(f"examples.benchmarks.{name}").main
    with pytest.raises(SystemExit, match="there is no accelerator here"):
        main(OPTIONS[name])
    assert not dist.is_initialized()  # tests with a mesh come later in this file
    with pytest.raises(typer.BadParameter, match="Input should be a valid"):
        main([OPTIONS[name][0], "many"])


def test_figures_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures.main([str(tmp_path), "--layers", "2", "--width", "128", "--length", "16", "--bucket-mib", "1"])
    assert {path.name for path in tmp_path.iterdir()} == {"memory.svg", "timeline.svg", "trace.json.gz"}
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert record["bench"] == "figures"
    assert record["profiled_ms"] > 0


def test_an_offloaded_loop_that_knows_nothing_of_it(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = offload_optimizer(torch.optim.AdamW(model.parameters(), fused=True), policy=POLICY)
    with record_iterations(model, optimizer, tmp_path / "new") as recording:
        for _ in range(3):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [one.name for one in recording.timeline.phases] == ["forward", "backward", "step"]
    lanes = {span.lane for span in recording.timeline.spans}
    assert {Lane.COMPUTE, Lane.LOAD, Lane.UPDATE, Lane.STORE} <= lanes
    for name in ("timeline.svg", "memory.svg"):
        assert ElementTree.parse(tmp_path / "new" / name).getroot().tag.endswith("svg")
    counters = [event for event in read_trace(tmp_path / "new" / "trace.json.gz")["traceEvents"] if event["ph"] == "C"]
    samples = [event for event in counters if event["name"] == "memory by place, MB"]
    assert len(samples) == 3 * 4  # forward, the model's output, its gradient, step
    assert samples[0]["args"]["parameters"] == pytest.approx(3 * 65 * 64 * 4 / 1e6)


def test_gradients_that_an_update_has_used_are_not_touched(mesh: DeviceMesh, tmp_path: Path) -> None:
    policy = OffloadPolicy(overlap="iteration", bucket_bytes=4096, device_bytes=5 * 4096)
    plain, offloaded = Loop(mesh, adamw, None), Loop(mesh, adamw, policy)
    plain.train(7)
    offloaded.train(4)
    with record_iterations(offloaded.model, offloaded.optimizer, tmp_path) as recording:
        offloaded.train(3, first=4)
    assert same(plain, offloaded)
    sharded = sum(param.to_local().numel() * 4 for param in offloaded.model.parameters())
    assert {one.places["parameters"] for one in recording.moments} == {sharded}
    names = [one.name for one in recording.moments]
    assert names[0] == "forward"
    assert names[-2:] == ["blocks.0 backward", "step"]


SIZES = {"bucket_bytes": 1 << 17, "passing": 5 << 17}


@pytest.fixture(scope="module")
def bench(mesh: DeviceMesh) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny ops: more threads only wait for each other
    yield Bench(torch.device(mesh.device_type), layers=2, width=128, sequences=1, length=8, vocabulary=256, clip=True)
    torch.set_num_threads(threads)


def begun_in(timeline: Timeline, lane: Lane) -> set[str]:
    """The phases in which a lane began anything."""
    begins = [span.begin_ms for span in timeline.spans if span.lane is lane]
    return {one.name for one in timeline.phases for begin in begins if one.begin_ms <= begin < one.end_ms}


@pytest.mark.parametrize(
    ("fields", "phases", "loaded_in", "updated_in"),
    [
        ({}, ["forward", "backward", "clip", "step"], {"step"}, {"step"}),
        ({"overlap": "iteration"}, ["forward", "backward", "step"], {"backward"}, {"backward"}),
    ],
    ids=["step", "iteration"],
)
def test_a_real_trace_says_when_each_bucket_was_loaded_updated_and_stored(
    fields: dict[str, Any], phases: list[str], loaded_in: set[str], updated_in: set[str], bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "a.trace.json.gz"
    with bench.settled(with_share(**SIZES, **fields)) as (optimizer, clip):
        bench.trace(optimizer, path, clip=clip)
    timeline = timeline_of(read_trace(path))
    assert [one.name for one in timeline.phases] == phases
    assert begun_in(timeline, Lane.LOAD) == loaded_in
    # In the step the optimizer also counts it.
    assert begun_in(timeline, Lane.UPDATE) == updated_in
    found = {lane: [bar.bucket for bar in timeline.bars(lane, 0.0)] for lane in (Lane.LOAD, Lane.UPDATE, Lane.STORE)}
    buckets = set(found[Lane.LOAD])
    assert len(buckets) > 20
    assert set(found[Lane.STORE]) == buckets
    updated_buckets = set(found[Lane.UPDATE]) - {None}  # of updates that joined several, the first
    assert 0 in updated_buckets <= set(range(max(buckets) + 1))  # some are kept
    assert len(updated_buckets) > len(buckets) / 4
    # The host does one thing at a time: an op and what it consists of are not both there.
    assert all(one.end_ms <= after.begin_ms for one, after in itertools.pairwise(timeline.spans))
