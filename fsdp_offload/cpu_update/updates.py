"""Runs the user's optimizer on the host for its share of the state, which is updated where it lives.

The main thread submits a job for each bucket, and waits for it when somebody needs what it makes. Threads bring its
gradients and parameters down, update, and bring the parameters up (:mod:`worker`).
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ..device.arena import aligned
from ..device.lanes import EventMark, Mark, device_link
from ..fsdp.dtensor import local_shard
from ..optimizers import Capabilities
from ..optimizers.bucket_update import BoundRange
from ..policy import OffloadPolicy
from ..state.shard import StateShard
from ..state.store import OwnCounters, StateStore
from .worker import HostJob, HostStep, host_worker


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
    """The CPU's side of one optimizer: what has been submitted, and the waits for it.

    Attributes:
        failure: why its part of the state is only half updated; empty if it is whole.
        wait_without_owner: hooks on a model have it, and so wait for the last step of an optimizer that is gone.
    """

    def __init__(
        self, cls: type[Optimizer], capabilities: Capabilities, policy: OffloadPolicy, device: torch.device
    ) -> None:
        self.failure = ""
        self._cls, self._capabilities, self._policy = cls, capabilities, policy
        self._link, self._worker = device_link(device), host_worker(device)
        self._lanes = self._link.lanes(serial=policy.serial)
        self._jobs: dict[int, HostJob] = {}  # the last one of each bucket
        self._entries: dict[int, OwnCounters] = {}  # of jobs that nobody has waited for
        self._step: HostStep | None = None
        self._creates = False  # some job makes state where there is none
        self._waited_seconds = 0.0
        self._errors: list[tuple[str, BaseException]] = []  # why, and names of parameters that may be half updated
        self.wait_without_owner = partial(_wait_without_owner, self._jobs, self._errors)

    def missing_bytes(self, nbytes: Iterable[Sequence[int]]) -> int:
        """Count the bytes of host memory that :meth:`reserve` would take."""
        return self._worker.missing_bytes(max(map(_slot_bytes, nbytes), default=0))

    def reserve(self, nbytes: Iterable[Sequence[int]]) -> None:
        """Take the memory through which buckets pass; for each, the bytes of its gradients and of its parameters."""
        self._worker.reserve(max(map(_slot_bytes, nbytes)), pin=self._policy.pins(self._link.device.type))

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> None:
        """Note where a logical step starts; ``shards`` are all that the CPU updates."""
        self._waited_seconds = 0.0
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
        for bound in ranges:
            shard, state = bound.shard, states.get(bound.shard.param)
            values = now = shard.values_at(shard.side, bound.start, bound.stop)
            if shard in moving:
                values = shard.values_at(1 - shard.side, bound.start, bound.stop)
                moves += [(values[name], now[name]) for name in now if state.get(name) is not None]
            grad = bound.part_of(gradient(shard.param)) if shard.group >= 0 else None
            if grad is None:
                continue
            grads.append(grad)
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
            self.reserve([[one.nbytes for one in (*grads, *params)]])  # gradients may be wider than parameters
            job = HostJob(
                number=number,
                ranges=active,
                params=params,
                grads=grads,
                moves=moves,
                step=self._step,
                states=entries.alone(),
                lanes=self._lanes,
                after=(*after, None if before is None else before.uploaded),
                errors=self._errors,
            )
            self._jobs[number], self._entries[number] = job, entries
            self._worker.submit(job)
            if self._policy.serial:
                self.wait_quietly(number)
        return CpuMark(self, number)

    # Waiting -----------------------------------------------------------------------------------------------------

    def wait_updated(self, number: int) -> Mark | None:
        """Block until the last update of a bucket is done: its state is at home. ``None``: nothing was updated.

        Raises:
            RuntimeError: the update has failed, or another one of its step before it.
        """
        self.wait_quietly(number)
        job = self._jobs.get(number)
        if job is not None and job.failed:
            self.raise_failure()
        return None if job is None else job.uploaded

    def wait_quietly(self, number: int | None = None) -> None:
        """Block until no update is under way, or not that of one bucket; a failure is kept for who asks next."""
        for one in list(self._entries) if number is None else [number]:
            if one in self._entries:
                self._wait_for(one)

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
        """Wait for what is under way: buckets have other numbers from now on."""
        self.wait_quietly()
        for job in self._jobs.values():
            if job.uploaded is not None:
                job.uploaded.synchronize()  # nobody can wait for it by its number
        self._jobs.clear()

    def raise_failure(self) -> None:
        """Raise what has failed by now, if nobody has been told yet; then nothing is under way any more."""
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


def _slot_bytes(nbytes: Iterable[int]) -> int:
    return sum(map(aligned, nbytes)) or 1  # a slot is needed for empty shards as well


def _wait_without_owner(jobs: dict[int, HostJob], errors: list[tuple[str, BaseException]]) -> None:
    """Block until all parameters of the last step are new; at once from the second time on."""
    for job in jobs.values():
        job.done.wait()
        if job.uploaded is not None:
            job.uploaded.synchronize()
    jobs.clear()
    if errors:
        names, error = errors[0]
        errors.clear()
        stopped = f"stopped with {type(error).__name__}: {error}. Parameters {names} may be half updated."
        raise RuntimeError(f"the host's part of the last step() of an optimizer that is gone {stopped}") from error
