"""Draws one iteration: when each lane of the device was busy, read from a trace of ``torch.profiler``.

    Chrome trace ──timeline_of──▶ Timeline ──draw──▶ PNG

A trace has events of the host (ranges, launches) and of the device (kernels, copies). The host runs ahead, so a kernel
or copy runs later than the range that *launched* it, to which it belongs; a correlation id leads to its launch. The
picture shows the device's times only.
"""

import bisect
import gzip
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

_Event = Mapping[str, Any]

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_PHASE = re.compile(r"train (\w+)")
_ACTION = re.compile(r"fsdp_offload ([LUS]) ?[a-z ]*(\d+)")  # written by the library's core
_REDUCTION = re.compile(r"(FSDP::post_backward_reduce)")  # written by fully_shard
_REDUCING_KERNEL = re.compile(r"nccl\w*Reduce")


def phase(name: str) -> AbstractContextManager[Any]:
    """Record a range of a training loop for :func:`timeline_of`; ``name``: forward, backward, clip or step."""
    return torch.profiler.record_function(f"train {name}")


class Lane(Enum):
    """Lane of work that runs concurrently with the others, in the order of the picture's rows."""

    COMPUTE = "compute"  # forward, backward, clip
    GATHER = "gather"  # fully_shard's streams
    REDUCE = "reduce"
    LOAD = "load, H2D"
    UPDATE = "update"  # on any stream, by offloaded and plain optimizers
    STORE = "store, D2H"


_LANES = {"L": Lane.LOAD, "U": Lane.UPDATE, "S": Lane.STORE}


@dataclass(frozen=True)
class Span:
    """A kernel or copy, in milliseconds from the iteration's start; ``bucket``: number, for loads, updates, stores."""

    lane: Lane
    begin_ms: float
    end_ms: float
    bucket: int | None = None


@dataclass(frozen=True)
class Phase:
    """Part of an iteration, from its start on the compute stream to the start of the next part."""

    name: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """One iteration, from the start of its forward to the start of the next forward.

    Attributes:
        ms: length of the iteration.
        phases: phases of the iteration, in order.
        spans: kernels and copies that ran in this time, whichever iteration launched them, ordered by start.
    """

    ms: float
    phases: tuple[Phase, ...]
    spans: tuple[Span, ...]

    def busy_ms(self, lane: Lane) -> float:
        """Return the milliseconds in which the lane was busy."""
        spans = self._of(lane)
        busy_until = accumulate((span.end_ms for span in spans), max, initial=0.0)
        pairs = zip(spans, busy_until, strict=False)  # (span, latest end before it); the last end is unused
        return sum((max(0.0, span.end_ms - max(span.begin_ms, until_ms)) for span, until_ms in pairs), 0.0)

    def waits(self) -> list[tuple[float, float]]:
        """Return the gaps without computation or update: (start, length) in milliseconds."""
        busy = [span for span in self.spans if span.lane in (Lane.COMPUTE, Lane.UPDATE)]
        begins_ms = [*(span.begin_ms for span in busy), self.ms]
        until_ms = accumulate((span.end_ms for span in busy), max, initial=0.0)
        return [(end, begin - end) for begin, end in zip(begins_ms, until_ms, strict=True) if begin > end]

    def bars(self, lane: Lane, least_gap_ms: float) -> list[Span]:
        """Return the spans of a lane; join successive spans of one bucket if the gap is below ``least_gap_ms``."""
        bars: list[Span] = []
        for span in self._of(lane):
            last = bars[-1] if bars else None
            if last is not None and last.bucket == span.bucket and span.begin_ms - last.end_ms < least_gap_ms:
                bars[-1] = Span(lane, last.begin_ms, max(last.end_ms, span.end_ms), span.bucket)
            else:
                bars.append(span)
        return bars

    def _of(self, lane: Lane) -> list[Span]:
        return [span for span in self.spans if span.lane is lane]


def read_trace(path: Path) -> dict[str, Any]:
    """Read a Chrome trace, compressed by gzip or not."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def timeline_of(trace: Mapping[str, Any]) -> Timeline:
    """Return the last iteration of a trace that another iteration follows, or the only one.

    In a trace without a device, the host's innermost ops take the place of kernels.

    Args:
        trace: trace that ``export_chrome_trace`` wrote, with ranges of :func:`phase`.

    Raises:
        ValueError: the trace has no forward, or no work.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    works = _device_work(events) or _host_work(events)
    if not works:
        raise ValueError("the trace holds no kernels, copies or ops; was it made with a CPU and a device activity?")
    compute = _ComputeStream(works, _Ranges(events, _ACTION))
    bounds_us = _phase_bounds_us(events, works, compute)
    begin_us, end_us = bounds_us[0][1], bounds_us[-1][2]

    def ms(time_us: float) -> float:
        return (min(max(time_us, begin_us), end_us) - begin_us) / 1e3

    spans = [
        Span(lane, ms(work.begin_us), ms(work.end_us), bucket)
        for work, (lane, bucket) in zip(works, _lanes_of(events, works, compute.stream), strict=True)
        if work.end_us > begin_us and work.begin_us < end_us
    ]
    return Timeline(
        ms=ms(end_us),
        phases=tuple(Phase(name, ms(since_us), ms(until_us)) for name, since_us, until_us in bounds_us),
        spans=tuple(sorted(spans, key=lambda span: (span.begin_ms, span.end_ms, span.lane.value))),
    )


# Reading a trace ----------------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """A kernel, a copy or an op, and when the host launched it."""

    name: str
    stream: object
    begin_us: float
    end_us: float
    launch_us: float  # -inf if the launch is not in the trace


def _device_work(events: Sequence[_Event]) -> list[_Work]:
    launches: dict[int, _Event] = {}
    done = []
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event["cat"] in _DEVICE_CATEGORIES:
            done.append(event)
        elif correlation is not None:
            launches[correlation] = event
    works = []
    for event in done:
        launch = launches.get(event["args"].get("correlation"), {})
        stream = event["args"].get("stream", event["tid"])
        end_us = event["ts"] + event["dur"]
        works.append(_Work(event["name"], stream, event["ts"], end_us, launch.get("ts", -math.inf)))
    return works


def _host_work(events: Sequence[_Event]) -> list[_Work]:
    """Return the host's ops that contain no other op."""
    threads: dict[object, list[_Event]] = {}
    for event in events:
        if event["cat"] == "cpu_op":
            threads.setdefault(event["tid"], []).append(event)
    works = []
    for thread, ops in threads.items():
        ops.sort(key=lambda op: (op["ts"], -op["dur"]))
        for op, after in zip(ops, [*ops[1:], None], strict=True):
            end_us = op["ts"] + op["dur"]
            if after is None or after["ts"] >= end_us:
                works.append(_Work(op["name"], thread, op["ts"], end_us, op["ts"]))
    return works


class _Ranges:
    """Ranges of the host whose names match a pattern.

    Assumes that ranges do not overlap, even in different threads: the caller of a backward waits for its threads.
    """

    def __init__(self, events: Iterable[_Event], pattern: re.Pattern[str]) -> None:
        matches = [(event, pattern.match(event["name"])) for event in events if event["cat"] == "user_annotation"]
        self._ranges = sorted(
            (event["ts"], event["ts"] + event["dur"], match.groups()) for event, match in matches if match
        )

    def around(self, work: _Work) -> tuple[str, ...] | None:
        """Return the pattern's groups for the range in which ``work`` was launched; None outside of all ranges."""
        number = bisect.bisect_right(self._ranges, work.launch_us, key=lambda one: one[0]) - 1
        if number < 0:
            return None
        _, end_us, found = self._ranges[number]
        return found if work.launch_us <= end_us else None


class _ComputeStream:
    """The stream of forward and backward: the busiest one, without our own work and NCCL's kernels, which may wait."""

    def __init__(self, works: Sequence[_Work], actions: _Ranges) -> None:
        busy_us: dict[object, float] = {}
        for work in works:
            if not work.name.startswith("nccl") and actions.around(work) is None:
                busy_us[work.stream] = busy_us.get(work.stream, 0.0) + work.end_us - work.begin_us
        self.stream = max(busy_us, key=busy_us.__getitem__, default=None)
        mine = sorted((work.launch_us, work.end_us) for work in works if work.stream == self.stream)
        self._launches_us = [launch_us for launch_us, _ in mine]
        self._ends_us = [end_us for _, end_us in mine]  # in order, as a stream runs what it is given in order

    def done_us(self, host_us: float, default_us: float) -> float:
        """Return when the stream finished the work launched before ``host_us``; ``default_us`` if there is none."""
        number = bisect.bisect_left(self._launches_us, host_us)
        return self._ends_us[number - 1] if number else default_us


def _phase_bounds_us(
    events: Sequence[_Event], works: Sequence[_Work], compute: _ComputeStream
) -> list[tuple[str, float, float]]:
    """Find when the compute stream began and ended each phase of the iteration to show."""
    found = [(event["ts"], _PHASE.fullmatch(event["name"])) for event in events if event["cat"] == "user_annotation"]
    on_host = sorted((host_us, match[1]) for host_us, match in found if match)
    forwards_us = [host_us for host_us, name in on_host if name == "forward"]
    if not forwards_us:
        raise ValueError("the trace holds no range 'train forward', which marks the start of an iteration")
    this_us, next_us = forwards_us[-2:] if len(forwards_us) > 1 else (forwards_us[0], math.inf)
    # The first iteration of a trace begins with its first work; the last one ends with its last work.
    first_us = min((work.begin_us for work in works if work.launch_us >= this_us), default=0.0)
    last_us = max(work.end_us for work in works)
    phases = [(name, compute.done_us(host_us, first_us)) for host_us, name in on_host if this_us <= host_us < next_us]
    ends_us = [since_us for _, since_us in phases[1:]]
    ends_us.append(compute.done_us(next_us, last_us) if next_us < math.inf else last_us)
    return [(name, since_us, until_us) for (name, since_us), until_us in zip(phases, ends_us, strict=True)]


def _lanes_of(
    events: Sequence[_Event], works: Sequence[_Work], compute_stream: object
) -> Iterator[tuple[Lane, int | None]]:
    actions, reductions, phases = (_Ranges(events, pattern) for pattern in (_ACTION, _REDUCTION, _PHASE))
    for work in works:
        action = actions.around(work)
        if action is not None:
            yield _LANES[action[0]], int(action[1])
        elif phases.around(work) == ("step",):
            yield Lane.UPDATE, None
        elif work.stream == compute_stream:
            yield Lane.COMPUTE, None
        elif reductions.around(work) or _REDUCING_KERNEL.match(work.name):
            yield Lane.REDUCE, None
        else:
            yield Lane.GATHER, None


# Drawing ------------------------------------------------------------------------------------------------------------

_WIDTH_INCHES, _DPI = 24, 120
_PIXELS = 0.94 * _WIDTH_INCHES * _DPI  # width of the time axis; names of rows take the other 6 %
_COLORS = {
    Lane.COMPUTE: "#4c566a",
    Lane.GATHER: "#8f6fb0",
    Lane.REDUCE: "#b06f9a",
    Lane.LOAD: "#2f7fc1",
    Lane.UPDATE: "#c8502f",
    Lane.STORE: "#2e8b57",
}


def check_matplotlib() -> None:
    """Check that matplotlib is there, before the time is spent on measurements for pictures.

    Raises:
        SystemExit: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        sys.exit("Pictures are drawn with matplotlib: pip install matplotlib")


def new_figure(width_inches: float, height_inches: float, **options: Any) -> Any:
    """Return a matplotlib figure that draws into memory: needs no display, changes no setting of the user.

    Raises:
        SystemExit: matplotlib is missing.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write a PNG or an SVG with the timelines one below another, on one scale, with a row for each lane.

    Bucket numbers are drawn where they fit; even and odd buckets differ in shade. Pale red marks times in which the
    device waits. Spans are at least a pixel wide; gaps narrower than a pixel are not drawn.

    Raises:
        SystemExit: matplotlib is missing.
    """
    used = {span.lane for timeline in timelines.values() for span in timeline.spans}
    rows = [lane for lane in Lane if lane in used]
    most_ms = max(timeline.ms for timeline in timelines.values())
    height = len(timelines) * (0.32 * len(rows) + 0.6) + 0.5
    figure = new_figure(_WIDTH_INCHES, height, dpi=_DPI)
    all_axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(all_axes, timelines.items(), strict=True):
        _draw_one(axes, timeline, rows, most_ms / _PIXELS)
        axes.set_title(f"{name}: {timeline.ms:.1f} ms", loc="left", pad=16, fontsize=10, fontweight="bold")
    all_axes[-1].set_xlim(0, most_ms)
    all_axes[-1].set_xlabel("ms")
    figure.savefig(path)


def _draw_one(axes: Any, timeline: Timeline, rows: Sequence[Lane], pixel_ms: float) -> None:
    for row, lane in enumerate(rows):
        bars = timeline.bars(lane, pixel_ms)
        shades = [(_COLORS[lane], 0.72 if (bar.bucket or 0) % 2 else 1.0) for bar in bars]
        widths = [(bar.begin_ms, max(pixel_ms, bar.end_ms - bar.begin_ms)) for bar in bars]
        axes.broken_barh(widths, (row - 0.42, 0.84), facecolors=shades, linewidth=0)
        for bar in bars:
            if bar.bucket is not None and _fits(str(bar.bucket), bar, pixel_ms, character_pixels=6):
                middle = (bar.begin_ms + bar.end_ms) / 2
                axes.text(middle, row, bar.bucket, ha="center", va="center", fontsize=5.5, color="white")
    if Lane.COMPUTE in rows:
        waits = [wait for wait in timeline.waits() if wait[1] >= pixel_ms]
        axes.broken_barh(waits, (rows.index(Lane.COMPUTE) - 0.42, 0.84), facecolors="#e8b4a8", linewidth=0)
    above = axes.get_xaxis_transform()
    for one in timeline.phases:
        axes.axvline(one.begin_ms, color="black", linewidth=0.8)
        if _fits(one.name, one, pixel_ms, character_pixels=8):
            middle = (one.begin_ms + one.end_ms) / 2
            axes.text(middle, 1.02, one.name, transform=above, ha="center", va="bottom", fontsize=8)
    axes.axvline(timeline.ms, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [lane.value for lane in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelbottom=True, labelsize=7)


def _fits(text: str, place: Span | Phase, pixel_ms: float, *, character_pixels: int) -> bool:
    return (place.end_ms - place.begin_ms) / pixel_ms >= character_pixels * len(text)
