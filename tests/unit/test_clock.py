"""Where a loop is, by the reductions that the hooks see."""

from fsdp_offload.model.clock import Clock


def run(clock: Clock, reductions: str) -> None:
    """One step with these reductions; ``|`` is a forward between two backwards."""
    for letter in reductions:
        if letter == "|":
            clock.forward()
        else:
            clock.reduced(int(letter))
    clock.step_ended()


def test_nothing_is_final_before_the_first_step_has_ended() -> None:
    clock = Clock(2)
    for number in (1, 0):
        clock.reduced(number)
        assert not clock.is_final(number)
    assert not clock.expects_reductions
    assert clock.order == [1, 0]
    clock.step_ended()
    assert clock.expects_reductions
    assert not clock.has_reduced
    assert clock.order == []
    assert clock.steps == 1


def test_gradients_are_final_with_the_last_reduction_of_the_steps_before() -> None:
    clock = Clock(2)
    run(clock, "10|10")
    seen = []
    for letter in "10|10":
        if letter == "|":
            clock.forward()
            assert not clock.in_backward
            continue
        last = clock.in_last_backward
        clock.reduced(int(letter))
        seen.append((last, clock.is_final(int(letter))))
    assert seen == [(False, False), (False, False), (True, True), (True, True)]


def test_a_step_with_fewer_reductions_does_not_make_the_next_one_early() -> None:
    clock = Clock(1)
    run(clock, "0|0")
    run(clock, "0")
    clock.reduced(0)
    assert not clock.is_final(0)
    clock.reduced(0)
    assert clock.is_final(0)


def test_what_is_long_ago_is_forgotten() -> None:
    clock = Clock(1)
    run(clock, "0|0")
    for _ in range(4):
        run(clock, "0")
    clock.reduced(0)
    assert clock.is_final(0)


def test_a_group_without_gradients_is_never_final() -> None:
    clock = Clock(2)
    run(clock, "1")
    assert clock.in_last_backward
    assert not clock.is_final(0)


def test_cleared_gradients_count_for_nothing() -> None:
    clock = Clock(2)
    run(clock, "10")
    clock.reduced(1)
    clock.forget_reductions()
    assert not clock.has_reduced
    clock.reduced(0)
    assert clock.order == [0]
    assert clock.is_final(0)
    assert not clock.is_final(1)


def test_a_module_that_is_used_twice_moves_to_its_last_reduction() -> None:
    clock = Clock(3)
    for number in (2, 1, 0, 2):
        clock.reduced(number)
    assert clock.order == [1, 0, 2]
