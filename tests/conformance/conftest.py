"""For the runners in one process; those on ranks have :func:`tests.conformance.oracle.compare` do it."""

from collections.abc import Iterator

import pytest

from tests.at_home import dropped_is_spoilt


@pytest.fixture(autouse=True)
def spoil_what_the_window_drops() -> Iterator[None]:
    with dropped_is_spoilt():
        yield
