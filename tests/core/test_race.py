"""No race in random programs over the real cache and loop, and every wait of theirs is needed.

State and parameters are counters: an update adds one to each element of both. Lanes run what they are given later, in
any order that the waits allow (``deferred.py``), so that a wrong order gives a wrong number, or a race that is named.
"""

import inspect
import random
import sys
import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload.core import cache as cache_module
from fsdp_offload.core import loop as loop_module
from fsdp_offload.core.buckets import ELSEWHERE, Bucket, make_pools, need
from fsdp_offload.core.items import BytesAtHome, Home, Item
from fsdp_offload.core.loop import Updates

from .deferred import DeferredLanes, IssuedError

MODES = ("step", "forward", "iteration")


@dataclass(eq=False, repr=False)
class OnDevice(Item):
    """Parameters that stay on the device: their tensors, for lanes that look for races."""

    fixed: Sequence[Tensor] = ()

    def place(self) -> Sequence[Tensor]:
        return self.fixed


class Counting(Updates):
    """Updates that add a gradient of ones to parameters and state."""

    def __init__(self, weights: dict[int, Tensor], grads: dict[int, Tensor]) -> None:
        super().__init__()
        self.weights, self.grads = weights, grads
        self.marks: dict[int, Item] = {}

    def again(self, way_back: Any = None) -> "Counting":
        """For another step; ``way_back``: its updates are guesses."""
        other = Counting(self.weights, self.grads)
        other.marks, other.joined_bytes, other.way_back = self.marks, self.joined_bytes, way_back
        return other

    def job(self, buckets: Sequence[Bucket]) -> tuple[list[Tensor], Any]:
        grads = [self.grads[group] for bucket in buckets for group in bucket.groups]
        states = [(one.state.block.memory[: one.state.nbytes].view(torch.int64), one.state.exists) for one in buckets]
        places = [self.place(group) for bucket in buckets for group in bucket.groups]

        def job() -> None:
            for memory, exists in states:
                if not exists:
                    memory.zero_()
                memory.add_(1)
            for place, grad in zip(places, grads, strict=True):
                place.add_(grad)

        return grads, job

    def place(self, group: int) -> Tensor:
        """Where parameters of a group are on the device now."""
        item = self.marks[group]
        return self.weights[group] if item.block is None else item.block.memory[:16].view(torch.int64)


class ProgramHome(Home):
    """Has the methods of a program."""

    def __init__(self, pieces: BytesAtHome, **methods: Any) -> None:
        super().__init__(pieces)
        vars(self).update(methods)


@dataclass
class Trial:
    """One random program."""

    seed: int
    core_class: type[Any] = loop_module.Core
    way_back_class: type[Any] = loop_module.WayBack

    def __post_init__(self) -> None:
        self.random = rng = random.Random(self.seed)
        self.elsewhere = rng.random() < 0.4
        self.groups, self.lanes = rng.randint(1, 7), DeferredLanes(self.seed)
        self.overlap = rng.choice(MODES)
        self.weights = {g: torch.zeros(2, dtype=torch.int64) for g in range(self.groups)}
        self.grads = {g: torch.zeros(2, dtype=torch.int64) for g in range(self.groups)}
        self.updates = Counting(self.weights, self.grads)
        others = random.Random(self.seed + 1)  # the rest is drawn as ever
        self.updates.joined_bytes = others.choice([0, 32, 1 << 20])
        self.core = self.core_class(self.lanes, torch.device("cpu"), self.overlap)
        self.clips = rng.choice([None, 0.0, 0.4, 1.0]) if self.overlap == "iteration" else None  # how often it binds
        self.core.frees_gradients = rng.random() < 0.5 and self.clips is None
        if self.elsewhere:
            self.weights[ELSEWHERE] = torch.zeros(2, dtype=torch.int64)
        self.streams = {g for g in range(self.groups) if rng.random() < 0.8} if rng.random() < 0.6 else set()
        self.marks = marks = self.updates.marks = {
            g: Item(f"w{g}", 16, home=self.weights_home(g)) if g in self.streams else OnDevice(f"w{g}", fixed=[weights])
            for g, weights in self.weights.items()
        }
        self.holders = {g for g in self.streams if rng.random() < 0.4}  # whose homes stay with somebody who has looked
        self.weight_versions = dict.fromkeys(self.weights, 0)
        self.homes, buckets = [], []
        self.held: dict[int, Tensor] = {}  # homes of state over which others still have tensors
        self.spares: dict[int, Tensor] = {}
        self.reading: dict[int, Any] = {}  # by address of a home: the mark of a save that reads it
        for g in range(self.groups + self.elsewhere):
            home = torch.zeros(16, dtype=torch.uint8)
            self.homes.append(home)
            cut = rng.choice([8, 16])  # in one piece, or two
            pieces = [(home[:cut], 0), *([(home[cut:], cut)] if cut < 16 else [])]
            joined = (g, g - 1) if g and rng.random() < 0.2 else (g,)
            joined = (g - 1,) if g and others.random() < 0.3 else joined  # two of one group, which an update may join
            if self.clips is not None and not self.streams.issuperset(joined):
                joined = (g,)  # buckets share no element of parameters, and each has its own way back
            joined = joined if g < self.groups else (ELSEWHERE,)
            item = Item(f"s{g}", 16, home=self.state_home(g, pieces), exists=False)
            if rng.random() < (0.5 if self.clips is None else 0.9):
                self.spares[g] = torch.zeros(16, dtype=torch.uint8)
            buckets.append(Bucket(g, item, joined, tuple(marks[one] for one in joined)))
        self.guessed: dict[Home, None] | None = None  # changed by guesses of this iteration
        self.old = {g: torch.zeros(2, dtype=torch.int64) for g in self.weights}
        for bucket in buckets:
            fixed = [g for g in bucket.groups if g not in self.streams]
            bucket.old = [(self.old[g].view(torch.uint8), self.weights[g].view(torch.uint8)) for g in fixed]
        self.weight_spares = {g: torch.zeros(2, dtype=torch.int64) for g in self.streams}
        self.way_back = self.way_back_class(self.core)
        self.versions = [0] * len(buckets)
        self.counts = dict.fromkeys(self.weights, 0)  # updates of each group's parameters
        self.core.take(buckets, marks)
        streamed = [marks[g] for g in self.streams]
        pools = [*make_pools([bucket.state for bucket in buckets], 16), *make_pools(streamed, 16)]
        need(pools, buckets)
        for pool in pools:
            pool.count = rng.randint(pool.least, self.groups + 2)
        self.pools = self.core.cache.pools = pools
        self.positions = random.Random(self.seed + 2)
        self.core.cache.keeps_bound, self.comes = self.positions.random() < 0.7, self.positions.random() < 0.4
        self.core.choose_kept()
        if rng.random() < 0.5:  # more is kept than the rule would
            for item in [*(bucket.state for bucket in buckets), *streamed]:
                item.kept = rng.random() < 0.3
        self.state = [0] * len(buckets)
        self.buffers: list[Tensor] = []
        self.saves: list[tuple[Tensor, int, Any]] = []

    def state_home(self, g: int, pieces: BytesAtHome) -> Home:
        def turn() -> BytesAtHome | None:
            """As a save that is being written has it: turn to the other home, which nobody reads any more."""
            if g not in self.spares or (self.guessed is None and self.homes[g].data_ptr() not in self.reading):
                return None
            if self.guessed is not None:
                self.guessed[found] = None
                return [(self.spares[g], 0)]
            if (before := self.reading.pop(self.spares[g].data_ptr(), None)) is not None:
                before.synchronize()
            self.homes[g], self.spares[g] = self.spares[g], self.homes[g]
            return [(self.homes[g], 0)]

        found = ProgramHome(pieces, turn=turn, is_held=lambda: g in self.held, version=lambda: self.versions[g])
        return found

    def weights_home(self, g: int) -> Home:
        def turn() -> BytesAtHome | None:
            if self.guessed is None or found in self.guessed:
                return None
            self.guessed[found] = None
            return [(self.weight_spares[g].view(torch.uint8), 0)]

        pieces, version = [(self.weights[g].view(torch.uint8), 0)], lambda: self.weight_versions[g]
        found = ProgramHome(pieces, turn=turn, is_held=lambda: g in self.holders, version=version)
        return found

    def takes(self, bucket: Bucket) -> bool:
        """A guess waits for step() if its bucket has no state yet, or its spare home is none or being read."""
        if self.guessed is None:
            return True
        g = bucket.number
        if g not in self.spares or not bucket.state.exists:
            return False
        reader = self.reading.get(self.spares[g].data_ptr())
        if reader is not None and self.random.random() < 0.5:
            return False
        if reader is not None:  # the writer has ended
            reader.synchronize()
            del self.reading[self.spares[g].data_ptr()]
        return True

    def take_back(self) -> None:
        for bucket in self.core.done:
            self.state[bucket.number] -= 1
            for group in bucket.groups:
                self.counts[group] -= 1
        self.way_back.roll_back()
        self.way_back, self.guessed = self.way_back_class(self.core), None
        for bucket in self.core.buckets:  # its writer still reads the home that the bucket has again
            if (mark := self.reading.get(self.homes[bucket.number].data_ptr())) is not None:
                bucket.state.home.read["reader"] = mark
        for g in range(self.groups):  # the user reads what is on the device, and writes all gradients
            if g not in self.streams:
                self.lanes.compute.touch(reads=[self.weights[g]])
                assert self.weights[g].tolist() == [self.counts[g]] * 2, (self.seed, g)
            if g in self.grads:
                self.lanes.compute.run(lambda: None, reads=[self.grads[g]], writes=[self.grads[g]])

    def commit(self) -> None:
        guessed, self.guessed = self.guessed or {}, None
        for bucket in self.core.buckets:
            if bucket.state.home in guessed:
                g = bucket.number
                self.homes[g], self.spares[g] = self.spares[g], self.homes[g]
        for g in self.streams:
            if self.marks[g].home in guessed:
                self.weights[g], self.weight_spares[g] = self.weight_spares[g], self.weights[g]
        self.way_back = self.way_back_class(self.core)
        if self.core.updates is not None:
            self.core.updates.way_back = None

    def come(self) -> None:
        """A point of the iteration, with other room than the one before."""
        if self.comes and self.positions.random() < 0.6:
            beyond = [self.positions.randint(-1, self.groups) for _ in self.pools]
            self.lanes.current = self.positions.choice([self.lanes.compute, self.lanes.compute, self.lanes.aside])
            self.core.cache.allow(beyond, [self.positions.randint(min(0, one), max(0, one)) for one in beyond])
            self.core.prefetch()
            self.lanes.current = self.lanes.compute

    def gather(self, g: int, *, counts: bool = True) -> None:
        self.come()
        stream = object() if self.random.random() < (0.6 if g in self.streams else 0.2) else None
        if stream is not None and self.overlap == "step":
            self.lanes.on(stream).wait(self.lanes.compute.mark())  # as fully_shard does before its first gather
        self.core.gather(g, stream)
        lane, place = self.lanes.on(stream), self.updates.place(g)
        if stream is None:
            assert place.tolist() == [self.counts[g]] * 2, (self.seed, g)
        else:
            seen, expected = place, [self.counts[g]] * 2

            def read() -> None:
                assert seen.tolist() == expected, (self.seed, g)

            lane.run(read, reads=[seen])
        self.core.gathered(g, stream, counts=counts)
        if stream is not None and g in self.streams:
            self.lanes.compute.wait(lane.mark())  # it uses what has been gathered
        self.core.uses(g)
        if stream is not None and self.overlap == "step":
            self.lanes.compute.wait(lane.mark())  # it uses what has been gathered

    def reduce(self, g: int) -> None:
        """The gradient is written on a stream of its own, behind compute and whoever may still read the last one."""
        lanes = self.lanes
        lanes.reduce.wait(lanes.compute.mark())
        self.grads[g] = grad = self.new_gradient()
        lanes.reduce.run(lambda: grad.fill_(1), writes=[grad])
        event = lanes.reduce.mark()
        if self.overlap != "iteration":
            lanes.compute.wait(event)  # as the end of a backward does
        self.come()
        before = set(self.core.done)
        lanes.update.fails = lanes.update_kept.fails = self.guessed is not None and self.random.random() < 0.05
        try:
            way_back = None if self.guessed is None else self.way_back
            ready = list(filter(self.takes, self.core.reduced(g, event, goes_on=True)))
            if ready and self.core.updates is None:
                self.core.begin(self.updates.again(way_back))
            self.core.run(ready)
            self.note(before)
        except IssuedError:
            self.note(before)
            self.take_back()
        lanes.update.fails = lanes.update_kept.fails = False
        if self.core.frees_gradients:
            for group in {group for bucket in self.core.done for group in bucket.groups}:
                if all(bucket in self.core.done for bucket in self.core.buckets if group in bucket.groups):
                    self.grads.pop(group, None)
        self.events.append(event)

    def new_gradient(self) -> Tensor:
        """Memory that nobody holds any more: an update may still be reading it."""
        held = [*self.grads.values(), *(grad for some in self.core._gradients.values() for grad in some)]
        free = [one for one in self.buffers if not any(one is other for other in held)]
        if not free:
            free.append(torch.zeros(2, dtype=torch.int64))
            self.lanes.world.forget(free[0])
            self.buffers += free
        return self.random.choice(free)

    def note(self, before: set[Bucket]) -> None:
        for bucket in self.core.done.keys() - before:
            self.state[bucket.number] += 1
            for group in bucket.groups:
                self.counts[group] += 1

    def iteration(self) -> None:  # noqa: C901  # one iteration, top to bottom
        rng, core = self.random, self.core
        order, self.events = list(range(self.groups)), []
        self.grads.clear()
        if rng.random() < 0.1:
            rng.shuffle(order)
        guesses = self.clips is not None and rng.random() < 0.8
        for g in order:
            self.gather(g)
            for bucket in core.of_group.get(g, ()) if guesses and rng.random() < 0.5 else ():
                if g not in self.streams:
                    self.way_back.keep(bucket)
        if guesses:
            self.guessed = {}
        if rng.random() < 0.4:
            self.resize()
        if rng.random() < 0.2:  # an evaluation of a part
            for g in rng.sample(order, rng.randint(0, len(order))):
                self.gather(g, counts=False)
        for g in reversed(order):
            self.gather(g)
            self.use_held()
            self.reduce(g)
        self.use_held()
        self.lanes.compute.wait(*self.events)
        for g in order:  # clipping: gradients of what has not been updated are written on compute
            if g in self.grads and self.overlap != "iteration" and rng.random() < 0.3:
                grad = self.grads[g]
                self.lanes.compute.run(lambda grad=grad: grad.mul_(1), reads=[grad], writes=[grad])
        if self.elsewhere:
            self.grads[ELSEWHERE] = grad = torch.ones(2, dtype=torch.int64)
            self.lanes.made([grad])
        if self.guessed is not None and rng.random() < self.clips:
            self.take_back()
        elif self.guessed is not None:
            self.commit()
        wanted = [bucket for bucket in core.buckets if rng.random() < 0.9 or bucket in core.done]
        before = set(core.done)
        self.come()
        core.updates = core.updates or self.updates.again()
        core.step(wanted)
        self.note(before)
        core.end()
        # What a save has had moved to the other home is no longer that which others hold.
        self.held = {g: home for g, home in self.held.items() if home is self.homes[g]}
        self.use_held()
        if self.elsewhere:
            self.lanes.compute.touch(reads=[self.weights[ELSEWHERE]])
            assert self.weights[ELSEWHERE].tolist() == [self.counts[ELSEWHERE]] * 2
        if self.overlap == "step":
            for g in order:
                assert self.updates.place(g).tolist() == [self.counts[g]] * 2 or g in self.streams
        for g in sorted(self.holders):
            if self.marks[g].home.exposed_at is not None:
                self.lanes.world.check("host", self.lanes.world.host, [self.weights[g]], [])
                assert self.weights[g].tolist() == [self.counts[g]] * 2, (self.seed, g)
        if rng.random() < 0.3:
            core.cache.flush()
        if rng.random() < 0.3:
            self.look()
        if rng.random() < 0.3:
            self.save()
        if rng.random() < 0.2:
            core.cache.release()
        elif rng.random() < 0.3:
            self.resize()

    def resize(self) -> None:
        pool = self.random.choice(self.pools)
        self.core.cache.resize(pool, self.random.randint(pool.least, self.groups + 2))

    def look(self) -> None:
        """Somebody reads homes on the host, and may write them, at once or later."""
        chosen = [bucket for bucket in self.core.buckets if self.random.random() < 0.5]
        self.core.wait_home(bucket.state for bucket in chosen)
        taken = [bucket.number for bucket in chosen if self.random.random() < 0.4 and bucket.state.exists]
        self.held |= {g: self.homes[g] for g in taken}
        for bucket in chosen:
            self.check_home(bucket.number)
            if self.random.random() < 0.5 and bucket.state.exists:
                home = self.homes[bucket.number]
                self.core.wait_home([bucket.state])  # a prefetch behind the write before may have begun to load it
                self.lanes.world.on_host(lambda home=home: home.view(torch.int64).add_(100), [home])
                self.state[bucket.number] += 100
                self.versions[bucket.number] += 1
                if self.random.random() < 0.5:
                    self.core.prefetch()
        for g in self.streams:
            if self.random.random() < 0.3:
                self.core.wait_home([self.marks[g]])
                self.look_at_weights(g)

    def use_held(self) -> None:
        """Others read homes over which they have tensors, or write them in a way that counts no version, or let go."""
        for g, home in [*self.held.items()]:
            if home.data_ptr() in self.reading:
                continue  # a write would spoil a save, and is told
            written = 100 if self.random.random() < 0.2 else 0
            self.lanes.world.on_host(lambda home=home, written=written: home.view(torch.int64).add_(written), [home])
            self.state[g] += written
            self.check_home(g)
            if self.random.random() < 0.1:
                del self.held[g]

    def look_at_weights(self, g: int) -> None:
        """Somebody reads the home of parameters on the host, and may write it."""
        assert self.weights[g].tolist() == [self.counts[g]] * 2, (self.seed, g)
        home = self.weights[g]
        written = 100 if self.random.random() < 0.5 else 0
        self.lanes.world.on_host(lambda: home.add_(written), [home])
        self.counts[g] += written
        self.weight_versions[g] += written

    def save(self) -> None:
        """A checkpoint's writer reads homes while training goes on."""
        self.core.cache.flush()
        reader = self.lanes.reader
        for bucket in self.core.buckets:
            item = bucket.state
            if item.exists:
                reader.wait(item.home.stored)
                copy = torch.zeros(16, dtype=torch.uint8)
                self.lanes.world.forget(copy)
                reader.copy([(copy, self.homes[bucket.number])])
                item.home.read["reader"] = mark = reader.mark()
                self.reading[self.homes[bucket.number].data_ptr()] = mark
                self.saves.append((copy, self.state[bucket.number], mark))

    def check_home(self, number: int) -> None:
        assert self.homes[number].view(torch.int64).tolist() == [self.state[number]] * 2, (self.seed, number)

    def run(self) -> None:
        for _ in range(self.random.randint(2, 6)):
            self.iteration()
        self.core.wait_updated()
        self.core.wait_home([*(bucket.state for bucket in self.core.buckets), *self.marks.values()])
        for number in range(len(self.homes)):
            self.check_home(number)
        for g, weights in self.weights.items():
            assert weights.tolist() == [self.counts[g]] * 2
        for copy, value, mark in self.saves:
            mark.synchronize()
            assert copy.view(torch.int64).tolist() == [value] * 2, self.seed


@pytest.mark.parametrize("first", range(0, 600, 150))
def test_random_programs_have_no_race_and_every_number_is_right(first):
    for seed in range(first, first + 150):
        Trial(seed).run()


def test_the_place_of_an_update_that_failed_is_given_back_behind_the_part_that_runs():
    Trial(5007).run()


MUTANTS = [
    mutant
    for mutant in tomllib.loads(Path(__file__).with_name("waits.toml").read_text(encoding="utf-8"))["mutant"]
    if mutant["file"] in ("cache", "loop")
]


def mutated(file: str, old: str, new: str) -> tuple[type[Any], type[Any]]:
    """The loop and its way back with one line of them, or of the cache, exchanged."""
    modules = {"cache": cache_module, "loop": loop_module}
    text = {name: inspect.getsource(module) for name, module in modules.items()}
    assert text[file].count(old) == 1, f"{old!r} is {text[file].count(old)} times in {file}.py"
    text[file] = text[file].replace(old, new)
    made = {}
    for name in modules:
        module = types.ModuleType(f"fsdp_offload.core.{name}")
        module.__package__ = "fsdp_offload.core"
        before = sys.modules[f"fsdp_offload.core.{name}"]
        sys.modules[f"fsdp_offload.core.{name}"] = module
        try:
            exec(compile(text[name], f"{name}.py", "exec"), module.__dict__)
        finally:
            sys.modules[f"fsdp_offload.core.{name}"] = before
        made[name] = module
    made["loop"].Cache = made["cache"].Cache
    return made["loop"].Core, made["loop"].WayBack


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["note"])
def test_each_wait_is_needed(mutant):
    classes = mutated(mutant["file"], mutant["line"], mutant["replacement"])
    for seed in range(1000):
        try:
            Trial(seed, *classes).run()
        except (AssertionError, RuntimeError):
            return
    pytest.fail("no program has found it")
