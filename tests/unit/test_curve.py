"""The curve of a model's memory, and what it leaves room for."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from fsdp_offload.core.curve import Curve, Reading, leads, point_of, shares, transients
from fsdp_offload.core.items import Item, Pool, Use


class Model:
    """Takes memory as an iteration goes on: what is allocated behind each point, and what is freed there then.

    With ``records``, the order of all that is known.
    """

    def __init__(self, *, records: bool = False) -> None:
        self.used = self.ever = self.operations = 0
        self.optimizers = 1
        self.reads = 0
        self.records, self.recording = records, 0
        self.events: list[int] = []

    def read(self) -> Reading:
        self.reads += 1
        return Reading(self.used, self.ever, self.operations, self.optimizers)

    def begin(self) -> bool:
        self.events = []
        self.recording += self.records
        return self.records

    def end(self) -> list[int]:
        self.recording -= 1
        return self.events

    def iteration(self, curve: Curve, steps: Sequence[tuple[str, int, int]], *, repeats: bool = True) -> list[int]:
        """Return the room at each point."""
        found = []
        for position, (name, allocated, freed) in enumerate(steps):
            curve.come(name, position)
            found.append(curve.room_bytes[curve.at] if curve.is_expected else 0)
            self.events += [allocated] * (allocated > 0) + [-freed] * (freed > 0)
            self.used += allocated - freed
            self.ever += allocated
            self.operations += (allocated > 0) + (freed > 0)
        curve.end(repeats=repeats)
        return found


def started(iterations: int = 0, *, records: bool = False) -> tuple[Model, Curve]:
    model, curve = Model(records=records), Curve()
    curve.read, curve.history = model.read, model
    for _ in range(iterations):
        model.iteration(curve, FORWARD_AND_BACKWARD)
    return model, curve


FORWARD_AND_BACKWARD = [
    ("f0", 4, 0),
    ("f1", 4, 0),
    ("f2", 5, 1),
    ("b2", 3, 8),
    ("b1", 2, 6),
    ("b0", 1, 4),
    ("step", 0, 0),
]
"""In use: 0, 4, 8, 12, 7, 3, 0. More at once behind f2 (13), b2 (15), b1 (9), b0 (4)."""


def test_room_is_what_is_left_below_the_peak_up_to_the_next_point() -> None:
    model, curve = started()
    assert model.iteration(curve, FORWARD_AND_BACKWARD, repeats=False) == [0] * 7
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [0] * 7
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [0] * 7  # read
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [8, 4, 0, 0, 3, 8, 12]


def test_what_is_in_use_at_once_is_known_where_the_allocator_tells() -> None:
    model, curve = started(records=True)
    first = [("f0", 4, 0), ("f1", 0, 0), ("loss", 0, 0), ("b1", 0, 4), ("b0", 0, 0)]
    for _ in range(3):
        assert model.iteration(curve, first) == [0] * 5 or curve.room_bytes
    assert model.iteration(curve, first) == [0, 0, 0, 0, 4]
    model, curve = started(records=True)
    for _ in range(4):
        found = model.iteration(curve, FORWARD_AND_BACKWARD)
        model.events.append(2)  # and gone again, at the end of the iteration
        model.events.append(-2)
        model.operations += 2
    assert found == [15 - 4, 15 - 8, 15 - 13, 0, 15 - 9, 15 - 4, 15 - 2]


def test_what_is_freed_right_behind_a_point_is_not_in_use_with_what_comes_then() -> None:
    random_events = random.Random(0)
    for _ in range(200):
        events = [random_events.choice([-3, -2, -1, 1, 2, 3]) for _ in range(random_events.randint(0, 12))]
        cuts = [0, *sorted(random_events.randint(0, len(events)) for _ in range(3)), len(events)]
        readings = [Reading(10, 0, 7 + cut) for cut in cuts]
        found = transients(readings, events)
        assert found == [
            max(sum(events[begin:end]) for end in range(begin, behind + 1))
            for begin, behind in itertools.pairwise(cuts)
        ]
        assert transients(readings, [*events, 1]) is None


def test_a_steady_iteration_reads_once() -> None:
    model, curve = started(4)
    model.reads = 0
    model.iteration(curve, FORWARD_AND_BACKWARD)
    assert model.reads == 1


def test_other_points_have_no_room_and_the_known_ones_keep_theirs() -> None:
    model, curve = started(4)
    evaluated = [*FORWARD_AND_BACKWARD[:2], ("evaluation", 0, 0), *FORWARD_AND_BACKWARD[2:]]
    assert model.iteration(curve, evaluated) == [8, 4, 0, 0, 0, 3, 8, 12]


def test_one_point_may_be_missing_and_more_have_the_iteration_read_again() -> None:
    model, curve = started(4)
    # An evaluation has gathered the root.
    assert model.iteration(curve, FORWARD_AND_BACKWARD[1:]) == [4, 0, 0, 3, 8, 12]
    shorter = [*FORWARD_AND_BACKWARD[:2], *FORWARD_AND_BACKWARD[4:]]
    assert model.iteration(curve, shorter)[2:] == [0] * 3
    model.iteration(curve, shorter)
    assert model.iteration(curve, shorter)[-1] > 0


def test_an_iteration_that_is_not_as_the_one_before_ends_all_room() -> None:
    model, curve = started(4)
    model.iteration(curve, FORWARD_AND_BACKWARD, repeats=False)
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [0] * 7


@pytest.mark.parametrize("factor", [2, 3])
def test_another_batch_has_another_curve_once_it_has_come_twice(factor: int) -> None:
    model, curve = started(4)
    larger = [(name, factor * allocated, factor * freed) for name, allocated, freed in FORWARD_AND_BACKWARD]
    assert model.iteration(curve, larger) == [8, 4, 0, 0, 3, 8, 12]
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [8, 4, 0, 0, 3, 8, 12]  # it was only one
    for _ in range(3):
        model.iteration(curve, larger)
    assert model.iteration(curve, larger) == [factor * room for room in (8, 4, 0, 0, 3, 8, 12)]


def test_what_others_take_is_shared() -> None:
    model, curve = started(4)
    model.optimizers = 2
    for _ in range(2):
        model.iteration(curve, FORWARD_AND_BACKWARD)
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [4, 2, 0, 0, 1, 4, 6]


def test_statistics_that_are_reset_make_no_curve() -> None:
    model, curve = started(2)
    model.ever = -100
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [0] * 7
    model.iteration(curve, FORWARD_AND_BACKWARD)
    assert model.iteration(curve, FORWARD_AND_BACKWARD)[0] == 8


def test_the_history_ends_where_the_items_are_others() -> None:
    model, curve = started(records=True)
    model.iteration(curve, FORWARD_AND_BACKWARD)
    curve.come("f0", 0)
    assert model.recording == 1
    curve.forget()
    curve.forget()
    assert model.recording == 0


def test_a_loop_whose_points_are_always_others_is_seldom_read() -> None:
    """Each reading keeps the allocator's history, and each curve has its cache emptied, which waits for the device."""
    model, curve = started()
    learnt = 0
    for at in range(200):
        model.iteration(curve, [*FORWARD_AND_BACKWARD[:-1] * (at % 2), *FORWARD_AND_BACKWARD])
        learnt += curve.is_new
        curve.is_new = False
    assert learnt < 12
    assert not curve.is_awaited
    for _ in range(60):
        model.iteration(curve, FORWARD_AND_BACKWARD)
    assert model.iteration(curve, FORWARD_AND_BACKWARD) == [8, 4, 0, 0, 3, 8, 12]


def test_a_loop_that_never_repeats_itself_is_not_waited_for() -> None:
    model, curve = started()
    assert curve.is_awaited
    for _ in range(20):
        model.iteration(curve, FORWARD_AND_BACKWARD, repeats=False)
    assert not curve.is_awaited


def test_shares() -> None:
    pools = [Pool(4, 2, most=3), Pool(3, 2, most=9)]
    assert [shares(room, pools, [0, 0]) for room in (3, 4, 10, 100)] == [[0, 1], [1, 0], [1, 2], [1, 7]]
    assert [shares(room, pools, [0, 2]) for room in (0, 2, 3, 6, 9, 10, 100)] == [
        *([0, -2], [0, -2], [0, -1], [0, 0], [0, 1], [1, 0], [1, 7]),
    ]


def programs() -> Iterator[tuple[list[Use], list[int], Pool, list[int]]]:
    for seed in range(300):
        rng = random.Random(seed)
        pool = Pool(1, 1)
        items = [Item(str(number), 1, pool=pool) for number in range(rng.randint(1, 6))]
        cycle = [
            Use(at, tuple(rng.sample(items, rng.randint(1, min(2, len(items)))))) for at in range(rng.randint(1, 8))
        ]
        positions = [0, *sorted(rng.randint(0, len(cycle)) for _ in range(rng.randint(0, 7)))]
        yield cycle, positions, pool, [rng.randint(0, 4) for _ in positions]


def test_what_is_loaded_within_its_lead_need_not_leave_before_its_use() -> None:
    """Whatever is used between is there as well; one point earlier, there is a point at which it is one too many."""
    for cycle, positions, pool, most in programs():
        found = leads(cycle, positions, pool, most, behind=0)
        count = len(positions)
        uses = [*cycle, *cycle]  # the second one is the iteration of the use
        begins = [*positions, *(at + len(cycle) for at in positions)]
        for at, use in enumerate(cycle):
            first = point_of(positions, at) + count
            there = [
                len({item for one in uses[begins[point] : at + len(cycle) + 1] for item in one.items})
                <= most[point % count]
                for point in range(first, first - count, -1)
            ]
            assert found[at] == len(list(itertools.takewhile(bool, there))), (use, positions, most)


def test_loads_leave_blocks_to_the_stores_of_the_last_updates() -> None:
    """Four points of two updates each, and room for six beside one in transit: two of them are left to stores."""
    pool = Pool(1, 1, transit=1)
    cycle = [Use(at, (Item(str(at), 1, pool=pool),)) for at in range(8)]
    positions = [0, 2, 4, 6]
    assert leads(cycle, positions, pool, [6] * 4, behind=0)[7] == 3
    assert leads(cycle, positions, pool, [6] * 4, behind=1)[7] == 2
    assert leads(cycle, positions, pool, [2] * 4, behind=1)[7] == 0
    pool.transit = 2
    assert leads(cycle, positions, pool, [2] * 4, behind=1)[7] == 1
    gathers = [use if at % 2 else Use(at, use.items, gathers=True) for at, use in enumerate(cycle)]
    assert leads(gathers, positions, pool, [6] * 4, behind=1)[7] == 2
    assert leads(gathers, positions, pool, [5] * 4, behind=1)[7] == 2
