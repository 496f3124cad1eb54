"""The CPU as a lane: it updates state in its home, gradients come down to it, and parameters go up.

The work is done by the threads of ``cpu_update/``, which take what is newest and has arrived first. A mark of this lane
is known when its update is done: whoever waits for it on a stream blocks the host until then.
"""

from collections.abc import Callable, Iterable, Sequence

from torch.optim import Optimizer

from ..cpu_update.updates import HostUpdates, Submit
from ..device.lanes import Mark
from ..optimizers.bound_range import BoundRange
from ..state.shard import StateShard
from ..state.store import StateStore


class CpuMark:
    """The end of the last update of one bucket, and of the way up of its parameters."""

    def __init__(self, host: HostUpdates, number: int) -> None:
        self._host, self._number = host, number

    def resolved(self) -> Mark | None:
        """Block the host until the CPU has updated; returns a mark behind which parameters are new on the device.

        Raises:
            RuntimeError: the update has failed, or another one of its step before it.
        """
        return self._host.wait(self._number)

    def passed(self) -> bool:
        """Not known without waiting."""
        raise NotImplementedError

    def elapsed_ms_since(self, earlier: Mark) -> float:
        """Not known: the host's clock has its times."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Block the host until the device has the parameters."""
        mark = self.resolved()
        if mark is not None:
            mark.synchronize()


class HostLane:
    """Updates of one optimizer on the CPU."""

    def __init__(self, host: HostUpdates, shards: Callable[[], Iterable[StateShard]]) -> None:
        """Take who updates, and what yields all shards that the CPU updates."""
        self._host, self._shards = host, shards
        self._submit: Submit | None = None
        self._after: dict[int, Mark] = {}

    def begin(self, optimizer: Optimizer) -> None:
        """Note where a logical step starts."""
        self._submit, self._after = self._host.begin(optimizer, self._shards()), {}

    def wait(self, *marks: Mark | None) -> None:
        """Let what is submitted from now on read gradients only after ``marks``; each counts once in a step.

        Buckets whose gradients are final at the same time so wait for the same marks, and are updated in order.
        """
        for mark in marks:
            if mark is not None and id(mark) not in self._after:
                self._after[id(mark)] = mark
                self._host.after(mark)

    def update(
        self, number: int, ranges: Sequence[BoundRange], states: StateStore, moving: Sequence[StateShard]
    ) -> CpuMark:
        """Have a bucket updated; returns at once. The state of ``moving`` is in its other place afterwards."""
        assert self._submit is not None, "a step has begun"
        self._submit(number, ranges, states, moving)
        return CpuMark(self._host, number)
