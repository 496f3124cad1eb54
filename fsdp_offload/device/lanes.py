"""Lanes are the streams on which loads, stores and updates run; marks are the events for which lanes wait.

On an accelerator each kind of work has streams of its own, so that loads, stores, updates, the backward and the next
forward overlap. Copies of one kind have two streams that take turns, so that the copy engine never gets more than one
piece at a time: a small pinned copy of the model waits for all copies that the engine got before. (``fully_shard``
makes such a copy in each gather and each reduction; reading a loss makes one the other way.) Turns need a queue of the
driver for each stream: ``copy_queues.py``. Updates on the CPU have marks as well (``cpu_update.py``): a lane that waits
for one blocks the host until that update has ended.

The serial lanes run the same actions one by one on the current stream and wait for each: on the CPU, and to bisect.
"""

import bisect
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from .driver import CopyCalls, copy_calls

_NOTHING = nullcontext()

Copy = tuple[Tensor, Tensor]
"""Target and source, of the same shape and dtype; flat ones may be copied in pieces."""

PIECE_BYTES = 8 << 20
"""Size of pieces to the device. Smaller ones cost bandwidth, larger ones hold up small copies of others for longer: on
an H100, iterations took longer with 16 MiB under each of three policies, even under the one that the link limits."""

STORED_PIECE_BYTES = 64 << 20
"""Size of pieces to the host, where ``fully_shard`` makes no small copies; and of all if items move only in ``step()``.
Each piece costs the host time, and the copy engine 7 us: pieces of 32 MiB took 2 of 180 ms more (H200)."""

QUEUED_PIECES = 512
"""With this many pieces on their way in the lane of loads, later ones are put off until some have passed, or until
something waits for them. The driver's queue of each of the two streams takes 1,024; if it is full, the host waits, and
compute runs out of work. Llama 3B, 16,384 tokens, one H200: the backward frees room for all state at once (3,000
pieces), and compute stood still for 135 of 1,127 ms."""


def refuse_capture(device: torch.device) -> None:
    """Refuse to run while a CUDA graph is being captured on the current stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A CUDA graph is being captured: an offloaded step, and forward and backward of a model that was given as "
            "model=, wait for events and copies of other streams, and cannot be part of a graph. Train without graphs "
            "(torchtitan: --training.disable_cuda_graphs)."
        )


def pieces_of(copies: Sequence[Copy], piece_bytes: int) -> list[Copy]:
    """Cut flat copies, laid end to end, at multiples of ``piece_bytes``: they fill as few turns as possible."""
    pieces: list[Copy] = []
    begin = 0
    for target, source in (pair for pair in copies if pair[0].numel()):
        if target.dim() != 1:  # not flat: rearranged on its way
            pieces.append((target, source))
            continue
        end = begin + target.numel()
        cuts = [begin, *range(begin // piece_bytes * piece_bytes + piece_bytes, end, piece_bytes), end]
        sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        pieces += zip(target.split_with_sizes(sizes), source.split_with_sizes(sizes), strict=True)
        begin = end
    return pieces


class Mark:
    """A point in a lane that others wait for. An instance of this base class has been passed already."""

    def resolved(self) -> "EventMark | None":
        """Return an event for streams to wait for; ``None`` if none is needed. Marks of the CPU block until passed."""
        return None

    def synchronize(self) -> None:
        """Block the host until the lane has passed this point."""

    def is_passed(self) -> bool:
        """Return whether the lane has passed this point, as far as the host knows."""
        return True


class EventMark(Mark):
    """An event of a stream, ours or torch's.

    Attributes:
        event: torch's event.
        lane: the lane that made the mark; ``None`` if that lane does not last.
        number: position of the mark among those of its lane.
    """

    def __init__(self, event: torch.Event, lane: "Lane | None" = None, number: int = 0) -> None:
        self.event, self.lane, self.number = event, lane, number

    def resolved(self) -> "EventMark":
        return self

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_passed(self) -> bool:
        return bool(self.event.query())

    def elapsed_ms_since(self, earlier: "EventMark | _LaterMark") -> float:
        """Return the milliseconds on the device since ``earlier``; both must have been passed, with timing."""
        return earlier.resolved().event.elapsed_time(self.event)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device.index)  # a device would be looked up among all accelerators


def mark_on(stream: torch.Stream, device: torch.device, *, timed: bool = True) -> EventMark:
    """Record an event on ``stream`` of ``device``; ``timed`` keeps its time, which costs the host more."""
    event = torch.Event(device, enable_timing=timed)
    stream.record_event(event)
    return EventMark(event)


class Lane:
    """Runs actions of one kind in order, on its own stream or on the current one."""

    looks_for_races = False

    def __init__(
        self, device: torch.device, stream: torch.Stream | None = None, *, name: str = "compute", lasts: bool = False
    ) -> None:
        """Use ``stream``, or the current one at each call. ``lasts``: no other lane is made for this stream."""
        self.name = name
        self._device, self._stream, self._lasts = device, stream, lasts
        self._marks, self._seen = 0, dict[Lane, int]()  # marks made here; by other lane, number of the last waited for
        self._in_use = threading.RLock()  # threads share the lanes of a device, and a copy may change a lane's stream

    @property
    def _now(self) -> torch.Stream:
        return self._stream if self._stream is not None else current_stream(self._device)

    def running(self) -> AbstractContextManager[None]:
        """Make this lane's stream current inside the block."""
        return _NOTHING if self._stream is None else self._on(self._stream)

    @contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        # Not ``with stream``, which stores the previous stream in the stream object; other threads use that as well.
        index, before = torch.accelerator.current_device_index(), current_stream(self._device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            if index != self._device.index:
                torch.accelerator.set_device_index(index)

    def wait(self, *marks: Mark | None) -> None:
        """Make later work of this lane wait for ``marks``, without blocking the host, except for the CPU's marks."""
        for mark in marks:
            known = None if mark is None or type(mark) is Mark else mark.resolved()
            if known is not None:
                with self._in_use:
                    lane = known.lane if self._lasts else None
                    if lane is None:
                        self._wait(known)
                    elif lane is not self and self._seen.get(lane, 0) < known.number:  # else it has waited already
                        self._wait(known)
                        self._seen[lane] = known.number  # last: an interrupted wait counts for nothing

    def _wait(self, mark: EventMark) -> None:
        if type(mark.event) is torch.Event:
            self._now.wait_event(mark.event)
        else:
            # Not wait_event: torch.Stream's does nothing, without a word, for a torch.cuda.Event (2.11).
            with self.running():
                mark.event.wait()

    def copy(self, copies: Sequence[Copy], *, alone: bool = False) -> None:
        """Issue copies between the device and host memory, without blocking the host if that is page-locked.

        ``alone``: the model makes no small copies meanwhile, which large pieces would delay.
        """
        if copies:
            targets, sources = zip(*copies, strict=True)
            with self._in_use, self.running():  # one call: other threads of the interpreter run meanwhile
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def run(self, function: Callable[[], None], reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        """Run an update in this lane. Only lanes that look for races use ``reads`` and ``writes``."""
        with self.running():
            function()

    def go_on(self) -> None:
        """Issue what was put off, as far as the driver's queue has room for it."""

    def touch(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Tell a lane that looks for races that other code, at this point, reads and writes these tensors."""

    def mark(self, *, timed: bool = False) -> Mark:
        """Mark the current end of this lane; ``timed`` keeps its time."""
        with self._in_use:
            mark = mark_on(self._now, self._device, timed=timed)
            if self._lasts:
                self._marks += 1
                mark.lane, mark.number = self, self._marks
            return mark


class TurnsLane(Lane):
    """A lane on two streams that take turns: each piece of a copy is released only when the one before has finished.

    Measured on an H200: 16 MiB pieces cost no bandwidth, and a small copy waits 0.2 ms between them, rather than for
    the last one. It would wait for the last one if the pieces had one stream, or if a third stream gated them.
    """

    def __init__(self, device: torch.device, turn_bytes: int, *, name: str, calls: CopyCalls | None = None) -> None:
        """Change streams after at most ``turn_bytes``. ``calls``: the driver's, for flat copies; ``None``: by torch."""
        super().__init__(device, torch.Stream(device), name=name, lasts=True)
        self._turn_bytes, self._calls = turn_bytes, calls
        self._next, self._done = torch.Stream(device), torch.Event(device)
        self._piece_bytes = 0  # copied since the last turn
        if calls is not None:
            assert self._stream is not None
            self._handles: dict[torch.Stream | None, Any] = {
                stream: calls.handle_of(stream) for stream in (self._stream, self._next)
            }
            self._event = calls.event()

    def copy(self, copies: Sequence[Copy], *, alone: bool = False) -> None:
        """Issue copies in pieces; a turn has as many of them as fit."""
        piece_bytes = STORED_PIECE_BYTES if alone else self._turn_bytes
        with self._in_use:
            # A profiler labels copies by torch, but not copies by the driver's calls.
            traced = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            flat = not traced and all(one.dim() == 1 and one.is_contiguous() for pair in copies for one in pair)
            if self._calls is not None and flat:
                self._copy_by_calls(self._calls, copies, piece_bytes)
                return
            pieces, begin = pieces_of(copies, piece_bytes), 0
            for end, (target, _) in enumerate(pieces):
                if self._piece_bytes and self._piece_bytes + target.nbytes > self._turn_bytes:
                    super().copy(pieces[begin:end])
                    self._take_turns()
                    begin = end
                self._piece_bytes += target.nbytes
            super().copy(pieces[begin:])

    def _copy_by_calls(self, calls: CopyCalls, copies: Sequence[Copy], piece_bytes: int) -> None:
        """Issue the pieces of :func:`pieces_of` for flat, contiguous copies, without a tensor for each piece."""
        copy, stream, begin, turn_bytes = calls.copy, self._handles[self._stream], 0, self._turn_bytes
        with calls.current():
            for target, source in copies:
                to, at, left_bytes = target.data_ptr(), source.data_ptr(), target.nbytes
                while left_bytes:
                    nbytes = min(left_bytes, piece_bytes - begin % piece_bytes)
                    filled_bytes = self._piece_bytes
                    if filled_bytes and filled_bytes + nbytes > turn_bytes:
                        self._take_turns()
                        stream, filled_bytes = self._handles[self._stream], 0
                    copy(to, at, nbytes, stream)
                    to, at, begin, left_bytes = to + nbytes, at + nbytes, begin + nbytes, left_bytes - nbytes
                    self._piece_bytes = filled_bytes + nbytes
        torch.autograd.graph.increment_version([target for target, _ in copies])  # as writes through torch count

    def _take_turns(self) -> None:
        assert self._stream is not None
        if self._calls is not None:
            self._calls.hand_over(self._event, self._handles[self._stream], self._handles[self._next])
        else:
            self._stream.record_event(self._done)
            self._next.wait_event(self._done)
        self._stream, self._next = self._next, self._stream
        self._piece_bytes = 0


class PutsOff(Lane):
    """A lane that puts off what does not fit into the driver's queue: waits, copies and marks, in order.

    A mark that is waited for is made with all before it, if need be into a full queue.
    """

    def __init__(self, *args: Any, most_pieces: float = QUEUED_PIECES, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most_pieces = most_pieces
        self._later = deque[Callable[[], object]]()  # what was put off
        self._new_pieces = 0.0  # issued since the last mark
        self._running = list[tuple[Mark, float]]()  # marks that may not have been passed, and the pieces before each
        self._in_order = threading.RLock()  # threads share the lanes of a device

    def wait(self, *marks: Mark | None) -> None:
        with self._in_order:
            if self._later:
                self._later.append(functools.partial(super().wait, *marks))
                return
        super().wait(*marks)

    def copy(self, copies: Sequence[Copy], *, alone: bool = False) -> None:
        """Issue copies, or put them off."""
        with self._in_order:
            self.go_on()
            if self._later or self._is_full():
                self._later.append(functools.partial(self._copy, copies, alone=alone))
            else:
                self._copy(copies, alone=alone)

    def mark(self, *, timed: bool = False) -> Mark:
        with self._in_order:
            if not self._later:
                return self._mark(timed=timed)
            mark = _LaterMark(self)
            self._later.append(functools.partial(mark.make, timed=timed))
            return mark

    def go_on(self, until: "_LaterMark | None" = None) -> None:
        """Issue what was put off, as far as the driver's queue has room for it; what is before ``until``, in any case.

        If it is interrupted, it will issue the same thing again, which changes nothing.
        """
        with self._in_order:
            while self._later and (not self._is_full() if until is None else until.made is None):
                first = self._later[0]
                first()
                if self._later and self._later[0] is first:
                    self._later.popleft()
                elif self._device.type != "cpu":
                    # Meanwhile, in this thread, the garbage collector has deleted an optimizer, whose finalizer has
                    # issued all that was put off. What ``first`` has issued since lies behind its own mark.
                    torch.accelerator.synchronize(self._device)

    def _copy(self, copies: Sequence[Copy], *, alone: bool) -> None:
        nbytes = sum([target.nbytes for target, _ in copies])
        self._new_pieces += nbytes / (STORED_PIECE_BYTES if alone else PIECE_BYTES)
        super().copy(copies, alone=alone)

    def _mark(self, *, timed: bool) -> Mark:
        mark = super().mark(timed=timed)
        self._running.append((mark, self._new_pieces))
        self._new_pieces = 0.0
        if len(self._running) > 64:  # not each time: each question to the driver takes 5 us
            self._forget_passed()
        return mark

    def _is_full(self) -> bool:
        pieces = [each for _, each in self._running]
        if sum(pieces) >= self.most_pieces:
            del pieces[: self._forget_passed()]
        return sum(pieces) >= self.most_pieces

    def _forget_passed(self) -> int:
        passed = bisect.bisect(self._running, 0, key=lambda one: not one[0].is_passed())  # in the order of the lane
        del self._running[:passed]
        return passed


class _LaterMark(Mark):
    """A mark that its lane has put off. It is ``made`` at the latest when something waits for it."""

    def __init__(self, lane: PutsOff) -> None:
        self.lane, self.made = lane, cast(Any, None)

    def make(self, *, timed: bool) -> None:
        if self.made is None:
            self.made = self.lane._mark(timed=timed)

    def resolved(self) -> EventMark:
        self.lane.go_on(until=self)
        return cast(EventMark, self.made.resolved())

    def synchronize(self) -> None:
        self.resolved().synchronize()

    def is_passed(self) -> bool:
        return self.made is not None and self.made.is_passed()

    def elapsed_ms_since(self, earlier: "EventMark | _LaterMark") -> float:
        return self.resolved().elapsed_ms_since(earlier)


class LoadLane(PutsOff, TurnsLane):
    """Loads from homes to places."""


class SerialLane(Lane):
    """A lane on the current stream that waits for each of its actions."""

    def _wait(self, mark: EventMark) -> None:
        """Block the host until the event has passed; earlier work of serial lanes has finished already."""
        mark.synchronize()

    def mark(self, *, timed: bool = False) -> Mark:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return Mark()


class HostFlag:
    """A bool computed on the device that the host reads without a full synchronization, one at a time."""

    def __init__(self, device: torch.device) -> None:
        is_here = device.type == "cpu"
        self._device = device
        self._value = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=not is_here)
        self._arrived = None if is_here else torch.Event(device)

    def put(self, flag: Tensor) -> None:
        """Copy ``flag``, a ``bool`` of shape ``()``, to the host in the order of the current stream."""
        self._value.copy_(flag, non_blocking=True)
        if self._arrived is not None:
            current_stream(self._device).record_event(self._arrived)

    def get(self) -> bool:
        """Return the value that was put last; block the host until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value)


def recorded(name: str) -> AbstractContextManager[object]:
    """Label work issued inside the block with ``name`` in a trace. Costs nothing without a profiler."""
    # A record costs 30 us and more, since it gives the interpreter to other threads: too much for each bucket.
    traced = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return torch.profiler.record_function(name) if traced else _NOTHING


# One device -----------------------------------------------------------------------------------------------------------


class Lanes:
    """The lanes of one device. Tests replace them by lanes that run everything later (``tests/core/deferred.py``)."""

    def __init__(self, device: torch.device, *, serial: bool) -> None:
        """Make the lanes; with ``serial``, and on the CPU, none overlaps another."""
        self._device, self._others = device, dict[int, Lane]()
        if serial or device.type == "cpu":
            names = ("load", "store", "update", "update_kept", "down", "up", "compute")
            lanes: list[Lane] = [SerialLane(device, name=name) for name in names]
            self.load, self.store, self.update, self.update_kept, self.down, self.up, self.compute = lanes
            return
        calls = copy_calls(device)
        self.load = LoadLane(device, PIECE_BYTES, name="load", calls=calls)
        self.store = TurnsLane(device, STORED_PIECE_BYTES, name="store", calls=calls)
        # No streams of high priority: kernels of the model, cut short by updates, cost 1 % of an iteration (H200).
        self.update = Lane(device, torch.Stream(device), name="update", lasts=True)
        self.update_kept = Lane(device, torch.Stream(device), name="update_kept", lasts=True)
        # Gradients and parameters of updates on the CPU: in the streams of loads and stores they would queue behind
        # buckets of the device, which in turn wait for updates and for places.
        self.down = Lane(device, torch.Stream(device), name="down", lasts=True)
        self.up = TurnsLane(device, PIECE_BYTES, name="up", calls=calls)  # as loads, which hold up small copies
        self.compute = Lane(device)  # the stream that is current

    def on(self, stream: torch.Stream | None) -> Lane:
        """Return the lane of ``stream``; ``None`` means the stream that is current at each use."""
        if stream is None or isinstance(self.compute, SerialLane):
            return self.compute
        if (lane := self._others.get(stream.stream_id)) is None:
            lane = Lane(self._device, stream, name=f"stream {stream.stream_id}")
            self._others[stream.stream_id] = lane
        return lane

    def here(self) -> Lane:
        """Return the lane of the stream that is current now, for later use under another one; on the CPU, compute."""
        return self.on(None if self._device.type == "cpu" else current_stream(self._device))

    def event(self, event: object) -> Mark:
        """Return a mark for an event of torch; for ``None``, mark the current end of compute."""
        return self.compute.mark() if event is None else EventMark(event)  # type: ignore[arg-type]

    def made(self, tensors: Sequence[Tensor], lane: Lane | None = None) -> None:
        """Tell lanes that look for races that ``tensors`` were made in the order of ``lane``; ``None``: of compute."""

    def freed(self, tensor: Tensor, lane: Lane) -> None:
        """Tell lanes that look for races that ``tensor`` is freed: the next kernel of ``lane`` may write its memory."""

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """Free the memory of ``tensor``, flat bytes, or allocate it again; its views share the result."""
        tensor.untyped_storage().resize_(nbytes)


class HasBlocks(Protocol):
    """A cache that holds ``nbytes`` of device memory."""

    @property
    def nbytes(self) -> int: ...


class DeviceLink:
    """The lanes and the memory of one device, shared by all offloaded optimizers there.

    Attributes:
        caches: caches of optimizers whose blocks are allocated and freed during an iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.caches = weakref.WeakSet[HasBlocks]()

    @property
    def counts(self) -> bool:
        """Return whether the allocator has torch's native statistics, which cudaMallocAsync and others lack."""
        backend = getattr(torch.get_device_module(self.device), "get_allocator_backend", lambda: "native")
        return bool(backend() == "native")

    def allocated(self) -> tuple[int, int, int]:
        """Return bytes in use (without blocks of :attr:`caches`), bytes ever allocated, and the count of operations."""
        stats = torch.accelerator.memory_stats(self.device)
        used_bytes = int(stats["allocated_bytes.all.current"]) - sum(one.nbytes for one in list(self.caches))
        operations = int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])
        return used_bytes, int(stats["allocated_bytes.all.allocated"]), operations

    def lanes(self, *, serial: bool) -> Lanes:
        """Return lanes shared by all optimizers, so that copies of one kind are in order; new ones if ``serial``."""
        return Lanes(self.device, serial=True) if serial else self._lanes

    @functools.cached_property  # new streams would each get a memory pool of their own in torch's allocator
    def _lanes(self) -> Lanes:
        return Lanes(self.device, serial=False)

    def room_bytes(self, when: Literal["current", "peak"]) -> int:
        """Return the bytes that this process may allocate on top of those taken, less 5 % of its limit; 0 on the CPU.

        Taken are bytes allocated now, or at the peak since the last reset, and the gaps between allocations, since only
        an allocation that fits can use a gap. The peak is an upper bound: allocations and gaps need not have been
        largest at the same time.
        """
        if self.device.type == "cpu":
            return 0
        stats = torch.accelerator.memory_stats(self.device)
        taken_bytes = int(sum(stats[f"{part}.all.{when}"] for part in ("allocated_bytes", "inactive_split_bytes")))
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        has_limit = hasattr(module, "get_per_process_memory_fraction")  # CUDA
        most = int(total * module.get_per_process_memory_fraction(self.device)) if has_limit else int(total)
        reachable = min(int(free) + torch.accelerator.memory_reserved(self.device), most)
        return max(0, reachable - taken_bytes - most // 20)

    def empty_cache(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        """Block the host until the device has done all that was issued, and what a lane has put off."""
        if self.device.type != "cpu":
            if "_lanes" in vars(self):  # else all are serial, and put nothing off
                self._lanes.load.mark().resolved()
            torch.accelerator.synchronize(self.device)


@functools.cache
def device_link(device: torch.device) -> DeviceLink:
    return DeviceLink(device)
