"""A device whose time is simulated: the real engine on the CPU, whose lanes take as long as those of an accelerator.

::

    lanes, gathers, forward and backward ──issue──▶ Operation: on a stream, after others, so many bytes or milliseconds
                                                        │ Simulation.run
                              marks, which the engine measures by ◀── when each began and ended

A stream runs its operations in order. Copies of one direction share the link; the host takes no time. What engines
decide by measuring ("auto", the order of updates) they decide here too, and the same each time.

A small model stands for a large one: bytes count ``SCALE`` times. Activations are not there at all, and count as the
device memory that they would take; gradients count for as long as they are there.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from examples.benchmarks.train import GPT
from fsdp_offload import OffloadPolicy
from fsdp_offload.device import link as link_room
from fsdp_offload.device.lanes import Copy, EventMark, HostMark, Lane, Mark
from fsdp_offload.device.link import Allocated, DeviceLink
from fsdp_offload.engine import window as window_room
from fsdp_offload.engine.bucket import StagedBucket
from fsdp_offload.engine.engine import Engine
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.engine.window import Window
from fsdp_offload.model.hooks import Overlap
from fsdp_offload.torch_compat.dtensor import local_shard
from tests.parity import attach

SCALE = 1024
"""A width of 64 stands for 2,048, and 1,024 tokens of vocabulary for 32,768."""

LINK_BYTES_PER_MS = 48.5e6
"""Each way, while both are in use: an H200 with PCIe 5.0."""

GB = 1e9


@dataclass(eq=False)
class Operation:
    """What a stream was given: bytes up or down the link, or milliseconds of its own."""

    kind: str
    left: float
    after: list["Operation"]
    ends_ms: float | None = None


class Simulation:
    """Streams that run on one device.

    Attributes:
        activation_bytes: of the model.
        peak_bytes: the most of these and of gradients, without what the engine takes.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._streams: defaultdict[str, deque[Operation]] = defaultdict(deque)
        self._gradients: dict[int, tuple[StorageWeakRef, float]] = {}
        self.activation_bytes = self.peak_bytes = 0.0

    def issue(self, stream: str, kind: str = "ms", amount: float = 0.0, after: Iterable[Operation] = ()) -> Operation:
        """Give a stream something to do behind what it has, and behind all of ``after``."""
        operation = Operation(kind, amount, [one for one in after if one.ends_ms is None])
        self._streams[stream].append(operation)
        return operation

    def run(self) -> None:
        """Let everything end that has been issued."""
        while self._end_what_is_done() or any(self._streams.values()):
            running = [waiting[0] for waiting in self._streams.values() if waiting and _may_run(waiting[0])]
            if not running:
                assert not any(self._streams.values()), "streams wait for each other"
                return
            copies = {kind: sum(one.kind == kind for one in running) for kind in ("up", "down")}
            rates = {"ms": 1.0, **{kind: LINK_BYTES_PER_MS / max(1, count) for kind, count in copies.items()}}
            ms = min(one.left / rates[one.kind] for one in running)
            self._now_ms += ms
            for one in running:
                one.left = max(0.0, one.left - ms * rates[one.kind])
                if one.left < _NOTHING:
                    one.left = 0.0

    def _end_what_is_done(self) -> bool:
        ended = False
        for waiting in self._streams.values():
            while waiting and _may_run(waiting[0]) and not waiting[0].left:
                waiting.popleft().ends_ms = self._now_ms
                ended = True
        return ended

    def allocate(self, nbytes: float) -> None:
        """Activations take memory, or (less than 0) free some."""
        self.activation_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def reduced(self, grads: Iterable[Tensor]) -> None:
        """There are gradients, those of a group in one storage."""
        for grad in grads:
            storage = grad.untyped_storage()
            self._gradients[storage.data_ptr()] = StorageWeakRef(storage), SCALE * storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    @property
    def allocated_bytes(self) -> float:
        """By the model now."""
        self._gradients = {key: one for key, one in self._gradients.items() if not one[0].expired()}
        return self.activation_bytes + sum(nbytes for _, nbytes in self._gradients.values())


_NOTHING = 1e-6


def _may_run(operation: Operation) -> bool:
    return all(other.ends_ms is not None for other in operation.after)


class SimulatedMark:
    """The end of what a stream had been given when it was made."""

    def __init__(self, simulation: Simulation, operation: Operation) -> None:
        self._simulation = simulation
        self.operation = operation

    def synchronize(self) -> None:
        self._simulation.run()

    def passed(self) -> bool:
        self._simulation.run()
        return True

    @property
    def ms(self) -> float:
        self._simulation.run()
        assert self.operation.ends_ms is not None
        return self.operation.ends_ms

    def elapsed_ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, SimulatedMark)
        return self.ms - earlier.ms


class SimulatedLane:
    """A stream; copies are made for real when they are issued, and take their time on the link."""

    def __init__(self, simulation: Simulation, name: str, kind: str = "ms") -> None:
        self._simulation = simulation
        self.name = name
        self._kind = kind

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, SimulatedMark):
            self._simulation.issue(self.name, after=[mark.operation])
        else:
            assert isinstance(mark, (HostMark, EventMark))

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copy_pieces([(target, source)])

    def cut(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        return copies

    def copy_pieces(self, pieces: Iterable[Copy]) -> None:
        for target, source in pieces:
            target.copy_(source)
            self._simulation.issue(self.name, self._kind, SCALE * target.nbytes)

    def copy_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.copy_pieces(zip(targets, sources, strict=True))

    def mark(self, reuse: Mark | None = None) -> Mark:
        operation = self._simulation.issue(self.name)
        if isinstance(reuse, SimulatedMark):
            reuse.operation = operation
            return reuse
        return SimulatedMark(self._simulation, operation)


@dataclass(frozen=True)
class Model:
    """What a model takes alone.

    Attributes:
        forward_ms, backward_ms, update_ms: of an iteration; the head is in the first two.
        activation_bytes: of all blocks.
        logits_bytes: at the end of the forward, for a moment.
        blocks: besides the root.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float
    activation_bytes: float
    logits_bytes: float
    blocks: int = 24

    @property
    def ms(self) -> float:
        """An iteration without offload."""
        return self.forward_ms + self.backward_ms + self.update_ms


_HEAD_SHARE = 0.1


@dataclass(eq=False)
class SimulatedTraining:
    """A model that trains on a simulated device.

    Attributes:
        room_bytes: what is free at the highest point, for parameters and state that come to stay.
        ended: the end of each iteration.
        highest_bytes: of the device, in iterations whose memory is known.
    """

    monkeypatch: pytest.MonkeyPatch
    mesh: DeviceMesh
    costs: Model
    policy: OffloadPolicy
    room_bytes: float = 0.0
    ended: list[SimulatedMark] = field(default_factory=list)
    highest_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.simulation = Simulation()
        kinds = {"C": "ms", "L": "up", "S": "down", "U": "ms", "window": "up", "gather": "ms"}
        self.lanes: dict[str, Lane] = {name: SimulatedLane(self.simulation, name, kinds[name]) for name in kinds}
        self._gathered: dict[int, SimulatedMark] = {}
        self._install()
        torch.manual_seed(0)
        self.model = GPT(self.costs.blocks, 64, 1024)
        for number, block in enumerate(self.model.blocks):
            block.heads = 1
            fully_shard(block, mesh=self.mesh)
            block.register_forward_hook(self._after_block(number + 1))
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        attach(self.optimizer, model=self.model, policy=self.policy)
        self.engine: Engine = vars(self.optimizer)["_offload_engine"].engine
        self._tokens = torch.randint(0, 1024, (1, 9))

    def iterate(self, count: int) -> "SimulatedTraining":
        """Forward, backward and step; activations are gone in the end."""
        costs = self.costs
        for _ in range(count):
            loss = self.model(self._tokens)
            self._compute(_HEAD_SHARE * (costs.forward_ms + costs.backward_ms))
            self._allocate(costs.logits_bytes)
            self._allocate(-costs.logits_bytes)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.simulation.activation_bytes = 0.0
            mark = self.lanes["C"].mark()
            assert isinstance(mark, SimulatedMark)
            self.ended.append(mark)
        self.simulation.run()
        return self

    @property
    def ms(self) -> float:
        """Of the last iteration, from the end of a step to the end of the next."""
        return self.ended[-1].elapsed_ms_since(self.ended[-2])

    def taken_bytes(self) -> int:
        """What the engine has of the device now, as the large model's bytes."""
        window = self.engine.window
        passing_bytes = self.engine._pipeline.ring.nbytes + (0 if window is None else window.nbytes)
        return SCALE * (passing_bytes + self.engine.plan.resident_bytes)

    # What a device would do --------------------------------------------------------------------------------------

    def _compute(self, ms: float, after: Iterable[Operation] = ()) -> None:
        self.simulation.issue("C", "ms", ms, after)

    def _allocate(self, nbytes: float) -> None:
        self.simulation.allocate(nbytes)
        self._note_highest()

    def _note_highest(self) -> None:
        if len(self.ended) > _SETTLED:
            self.highest_bytes = max(self.highest_bytes, self.simulation.allocated_bytes + self.taken_bytes())

    def _of_group(self, number: int) -> list[Operation]:
        return [self._gathered[number].operation] if number in self._gathered else []

    def _after_block(self, number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self._compute((1 - _HEAD_SHARE) * self.costs.forward_ms / self.costs.blocks, self._of_group(number))
            self._allocate(self.costs.activation_bytes / self.costs.blocks)

        return hook

    def _before_reduced(self, number: int) -> None:
        if number:  # the root, whose backward is that of the head
            self._compute((1 - _HEAD_SHARE) * self.costs.backward_ms / self.costs.blocks, self._of_group(number))
            self._allocate(-self.costs.activation_bytes / self.costs.blocks)

    def _install(self) -> None:
        patch, lanes, simulation = self.monkeypatch.setattr, self.lanes, self.simulation
        patch(link_room, "_links", {})

        def lanes_of(_: DeviceLink, *, serial: bool, beside_compute: bool = False) -> dict[str, Lane]:
            return {**{name: lanes[name] for name in "LSC"}, "U": lanes["U" if beside_compute else "C"]}

        def allocated(_: Engine) -> Allocated:
            return Allocated(int(simulation.allocated_bytes / SCALE), int(simulation.peak_bytes / SCALE))

        def synchronize(link: DeviceLink) -> None:
            if link in link_room._links.values():  # else an engine of an earlier training goes, whenever that is
                simulation.run()

        plain_init = DeviceLink.__init__

        def init(link: DeviceLink, device: torch.device) -> None:
            plain_init(link, device)
            link._compute = lanes["C"]

        patch(DeviceLink, "__init__", init)
        patch(DeviceLink, "lanes", lanes_of)
        patch(DeviceLink, "window_lane", lambda _, *, serial: lanes["window"])
        patch(DeviceLink, "synchronize", synchronize)
        patch(DeviceLink, "_others", property(lambda _: [lanes[name] for name in "LSU"]))
        patch(Engine, "allocated_bytes", allocated)
        patch(Engine, "room_bytes", lambda engine: int(self.room_bytes / SCALE) - engine.plan.resident_bytes)
        self._install_gathers()
        self._install_updates()

    def _install_gathers(self) -> None:
        """``fully_shard`` gathers on a stream of its own, ahead of the model."""
        patch, gather = self.monkeypatch.setattr, self.lanes["gather"]
        patch(window_room, "wait_on", lambda stream, lane, mark: gather.wait(mark))
        patch(window_room, "stream_mark", lambda stream, lane: gather.mark())
        lend, take_back = Window.lend, Window.take_back

        def lend_beside(window: Window, number: int, stream: Any, *, in_backward: bool) -> None:
            lend(window, number, _BESIDE, in_backward=in_backward)

        def take_back_beside(window: Window, number: int, stream: Any) -> None:
            take_back(window, number, _BESIDE)
            mark = gather.mark()
            assert isinstance(mark, SimulatedMark)
            self._gathered[number] = mark

        patch(Window, "lend", lend_beside)
        patch(Window, "take_back", take_back_beside)

    def _install_updates(self) -> None:
        patch = self.monkeypatch.setattr
        simulation = self.simulation
        plain_update, reduced, plain_gradients = Pipeline._update, Overlap._reduced, Engine.gradients_reduced

        def update(pipeline: Pipeline, bucket: StagedBucket, number: int, lane: Lane, run: Any) -> None:
            plain_update(pipeline, bucket, number, lane, run)
            share = bucket.copied_bytes / max(1, sum(one.copied_bytes for one in pipeline.buckets))
            self.simulation.issue(getattr(lane, "name"), "ms", self.costs.update_ms * share)  # noqa: B009

        def computed(overlap: Overlap, number: int, event: object) -> None:
            self._before_reduced(number)
            grads = [local_shard(param.grad) for param in overlap._groups[number].params if param.grad is not None]
            simulation.reduced(grads)
            grads.clear()
            reduced(overlap, number, event)
            self._note_highest()

        def gradients_reduced(engine: Engine, *args: Any) -> None:
            engine._pipeline.updates_after_compute()  # on the CPU, gradients are there
            plain_gradients(engine, *args)

        patch(Pipeline, "_update", update)
        patch(Overlap, "_reduced", computed)
        patch(Engine, "gradients_reduced", gradients_reduced)


_BESIDE: Any = object()
"""A stream that is not the current one."""

_SETTLED = 18
"""Iterations, of which the engine measures the seventeenth alone."""
