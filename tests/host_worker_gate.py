"""Holds the thread that updates on the host, so that tests decide what happens before what."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fsdp_offload.cpu_update import host_worker

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
def closed(device: torch.device | None = None) -> Iterator[Gate]:
    """Within it, whatever is submitted waits until the gate is opened."""
    gate = Gate()
    _gates.append(gate)
    host_worker(device or torch.device("cpu")).updates.submit(gate.hold)
    assert gate.reached.wait(TIMEOUT_SECONDS)
    try:
        yield gate
    finally:
        gate.open()
        _gates.remove(gate)
