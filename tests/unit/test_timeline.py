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
from torch.distributed.device_mesh import DeviceMesh

from examples.benchmarks.timeline import Lane, Phase, Span, Timeline, read_trace, timeline_of
from examples.benchmarks.train import Bench
from tests.policies import with_share

COMPUTE, GATHER, REDUCE, LOAD, LOAD_TOO, UPDATE, STORE = 7, 13, 14, 20, 21, 22, 23  # streams
PYTHON, AUTOGRAD = 100, 101  # threads


class Trace:
    """Written down in milliseconds; a trace has microseconds, and the device's clock is the host's."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def range(self, name: str, begin: float, end: float, thread: int = PYTHON) -> None:
        self._add("user_annotation", name, thread, begin, end)
        # The same range as seen on the device, where it lasts as long as its kernels. Meanwhile the host does others.
        self._add("gpu_user_annotation", name, COMPUTE, begin + 17.4, end + 17.4)

    def runs(self, launch: float, stream: int, begin: float, end: float, name: str = "", thread: int = PYTHON) -> None:
        """A kernel, or without a name what the stream is for."""
        correlation = len(self.events) // 2
        runtime = ("cuda_runtime", "cudaLaunchKernel") if correlation % 2 else ("cuda_driver", "cuLaunchKernelEx")
        self._add(*runtime, thread, launch, launch + 0.01, correlation=correlation)
        copies = stream in (LOAD, LOAD_TOO, STORE) and not name
        what = ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)") if copies else ("kernel", name or "gemm")
        self._add(*what, stream, begin, end, stream=stream, correlation=correlation)

    def _add(self, category: str, name: str, tid: int, begin: float, end: float, **args: Any) -> None:
        times = {"ts": begin * 1000, "dur": (end - begin) * 1000}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, **times, "args": args})

    def timeline(self) -> Timeline:
        others = [{"ph": "M", "name": "process_name", "pid": 0}, {"ph": "f", "cat": "ac2g", "id": 1, "ts": 0}]
        return timeline_of({"traceEvents": others + self.events[::-1]})  # the order in the file means nothing


# Name, begin and end on the host, and the thread.
RANGES: list[tuple[Any, ...]] = [
    ("train forward", 0, 2),
    ("FSDP::all_gather (blocks.0)", 0, 0.5),
    ("train backward", 2, 4),
    ("FSDP::post_backward_reduce (blocks.0)", 3, 4, AUTOGRAD),
    ("fsdp_offload L4", 3.5, 3.9, AUTOGRAD),
    ("train clip", 4, 5),
    ("train step", 5, 6),
    ("fsdp_offload U4", 5.1, 5.2),
    ("fsdp_offload S4", 5.2, 5.3),
]
# Launch on the host, stream, begin and end on the device, name, and the thread.
RUNS: list[tuple[Any, ...]] = [
    (0.2, GATHER, 0, 1, "ncclDevKernel_AllGather_RING_LL"),
    (1, COMPUTE, 1, 6),
    (2.5, COMPUTE, 6, 16, "gemm", AUTOGRAD),
    (3.1, REDUCE, 14, 15, "cat", AUTOGRAD),
    (3.6, LOAD, 15, 17, "", AUTOGRAD),
    (3.7, LOAD_TOO, 17, 18, "", AUTOGRAD),
    (4.5, COMPUTE, 16, 18, "norm"),
    (5.15, UPDATE, 18, 21, "adam"),
    (5.25, STORE, 21, 26),
    (5.6, COMPUTE, 18, 20, "count"),
]


def overlapping() -> Trace:
    """Three iterations of which the host launches each before the device has begun it; updates run in the forward."""
    trace = Trace()
    for host in (0, 20, 40):
        device = host + 15
        for name, begin, end, *thread in RANGES:
            trace.range(name, host + begin, host + end, *thread)
        for launch, stream, begin, end, *more in RUNS:
            trace.runs(host + launch, stream, device + begin, device + end, *more)
    return trace


def test_an_iteration_is_shown_with_what_the_one_before_has_left_running() -> None:
    phases = {"forward": (0.0, 6.0), "backward": (6.0, 16.0), "clip": (16.0, 18.0), "step": (18.0, 20.0)}
    assert overlapping().timeline() == Timeline(
        ms=20.0,
        phases=tuple(Phase(name, *times) for name, times in phases.items()),
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
    fields: dict[str, Any],
    phases: list[str],
    loaded_in: set[str],
    updated_in: set[str],
    bench: Bench,
    tmp_path: Path,
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
    updated_buckets = set(found[Lane.UPDATE]) - {None}
    assert updated_buckets == set(range(len(updated_buckets))) >= buckets  # some are kept
    # The host does one thing at a time: an op and what it consists of are not both there.
    assert all(one.end_ms <= after.begin_ms for one, after in itertools.pairwise(timeline.spans))
