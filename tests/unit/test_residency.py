"""How much to keep on the device: against hand-made iterations, and against computing the iteration anew."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload.planning.resident import (
    IterationTimes,
    expected_iteration,
    groups_to_keep,
    groups_to_keep_beside_gathers,
)
from fsdp_offload.planning.update_order import update_order


def iteration(
    layers: int, move_ms: float, layer_ms: float, final_every_ms: float = 0.0, *, in_good_order: bool = True
) -> IterationTimes:
    """Each layer is a group of one bucket; what is measured is what really happens with nothing on the device."""
    order = list(range(layers))
    final = {}
    if final_every_ms:
        final = {layer: final_every_ms * (layers - layer) for layer in order}
        order = update_order(final, dict.fromkeys(order, move_ms), order) if in_good_order else order[::-1]
    now_ms, updated = 0.0, {}
    for layer in order:
        now_ms = updated[layer] = max(now_ms, final.get(layer, 0.0)) + move_ms
    clock_ms, wanted = final_every_ms * layers, []
    for layer in range(layers):
        wanted.append(clock_ms)
        clock_ms = max(clock_ms, updated[layer]) + layer_ms
    return IterationTimes([{layer} for layer in range(layers)], wanted, updated, dict.fromkeys(updated, move_ms), final)


def test_nothing_is_kept_where_the_forward_is_longer_than_the_transfers() -> None:
    times = iteration(10, move_ms=5.0, layer_ms=6.0)
    assert times.stall_ms == 5.0  # the first bucket, which nothing can hide
    assert groups_to_keep(times, tolerance_ms=5.0) == (0, 5.0)
    assert groups_to_keep(times, tolerance_ms=0.1) == (1, 0.0)


def test_a_forward_of_half_the_length_hides_half_of_the_state() -> None:
    times = iteration(20, move_ms=10.0, layer_ms=5.0)
    kept, stall_ms = groups_to_keep(times, tolerance_ms=0.1)
    # k groups kept: the last of 20 - k is new after 10 (20 - k) ms, and wanted after 5 * 19.
    assert (kept, stall_ms) == (11, 0.0)
    assert groups_to_keep(times, tolerance_ms=15.0) == (9, 15.0)


# 20 layers, T = 200: the backward has 150, the forward 60.
IN_BACKWARD = iteration(20, move_ms=10.0, layer_ms=3.0, final_every_ms=7.5)


def test_in_the_backward_only_what_neither_of_them_hides_is_kept() -> None:
    kept, stall_ms = groups_to_keep(IN_BACKWARD, tolerance_ms=2.0)
    assert 0 < kept <= 3
    assert stall_ms <= 2.0


def test_what_the_arithmetic_does_not_explain_is_saved_on_the_link() -> None:
    late = iteration(20, move_ms=10.0, layer_ms=3.0, final_every_ms=7.5, in_good_order=False)
    unexplained_ms = late.stall_ms - IN_BACKWARD.stall_ms
    assert unexplained_ms > 20
    kept, stall_ms = groups_to_keep(late, tolerance_ms=2.0)
    assert unexplained_ms - 10.0 * kept <= 2.0 < unexplained_ms - 10.0 * (kept - 1)
    assert stall_ms <= 2.0


def test_a_link_that_is_always_busy_gets_time_to_spare() -> None:
    times = replace(IN_BACKWARD, window_ms=210.0)
    kept, stall_ms = groups_to_keep(times, tolerance_ms=2.0)
    assert 10.0 * (20 - kept) <= 0.5 * 210.0 < 10.0 * (20 - kept + 1)
    assert stall_ms <= 2.0
    assert groups_to_keep(replace(times, window_ms=0.0), tolerance_ms=2.0)[0] == 20


def test_behind_a_forward_the_link_gets_less_time_to_spare() -> None:
    times = replace(iteration(20, move_ms=3.0, layer_ms=3.5), window_ms=70.0)
    kept, stall_ms = groups_to_keep(times, tolerance_ms=3.0)
    assert 3.0 * (20 - kept) <= 0.75 * 70.0 < 3.0 * (20 - kept + 1)
    assert stall_ms <= 3.0


def test_without_measurements_nothing_is_kept() -> None:
    assert groups_to_keep(IterationTimes([], [], {}, {}, {}), 0.0) == (0, 0.0)


@given(st.integers(1, 30), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 20))
def test_no_more_than_is_needed(layers: int, move_ms: float, layer_ms: float, tolerance_ms: float) -> None:
    times = iteration(layers, move_ms, layer_ms)
    kept, stall_ms = groups_to_keep(times, tolerance_ms)
    assert stall_ms <= tolerance_ms + 1e-6

    def stall_with(first: int) -> float:
        """The forward of the same layers, if those before ``first`` are new at once."""
        lost = 0.0
        for layer in range(first, layers):
            updated = move_ms * (layer - first + 1)
            lost += max(0.0, updated - (layer * layer_ms + lost))
        return lost

    assert abs(stall_with(kept) - stall_ms) < 1e-6
    if kept:
        assert stall_with(kept - 1) > tolerance_ms - 1e-6


def expected(
    layers: int, move_ms: float, layer_ms: float, final_every_ms: float = 0.0, **more: float
) -> IterationTimes:
    final = {layer: final_every_ms * (layers - layer) for layer in range(layers)} if final_every_ms else {}
    wanted = [final_every_ms * layers + layer_ms * layer for layer in range(layers)]
    moves = dict.fromkeys(range(layers), move_ms)
    return expected_iteration([{layer} for layer in range(layers)], wanted, moves, final, **more)


@given(
    layers=st.integers(1, 12),
    move_ms=st.floats(0.1, 20.0),
    layer_ms=st.floats(0.1, 20.0),
    final_every_ms=st.sampled_from([0.0, 2.0, 7.5]),
)
def test_an_expected_iteration_is_the_one_that_happens(
    layers: int, move_ms: float, layer_ms: float, final_every_ms: float
) -> None:
    happens = iteration(layers, move_ms, layer_ms, final_every_ms)
    said = expected(layers, move_ms, layer_ms, final_every_ms)
    assert said.updated_ms == happens.updated_ms
    assert abs(said.stall_ms - happens.stall_ms) < 1e-6
    assert groups_to_keep(said, 0.1) == groups_to_keep(replace(happens, wanted_ms=said.wanted_ms), 0.1)


def test_what_is_loaded_ahead_is_new_as_soon_as_it_may_be() -> None:
    assert expected(10, move_ms=5.0, layer_ms=6.0).stall_ms == 5.0
    assert expected(10, move_ms=5.0, layer_ms=6.0, ahead_ms=3.0).stall_ms == 2.0
    in_backward = expected(4, move_ms=5.0, layer_ms=1.0, final_every_ms=6.0, ahead_ms=5.0)
    assert in_backward.updated_ms == {3: 6.0, 2: 12.0, 1: 18.0, 0: 24.0}  # with their gradients, and not before
    assert in_backward.stall_ms == 0.0


# --- beside loads for gathers ----------------------------------------------------------------------------------------


def test_beside_gathers_as_much_stays_as_the_link_has_too_much_to_do() -> None:
    times = IterationTimes(
        groups=[{0, 1}, {2}, {3}],
        wanted_ms=[0, 1, 2],
        updated_ms={},
        move_ms={0: 5.0, 1: 5.0, 2: 7.0, 3: 7.0},
        final_ms={},
    )
    for late_ms, kept in ((0.0, 0), (0.1, 1), (10.0, 1), (10.1, 2), (17.0, 2), (17.1, 3), (1000.0, 3)):
        assert groups_to_keep_beside_gathers(times, late_ms) == kept
