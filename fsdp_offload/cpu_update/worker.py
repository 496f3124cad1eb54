"""The threads that update on the host: two for each device, shared by all optimizers there.

::

    main thread:  submit(task) ─────────────────────────▶ goes on
    copies:       begin: copies down ─┐         ┌─▶ finish: copies up
    updates:                          └▶ update ┘

While one task is updated, the next ones come down and the last one goes up; what comes down has slots of pinned memory.
Tasks are done in the order in which they were submitted, but for those that may pass others.
A thread of its own issues the copies, so that the one that updates never stands still for that: the kernels of the
optimizer do not hold the interpreter's lock. Nobody on the device waits for the threads unless it needs what they make.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..device.arena import Region
from ..device.lanes import Lane
from .cores import cores_near, update_threads
from .fingerprint import Hasher

_SLOTS = 2
"""One for what is updated, one for what comes down, in a fraction of that time. What has begun to come down cannot be
passed any more."""


class Task(Protocol):
    """Piece of work for the threads. No method raises: who waits for the task looks for its error."""

    def may_pass(self, earlier: "Task") -> bool:
        """Return at once whether to do it before ``earlier``, which was submitted first, and what came between."""

    def begin(self, memory: Tensor) -> None:
        """Issue what has to be copied into ``memory``, a ``uint8`` tensor on the host, nobody else's until the end."""

    def update(self) -> None:
        """Wait for that, and do the work."""

    def finish(self) -> None:
        """Issue the copies up."""


class _Crew:
    """The two threads that are at work; others may follow when they have gone.

    Attributes:
        ready: tasks that have begun, and their slots.
        updated: tasks to be finished.
    """

    def __init__(self) -> None:
        self.ready: deque[tuple[Task, Tensor]] = deque()
        self.updated: deque[Task] = deque()
        self.threads: list[threading.Thread] = []
        self.leaving = False


class HostWorker:
    """Two threads and their memory. They start with the first task and end when the last user has left."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = update_threads()
        self._changed = threading.Condition()
        self._queue: deque[Task] = deque()
        self._unfinished = 0
        self._slots: list[Region] = []
        self._free_slots: deque[Tensor] = deque()
        self._slot_bytes = 0
        self._pinned = False
        self._hashers: dict[Lane, Hasher] = {}
        self._users = 0
        self._creator_pid = os.getpid()
        self._stopping = False
        self._crew: _Crew | None = None

    @property
    def is_mine(self) -> bool:
        """Whether it was made in this process: a forked child has neither its threads nor its memory."""
        return os.getpid() == self._creator_pid

    @property
    def buffer_bytes(self) -> int:
        """Host memory of all slots."""
        return _SLOTS * self._slot_bytes

    def missing_bytes(self, slot_bytes: int) -> int:
        """Host memory that :meth:`reserve` would take in addition."""
        return _SLOTS * max(0, slot_bytes - self._slot_bytes)

    def hasher(self, lane: Lane) -> Hasher:
        """Make what computes fingerprints in ``lane``. Called by one thread, before that lane is used."""
        if lane not in self._hashers:
            with lane.running():
                self._hashers[lane] = Hasher(self.device)
        return self._hashers[lane]

    def join(self) -> None:
        """Count one more user."""
        with self._changed:
            self._users += 1

    def leave(self) -> None:
        """Count one user less. After the last one, thread and memory go; nobody waits for that."""
        if not self.is_mine:
            return  # a forked child has no such thread, and the lock may have been held when it was made
        with self._changed:
            self._users -= 1
            if self._users == 0 and self._crew is None:
                self._free_memory()
                self._hashers.clear()
            self._changed.notify_all()

    def reserve(self, slot_bytes: int, *, pin: bool) -> None:
        """Make each slot at least that large. Waits until no task is under way where they have to grow."""
        with self._changed:
            if slot_bytes <= self._slot_bytes and (self._pinned or not pin):
                return
            self._changed.wait_for(lambda: self._unfinished == 0)
            slot_bytes = max(slot_bytes, self._slot_bytes)
            self._free_memory()
            self._slots = [Region(slot_bytes, device=self.device, pin=pin) for _ in range(_SLOTS)]
            self._free_slots = deque(slot.bytes for slot in self._slots)
            self._slot_bytes, self._pinned = slot_bytes, pin

    def submit(self, task: Task) -> None:
        """Have ``task`` done after all others submitted before that it may not pass; returns at once."""
        with self._changed:
            self._queue.append(task)
            self._unfinished += 1
            if self._crew is None:
                self._crew = self._start()
            self._changed.notify_all()

    def is_alive(self) -> bool:
        """Return whether what has been submitted will be done."""
        crew = self._crew
        return crew is not None and all(thread.is_alive() for thread in crew.threads)

    def stop(self) -> None:
        """Let the threads end after the task that they are at, and wait for them: the interpreter is about to go."""
        if not self.is_mine:
            return
        with self._changed:
            crew, self._stopping = self._crew, True
            self._queue.clear()
            self._changed.notify_all()
        for thread in crew.threads if crew is not None else ():
            thread.join(_EXIT_SECONDS)

    def _start(self) -> _Crew:
        crew = _Crew()
        for name, serve in (("updates", self._serve_updates), ("copies", self._serve_copies)):
            # Daemons, so that a main thread that failed does not hang; they are stopped before the interpreter goes.
            thread = threading.Thread(target=serve, args=(crew,), name=f"fsdp_offload host {name}", daemon=True)
            crew.threads.append(thread)
        for thread in crew.threads:
            thread.start()
        return crew

    # In the thread for copies ------------------------------------------------------------------------------------

    def _serve_copies(self, crew: _Crew) -> None:
        self._use_device()
        while self._copy_once(crew):
            pass

    def _copy_once(self, crew: _Crew) -> bool:
        """Finish or begin a task. Locals go with each: tasks hold gradients."""
        with self._changed:
            self._changed.wait_for(
                lambda: crew.updated or (self._queue and self._free_slots) or crew.leaving or self._stopping
            )
            if not crew.updated and (crew.leaving or self._stopping):
                return False
            finished = crew.updated.popleft() if crew.updated else None
            begun = None if finished is not None else (self._take_next(), self._free_slots.popleft())
        if begun is not None:
            begun[0].begin(begun[1])
        if finished is not None:
            finished.finish()
        with self._changed:
            if begun is not None:
                crew.ready.append(begun)
            else:
                self._unfinished -= 1
            self._changed.notify_all()
        return True

    def _take_next(self) -> Task:
        """The task that waits for longest, or the one that passes it."""
        first = 0
        # From the end: what became ready during the look is found for the first task of a wave, not for a later one.
        for index in reversed(range(1, len(self._queue))):
            task = self._queue[index]
            if task.may_pass(self._queue[0]) and not (first and self._queue[first].may_pass(task)):
                first = index
        task = self._queue[first]
        del self._queue[first]
        return task

    # In the thread for updates -----------------------------------------------------------------------------------

    def _serve_updates(self, crew: _Crew) -> None:
        self._prepare_thread()
        while self._update_once(crew):
            pass

    def _update_once(self, crew: _Crew) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: crew.ready or self._stopping or not (self._users or self._unfinished or self._queue)
            )
            if not crew.ready or self._stopping:
                self._crew, crew.leaving = None, True  # others are started if they are needed
                if not self._stopping:
                    if self.device.type != "cpu":
                        torch.accelerator.synchronize(self.device)  # uploads of who was dropped may be under way
                    self._free_memory()
                    self._hashers.clear()
                self._changed.notify_all()
                return False
            task, slot = crew.ready.popleft()
        task.update()
        with self._changed:
            self._free_slots.append(slot)
            crew.updated.append(task)
            self._changed.notify_all()
        return True

    def _free_memory(self) -> None:
        self._slots, self._slot_bytes = [], 0
        self._free_slots.clear()

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


_EXIT_SECONDS = 10

_workers: dict[torch.device, HostWorker] = {}


def host_worker(device: torch.device) -> HostWorker:
    """The worker of ``device``, made on first use."""
    if device not in _workers or not _workers[device].is_mine:
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
