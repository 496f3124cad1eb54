"""Gives an optimizer another class, ``Offloaded<Name>``, and its own one back."""

import functools
import inspect
import types
import weakref
from abc import ABCMeta
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.engine import Engine
from ..optimizers.shared_values import ENGINE_ATTRIBUTE
from ..state.mapping import OffloadedState
from .attachment import Attachment, attachment_of, offloaded, redirect_captured_step
from .optimizer import OffloadedOptimizer


@functools.cache
def offloaded_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return ``Offloaded<Name>``: the mixin in front of the user's class; the same class every time."""
    # torch.compile(optimizer.step) must not trace into streams and events; it runs the step as it is.
    step = torch.compiler.disable(OffloadedOptimizer.step)

    def zero_grad(self: OffloadedOptimizer, *args: Any, **kwargs: Any) -> None:
        OffloadedOptimizer.zero_grad(self, *args, **kwargs)

    # GradScaler asks what step() takes, accelerate and Megatron-FSDP what zero_grad() does.
    step.__signature__ = inspect.signature(cls.step)
    zero_grad.__signature__ = inspect.signature(cls.zero_grad)  # type: ignore[attr-defined]
    name = f"Offloaded{cls.__name__}"
    own = {"__module__": cls.__module__, "_plain_class": cls, "step": step, "zero_grad": zero_grad}
    mixed: type[Optimizer] = types.new_class(name, (OffloadedOptimizer, cls), {}, lambda body: body.update(own))
    if _can_become(cls, mixed):
        return mixed
    # Python takes the layout from the first base. Where that of cls is another one (ABC, Generic[T] and other bases
    # with empty __slots__), only cls itself may come first, and our methods go before it in the class itself.
    methods = {key: value for key, value in vars(OffloadedOptimizer).items() if key not in _OF_EVERY_CLASS}
    mixed = types.new_class(name, (cls,), {}, lambda body: body.update(methods | own))
    if not _can_become(cls, mixed):
        raise ValueError(
            f"offload_optimizer: an instance of {cls.__name__} cannot become one of a subclass: its memory layout is "
            "fixed (__slots__, or a base written in C). Remove them, or move its step to a plain class."
        )
    OffloadedOptimizer.register(mixed)
    return mixed


_OF_EVERY_CLASS = frozenset(vars(ABCMeta("Empty", (Optimizer,), {})))


def _can_become(cls: type[Optimizer], other: type[Optimizer]) -> bool:
    """Return whether Python lets an instance of ``cls`` change its class to ``other``."""
    probe = object.__new__(cls)
    try:
        probe.__class__ = other
    except TypeError:
        return False
    return True


def attach(
    optimizer: Optimizer, engine: Engine, states: OffloadedState, model: nn.Module | None, wrappers: Sequence[object]
) -> Attachment:
    """Make ``optimizer`` an instance of its offloaded class, with ``states`` for its state."""
    plain_step = type(optimizer).step
    optimizer.__class__ = offloaded_class(type(optimizer))  # type: ignore[arg-type]  # a class has a hash
    optimizer.state = states
    attachment = optimizer.__dict__[ENGINE_ATTRIBUTE] = Attachment(
        engine,
        None if model is None else weakref.ref(model),
        redirect_captured_step(optimizer, plain_step, type(optimizer).step, wrappers),
        optimizer.register_step_pre_hook(_refuse_bypass),
    )
    offloaded.add(optimizer)
    return attachment


def detach(optimizer: Optimizer, attachment: Attachment) -> None:
    """Make ``optimizer`` an instance of its own class again, and take off whatever was put on it."""
    attachment.unwatch()
    if attachment.hooks is not None:
        attachment.hooks.remove()
    attachment.bypass_guard.remove()
    for undo in attachment.undo_step:
        undo()
    del optimizer.__dict__[ENGINE_ATTRIBUTE]
    offloaded.discard(optimizer)
    optimizer.__class__ = attachment.engine.cls


def _refuse_bypass(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Step pre-hook: the class's own step must not run on an offloaded optimizer."""
    attachment = attachment_of(optimizer)
    if attachment is not None and not attachment.stepping:
        raise RuntimeError(
            f"{attachment.engine.cls.__name__}.step was called past the offload: something captured it before "
            "offload_optimizer(). Attach first and wrap optimizer.step afterwards. Nothing has been changed."
        )
