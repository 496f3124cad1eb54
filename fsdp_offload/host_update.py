"""Runs the user's optimizer on the host for its share of the state, which is updated where it lives.

::

    submit ──▶ gradients and parameters down ──▶ the optimizer's class on host tensors ──▶ parameters up ──▶ wait

Parameters come down each time: whoever has written them meanwhile, by whatever means, is followed. Everything but
:meth:`HostUpdates.submit` and the waits runs in the thread of :mod:`host_worker`.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from .buckets import aligned
from .fsdp import local_shard
from .host_worker import HostWorker, leave_with
from .optimizers import Habits, Traits
from .shards import StateShard
from .transfer import DeviceLink, Lane, Mark
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


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


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
        ranges: of the bucket, those with a gradient; bound to parameters on the device and to state at home.
        grads: their gradients on the device, held until they have been copied.
        moves: state to copy first, to and from: an asynchronous save still reads where it was.
        states: the state of their parameters, and what becomes of it.
        uploaded: recorded behind the parameters' way up.
        update_seconds: time in which the optimizer ran.
        done: the host may look at the results: ``uploaded``, ``failed``, and ``errors``.
        failed: it, or another one of its step before it, has.
    """

    number: int
    ranges: list[BoundRange]
    grads: list[Tensor]
    moves: list[tuple[Tensor, Tensor]]
    step: HostStep
    states: _States
    habits: Habits
    lanes: tuple[Lane, Lane]
    done: threading.Event
    errors: list[tuple[str, BaseException]]
    uploaded: Mark | None = None
    failed: bool = False
    update_seconds: float = 0.0
    state_bytes: int = 0
    _down: Mark | None = None
    _on_host: list[BoundRange] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Host memory for parameters and gradients."""
        weights = (bound.param for bound in self.ranges)
        return sum(aligned(tensor.numel() * tensor.element_size()) for tensor in (*weights, *self.grads))

    def begin(self, memory: Tensor, free: Mark | None) -> None:
        """Issue the copies down."""
        try:
            if free is not None:
                free.synchronize()
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
        if self.step.failed:
            return
        down = self.lanes[0]
        offset = 0
        with down.running():
            for bound, grad in zip(self.ranges, self.grads, strict=True):
                copies = []
                for source in (bound.param, grad):
                    nbytes = source.numel() * source.element_size()
                    target = _like(source, memory[offset : offset + nbytes])
                    offset += aligned(nbytes)
                    target.copy_(source, non_blocking=True)  # one piece: nobody else's small copies go down here
                    copies.append(target)
                self._on_host.append(replace(bound, param=copies[0], gradient=copies[1]))
            self._down = down.mark()

    def end(self) -> Mark | None:
        """Update, and issue the copies up."""
        try:
            if self._down is not None:
                self._down.synchronize()
                self.grads = []  # may be freed now
                if not self.step.failed:
                    self._update()
        except BaseException as error:  # noqa: BLE001  # the main thread's, whatever it is
            self._fail(error)
        self.failed = self.step.failed
        # The rest goes with its step, not with the next step of this bucket.
        self.ranges, self.grads, self.moves, self._on_host = [], [], [], []
        self.step = self.states = None  # type: ignore[assignment]
        self.done.set()
        return self.uploaded

    def _update(self) -> None:
        with torch.no_grad(), torch.profiler.record_function(f"fsdp_offload H{self.number}"):
            begin = time.perf_counter()
            for target, source in self.moves:
                target.copy_(source)
            shared = self.step.shared(self.lanes[0])
            groups = len(self.step.pinned)
            update_bucket(self.step.shadow, shared, self.habits, self._on_host, groups, self.states, {})
            self.states.commit()
            self.update_seconds = time.perf_counter() - begin
            up = self.lanes[1]
            with up.running():
                for bound, updated in zip(self.ranges, self._on_host, strict=True):
                    _copy(up, bound.param.data, updated.param)  # ``data``: main has counted this write
                self.uploaded = up.mark()


def _like(source: Tensor, memory: Tensor) -> Tensor:
    """A host tensor like ``source`` over ``memory``, dense."""
    if source.is_contiguous():
        return memory.view(source.dtype).view(source.shape)
    stride = torch.empty_like(source, device="meta").stride()
    return memory.view(source.dtype).as_strided(source.shape, stride)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _copy(lane: Lane, target: Tensor, source: Tensor) -> None:
    if not source.numel():
        return
    if _is_dense(source) and target.stride() == source.stride():
        lane.copy(_flat(target), _flat(source))
    else:
        target.copy_(source)  # waits where it has to be rearranged


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _at_home(bound: BoundRange, side: int) -> BoundRange:
    return replace(bound, values=bound.shard.values_at(side, bound.start, bound.stop))


def _moves(bound: BoundRange, states: StateStore) -> list[tuple[Tensor, Tensor]]:
    """State that exists, to the place that ``bound`` has, from where it is."""
    existing = states.get(bound.shard.param)
    before = bound.shard.values_at(bound.shard.side, bound.start, bound.stop)
    return [(value, before[name]) for name, value in bound.values.items() if existing.get(name) is not None]


class HostUpdates:
    """The host's side of one optimizer: what has been submitted, and the waits for it.

    Attributes:
        failure: why its part of the state is only half updated; empty if it is whole.
        creates: the step makes state that there was not before.
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
        self._jobs: dict[int, HostJob] = {}
        self._last: HostJob | None = None
        self._created: dict[Tensor, UserState] = {}
        self._waited_seconds = 0.0
        self._errors: list[tuple[str, BaseException]] = []
        leave_with(self, worker)

    def reserve(self, bucket_nbytes: int) -> None:
        """Take the memory through which buckets of that many bytes of parameters and gradients pass."""
        self._worker.reserve(bucket_nbytes, pin=self._pin)

    def missing_bytes(self, bucket_nbytes: int) -> int:
        """Host memory that :meth:`reserve` would take."""
        return self._worker.missing_bytes(bucket_nbytes)

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> HostStep:
        """Note where a logical step starts."""
        self._waited_seconds = 0.0
        step = HostStep(self._cls, self._traits, optimizer, shards)
        self._created = step.created
        return step

    def after(self, mark: Mark) -> None:
        """What is submitted from now on starts only after ``mark``."""
        self._lanes[0].wait(mark)

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
        ranges = [
            _at_home(bound, 1 - bound.shard.side if bound.shard in moving else bound.shard.side) for bound in ranges
        ]
        moves = [pair for bound in ranges if bound.shard in moving for pair in _moves(bound, states)]
        bound_grads = [(b, habits.gradient(b.shard.param)) for b in ranges if b.shard.group >= 0]
        active = [(bound, local_shard(grad)) for bound, grad in bound_grads if grad is not None]
        if not active and not moves:
            return
        known = {}
        for bound, _ in active:
            state = states.get(bound.shard.param)
            if state:
                counters_to(torch.device("cpu"), bound.shard, state)
                known[bound.shard] = state
            self.creates |= any(state.get(name) is None for name in bound.shard.homes)
            # Counted here, where the order with what others count is that of the program.
            increment_version(local_shard(bound.shard.param))
        grads = [grad if b.whole else local_range(grad, b.start, b.stop) for b, grad in active]
        job = HostJob(
            number,
            [bound for bound, _ in active],
            grads,
            moves,
            step,
            _States(known, step.created),
            habits,
            self._lanes,
            threading.Event(),
            self._errors,
            state_bytes=sum(value.nbytes for bound, _ in active for value in bound.values.values()),
        )
        self.reserve(job.nbytes)  # has been, unless gradients are wider than their parameters
        self._jobs[number] = self._last = job
        self._worker.submit(job)
        if self._serial:
            self._wait_for(job)

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
        if self._last is None:
            return None
        self._wait_for(self._last)
        self.raise_failure()
        return self._last.uploaded

    def wait_quietly(self) -> None:
        """Block until nothing is under way; a failure is kept for who asks next."""
        if self._last is not None:
            self._wait_for(self._last)

    def take_created(self) -> dict[Tensor, UserState]:
        """State that updates have made where there was none; waits for them all."""
        self.creates = False
        self.wait_all()
        created, self._created = self._created, {}
        return created

    def forget(self) -> None:
        """Buckets have other numbers from now on."""
        self.wait_quietly()
        self._jobs.clear()
        self._last = None

    def _wait_for(self, job: HostJob) -> None:
        if not job.done.is_set():
            begin = time.perf_counter()
            while not job.done.wait(_LOOK_SECONDS):
                if not self._worker.is_alive():
                    raise RuntimeError("the thread that updates on the host has ended before its work was done")
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
        """Host memory through which parameters and gradients pass; shared by all optimizers of the device."""
        return self._worker.buffer_bytes

    def last_times(self) -> "HostTimes":
        """Of the buckets as they were last updated; waits for them."""
        self.wait_quietly()
        jobs = self._jobs.values()
        return HostTimes(
            sum(job.state_bytes for job in jobs),
            sum(job.update_seconds for job in jobs) * 1e3,
            self._waited_seconds * 1e3,
        )


@dataclass(frozen=True)
class HostTimes:
    """How the host has spent a step.

    Attributes:
        state_bytes: updated.
        update_ms: in which the optimizer ran.
        waited_ms: in which the main thread stood still for it.
    """

    state_bytes: int = 0
    update_ms: float = 0.0
    waited_ms: float = 0.0


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
