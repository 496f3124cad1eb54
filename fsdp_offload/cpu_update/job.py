"""The update of one bucket on the host, a task of :mod:`worker`.

::

    begin: gradients down ──▶ update: the optimizer's class on host tensors ──▶ finish: parameters up

In a backward gradients become final in waves, one for each group of the model. Where the host is slower than that, the
newest wave that is there goes first: its layers are needed first in the next forward, and what is left over when the
backward ends is spread over all layers, so that the forward finds each one done just before its turn.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..device.lanes import Lane, Mark, recorded
from ..optimizers import Conventions
from ..optimizers.bound_range import BoundRange
from ..optimizers.bucket_update import update_bucket
from ..planning.buckets import aligned
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from .fingerprint import Hasher
from .mirror import MirroredBucket, MirroredPart, like
from .step import HostStep
from .worker import Task


class HostStates:
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
        after: what has to have passed before its gradients are read: of a wave, all that the one before has, and more.
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
    states: HostStates
    conventions: Conventions
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
    _are_there: bool = False

    def may_pass(self, earlier: Task) -> bool:
        """Return whether its gradients are of a newer wave in the same step, and are there.

        Within a wave the order stays: a parameter's ranges are updated from the first one on.
        """
        return (
            isinstance(earlier, HostJob)
            and self.step is earlier.step
            and len(self.after) > len(earlier.after)
            and self._gradients_are_there()
        )

    def _gradients_are_there(self) -> bool:
        # Asked for each job whenever one is taken, and of a device: what has passed is not asked again.
        self._are_there = self._are_there or all(mark.passed() for mark in reversed(self.after))
        return self._are_there

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
        """Divide the user's gradients, as a fused kernel does where ``GradScaler`` gives it the scale."""
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
            if grad.stride() != bound.param.stride():  # fused kernels go through memory, and it is us who choose them
                grad = torch.empty_like(bound.param, dtype=grad.dtype).copy_(grad)
            bound.gradient = grad
        if self.ranges:
            self.bucket.forget()  # until what comes of it is on the device
        try:
            groups = len(self.step.pinned)
            for ranges in _alike(self.ranges, self.states):
                update_bucket(self.step.shadow, shared, self.conventions, ranges, groups, self.states, {})
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
"""Bytes that say, in what a bucket brings down, whether its parameters have been written by somebody else."""


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
