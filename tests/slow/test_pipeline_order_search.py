"""The long form of the search in ``tests/cpu/test_pipeline_order.py``, and what takes it long to find."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from tests.cpu.test_pipeline_order import FOUND_LATE, Do, Patch, Shape, assert_found, histories, play


@settings(max_examples=1000)
@given(histories)
def test_no_sequence_of_steps_meets_a_hazard(history: tuple[list[Shape], list[Do]]) -> None:
    play(*history)


@pytest.mark.parametrize("broken", FOUND_LATE)
def test_the_search_finds_what_is_broken(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    assert_found(broken, monkeypatch)
