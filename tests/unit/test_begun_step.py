"""The phases of a logical step: which follow which."""

import itertools
from typing import Any, cast

import pytest

from fsdp_offload.engine.begun_step import BegunStep, StepPhase

ALLOWED = {
    ("AHEAD", "BACKWARD"),
    ("AHEAD", "STEP"),
    ("BACKWARD", "AHEAD"),
    ("BACKWARD", "UPDATING"),
    ("BACKWARD", "STEP"),
    ("UPDATING", "STEP"),
    ("STEP", "ISSUED"),
    ("ISSUED", "STEP"),
}


def begun(phase: StepPhase) -> BegunStep:
    nothing = cast("Any", None)
    return BegunStep(nothing, nothing, nothing, nothing, 0, (), phase)


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(StepPhase, 2)))
def test_transitions(before: StepPhase, after: StepPhase) -> None:
    step = begun(before)
    if (before.name, after.name) in ALLOWED:
        step.enter(after)
        assert step.phase is after
    else:
        with pytest.raises(AssertionError, match="cannot go from"):
            step.enter(after)
        assert step.phase is before


@pytest.mark.parametrize("phase", list(StepPhase))
def test_staying_is_no_change(phase: StepPhase) -> None:
    step = begun(phase)
    step.enter(phase)
    assert step.phase is phase


def test_an_update_while_only_loads_may_run_is_a_mistake() -> None:
    """Its gradients are not there, and a step that loads ahead may be given up at any time."""
    with pytest.raises(AssertionError, match="cannot go from"):
        begun(StepPhase.AHEAD).note_updated(0)


def test_the_first_update_in_a_backward_is_noted() -> None:
    step = begun(StepPhase.BACKWARD)
    step.note_updated(3)
    assert (step.phase, step.has_updated, step.awaits_gradients) == (StepPhase.UPDATING, True, True)
    step.enter(StepPhase.STEP)
    step.note_updated(4)
    assert (step.phase, step.done, step.awaits_gradients) == (StepPhase.STEP, [3, 4], False)
