"""Runs the user's optimizer on the host for its share of the state, which is updated where it lives.

::

    submit ──▶ gradients down ──▶ the optimizer's class on host tensors ──▶ parameters up ──▶ wait

Parameters are mirrored on the host (:mod:`mirror`) and come down only where somebody else has written them, by
whatever means. Everything but :meth:`HostUpdates.submit` and the waits runs in the threads of :mod:`worker`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ..device.lanes import Mark
from ..device.link import device_link
from ..optimizers import Capabilities
from ..optimizers.bound_range import BoundRange, local_range
from ..policy import OffloadPolicy
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from ..torch_compat.dtensor import local_shard
from .fingerprint import Hasher
from .job import HostJob, HostStates, passing_bytes
from .mirror import MirroredBucket
from .step import HostStep
from .worker import HostWorker, host_worker, leave_with

_CPU = torch.device("cpu")

_LOOK_SECONDS = 5
"""So often a wait looks whether there is anything to wait for."""


@dataclass(frozen=True)
class HostTimes:
    """Times of the host in one step.

    Attributes:
        state_bytes: updated.
        update_ms: in which the optimizer ran.
        waited_ms: in which the main thread stood still for it.
        arrival_ms: in which the thread that updates stood still for what comes down.
        span_ms: from the beginning of its first bucket to the end of its last one.
        weights_down_bytes: of parameters that were brought down, as somebody else had written them.
    """

    state_bytes: int = 0
    update_ms: float = 0.0
    waited_ms: float = 0.0
    arrival_ms: float = 0.0
    span_ms: float = 0.0
    weights_down_bytes: int = 0


Submit = Callable[[int, Sequence[BoundRange], StateStore, Sequence[StateShard]], None]
"""Has a bucket updated in one logical step: :meth:`HostUpdates.submit`."""


def _moves(bound: BoundRange, states: StateStore) -> list[tuple[Tensor, Tensor]]:
    """State that exists, to the place that ``bound`` has, from where it is."""
    existing = states.get(bound.shard.param)
    before = bound.shard.values_at(bound.shard.side, bound.start, bound.stop)
    return [(value, before[name]) for name, value in bound.values.items() if existing.get(name) is not None]


class LastJobs:
    """The jobs of an optimizer's last step. Hooks on a model have them, and so wait for them when it is gone."""

    def __init__(self, worker: HostWorker) -> None:
        self.jobs: list[HostJob] = []
        self._worker = worker

    def wait_done(self, job: HostJob) -> None:
        """Block until ``job`` is done.

        Raises:
            RuntimeError: it never will be.
        """
        while not job.done.wait(_LOOK_SECONDS):
            if not self._worker.is_alive():
                raise RuntimeError("the thread that updates on the host has ended before its work was done")

    def wait_without_owner(self) -> None:
        """Block until all parameters are new; at once from the second time on.

        Raises:
            RuntimeError: the update has failed, and there is no optimizer left that would say so.
        """
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            self.wait_done(job)
        for job in jobs:
            if job.uploaded is not None:
                job.uploaded.synchronize()
        if jobs and jobs[0].errors:
            names, error = jobs[0].errors[0]
            raise RuntimeError(
                f"the host's part of the last step() of an optimizer that is gone stopped with {type(error).__name__}: "
                f"{error}. Parameters {names} may be half updated."
            ) from error


class HostUpdates:
    """The CPU's side of one optimizer: what has been submitted, and the waits for it.

    Attributes:
        failure: why its part of the state is only half updated; empty if it is whole.
        last: the updates of the last step, and behind them those of all steps before it.
    """

    def __init__(
        self, cls: type[Optimizer], capabilities: Capabilities, policy: OffloadPolicy, device: torch.device
    ) -> None:
        self.failure = ""
        self._cls = cls
        self._capabilities = capabilities
        self._link = device_link(device)
        self._worker = host_worker(device)
        self._policy = policy
        self._pin = policy.pins(device.type)
        self._lanes = self._link.host_lanes(serial=policy.serial)
        self._hashers: tuple[Hasher, Hasher] | None = None
        self._jobs: dict[int, HostJob] = {}
        self._mirrored: dict[int, MirroredBucket] = {}
        self.last = LastJobs(self._worker)
        self._submitted: list[HostJob] = []  # in this step
        self._creates = False
        self._created: dict[Tensor, UserState] = {}
        self._waited_seconds = 0.0
        self._errors: list[tuple[str, BaseException]] = []
        self._after: tuple[Mark, ...] = ()
        leave_with(self, self._worker)

    def missing_bytes(self, gradient_nbytes: Sequence[Sequence[int]]) -> int:
        """Count the bytes of host memory that :meth:`reserve` would take."""
        return self._worker.missing_bytes(max(map(passing_bytes, gradient_nbytes), default=0))

    def reserve(self, gradient_nbytes: Sequence[Sequence[int]]) -> None:
        """Take the memory through which buckets pass, and 24 MiB of the device.

        Args:
            gradient_nbytes: of each bucket, those of its gradients.

        Raises:
            RuntimeError: the driver refuses to page-lock the memory, or the device is full.
        """
        self._worker.reserve(max(map(passing_bytes, gradient_nbytes)), pin=self._pin)
        self._hashers = (self._worker.hasher(self._lanes[0]), self._worker.hasher(self._lanes[1]))

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> Submit:
        """Note where a logical step starts; ``shards`` are all that the CPU updates. What it returns submits to it."""
        self._waited_seconds, self._after, self._submitted = 0.0, (), []
        step = HostStep(self._cls, self._capabilities, optimizer, shards)
        self._created = step.created

        def submit(number: int, ranges: Sequence[BoundRange], states: StateStore, moving: Sequence[StateShard]) -> None:
            self.submit(number, ranges, step, states, moving)

        return submit

    def after(self, mark: Mark) -> None:
        """Start what is submitted in this step from now on only after ``mark``.

        Its copies wait when they are issued, and not their stream now: what was submitted before is issued later, as
        buffers become free, and would wait for the whole backward.
        """
        self._after += (mark,)

    def submit(
        self,
        number: int,
        ranges: Sequence[BoundRange],
        step: HostStep,
        states: StateStore,
        moving: Sequence[StateShard],
    ) -> None:
        """Have a bucket updated in ``step``. Returns at once; gradients are held until they have been read.

        Args:
            number: of the bucket.
            ranges: all of its ranges.
            step: what the buckets of this step share.
            states: of the optimizer.
            moving: shards whose state is to be in their other place afterwards.
        """
        conventions = self._capabilities.conventions
        bucket = self._mirror(number, ranges)
        sides = [1 - b.shard.side if b.shard in moving else b.shard.side for b in ranges]
        moves = [
            pair
            for index, side in enumerate(sides)
            if side != ranges[index].shard.side
            for pair in _moves(bucket.on_host(index, side), states)
        ]
        grads: dict[int, Tensor] = {}
        for index, bound in enumerate(ranges):
            grad = conventions.gradient(bound.shard.param) if bound.shard.group >= 0 else None
            if grad is not None:
                local = local_shard(grad)
                grads[index] = local if bound.whole else local_range(local, bound.start, bound.stop)
        if not grads and not moves:
            return
        active = [bucket.on_host(index, sides[index]) for index in grads]
        known = {}
        for bound in active:
            state = states.get(bound.shard.param)
            if state:
                counters_to(_CPU, bound.shard, state)
                known[bound.shard] = state
            self._creates |= any(state.get(name) is None for name in bound.shard.homes)
            # Counted here, where the order with what others count is that of the program.
            increment_version(local_shard(bound.shard.param))
        # Has been, unless gradients are wider than their parameters.
        self.reserve([[grad.nbytes for grad in grads.values()]])
        assert self._hashers is not None
        part = bucket.part(tuple(grads))
        job = HostJob(
            number,
            bucket,
            part,
            active,
            list(grads.values()),
            moves,
            step,
            HostStates(known, step.created),
            conventions,
            self._lanes,
            self._hashers,
            self._after,
            threading.Event(),
            self._errors,
            state_bytes=part.state_bytes,
        )
        self._jobs[number] = job
        self._submitted.append(job)
        self.last.jobs = self._submitted
        self._worker.submit(job)
        if self._policy.serial:
            self._wait_for(job)

    def _mirror(self, number: int, ranges: Sequence[BoundRange]) -> MirroredBucket:
        before = self._mirrored.get(number)
        if before is not None and before.still_of(ranges):
            return before
        bucket = self._mirrored[number] = MirroredBucket(ranges)
        if before is not None:
            bucket.uploaded = before.uploaded  # from the same mirror
        return bucket

    # Waiting -----------------------------------------------------------------------------------------------------

    def wait(self, number: int) -> Mark | None:
        """Block until the last update of a bucket is done: its state is at home. ``None``: it is not the CPU's.

        Returns:
            A mark behind which its parameters are new on the device.

        Raises:
            RuntimeError: it has failed, or another one of its step before it.
        """
        job = self._jobs.get(number)
        if job is None:
            return None
        self._wait_for(job)
        if job.failed:
            self.raise_failure()
        return job.uploaded

    def wait_all(self) -> Mark | None:
        """Wait as :meth:`wait` does, for all buckets: no job of an earlier step is done after one of the last step."""
        self.wait_quietly()
        self.raise_failure()
        uploaded = (job for job in self.last.jobs if job.uploaded is not None)
        last = max(uploaded, key=lambda job: job.ended, default=None)  # behind all others on the way up
        return None if last is None else last.uploaded

    def wait_quietly(self) -> None:
        """Block until nothing is under way; a failure is kept for who asks next."""
        for job in self.last.jobs:
            self._wait_for(job)

    def take_created(self) -> dict[Tensor, UserState]:
        """Return state that updates have made where there was none; waits for them all if there may be some."""
        if not self._creates:
            return {}
        self._creates = False
        self.wait_all()
        created, self._created = self._created, {}
        return created

    def forget(self) -> None:
        """Wait for what is under way: buckets have other numbers from now on."""
        self.wait_quietly()
        for bucket in self._mirrored.values():
            if bucket.uploaded is not None:
                bucket.uploaded.synchronize()  # from memory that may be freed now
        self._mirrored.clear()
        self._jobs.clear()
        self.last.jobs = []

    def _wait_for(self, job: HostJob) -> None:
        if not job.done.is_set():
            begin = time.perf_counter()
            self.last.wait_done(job)
            self._waited_seconds += time.perf_counter() - begin

    def raise_failure(self) -> None:
        """Raise what has failed by now, if nobody has been told yet; then nothing is under way any more.

        Raises:
            RuntimeError: an update has failed; says which.
        """
        if not self._errors:
            return
        # Who is told may load weights at once, and what was updated before would still come up over them.
        self.wait_quietly()
        self._link.synchronize()
        names, error = self._errors[0]
        self._errors.clear()  # raised once; from then on the failure is looked at
        self.failure = (
            f"the host's part of an earlier step() stopped with {type(error).__name__}: {error}. Parameters {names} "
            "may be half updated; those that the host updates after them are as before that step, all others are new"
        )
        raise RuntimeError(f"step(), with OffloadPolicy(host_fraction=...): {self.failure}.") from error

    def counters_as_made(self, shards: Iterable[StateShard], states: StateStore) -> None:
        """Put 0-dim tensors of their state where the optimizer made them, as an update on the device wants them."""
        for shard in shards:
            state = states.get(shard.param)
            for name, example in shard.layout.scalars.items():
                value = state.get(name)
                if isinstance(example, Tensor) and isinstance(value, Tensor) and value.device != example.device:
                    state[name] = value.to(example.device)

    # What the last step has done ---------------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """Host memory through which gradients pass; shared by all optimizers of the device."""
        return self._worker.buffer_bytes

    def last_times(self) -> HostTimes:
        """Return the times of the last updates; waits for them."""
        self.wait_quietly()
        jobs = self._jobs.values()
        return HostTimes(
            sum(job.state_bytes for job in jobs),
            sum(job.update_seconds for job in jobs) * 1e3,
            self._waited_seconds * 1e3,
            sum(job.arrival_seconds for job in jobs) * 1e3,
            (max((job.ended for job in jobs), default=0.0) - min((job.began for job in jobs), default=0.0)) * 1e3,
            sum(job.weights_down_bytes for job in jobs),
        )


def counters_to(device: torch.device, shard: StateShard, state: UserState) -> None:
    """Put 0-dim tensors of a parameter's state where its optimizer reads them."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 0 and name not in shard.homes and value.device != device:
            state[name] = value.to(device)
