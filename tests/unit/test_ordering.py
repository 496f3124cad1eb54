"""The order of updates in a backward, against a simulation of the link and of the forward that follows."""

from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.planning.update_order import update_order


def test_as_they_become_final_where_the_link_keeps_up() -> None:
    assert update_order({3: 10, 2: 20, 1: 30, 0: 40}, dict.fromkeys(range(4), 5.0), range(4)) == [3, 2, 1, 0]


def test_what_the_forward_needs_last_waits_where_it_does_not() -> None:
    # While 7 moves (25), 6 and 5 become final: the newer one is taken. After the backward: as the forward needs them.
    final = {7: 10, 6: 20, 5: 30, 4: 40, 3: 50, 2: 60, 1: 70, 0: 80}
    assert update_order(final, dict.fromkeys(range(8), 25.0), range(8)) == [7, 5, 2, 0, 1, 3, 4, 6]


def test_a_backward_without_buckets() -> None:
    assert update_order({}, {}, []) == []


def test_buckets_of_one_group_are_final_together() -> None:
    final = {3: 10.0, 2: 10.0, 1: 50.0, 0: 50.0}
    order = update_order(final, dict.fromkeys(range(4), 5.0), range(4))
    assert order == [2, 3, 0, 1]


@given(
    st.lists(st.sampled_from([10.0, 20.0, 30.0, 40.0]), min_size=1, max_size=12),
    st.lists(st.floats(0, 30), min_size=12),
)
def test_ranges_of_a_parameter_stay_in_order(finals: list[float], moves: list[float]) -> None:
    """Buckets that become final together may hold ranges of one parameter: the last of them commits it."""
    final = dict(enumerate(finals))
    order = update_order(final, dict(enumerate(moves)), range(len(finals)))
    for at in set(finals):
        together = [bucket for bucket in order if final[bucket] == at]
        assert together == sorted(together)


def stall_ms(order: list[int], final: dict[int, float], move: dict[int, float], forward_ms: float) -> float:
    """How long the next forward, of equal layers, stands still when buckets move one after the other."""
    now, updated = 0.0, {}
    for bucket in order:
        now = max(now, final[bucket]) + move[bucket]
        updated[bucket] = now
    clock = end = max(final.values())
    for bucket in sorted(final):
        clock = max(clock, updated[bucket]) + forward_ms / len(final)
    return clock - end - forward_ms


layers = st.integers(2, 20)


@given(layers, st.floats(1, 100), st.floats(0.1, 3), st.floats(1, 100))
def test_never_slower_than_in_backward_order(count: int, interval: float, ratio: float, forward_ms: float) -> None:
    final = {bucket: interval * (count - bucket) for bucket in range(count)}
    move = dict.fromkeys(final, interval * ratio)
    order = update_order(final, move, range(count))
    assert sorted(order) == sorted(final)
    in_backward_order = stall_ms(sorted(final, reverse=True), final, move, forward_ms)
    # One transfer later at most: a bucket is taken only when it is final before its load begins.
    assert stall_ms(order, final, move, forward_ms) <= in_backward_order + interval * ratio + 1e-6


def test_hides_what_backward_and_forward_can_hold() -> None:
    """T = 1.3 B, F = B / 2: taking them in backward order would stall for 0.3 B."""
    count = 50
    final = {bucket: 2.0 * (count - bucket) for bucket in range(count)}
    move = dict.fromkeys(final, 2.6)
    assert stall_ms(sorted(final, reverse=True), final, move, 50.0) > 25
    assert stall_ms(update_order(final, move, range(count)), final, move, 50.0) < 6
