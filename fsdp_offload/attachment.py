"""What attaching adds to an optimizer, where it is kept, and the old ``step`` functions that others have captured."""

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .engine import Engine
from .overlap import Overlap
from .parking import ParkedParameters
from .update import ENGINE_ATTRIBUTE


@dataclass(eq=False)
class Attachment:
    """What attaching has added to an optimizer, and what undoes it."""

    engine: Engine
    model: "weakref.ref[nn.Module] | None"
    undo_step: list[Callable[[], None]]
    bypass_guard: RemovableHandle
    overlap: Overlap | None = None
    parked: ParkedParameters | None = None  # parameters that leave the device with the state
    stepping: bool = False
    told_no_gradient: bool = False
    has_stepped: bool = False
    reloads: int | None = None  # calls of the wrapped hook since the last warning was due; None: nothing is wrapped
    steps: int = 0


def attachment_of(optimizer: Optimizer) -> Attachment | None:
    """What has been added to ``optimizer``; ``None`` if it is not offloaded."""
    return cast("Attachment | None", getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE))


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside accelerate's wrapper."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def redirect_captured_step(optimizer: Optimizer, old: Any, new: Any) -> list[Callable[[], None]]:
    """Let wrappers around ``optimizer.step`` that were made before attaching call the new step.

    A scheduler replaces ``optimizer.step`` by a function that has captured the class's old ``step`` in its closure, and
    so would train past us without a word. Returns what undoes it.
    """
    undo: list[Callable[[], None]] = []
    pending = [optimizer.__dict__.get("step")]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        for cell in function.__closure__ or ():
            content = cell.cell_contents
            bound = isinstance(content, types.MethodType) and content.__self__ is optimizer
            if content is old or (bound and content.__func__ is old):
                cell.cell_contents = types.MethodType(new, optimizer) if bound else new
                undo.append(functools.partial(setattr, cell, "cell_contents", content))
            else:
                pending.append(content)
    return undo
