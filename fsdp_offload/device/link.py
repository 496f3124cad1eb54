"""The link of one device: its lanes, and the memory that it has left."""

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .lanes import PIECE_BYTES, STORED_PIECE_BYTES, EventMark, Lane, Mark, SerialLane, TurnsLane


class Lanes:
    """Lanes of one device. Tests have some of another kind, which run everything later (``tests/core/deferred.py``).

    Attributes:
        load, store: copies between homes and places.
        update: updates beside the model.
        compute: the stream that is current.
    """

    def __init__(self, device: torch.device, load: Lane, store: Lane, update: Lane, compute: Lane) -> None:
        self._device = device
        self.load, self.store, self.update, self.compute = load, store, update, compute

    def on(self, stream: torch.Stream | None) -> Lane:
        """Return the lane of a stream of torch's; ``None`` is the current one."""
        if stream is None or isinstance(self.compute, SerialLane):
            return self.compute
        return Lane(self._device, stream, name=f"stream {stream.stream_id}")

    def event(self, event: object) -> Mark:
        """Return a mark for an event of torch's; without one, the point that compute has reached."""
        return self.compute.mark() if event is None else EventMark(event)  # type: ignore[arg-type]

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Note, for whoever looks for races, that these were made in the order of the compute lane."""

    def freed(self, tensor: Tensor) -> None:
        """Note that memory is given back: the next kernel of the compute lane may write it."""


class DeviceLink:
    """The lanes and the memory of one device, shared by all offloaded optimizers there.

    The streams live as long as the process: new ones would each get a memory pool of their own in torch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def lanes(self, *, serial: bool) -> Lanes:
        """Return the lanes of all optimizers of this device; with ``serial``, and on the CPU, none overlaps another."""
        if serial or self.device.type == "cpu":
            names = ("load", "store", "update", "compute")
            return Lanes(self.device, *(SerialLane(self.device, name=name) for name in names))
        return self._lanes

    @functools.cached_property
    def _lanes(self) -> Lanes:
        """The same for all users: copies of one kind are in order, whoever issues them."""
        load = TurnsLane(self.device, PIECE_BYTES, name="load")
        store = TurnsLane(self.device, STORED_PIECE_BYTES, name="store")
        # Updates go ahead of the model's kernels: everything that comes later waits for them, and they are short.
        update = Lane(self.device, torch.Stream(self.device, priority=-1), name="update")
        return Lanes(self.device, load, store, update, Lane(self.device))

    def host_lanes(self, *, serial: bool) -> tuple[Lane, Lane]:
        """Return the lanes of updates on the host: down for gradients and rewritten parameters, up for parameters.

        Streams of their own: in those of the loads and stores they would queue behind buckets of the device, which in
        turn wait for updates and for places.
        """
        if serial or self.device.type == "cpu":
            return SerialLane(self.device, name="down"), SerialLane(self.device, name="up")
        return self._host_lanes

    @functools.cached_property
    def _host_lanes(self) -> tuple[Lane, Lane]:
        down = Lane(self.device, torch.Stream(self.device), name="down")
        # Uploads in turns, as loads: both go through the copy engine that small copies of others need.
        return down, TurnsLane(self.device, PIECE_BYTES, name="up")

    def taken_bytes(self, when: Literal["current", "peak"]) -> int:
        """All that is in use, or ever was since the statistics were last reset. On the CPU, zero.

        With the gaps between, which only an allocation that fits can have. The peak is no less than what was ever taken
        at once: both parts need not have been largest together.
        """
        if self.device.type == "cpu":
            return 0
        stats = torch.accelerator.memory_stats(self.device)
        return int(sum(stats[f"{part}.all.{when}"] for part in ("allocated_bytes", "inactive_split_bytes")))

    def room_beside(self, taken_bytes: int) -> int:
        """Device memory that this process may have beside so much, less a twentieth of all. On the CPU, none."""
        if self.device.type == "cpu":
            return 0
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        has_limit = hasattr(module, "get_per_process_memory_fraction")  # CUDA
        most = int(total * module.get_per_process_memory_fraction(self.device)) if has_limit else int(total)
        reachable = min(int(free) + torch.accelerator.memory_reserved(self.device), most)
        return max(0, reachable - taken_bytes - most // 20)

    def empty_cache(self) -> None:
        """Give the memory back that the allocator holds and nobody uses."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        """Block the host until the device has done everything that was issued to it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@functools.cache
def device_link(device: torch.device) -> DeviceLink:
    """Return the link of ``device``, the same every time."""
    return DeviceLink(device)
