"""What ``bench train`` makes of a trace, and of its options, without an accelerator: figures come from one only.

The traces are small ones made by hand, in the form in which torch.profiler writes kernels and copies, and real ones of
the bench's own loop on the CPU.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.benchmarks.timeline import Lane, Phase, Span, Timeline, read_trace, timeline_of
from examples.benchmarks.train import (
    Bench,
    chosen_policies,
)
from fsdp_offload import OffloadPolicy
from tests.policies import with_share

COMPUTE, GATHER, REDUCE, LOAD, LOAD_TOO, UPDATE, STORE = 7, 13, 14, 20, 21, 22, 23  # streams
PYTHON, AUTOGRAD = 100, 101  # threads


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


# Options and bounds -------------------------------------------------------------------------------------------------


def test_a_policy_is_beside_plain_training_that_clips_as_often() -> None:
    chosen = chosen_policies("iteration_rarely,forward_limited_always", {"bucket_bytes": 1 << 20}, 3 << 20)
    assert chosen == {
        "plain_rarely": None,
        "plain_always": None,
        "iteration_rarely": OffloadPolicy(overlap="iteration", bucket_bytes=1 << 20),
        "forward_limited_always": OffloadPolicy(overlap="forward", bucket_bytes=1 << 20, device_bytes=3 << 20),
    }
