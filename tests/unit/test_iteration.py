"""Marks of an iteration, on a lane that passes each mark at a time that the test says."""

import pytest

from fsdp_offload.device.iteration import _MOST_WAITS, IterationMarks, LiveIteration
from fsdp_offload.device.lanes import Mark, SerialLane

STEP = (1, 2, 3)  # what a step updated


class ClockMark:
    def __init__(self) -> None:
        self.at_ms = 0.0
        self.read = False

    def synchronize(self) -> None:
        self.read = True

    def passed(self) -> bool:
        return self.read

    def elapsed_ms_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, ClockMark)
        assert self.read, "a mark has been passed only once somebody has waited for it"
        assert earlier.read
        return self.at_ms - earlier.at_ms


class ClockLane(SerialLane):
    """Its clock moves only when a test says so; it knows all of its marks."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.made: list[ClockMark] = []

    def mark(self, reuse: Mark | None = None) -> Mark:
        mark = reuse
        if not isinstance(mark, ClockMark):
            mark = ClockMark()
            self.made.append(mark)
        mark.at_ms, mark.read = self.now_ms, False
        return mark


class Script:
    """Plays iterations."""

    def __init__(self) -> None:
        self.lane = ClockLane()
        self.marks = IterationMarks(self.lane)

    def work(self, ms: float) -> None:
        self.lane.now_ms += ms

    def wait(self, ms: float) -> None:
        with self.marks.waiting():
            self.work(ms)

    def step(self, *, waits_ms: float = 0.0, updated: tuple[int, ...] = STEP) -> None:
        self.marks.step_begins()
        self.work(1)
        self.wait(waits_ms)
        self.marks.step_ended(updated)

    def iterate(self, *, waits: int = 2, updated: tuple[int, ...] = STEP) -> None:
        """A forward of 32 that waits 4 each time, a backward of 64, and a step of 1 that waits 2."""
        self.work(32)
        for _ in range(waits):
            self.wait(4)
        self.marks.backward_begins()
        self.work(64)
        self.marks.backward_begins()
        self.step(waits_ms=2, updated=updated)


WHOLE = LiveIteration(32 + 2 * 4 + 64 + 1 + 2, forward_ms=32, stalled_ms=2 * 4 + 2, repeats=True)


def test_from_the_end_of_a_step_to_the_end_of_the_next() -> None:
    script = Script()
    script.iterate()
    assert script.marks.last() is None, "it began before anybody looked"
    script.iterate()
    assert script.marks.last() == WHOLE
    script.work(1000)
    script.wait(1000)
    assert script.marks.last() == WHOLE, "of the next one, which is not over"


def test_an_idle_lane_gets_no_marks() -> None:
    script = Script()
    script.wait(4)
    script.marks.backward_begins()
    script.marks.step_begins()
    assert script.lane.made == []


def test_marks_are_used_again() -> None:
    script = Script()
    for _ in range(4):
        script.iterate()
    made = len(script.lane.made)
    for _ in range(50):
        script.iterate()
        assert script.marks.last() == WHOLE
    assert len(script.lane.made) == made
    # Of two iterations the end, the backward and three waits each; and where the earlier one began.
    assert made == 2 * (1 + 1 + 2 * 3) + 1


@pytest.mark.parametrize("breaks", ["forget", "exception", "no-backward", "waits"])
def test_marks_are_used_again_whatever_happens(breaks: str) -> None:
    """And no mark is handed out twice: what is measured in between stays right."""
    script = Script()
    made = []
    for _ in range(6):
        script.iterate()
        script.iterate()
        script.iterate()
        assert script.marks.last() == WHOLE
        if breaks == "forget":
            script.wait(3)
            script.marks.forget()
        elif breaks == "exception":
            script.marks.step_begins()
        elif breaks == "no-backward":
            script.step()
        else:
            for _ in range(_MOST_WAITS + 1):
                script.wait(1)
        made.append(len(script.lane.made))
    assert made[2:] == [made[2]] * 4
    free = script.marks._free
    assert len({id(mark) for mark in free}) == len(free)


def test_a_step_without_a_backward_ends_no_iteration() -> None:
    script = Script()
    script.iterate()
    script.iterate()
    script.step()
    assert script.marks.last() is None
    script.iterate()
    assert script.marks.last() == WHOLE


def test_a_step_that_ended_in_an_exception() -> None:
    script = Script()
    script.iterate()
    script.iterate()
    script.marks.step_begins()
    assert script.marks.last() == WHOLE, "the one before it was whole"
    script.iterate()
    assert script.marks.last() is None
    script.iterate()
    assert script.marks.last() == WHOLE


def test_several_micro_batches_are_one_iteration_of_one_first_forward() -> None:
    script = Script()
    script.iterate()
    script.work(32)
    script.marks.backward_begins()
    script.work(64)
    script.iterate()
    assert script.marks.last() == LiveIteration(32 + 64 + WHOLE.ms, forward_ms=32, stalled_ms=10, repeats=True)


def test_waits_within_waits_count_once() -> None:
    script = Script()
    script.iterate()
    script.iterate(waits=0)
    with script.marks.waiting():
        script.wait(4)
    script.iterate(waits=0)
    last = script.marks.last()
    assert last is not None
    assert last.stalled_ms == 4 + 2


def test_a_wait_that_raises_ends() -> None:
    script = Script()
    script.iterate()

    def fail() -> None:
        with script.marks.waiting():
            script.work(8)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    script.iterate()
    last = script.marks.last()
    assert last is not None
    assert last.stalled_ms == WHOLE.stalled_ms + 8


def test_whether_two_steps_did_the_same() -> None:
    script = Script()
    found = []
    for updated in ((1,), (1, 2), (1, 2), (1,), (1,)):
        script.iterate(updated=updated)
        last = script.marks.last()
        found.append(last and last.repeats)
    assert found == [None, False, True, False, True]
