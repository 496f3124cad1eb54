"""Runs the user's optimizer on the host for its share of the state, which is updated where it lives.

::

    submit ──▶ gradients down ──▶ the optimizer's class on host tensors ──▶ parameters up ──▶ wait

Parameters are mirrored on the host (:mod:`host_mirror`) and come down only where somebody else has written them, by
whatever means. Everything but :meth:`HostUpdates.submit` and the waits runs in the threads of :mod:`host_worker`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from .buckets import aligned
from .fingerprint import Hasher
from .fsdp import local_shard
from .host_mirror import MirroredBucket, MirroredPart, like
from .host_worker import HostWorker, leave_with
from .optimizers import Habits, Traits
from .shards import StateShard
from .transfer import DeviceLink, Lane, Mark, recorded
from .update import (
    BoundRange,
    Shadow,
    SharedValues,
    StateStore,
    UserState,
    instance_attributes,
    local_range,
    update_bucket,
)

_CPU = torch.device("cpu")

_LOOK_SECONDS = 5
"""So often a wait looks whether there is anything to wait for."""


class HostStep:
    """What the buckets of one logical step share on the host; only the worker looks into it."""

    def __init__(
        self, cls: type[Optimizer], traits: Traits, optimizer: Optimizer, shards: Iterable[StateShard]
    ) -> None:
        """Note where the step starts. Tensors are copied: a scheduler may write them before they have been read."""
        attributes = instance_attributes(optimizer)
        self.values = SimpleNamespace(**{name: _cloned(value) for name, value in attributes.items()})
        self.values.param_groups = [
            {name: _cloned(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.gradient_divisor = _gradient_divisor(attributes)
        complex_groups = {shard.group for shard in shards if shard.param.is_complex()}
        self.pinned = [
            traits.host_options(group, with_complex=number in complex_groups)
            for number, group in enumerate(optimizer.param_groups)
        ]
        self.shadow = Shadow(cls, without_hooks=nullcontext)  # those tables are the main thread's
        self.created: dict[Tensor, UserState] = {}
        self.failed = False
        self._shared: SharedValues | None = None

    def shared(self, down: Lane) -> SharedValues:
        """Hyperparameters, with tensors on the host: brought there for the first bucket."""
        if self._shared is None:
            values = self.values
            with down.running():
                values.__dict__.update({name: _on_host(value) for name, value in values.__dict__.items()})
                values.param_groups = [
                    {name: _on_host(value) for name, value in group.items()} for group in values.param_groups
                ]
            self._shared = SharedValues(values, self.pinned)  # type: ignore[arg-type]
        return self._shared


def _gradient_divisor(attributes: Mapping[str, Any]) -> Tensor | None:
    """What a fused kernel divides the user's gradients by: the scale, or where it skips the step, one."""
    scale, found_inf = attributes.get("grad_scale"), attributes.get("found_inf")
    if not isinstance(scale, Tensor):
        return None
    if not isinstance(found_inf, Tensor):
        return scale.clone()
    return torch.where(found_inf.to(scale.device) == 1, torch.ones_like(scale), scale)


def _cloned(value: Any) -> Any:
    return _with_tensors(value, lambda tensor: tensor.detach().clone())


def _on_host(value: Any) -> Any:
    return _with_tensors(value, Tensor.cpu)


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to the tensors in it: betas may be a tuple of them."""
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(one, change) for one in value)
    return change(value) if isinstance(value, Tensor) else value


class _States:
    """The entries of ``optimizer.state`` for one bucket, as they were when it was submitted."""

    def __init__(self, users: Mapping[StateShard, UserState], created: dict[Tensor, UserState]) -> None:
        self._users = users
        # Copies: the main thread may give the homes other places meanwhile.
        self._known = {shard.param: dict(state) for shard, state in users.items()}
        self._created = created

    def commit(self) -> None:
        """Give counters to the user's entries; state that an update has made is handed over by the main thread."""
        for shard, user in self._users.items():
            known = self._known[shard.param]
            for name in user.keys() - known.keys():
                del user[name]
            for name, value in known.items():
                if name not in shard.homes:
                    user[name] = value
                elif user.get(name) is None:
                    self._created.setdefault(shard.param, {})[name] = value

    def get(self, param: Tensor) -> UserState:
        """The state of ``param``; empty if there is none."""
        return self._known.get(param) or self._created.get(param) or {}

    def of(self, param: Tensor) -> UserState:
        """The state of ``param``. A new one is handed over by the main thread, whose table it is."""
        known = self._known.get(param)
        return self._created.setdefault(param, {}) if known is None else known

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Not here."""
        raise NotImplementedError


@dataclass(eq=False)
class HostJob:
    """The update of one bucket: a :class:`~host_worker.Task`.

    Attributes:
        bucket: its parameters on both sides.
        part: those ranges that have a gradient.
        ranges: the same, bound to the mirror and to state at home.
        grads: their gradients on the device, held until they have been copied.
        moves: state to copy first, to and from: an asynchronous save still reads where it was.
        states: the state of their parameters, and what becomes of it.
        hashers: for what goes down and for what goes up.
        after: what has to have passed before its gradients are read.
        uploaded: recorded behind the parameters' way up.
        update_seconds: time in which the optimizer ran.
        arrival_seconds: in which it waited for what comes down.
        began, ended: when the thread was at it, on the host's clock.
        weights_down_bytes: of parameters that came down, as the mirror did not have them.
        done: the host may look at the results: ``uploaded``, ``failed``, and ``errors``.
        failed: it, or another one of its step before it, has.
    """

    number: int
    bucket: MirroredBucket
    part: MirroredPart
    ranges: list[BoundRange]
    grads: list[Tensor]
    moves: list[tuple[Tensor, Tensor]]
    step: HostStep
    states: _States
    habits: Habits
    lanes: tuple[Lane, Lane]
    hashers: tuple[Hasher, Hasher]
    after: tuple[Mark, ...]
    done: threading.Event
    errors: list[tuple[str, BaseException]]
    uploaded: Mark | None = None
    failed: bool = False
    update_seconds: float = 0.0
    arrival_seconds: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    state_bytes: int = 0
    weights_down_bytes: int = 0
    _down: Mark | None = None
    _grads_on_host: list[Tensor] = field(default_factory=list)
    _changed: Tensor | None = None  # on the host; says it behind ``_down``
    _updated: bool = False

    def begin(self, memory: Tensor) -> None:
        """Issue the copies down."""
        try:
            if not self.step.failed:
                with torch.no_grad():
                    self._issue_downloads(memory)
        except BaseException as error:  # noqa: BLE001  # the main thread's, whatever it is
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        names = list(dict.fromkeys(bound.shard.name for bound in self.ranges))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        self.errors.append((", ".join(names[:4]) + more, error))
        self.step.failed = True

    def _issue_downloads(self, memory: Tensor) -> None:
        down, hasher = self.lanes[0], self.hashers[0]
        for mark in self.after:
            down.wait(mark)
        if self.bucket.uploaded is not None:
            # The mirror is about to be written, and what is on the device is compared with what went up.
            down.wait(self.bucket.uploaded)
        offset = _FLAG_BYTES
        for grad in self.grads:
            self._grads_on_host.append(like(grad, memory[offset : offset + grad.nbytes]))
            offset += aligned(grad.nbytes)
        if self.grads:
            # One piece: nobody else's small copies go down here.
            down.copy_all(self._grads_on_host, self.grads)
            with down.running():
                self._unscale_gradients()
            if self.bucket.is_known(self.part):
                self._changed = memory[:1].view(torch.bool)[0]
                with down.running():
                    self.part.compare(self._changed, hasher)
            else:
                self._bring_weights_down()
        self._down = down.mark()

    def _bring_weights_down(self) -> None:
        self.bucket.forget()
        self.part.copy_down(self.lanes[0])
        self.weights_down_bytes = self.part.nbytes

    def _unscale_gradients(self) -> None:
        """What a fused kernel does to the user's gradients where ``GradScaler`` gives it the scale."""
        divisor = self.step.gradient_divisor
        if divisor is None:
            return
        for grad in self.grads:
            if grad.dtype.itemsize < divisor.dtype.itemsize:
                grad.copy_(grad.to(divisor.dtype).div_(divisor))  # in its own dtype the scale might not exist
            else:
                grad.div_(divisor)

    def update(self) -> None:
        """Wait for them, and update."""
        self.began = time.perf_counter()
        try:
            if self._down is not None:
                self._down.synchronize()
                self.arrival_seconds = time.perf_counter() - self.began
                self.grads = []  # may be freed now
                if not self.step.failed:
                    with torch.no_grad(), recorded(f"fsdp_offload H{self.number}"):
                        self._update()
        except BaseException as error:  # noqa: BLE001  # the main thread's, whatever it is
            self._fail(error)
        self._grads_on_host = []  # the memory is somebody else's from now on
        self._changed = None
        self.failed = self.step.failed
        self.ended = time.perf_counter()

    def _update(self) -> None:
        if self._changed is not None and self._changed.item():
            self._bring_weights_down()
            self.lanes[0].mark().synchronize()
        shared = self.step.shared(self.lanes[0])
        begin = time.perf_counter()
        for target, source in self.moves:
            target.copy_(source)
        for bound, grad in zip(self.ranges, self._grads_on_host, strict=True):
            bound.gradient = grad
        if self.ranges:
            self.bucket.forget()  # until what comes of it is on the device
        try:
            groups = len(self.step.pinned)
            for ranges in _alike(self.ranges, self.states):
                update_bucket(self.step.shadow, shared, self.habits, ranges, groups, self.states, {})
        finally:
            for bound in self.ranges:
                bound.gradient = None
        self.states.commit()
        self.update_seconds = time.perf_counter() - begin
        self._updated = True

    def finish(self) -> None:
        """Issue the copies up."""
        try:
            if self._updated:
                with torch.no_grad():
                    self._issue_uploads()
        except BaseException as error:  # noqa: BLE001  # the main thread's, whatever it is
            self._fail(error)
            self.failed = True
        # The rest goes with its step, not with the next step of this bucket.
        self.ranges, self.grads, self.moves, self.after = [], [], [], ()
        self.step = self.states = self.bucket = self.part = self.hashers = None  # type: ignore[assignment]
        self.done.set()

    def _issue_uploads(self) -> None:
        up = self.lanes[1]
        self.uploaded = self.bucket.upload(self.part, up, self.hashers[1]) if self.ranges else up.mark()


_FLAG_BYTES = aligned(1)
"""Of what a bucket brings down: whether its parameters have been written by somebody else."""


def passing_bytes(gradient_bytes: Iterable[int]) -> int:
    """Host memory through which a bucket with gradients of these sizes passes."""
    return _FLAG_BYTES + sum(map(aligned, gradient_bytes))


def _alike(ranges: list[BoundRange], states: StateStore) -> list[list[BoundRange]]:
    """Divide into those that have state and those that have none yet, where there are both.

    torch's fused SGD takes one or the other, and it is us who have chosen a fused kernel. Each range is updated by
    itself whatever is beside it.
    """
    with_state = [any(value is not None for value in states.get(bound.shard.param).values()) for bound in ranges]
    if all(with_state) or not any(with_state):
        return [ranges]
    return [[bound for bound, has in zip(ranges, with_state, strict=True) if has is wanted] for wanted in (True, False)]


def _moves(bound: BoundRange, states: StateStore) -> list[tuple[Tensor, Tensor]]:
    """State that exists, to the place that ``bound`` has, from where it is."""
    existing = states.get(bound.shard.param)
    before = bound.shard.values_at(bound.shard.side, bound.start, bound.stop)
    return [(value, before[name]) for name, value in bound.values.items() if existing.get(name) is not None]


class LastJob:
    """The last job of one optimizer. Hooks on a model have it, and so wait for it when the optimizer is gone."""

    def __init__(self, worker: HostWorker) -> None:
        self.job: HostJob | None = None
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
        job, self.job = self.job, None
        if job is None:
            return
        self.wait_done(job)
        if job.uploaded is not None:
            job.uploaded.synchronize()
        if job.errors:
            names, error = job.errors[0]
            raise RuntimeError(
                f"the host's part of the last step() of an optimizer that is gone stopped with {type(error).__name__}: "
                f"{error}. Parameters {names} may be half updated."
            ) from error


class HostUpdates:
    """The host's side of one optimizer: what has been submitted, and the waits for it.

    Attributes:
        failure: why its part of the state is only half updated; empty if it is whole.
        creates: the step makes state that there was not before.
        last: the last job.
    """

    def __init__(
        self, cls: type[Optimizer], traits: Traits, link: DeviceLink, worker: HostWorker, *, serial: bool, pin: bool
    ) -> None:
        self.failure = ""
        self.creates = False
        self._cls = cls
        self._traits = traits
        self._worker = worker
        self._serial = serial
        self._pin = pin
        self._lanes = link.host_lanes(serial=serial)
        self._hashers: tuple[Hasher, Hasher] | None = None
        self._jobs: dict[int, HostJob] = {}
        self._mirrored: dict[int, MirroredBucket] = {}
        self.last = LastJob(worker)
        self._created: dict[Tensor, UserState] = {}
        self._waited_seconds = 0.0
        self._errors: list[tuple[str, BaseException]] = []
        self._after: tuple[Mark, ...] = ()
        leave_with(self, worker)

    def reserve(self, bucket_nbytes: int) -> None:
        """Take the memory through which buckets of that many bytes (:func:`passing_bytes`) pass; 24 MiB of the device.

        Raises:
            RuntimeError: the driver refuses to page-lock the memory, or the device is full.
        """
        self._worker.reserve(bucket_nbytes, pin=self._pin)
        self._hashers = (self._worker.hasher(self._lanes[0]), self._worker.hasher(self._lanes[1]))

    def missing_bytes(self, bucket_nbytes: int) -> int:
        """Host memory that :meth:`reserve` would take."""
        return self._worker.missing_bytes(bucket_nbytes)

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> HostStep:
        """Note where a logical step starts."""
        self._waited_seconds, self._after = 0.0, ()
        step = HostStep(self._cls, self._traits, optimizer, shards)
        self._created = step.created
        return step

    def after(self, mark: Mark) -> None:
        """What is submitted in this step from now on starts only after ``mark``.

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
        moving: Sequence[StateShard] = (),
    ) -> None:
        """Have a bucket updated. Returns at once; gradients are held until they have been read.

        Args:
            number: of the bucket.
            ranges: all of its ranges.
            step: which logical step this belongs to.
            states: of the optimizer.
            moving: shards whose state is to be in their other place afterwards.
        """
        habits = self._traits.habits
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
            grad = habits.gradient(bound.shard.param) if bound.shard.group >= 0 else None
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
            self.creates |= any(state.get(name) is None for name in bound.shard.homes)
            # Counted here, where the order with what others count is that of the program.
            increment_version(local_shard(bound.shard.param))
        # Has been, unless gradients are wider than their parameters.
        self.reserve(passing_bytes(grad.nbytes for grad in grads.values()))
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
            _States(known, step.created),
            habits,
            self._lanes,
            self._hashers,
            self._after,
            threading.Event(),
            self._errors,
            state_bytes=part.state_bytes,
        )
        self._jobs[number] = self.last.job = job
        self._worker.submit(job)
        if self._serial:
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
        """Block until the last update of a bucket is done: its state is at home. ``None``: it is not the host's.

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
        """As :meth:`wait`, for all buckets: they are done in order."""
        if self.last.job is None:
            return None
        self._wait_for(self.last.job)
        self.raise_failure()
        return self.last.job.uploaded

    def wait_quietly(self) -> None:
        """Block until nothing is under way; a failure is kept for who asks next."""
        if self.last.job is not None:
            self._wait_for(self.last.job)

    def take_created(self) -> dict[Tensor, UserState]:
        """State that updates have made where there was none; waits for them all."""
        self.creates = False
        self.wait_all()
        created, self._created = self._created, {}
        return created

    def forget(self) -> None:
        """Buckets have other numbers from now on."""
        self.wait_quietly()
        for bucket in self._mirrored.values():
            if bucket.uploaded is not None:
                bucket.uploaded.synchronize()  # from memory that may be freed now
        self._mirrored.clear()
        self._jobs.clear()
        self.last.job = None

    def _wait_for(self, job: HostJob) -> None:
        if not job.done.is_set():
            begin = time.perf_counter()
            self.last.wait_done(job)
            self._waited_seconds += time.perf_counter() - begin

    def raise_failure(self) -> None:
        """Raise what has failed by now, if nobody has been told yet.

        Raises:
            RuntimeError: an update has failed; says which.
        """
        if not self._errors:
            return
        names, error = self._errors[0]
        self._errors.clear()  # raised once; from then on the failure is looked at
        self.failure = (
            f"the host's part of an earlier step() stopped with {type(error).__name__}: {error}. Parameters {names} "
            "may be half updated; those that the host updates after them are as before that step, all others are new"
        )
        raise RuntimeError(f"step(), with OffloadPolicy(host_fraction=...): {self.failure}.") from error

    # What the last step has done ---------------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """Host memory through which gradients pass; shared by all optimizers of the device."""
        return self._worker.buffer_bytes

    def last_times(self) -> "HostTimes":
        """Of the buckets as they were last updated; waits for them."""
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


@dataclass(frozen=True)
class HostTimes:
    """How the host has spent a step.

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


def counters_to(device: torch.device, shard: StateShard, state: UserState) -> None:
    """Put 0-dim tensors of a parameter's state where its optimizer reads them."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 0 and name not in shard.homes and value.device != device:
            state[name] = value.to(device)


def counters_as_made(shard: StateShard, state: UserState) -> None:
    """The inverse: where the optimizer itself put them, as an update on the device wants them."""
    for name, example in shard.layout.scalars.items():
        value = state.get(name)
        if isinstance(example, Tensor) and isinstance(value, Tensor) and value.device != example.device:
            state[name] = value.to(example.device)
