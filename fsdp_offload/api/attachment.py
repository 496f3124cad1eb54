"""Attachments: what attaching adds to an optimizer, where it is kept, and ``step`` functions that others captured."""

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.engine import Engine, inside
from ..core.hooks import ModelHooks
from ..model.parking import ParkedParameters
from ..optimizers.shared_values import ENGINE_ATTRIBUTE
from ..state.mapping import OffloadedState


@dataclass(eq=False)
class Attachment:
    """Additions to an optimizer when it was attached, and what undoes them.

    Attributes:
        parked: parameters that leave the device with the state.
        until_first_step: ends what looks until then whether the optimizer was attached too early.
        hook_steps: steps since a hook was wrapped to reload it; ``None``: none was.
    """

    engine: Engine
    model: "weakref.ref[nn.Module] | None"
    undo_step: list[Callable[[], None]]
    bypass_guard: RemovableHandle
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

    def tell_if_never_reloaded(self) -> None:
        """After a step: warn if the training loop never calls the hook that ``reload_before`` has wrapped."""
        if self.hook_steps is None or self.hook_steps >= HOOK_IS_CALLED:
            return
        self.hook_steps += 1
        if self.hook_steps == HOOK_IS_CALLED:
            warnings.warn(
                f"reload_before() has wrapped a hook that was not called in {HOOK_IS_CALLED} steps: the training loop "
                "does not use it, and loads begin in step() only. Bind the wrapper where the loop looks for it.",
                stacklevel=2,
            )


HOOK_IS_CALLED = 3
"""So many steps without a call are told, and then no more; a call counts as them."""


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
    """Yield ``optimizer`` and what is inside it, as far as these are wrappers of accelerate, Lightning or Fabric.

    The last one is the real optimizer. Lightning's and Fabric's wrappers are instances of its class as well.
    """
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
    """Let what captured ``optimizer.step`` before attaching call the new step. Returns what undoes it.

    A scheduler replaces ``optimizer.step`` by a function that has captured the class's old ``step`` in its closure, and
    so would train past us without a word. accelerate's wrapper keeps the old ``step`` to put it back after a scaler.
    """
    undo: list[Callable[[], None]] = []

    def is_old(method: object) -> bool:
        return isinstance(method, types.MethodType) and method.__self__ is optimizer and method.__func__ is old

    pending = [optimizer.__dict__.get("step")]
    for wrapper in wrappers:
        for name, value in list(vars(wrapper).items()):
            if is_old(value):
                setattr(wrapper, name, types.MethodType(new, optimizer))
                undo.append(functools.partial(setattr, wrapper, name, value))
            else:
                pending.append(value)
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        for cell in function.__closure__ or ():
            content = cell.cell_contents
            if content is old or is_old(content):
                cell.cell_contents = new if content is old else types.MethodType(new, optimizer)
                undo.append(functools.partial(setattr, cell, "cell_contents", content))
            else:
                pending.append(content)
    return undo
