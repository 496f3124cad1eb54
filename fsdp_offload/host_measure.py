"""What the CPU and the link of this machine can do, measured once when ``host_fraction="auto"`` is attached.

Each alone, and both at once: they share the host's memory. Takes a fraction of a second, and memory for that time.
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arena import Region
from .host_share import Rates, Traffic
from .host_update import HostStep
from .host_worker import HostWorker
from .masters import MasterKind, close_master, kept_dtype, open_master
from .optimizers import Traits
from .shards import StateLayout
from .transfer import DeviceLink, Lane

_STATE_BYTES = 128 << 20
"""With parameters and gradients about twice as much: more than the caches of a processor keep."""

_CHUNK_BYTES = 32 << 20
_COPIES = 16
_UPDATES = 8


def measure(
    cls: type[Optimizer],
    traits: Traits,
    optimizer: Optimizer,
    *,
    like: Tensor,
    group: int,
    layout: StateLayout,
    master: MasterKind,
    link: DeviceLink,
    worker: HostWorker,
    pin: bool,
) -> tuple[Rates, Traffic]:
    """The rates of both sides, and what the host's share moves.

    Args:
        cls: the optimizer's class.
        traits: of that class.
        optimizer: whose hyperparameters count; nothing of it is changed.
        like: a parameter's local tensor on the device: its dtype counts.
        group: which param group it is in.
        layout: of its state.
        master: which one is kept for it, as part of that state.
        link: of its device.
        worker: updates on the host.
        pin: whether host memory is page-locked.
    """
    copies = _Copies(link, pin=pin)
    lane = link.host_lanes(serial=False)[0]
    updates = _Updates(HostStep(cls, traits, optimizer, []), lane, like.dtype, group, layout, master)
    worker.reserve(1, pin=pin)
    one_way = copies.bytes_per_second(down=True)
    two_way = copies.bytes_per_second(down=True, up=True)
    alone, beside = _Result(updates.bytes_per_second), _Result(updates.bytes_per_second)
    worker.submit(alone)
    cpu = alone()
    worker.submit(beside)
    two_way_beside = copies.bytes_per_second(down=True, up=True, until=beside.is_done)
    weights = like.element_size() / _state_bytes_each(layout)
    return Rates(cpu, beside(), one_way, two_way, two_way_beside), Traffic(down=2 * weights, up=weights)


def _state_bytes_each(layout: StateLayout) -> int:
    """For one element of a parameter."""
    return sum(leaf.dtype.itemsize for value in layout.values.values() for leaf in value.leaves)


class _Copies:
    """Two chunks on the device and two on the host, copied each way."""

    def __init__(self, link: DeviceLink, *, pin: bool) -> None:
        self._link = link
        self._lanes: tuple[Lane, Lane] = link.host_lanes(serial=False)
        self._on_host = [Region(_CHUNK_BYTES, device=link.device, pin=pin) for _ in range(2)]
        self._on_device = [torch.zeros(_CHUNK_BYTES, dtype=torch.uint8, device=link.device) for _ in range(2)]
        self._link.synchronize()

    def bytes_per_second(
        self, *, down: bool = False, up: bool = False, until: Callable[[], bool] = lambda: True
    ) -> float:
        """Both directions added; at least ``_COPIES`` chunks each way, and more until ``until``."""
        self._copy(1, down=down, up=up)
        begin, count = time.perf_counter(), 0
        while count == 0 or not until():
            self._copy(_COPIES, down=down, up=up)
            count += _COPIES
        return count * (down + up) * _CHUNK_BYTES / (time.perf_counter() - begin)

    def _copy(self, count: int, *, down: bool, up: bool) -> None:
        for _ in range(count):
            if down:
                self._lanes[0].copy(self._on_host[0].bytes, self._on_device[0])
            if up:
                self._lanes[1].copy(self._on_device[1], self._on_host[1].bytes)
        self._link.synchronize()


class _Updates:
    """The optimizer's class on one scratch parameter on the host."""

    def __init__(
        self, step: HostStep, lane: Lane, dtype: torch.dtype, group: int, layout: StateLayout, master: MasterKind
    ) -> None:
        self._step = step
        self._lane = lane
        self._group = group
        self._numel = _STATE_BYTES // _state_bytes_each(layout)
        self._dtype = dtype
        self._master: MasterKind = master
        self._state: dict[str, object] = {}
        self._weights: Tensor | None = None

    def bytes_per_second(self) -> float:
        """State updated."""
        with torch.no_grad():
            if self._weights is None:
                # Touched first by the threads that will use it.
                self._weights = torch.ones(self._numel, dtype=self._dtype, device="cpu")
                self._grad = torch.ones_like(self._weights)
                if self._master != "none":
                    self._kept = torch.zeros(self._numel, dtype=kept_dtype(self._master), device="cpu")
                self._update()
            begin = time.perf_counter()
            for _ in range(_UPDATES):
                self._update()
            return _UPDATES * _STATE_BYTES / (time.perf_counter() - begin)

    def _update(self) -> None:
        assert self._weights is not None
        param = self._weights
        if self._master != "none":
            param = open_master(self._master, param, self._kept, exists=bool(self._state))
        param.grad = self._grad.to(param.dtype)
        shared = self._step.shared(self._lane)
        lists = [[param] if number == self._group else [] for number in range(len(self._step.pinned))]
        after = self._step.shadow.run(shared, lists, {param: self._state} if self._state else {}, {})
        self._state = dict(after.get(param, {}))
        if self._master != "none":
            close_master(self._master, param, self._weights, self._kept)


class _Result:
    """What a function will have returned in the worker: a task."""

    def __init__(self, work: Callable[[], float]) -> None:
        self._work = work
        self._done = threading.Event()
        self._value = 0.0
        self._error: BaseException | None = None

    def begin(self, memory: Tensor) -> None:
        """Nothing comes down."""

    def update(self) -> None:
        """Run it."""
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
            self._error = error
        self._done.set()

    def finish(self) -> None:
        """Nothing goes up."""

    def is_done(self) -> bool:
        """Whether it has."""
        return self._done.is_set()

    def __call__(self) -> float:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value
