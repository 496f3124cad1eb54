"""Lanes: where copies and updates run, in order; a mark is a point of a lane that others wait for.

The streams are those of ``device/link.py``, shared by all optimizers of a device: loads and stores each on two streams
that take turns, updates beside the model on one of their own. Tests have lanes of another kind, which run everything
later, in any order that the waits allow (``tests/core/deferred.py``).

The CPU is a lane as well (``cpu_update/``): it updates state in its home, gradients come down to it, and parameters go
up. A mark of it is known when its update is done: whoever waits for it on a stream blocks the host until then.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device.lanes import EventMark, Lane, Mark
from ..device.link import DeviceLink

__all__ = ["Lane", "Lanes", "Mark"]


class Lanes:
    """The lanes of one optimizer.

    Attributes:
        load, store: copies between homes and places.
        update: updates beside the model.
        compute: the stream that is current.
    """

    def __init__(self, link: DeviceLink, *, serial: bool) -> None:
        self._device, self._one = link.device, serial or link.device.type == "cpu"
        lanes = link.lanes(serial=serial)
        self.load, self.store, self.update, self.compute = lanes

    def on(self, stream: torch.Stream | None) -> Lane:
        """Return the lane of a stream of torch's; ``None`` is the current one."""
        if stream is None or self._one:
            return self.compute
        return Lane(self._device, stream, name=f"stream {stream.stream_id}")

    def event(self, event: object) -> Mark:
        """Return a mark for an event of torch's; without one, the point that compute has reached."""
        return self.compute.mark() if event is None else EventMark(event)  # type: ignore[arg-type]

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Note, for whoever looks for races, that these were made in the order of the compute lane."""

    def freed(self, tensor: Tensor) -> None:
        """Note that memory is given back: the next kernel of the compute lane may write it."""
