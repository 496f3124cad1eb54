"""The link of one device: its lanes, the staging memory that copies pass through, and what it can do."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .arena import normal_tensors
from .lanes import PIECE_BYTES, STORED_PIECE_BYTES, Lane, Mark, SerialLane, StreamLane, TurnsLane, current_stream


class Allocated(NamedTuple):
    """Bytes of a device that are in use, and the most that ever were since the statistics were last reset."""

    now: int
    peak: int


class Block:
    """A piece of the ring of staging memory: one allocation, which comes and goes by itself.

    Attributes:
        memory: on the device, ``uint8``, of shape ``(nbytes,)``.
        holders: the users who need it.
        last: for each lane beside the compute stream the end of the last action there that used it, whoever issued it.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.holders: set[int] = set()
        self.last: dict[Lane, Mark] = {}


class DeviceLink:
    """Lanes of the copies and ring of staging memory of one device, shared by all offloaded optimizers there.

    The streams live as long as the process: new ones would each get a memory pool of their own in torch's allocator.
    The ring consists of blocks; what is left of it goes when the last user has left.

    Attributes:
        users: how many optimizers there are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Threads that step optimizers of their own take turns: the ring and the order on the streams are shared.
        self.in_use = threading.RLock()
        self._copy_lanes: tuple[Lane, Lane] | None = None
        self._host_lanes: tuple[Lane, Lane] | None = None
        self._window_lane: Lane | None = None
        self._update_lane: Lane | None = None
        self._ring: dict[int, Block] = {}  # by number: those that are there
        self._compute: Lane = StreamLane(device, None) if device.type != "cpu" else SerialLane(device)
        self.users = 0
        self._last_user = 0

    def lanes(self, *, serial: bool, beside_compute: bool = False) -> dict[str, Lane]:
        """The lanes for loads (``"L"``), updates (``"U"``) and stores (``"S"``), and the current stream (``"C"``).

        Args:
            serial: one lane for all, which waits for each action.
            beside_compute: updates have a stream of their own.
        """
        if serial or self.device.type == "cpu":
            lane = SerialLane(self.device)
            return {"L": lane, "U": lane, "S": lane, "C": lane}
        if self._copy_lanes is None:
            # The same lanes for all users: copies of one kind are in order, whoever issues them.
            self._copy_lanes = self._turns_lane(PIECE_BYTES), self._turns_lane(STORED_PIECE_BYTES)
        load, store = self._copy_lanes
        if beside_compute and self._update_lane is None:
            # Ahead of the model's kernels: everything that comes later waits for updates, and they are short.
            self._update_lane = StreamLane(self.device, torch.Stream(self.device, priority=-1))
        update = self._update_lane if beside_compute and self._update_lane is not None else self._compute
        return {"L": load, "U": update, "S": store, "C": self._compute}

    def host_lanes(self, *, serial: bool) -> tuple[Lane, Lane]:
        """Return the lanes of updates on the host: down for gradients and rewritten parameters, up for parameters.

        Streams of their own: in those of the loads and stores they would queue behind buckets of the device, which in
        turn wait for updates and for room in the ring.
        """
        if serial or self.device.type == "cpu":
            lane = SerialLane(self.device)
            return lane, lane
        if self._host_lanes is None:
            # Uploads in turns, as loads: both go through the copy engine that small copies of others need.
            self._host_lanes = StreamLane(self.device, torch.Stream(self.device)), self._turns_lane(PIECE_BYTES)
        return self._host_lanes

    def window_lane(self, *, serial: bool) -> Lane:
        """Return the lane of parameters for gathers: in one stream with state, they would queue behind it."""
        if serial or self.device.type == "cpu":
            return SerialLane(self.device)
        if self._window_lane is None:
            self._window_lane = self._turns_lane(PIECE_BYTES)
        return self._window_lane

    def _turns_lane(self, turn_bytes: int) -> "TurnsLane":
        return TurnsLane(self.device, (torch.Stream(self.device), torch.Stream(self.device)), turn_bytes)

    def join(self) -> None:
        """Count one more user of the ring."""
        self.users += 1

    def leave(self, user: int) -> None:
        """Count one user less. The ring goes with the last one, when no copy reads or writes it any more."""
        self.users -= 1
        for block in list(self._ring.values()):
            block.holders.discard(user)
        if self.users == 0 and self._ring:
            self.synchronize()
            self._ring = {}

    @normal_tensors()
    def block(self, number: int, nbytes: int, user: int) -> Block:
        """A block of the ring, of at least ``nbytes`` bytes, allocated on the current (compute) stream.

        It stays the same until it has to grow, or all who asked for it have given it back. Ask for it only after
        :meth:`changes_hands`: what others have loaded into a smaller one is gone.
        """
        block = self._ring.get(number)
        if block is None or block.memory.numel() < nbytes:
            if block is not None:
                self._drop(number)
            holders = set() if block is None else block.holders
            block = self._ring[number] = Block(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
            block.holders = holders
            # The memory may have been an activation that a kernel on the current stream is still reading.
            allocated = self._compute.mark()
            for lane in self._others:
                lane.wait(allocated)
        block.holders.add(user)
        return block

    def give_back(self, number: int, user: int) -> None:
        """Take back a block of ``user``. It goes with its last user, when no copy reads or writes it any more."""
        with self.in_use:  # else another thread might be about to take it
            block = self._ring.get(number)
            if block is not None:
                block.holders.discard(user)
                if not block.holders:
                    self._drop(number)

    def _drop(self, number: int) -> None:
        # What gets this memory next, on the current stream, has to come after the copies.
        for mark in self._ring.pop(number).last.values():
            self._compute.wait(mark)

    @property
    def _others(self) -> list[Lane]:
        """All lanes that use the ring beside the current stream."""
        return [*(self._copy_lanes or ()), *([self._update_lane] if self._update_lane is not None else [])]

    def allocated_bytes(self) -> Allocated:
        """Without the staging memory, which is there or not. On the CPU, all zero."""
        if self.device.type == "cpu":
            return Allocated(0, 0)
        ring_bytes = sum(block.memory.numel() for block in list(self._ring.values()))
        now = torch.accelerator.memory_allocated(self.device) - ring_bytes
        return Allocated(now, torch.accelerator.max_memory_allocated(self.device) - ring_bytes)

    def taken_bytes(self) -> Allocated:
        """All that is in use, and the gaps between, which only an allocation that fits can have. On the CPU, zero.

        The peak is no less than what was ever taken at once: both parts need not have been largest together.
        """
        if self.device.type == "cpu":
            return Allocated(0, 0)
        stats = torch.accelerator.memory_stats(self.device)
        parts = "allocated_bytes.all", "inactive_split_bytes.all"
        return Allocated(*(sum(stats[f"{part}.{when}"] for part in parts) for when in ("current", "peak")))

    def room_beside(self, taken_bytes: int) -> int:
        """Device memory that this process may have beside so much, less a twentieth of all. On the CPU, none."""
        if self.device.type == "cpu":
            return 0
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        most = int(total * getattr(module, "get_per_process_memory_fraction", _all)(self.device))  # CUDA has it
        reachable = min(int(free) + torch.accelerator.memory_reserved(self.device), most)
        return max(0, reachable - taken_bytes - most // 20)

    def changes_hands(self, user: int) -> bool:
        """Return whether the ring was last used by somebody else, whose stores may still read it."""
        changed = self._last_user != user
        self._last_user = user
        return changed

    def key_of(self, stream: torch.Stream | None) -> int:
        """Tells the streams of this device apart; ``None``: the one that is current."""
        if self.device.type == "cpu":
            return 0
        return (current_stream(self.device) if stream is None else stream).stream_id

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
