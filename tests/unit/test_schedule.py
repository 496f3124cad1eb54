"""Schedules: strings in, strings out; and the proof that a schedule meets no hazard is held to an independent one."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_offload.planning.ring_layout import Placement, divide_ring, place_in_ring
from fsdp_offload.planning.schedule import (
    Action,
    BucketStep,
    Wait,
    build_schedule,
    check_schedule,
    format_schedule,
    parse_schedule,
)

Placements = dict[int, Placement]


def places(*nbytes: int, ring_bytes: int) -> Placements:
    return dict(enumerate(place_in_ring(nbytes, [ring_bytes])))


def schedule(*steps: str, placements: Placements) -> str:
    """The schedule of buckets given as ``"3"`` (load, update, store), ``"3 new"`` or ``"3 resident"``."""
    parsed = []
    for text in steps:
        bucket, _, kind = text.partition(" ")
        parsed.append(BucketStep(int(bucket), load=kind == "", store=kind != "resident"))
    actions = build_schedule(parsed, placements)
    check_schedule(actions, placements)
    return format_schedule(actions)


# The ring ------------------------------------------------------------------------------------------------------------


def test_buckets_lie_in_the_ring_one_behind_the_other_round_and_round() -> None:
    assert place_in_ring([10, 10, 10, 5], [30]) == [(0, 10, 0), (10, 10, 0), (20, 10, 0), (0, 5, 0)]
    assert place_in_ring([20, 20, 5], [30]) == [(0, 20, 0), (0, 20, 0), (20, 5, 0)]


def test_a_bucket_as_large_as_the_ring_or_larger_begins_at_its_start() -> None:
    assert place_in_ring([5, 30, 5], [30]) == [(0, 5, 0), (0, 30, 0), (0, 5, 0)]
    assert place_in_ring([5, 40, 5], [30]) == [(0, 5, 0), (0, 40, 0), (0, 5, 0)]


def test_no_bucket_lies_across_the_border_of_two_blocks() -> None:
    found = place_in_ring([10, 5, 10, 20, 5], [15, 20])
    assert found == [(0, 10, 0), (10, 5, 0), (0, 10, 1), (0, 20, 1), (0, 5, 0)]


def test_a_block_that_is_too_small_is_passed_over() -> None:
    assert place_in_ring([10, 20, 20, 10], [20, 10, 20]) == [(0, 10, 0), (0, 20, 2), (0, 20, 0), (0, 10, 1)]


def test_blocks_are_cut_to_the_buckets_where_all_have_a_place() -> None:
    assert divide_ring([10, 5, 10, 20, 5], 50, 15) == (15, 10, 20, 5)
    assert divide_ring([10, 5, 10, 20, 5], 50, 50) == (50,)
    assert divide_ring([], 0, 15) == ()


def test_small_buckets_pass_beside_large_ones_where_not_all_have_a_place() -> None:
    sizes = [320, 320, 320, 10] * 3
    blocks = divide_ring(sizes, 1400, 320)
    assert blocks == (330,) * 4
    for order in (sizes, sizes[1:], sizes[::-1]):
        large = [place.block for place in place_in_ring(order, blocks) if place.nbytes == 320]
        assert len(set(large[:4])) == len(set(large[4:8])) == 4


def test_a_large_bucket_has_a_block_where_not_all_have_a_place() -> None:
    assert divide_ring([320, 320, 700, 320], 1400, 320) == (700, 330, 330)
    assert divide_ring([320, 320, 320], 325, 320) == (325,)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 200), st.integers(1, 40), st.randoms())
def test_any_bucket_has_a_place_within_one_block(
    sizes: list[int], ring_bytes: int, block_bytes: int, shuffle: random.Random
) -> None:
    ring_bytes = min(sum(sizes), max([ring_bytes, *sizes]))
    blocks = divide_ring(sizes, ring_bytes, block_bytes)
    assert sum(blocks) <= ring_bytes
    assert all(block <= max(block_bytes + 1, *sizes) for block in blocks)
    if ring_bytes == sum(sizes):
        assert sum(blocks) == ring_bytes
        found = place_in_ring(sizes, blocks)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))
    shuffle.shuffle(sizes)
    for place in place_in_ring(sizes, blocks):
        assert 0 <= place.offset <= place.offset + place.nbytes <= blocks[place.block]


def test_placements_overlap_when_they_share_a_byte() -> None:
    assert Placement(0, 10).overlaps(Placement(9, 1))
    assert not Placement(0, 10).overlaps(Placement(10, 10))
    assert not Placement(0, 10).overlaps(Placement(5, 0))
    assert not Placement(0, 10).overlaps(Placement(0, 10, block=1))


def test_neighbours_in_a_step_pass_beside_each_other_whatever_their_numbers() -> None:
    order = [3, 7, 11, 15]  # with places by number, in a ring of four, each would wait for the one before it
    placements = dict(zip(order, place_in_ring([10] * 4, [40]), strict=True))
    text = schedule("3", "7", "11", "15", placements=placements)
    assert text.startswith("L3<S3' L7<S7' L11<S11' L15<S15' U3<L3")


# Whole schedules -----------------------------------------------------------------------------------------------------


def test_one_bucket_waits_for_its_own_last_store() -> None:
    assert schedule("0", placements=places(10, ring_bytes=10)) == "L0<S0' U0<L0 S0<U0"


def test_everything_that_fits_is_loaded_before_the_first_update() -> None:
    text = schedule("0", "1", "2", placements=places(10, 10, 10, ring_bytes=30))
    assert text == "L0<S0' L1<S1' L2<S2' U0<L0 S0<U0 U1<L1 S1<U1 U2<L2 S2<U2"


def test_the_ring_goes_round_and_each_load_is_issued_right_behind_the_store_that_makes_room() -> None:
    text = schedule("0", "1", "2", "3", placements=places(10, 10, 10, 10, ring_bytes=20))
    assert text == "L0<S0'<S2' L1<S1'<S3' U0<L0 S0<U0 L2<S0 U1<L1 S1<U1 L3<S1 U2<L2 S2<U2 U3<L3 S3<U3"


def test_a_ring_of_one_bucket_runs_them_one_after_the_other() -> None:
    text = schedule("0", "1", placements=places(10, 10, ring_bytes=10))
    assert text == "L0<S0'<S1' U0<L0 S0<U0 L1<S0 U1<L1 S1<U1"


def test_a_load_over_two_places_waits_for_the_later_of_the_two_stores() -> None:
    text = schedule("0", "1", "2", placements=places(10, 10, 20, ring_bytes=20))
    assert text == "L0<S0'<S2' L1<S1'<S2' U0<L0 S0<U0 U1<L1 S1<U1 L2<S1 U2<L2 S2<U2"


def test_state_that_is_created_is_not_loaded_and_its_update_waits_for_room() -> None:
    text = schedule("0 new", "1 new", "2 new", placements=places(10, 10, 10, ring_bytes=20))
    assert text == "U0<S0'<S2' S0<U0 U1<S1' S1<U1 U2<S0 S2<U2"


def test_resident_state_is_only_updated() -> None:
    assert schedule("1 resident", "0", placements={0: Placement(0, 10)}) == "L0<S0' U1 U0<L0 S0<U0"


def test_a_bucket_left_out_now_may_still_be_stored_by_an_earlier_step() -> None:
    placements = places(10, 10, 10, 10, ring_bytes=20)
    assert schedule("0", "1", "3", placements=placements) == (
        "L0<S0'<S2' L1<S1'<S3' U0<L0 S0<U0 U1<L1 S1<U1 L3<S1 U3<L3 S3<U3"
    )
    assert schedule("2", placements=placements) == "L2<S0'<S2' U2<L2 S2<U2"


def test_a_bucket_larger_than_the_ring_has_it_alone() -> None:
    text = schedule("0", "1", "2", placements=places(10, 40, 10, ring_bytes=30))
    assert text == "L0<S0'<S1'<S2' U0<L0 S0<U0 L1<S0 U1<L1 S1<U1 L2<S1 U2<L2 S2<U2"


def test_no_bucket_at_all_is_an_empty_schedule() -> None:
    assert schedule(placements=places(10, ring_bytes=10)) == ""


# Text ----------------------------------------------------------------------------------------------------------------

quick = settings(max_examples=50, deadline=None)  # no deadline: cores are shared with other tests

kinds = st.sampled_from("LUS")
waits = st.builds(Wait, kinds, st.integers(0, 200), st.booleans())
actions_ = st.lists(st.builds(Action, kinds, st.integers(0, 200), st.lists(waits, max_size=3).map(tuple)), max_size=8)


@quick
@given(actions_)
def test_what_is_printed_parses_to_the_same(actions: list[Action]) -> None:
    assert parse_schedule(format_schedule(actions)) == actions


@pytest.mark.parametrize("word", ["X3", "L", "3", "L3<", "L3<X0", "L3'", "L3<S0''", "l3", "L-1", "L3<<S0"])
def test_a_word_that_is_no_action_is_an_error_that_names_it(word: str) -> None:
    with pytest.raises(ValueError, match="not an action") as error:
        parse_schedule(f"L0 {word}")
    assert repr(word) in str(error.value)


# The proof -----------------------------------------------------------------------------------------------------------

TWO = {0: Placement(0, 10), 1: Placement(0, 10)}


@pytest.mark.parametrize(
    ("text", "placements", "complaint"),
    [
        pytest.param("L0 U0<L0 S0<U0", {0: Placement(0, 10)}, "S0'", id="reads a home that is being written"),
        pytest.param("L0<S0' U0 S0<U0", {0: Placement(0, 10)}, "before L0", id="updates before the load"),
        pytest.param("L0<S0' U0<L0 S0", {0: Placement(0, 10)}, "before U0", id="stores before the update"),
        pytest.param("L0<S0' S0<L0", {0: Placement(0, 10)}, "before U0", id="stores what was never updated"),
        pytest.param("L0<S0' U0<L0", {0: Placement(0, 10)}, "never stored", id="leaves the ring full"),
        pytest.param("L0<S0' U0<L0 S0<U0", TWO, "S1'", id="overwrites another bucket of an earlier step"),
        pytest.param("U0<S0' S0<U0", TWO, "S1'", id="creates over another bucket of an earlier step"),
        pytest.param(
            "L0<S0'<S1' U0<L0 S0<U0 L1 U1<L1 S1<U1", TWO, "S0 has", id="overwrites another bucket of this step"
        ),
        pytest.param(
            "L0<S0'<S1' L1<S0'<S1' U0<L0 S0<U0 U1<L1<S0 S1<U1", TWO, "S0 has", id="loads over what is not yet updated"
        ),
        pytest.param("U0<L0 L0 S0<U0", {0: Placement(0, 10)}, "not issued before", id="waits for what comes later"),
        pytest.param("L0<S0' U0<L0 S0<U0 L0<S0", {0: Placement(0, 10)}, "in this step", id="loads twice"),
        pytest.param("U0<S0' L0 S0<U0", {0: Placement(0, 10)}, "in this step", id="loads over the update"),
    ],
)
def test_each_hazard_is_found(text: str, placements: Placements, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^(action|bucket) \d") as error:
        check_schedule(parse_schedule(text), placements)
    message, _, shown = str(error.value).partition(", in ")
    assert complaint in message
    assert shown in (text, "")


class Case:
    """Buckets in a ring, and the ones that a step updates."""

    def __init__(
        self, sizes: list[int], ring_bytes: int, block_bytes: int, steps: list[BucketStep], resident: set[int]
    ) -> None:
        placed = [number for number in range(len(sizes)) if number not in resident]
        blocks = divide_ring(sizes, max(ring_bytes, *sizes), block_bytes)
        ring = place_in_ring([sizes[number] for number in placed], blocks)
        self.placements = dict(zip(placed, ring, strict=True))
        self.steps = steps
        self.actions = build_schedule(steps, self.placements)

    def __repr__(self) -> str:
        return f"{self.placements}: {format_schedule(self.actions)}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    resident = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    active = draw(st.lists(st.sampled_from(range(len(sizes))), unique=True).map(sorted))
    loaded = draw(st.lists(st.booleans(), min_size=len(active), max_size=len(active)))
    steps = [
        BucketStep(number, load=load and number not in resident, store=number not in resident)
        for number, load in zip(active, loaded, strict=True)
    ]
    steps.sort(key=lambda step: (step.store, step.bucket))
    return Case(sizes, draw(st.integers(1, 30)), draw(st.just(30) | st.integers(1, 15)), steps, resident)


@quick
@given(cases())
def test_what_is_built_passes_the_proof(case: Case) -> None:
    check_schedule(case.actions, case.placements)
    assert not race(case.actions, case.placements)


@quick
@given(cases())
def test_every_active_bucket_is_updated_once_in_order_and_moved_as_it_needs(case: Case) -> None:
    by_kind = {kind: [action.bucket for action in case.actions if action.kind == kind] for kind in "LUS"}
    assert by_kind["U"] == [step.bucket for step in case.steps]
    assert by_kind["L"] == [step.bucket for step in case.steps if step.load]
    assert by_kind["S"] == [step.bucket for step in case.steps if step.store]


@quick
@given(cases())
def test_a_schedule_without_a_wait_that_matters_is_refused(case: Case) -> None:
    for weaker in without_one_wait(case.actions):
        if race(weaker, case.placements):
            with pytest.raises(ValueError, match="may start before"):
                check_schedule(weaker, case.placements)
        else:
            check_schedule(weaker, case.placements)


def test_no_wait_of_a_schedule_is_superfluous() -> None:
    """In the ordinary case: whole buckets of one size. So the test above really removes waits that matter."""
    placements = places(*[10] * 7, ring_bytes=30)
    steps = [BucketStep(number, load=True, store=True) for number in range(7)]
    for weaker in without_one_wait(build_schedule(steps, placements)):
        assert race(weaker, placements), format_schedule(weaker)
        with pytest.raises(ValueError, match="may start before"):
            check_schedule(weaker, placements)


def without_one_wait(actions: list[Action]) -> list[list[Action]]:
    weaker = []
    for number, action in enumerate(actions):
        for wait in action.waits:
            fewer = action._replace(waits=tuple(other for other in action.waits if other != wait))
            weaker.append([*actions[:number], fewer, *actions[number + 1 :]])
    return weaker


def race(actions: list[Action], placements: Placements) -> bool:
    """Whether two actions that touch the same bytes are unordered. Every earlier step that may matter is tried.

    Brute force and on another road than the proof: whole steps are put before this one, the graph of what
    happens before what is closed transitively, and all pairs of accesses are compared.
    """
    orders = (
        list(itertools.permutations(placements))
        if len(placements) < 4
        else [
            tuple(placements),
            tuple(reversed(placements)),
            *(other_first(placements, number) for number in placements),
        ]
    )
    return any(unordered([*step_before(order), *actions], len(order) * 3, placements) for order in orders or [()])


def other_first(placements: Placements, last: int) -> tuple[int, ...]:
    return (*(number for number in placements if number != last), last)


def step_before(order: tuple[int, ...]) -> list[Action]:
    """A step that is right in itself: each bucket is moved when the one before it has gone."""
    actions = []
    for position, number in enumerate(order):
        behind = (Wait("S", order[position - 1]),) if position else ()
        actions += [
            Action("L", number, behind),
            Action("U", number, (Wait("L", number),)),
            Action("S", number, (Wait("U", number),)),
        ]
    return actions


def unordered(actions: list[Action], begin: int, placements: Placements) -> bool:
    before: list[set[int]] = []  # for each action the ones that have finished when it starts
    latest: dict[tuple[str, int], int] = {}
    in_order: dict[str, int] = {}
    for number, action in enumerate(actions):
        sources = {latest[wait[:2]] for wait in action.waits if wait[:2] in latest}
        sources |= {in_order[action.kind]} if action.kind in in_order else set()
        before.append(sources.union(*(before[source] for source in sources)))
        latest[action.kind, action.bucket] = in_order[action.kind] = number
    touched = [accesses(action, placements) for action in actions]
    for later in range(begin, len(actions)):
        for earlier in set(range(later)) - before[later]:
            if any(
                same_place(one[0], other[0]) and (one[1] or other[1])
                for one in touched[earlier]
                for other in touched[later]
            ):
                return True
    return False


Place = tuple[str, int, int]


def accesses(action: Action, placements: Placements) -> list[tuple[Place, bool]]:
    """The places that an action touches, and whether it writes them."""
    if action.bucket not in placements:
        return []
    place = placements[action.bucket]
    slot = (f"block {place.block}", place.offset, place.nbytes)
    home = ("home", action.bucket, 1)
    return {"L": [(home, False), (slot, True)], "U": [(slot, True)], "S": [(slot, False), (home, True)]}[action.kind]


def same_place(one: Place, other: Place) -> bool:
    return one[0] == other[0] and Placement(*one[1:]).overlaps(Placement(*other[1:]))
