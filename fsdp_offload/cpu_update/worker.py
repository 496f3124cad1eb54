"""The threads that update on the host: three for each device, shared by all optimizers there.

::

    main thread:  submit(job) ──▶ goes on
    down:                   └▶ begin: copies down ─┐
    updates:                                       └▶ update ─┐
    up:                                                       └▶ finish: copies up

While one job is updated, the next one comes down into another slot of pinned memory, and the last one goes up, in the
order in which jobs were submitted. The thread that updates never stands still for copies, and the kernels of the
optimizer do not hold the interpreter's lock.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch

from ..device.arena import Region
from .job import HostJob, Slot

_SLOTS = 2  # one for what is updated, one for what comes down, in a fraction of that time


class HostWorker:
    """Three threads, from the first job until the last user is gone, and their memory. The interpreter joins them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.creator_pid = device, os.getpid()
        self._slots: SimpleQueue[Slot] = SimpleQueue()  # that no job is in
        self._slot_bytes, self._pinned = 0, False

        def thread(name: str, prepare: Callable[[], object]) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(1, f"fsdp_offload host {name}", prepare)

        self._down, self._up = (thread(name, partial(_use_device, device)) for name in ("down", "up"))
        self._updates = thread("updates", partial(_prepare_thread, device, update_threads()))

    def missing_bytes(self, slot_bytes: int) -> int:
        """Host memory that :meth:`reserve` would take in addition."""
        return _SLOTS * max(0, slot_bytes - self._slot_bytes)

    def reserve(self, slot_bytes: int, *, pin: bool) -> None:
        """Make each slot at least that large. Waits until no job is in one where they have to grow."""
        if slot_bytes <= self._slot_bytes and (self._pinned or not pin):
            return
        slot_bytes, pin = max(slot_bytes, self._slot_bytes), pin or self._pinned
        for _ in range(_SLOTS if self._slot_bytes else 0):
            self._slots.get()  # there may not be room for both
        self._slot_bytes = 0
        regions = [Region(slot_bytes, device=self.device, pin=pin) for _ in range(_SLOTS)]
        self._slot_bytes, self._pinned = slot_bytes, pin
        for region in regions:
            self._slots.put(Slot(region))

    def submit(self, job: HostJob) -> None:
        """Have ``job`` done after all others submitted before; returns at once."""
        self._down.submit(self._begin, job)

    def _begin(self, job: HostJob) -> None:
        slot = self._slots.get()
        job.begin(slot)
        try:
            self._updates.submit(self._update, job, slot)
        except RuntimeError:  # the interpreter goes, and joins this thread
            self._slots.put(slot)

    def _update(self, job: HostJob, slot: Slot) -> None:
        job.update()
        self._up.submit(self._finish, job, slot)

    def _finish(self, job: HostJob, slot: Slot) -> None:
        job.finish()
        slot.uploaded = job.uploaded
        self._slots.put(slot)


_workers: "weakref.WeakValueDictionary[torch.device, HostWorker]" = weakref.WeakValueDictionary()


def host_worker(device: torch.device) -> HostWorker:
    """The worker of ``device``, made for its first user."""
    worker = _workers.get(device)
    if worker is None or worker.creator_pid != os.getpid():  # a forked child has neither its threads nor its memory
        worker = _workers[device] = HostWorker(device)
    return worker


def _use_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def _prepare_thread(device: torch.device, threads: int) -> None:
    """Device, cores and number of threads of this thread only, before its pool of threads is made."""
    _use_device(device)
    cores = cores_near(device)
    if cores != frozenset(os.sched_getaffinity(0)):
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then the kernel chooses among all
            os.sched_setaffinity(0, cores)
    usual = torch.get_num_threads()
    torch.set_num_threads(min(threads, len(cores)))
    # That counts for this thread, and for all that begin later, which are not ours. A thread that ends at once puts the
    # number for those back, and ours keeps its own.
    restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restoring.start()
    restoring.join()


# Cores ----------------------------------------------------------------------------------------------------------------


def update_threads() -> int:
    """Return how many threads may update on this rank: 7/8 of its share of the process's cores, or one less.

    The threads of a kernel wait for each other: with one on each core, all wait for the one whose core the main thread
    has, or the one that issues copies. (H200, 16 cores: 240 ms with 16 threads, 203 with 15, 211 with 14.)
    """
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores - max(1, cores // 8))


def cores_near(device: torch.device) -> frozenset[int]:
    """Cores of this process on the device's NUMA node; all of them where the kernel does not say."""
    allowed = frozenset(os.sched_getaffinity(0))
    if device.type != "cuda":
        return allowed
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
    return cores_of_pci("{:04x}:{:02x}:{:02x}.0".format(*numbers)) & allowed or allowed


def cores_of_pci(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Cores of the NUMA node of a PCI device (``"0000:17:00.0"``), which are listed as ``"0-3,8,10-11"``."""
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):  # virtual machines and containers often hide it; the node is then -1 or missing
        return frozenset()
    parts = [part.split("-") for part in listed.split(",") if part]
    return frozenset(core for part in parts for core in range(int(part[0]), int(part[-1]) + 1))
