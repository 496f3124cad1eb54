"""What the engine asks of updates on the CPU, and all that it knows of them.

Whoever makes an engine hands in who does it; where there is nobody, the CPU updates nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..device.lanes import Mark
from ..optimizers.bound_range import BoundRange
from ..state.shard import StateShard
from ..state.store import StateStore, UserState


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


class Submit(Protocol):
    """Has buckets updated in one logical step."""

    def __call__(
        self, number: int, ranges: Sequence[BoundRange], states: StateStore, moving: Sequence[StateShard]
    ) -> None:
        """Have a bucket updated. Returns at once; gradients are held until they have been read.

        Args:
            number: of the bucket.
            ranges: all of its ranges.
            states: of the optimizer.
            moving: shards whose state is to be in their other place afterwards.
        """


class LastUpdates(Protocol):
    """The updates of an optimizer's last step. Hooks on a model have them, and so wait for them when it is gone."""

    def wait_without_owner(self) -> None:
        """Block until all parameters are new; at once from the second time on.

        Raises:
            RuntimeError: the update has failed, and there is no optimizer left that would say so.
        """


class CpuUpdates(Protocol):
    """The CPU's side of one optimizer: what has been submitted, and the waits for it.

    Attributes:
        failure: why its part of the state is only half updated; empty if it is whole.
    """

    failure: str

    # Before there is a step --------------------------------------------------------------------------------------

    def missing_bytes(self, gradient_nbytes: Sequence[Sequence[int]]) -> int:
        """Count the bytes of host memory that :meth:`reserve` would take."""

    def reserve(self, gradient_nbytes: Sequence[Sequence[int]]) -> None:
        """Take the memory through which buckets pass, and 24 MiB of the device.

        Args:
            gradient_nbytes: of each bucket, those of its gradients.

        Raises:
            RuntimeError: the driver refuses to page-lock the memory, or the device is full.
        """

    # A step ------------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer, shards: Iterable[StateShard]) -> Submit:
        """Note where a logical step starts; ``shards`` are all that the CPU updates. What it returns submits to it."""

    def after(self, mark: Mark) -> None:
        """Start what is submitted in this step from now on only after ``mark``."""

    def wait(self, number: int) -> Mark | None:
        """Block until the last update of a bucket is done: its state is at home. ``None``: it is not the CPU's.

        Returns:
            A mark behind which its parameters are new on the device.

        Raises:
            RuntimeError: it has failed, or another one of its step before it.
        """

    def wait_all(self) -> Mark | None:
        """Wait as :meth:`wait` does, for all buckets."""

    def wait_quietly(self) -> None:
        """Block until nothing is under way; a failure is kept for who asks next."""

    def raise_failure(self) -> None:
        """Raise what has failed by now, if nobody has been told yet; then nothing is under way any more.

        Raises:
            RuntimeError: an update has failed; says which.
        """

    def take_created(self) -> dict[Tensor, UserState]:
        """Return state that updates have made where there was none; waits for them all if there may be some."""

    def forget(self) -> None:
        """Wait for what is under way: buckets have other numbers from now on."""

    def counters_as_made(self, shards: Iterable[StateShard], states: StateStore) -> None:
        """Put 0-dim tensors of their state where the optimizer made them, as an update on the device wants them."""

    # What the last step has done ---------------------------------------------------------------------------------

    @property
    def last(self) -> LastUpdates:
        """The updates of the last step, and behind them those of all steps before it."""

    @property
    def buffer_bytes(self) -> int:
        """Host memory through which gradients pass; shared by all optimizers of the device."""

    def last_times(self) -> HostTimes:
        """Return the times of the last updates; waits for them."""
