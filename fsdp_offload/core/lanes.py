"""Lanes: where copies and updates run, in order; a mark is a point of a lane that others wait for.

The streams are those of ``device/link.py``, shared by all optimizers of a device: loads and stores each on two streams
that take turns, updates beside the model on one of their own. Tests have lanes of another kind, which run everything
later, in any order that the waits allow (``tests/core/deferred.py``).

The CPU is a lane as well (``cpu_update/``): it updates state in its home, gradients come down to it, and parameters go
up. A mark of it is known when its update is done: whoever waits for it on a stream blocks the host until then.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..cpu_update.updates import CpuMark
from ..device.lanes import EventMark, Mark
from ..device.lanes import Lane as DeviceLane
from ..device.link import DeviceLink

__all__ = ["Lane", "Lanes", "Mark", "StreamLane"]

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


class StreamLane:
    """A lane of the device."""

    def __init__(self, name: str, lane: DeviceLane, in_use: AbstractContextManager[object]) -> None:
        """``in_use``: a lock, since threads share the lanes of a device, and a copy changes a lane's stream."""
        self.name, self._lane, self._in_use = name, lane, in_use

    def wait(self, *marks: Mark | None) -> None:
        """Let what follows here start only after ``marks``."""
        for mark in marks:
            known = mark.resolved() if isinstance(mark, CpuMark) else mark
            if known is not None:
                with self._in_use:
                    self._lane.wait(known)

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy, in turns."""
        with self._in_use:
            self._lane.copy(pairs)

    def run(self, function: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Run an update here."""
        with self._lane.running():
            function()

    def touch(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Nothing: streams look for no races."""

    def mark(self) -> Mark:
        """Return the current end of this lane."""
        with self._in_use:
            return self._lane.mark()


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
        lanes = link.lanes(serial=serial)
        self._one = serial or link.device.type == "cpu"
        self._device, self._in_use = link.device, link.in_use
        self.load, self.store, self.update, self.compute = (
            StreamLane(name, lanes[key], link.in_use)
            for name, key in (("load", "L"), ("store", "S"), ("update", "U"), ("compute", "C"))
        )

    def on(self, stream: torch.Stream | None) -> Lane:
        """Return the lane of a stream of torch's; ``None`` is the current one."""
        if stream is None or self._one:
            return self.compute
        return StreamLane(f"stream {stream.stream_id}", DeviceLane(self._device, stream), self._in_use)

    def event(self, event: object) -> Mark:
        """Return a mark for an event of torch's; without one, the point that compute has reached."""
        return self.compute.mark() if event is None else EventMark(event)  # type: ignore[arg-type]

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Note, for whoever looks for races, that these were made in the order of the compute lane."""

    def freed(self, tensor: Tensor) -> None:
        """Note that memory is given back: the next kernel of the compute lane may write it."""
