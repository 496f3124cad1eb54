"""Holds the thread that updates on the host, so that tests decide what happens before what."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fsdp_offload.host_worker import host_worker
from fsdp_offload.transfer import Mark

TIMEOUT_SECONDS = 60  # only a test that fails waits that long


class Gate:
    """A task that ends when it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def begin(self, memory: Tensor) -> None:
        pass

    def end(self) -> Mark | None:
        self.reached.set()
        assert self._open.wait(TIMEOUT_SECONDS)
        return None

    def open(self) -> None:
        self._open.set()


@contextmanager
def closed(device: torch.device | None = None) -> Iterator[Gate]:
    """Within it, whatever is submitted waits until the gate is opened."""
    gate = Gate()
    host_worker(device or torch.device("cpu")).submit(gate)
    assert gate.reached.wait(TIMEOUT_SECONDS)
    try:
        yield gate
    finally:
        gate.open()
