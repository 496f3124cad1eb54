"""For tests of the command line in processes of its own."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def interrupts_reach_children() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
