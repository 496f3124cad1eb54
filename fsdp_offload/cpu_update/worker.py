"""The threads that update on the host: two for each device, shared by all optimizers there.

::

    main thread:  submit(job) ──────────────────────────▶ goes on
    copies:       begin: copies down ─┐         ┌─▶ finish: copies up
    updates:                          └▶ update ┘

While one job is updated, the next one comes down into another slot of pinned memory, and the last one goes up. Jobs are
done in the order in which they were submitted, but for those that may pass others. A thread of its own issues the
copies, so that the one that updates never stands still for that: the kernels of the optimizer do not hold the
interpreter's lock. Nobody on the device waits for the threads unless it needs what they make.
"""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from ..device.arena import Region
from .cores import cores_near, update_threads
from .job import HostJob

_SLOTS = 2
"""One for what is updated, one for what comes down, in a fraction of that time. What has begun to come down cannot be
passed any more."""


class HostWorker:
    """Two threads and their memory. They start with the first job and end when the last user has left."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.threads = device, update_threads()
        self._changed = threading.Condition()  # its lock may be taken again: a finalizer may call leave() anywhere
        self._queue: list[HostJob] = []
        self._unfinished = self._users = 0
        self._free_slots: list[Region] = []
        self._slot_bytes, self._pinned = 0, False
        self._creator_pid = os.getpid()
        self._copies, self._updates = self._new_threads()

    @property
    def is_mine(self) -> bool:
        """Whether it was made in this process: a forked child has neither its threads nor its memory."""
        return os.getpid() == self._creator_pid

    def missing_bytes(self, slot_bytes: int) -> int:
        """Host memory that :meth:`reserve` would take in addition."""
        return _SLOTS * max(0, slot_bytes - self._slot_bytes)

    def join(self) -> None:
        """Count one more user."""
        with self._changed:
            self._users += 1

    def leave(self) -> None:
        """Count one user less. Threads and memory go with the last one and its jobs; nobody waits for that."""
        if not self.is_mine:
            return  # the lock may have been held when the child was made
        with self._changed:
            self._users -= 1
            self._end_if_unused()

    def reserve(self, slot_bytes: int, *, pin: bool) -> None:
        """Make each slot at least that large. Waits until no job is under way where they have to grow."""
        with self._changed:
            if slot_bytes <= self._slot_bytes and (self._pinned or not pin):
                return
            self._changed.wait_for(lambda: not self._unfinished)
            slot_bytes, pin = max(slot_bytes, self._slot_bytes), pin or self._pinned
            self._free_slots, self._slot_bytes = [], 0  # there may not be room for both
            self._free_slots = [Region(slot_bytes, device=self.device, pin=pin) for _ in range(_SLOTS)]
            self._slot_bytes, self._pinned = slot_bytes, pin

    def submit(self, job: HostJob) -> None:
        """Have ``job`` done after all others submitted before that it may not pass; returns at once."""
        with self._changed:
            self._queue.append(job)
            self._unfinished += 1
            self._copies.submit(self._begin)

    def _new_threads(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """One for copies and one for updates; each starts with its first job.

        The interpreter waits for them when it goes: a thread that is in a kernel then would end the process with an
        error.
        """
        copies = ThreadPoolExecutor(1, "fsdp_offload host copies", self._use_device)
        return copies, ThreadPoolExecutor(1, "fsdp_offload host updates", self._prepare_thread)

    def _begin(self) -> None:
        with self._changed:
            if not (self._queue and self._free_slots):
                return  # it is called again for each job, and for each slot that has become free
            job, slot = self._take_next(), self._free_slots.pop()
        job.begin(slot.bytes)
        self._updates.submit(self._update, job, slot)

    def _take_next(self) -> HostJob:
        """The job that waits for longest, or the one that passes it."""
        first = 0
        # From the end: what became ready during the look is found for the first job of a wave, not for a later one.
        for index in reversed(range(1, len(self._queue))):
            job = self._queue[index]
            if job.may_pass(self._queue[0]) and not (first and self._queue[first].may_pass(job)):
                first = index
        return self._queue.pop(first)

    def _update(self, job: HostJob, slot: Region) -> None:
        job.update()
        self._copies.submit(self._finish, job, slot)

    def _finish(self, job: HostJob, slot: Region) -> None:
        job.finish()
        with self._changed:
            self._free_slots.append(slot)
            self._unfinished -= 1
            self._end_if_unused()
            self._changed.notify_all()
        self._begin()

    def _end_if_unused(self) -> None:
        if not (self._users or self._unfinished):
            self._copies.shutdown(wait=False)
            self._updates.shutdown(wait=False)
            self._copies, self._updates = self._new_threads()
            self._free_slots, self._slot_bytes = [], 0

    def _use_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)

    def _prepare_thread(self) -> None:
        """Device, cores and number of threads of this thread only, before its pool of threads is made."""
        self._use_device()
        cores = cores_near(self.device)
        if cores != frozenset(os.sched_getaffinity(0)):
            with contextlib.suppress(OSError):  # a sandbox may forbid it; then the kernel chooses among all
                os.sched_setaffinity(0, cores)
        usual = torch.get_num_threads()
        torch.set_num_threads(min(self.threads, len(cores)))
        # That counts for this thread, and for all that begin later, which are not ours. A thread that ends at once puts
        # the number for those back, and ours keeps its own.
        restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
        restoring.start()
        restoring.join()


_workers: dict[torch.device, HostWorker] = {}


def host_worker(device: torch.device) -> HostWorker:
    """The worker of ``device``, made on first use."""
    if device not in _workers or not _workers[device].is_mine:
        _workers[device] = HostWorker(device)
    return _workers[device]
