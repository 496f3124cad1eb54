"""The update of one bucket on the host, a job of :mod:`worker`.

::

    begin: gradients down ──▶ update: the optimizer's class on host tensors ──▶ finish: parameters up
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..device.arena import aligned
from ..device.lanes import Lane, Mark, recorded
from ..optimizers import Capabilities
from ..optimizers.bucket_update import BoundRange, update_bucket
from ..optimizers.divided_step import DividedStep, entries_of, instance_attributes
from ..state.shard import StateShard
from ..state.store import StateStore
from .mirror import Mirror, like

_FLAG_BYTES = aligned(1)
"""Bytes that say, in what a bucket brings down, whether its parameters have been written by somebody else."""


def passing_bytes(gradient_bytes: Iterable[int]) -> int:
    """Host memory through which a bucket with gradients of these sizes passes."""
    return _FLAG_BYTES + sum(map(aligned, gradient_bytes))


class HostStep:
    """One logical step as it was when it was called; the buckets of the host share it, and its threads look into it.

    Attributes:
        gradient_divisor: of the user's gradients in a fused kernel: the scale, or one where it skips the step.
        failed: an update has failed, so that later ones are left out.
    """

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
        scale, found_inf = self._values.get("grad_scale"), self._values.get("found_inf")
        self.gradient_divisor = scale if isinstance(scale, Tensor) else None
        if isinstance(scale, Tensor) and isinstance(found_inf, Tensor):
            self.gradient_divisor = torch.where(found_inf.to(scale.device) == 1, torch.ones_like(scale), scale)
        self.failed = False

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
    mirror: Mirror  # its parameters on both sides
    ranges: list[BoundRange]  # those that have a gradient, bound to the mirror and to state at home
    grads: list[Tensor]  # on the device, held until they have been copied
    moves: list[tuple[Tensor, Tensor]]  # state to copy first, to and from: a save still reads where it was
    step: HostStep
    states: StateStore  # copies of the user's entries
    after: Sequence[Mark]  # passed before gradients are read
    errors: list[tuple[str, BaseException]]  # of all jobs: parameters that may be half updated, and why
    done: threading.Event = field(default_factory=threading.Event)  # the host may look at results and ``errors``
    uploaded: Mark | None = None  # recorded behind the parameters' way up
    failed: bool = False  # it, or another one of its step before it
    update_seconds: float = 0.0
    state_bytes: int = 0  # that it has updated
    weights_down_bytes: int = 0  # of parameters that the mirror did not have
    _down: Mark | None = None
    _changed: Tensor | None = None  # on the host; says behind ``_down`` whether parameters were written
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
        names = list(dict.fromkeys(bound.shard.name for bound in self.ranges))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        self.errors.append((", ".join(names[:4]) + more, error))
        self.step.failed = self.failed = True

    def begin(self, memory: Tensor) -> None:
        """Issue the copies down, into ``memory``, which is nobody else's until the update has ended."""
        with self._failing():
            if not self.step.failed:
                self._issue_downloads(memory)

    def _issue_downloads(self, memory: Tensor) -> None:
        # What came up last: the mirror is about to be written, and what is on the device is compared with it.
        down = self.mirror.lanes[0]
        down.wait(*self.after, self.mirror.uploaded)
        offset, on_host = _FLAG_BYTES, []
        for bound, grad in zip(self.ranges, self.grads, strict=True):
            bound.gradient = like(grad, memory[offset : offset + grad.nbytes])
            on_host.append(bound.gradient)
            offset += aligned(grad.nbytes)
        if self.grads:
            # One piece: nobody else's small copies go down here.
            down.copy_all(on_host, self.grads)
            with down.running():
                self._unscale_gradients()
            if self.mirror.is_known:
                self._changed = memory[:1].view(torch.bool)[0]
                self.mirror.compare(self._changed)
            else:
                self._bring_weights_down()
        self._down = down.mark()

    def _bring_weights_down(self) -> None:
        self.mirror.copy_down()
        self.weights_down_bytes = self.mirror.nbytes

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
        with self._failing():
            if self._down is not None:
                self._down.synchronize()
                self.grads = []  # may be freed now
                if not self.step.failed:
                    with recorded(f"fsdp_offload H{self.number}"):
                        self._update()
        for bound in self.ranges:
            bound.gradient = None  # the memory is somebody else's from now on
        self._changed = None
        self.failed = self.failed or self.step.failed

    def _update(self) -> None:
        if self._changed is not None and self._changed.item():
            self._bring_weights_down()
            self.mirror.lanes[0].mark().synchronize()
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
        if self.ranges:
            self.mirror.is_known = False  # until what comes of it is on the device
        for part in filter(None, parts):
            update_bucket(step, part, self.states)
        self.update_seconds = time.perf_counter() - begin
        self.state_bytes = sum(value.nbytes for bound in self.ranges for value in bound.values.values())
        self._updated = True

    def finish(self) -> None:
        """Issue the copies up."""
        with self._failing():
            if self._updated:
                self._issue_uploads()
        # The rest goes with its step, not with the next step of this bucket.
        self.ranges, self.grads, self.moves, self.after = [], [], [], ()
        self.step = self.states = self.mirror = None  # type: ignore[assignment]
        self.done.set()

    def _issue_uploads(self) -> None:
        self.uploaded = self.mirror.copy_up()
