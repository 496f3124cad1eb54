"""Chooses the CPU's share by its rates and those of the link, measured once when ``host_fraction="auto"`` is attached.

Each alone, and both at once: they share the host's memory. What is updated is several times as large as the caches, in
buckets like those of a step; every figure is the median of some rounds. Takes about a second, and memory for that time.
"""

import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device.arena import Region
from ..device.host_limits import host_memory
from ..device.lanes import Lane
from ..device.link import DeviceLink
from ..engine.cpu_updates import ChosenFraction
from ..optimizers.kept_state import Layouts
from ..optimizers.masters import close_master, kept_dtype, open_master
from ..planning.cpu_share import Rates, Traffic, best_fraction, host_bucket_bytes
from ..policy import MasterKind
from ..state.layout import StateLayout
from ..torch_compat.dtensor import has_replicas, local_shard
from .cores import cache_bytes
from .step import HostStep
from .worker import HostWorker, Task

logger = logging.getLogger(__name__)

_STATE_BYTES = 512 << 20
"""At least, and four times what the caches keep; but not more than an eighth of the memory that is free."""

_REACHED = 0.85
"""Share of the CPU's rate in one bucket after the other that is left in a step (H200, 16 cores: 18.6 of 21.7 GB/s)."""

_CHUNK_BYTES = 32 << 20
_COPIES = 16
_ROUNDS = 3


def choose_fraction(
    cls: type[Optimizer],
    optimizer: Optimizer,
    params: Sequence[Tensor],
    layouts: Layouts,
    *,
    link: DeviceLink,
    worker: HostWorker,
    bucket_bytes: int,
    pin: bool,
) -> ChosenFraction:
    """Choose the share of the state that the CPU is to update.

    Args:
        cls: the optimizer's class.
        optimizer: whose hyperparameters count; nothing of it is changed.
        params: that it is to update. The largest that no other rank has as well stands for all of them.
        layouts: of its state.
        link: of its device.
        worker: updates on the host.
        bucket_bytes: of state that the device updates at a time.
        pin: whether host memory is page-locked.
    """
    like = max((param for param in params if not has_replicas(param)), key=Tensor.numel, default=None)
    group = next((n for n, g in enumerate(optimizer.param_groups) if any(p is like for p in g["params"])), 0)
    layout = None if like is None else layouts.learn(optimizer, like, optimizer.param_groups[group], "")
    if like is None or layout is None or not layout.values:
        why = "host_fraction='auto': 0, as other ranks may hold copies of all parameters, or there is no state"
        return ChosenFraction(0.0, why)
    copies = Copies(link, pin=pin)
    lane = link.host_lanes(serial=False)[0]
    local = local_shard(like)
    scratch = _Scratch(local.dtype, group, layout, layouts.master_of(like), host_bucket_bytes(bucket_bytes))
    updates = _Updates(HostStep(cls, layouts.capabilities, optimizer, []), lane, scratch)
    worker.reserve(1, pin=pin)
    rounds = [_round(copies, updates, worker) for _ in range(_ROUNDS)]
    found = Rates(*map(statistics.median, zip(*rounds, strict=True)))
    found = found._replace(cpu=_REACHED * found.cpu, cpu_beside=_REACHED * found.cpu_beside)
    weights = local.element_size() / _state_bytes_each(layout)
    fraction = best_fraction(found, Traffic(down=weights, up=weights))
    why = (
        f"host_fraction='auto': {fraction:.2f}: CPU {found.cpu / 1e9:.1f} GB/s of state "
        f"({found.cpu_beside / 1e9:.1f} beside copies), link {found.two_way / 1e9:.1f} GB/s both ways "
        f"({found.two_way_beside / 1e9:.1f} beside updates)"
    )
    logger.info(why)
    return ChosenFraction(fraction, why)


def _round(copies: "Copies", updates: "_Updates", worker: HostWorker) -> Rates:
    one_way = copies.bytes_per_second(down=True)
    two_way = copies.bytes_per_second(down=True, up=True)
    alone, beside = _Result(updates.bytes_per_second), _Result(updates.bytes_per_second)
    worker.submit(alone)
    cpu = alone()
    worker.submit(beside)
    two_way_beside = copies.bytes_per_second(down=True, up=True, until=beside.is_done)
    return Rates(cpu, beside(), one_way, two_way, two_way_beside)


def _measured_bytes() -> int:
    return min(max(_STATE_BYTES, 4 * cache_bytes()), max(1, _free_bytes() // 8))


def _free_bytes() -> int:
    """Return this rank's share of the host's free memory."""
    return host_memory().available_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _state_bytes_each(layout: StateLayout) -> int:
    """Count the bytes of state for one element of a parameter."""
    return sum(leaf.dtype.itemsize for value in layout.values.values() for leaf in value.leaves)


class Copies:
    """Chunks on the host, more than the caches keep, and one for each direction on the device."""

    def __init__(self, link: DeviceLink, *, pin: bool) -> None:
        self._link = link
        self._lanes: tuple[Lane, Lane] = link.host_lanes(serial=False)
        nbytes = max(1, min(_COPIES, _free_bytes() // 16 // _CHUNK_BYTES)) * _CHUNK_BYTES
        self._on_host = [Region(nbytes, device=link.device, pin=pin).bytes.split(_CHUNK_BYTES) for _ in range(2)]
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
        self.issue(count * _CHUNK_BYTES, down=down, up=up)
        self._link.synchronize()

    def issue(self, nbytes: int, *, down: bool = False, up: bool = False) -> None:
        """About ``nbytes`` each way, in whole chunks; nobody waits for them."""
        for number in range(-(-nbytes // _CHUNK_BYTES)):
            if down:
                self._lanes[0].copy(self._on_host[0][number % len(self._on_host[0])], self._on_device[0])
            if up:
                self._lanes[1].copy(self._on_device[1], self._on_host[1][number % len(self._on_host[1])])


class _Scratch(NamedTuple):
    """Scratch memory for updates, in pieces."""

    dtype: torch.dtype
    group: int
    layout: StateLayout
    master: MasterKind
    bucket_bytes: int


class _Bucket:
    """A scratch parameter and its state on the host. Touched first by the threads that will use it."""

    def __init__(self, scratch: _Scratch, numel: int) -> None:
        self.weights = torch.ones(numel, dtype=scratch.dtype, device="cpu")
        self.grad = torch.ones_like(self.weights)
        self.kept = (
            None if scratch.master == "none" else torch.zeros(numel, dtype=kept_dtype(scratch.master), device="cpu")
        )
        self.state: dict[str, object] = {}


class _Updates:
    """The optimizer's class on scratch parameters on the host."""

    def __init__(self, step: HostStep, lane: Lane, scratch: _Scratch) -> None:
        self._step = step
        self._lane = lane
        self._scratch = scratch
        self._buckets: list[_Bucket] = []
        self._state_bytes = 0

    def bytes_per_second(self) -> float:
        """State updated."""
        with torch.no_grad():
            if not self._buckets:
                self._make_buckets()
            begin = time.perf_counter()
            for bucket in self._buckets:
                self._update(bucket)
            return self._state_bytes / (time.perf_counter() - begin)

    def _make_buckets(self) -> None:
        each, nbytes = _state_bytes_each(self._scratch.layout), _measured_bytes()
        numel = max(1, min(self._scratch.bucket_bytes, nbytes) // each)
        self._buckets = [_Bucket(self._scratch, numel) for _ in range(max(1, nbytes // each // numel))]
        self._state_bytes = len(self._buckets) * numel * each
        for bucket in self._buckets:
            self._update(bucket)  # makes its state

    def _update(self, bucket: _Bucket) -> None:
        master, param = self._scratch.master, bucket.weights
        if bucket.kept is not None:
            param = open_master(master, param, bucket.kept, exists=bool(bucket.state))
        param.grad = bucket.grad.to(param.dtype)
        shared = self._step.shared(self._lane)
        lists = [[param] if number == self._scratch.group else [] for number in range(len(self._step.pinned))]
        after = self._step.shadow.run(shared, lists, {param: bucket.state} if bucket.state else {}, {})
        bucket.state = dict(after.get(param, {}))
        if bucket.kept is not None:
            close_master(master, param, bucket.weights, bucket.kept)


class _Result:
    """Task whose result is what a function returns in the worker."""

    def __init__(self, work: Callable[[], float]) -> None:
        self._work = work
        self._done = threading.Event()
        self._value = 0.0
        self._error: BaseException | None = None

    def may_pass(self, earlier: Task) -> bool:
        """It passes nothing."""
        return False

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
        """Return whether it has."""
        return self._done.is_set()

    def __call__(self) -> float:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value
