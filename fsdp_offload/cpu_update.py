"""Runs the user's optimizer on the CPU for its share of the state, which is updated where it lives (``host_fraction``).

::

    main thread:  submit a job for each bucket ──▶ go on, and wait for it when somebody needs what it makes
    down:         └▶ begin: gradients and parameters come down ─┐
    updates:                                                    └▶ update: the class on host tensors ─┐
    up:                                                                    finish: parameters go up ◀─┘

Three threads for each device do the jobs of all optimizers there: while one is updated, the next one comes down into
another slot of pinned memory, and the last one goes up, in the order in which they were submitted. The thread that
updates never stands still for copies, and the kernels of the optimizer do not hold the interpreter's lock.

Parameters come down each time: to find out on the device whether somebody has written them since takes longer (one
H100, all state on the CPU: 615 ms an iteration instead of 538).
"""

import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from .device.arena import Region, aligned
from .device.lanes import EventMark, Lane, Lanes, Mark, device_link, recorded
from .fsdp.dtensor import local_shard
from .optimizers import Capabilities
from .optimizers.bucket_update import BoundRange, update_bucket
from .optimizers.divided_step import DividedStep, entries_of, instance_attributes
from .optimizers.masters import in_memory_order
from .policy import OffloadPolicy, listed
from .state.layout import dense_stride
from .state.shard import StateShard
from .state.store import OwnCounters, StateStore

_SLOTS = 2  # one for what is updated, one for what comes down, in a fraction of that time


@dataclass(eq=False)
class Slot:
    """Pinned memory through which gradients and parameters of one job after another pass."""

    memory: Region
    uploaded: Mark | None = None  # R1: recorded behind the parameters that went up from here last


class HostStep:
    """One logical step as it was when it was called; the buckets of the host share it, and its threads look into it."""

    def __init__(
        self,
        cls: type[Optimizer],
        capabilities: Capabilities,
        optimizer: Optimizer,
        shards: Iterable[StateShard],
        down: Lane,
    ) -> None:
        """Note where the step starts. Tensors are copied: a scheduler may write them before they have been read."""
        self._cls, self._capabilities, self._down = cls, capabilities, down
        groups = entries_of(optimizer)
        self._values = tree_map_only(
            Tensor, lambda one: one.detach().clone(), {**instance_attributes(optimizer), "param_groups": groups}
        )
        dtypes: defaultdict[int, set[torch.dtype]] = defaultdict(set)
        for shard in shards:
            dtypes[shard.group].add(shard.param.dtype)
        self._pinned = [capabilities.host_options(group, dtypes[number]) for number, group in enumerate(groups)]
        self.gradient_divisor, found_inf = self._values.get("grad_scale"), self._values.get("found_inf")
        scale = self.gradient_divisor
        if scale is not None and any(one.get("fused") is False for one in self._pinned):
            raise RuntimeError(
                f"OffloadPolicy(host_fraction=...): a GradScaler needs a fused {cls.__name__}, and the CPU's is "
                "wrong in the dtype of the parameters. Use host_fraction=0. Nothing has been changed."
            )
        # As in a fused kernel, the user's gradients are divided by the scale, or by one where it skips the step.
        if scale is not None and found_inf is not None:
            self.gradient_divisor = torch.where(found_inf.to(scale.device) == 1, torch.ones_like(scale), scale)
        self.failed = False  # an update has, so that later ones are left out

    @cached_property
    def divided(self) -> DividedStep:
        """The step, with tensors on the host: the updating thread brings them there for the first bucket."""
        with self._down.running():
            values = SimpleNamespace(**tree_map_only(Tensor, Tensor.cpu, self._values))
        return DividedStep(self._cls, self._capabilities, values, pinned=self._pinned)


@dataclass(eq=False)
class HostJob:
    """The update of one bucket in one step. No method raises: whoever waits for the job looks for its error."""

    number: int
    ranges: list[BoundRange]  # those that have a gradient, bound to state at home
    params: list[Tensor]  # of these, on the device
    grads: list[Tensor]  # likewise, held until they have been copied
    moves: list[tuple[Tensor, Tensor]]  # state to copy first, to and from: a save still reads where it was
    step: HostStep
    states: StateStore  # copies of the user's entries
    lanes: Lanes
    after: Sequence[Mark | None]  # passed before gradients and parameters are read
    errors: list[tuple[str, BaseException]]  # of all jobs: what has happened, and why
    done: threading.Event = field(default_factory=threading.Event)  # the host may look at results and ``errors``
    uploaded: Mark | None = None  # recorded behind the parameters' way up
    failed: bool = False  # it, or another one of its step before it
    update_seconds: float = 0.0
    state_bytes: int = 0  # that it has updated
    _down: Mark | None = None
    _updated: bool = False

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error for the main thread, whatever it is."""
        try:
            with torch.no_grad():
                yield
        except BaseException as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        shown = listed(bound.shard.name for bound in self.ranges)
        stopped = f"stopped with {type(error).__name__}: {error}. Parameters {shown} may be half updated"
        self.errors.append((stopped, error))
        self.step.failed = self.failed = True

    def begin(self, worker: "HostWorker") -> None:
        """Issue the copies down, into a slot that is nobody else's until :meth:`finish`."""
        slot = worker.slots.get()
        with self._failing():
            if not self.step.failed:
                self._issue_downloads(slot)
        _submit(worker.updates, self.update, worker, slot)

    def _issue_downloads(self, slot: Slot) -> None:
        down = self.lanes.down
        down.wait(*self.after, slot.uploaded)  # R1: parameters of the job before may still go up from here
        offset = 0

        def place(source: Tensor) -> Tensor:
            nonlocal offset
            memory = slot.memory.bytes[offset : offset + source.nbytes]
            offset += aligned(source.nbytes)
            return memory.view(source.dtype).as_strided(source.shape, dense_stride(source))

        on_host = [place(one) for one in (*self.grads, *self.params)]
        grads, params = on_host[: len(self.grads)], on_host[len(self.grads) :]
        self.ranges = [replace(one, param=param) for one, param in zip(self.ranges, params, strict=True)]
        for bound, grad in zip(self.ranges, grads, strict=True):
            bound.gradient = grad
        # One piece: nobody else's small copies go down here.
        down.copy([*zip(on_host, (*self.grads, *self.params), strict=True)])
        if (divisor := self.step.gradient_divisor) is not None:
            with down.running():
                for grad in self.grads:
                    if grad.dtype.itemsize < divisor.dtype.itemsize:
                        grad.copy_(grad.to(divisor.dtype).div_(divisor))  # in its own dtype the scale might not exist
                    else:
                        grad.div_(divisor)
        self._down = down.mark()

    def update(self, worker: "HostWorker", slot: Slot) -> None:
        with self._failing():
            if self._down is not None:
                self._down.synchronize()
                self.grads = []  # may be freed now
                if not self.step.failed:
                    with recorded(f"fsdp_offload H{self.number}"):
                        self._update()
        for bound in self.ranges:
            bound.gradient = None  # the memory is somebody else's from now on
        self.failed = self.failed or self.step.failed
        _submit(worker.up, self.finish, worker, slot)

    def _update(self) -> None:
        step = self.step.divided
        begin = time.perf_counter()
        for target, source in self.moves:
            target.copy_(source)
        # torch's fused SGD takes ranges that all have state, or that all have none; it is us who choose fused kernels.
        parts: tuple[list[BoundRange], list[BoundRange]] = [], []
        for bound in self.ranges:
            grad = bound.gradient
            if grad is not None and grad.stride() != bound.param.stride():  # and those go through memory
                bound.gradient = torch.empty_like(bound.param, dtype=grad.dtype).copy_(grad)
            parts[any(value is not None for value in self.states.get(bound.shard.param).values())].append(bound)
        for part in filter(None, parts):
            update_bucket(step, part, self.states)
        self.update_seconds = time.perf_counter() - begin
        self.state_bytes = sum(value.nbytes for bound in self.ranges for value in bound.values.values())
        self._updated = True

    def finish(self, worker: "HostWorker", slot: Slot) -> None:
        with self._failing():
            if self._updated:
                self._issue_uploads()
        # The rest goes with its step, not with the next step of this bucket.
        self.ranges, self.params, self.grads, self.moves, self.after = [], [], [], [], ()
        self.step = self.states = None  # type: ignore[assignment]
        self.done.set()
        slot.uploaded = self.uploaded
        worker.slots.put(slot)

    def _issue_uploads(self) -> None:
        pairs = [(param, one.param) for param, one in zip(self.params, self.ranges, strict=True)]
        # Ours are dense. What has to be rearranged on its way is copied in one piece.
        flat = [(_bytes(param), _bytes(own)) for param, own in pairs if param.stride() == own.stride()]
        others = [(param, own) for param, own in pairs if param.stride() != own.stride()]
        self.lanes.up.copy([*flat, *others])
        self.uploaded = self.lanes.up.mark()


def _submit(pool: ThreadPoolExecutor, stage: Callable[["HostWorker", Slot], None], *args: Any) -> None:
    """Run the next stage of a job in its thread; here, behind all others, if the interpreter goes and lets none begin.

    ``atexit`` functions come after that: one that saves waits for these jobs.
    """
    try:
        pool.submit(stage, *args)
    except RuntimeError:
        pool.shutdown(wait=True)
        stage(*args)


def _bytes(dense: Tensor) -> Tensor:
    return in_memory_order(dense).view(torch.uint8)


# Threads --------------------------------------------------------------------------------------------------------------


class HostWorker:
    """Three threads, from the first job until the last user is gone, and their memory. The interpreter joins them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.creator_pid = device, os.getpid()
        self.slots: SimpleQueue[Slot] = SimpleQueue()  # that no job is in
        self.slot_bytes, self._pinned = 0, False
        self.down = ThreadPoolExecutor(1, "fsdp_offload host down", partial(_use_device, device))
        self.updates = ThreadPoolExecutor(1, "fsdp_offload host updates", partial(_prepare_thread, device))
        self.up = ThreadPoolExecutor(1, "fsdp_offload host up", partial(_use_device, device))

    def reserve(self, slot_bytes: int, *, pin: bool) -> None:
        """Make each slot at least that large. Waits until no job is in one where they have to grow."""
        if slot_bytes <= self.slot_bytes and (self._pinned or not pin):
            return
        slot_bytes, pin = max(slot_bytes, self.slot_bytes), pin or self._pinned
        slots: list[Slot] = []
        try:
            while self.slot_bytes and len(slots) < _SLOTS:
                slots.append(self.slots.get())
            made = [Slot(Region(slot_bytes, device=self.device, pin=pin)) for _ in range(_SLOTS)]
            slots, self.slot_bytes, self._pinned = made, slot_bytes, pin
        finally:  # after an error, or an interrupt, jobs under way need those that there were
            for slot in slots:
                self.slots.put(slot)


_workers: "weakref.WeakValueDictionary[torch.device, HostWorker]" = weakref.WeakValueDictionary()


def host_worker(device: torch.device) -> HostWorker:
    worker = _workers.get(device)
    if worker is None or worker.creator_pid != os.getpid():  # a forked child has neither its threads nor its memory
        worker = _workers[device] = HostWorker(device)
    return worker


def _use_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def _prepare_thread(device: torch.device) -> None:
    """Choose device, cores and number of threads of this thread only, before its pool of threads is made.

    It may have 7/8 of this rank's cores, or one less. The threads of a kernel wait for each other: with one on each
    core, all wait for the one whose core the main thread has, or the one that issues copies. (H200, 16 cores: 240 ms
    with 16 threads, 203 with 15, 211 with 14.)
    """
    _use_device(device)
    near = cores = frozenset(os.sched_getaffinity(0))
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        numbers = [getattr(found, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
        near = cores_of_pci("{:04x}:{:02x}:{:02x}.0".format(*numbers)) & cores or cores
    if near != cores:
        with suppress(OSError):  # a sandbox may forbid it; then the kernel chooses among all
            os.sched_setaffinity(0, near)
    share, usual = len(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads()
    torch.set_num_threads(max(1, min(share - max(1, share // 8), len(near))))
    # That counts for this thread, and for all that begin later, which are not ours. A thread that ends at once puts the
    # number for those back, and ours keeps its own.
    restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restoring.start()
    restoring.join()


def cores_of_pci(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Cores of the NUMA node of a PCI device (``"0000:17:00.0"``), which are listed as ``"0-3,8,10-11"``."""
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):  # virtual machines and containers often hide it; the node is then -1 or missing
        return frozenset()
    parts = [part.split("-") for part in text.split(",") if part]
    return frozenset(core for part in parts for core in range(int(part[0]), int(part[-1]) + 1))


# One optimizer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CpuMark(Mark):
    """The end of the last update of one bucket, and of the way up of its parameters."""

    host: "HostUpdates"
    number: int

    def resolved(self) -> EventMark | None:
        """Block the host until the CPU has updated; returns a mark behind which parameters are new on the device."""
        uploaded = self.host.wait_updated(self.number)
        return None if uploaded is None else uploaded.resolved()

    def synchronize(self) -> None:
        """Block the host until the device has the parameters."""
        if (uploaded := self.host.wait_updated(self.number)) is not None:
            uploaded.synchronize()


class HostUpdates:
    """The CPU's side of one optimizer: what has been submitted, and the waits for it."""

    def __init__(
        self, cls: type[Optimizer], capabilities: Capabilities, policy: OffloadPolicy, device: torch.device
    ) -> None:
        self.failure = ""  # why its part of the state is only half updated
        self._cls, self._capabilities, self._policy = cls, capabilities, policy
        self._link, self._worker = device_link(device), host_worker(device)
        self._lanes = self._link.lanes(serial=policy.serial)
        self._jobs: dict[int, HostJob] = {}  # the last one of each bucket
        self._entries: dict[int, OwnCounters] = {}  # of jobs that nobody has waited for
        self._step: HostStep | None = None
        self._creates = False  # some job makes state where there is none
        self._waited_seconds = 0.0
        self._errors: list[tuple[str, BaseException]] = []  # of all jobs
        # Hooks on a model have it, and so wait for the last step of an optimizer that is gone.
        self.wait_without_owner = partial(_wait_without_owner, self._jobs, self._errors)

    def missing_bytes(self, slot_bytes: int) -> int:
        return _SLOTS * max(0, slot_bytes - self._worker.slot_bytes)

    def reserve(self, slot_bytes: int) -> None:
        """Take the memory through which buckets pass: gradients and parameters of the largest."""
        # A slot is needed for empty shards as well.
        self._worker.reserve(max(1, slot_bytes), pin=self._policy.pins(self._link.device.type))

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> None:
        """Note where a logical step starts; ``shards`` are all that the CPU updates."""
        self._waited_seconds = 0.0
        self.wait_quietly()  # counters of a parameter in several buckets are new when the last of them is
        self._step = HostStep(self._cls, self._capabilities, optimizer, shards, self._lanes.down)

    def update(
        self,
        number: int,
        ranges: Sequence[BoundRange],
        states: StateStore,
        moving: Sequence[StateShard],
        after: Sequence[Mark],
    ) -> CpuMark:
        """Have all ``ranges`` of a bucket updated. Returns at once; gradients are held until they have been read.

        ``states`` gets counters and what is created when somebody waits for the update, which writes the other home of
        shards that are ``moving``. Marks ``after`` which gradients may be read are waited for when the job is issued:
        if the stream waited now, jobs before it that are issued later would wait for the whole backward.
        """
        assert self._step is not None, "begin() comes first"
        self.wait_quietly(number)
        before = self._jobs.get(number)  # R3: its parameters may still be on their way up
        gradient = self._capabilities.conventions.gradient
        active: list[BoundRange] = []
        moves: list[tuple[Tensor, Tensor]] = []
        grads: list[Tensor] = []
        is_copied = False
        for bound in ranges:
            shard, state = bound.shard, states.get(bound.shard.param)
            values = now = shard.values_at(shard.side, bound.start, bound.stop)
            if shard in moving:
                values = shard.values_at(1 - shard.side, bound.start, bound.stop)
                moves += [(values[name], now[name]) for name in now if state.get(name) is not None]
            whole = gradient(shard.param) if shard.group >= 0 else None
            grad = bound.part_of(whole)
            if whole is None or grad is None:
                continue
            grads.append(grad)
            is_copied |= not local_shard(whole).is_contiguous()
            active.append(replace(bound, values=values))
            for name, value in state.items():  # counters, where they are read now
                if isinstance(value, Tensor) and value.dim() == 0 and name not in shard.homes:
                    state[name] = value.cpu()
            self._creates |= any(state.get(name) is None for name in shard.homes)
            # Counted here, where the order with what others count is that of the program.
            increment_version(local_shard(shard.param))
        if grads or moves:
            params = [bound.param.data for bound in active]  # ``data``: main counts these writes
            shards = {bound.shard.param: bound.shard for bound in active}
            # Not of ``states``, which knows the engine: entries may be pending when the optimizer is dropped.
            users = StateStore(defaultdict(dict, {param: states.of(param) for param in shards}))
            entries = OwnCounters(users, shards)
            with torch.no_grad():
                entries.copy(shards)
            # Gradients may be wider than parameters, which the plan has counted twice.
            self.reserve(sum(aligned(one.nbytes) for one in (*grads, *params)))
            copied = self._lanes.compute.mark() if is_copied else None  # R3
            job = HostJob(
                number=number,
                ranges=active,
                params=params,
                grads=grads,
                moves=moves,
                step=self._step,
                states=entries.alone(),
                lanes=self._lanes,
                after=(*after, copied, None if before is None else before.uploaded),
                errors=self._errors,
            )
            self._jobs[number], self._entries[number] = job, entries
            self._worker.down.submit(job.begin, self._worker)
            if self._policy.serial:
                self.wait_quietly(number)
        return CpuMark(self, number)

    # Waiting -----------------------------------------------------------------------------------------------------

    def wait_updated(self, number: int) -> Mark | None:
        """Block until the last update of a bucket is done, ``None``: there was none; raise if its step has failed."""
        self.wait_quietly(number)
        job = self._jobs.get(number)
        if job is not None and job.failed:
            self.raise_failure()
        return None if job is None else job.uploaded

    def wait_quietly(self, number: int | None = None) -> None:
        """Block until no update is under way, or not that of one bucket; a failure is kept for who asks next.

        Updates before it end first: buckets share parameters, and the counters of the last one count.
        """
        for one in list(self._entries) if number is None or number in self._entries else ():
            self._wait_for(one)
            if one == number:
                return

    def _wait_for(self, number: int) -> None:
        job = self._jobs[number]
        if not job.done.is_set():
            begin = time.perf_counter()
            job.done.wait()
            self._waited_seconds += time.perf_counter() - begin
        entries = self._entries.pop(number)
        if not job.failed:
            with torch.no_grad():
                entries.commit()

    def wait_created(self) -> None:
        """Wait for all updates if some make state where there was none: the user finds it after ``step()``."""
        if self._creates:
            self._creates = False
            self.wait_quietly()
            self.raise_failure()

    def forget(self) -> None:
        """Buckets have other numbers from now on. Compute has waited for all updates, and what comes up after them."""
        self.wait_quietly()
        self._jobs.clear()

    def raise_failure(self) -> None:
        """Raise what has failed by now, if nobody has been told yet; then nothing is under way any more."""
        if not self._errors:
            return
        # Who is told may load weights at once, and what was updated before would still come up over them.
        self.wait_quietly()
        self._link.synchronize()
        stopped, error = self._errors[0]
        self._errors.clear()  # raised once; from then on the failure is looked at
        rest = "those that the host updates after them are as before that step, all others are new"
        self.failure = f"the host's part of an earlier step() {stopped}; {rest}"
        raise RuntimeError(f"step(), with OffloadPolicy(host_fraction=...): {self.failure}.") from error

    def counters_as_made(self, shards: Iterable[StateShard], states: StateStore) -> None:
        """Put 0-dim tensors of their state where the optimizer made them, as an update on the device wants them."""
        for shard in shards:
            state = states.get(shard.param)
            for name, example in shard.layout.scalars.items():
                value = state.get(name)
                if isinstance(example, Tensor) and isinstance(value, Tensor):
                    state[name] = value.to(example.device)

    def last_times(self) -> dict[str, Any]:
        """Return the fields of a report's ``StepRecord`` that the last updates have set; waits for them."""
        self.wait_quietly()
        jobs = self._jobs.values()
        return {
            "host_updated_bytes": sum(job.state_bytes for job in jobs),
            "host_update_ms": sum(job.update_seconds for job in jobs) * 1e3,
            "host_waited_ms": self._waited_seconds * 1e3,
        }


def _wait_without_owner(jobs: dict[int, HostJob], errors: list[tuple[str, BaseException]]) -> None:
    """Block until all parameters of the last step are new; at once from the second time on."""
    for job in jobs.values():
        job.done.wait()
        if job.uploaded is not None:
            job.uploaded.synchronize()
    jobs.clear()
    if errors:
        stopped, error = errors[0]
        errors.clear()
        raise RuntimeError(f"the host's part of the last step() of an optimizer that is gone {stopped}.") from error
