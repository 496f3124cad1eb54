"""CPU time of the host in our hooks and in ``step()``: what launching costs, whatever the device then takes."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .record import median

_HOOKS = ("_before_gather", "_before_use", "_before_reduce", "_reduced")


class _Clock:
    """Adds up what the threads of an iteration spend in some functions; they never run at the same time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count the calls of ``function``, but not within each other."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, begin = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin
                self._inside = False

        return call


def host_times(
    optimizer: torch.optim.Optimizer, hooked: type, iterate: Callable[[], None], device: torch.device, repeats: int = 5
) -> dict[str, float]:
    """Measure the host in iterations that each begin on an idle device, so that no full queue makes it wait.

    Args:
        optimizer: whose ``step`` is called by ``iterate``.
        hooked: the class whose methods the hooks on a model call.
        iterate: one iteration.
        device: what is waited for before each.
        repeats: the median of so many.
    """
    hooks, steps = [], []
    for _ in range(repeats):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        in_hooks, in_step = _Clock(), _Clock()
        with ExitStack() as replaced:
            for name in _HOOKS:
                replaced.enter_context(_replaced(hooked, name, in_hooks.timed(getattr(hooked, name))))
            replaced.enter_context(_replaced(optimizer, "step", in_step.timed(optimizer.step)))
            iterate()
        hooks.append(in_hooks.seconds * 1e3)
        steps.append(in_step.seconds * 1e3)
    return {"host_hooks_ms": median(hooks), "host_step_ms": median(steps)}


@contextmanager
def _replaced(holder: Any, name: str, value: object) -> Iterator[None]:
    """Give ``holder`` another attribute of its own for a while."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
