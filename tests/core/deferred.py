"""Lanes that run what they are given later, in *any* order that the waits allow: a missing wait gives wrong numbers.

Compute runs at once, as torch does on the CPU, and what it waits for is run first. What cannot show there (compute is
never late) is found by vector clocks: whoever touches bytes without having waited for those who touched them before is
named as a race.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fsdp_offload.device.lanes import PIECE_BYTES, Lane, Lanes, Mark, PutsOff

Clock = dict[str, int]


def merge(clock: Clock, other: Clock) -> None:
    """Have seen what ``other`` has seen, too."""
    for name, value in other.items():
        clock[name] = max(value, clock.get(name, 0))


class IssuedError(Exception):
    """Something has been issued, and failed."""


class Action(Mark):
    """Something that has been issued and may not have run yet; a mark."""

    def __init__(self, function: Callable[[], None] | None, after: set["Action"], clock: Clock, world: "World") -> None:
        self.function, self.after, self.clock, self.world, self.done = function, after, clock, world, False

    def resolved(self) -> "Action":  # type: ignore[override]
        return self

    def synchronize(self) -> None:
        self.world.finish(self)
        merge(self.world.host, self.clock)

    def is_passed(self) -> bool:
        return self.done


class World:
    """What all lanes share: actions that have not run, and who read and wrote what when."""

    def __init__(self, seed: int, eagerness: float = 0.3) -> None:
        self.random, self.eagerness = random.Random(seed), eagerness
        self.waiting: dict[Action, None] = {}
        self.host: Clock = {"host": 0}
        self.accesses: dict[tuple[int, int], tuple[Clock, list[Clock], str]] = {}

    def add(self, action: Action) -> None:
        """Queue an action; perhaps run some that may run, in any order."""
        self.waiting[action] = None
        while self.waiting and self.random.random() < self.eagerness:
            self.run_one()

    def run_one(self) -> None:
        """Run an action that may run, if there is one."""
        if may := [one for one in self.waiting if all(o.done for o in one.after)]:  # all may wait for one that runs now
            self._run(self.random.choice(may))

    def finish(self, action: Action) -> None:
        """Run ``action`` and what it waits for; nothing else."""
        needed: set[Action] = set()
        look = [action]
        while look:
            one = look.pop()
            if not one.done and one not in needed:
                needed.add(one)
                look += one.after
        order = [one for one in self.waiting if one in needed]
        while order:
            may = [one for one in order if all(other.done for other in one.after)]
            if not may:  # an engine ends within an action, for which all of them wait
                return
            one = self.random.choice(may)
            order.remove(one)
            if not one.done:  # an action that is let go may have ended an engine, which waits for all
                self._run(one)

    def _run(self, action: Action) -> None:
        del self.waiting[action]
        if action.function is not None:
            with torch.inference_mode(False):  # not in that of an evaluation, which runs now
                action.function()
        action.done, action.function, action.after = True, None, set()

    def check(self, lane: str, clock: Clock, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Raise where ``lane`` touches bytes that others may still be touching."""

        def seen(other: Clock) -> bool:
            return all(clock.get(name, 0) >= value for name, value in other.items())

        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                mine = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                for (low, high), (written, read, who) in self.accesses.items():
                    if low < mine[1] and mine[0] < high:
                        verb = "writes" if is_write else "reads"
                        assert seen(written), f"race: {lane} {verb} what {who} may still write"
                        assert not is_write or all(map(seen, read)), f"race: {lane} writes what others may still read"
                written, read, who = self.accesses.get(mine, ({}, [], ""))
                now = {lane: clock[lane]}
                self.accesses[mine] = (now, [], lane) if is_write else (written, [*read, now], who)

    def on_host(self, function: Callable[[], object], writes: Sequence[Tensor]) -> None:
        """The host reads and writes these now."""
        self.host["host"] += 1
        self.check("host", self.host, writes, writes)
        function()

    def forget(self, tensor: Tensor) -> None:
        """Forget memory that is given back: others may get it."""
        self.forget_at(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)

    def forget_at(self, begin: int, end: int) -> None:
        self.accesses = {at: one for at, one in self.accesses.items() if at[1] <= begin or end <= at[0]}


class DeferredLane(Lane):
    """Runs its actions in order, some time later; with ``at_once`` it is the host itself."""

    looks_for_races = True

    def __init__(self, world: World, name: str, *, at_once: bool = False) -> None:
        self.world, self.name, self.at_once = world, name, at_once
        self.clock: Clock = {name: 0}
        self.fails = False  # when it has issued what it is given to run next
        self._after: set[Action] = set()

    def wait(self, *marks: Mark | None) -> None:
        for mark in [None if one is None else one.resolved() for one in marks]:
            if isinstance(mark, Action):
                merge(self.clock, mark.clock)
                if self.at_once:
                    self.world.finish(mark)
                elif not mark.done:
                    self._after.add(mark)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, alone: bool = False) -> None:
        for target, source in pairs:
            self._add(lambda target=target, source=source: target.copy_(source), (source,), (target,))

    def run(self, function: Callable[[], None], reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        self._add(function, list(reads), list(writes))
        if self.fails:
            self.fails = False
            raise IssuedError

    @contextmanager
    def running(self) -> Iterator[None]:
        """What runs in it does so at once, and what was issued here before has."""
        self.world.finish(self.mark())
        yield
        self.mark()

    def touch(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._add(None, reads, writes)

    def mark(self, *, timed: bool = False) -> Action:
        return self._add(None, (), ())

    def _add(self, function: Callable[[], object] | None, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Action:
        self.clock[self.name] += 1
        merge(self.clock, self.world.host)  # what is issued comes after what the host has done
        self.world.check(self.name, self.clock, reads, writes)
        action = Action(function, self._after, dict(self.clock), self.world)
        self._after = {action}
        if self.at_once:
            action.done, action.after = True, set()
            if function is not None:
                function()
        else:
            self.world.add(action)
        return action


class DeferredLoads(PutsOff, DeferredLane):
    """Issues some of them only when something waits for them."""


class DeferredLanes(Lanes):
    """All of them, in a world of their own."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        self.world = world or World(seed)
        names = ("store", "update", "update_kept", "reduce", "copy in", "reader", "down", "up")
        lanes = [DeferredLane(self.world, name) for name in names]
        self.store, self.update, self.update_kept, *others = lanes
        self.reduce, self.copy_in, self.reader, self.down, self.up = others
        most_bytes = self.world.random.choice([0, 4096, 32768, 1 << 40])
        self.load = DeferredLoads(self.world, "load", most_pieces=most_bytes / PIECE_BYTES)
        self.compute = self.current = DeferredLane(self.world, "compute", at_once=True)
        self.aside = DeferredLane(self.world, "aside", at_once=True)  # another stream of the user's

    def on(self, stream: object) -> DeferredLane:
        return self.compute if stream is None else self.copy_in

    def event(self, event: object) -> object:
        return self.compute.mark() if event is None else event

    def here(self) -> DeferredLane:
        return self.current

    def made(self, tensors: Sequence[Tensor], lane: DeferredLane | None = None) -> None:
        for tensor in tensors:
            self.world.forget(tensor)
        (lane or self.compute).touch(writes=tensors)

    def freed(self, tensor: Tensor, lane: DeferredLane) -> None:
        lane.touch(writes=[tensor])
        self.world.forget(tensor)

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        tensor.fill_(0xDB)  # what comes late would find no memory; what waits finds other bytes
