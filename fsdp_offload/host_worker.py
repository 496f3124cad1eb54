"""The thread that updates on the host: one for each device, shared by all optimizers there.

::

    main thread:  submit(task) ─────────────────────────▶ goes on
    worker:       begin: copies down ──▶ end: wait for them, update, copies up

While one task is updated, the next one comes down and the last one goes up, each through a slot of pinned memory of its
own. The thread waits for copies; nobody on the device waits for the thread unless it needs what that makes.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .arena import Region
from .cores import cores_near, update_threads
from .transfer import Mark

_SLOTS = 3
"""One for what comes down, one for what is updated, one for what goes up."""


class Task(Protocol):
    """What the thread does. Neither method raises: who waits for the task looks for its error."""

    def begin(self, memory: Tensor, free: Mark | None) -> None:
        """Issue what has to be copied into ``memory``, a ``uint8`` tensor on the host, when ``free`` has passed."""

    def end(self) -> Mark | None:
        """Do the work. Returns a mark after which ``memory`` may be overwritten."""


@dataclass(eq=False)
class _Slot:
    region: Region
    free: Mark | None = None  # when this has passed


class HostWorker:
    """One thread and its memory. It starts with the first task and ends when the last user has left."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = update_threads()
        self._changed = threading.Condition()
        self._queue: deque[Task] = deque()
        self._unfinished = 0
        self._slots: list[_Slot] = []
        self._slot_bytes = 0
        self._pinned = False
        self._users = 0
        self._creator_pid = os.getpid()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def buffer_bytes(self) -> int:
        """Host memory of all slots."""
        return _SLOTS * self._slot_bytes

    def missing_bytes(self, slot_bytes: int) -> int:
        """Host memory that :meth:`reserve` would take in addition."""
        return _SLOTS * max(0, slot_bytes - self._slot_bytes)

    def join(self) -> None:
        """Count one more user."""
        with self._changed:
            self._users += 1

    def leave(self) -> None:
        """Count one user less. After the last one, thread and memory go; nobody waits for that."""
        if os.getpid() != self._creator_pid:
            return  # a forked child has no such thread, and the lock may have been held when it was made
        with self._changed:
            self._users -= 1
            if self._users == 0 and self._thread is None:
                self._free()
            self._changed.notify_all()

    def reserve(self, slot_bytes: int, *, pin: bool) -> None:
        """Make each slot at least that large. Waits until no task is under way where they have to grow."""
        with self._changed:
            if slot_bytes <= self._slot_bytes and (self._pinned or not pin):
                return
            self._changed.wait_for(lambda: self._unfinished == 0)
            slot_bytes = max(slot_bytes, self._slot_bytes)
            self._free()
            self._slots = [_Slot(Region(slot_bytes, device=self.device, pin=pin)) for _ in range(_SLOTS)]
            self._slot_bytes, self._pinned = slot_bytes, pin

    def submit(self, task: Task) -> None:
        """Have ``task`` done after all others submitted before; returns at once."""
        with self._changed:
            self._queue.append(task)
            self._unfinished += 1
            if self._thread is None:
                # A daemon, so that a main thread that failed does not hang; it is stopped before the interpreter goes.
                self._thread = threading.Thread(target=self._serve, name="fsdp_offload host updates", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_alive(self) -> bool:
        """Whether what has been submitted will be done."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def stop(self) -> None:
        """Let the thread end after the task that it is at, and wait for it: the interpreter is about to go."""
        if os.getpid() != self._creator_pid:
            return
        with self._changed:
            thread, self._stopping = self._thread, True
            self._queue.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(_EXIT_SECONDS)

    # In the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._prepare_thread()
        coming: deque[tuple[Task, _Slot]] = deque()
        turn = 0
        while True:
            while len(coming) < _SLOTS - 1:
                task = self._take(block=not coming)
                if task is None:
                    break
                slot = self._slots[turn % _SLOTS]
                turn += 1
                task.begin(slot.region.bytes, slot.free)
                coming.append((task, slot))
                del task  # it holds gradients
            if not coming:
                return
            task, slot = coming.popleft()
            slot.free = task.end()
            del task
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _take(self, *, block: bool) -> Task | None:
        """The next task. ``None``: there is none now, or with ``block``, there will be none any more."""
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._queue or self._stopping or not self._users)
            if self._queue:
                return self._queue.popleft()
            if block:
                self._thread = None  # another one is started if it is needed
                if not self._stopping:
                    self._free()
            return None

    def _free(self) -> None:
        for slot in self._slots:
            if slot.free is not None:
                slot.free.synchronize()
        self._slots, self._slot_bytes = [], 0

    def _prepare_thread(self) -> None:
        """Device, cores and number of threads of this thread only, before its pool of threads is made."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)
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


_EXIT_SECONDS = 10

_workers: dict[torch.device, HostWorker] = {}


def host_worker(device: torch.device) -> HostWorker:
    """The worker of ``device``, made on first use."""
    if device not in _workers:
        _workers[device] = HostWorker(device)
    return _workers[device]


@atexit.register
def _stop_all() -> None:
    # A thread that is in a kernel when the interpreter goes ends the process with an error.
    for worker in _workers.values():
        worker.stop()


def leave_with(owner: object, worker: HostWorker) -> Callable[[], object]:
    """Join ``worker``, and leave it when ``owner`` goes. Returns what leaves at once."""
    worker.join()
    leaving = weakref.finalize(owner, worker.leave)
    leaving.atexit = False
    return leaving
