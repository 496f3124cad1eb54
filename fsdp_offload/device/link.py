"""The link of one device: its lanes, and the memory that it has left."""

import threading
from typing import Literal

import torch

from .lanes import PIECE_BYTES, STORED_PIECE_BYTES, Lane, SerialLane, TurnsLane


class DeviceLink:
    """Lanes of the copies of one device, shared by all offloaded optimizers there.

    The streams live as long as the process: new ones would each get a memory pool of their own in torch's allocator.

    Attributes:
        in_use: threads that step optimizers of their own take turns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_use = threading.RLock()
        self._lanes: dict[str, Lane] = {}
        self._host_lanes: tuple[Lane, Lane] | None = None

    def lanes(self, *, serial: bool) -> dict[str, Lane]:
        """The lanes for loads (``"L"``), stores (``"S"``), updates beside the model (``"U"``), and the current stream.

        That is ``"C"``. With ``serial``, and on the CPU, one lane is all of them, and waits for each action.
        """
        if serial or self.device.type == "cpu":
            return dict.fromkeys("LUSC", SerialLane(self.device))
        if not self._lanes:  # the same for all users: copies of one kind are in order, whoever issues them
            # Updates go ahead of the model's kernels: everything that comes later waits for them, and they are short.
            update = Lane(self.device, torch.Stream(self.device, priority=-1))
            load, store = self._turns_lane(PIECE_BYTES), self._turns_lane(STORED_PIECE_BYTES)
            self._lanes = {"L": load, "U": update, "S": store, "C": Lane(self.device)}
        return self._lanes

    def host_lanes(self, *, serial: bool) -> tuple[Lane, Lane]:
        """Return the lanes of updates on the host: down for gradients and rewritten parameters, up for parameters.

        Streams of their own: in those of the loads and stores they would queue behind buckets of the device, which in
        turn wait for updates and for places.
        """
        if serial or self.device.type == "cpu":
            lane = SerialLane(self.device)
            return lane, lane
        if self._host_lanes is None:
            # Uploads in turns, as loads: both go through the copy engine that small copies of others need.
            self._host_lanes = Lane(self.device, torch.Stream(self.device)), self._turns_lane(PIECE_BYTES)
        return self._host_lanes

    def _turns_lane(self, turn_bytes: int) -> "TurnsLane":
        return TurnsLane(self.device, (torch.Stream(self.device), torch.Stream(self.device)), turn_bytes)

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
        most = int(total * getattr(module, "get_per_process_memory_fraction", _all)(self.device))  # CUDA has it
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


def _all(_: torch.device) -> float:
    return 1.0


_links: dict[torch.device, DeviceLink] = {}


def device_link(device: torch.device) -> DeviceLink:
    """The link of ``device``, made on first use."""
    if device not in _links:
        _links[device] = DeviceLink(device)
    return _links[device]
