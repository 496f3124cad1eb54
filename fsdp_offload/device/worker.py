"""Runs calls in a thread that may wait for a device."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Worker:
    """Runs calls one after the other in a thread of its own, which ends when the worker is dropped."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        # At once: a wait in a thread without a device may make a context on the first GPU, on each rank of the host.
        self._pool.submit(use, device).result()

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        """Run ``call`` in the thread; or at once, if the main thread has ended and executors accept no more calls."""
        try:
            return self._pool.submit(call, *args)
        except RuntimeError:
            done = Future[None]()
            try:
                done.set_result(call(*args))  # type: ignore[func-returns-value]
            except Exception as error:  # noqa: BLE001  # raised where the result is asked for
                done.set_exception(error)
            return done


def use(device: torch.device) -> None:
    """Make ``device`` the calling thread's current one."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
