"""What ``bench train`` makes of a trace, and of its options, without an accelerator: figures come from one only.

The traces are small ones made by hand, in the form in which torch.profiler writes kernels and copies, and real ones of
the bench's own loop on the CPU.
"""

import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from matplotlib.image import imread

from examples.benchmarks.timeline import Lane, Phase, Span, Timeline, draw, read_trace, timeline_of
from examples.benchmarks.train import (
    SETTLE_ITERATIONS,
    Bench,
    chosen_policies,
    draw_all,
    measure,
    trace_path,
)
from fsdp_offload import OffloadPolicy
from tests.policies import with_share

COMPUTE, GATHER, REDUCE, LOAD, LOAD_TOO, UPDATE, STORE = 7, 13, 14, 20, 21, 22, 23  # streams
PYTHON, AUTOGRAD = 100, 101  # threads

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer. The parameters are on the CPU:UserWarning")


class Trace:
    """Written down in milliseconds; a trace has microseconds, and the device's clock is the host's."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlations = itertools.count(1)

    def range(self, name: str, begin: float, end: float, thread: int = PYTHON) -> None:
        self._add("user_annotation", name, thread, begin, end)
        # The same range as seen on the device, where it lasts as long as its kernels. Meanwhile the host does others.
        self._add("gpu_user_annotation", name, COMPUTE, begin + 17.4, end + 17.4)

    def runs(
        self,
        launch: float,
        stream: int,
        begin: float,
        end: float,
        *,
        name: str = "gemm",
        category: str = "kernel",
        thread: int = PYTHON,
    ) -> None:
        correlation = next(self._correlations)
        runtime = ("cuda_runtime", "cudaLaunchKernel") if correlation % 2 else ("cuda_driver", "cuLaunchKernelEx")
        self._add(*runtime, thread, launch, launch + 0.01, correlation=correlation)
        self._add(category, name, stream, begin, end, stream=stream, correlation=correlation)

    def copies(self, launch: float, stream: int, begin: float, end: float, thread: int = PYTHON) -> None:
        name = "Memcpy HtoD (Pinned -> Device)"
        self.runs(launch, stream, begin, end, name=name, category="gpu_memcpy", thread=thread)

    def _add(self, category: str, name: str, tid: int, begin: float, end: float, **args: Any) -> None:
        times = {"ts": begin * 1000, "dur": (end - begin) * 1000}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, **times, "args": args})

    def timeline(self) -> Timeline:
        others = [{"ph": "M", "name": "process_name", "pid": 0}, {"ph": "f", "cat": "ac2g", "id": 1, "ts": 0}]
        return timeline_of({"traceEvents": others + self.events[::-1]})  # the order in the file means nothing


def overlapping() -> Trace:
    """Three iterations of which the host launches each before the device has begun it; updates run in the forward."""
    trace = Trace()
    for number in range(3):
        host, device = 20 * number, 20 * number + 15
        trace.range("train forward", host, host + 2)
        trace.range("FSDP::all_gather (blocks.0)", host, host + 0.5)
        trace.runs(host + 0.2, GATHER, device, device + 1, name="ncclDevKernel_AllGather_RING_LL")
        trace.runs(host + 1, COMPUTE, device + 1, device + 6)
        trace.range("train backward", host + 2, host + 4)
        trace.runs(host + 2.5, COMPUTE, device + 6, device + 16, thread=AUTOGRAD)
        trace.range("FSDP::post_backward_reduce (blocks.0)", host + 3, host + 4, AUTOGRAD)
        trace.runs(host + 3.1, REDUCE, device + 14, device + 15, name="cat", thread=AUTOGRAD)
        trace.range("fsdp_offload L4", host + 3.5, host + 3.9, AUTOGRAD)
        trace.copies(host + 3.6, LOAD, device + 15, device + 17, thread=AUTOGRAD)
        trace.copies(host + 3.7, LOAD_TOO, device + 17, device + 18, thread=AUTOGRAD)
        trace.range("train clip", host + 4, host + 5)
        trace.runs(host + 4.5, COMPUTE, device + 16, device + 18, name="norm")
        trace.range("train step", host + 5, host + 6)
        trace.range("fsdp_offload U4", host + 5.1, host + 5.2)
        trace.runs(host + 5.15, UPDATE, device + 18, device + 21, name="adam")
        trace.range("fsdp_offload S4", host + 5.2, host + 5.3)
        trace.runs(host + 5.25, STORE, device + 21, device + 26, category="gpu_memcpy")
        trace.runs(host + 5.6, COMPUTE, device + 18, device + 20, name="count")
    return trace


def test_an_iteration_is_shown_with_what_the_one_before_has_left_running() -> None:
    assert overlapping().timeline() == Timeline(
        ms=20.0,
        phases=(
            Phase("forward", 0.0, 6.0),
            Phase("backward", 6.0, 16.0),
            Phase("clip", 16.0, 18.0),
            Phase("step", 18.0, 20.0),
        ),
        spans=(
            Span(Lane.GATHER, 0.0, 1.0),
            Span(Lane.UPDATE, 0.0, 1.0, 4),  # 18 to 21 of the iteration before
            Span(Lane.COMPUTE, 1.0, 6.0),
            Span(Lane.STORE, 1.0, 6.0, 4),
            Span(Lane.COMPUTE, 6.0, 16.0),
            Span(Lane.REDUCE, 14.0, 15.0),
            Span(Lane.LOAD, 15.0, 17.0, 4),
            Span(Lane.COMPUTE, 16.0, 18.0),
            Span(Lane.LOAD, 17.0, 18.0, 4),
            Span(Lane.UPDATE, 18.0, 20.0),
            Span(Lane.UPDATE, 18.0, 20.0, 4),
        ),
    )


def test_a_single_iteration_lasts_from_its_first_kernel_to_its_last() -> None:
    trace = Trace()
    trace.range("train forward", 0, 1)
    trace.runs(0.5, COMPUTE, 3, 7)
    trace.range("train backward", 1, 2)
    trace.runs(1.5, COMPUTE, 7, 9)
    trace.runs(1.6, REDUCE, 9, 12, name="ncclDevKernel_ReduceScatter_Sum_f32_RING_LL")
    assert trace.timeline() == Timeline(
        ms=9.0,
        phases=(Phase("forward", 0.0, 4.0), Phase("backward", 4.0, 9.0)),
        spans=(Span(Lane.COMPUTE, 0.0, 4.0), Span(Lane.COMPUTE, 4.0, 6.0), Span(Lane.REDUCE, 6.0, 9.0)),
    )


def test_collectives_that_wait_for_other_ranks_are_not_the_compute_stream() -> None:
    trace = Trace()
    trace.range("train forward", 0, 1)
    trace.runs(0.1, GATHER, 1, 30, name="ncclDevKernel_AllGather_RING_LL")
    trace.runs(0.2, COMPUTE, 30, 31)
    assert [span.lane for span in trace.timeline().spans] == [Lane.GATHER, Lane.COMPUTE]


def test_our_own_copies_are_not_the_compute_stream() -> None:
    trace = Trace()
    trace.range("train forward", 0, 1)
    trace.range("fsdp_offload L0", 0.1, 0.2)
    trace.copies(0.15, LOAD, 1, 30)
    trace.runs(0.3, COMPUTE, 30, 31)
    assert [span.lane for span in trace.timeline().spans] == [Lane.LOAD, Lane.COMPUTE]


def test_a_kernel_whose_launch_was_before_the_trace_belongs_to_no_range() -> None:
    trace = Trace()
    trace.range("train forward", 0, 1)
    trace.runs(0.5, COMPUTE, 2, 7)
    trace.runs(-3, GATHER, 3, 4)
    trace.events = [event for event in trace.events if event["ts"] >= 0]  # the launch is gone, the kernel is not
    assert trace.timeline().spans == (Span(Lane.COMPUTE, 0.0, 5.0), Span(Lane.GATHER, 1.0, 2.0))


def test_buckets_are_told_apart_by_all_of_their_number() -> None:
    trace = Trace()
    trace.range("train forward", 0, 1)
    trace.runs(0.05, COMPUTE, 1, 90)
    for bucket in (3, 30, 31):
        trace.range(f"fsdp_offload S{bucket}", bucket / 100 + 0.1, bucket / 100 + 0.105)
        trace.copies(bucket / 100 + 0.102, STORE, bucket, bucket + 1)
    stores = [span.bucket for span in trace.timeline().spans if span.lane is Lane.STORE]
    assert stores == [3, 30, 31]


@pytest.mark.parametrize(
    ("name", "launched", "message"),
    [("train backward", True, "no range 'train forward'"), ("train forward", False, "no kernels, copies or ops")],
)
def test_a_trace_that_shows_no_iteration_is_refused(name: str, launched: bool, message: str) -> None:
    trace = Trace()
    trace.range(name, 0, 1)
    if launched:
        trace.runs(0.5, COMPUTE, 1, 2)
    with pytest.raises(ValueError, match=message):
        trace.timeline()


# Figures and pictures -----------------------------------------------------------------------------------------------


def of_loads(*spans: tuple[float, float, int]) -> Timeline:
    return Timeline(10.0, (Phase("forward", 0.0, 10.0),), tuple(Span(Lane.LOAD, *span) for span in spans))


def test_a_lane_is_busy_once_where_two_streams_work() -> None:
    timeline = of_loads((0, 4, 0), (1, 2, 1), (3, 5, 1), (5, 6, 2), (8, 9, 2))
    assert (timeline.busy_ms(Lane.LOAD), timeline.busy_ms(Lane.STORE)) == (7.0, 0.0)


def test_what_is_seen_as_one_is_one_bar_and_buckets_stay_apart() -> None:
    timeline = of_loads((0, 2, 0), (2.4, 3, 0), (3, 4, 1), (4.5, 5, 1), (5.2, 6, 1))
    bars = [(bar.begin_ms, bar.end_ms, bar.bucket) for bar in timeline.bars(Lane.LOAD, 0.5)]
    assert bars == [(0, 3, 0), (3, 4, 1), (4.5, 6, 1)]


def colors_by_column(path: Path) -> list[set[tuple[int, ...]]]:
    image = imread(path)
    pixels = torch.from_numpy(image)[:, :, :3].mul(255).round().int()
    return [{tuple(color) for color in column.unique(dim=0).tolist()} for column in pixels.unbind(1)]


def test_a_picture_shows_each_lane_at_its_time(tmp_path: Path) -> None:
    spans = (Span(Lane.COMPUTE, 0.0, 10.0), Span(Lane.LOAD, 2.5, 5.0, 2), Span(Lane.STORE, 7.5, 10.0, 2))
    draw({"a policy": Timeline(10.0, (Phase("forward", 0.0, 10.0),), spans)}, tmp_path / "one.png")
    columns = colors_by_column(tmp_path / "one.png")
    load, store, compute = (0x2F, 0x7F, 0xC1), (0x2E, 0x8B, 0x57), (0x4C, 0x56, 0x6A)
    drawn = [number for number, colors in enumerate(columns) if compute in colors]
    quarter = len(drawn) / 4
    for color, begin in ((load, drawn[0] + quarter), (store, drawn[0] + 3 * quarter)):
        found = [number for number, colors in enumerate(columns) if color in colors]
        assert (found[0], found[-1]) == pytest.approx((begin, begin + quarter), abs=3)


def test_all_policies_are_on_one_scale(tmp_path: Path) -> None:
    ten, five = (
        Timeline(ms, (Phase("forward", 0.0, ms),), (Span(lane, 0.0, ms, 0),))
        for ms, lane in ((10.0, Lane.LOAD), (5.0, Lane.STORE))
    )
    draw({"ten": ten, "five": five}, tmp_path / "both.png")
    columns = colors_by_column(tmp_path / "both.png")
    widths = [sum(color in colors for colors in columns) for color in ((0x2F, 0x7F, 0xC1), (0x2E, 0x8B, 0x57))]
    assert widths[0] == pytest.approx(2 * widths[1], abs=4)


def test_matplotlib_that_is_missing_is_one_line_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        measure(traces=tmp_path / "traces")


# The bench's own loop, traced on the CPU ----------------------------------------------------------------------------

SIZES = {"bucket_bytes": 1 << 17, "passing": 5 << 17}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny ops: more threads only wait for each other
    yield Bench(torch.device("cpu"), layers=2, width=128, sequences=1, length=8, vocabulary=256, clip=True)
    torch.set_num_threads(threads)
    dist.destroy_process_group()


def traced(bench: Bench, policy: OffloadPolicy | None, path: Path) -> Timeline:
    with bench.settled(policy) as (optimizer, clip):
        bench.trace(optimizer, path, clip=clip)
    return timeline_of(read_trace(path))


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
    fields: dict[str, Any],
    phases: list[str],
    loaded_in: set[str],
    updated_in: set[str],
    bench: Bench,
    tmp_path: Path,
) -> None:
    timeline = traced(bench, with_share(**SIZES, **fields), tmp_path / "a.trace.json.gz")
    assert [one.name for one in timeline.phases] == phases
    assert begun_in(timeline, Lane.LOAD) == loaded_in
    # In the step the optimizer also counts it.
    assert begun_in(timeline, Lane.UPDATE) == updated_in
    found = {lane: [bar.bucket for bar in timeline.bars(lane, 0.0)] for lane in (Lane.LOAD, Lane.UPDATE, Lane.STORE)}
    buckets = set(found[Lane.LOAD])
    assert len(buckets) > 20
    assert set(found[Lane.STORE]) == buckets
    updated_buckets = set(found[Lane.UPDATE]) - {None}
    assert updated_buckets == set(range(len(updated_buckets))) >= buckets  # some are kept
    # The host does one thing at a time: an op and what it consists of are not both there.
    assert all(one.end_ms <= after.begin_ms for one, after in itertools.pairwise(timeline.spans))
    for bucket in buckets:
        loaded, updated, stored = (
            [(span.begin_ms, span.end_ms) for span in timeline.spans if (span.lane, span.bucket) == (lane, bucket)]
            for lane in found
        )
        for begin_ms, end_ms in loaded:  # for this update, or behind its store for the next
            assert end_ms <= updated[0][0] or stored[-1][1] <= begin_ms, bucket
        assert updated[-1][1] <= stored[0][0], bucket


def test_a_real_trace_of_the_plain_optimizer_shows_its_update(bench: Bench, tmp_path: Path) -> None:
    timeline = traced(bench, None, tmp_path / "plain.trace.json.gz")
    assert begun_in(timeline, Lane.UPDATE) == {"step"}
    assert {span.lane for span in timeline.spans} == {Lane.COMPUTE, Lane.UPDATE}
    (step,) = (one for one in timeline.phases if one.name == "step")
    assert timeline.busy_ms(Lane.UPDATE) <= step.end_ms - step.begin_ms


@pytest.mark.long
def test_settled_training_has_the_same_bits_with_every_policy(bench: Bench) -> None:
    """The losses that the bench compares come from the same number of iterations."""
    results = []
    for policy in (None, with_share(**SIZES), with_share(**SIZES, overlap="forward")):
        with bench.settled(policy) as (optimizer, _):
            if policy is not None:
                optimizer.synchronize()  # type: ignore[attr-defined]
            steps = {int(state["step"]) for state in optimizer.state.values()}
            params = [param for group in optimizer.param_groups for param in group["params"]]
            results.append([param.detach().to_local().clone() for param in params])
        assert steps == {SETTLE_ITERATIONS}
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.long
def test_files_and_records_of_all_policies(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["plain", "forward+limited auto"]
    traced(bench, None, trace_path(tmp_path, names[0]))
    traced(bench, with_share(**SIZES, overlap="forward"), trace_path(tmp_path, names[1]))
    capsys.readouterr()
    draw_all(tmp_path, names)
    stems = ["plain", "forward-limited-auto"]
    files = {"all-policies.png", *(f"{stem}{end}" for stem in stems for end in (".png", ".trace.json.gz"))}
    assert {path.name for path in tmp_path.iterdir()} == files
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["policy"] for record in records] == names
    assert (records[0]["load_busy_ms"], records[1]["load_busy_ms"] > 0) == (0.0, True)
    with gzip.open(trace_path(tmp_path, names[1]), "rt") as file:  # what viewers open
        events = json.load(file)["traceEvents"]
    # The one in the picture has another one before it, whose updates may still run, and another one behind it.
    assert sum(event["name"] == "train forward" for event in events) == 3


# Options and bounds -------------------------------------------------------------------------------------------------


def test_the_limited_policies_have_the_limit() -> None:
    chosen = chosen_policies("forward,iteration_limited", {"bucket_bytes": 1 << 20}, 3 << 20)
    assert chosen == {
        "plain": None,
        "forward": OffloadPolicy(overlap="forward", bucket_bytes=1 << 20),
        "iteration_limited": OffloadPolicy(overlap="iteration", bucket_bytes=1 << 20, device_bytes=3 << 20),
    }


def test_a_policy_is_beside_plain_training_that_clips_as_often() -> None:
    chosen = chosen_policies("iteration_rarely,forward_limited_always", {"bucket_bytes": 1 << 20}, 3 << 20)
    assert chosen == {
        "plain_rarely": None,
        "plain_always": None,
        "iteration_rarely": OffloadPolicy(overlap="iteration", bucket_bytes=1 << 20),
        "forward_limited_always": OffloadPolicy(overlap="forward", bucket_bytes=1 << 20, device_bytes=3 << 20),
    }


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"step, forward, iteration, .*; got forwards"):
        measure(only="step,forwards")
