"""Lanes: where copies and updates run, in order; a mark is a point of a lane that others wait for.

The streams are those of ``device/link.py``, shared by all optimizers of a device: loads and stores each on two streams
that take turns, updates beside the model on one of their own. Tests have lanes of another kind, which run everything
later, in any order that the waits allow (``tests/core/deferred.py``).

The CPU is a lane as well: it updates state in its home, gradients come down to it, and parameters go up. The threads of
``cpu_update/`` do the work, and take what is newest and has arrived first. A mark of this lane is known when its update
is done: whoever waits for it on a stream blocks the host until then.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..cpu_update.updates import HostUpdates, Submit
from ..device.lanes import EventMark, Mark, stream_mark, wait_on
from ..device.lanes import Lane as DeviceLane
from ..device.link import DeviceLink
from ..optimizers.bound_range import BoundRange
from ..state.shard import StateShard
from ..state.store import StateStore

__all__ = ["CpuMark", "HostLane", "Lane", "Lanes", "Mark", "StreamLane"]

Pair = tuple[Tensor, Tensor]


class Lane(Protocol):
    """Runs what it is given in order.

    Attributes:
        name: tells lanes apart.
    """

    name: str

    def wait(self, *marks: Mark | None) -> None:
        """Let what follows here start only after ``marks``."""

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy each source, the second of a pair, into its target: flat bytes of one size."""

    def run(self, function: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Run an update here. ``reads`` and ``writes`` are for lanes that look for races."""

    def touch(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Note, for lanes that look for races, that others read and write these here now."""

    def mark(self) -> Mark:
        """Return the current end of this lane."""


class CpuMark:
    """The end of the last update of one bucket, and of the way up of its parameters."""

    def __init__(self, host: HostUpdates, number: int) -> None:
        self._host, self._number = host, number

    def resolved(self) -> Mark | None:
        """Block the host until the CPU has updated; returns a mark behind which parameters are new on the device.

        Raises:
            RuntimeError: the update has failed, or another one of its step before it.
        """
        return self._host.wait(self._number)

    def passed(self) -> bool:
        """Not known without waiting."""
        raise NotImplementedError

    def elapsed_ms_since(self, earlier: Mark) -> float:
        """Not known: the host's clock has its times."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Block the host until the device has the parameters."""
        mark = self.resolved()
        if mark is not None:
            mark.synchronize()


class StreamLane:
    """A lane of the device; with ``stream``, a stream of torch's."""

    def __init__(
        self, name: str, lane: DeviceLane, in_use: AbstractContextManager[object], stream: torch.Stream | None = None
    ) -> None:
        """``in_use``: a lock, since threads share the lanes of a device, and a copy changes a lane's stream."""
        self.name, self._lane, self._in_use, self._stream = name, lane, in_use, stream

    def wait(self, *marks: Mark | None) -> None:
        """Let what follows here start only after ``marks``."""
        for mark in marks:
            known = mark.resolved() if isinstance(mark, CpuMark) else mark
            if known is not None:
                with self._in_use:
                    wait_on(self._stream, self._lane, known)

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy, in turns."""
        with self._in_use:
            self._lane.copy_pieces(self._lane.cut(pairs))

    def run(self, function: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Run an update here."""
        with self._lane.running():
            function()

    def touch(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Nothing: streams look for no races."""

    def mark(self) -> Mark:
        """Return the current end of this lane."""
        with self._in_use:
            return stream_mark(self._stream, self._lane)


class Lanes:
    """The lanes of one optimizer.

    Attributes:
        load, store: copies between homes and places.
        update: updates beside the model.
        compute: the stream that is current.
    """

    load: Lane
    store: Lane
    update: Lane
    compute: Lane

    def __init__(self, link: DeviceLink, *, serial: bool) -> None:
        lanes = link.lanes(serial=serial, beside_compute=True)
        self._one = serial or link.device.type == "cpu"
        self._compute, self._in_use = lanes["C"], link.in_use
        self.load, self.store, self.update, self.compute = (
            StreamLane(name, lanes[key], link.in_use)
            for name, key in (("load", "L"), ("store", "S"), ("update", "U"), ("compute", "C"))
        )

    def on(self, stream: torch.Stream | None) -> Lane:
        """Return the lane of a stream of torch's; ``None`` is the current one."""
        if stream is None or self._one:
            return self.compute
        return StreamLane(f"stream {stream.stream_id}", self._compute, self._in_use, stream)

    def event(self, event: object) -> Mark:
        """Return a mark for an event of torch's; without one, the point that compute has reached."""
        return self.compute.mark() if event is None else EventMark(event)  # type: ignore[arg-type]

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Note, for whoever looks for races, that these were made in the order of the compute lane."""

    def freed(self, tensor: Tensor) -> None:
        """Note that memory is given back: the next kernel of the compute lane may write it."""


class HostLane:
    """Updates of one optimizer on the CPU."""

    def __init__(self, host: HostUpdates, shards: Callable[[], Iterable[StateShard]]) -> None:
        """Take who updates, and what yields all shards that the CPU updates."""
        self._host, self._shards = host, shards
        self._submit: Submit | None = None
        self._after: dict[int, Mark] = {}

    def begin(self, optimizer: Optimizer) -> None:
        """Note where a logical step starts."""
        self._submit, self._after = self._host.begin(optimizer, self._shards()), {}

    def wait(self, *marks: Mark | None) -> None:
        """Let what is submitted from now on read gradients only after ``marks``; each counts once in a step.

        Buckets whose gradients are final at the same time so wait for the same marks, and are updated in order.
        """
        for mark in marks:
            if mark is not None and id(mark) not in self._after:
                self._after[id(mark)] = mark
                self._host.after(mark)

    def update(
        self, number: int, ranges: Sequence[BoundRange], states: StateStore, moving: Sequence[StateShard]
    ) -> CpuMark:
        """Have a bucket updated; returns at once. The state of ``moving`` is in its other place afterwards."""
        assert self._submit is not None, "a step has begun"
        self._submit(number, ranges, states, moving)
        return CpuMark(self._host, number)
