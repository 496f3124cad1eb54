"""Parameters that the host updates: whoever writes them in between, whatever they look like."""

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from fsdp_offload.device.driver import CopyCalls
from fsdp_offload.device.lanes import PIECE_BYTES, EventMark, Lane, Mark, PutsOff, TurnsLane, pieces_of
from tests.conformance.axes import Case
from tests.conformance.oracle import Loop, compare
from tests.conformance.programs import HABITS
from tests.cpu.test_host_fraction import fused_adamw
from tests.overlapping import assert_same_each_step, pair
from tests.parity import SMALL, Zoo, attach, local

ALL_OF_IT = replace(SMALL, host_fraction=1.0)


def here(param: Tensor) -> Tensor:
    return local(param.detach())


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda p: p.data.copy_(p.data * 0.5),
    "data of the local tensor": lambda p: here(p).data.mul_(0.5),
    "no_grad": lambda p: _no_grad(p.mul_, 0.5),
    "foreach": lambda p: _no_grad(torch._foreach_mul_, [p], 0.5),
    "foreach on the local tensor": lambda p: torch._foreach_mul_([here(p)], 0.5),
    "numpy": lambda p: here(p).numpy().__imul__(0.5),
    "storage": lambda p: here(p).untyped_storage().fill_(0),
    "-0.0": lambda p: here(p).view(-1)[:1].data.fill_(-0.0),
    "another storage": lambda p: setattr(getattr(p, "_local_tensor", p), "data", here(p) * 0.5),
}


def _no_grad(function: Callable[..., object], *args: Any) -> None:
    with torch.no_grad():
        function(*args)


def writing(write: Callable[[Tensor], object], run: Loop, at: int) -> None:
    HABITS["usual"](run, at)
    write(run.named["blocks.0.down.weight"])


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("layout", ["blocks", "unsharded"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_followed(write: Callable[[Tensor], object], layout: str) -> None:
    """Write one parameter between steps."""
    case = Case(layout=layout, optimizer="adamw-fused", host=1.0, program=("usual", "write", "usual", "usual"))
    assert not compare(case, torch.device("cpu"), {**HABITS, "write": partial(writing, write)})


def test_a_parameter_with_gaps_in_its_memory() -> None:
    """Without a fused kernel: torch's take any parameter's memory for dense."""

    def make() -> nn.Module:
        net = nn.Linear(12, 16)
        net.weight = nn.Parameter(torch.randn(12, 32)[:, :16].t())
        return net

    def train(run: Loop, at: int) -> None:
        for param in run.params:
            param.grad = torch.ones_like(param) * (at + 1)
        run.step()
        if at % 2:
            run.model.weight.data.mul_(0.5)

    both = pair(None, ALL_OF_IT, partial(optim.RMSprop, lr=0.02), net=make)
    assert_same_each_step(*both, 5, train)


class Calls(CopyCalls):
    """The driver's calls on host memory."""

    def __init__(self) -> None:
        self.pieces: list[int] = []

    def current(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(target, source, nbytes)
        self.pieces.append(nbytes)


class Turns(TurnsLane):
    """Without streams: notes how much was copied in each turn."""

    def __init__(self, turn_bytes: int, calls: CopyCalls | None) -> None:
        self._in_use = threading.RLock()
        self._piece_bytes, self._turn_bytes, self._device = 0, turn_bytes, torch.device("cpu")
        self._calls, self._stream, self._handles = calls, None, {None: None}  # type: ignore[dict-item]
        self.turns: list[int] = []

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _take_turns(self) -> Any:
        self.turns.append(self._piece_bytes)
        self._piece_bytes = 0


class Loads(PutsOff, Turns):
    """Puts off what does not fit into a queue."""


@pytest.mark.parametrize("by", ["torch", "driver"])
def test_copies_take_turns_in_pieces(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and stores do, so that small copies of others wait for less; what is not flat goes in one piece."""
    calls = Calls() if by == "driver" else None
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: None)

    def copies(*sizes: int) -> tuple[list[Tensor], list[Tensor]]:
        sources = [torch.arange(size, dtype=torch.int16).to(torch.uint8) for size in sizes]
        return [torch.zeros_like(source) for source in sources], sources

    targets, sources = copies(60, 30, 20, 100, 5, 95, 1)
    uploads = Turns(100, calls)
    pairs = [(target[None], source[None]) for target, source in zip(targets, sources, strict=True)]
    uploads.copy(pairs[:4])
    uploads.copy(pairs[4:])
    assert uploads.turns == [90, 20, 100, 100]
    assert all(map(torch.equal, targets, sources))

    targets, sources = copies(60, 340, 100, 0, 7)
    loads = Turns(100, calls)
    for both in zip(targets, sources, strict=True):
        loads.copy([both])
    assert loads.turns == [60, 100, 100, 100, 40, 100]
    assert all(map(torch.equal, targets, sources))

    (target,), (source,) = copies(10_000)
    large, cuts = Turns(4096, calls), [(0, 300), (300, 300), (300, 9_000), (9_000, 10_000)]
    pairs = [(target[begin:end], source[begin:end]) for begin, end in cuts]
    assert [one.numel() for one, _ in pieces_of(pairs, 4096)] == [300, 3796, 4096, 808, 1000]
    before = target._version
    large.copy(pairs)
    assert large.turns == [4096, 4096], "as few as possible"
    assert torch.equal(target, source)
    assert target._version > before, "autograd sees a write that the driver has made"
    if calls is not None:
        assert calls.pieces[-5:] == [300, 3796, 4096, 808, 1000]
    assert pieces_of([], 4096) == []


def test_what_does_not_fit_into_the_queue_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for the driver's queue, and compute for the host."""

    class Point(Mark):
        passed = passes = False  # passes: right behind the next question

        def is_passed(self) -> bool:
            before, self.passed = self.passed, self.passed or self.passes
            return before

        def elapsed_ms_since(self, earlier: object) -> float:
            return 1000.0 * points.index(self) + points.index(cast(Any, earlier).resolved())

        def resolved(self) -> Any:
            return self

    points: list[Point] = []

    def mark(lane: Lane, *, timed: bool = False) -> Point:
        points.append(Point())
        return points[-1]

    waited: list[str] = []
    monkeypatch.setattr(Lane, "mark", mark)
    monkeypatch.setattr(Lane, "wait", lambda lane, *marks: waited.extend(map(str, marks)))
    calls, source, marks = Calls(), torch.ones(8, dtype=torch.uint8), []
    lane, targets = Loads(8, calls, most_pieces=5 * 8 / PIECE_BYTES), torch.zeros(12, 8, dtype=torch.uint8)

    def load(number: int) -> None:
        lane.wait(str(number))  # type: ignore[arg-type]
        lane.copy([(targets[number], source)])
        marks.append(lane.mark())

    def issued() -> int:
        assert waited == [str(number) for number in range(len(waited))]
        assert len(waited) - int(targets.sum()) // 8 in (0, 1), "no copy before its wait, nor behind the next one"
        return int(targets.sum()) // 8

    for number in range(8):
        load(number)
    assert issued() == 5
    assert not marks[6].is_passed()
    points[0].passed = points[1].passed = True
    lane.go_on()
    assert issued() == 7
    load(8)
    points[2].passes = True
    load(9)
    assert issued() == 7, "none overtakes those that were put off"
    lane.go_on()
    assert (issued(), len(lane._running)) == (8, 5), "no mark is held that has been passed"
    assert marks[8].resolved() is points[8]
    assert issued() == 9, "what is waited for comes at once, with all before it"
    monkeypatch.setattr(calls, "copy", Mock(side_effect=[KeyboardInterrupt, None]))
    with pytest.raises(KeyboardInterrupt):
        marks[9].resolved()
    monkeypatch.setattr(calls, "copy", partial(Calls.copy, calls))
    assert issued() == 9
    assert marks[9].elapsed_ms_since(marks[8]) == 9008
    assert issued() == 10
    load(10)
    load(11)
    # As the finalizer of an optimizer does, which the garbage collector deletes during a copy.
    finalizers = iter([marks[11].resolved])
    monkeypatch.setattr(calls, "copy", lambda *piece: (next(finalizers, int)(), Calls.copy(calls, *piece)))
    assert marks[10].resolved() is points[10]
    assert (issued(), len(lane._later)) == (12, 0)


class Noting(Lane):
    """Notes which marks are waited for; ``fails``: the next wait is interrupted."""

    def __init__(self, name: str, *, lasts: bool = True) -> None:
        super().__init__(torch.device("cpu"), name=name, lasts=lasts)
        self.waited: list[int] = []
        self.fails = False

    def _wait(self, mark: EventMark) -> None:
        if self.fails:
            raise KeyboardInterrupt
        self.waited.append(mark.number)


def test_a_wait_that_is_implied_is_not_issued() -> None:
    load, store, passing = Noting("load"), Noting("store"), Noting("stream 7", lasts=False)
    marks = [EventMark(object(), store, number) for number in range(4)]  # type: ignore[arg-type]
    load.fails = True
    with pytest.raises(KeyboardInterrupt):
        load.wait(marks[2])
    load.fails = False
    load.wait(marks[2], None, marks[1], marks[3], marks[3])
    store.wait(*marks)
    passing.wait(marks[1], marks[1])
    load.wait(EventMark(object()), EventMark(object()))  # type: ignore[arg-type]  # of torch's
    assert (load.waited, store.waited, passing.waited) == ([2, 3, 0, 0], [], [1, 1])


# Memory --------------------------------------------------------------------------------------------------------------


def test_parameters_take_no_memory_that_stays() -> None:
    plain, shared = (
        attach(fused_adamw(nn.Linear(64, 64, bias=False).parameters()), policy=replace(SMALL, host_fraction=fraction))
        for fraction in (0.0, 1.0)
    )
    assert shared.offload_report().memory.host_bytes == plain.offload_report().memory.host_bytes


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.RMSprop, optim.SGD])
def test_other_dtypes(cls: type[Optimizer], dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if cls is optim.SGD else {}
    # The kernel that the host takes; torch's fused SGD is wrong in bf16.
    if dtype is torch.float64 or (cls is optim.AdamW and not dtype.is_complex):
        options |= {"fused": True} if cls is not optim.RMSprop else {}
    both = pair(None, ALL_OF_IT, partial(cls, lr=0.02, **options), net=lambda: Zoo().to(dtype))
    assert_same_each_step(*both, 3)
