"""Whole sequences of steps meet no hazard on asynchronous streams: proved on recorded ones, without a device.

A real ``Pipeline`` is given lanes that record. What an operation *accesses* are ranges of bytes of some memory: the
ring, a home, gradients, parameters. A *stream* runs its operations in order; of every other stream it knows how many
operations have certainly finished before what it is given next. It learns that from the marks it waits for, and a mark
says what its stream knew when it was last recorded, as an event of CUDA does. What the host has waited for comes before
all that is issued later.

Of any two operations of a history that access the same bytes, and of which one writes, the one that is issued later has
to come after the other; else this is a race. Nothing depends on time. Copies are also made for real, in the order in
which they are issued, and each update looks whether it sees the bytes of its own bucket.

All blocks of rings are places in one memory, the pool, of which what is freed is given out again: the next block gets
the first place in which it has room, and kernels of the model write all that no block has just now.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_offload.device.lanes import Copy, Lane, Mark
from fsdp_offload.device.link import Block, DeviceLink
from fsdp_offload.device.ring import Ring
from fsdp_offload.engine import executor as pipeline_room
from fsdp_offload.engine.bucket import StagedBucket
from fsdp_offload.engine.executor import Pipeline
from fsdp_offload.planning import schedule as schedule_room
from fsdp_offload.planning.ring_layout import Placement, RingBlocks, divide_ring, place_in_ring
from fsdp_offload.planning.schedule import Action, BucketStep, Wait, build_schedule

# Recorded streams ----------------------------------------------------------------------------------------------------


class Access(NamedTuple):
    """Bytes that an operation reads or writes."""

    memory: str
    begin: int
    end: int
    writes: bool

    def conflicts(self, other: "Access") -> bool:
        together = self.memory == other.memory and self.begin < other.end and other.begin < self.end
        return together and (self.writes or other.writes)


def reads(memory: str, begin: int = 0, end: int = 1) -> Access:
    return Access(memory, begin, end, writes=False)


def writes(memory: str, begin: int = 0, end: int = 1) -> Access:
    return Access(memory, begin, end, writes=True)


class Operation(NamedTuple):
    """The ``number``-th that a stream was given, counted from 1."""

    stream: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (on {self.stream})"


class RaceError(AssertionError):
    """Two operations access the same bytes in no certain order."""


class Stream:
    """Operations in order. ``known``: how many of each stream have finished before what is issued next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[str, int] = {}

    def learn(self, known: dict[str, int]) -> None:
        for name, number in known.items():
            self.known[name] = max(number, self.known.get(name, 0))


class History:
    """All that has been issued, and who accessed which memory."""

    def __init__(self) -> None:
        self.host = Stream("host")
        self.streams = {name: Stream(name) for name in ("compute", "reduce", "load", "store", "update", "side")}
        self.current = self.streams["compute"]
        self.values = count(1)  # what updates write
        self._accesses: dict[str, list[tuple[Operation, Access]]] = {}
        self._memory: list[tuple[str, int, Tensor]] = []

    def add_memory(self, name: str, nbytes: int) -> Tensor:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.take_memory(name, tensor)
        return tensor

    def take_memory(self, name: str, tensor: Tensor, at: int = 0) -> None:
        self._memory.append((name, at, tensor))  # kept: addresses mean one thing only

    def find(self, tensor: Tensor) -> tuple[str, int, int]:
        for name, at, memory in self._memory:
            begin = tensor.data_ptr() - memory.data_ptr()
            if 0 <= begin <= memory.numel() - tensor.numel():
                return name, at + begin, at + begin + tensor.numel()
        raise LookupError("bytes of no known memory")

    def issue(self, what: str, *accesses: Access, on: Stream | None = None) -> None:
        """Give an operation to a stream, or to the current one.

        Raises:
            RaceError: it may run beside an earlier one with which it must not.
        """
        stream = on or self.current
        stream.learn(self.host.known)
        operation = Operation(stream.name, stream.known.get(stream.name, 0) + 1, what)
        for access in accesses:
            known = self._accesses.setdefault(access.memory, [])
            for earlier, other in known:
                if access.conflicts(other) and stream.known.get(earlier.stream, 0) < earlier.number:
                    raise RaceError(f"{operation} may not come after {earlier}, and both access {access} and {other}")
        for access in accesses:
            self._accesses[access.memory].append((operation, access))
        stream.known[stream.name] = operation.number

    def synchronize(self) -> None:
        for stream in self.streams.values():
            self.host.learn(stream.known)


class RecordedMark:
    """What its stream knew when it was last recorded; whoever waits for it learns that."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.known: dict[str, int] = {}

    def synchronize(self) -> None:
        self._history.host.learn(self.known)

    def passed(self) -> bool:
        raise NotImplementedError("nobody asks")

    def elapsed_ms_since(self, earlier: Mark) -> float:
        raise NotImplementedError("nothing here takes time")


class RecordedLane:
    """A lane on a stream of its own, or on the one that is current whenever it is used."""

    def __init__(self, history: History, stream: str | None) -> None:
        self._history = history
        self._stream = None if stream is None else history.streams[stream]

    @property
    def now(self) -> Stream:
        return self._stream or self._history.current

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, RecordedMark)
        self.now.learn(mark.known)

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self._history.current = self._history.current, self.now
        try:
            yield
        finally:
            self._history.current = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        there, here = self._history.find(source), self._history.find(target)
        self._history.issue(f"copy {there} to {here}", reads(*there), writes(*here), on=self.now)

    def cut(self, copies: Sequence[Copy]) -> Sequence[Copy]:
        return copies

    def copy_pieces(self, pieces: Iterable[Copy]) -> None:
        for target, source in pieces:
            self.copy(target, source)

    def copy_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def mark(self, reuse: Mark | None = None) -> Mark:
        mark = reuse if isinstance(reuse, RecordedMark) else RecordedMark(self._history)
        mark.known = {**self.now.known}
        return mark


class RecordedLink(DeviceLink):
    """What the pipelines share, with recorded lanes; blocks change hands, grow and go as on a device."""

    def __init__(self, history: History) -> None:
        super().__init__(torch.device("cpu"))
        self._history = history
        self._compute = RecordedLane(history, None)
        self._copy_lanes = RecordedLane(history, "load"), RecordedLane(history, "store")
        self._places: dict[int, tuple[int, int]] = {}  # in the pool, by block

    def lanes(self, *, serial: bool, beside_compute: bool = False) -> dict[str, Lane]:
        assert not serial
        assert self._copy_lanes is not None
        if beside_compute and self._update_lane is None:
            self._update_lane = RecordedLane(self._history, "update")
        load, store = self._copy_lanes
        update = self._update_lane if beside_compute and self._update_lane is not None else self._compute
        return {"L": load, "U": update, "S": store, "C": self._compute}

    def block(self, number: int, nbytes: int, user: int) -> Block:
        before, block = self._ring.get(number), super().block(number, nbytes, user)
        if block is not before:
            self._places.pop(number, None)
            at = next(begin for begin, end in self._free() if begin + nbytes <= end)
            self._places[number] = at, at + nbytes
            block.memory.fill_(0)
            self._history.take_memory("pool", block.memory, at)
        return block

    def _free(self) -> Iterator[tuple[int, int]]:
        """The places in the pool that no block has."""
        begin = 0
        for taken in sorted(place for number, place in self._places.items() if number in self._ring):
            yield begin, taken[0]
            begin = taken[1]
        yield begin, 1 << 20

    def key_of(self, stream: torch.Stream | None) -> int:
        assert stream is None
        return id(self._history.current)

    def synchronize(self) -> None:
        self._history.synchronize()

    def run_model(self) -> None:
        """A kernel of the model, which may have been given any memory that is free."""
        self._history.issue("model", *(writes("pool", *place) for place in self._free()))


# An optimizer, as its pipeline sees it -------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What an optimizer has.

    Attributes:
        sizes: of its buckets, in bytes.
        resident: buckets that stay on the device.
        ring_bytes: that it would like to have.
        block_bytes: that a block of the ring should not be larger than.
        beside_compute: updates have a stream of their own.
        runs_on: nobody waits for them when a step ends.
        lasting: how many blocks of the ring stay when others are given back.
    """

    sizes: tuple[int, ...]
    ring_bytes: int
    block_bytes: int = 1 << 20
    resident: frozenset[int] = frozenset()
    beside_compute: bool = False
    runs_on: bool = False
    lasting: int = 0


@dataclass
class Begun:
    """A step of which something has been issued."""

    steps: tuple[BucketStep, ...]
    done: list[int] = field(default_factory=list)


class Optimizer:
    """Calls its pipeline in the order in which ``Stepping``, ``Phases`` and the engine do."""

    def __init__(self, name: str, shape: Shape, history: History, link: RecordedLink) -> None:
        self.begun: Begun | None = None
        self._name, self._shape, self._history, self._link = name, shape, history, link
        self.pipeline = Pipeline(link, serial=False, beside_compute=shape.beside_compute)
        self._reduce = RecordedLane(history, "reduce")
        self._room_bytes = 1 << 20
        self._final: set[int] = set()  # buckets whose gradients are there
        self._last: tuple[int, ...] = ()
        self._schedules: dict[tuple[BucketStep, ...], tuple[list[Action], dict[int, Placement]]] = {}
        self._value = [0] * len(shape.sizes)  # of each byte of a bucket's state; 0: there is none yet
        self._moved: Mark | None = None  # resident state has left the device
        self._homes = [history.add_memory(f"{name}'s home {n}", nbytes) for n, nbytes in enumerate(shape.sizes)]
        resident = [number for number in range(len(shape.sizes)) if number in shape.resident]
        self._states = {n: history.add_memory(f"{name}'s state {n}", shape.sizes[n]) for n in resident}
        for number, home in enumerate(self._homes):
            half = home.numel() // 2
            copies = [] if number in shape.resident else [(home[:half], 0), (home[half:], half)]
            self.pipeline.buckets.append(StagedBucket(None, [copy for copy in copies if copy[0].numel()]))
        self._resize(shape.ring_bytes)

    def _resize(self, ring_bytes: int) -> None:
        moving = [nbytes for number, nbytes in enumerate(self._shape.sizes) if number not in self._shape.resident]
        ring_bytes = max([ring_bytes, *moving]) if moving else 0
        blocks = divide_ring(moving, ring_bytes, self._shape.block_bytes)
        self._blocks = RingBlocks(blocks, min(len(blocks), self._shape.lasting))
        self._schedules.clear()

    # Steps

    def begin(self, order: Iterable[int]) -> None:
        """``order`` may be empty: as in the last step."""
        if self.begun is not None:
            return
        self._wake_up()
        self.pipeline.wait_all_updated()
        self._last = self._known(order) or self._last
        self.begun = Begun(self._take_up(self._last))
        self.pipeline.updates_after_compute()

    def _known(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(number for number in numbers if number < len(self._shape.sizes))

    def _moves(self, number: int) -> bool:
        return number < len(self._shape.sizes) and number not in self._shape.resident

    def _take_up(self, order: Iterable[int]) -> tuple[BucketStep, ...]:
        moves = [(number, self._moves(number)) for number in order]
        steps = tuple(BucketStep(n, load=store and self._value[n] > 0, store=store) for n, store in moves)
        if steps not in self._schedules:
            places = self._places_for(step.bucket for step in steps if step.store)
            self._schedules[steps] = build_schedule(steps, places), places
        self.pipeline.begin(*self._schedules[steps], self._blocks)
        return steps

    def _places_for(self, order: Iterable[int]) -> dict[int, Placement]:
        order = list(order)
        nbytes = [self._shape.sizes[number] for number in order]
        return dict(zip(order, place_in_ring(nbytes, self._blocks.nbytes), strict=True))

    def have_room(self, nbytes: int) -> None:
        """For so much of the ring in the next backwards."""
        self._room_bytes = nbytes

    def backward(self, buckets: Iterable[int]) -> None:
        """Gradients of ``buckets`` become final; what a step that has begun can do now is issued."""
        if self.begun is None:
            self.pipeline.wait_all_updated()
        self._link.run_model()
        self._reduce_gradients(buckets)
        if self.begun is not None:
            self._advance(self.begun, self._room_bytes)

    def _reduce_gradients(self, buckets: Iterable[int]) -> None:
        self._reduce.wait(self.pipeline.mark())
        done = self.begun.done if self.begun is not None else ()
        final = {number for number in self._known(buckets) if number not in done}
        gradients = [writes(f"{self._name}'s gradient {number}") for number in sorted(final)]
        self._history.issue("reduce", *gradients, on=self._reduce.now)
        self._final |= final
        self.pipeline.updates_after(self._reduce.mark())

    def end(self, left: Iterable[int]) -> None:
        """``step()``: what has begun, without buckets that got no gradient, and then ``left``, not known of so far."""
        begun = self.begun
        if begun is None:
            return
        left = [number for number in self._known(left) if number not in {step.bucket for step in begun.steps}]
        self._reduce_gradients(left)
        self.pipeline.skip({step.bucket for step in begun.steps} - self._final)
        self._finish(begun)
        if left:
            self._finish(Begun(self._take_up(left)))
        self.pipeline.end_updates()
        self.begun, self._final = None, set()
        if not self._shape.runs_on:
            self.pipeline.wait_all_updated()

    def _finish(self, begun: Begun) -> None:
        self.pipeline.updates_after_compute()
        self._advance(begun)
        self.pipeline.finish()

    def step(self, order: Iterable[int]) -> None:
        """A whole step without anything in the backward."""
        self.drop()
        self.begin(order)
        self._reduce_gradients(self._last)
        self.end(())

    def step_without_gradients(self) -> None:
        if self.begun is None:
            self._finish(Begun(self._take_up(())))

    def drop(self) -> None:
        if self.begun is not None and self.begun.done:
            self.pipeline.abandon()
        elif self.begun is not None:
            self.pipeline.cancel()
        self.begun = None

    def _advance(self, begun: Begun, room_bytes: float = math.inf) -> None:
        loaded = {step.bucket: step.load for step in begun.steps}
        final = self._final
        self.pipeline.advance(lambda n: self._update(begun, n, loaded[n]), lambda n: n in final, room_bytes)

    def _update(self, begun: Begun, number: int, loaded: bool) -> None:
        placement = self.pipeline.buckets[number].placement
        if placement is None:
            state, where = self._states[number], (f"{self._name}'s state {number}", 0, self._shape.sizes[number])
        else:
            block = self.pipeline.block_of(number)
            assert block is not None
            state = block[placement.offset :][: placement.nbytes]
            where = self._history.find(state)
        if loaded or placement is None:
            assert bool((state == self._value[number]).all()), f"{self._name} updates {number} on the bytes of others"
        self._value[number] = next(self._history.values) % 251 + 1
        state.fill_(self._value[number])
        gradient, param = reads(f"{self._name}'s gradient {number}"), writes(f"{self._name}'s parameter {number}")
        self._history.issue(f"{self._name} updates {number}", gradient, param, writes(*where))
        begun.done.append(number)

    # Between them

    def forward(self, buckets: Iterable[int]) -> None:
        """The model uses the parameters of some buckets, or of all."""
        buckets = self._known(buckets)
        self.pipeline.wait_updated(buckets)
        if not buckets and not (self.begun is not None and self.begun.done):
            self.pipeline.wait_all_updated()
            buckets = tuple(range(len(self._shape.sizes)))
        self._link.run_model()
        self._history.issue("forward", *(reads(f"{self._name}'s parameter {number}") for number in buckets))

    def evaluate(self, buckets: Iterable[int]) -> None:
        """The same on another stream, for which the compute stream waits afterwards."""
        buckets, compute = self._known(buckets), self._history.current
        side = self._history.current = self._history.streams["side"]
        self.pipeline.wait_updated(buckets)
        self._history.issue("evaluate", *(reads(f"{self._name}'s parameter {number}") for number in buckets))
        self._history.current = compute
        compute.learn(side.known)

    def look(self, number: int) -> None:
        """The host reads the state of a bucket, wherever a step is."""
        if self._moves(number):
            self.pipeline.wait_home(number)
            home = self._homes[number]
            self._history.issue(f"look at {number}", reads(*self._history.find(home)), on=self._history.host)
            assert not self._value[number] or bool((home == self._value[number]).all()), "the home is old"

    def forget(self, number: int) -> None:
        """Somebody takes the state of a bucket out of ``optimizer.state``; it will be created anew."""
        if self._moves(number):
            self.drop()  # what it has loaded is not what the next one needs
            self._value[number] = 0

    def take_ring(self) -> None:
        """All of it, as when attaching."""
        self.pipeline.take_ring(self._blocks)

    def give_back_ring(self, keep_bytes: int | None = None) -> None:
        if self.begun is None:
            self.pipeline.give_back_ring(keep_bytes)

    def resize_ring(self, nbytes: int) -> None:
        self.drop()
        self.pipeline.synchronize()
        self._resize(nbytes)

    def sleep(self) -> None:
        """Resident state and staging leave the device, until the next step begins."""
        if self._moved is not None or (self.begun is not None and self.begun.done):
            return
        self.drop()
        self._moved = self.pipeline.copy_down([(self._homes[n], state) for n, state in self._states.items()])

    def release(self) -> None:
        if self._moved is not None:
            self.pipeline.wait_on_current(self._moved)
            self._reuse_memory_of_states()
            self.pipeline.wait_all_updated()
            self.give_back_ring()

    def _wake_up(self) -> None:
        if self._moved is not None:
            self.pipeline.wait_on_current(self._moved)
            self._reuse_memory_of_states()
            self.pipeline.copy_up([(state, self._homes[n]) for n, state in self._states.items()])
            self._moved = None

    def _reuse_memory_of_states(self) -> None:
        for state in self._states.values():
            state.fill_(255)
            self._history.issue("model", writes(*self._history.find(state)))


# Programs ------------------------------------------------------------------------------------------------------------


class Do(NamedTuple):
    """One call of one optimizer."""

    optimizer: int
    method: Callable[..., None]
    arguments: object = None

    def __repr__(self) -> str:
        given_ = "" if self.arguments is None else f", {self.arguments!r}"
        return f"Do({self.optimizer}, Optimizer.{self.method.__name__}{given_})"


def play(shapes: Sequence[Shape], program: Iterable[Do]) -> None:
    history = History()
    link = RecordedLink(history)
    optimizers = [Optimizer(name, shape, history, link) for name, shape in zip("AB", shapes, strict=False)]
    for number, method, arguments in program:
        method(optimizers[number % len(optimizers)], *(() if arguments is None else (arguments,)))


_BUCKETS = 5

_WITHOUT_ARGUMENTS = (
    Optimizer.drop,
    Optimizer.sleep,
    Optimizer.release,
    Optimizer.take_ring,
)

shapes = st.builds(
    Shape,
    st.lists(st.integers(1, 12), min_size=2, max_size=_BUCKETS).map(tuple),
    st.integers(1, 30),
    st.one_of(st.just(1 << 20), st.integers(1, 15)),
    st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, _BUCKETS - 1), max_size=2)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
a_bucket = st.integers(0, _BUCKETS - 1)
everything = st.permutations(range(_BUCKETS)).map(tuple)
some = everything.flatmap(lambda order: st.integers(0, _BUCKETS).map(lambda n: order[:n]))
as_before: st.SearchStrategy[tuple[int, ...]] = st.just(())
calls = st.one_of(
    st.tuples(st.just(Optimizer.backward), some),
    st.tuples(st.just(Optimizer.step), some | as_before),
    st.tuples(st.just(Optimizer.forward), some),
    st.tuples(st.just(Optimizer.evaluate), some),
    st.tuples(st.just(Optimizer.look), a_bucket),
    st.tuples(st.just(Optimizer.step_without_gradients)),
    st.tuples(st.sampled_from(_WITHOUT_ARGUMENTS)),
    st.tuples(st.just(Optimizer.forget), a_bucket),
    st.tuples(st.just(Optimizer.resize_ring), st.integers(1, 40)),
    st.tuples(st.just(Optimizer.give_back_ring), st.none() | st.integers(0, 30)),
    st.tuples(st.just(Optimizer.have_room), st.integers(0, 30)),
)
meanwhile = st.lists(st.tuples(st.integers(0, 1), calls).map(lambda one: Do(one[0], *one[1])), max_size=2)


@st.composite
def iterations(draw: st.DrawFn) -> list[Do]:
    """A step that begins in the backward of one optimizer, and whatever else happens meanwhile."""
    optimizer = draw(st.integers(0, 1))
    program = [Do(optimizer, Optimizer.begin, draw(as_before | some))]
    for _ in range(draw(st.integers(1, 2))):
        program += [*draw(meanwhile), Do(optimizer, Optimizer.backward, draw(some))]
    return [*program, *draw(meanwhile), Do(optimizer, Optimizer.end, draw(as_before | some))]


@st.composite
def programs(draw: st.DrawFn) -> list[Do]:
    begin_with_a_step = draw(st.sampled_from([(0, 1), (0, 1), (0,), (1,)]))
    created = [Do(optimizer, Optimizer.step, draw(some)) for optimizer in begin_with_a_step]
    return created + [do for iteration in draw(st.lists(iterations(), min_size=2, max_size=5)) for do in iteration]


histories = st.tuples(st.lists(shapes, min_size=1, max_size=2), programs())


@settings(max_examples=100)  # ten times as many in tests/slow
@given(histories)
def test_no_sequence_of_steps_meets_a_hazard(history: tuple[list[Shape], list[Do]]) -> None:
    play(*history)


# What it found -------------------------------------------------------------------------------------------------------

TWO = [Shape((10, 10), ring_bytes=20)]
LOADS_BEGUN = [Do(0, Optimizer.step, (0,)), Do(0, Optimizer.begin, (0,)), Do(0, Optimizer.backward, ())]


def test_state_is_read_while_it_is_loaded_behind_its_last_store() -> None:
    play(TWO, [*LOADS_BEGUN, Do(0, Optimizer.look, 0)])


def test_state_is_read_after_loads_behind_its_last_store_were_given_up() -> None:
    play(TWO, [*LOADS_BEGUN, Do(0, Optimizer.drop), Do(0, Optimizer.look, 0)])


@pytest.mark.parametrize("beside_compute", [False, True])
def test_state_is_created_where_a_load_that_was_given_up_still_arrives(beside_compute: bool) -> None:
    shapes_ = [shape._replace(beside_compute=beside_compute) for shape in TWO]
    play(shapes_, [*LOADS_BEGUN, Do(0, Optimizer.drop), Do(0, Optimizer.step, (1,))])


def test_state_is_created_where_a_load_of_a_skipped_bucket_still_arrives() -> None:
    play(TWO, [*LOADS_BEGUN, Do(0, Optimizer.end, (1,))])


def test_state_is_created_where_a_load_of_another_optimizer_still_arrives() -> None:
    play([*TWO, *TWO], [*LOADS_BEGUN, Do(1, Optimizer.step, (0,))])


ALL_IN_ONE_ORDER = [Do(0, Optimizer.step, (0, 1, 2)), *[Do(0, Optimizer.step, ())] * 2]


def test_a_load_overwrites_what_is_stored_before_the_skipped_bucket_it_was_to_wait_for() -> None:
    rest = [Do(0, Optimizer.begin, ()), Do(0, Optimizer.backward, (0, 2)), Do(0, Optimizer.end, ())]
    play([Shape((10, 10, 20), ring_bytes=20)], [*ALL_IN_ONE_ORDER, *rest])


def test_a_load_reads_a_home_that_is_stored_before_the_skipped_bucket_it_was_to_wait_for() -> None:
    rest = [Do(0, Optimizer.backward, (1, 2)), Do(0, Optimizer.begin, ()), Do(0, Optimizer.end, ())]
    play([Shape((10, 10, 10), ring_bytes=20)], [*ALL_IN_ONE_ORDER, *rest])


def test_another_optimizer_replaces_a_block_that_has_been_loaded_into() -> None:
    larger = [Shape((30,), ring_bytes=30)]
    end = [Do(0, Optimizer.backward, (0,)), Do(0, Optimizer.end, ())]
    play([*TWO, *larger], [*LOADS_BEGUN, Do(1, Optimizer.step, (0,)), *end])


def test_another_block_gets_the_place_of_one_that_is_still_stored() -> None:
    in_two_blocks = [Shape((10, 10), ring_bytes=20, block_bytes=10)]
    stored = [Do(0, Optimizer.step, (0, 1)), Do(0, Optimizer.step, (0, 1)), Do(0, Optimizer.give_back_ring, 10)]
    play(in_two_blocks, [*stored, Do(0, Optimizer.begin, (1, 0)), Do(0, Optimizer.backward, ())])


def test_a_ring_is_taken_back_from_an_optimizer_that_still_stores() -> None:
    shapes = [Shape((1, 1), ring_bytes=1), Shape((1, 1), ring_bytes=1)]
    begun = [Do(0, Optimizer.begin, (0,)), Do(0, Optimizer.backward, (0,)), Do(0, Optimizer.end, ())]
    other = [Do(0, Optimizer.begin, ()), Do(1, Optimizer.step, (0,)), Do(0, Optimizer.take_ring)]
    ended = [Do(0, Optimizer.backward, ()), Do(0, Optimizer.end, ())]
    play(shapes, [Do(0, Optimizer.step, ()), Do(1, Optimizer.step, ()), *begun, *other, *ended])


# Loads without room --------------------------------------------------------------------------------------------------

IN_FOUR_BLOCKS = Shape((10, 10, 10, 10), ring_bytes=40, block_bytes=10, beside_compute=True, runs_on=True, lasting=1)


def one_step_then_begun() -> Optimizer:
    history = History()
    optimizer = Optimizer("A", IN_FOUR_BLOCKS, history, RecordedLink(history))
    optimizer.step((0, 1, 2, 3))
    optimizer.give_back_ring(0)
    optimizer.have_room(0)
    optimizer.begin(())
    return optimizer


def test_updates_go_on_behind_loads_that_have_no_room() -> None:
    optimizer = one_step_then_begun()
    optimizer.backward((0, 1, 2, 3))
    assert optimizer.begun is not None
    assert optimizer.begun.done == [0]  # the only one whose block lasts
    optimizer.have_room(10)
    optimizer.backward(())
    assert optimizer.begun.done == [0, 1]
    optimizer.end(())
    loads = [action.bucket for action in optimizer.pipeline._last_actions if action.kind == "L"]
    assert loads == [0, 1, 2, 3]  # in the order in which they are needed
    assert optimizer.begun is None


def test_no_update_of_what_is_not_loaded_for_want_of_room_that_has_come_since(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = one_step_then_begun()
    take, full = RecordedLink.block, [True]

    def block(self: RecordedLink, number: int, nbytes: int, user: int) -> Block:
        if number == 1 and full:
            full.clear()
            raise torch.OutOfMemoryError("full for once")
        return take(self, number, nbytes, user)

    monkeypatch.setattr(RecordedLink, "block", block)
    optimizer.have_room(1 << 20)
    optimizer.backward((0, 1, 2, 3))
    assert optimizer.begun is not None
    assert optimizer.begun.done == [0]
    optimizer.end(())


# What the search is worth --------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
begin, take_ring_back, slot_waits = Pipeline.begin, Pipeline._take_ring_back, schedule_room._slot_waits
note_use = Ring.note_use


def no_stores_before_other_places(patch: Patch) -> None:
    def eager(self: Pipeline, actions: Sequence[Action], places: Mapping[int, Placement], blocks: RingBlocks) -> None:
        self._places = places
        for number, placement in places.items():
            self.buckets[number].place(placement)
        begin(self, actions, places, blocks)

    patch.setattr(Pipeline, "begin", eager)


def places_by_number_in_a_schedule_by_order(patch: Patch) -> None:
    by_number: dict[int, tuple[Mapping[int, Placement], dict[int, Placement]]] = {}

    def mistaken(
        self: Pipeline, actions: Sequence[Action], places: Mapping[int, Placement], blocks: RingBlocks
    ) -> None:
        if id(places) not in by_number:
            found = place_in_ring([places[number].nbytes for number in sorted(places)], blocks.nbytes)
            by_number[id(places)] = places, dict(zip(sorted(places), found, strict=True))
        begin(self, actions, by_number[id(places)][1], blocks)

    patch.setattr(Pipeline, "begin", mistaken)


def _without(patch: Patch, left_out: Callable[[int, Wait], bool]) -> None:
    def fewer(position: int, steps: Sequence[BucketStep], places: Mapping[int, Placement]) -> tuple[Wait, ...]:
        found = slot_waits(position, steps, places)
        return tuple(wait for wait in found if not left_out(steps[position].bucket, wait))

    patch.setattr(schedule_room, "_slot_waits", fewer)


def no_wait_for_earlier_steps(patch: Patch) -> None:
    _without(patch, lambda bucket, wait: wait.earlier)


def no_wait_for_other_buckets_of_earlier_steps(patch: Patch) -> None:
    _without(patch, lambda bucket, wait: wait.earlier and wait.bucket != bucket)


def no_wait_for_ones_own_last_store(patch: Patch) -> None:
    _without(patch, lambda bucket, wait: wait.earlier and wait.bucket == bucket)


def no_stores_of_others_when_the_ring_changes_hands(patch: Patch) -> None:
    def careless(self: Pipeline) -> None:
        with Patch.context() as inner:
            inner.setattr(Pipeline, "_after_stores", lambda self: None)
            take_ring_back(self)

    patch.setattr(Pipeline, "_take_ring_back", careless)


def loads_of_others_count_as_ones_own(patch: Patch) -> None:
    patch.setattr(Pipeline, "_take_ring_back", Pipeline._after_stores)


def _uses_unnoted(patch: Patch, stream: str) -> None:
    def forgetful(self: Ring, number: int, lane: Lane | None, end: Mark) -> None:
        forgotten = isinstance(lane, RecordedLane) and lane.now.name == stream
        note_use(self, number, None if forgotten else lane, end)

    patch.setattr(Ring, "note_use", forgetful)


def a_block_that_goes_before_its_stores_have_ended(patch: Patch) -> None:
    _uses_unnoted(patch, "store")


def a_block_that_goes_before_loads_that_nobody_uses_have_ended(patch: Patch) -> None:
    _uses_unnoted(patch, "load")


def a_block_that_is_entered_before_the_model_has_left_it(patch: Patch) -> None:
    patch.setattr(DeviceLink, "_others", ())


def state_is_created_where_others_still_are(patch: Patch) -> None:
    patch.setattr(Pipeline, "_after", staticmethod(lambda lane, other: other))


def gradients_that_nobody_waits_for(patch: Patch) -> None:
    patch.setattr(Pipeline, "updates_after", lambda self, mark: None)


def parameters_that_nobody_waits_for(patch: Patch) -> None:
    patch.setattr(Pipeline, "wait_device_updated", lambda self: None)


def an_update_that_is_waited_for_only_once(patch: Patch) -> None:
    issue = Pipeline._issue

    def numbered_by_bucket(self: Pipeline, action: Action, update: Callable[[int], None]) -> None:
        issue(self, action, update)
        if action.kind == "U":
            self._spans["U", action.bucket].number = action.bucket + 1

    patch.setattr(Pipeline, "_issue", numbered_by_bucket)


def a_wait_for_the_first_update_of_some(patch: Patch) -> None:
    patch.setattr(pipeline_room, "max", min, raising=False)


def an_update_for_which_one_stream_waits_for_all(patch: Patch) -> None:
    patch.setattr(RecordedLink, "key_of", lambda self, stream: 0)


# Found in a second or less. What takes thousands of histories is looked for in tests/slow.
FOUND_SOON = [
    no_stores_before_other_places,
    places_by_number_in_a_schedule_by_order,
    no_wait_for_earlier_steps,
    no_wait_for_other_buckets_of_earlier_steps,
    no_wait_for_ones_own_last_store,
    no_stores_of_others_when_the_ring_changes_hands,
    a_block_that_goes_before_its_stores_have_ended,
    a_block_that_is_entered_before_the_model_has_left_it,
    gradients_that_nobody_waits_for,
    parameters_that_nobody_waits_for,
    state_is_created_where_others_still_are,
    an_update_that_is_waited_for_only_once,
    a_wait_for_the_first_update_of_some,
    an_update_for_which_one_stream_waits_for_all,
]
FOUND_LATE = [
    loads_of_others_count_as_ones_own,
    a_block_that_goes_before_loads_that_nobody_uses_have_ended,
]


@pytest.mark.parametrize("broken", FOUND_SOON)
def test_the_search_finds_what_is_broken(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    assert_found(broken, monkeypatch)


def assert_found(broken: Callable[[Patch], None], patch: Patch) -> None:
    search = settings(max_examples=4000, phases=[Phase.generate], database=None, derandomize=True)(
        given(histories)(_play)
    )
    broken(patch)
    with pytest.raises(AssertionError, match=r"may not come after|on the bytes of others"):
        search()


def _play(history: tuple[list[Shape], list[Do]]) -> None:
    play(*history)
