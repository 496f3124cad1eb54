"""The lanes of ``deferred.py`` under whole engines: real models and optimizers, whose copies and updates come late.

What torch runs itself (forwards, backwards, plain steps) runs at once; where it touches what the engine moves, the
lanes are told. The threads that update on the CPU are queues, and run in any order.

Left out are optimizers whose steps look at numbers on the host (foreach, for-loop, Muon), and masters, whose writes
count when they run: here a whole update runs late, and they would be other numbers.
"""

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_offload.api import attach
from fsdp_offload.core.buckets import Bucket
from fsdp_offload.core.items import Item
from fsdp_offload.core.loop import Core
from fsdp_offload.cpu_update import HostUpdates
from fsdp_offload.device.lanes import DeviceLink
from fsdp_offload.engine import whole
from fsdp_offload.engine.engine import Engine
from fsdp_offload.fsdp.dtensor import local_shard, version_of
from fsdp_offload.listeners import deltas
from fsdp_offload.optimizers.bucket_update import BoundRange
from fsdp_offload.state.shard import StateShard
from fsdp_offload.state.store import OwnCounters, adopt
from tests.core.deferred import Clock, DeferredLane, DeferredLanes, World, merge


class LateWorld(World):
    """Looks at tensors without being seen: gradients may be watched."""

    def check(self, lane: str, clock: Clock, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super().check(lane, clock, [*map(local_shard, reads)], [*map(local_shard, writes)])

    def forget(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super().forget(local_shard(tensor))


class LateLanes(DeferredLanes):
    """The lanes of a device; torch's gathers run at once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, LateWorld(seed))
        self.world.eagerness = random.Random(seed).choice([0.05, 0.3, 0.3, 0.6])
        self.copy_in = DeferredLane(self.world, "copy in", at_once=True)

    def synchronize(self) -> None:
        """Block the host until the device has done everything."""
        for lane in (
            self.load,
            self.store,
            self.update,
            self.update_kept,
            self.down,
            self.up,
            self.compute,
            self.copy_in,
        ):
            lane.mark().synchronize()


class Threads:
    """Threads that update on the CPU or merge deltas, as queues: what they are given runs at a wait, or at times."""

    def __init__(self, world: World) -> None:
        self.world, self.queues = world, list[Queue]()
        self._is_within = False

    def pool(self, *args: object) -> "Queue":
        """Return one more thread, in the place of a ``ThreadPoolExecutor``."""
        self.queues.append(Queue(self))
        return self.queues[-1]

    def run_one(self) -> None:
        """Run what is next in some thread, which knows what it knew, and who submitted that."""
        queue = self.world.random.choice([one for one in self.queues if one.may_run()])
        function, args, ended = queue.given.popleft()
        main, self.world.host = self.world.host, queue.clock
        merge(self.world.host, ended.known)
        self._is_within = True
        ended.value = function(*args)
        ended.known = dict(self.world.host)
        ended.is_done = True
        self._is_within, self.world.host = False, main

    def run_some(self) -> None:
        while self.world.random.random() < self.world.eagerness and any(one.may_run() for one in self.queues):
            if self._is_within:
                return
            self.run_one()


class Queue:
    """One thread."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.clock = threads, Clock()
        self.given: deque[tuple[Callable[..., Any], tuple[Any, ...], Ended]] = deque()

    def may_run(self) -> bool:
        if not self.given:
            return False
        function, (_, given), _ = self.given[0]
        buffers = getattr(function.__self__, "_buffers", None)  # type: ignore[attr-defined]  # of the CPU's updates
        return given.is_done if isinstance(given, Ended) else buffers is None or not buffers.empty()

    def submit(self, function: Callable[..., Any], *args: Any) -> "Ended":
        ended = Ended(self.threads)
        self.given.append((function, args, ended))
        self.threads.run_some()
        return ended


class Ended:
    """The future of a call."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.known = threads, dict(threads.world.host)
        self.is_done, self.value = False, None

    def result(self) -> Any:
        while not self.is_done:
            self.threads.run_one()
        merge(self.threads.world.host, self.known)
        return self.value


@contextmanager
def late(seed: int, visits: type[Any] = whole._Visit, host_updates: type[Any] = HostUpdates) -> Iterator[LateLanes]:  # noqa: C901  # one place after the other
    """Within it, engines that are made have late lanes, and these classes, which may have been changed."""
    lanes = LateLanes(seed)
    threads = Threads(lanes.world)
    module = sys.modules[host_updates.__module__]
    reduced, step, wait_home, store = Engine.reduced, Core.step, Core.wait_home, deltas._Recorder.store
    on_device, part_of = StateShard.on_device, BoundRange.part_of

    known = WeakTensorKeyDictionary()  # gradients, and their versions when somebody wrote them last

    def written(params: Iterable[Tensor]) -> list[Tensor]:
        """Gradients that somebody has written since; their memory may be new."""
        found = [grad for param in params if (grad := param.grad) is not None and known.get(grad) != version_of(grad)]
        for grad in found:
            known[grad] = version_of(grad)
            lanes.world.forget(grad)
        return found

    def reduced_late(engine: Engine, number: int, params: Sequence[Tensor], event: object, *args: Any) -> None:
        lanes.reduce.wait(lanes.compute.mark())
        lanes.reduce.touch(writes=written(params))
        event = lanes.reduce.mark()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: lanes.compute.wait(event))  # as it ends
        reduced(engine, number, params, event, *args)

    comes = lanes.world.random.random() < 0.4

    def come_late(core: Core, name: object) -> None:
        more = [lanes.world.random.choice([0, 0, 1, 2, 5]) for _ in core.cache.pools]
        more = more if comes and not core.away else [0] * len(more)
        core.cache.allow(more, [lanes.world.random.randint(0, one) for one in more])
        if any(more):
            core.prefetch()

    def step_late(core: Core, wanted: Sequence[Bucket], *args: Any) -> None:
        lanes.compute.touch(writes=written(param for bucket in wanted for param in bucket.params))
        step(core, wanted, *args)

    def wait_home_late(core: Core, items: Iterable[Item], **options: Any) -> None:
        items = list(items)
        wait_home(core, items, **options)
        lanes.world.check("host", lanes.world.host, [home for item in items for home, _ in item.home.bytes], [])

    def on_device_late(shard: StateShard, name: str, *args: Any, **options: Any) -> Tensor:
        lanes.compute.touch(reads=shard.home.leaves[name])
        return on_device(shard, name, *args, **options)

    def store_late(recorder: Any, found: Sequence[Tensor]) -> list[Tensor]:
        homes = store(recorder, found)
        for one in (*homes, *found):  # torch's allocators give memory away once the lane is done with it
            weakref.finalize(one, lanes.world.forget_at, one.data_ptr(), one.data_ptr() + one.nbytes)
        return homes

    def part_of_late(bound: BoundRange, grad: Tensor | None) -> Tensor | None:
        part = part_of(bound, grad)
        if bound.shard.on_host and part is not None and not shares_memory(part, grad):
            lanes.compute.touch(reads=[grad])
            lanes.made([part])
        return part

    def adopt_late(entries: Iterable[tuple[StateShard, dict[str, Any]]]) -> None:
        entries = list(entries)
        for shard, state in entries:
            for name, home in shard.homes.items():
                if state.get(name, home) is not home:
                    lanes.world.check("host", lanes.world.host, [], shard.home.leaves[name])
        adopt(entries)

    def run_late(function: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        own = getattr(function, "__self__", None)
        if isinstance(own, OwnCounters):
            values = [value for param in own._states for value in own.states.get(param).values()]
            writes = [value for value in values if isinstance(value, Tensor) and not value.dim()]
        run(function, reads, writes)

    run, lanes.update.run = lanes.update.run, run_late  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceLink, "lanes", lambda link, *, serial: lanes)
        patch.setattr(DeviceLink, "synchronize", lambda link: lanes.synchronize())
        patch.setattr(whole, "_Visit", visits)
        patch.setattr(whole, "adopt", adopt_late)
        patch.setattr(attach, "HostUpdates", host_updates)
        patch.setattr(module, "ThreadPoolExecutor", threads.pool)
        patch.setattr(deltas, "Worker", threads.pool)
        patch.setattr(deltas._Recorder, "store", store_late)
        patch.setattr(Engine, "reduced", reduced_late)
        patch.setattr(Core, "step", step_late)
        patch.setattr(Core, "come", come_late)
        patch.setattr(Core, "wait_home", wait_home_late)
        patch.setattr(StateShard, "on_device", on_device_late)
        patch.setattr(BoundRange, "part_of", part_of_late)
        gc.disable()  # it waits for the lanes where an engine goes, perhaps within an update
        try:
            yield lanes
        finally:
            gc.enable()


def shares_memory(part: Tensor, grad: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return part.untyped_storage().data_ptr() == local_shard(grad).untyped_storage().data_ptr()
