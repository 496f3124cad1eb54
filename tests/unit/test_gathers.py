"""The order of gathers is learnt in the iteration before, and nobody is misled by what comes in between."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.planning.gathers import Gather, GatherOrder

GROUPS = 5
GATHERS = st.builds(Gather, st.integers(0, GROUPS - 1), st.booleans())
ITERATIONS = st.lists(GATHERS, min_size=1, max_size=20)


def forward(*groups: int) -> list[Gather]:
    return [Gather(group, False) for group in groups]


def backward(*groups: int) -> list[Gather]:
    return [Gather(group, True) for group in groups]


TRAINING = [*forward(0, 1, 2, 3), *backward(3, 2, 1)]


def learnt(iteration: Sequence[Gather]) -> GatherOrder:
    order = GatherOrder()
    note(order, iteration)
    order.step_ended()
    return order


def note(order: GatherOrder, gathers: Sequence[Gather], *, counts: bool = True) -> None:
    for gather in gathers:
        order.note(gather, counts=counts)


def test_nothing_is_known_at_first() -> None:
    order = GatherOrder()
    note(order, TRAINING)
    assert not list(order.upcoming())
    assert order.distance(0) == math.inf
    assert not order.expects(Gather(0, False))
    assert not order.begins_with(0, [1], 100)


@given(ITERATIONS, st.data())
def test_what_is_upcoming_is_the_rest_of_the_iteration_before(iteration: list[Gather], data: st.DataObject) -> None:
    order = learnt(iteration)
    done = data.draw(st.integers(0, len(iteration)))
    note(order, iteration[:done])
    rest = iteration[done:]
    assert list(order.upcoming()) == list(enumerate(rest, start=1))
    for group in range(GROUPS):
        later = [at for at, gather in enumerate([*rest, *iteration], start=1) if gather.group == group]
        assert order.distance(group) == min(later, default=math.inf)
    for gather in set(iteration):
        assert order.expects(gather) == (gather in rest)


@given(ITERATIONS, ITERATIONS)
def test_the_last_iteration_that_gathered_is_the_one_expected(first: list[Gather], second: list[Gather]) -> None:
    order = learnt(first)
    note(order, second)
    order.step_ended()
    order.step_ended()  # without any gather: nothing is learnt of it
    assert [gather for _, gather in order.upcoming()] == second


@given(ITERATIONS, st.lists(GATHERS, max_size=20))
def test_any_gather_may_come(iteration: list[Gather], others: list[Gather]) -> None:
    """Distances stay positive, and nearest first."""
    order = learnt(iteration)
    for gather in others:
        order.note(gather, counts=True)
        distances = [distance for distance, _ in order.upcoming()]
        assert distances == list(range(1, len(distances) + 1))
        assert all(order.distance(group) > 0 for group in range(GROUPS))


def test_an_evaluation_is_not_learnt_and_leaves_its_place() -> None:
    order = learnt(TRAINING)
    note(order, forward(0, 1, 2, 3), counts=False)
    assert [gather for _, gather in order.upcoming()] == backward(3, 2, 1)
    note(order, TRAINING)  # from the start again
    assert not list(order.upcoming())
    order.step_ended()
    assert [gather for _, gather in order.upcoming()] == TRAINING


def test_micro_batches_are_one_iteration() -> None:
    order = learnt(TRAINING * 2)
    note(order, TRAINING)
    assert [gather for _, gather in order.upcoming()] == TRAINING
    assert order.distance(0) == 1
    note(order, forward(0, 1))
    assert order.distance(0) == len(TRAINING) - 2 + 1
    assert order.expects(Gather(3, True))


def test_a_group_that_is_gathered_out_of_turn() -> None:
    """Those between are not waited for: the order goes on behind it."""
    order = learnt(TRAINING)
    order.note(Gather(2, False), counts=True)
    assert [gather for _, gather in order.upcoming()] == [*forward(3), *backward(3, 2, 1)]
    order.note(Gather(4, False), counts=True)  # in no iteration before
    assert next(order.upcoming()) == (1, Gather(3, False))


@pytest.mark.parametrize(("room_bytes", "groups"), [(9, []), (10, [0]), (29, [0]), (30, [0, 1]), (100, [0, 1, 2, 3])])
def test_what_the_next_iteration_begins_with(room_bytes: int, groups: list[int]) -> None:
    order = learnt(TRAINING)
    fitting = [group for group in range(GROUPS) if order.begins_with(group, [10, 20, 30, 40, 50], room_bytes)]
    assert fitting == groups


@given(ITERATIONS, st.lists(st.integers(0, 20), min_size=GROUPS, max_size=GROUPS), st.integers(0, 120))
def test_what_it_begins_with_fits(iteration: list[Gather], nbytes: list[int], room_bytes: int) -> None:
    order = learnt(iteration)
    fitting = [group for group in range(GROUPS) if order.begins_with(group, nbytes, room_bytes)]
    assert sum(nbytes[group] for group in fitting) <= room_bytes
    firsts = list(dict.fromkeys(gather.group for gather in iteration))
    assert set(fitting) == set(firsts[: len(fitting)])
