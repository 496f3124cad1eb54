"""Attachments: what attaching adds to an optimizer, where it is kept, and ``step`` functions that others captured."""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from ..core.engine import Engine, inside
from ..core.hooks import ModelHooks
from ..model.sleep import ParkedParameters
from ..optimizers.shared_values import ENGINE_ATTRIBUTE
from ..state.layout import params_of as params_of  # for the integrations, too
from ..state.mapping import OffloadedState


@dataclass(eq=False)
class Attachment:
    """Additions to an optimizer when it was attached, and what undoes them.

    Attributes:
        undo: takes off what was put on the optimizer, its model, and what has captured its ``step``.
        parked: parameters that leave the device with the state.
        until_first_step: ends what looks until then whether the optimizer was attached too early.
        hook_steps: steps since a hook was wrapped to reload it; ``None``: none was.
    """

    engine: Engine
    model: "weakref.ref[nn.Module] | None"
    undo: list[Callable[[], None]] = field(default_factory=list)
    hooks: ModelHooks | None = None
    parked: ParkedParameters = field(default_factory=ParkedParameters)
    stepping: bool = False
    told_no_gradient: bool = False
    has_loaded_inside_step: bool = False
    has_updated: bool = False
    until_first_step: list[Callable[[], None]] = field(default_factory=list)
    hook_steps: int | None = None

    def unwatch(self) -> None:
        """Stop looking for an optimizer that was attached too early."""
        for end in self.until_first_step:
            end()
        self.until_first_step.clear()

    def forget_reductions(self) -> None:
        """Gradients have been cleared without a step."""
        if self.hooks is not None:
            self.hooks.forget_reductions()


def attachment_of(optimizer: object) -> Attachment | None:
    """Return what attaching has added to ``optimizer``; ``None`` if it is not offloaded."""
    return cast("Attachment | None", getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE))


def attached(optimizer: Optimizer) -> Attachment:
    """Return what attaching has added to an optimizer that is offloaded."""
    attachment = attachment_of(optimizer)
    assert attachment is not None, "an OffloadedOptimizer always has one"
    return attachment


offloaded: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""All optimizers that are offloaded now, as far as somebody keeps them."""


def states_of(optimizer: Optimizer) -> OffloadedState:
    """Return ``optimizer.state``; another mapping that somebody put there is adopted."""
    if not isinstance(optimizer.state, OffloadedState):
        optimizer.state = OffloadedState(attached(optimizer).engine, optimizer.state)
    return optimizer.state


_WRAPPING_PACKAGES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def wrappers_around(optimizer: Optimizer) -> list[Optimizer]:
    """List wrappers of accelerate, Lightning and Fabric, which may have its class as well, and the real optimizer."""
    found = [optimizer]
    while any(base.__module__.partition(".")[0] in _WRAPPING_PACKAGES for base in type(found[-1]).__mro__):
        inner = inside(found[-1])
        if inner is None:
            break
        found.append(inner)
    return found


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a framework's wrapper."""
    return wrappers_around(optimizer)[-1]


def redirect_captured_step(
    optimizer: Optimizer, old: Any, new: Any, wrappers: Sequence[object] = ()
) -> list[Callable[[], None]]:
    """Let what captured ``optimizer.step`` before attaching call the new step; returns what undoes it.

    A scheduler has captured the class's old ``step`` in a closure; accelerate's wrapper puts it back after a scaler.
    """
    undo: list[Callable[[], None]] = []

    def is_old(method: object) -> bool:
        return isinstance(method, types.MethodType) and method.__self__ is optimizer and method.__func__ is old

    def exchange(holder: object, name: str, value: object) -> bool:
        if value is old or is_old(value):
            setattr(holder, name, new if value is old else types.MethodType(new, optimizer))
            undo.append(functools.partial(setattr, holder, name, value))
        return value is old or is_old(value)

    held = [(wrapper, name, value) for wrapper in wrappers for name, value in vars(wrapper).items()]
    pending = [
        vars(optimizer).get("step"),
        *(value for holder, name, value in held if not exchange(holder, name, value)),
    ]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            cells = [(cell, "cell_contents", cell.cell_contents) for cell in function.__closure__ or ()]
            pending += [value for cell, name, value in cells if not exchange(cell, name, value)]
    return undo
