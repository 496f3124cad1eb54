"""Holds the thread that updates on the host, so that tests decide what happens before what."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_offload.engine.engine import engine_of

TIMEOUT_SECONDS = 60  # only a test that fails waits that long


class Gate:
    """Holds the thread until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_SECONDS)

    def open(self) -> None:
        self.opened.set()


_gates: list[Gate] = []


def is_closed() -> bool:
    """Whether any gate is."""
    return any(not gate.opened.is_set() for gate in _gates)


def open_all() -> None:
    for gate in _gates:
        gate.open()


@contextmanager
def closed(optimizer: object) -> Iterator[Gate]:
    """Within it, updates of ``optimizer`` on the host wait until the gate is opened."""
    gate = Gate()
    _gates.append(gate)
    engine = engine_of(optimizer)
    assert engine is not None
    assert engine.host is not None
    engine.host._updates.submit(gate.hold)
    assert gate.reached.wait(TIMEOUT_SECONDS)
    try:
        yield gate
    finally:
        gate.open()
        _gates.remove(gate)
