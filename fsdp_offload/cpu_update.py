"""Runs the user's optimizer on the CPU for its share of the state, which stays in host memory (``host_fraction``).

::

    main thread:  submit a job for each bucket ──▶ continue; step() ends when all jobs have ended
    down:         └▶ copy gradients and parameters down ─┐
    updates:                                             └▶ update host tensors by the class ─▶ copy parameters up

While one job is updated, the next one is copied down into the other buffer of pinned memory, and the one before is
copied up. Every step copies the parameters down: a check on the device whether they were written since the last step
takes longer (one H100, all state on the CPU: 615 ms an iteration instead of 538).
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from .device.arena import Region, aligned
from .device.host_limits import cores_of_rank
from .device.lanes import Copy, EventMark, Mark, device_link, recorded
from .device.worker import use
from .fsdp.dtensor import local_shard
from .optimizers import Capabilities
from .optimizers.bucket_update import BoundRange, update_bucket
from .optimizers.divided_step import DividedStep, entries_of, instance_attributes
from .optimizers.masters import in_memory_order
from .policy import OffloadPolicy, listed
from .state.layout import dense_stride
from .state.shard import StateShard
from .state.store import Counted, StateStore, counters_of

_TIMES = ("host_updated_bytes", "host_update_ms", "host_waited_ms")
_BUFFERS = 2  # one for the update, one for the copies down, which take a fraction of the update's time


@dataclass(frozen=True, eq=False)
class CpuMark(Mark):
    """End of a bucket's update and of the copies of its parameters up. Errors are left to ``step()``."""

    ended: Future[Mark | None]

    def wait(self) -> Mark:
        """Block the host until the CPU has updated; return the mark after which the device has the new parameters."""
        return self.ended.result() or Mark()

    def resolved(self) -> EventMark | None:
        return self.wait().resolved()

    def synchronize(self) -> None:
        self.wait().synchronize()


@dataclass(eq=False)
class HostJob:
    """Update of one bucket in one step."""

    number: int
    ranges: list[BoundRange] = field(default_factory=list)  # with a gradient, bound to state in its home
    params: list[Tensor] = field(default_factory=list)  # of the ranges, on the device
    grads: list[Tensor] = field(default_factory=list)  # likewise, kept until they have been copied
    moves: list[Copy] = field(default_factory=list)  # state to copy first, because a save still reads its old home
    states: StateStore = field(init=False)  # the user's entries
    counted: Counted | None = None  # gets their counters after the update, unless ``step()`` has begun it
    arrived: Mark | None = None  # recorded after the copies down


class HostUpdates:
    """Runs one optimizer's updates on the CPU, in two threads with pinned memory. A step's updates end in that step.

    Attributes:
        ended: end of the last update in this step, by bucket.
        error: error of the first update that failed; the step skips later ones.
        times: fields of a report's ``StepRecord``, of the last step.
    """

    def __init__(
        self, cls: type[Optimizer], capabilities: Capabilities, policy: OffloadPolicy, device: torch.device
    ) -> None:
        self._cls, self._capabilities, self._policy, self._link = cls, capabilities, policy, device_link(device)
        self._lanes = self._link.lanes(serial=policy.serial)
        # The threads finish their jobs, and end when this object is deleted; the interpreter waits for them at exit.
        self._down = ThreadPoolExecutor(1, "fsdp_offload host down", _prepare_thread, (device,))
        self._updates = ThreadPoolExecutor(1, "fsdp_offload host updates", _prepare_thread, (device,))
        # Free buffers of pinned memory, each with the mark after the last copies from it to the device.
        self._buffers, self._buffer_bytes = SimpleQueue[tuple[Region, Mark | None]](), 0
        self.ended: dict[int, CpuMark] = {}
        self.error: RuntimeError | None = None
        self._start: tuple[dict[str, Any], list[dict[str, Any]]] = {}, []  # values of the step, and pinned entries
        self._gradient_divisor: Tensor | None = None
        self._divided: DividedStep | None = None
        self.times: dict[str, float] = dict.fromkeys(_TIMES, 0)

    def missing_bytes(self, buffer_bytes: int) -> int:
        return _BUFFERS * max(0, buffer_bytes - self._buffer_bytes)

    def reserve(self, buffer_bytes: int) -> None:
        """Take buffers for the gradients and parameters of the largest bucket."""
        buffer_bytes = max(1, buffer_bytes)  # a buffer is needed for empty shards as well
        if buffer_bytes > self._buffer_bytes:
            pin = self._policy.pins(self._link.device.type)
            made = [Region(buffer_bytes, device=self._link.device, pin=pin) for _ in range(_BUFFERS)]
            self.wait()
            self._link.synchronize()  # copies from the old buffers may still run
            self._buffers, self._buffer_bytes = SimpleQueue(), buffer_bytes
            for one in made:
                self._buffers.put((one, None))

    # In the two threads -----------------------------------------------------------------------------------------------

    @contextmanager
    def _failing(self, job: HostJob) -> Iterator[None]:
        """Keep an error for :meth:`finish`."""
        try:
            with torch.no_grad():
                yield
        except BaseException as error:  # noqa: BLE001
            shown = listed(bound.shard.name for bound in job.ranges)
            failed = RuntimeError(
                f"step(), with OffloadPolicy(host_fraction=...): the CPU stopped with {type(error).__name__}: {error}. "
                f"Parameters {shown} may be half updated; those that it was to update after them are as before"
            )
            failed.__cause__ = error
            self.error = self.error or failed

    def _download(self, job: HostJob, after: Sequence[Mark]) -> Region:
        """Issue the copies of gradients and parameters down, into a buffer that is the job's until it ends."""
        buffer, uploaded = self._buffers.get()
        with self._failing(job):
            self._lanes.down.wait(*after, uploaded)  # R1: an earlier job's parameters may still be copied up from here
            self._issue_downloads(job, buffer)
            job.arrived = self._lanes.down.mark()
        return buffer

    def _issue_downloads(self, job: HostJob, buffer: Region) -> None:
        down, offset = self._lanes.down, 0

        def place(source: Tensor) -> Tensor:
            nonlocal offset
            memory = buffer.bytes[offset : offset + source.nbytes]
            offset += aligned(source.nbytes)
            return memory.view(source.dtype).as_strided(source.shape, dense_stride(source))

        params, grads = [*map(place, job.params)], [*map(place, job.grads)]
        found = zip(job.ranges, params, grads, strict=True)
        job.ranges = [replace(bound, param=param, gradient=grad) for bound, param, grad in found]
        # Not in pieces: the model has no small copies in this direction that would wait for a large one.
        down.copy([*zip((*params, *grads), (*job.params, *job.grads), strict=True)])
        if self._gradient_divisor is not None:
            with down.running():
                for grad in job.grads:  # in a dtype that can hold the scale
                    wide = torch.promote_types(grad.dtype, self._gradient_divisor.dtype)
                    grad.copy_(grad.to(wide).div_(self._gradient_divisor))

    def _finish_job(self, job: HostJob, downloaded: Future[Region]) -> Mark | None:
        """Update the downloaded job, and issue the copies of its parameters up; return the mark after them."""
        buffer, uploaded = downloaded.result(), None
        with self._failing(job):
            if job.arrived is not None and self.error is None:
                job.arrived.synchronize()
                job.grads = []  # the device's may be freed now
                with recorded(f"fsdp_offload H{job.number}"):
                    self._update(job)
                uploaded = self._issue_uploads(job)
        self._buffers.put((buffer, uploaded))
        return uploaded

    def _update(self, job: HostJob) -> None:
        if self._divided is None:  # the first job of the step copies the start's tensors to the host
            values, pinned = self._start
            with self._lanes.down.running():
                start = SimpleNamespace(**tree_map_only(Tensor, Tensor.cpu, values))
            self._divided = DividedStep(self._cls, self._capabilities, start, pinned=pinned)
        begin, divided = time.perf_counter(), self._divided
        for target, source in job.moves:
            target.copy_(source)
        # Fused SGD, which ``host_options`` chooses, takes ranges that all have state, or that all have none.
        parts: tuple[list[BoundRange], list[BoundRange]] = [], []
        for bound in job.ranges:
            grad = bound.gradient
            if grad is not None and grad.stride() != bound.param.stride():  # fused kernels go through memory in order
                bound.gradient = torch.empty_like(bound.param, dtype=grad.dtype).copy_(grad)
            parts[any(value is not None for value in job.states.get(bound.shard.param).values())].append(bound)
        for part in filter(None, parts):
            update_bucket(divided, part, job.states)
        if job.counted is not None:  # the last range of a parameter has written them
            shards = [bound.shard for bound in job.ranges if bound.last]
            job.counted |= {one: counters_of(job.states.get(one.param), one.homes) for one in shards}
        self.times["host_update_ms"] += (time.perf_counter() - begin) * 1e3
        self.times["host_updated_bytes"] += sum(value.nbytes for bound in job.ranges for value in bound.values.values())

    def _issue_uploads(self, job: HostJob) -> Mark:
        pairs = [(param, one.param) for param, one in zip(job.params, job.ranges, strict=True)]
        # The host's copies are dense. A parameter with other strides is not copied as flat bytes.
        flat = [(_bytes(to), _bytes(own)) if to.stride() == own.stride() else (to, own) for to, own in pairs]
        self._lanes.up.copy(flat)
        return self._lanes.up.mark()

    # In a step --------------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> None:
        """Note the values with which a logical step starts; ``shards`` are all that the CPU updates."""
        self.wait()
        self._lanes.down.wait(*self.ended.values())  # R3: parameters of the last step may still be copied up
        self.ended.clear()
        self.times = dict.fromkeys(_TIMES, 0)
        groups, dtypes = entries_of(optimizer), defaultdict[int, set[torch.dtype]](set)
        for shard in shards:
            dtypes[shard.group].add(shard.param.dtype)
        pinned = [self._capabilities.host_options(group, dtypes[number]) for number, group in enumerate(groups)]
        values = {**instance_attributes(optimizer), "param_groups": groups}
        scale, found_inf = values.get("grad_scale"), values.get("found_inf")
        if scale is not None and any(one.get("fused") is False for one in pinned):
            raise RuntimeError(
                f"OffloadPolicy(host_fraction=...): a GradScaler needs a fused {self._cls.__name__}, and the CPU's is "
                "wrong in the dtype of the parameters. Use host_fraction=0. Nothing has been changed."
            )
        # As a fused kernel does, divide the user's gradients by the scale, or by 1 if the step is skipped.
        if scale is not None and found_inf is not None:
            scale = torch.where(found_inf.to(scale.device) == 1, torch.ones_like(scale), scale)
        self._start, self._gradient_divisor, self._divided = (values, pinned), scale, None

    def update(
        self,
        number: int,
        ranges: Sequence[BoundRange],
        states: StateStore,
        moving: Sequence[StateShard],
        after: Sequence[Mark],
        counted: Counted | None = None,
    ) -> Mark:
        """Submit the update of all ``ranges`` of a bucket and return; gradients are kept until they have been read.

        The update writes counters of ``states``, and the other home of ``moving`` shards, and notes the counters in
        ``counted``. Gradients may be read ``after`` these marks. The stream of the copies waits for the marks when a
        thread issues the copies: if it waited now, copies of earlier jobs that are not issued yet would wait for the
        whole backward.
        """
        gradient = self._capabilities.conventions.gradient
        job = HostJob(number, counted=counted)
        for bound in ranges:
            shard, state = bound.shard, states.get(bound.shard.param)
            values = now = shard.values_at(shard.which, bound.start, bound.stop)
            if shard in moving:
                values = shard.values_at(1 - shard.which, bound.start, bound.stop)
                job.moves += [(values[name], now[name]) for name in now if state.get(name) is not None]
            grad = bound.part_of(gradient(shard.param) if shard.group >= 0 else None)
            if grad is None:
                continue
            job.grads.append(grad)
            job.params.append(bound.param.data)  # ``data``, because the write is counted below
            job.ranges.append(replace(bound, values=values))
            for name, value in state.items():  # counters, which the host reads
                if isinstance(value, Tensor) and value.dim() == 0 and name not in shard.homes:
                    state[name] = value.cpu()
            # Counted in this thread, so that the order among all counted writes is the program's.
            increment_version(local_shard(shard.param))
        if not (job.ranges or job.moves):
            return self.ended.get(number, Mark())
        # Attaching has reserved the bytes of the parameters twice, but gradients may be wider.
        self.reserve(sum(aligned(one.nbytes) for one in (*job.grads, *job.params)))
        # The thread gets entries, not ``states``, which refers to the engine: the optimizer may be deleted meanwhile.
        entries = {bound.shard.param: states.of(bound.shard.param) for bound in job.ranges}
        creates = any(entries[one.shard.param].get(name) is None for one in job.ranges for name in one.values)
        job.states = StateStore(defaultdict(dict, entries))
        marks = (*after, self._lanes.compute.mark())  # R3: gradients may be copies
        downloaded = self._down.submit(self._download, job, marks)
        mark = self.ended[number] = CpuMark(self._updates.submit(self._finish_job, job, downloaded))
        if creates or self._policy.serial:  # an entry must not grow while another thread iterates over it
            self.wait()
        return mark

    def wait(self) -> None:
        """Block until all updates have ended."""
        begin = time.perf_counter()
        for mark in self.ended.values():
            mark.wait()
        self.times["host_waited_ms"] += (time.perf_counter() - begin) * 1e3

    def finish(self) -> None:
        """Block until all updates of the step have ended; raise the error of the first that failed."""
        self.wait()
        if self.error is not None:
            self._link.synchronize()  # no copy may overwrite weights that the caller loads after the error
            raise self.error

    def counters_as_made(self, shards: Iterable[StateShard], states: StateStore) -> None:
        """Move counters (0-dim tensors) to the device where the optimizer made them, for updates on the device."""
        for shard in shards:
            state = states.get(shard.param)
            for name, example in shard.layout.scalars.items():
                value = state.get(name)
                if isinstance(example, Tensor) and isinstance(value, Tensor):
                    state[name] = value.to(example.device)


def _bytes(dense: Tensor) -> Tensor:
    return in_memory_order(dense).view(torch.uint8)


def _prepare_thread(device: torch.device) -> None:
    """Use ``device``, and leave one core in eight of this rank, at least one, to the threads that issue copies.

    A kernel ends with its slowest thread. (H200, 16 cores: 240 ms with 16 threads, 203 with 15, 211 with 14.)
    """
    use(device)
    usual, cores = torch.get_num_threads(), cores_of_rank()
    torch.set_num_threads(max(1, cores - max(1, cores // 8)))
    # set_num_threads holds for this thread and for new threads. A short-lived thread restores it for new threads.
    restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restoring.start()
    restoring.join()
