"""A framework's hook, wrapped once so that optimizers reload while it runs: for loops that own their schedule."""

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from .attachment import HOOK_IS_CALLED, attachment_of
from .wrapped import optimizers_in

_TARGETS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # wrapper → optimizers, in the order in which they reload


def reload_before(callback: Callable[..., Any] | None, optimizer: Optimizer) -> Callable[..., Any]:
    """Wrap a hook such as Megatron's ``finalize_model_grads_func``, so that ``optimizer`` reloads before it is called.

    ``callback`` is what has been bound, partials included, or ``None``. One that is wrapped is returned as it is, and
    reloads ``optimizer`` too: one of ours, or a chain or object of Megatron's that holds some; else a TypeError. Those
    that are gone or plain again are left alone, and one warns if no call has come by its third step.
    """
    hook: Any = callback
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    if callback is None or not isinstance(hook, FunctionType) or hook not in _TARGETS:
        targets: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        callback = hook = _wrapper_of(callback, targets)
        _TARGETS[hook] = targets
    for target in optimizers_in(optimizer):
        if (attachment := attachment_of(target)) is None:
            raise TypeError(
                f"reload_before: this {type(target).__name__} is not offloaded; call offload_optimizer() first"
            )
        if target not in _TARGETS[hook] or attachment.hook_steps is None:
            attachment.hook_steps = 0
        _TARGETS[hook][target] = None
    return callback


def _wrapper_of(callback: Callable[..., Any] | None, targets: WeakKeyDictionary[Any, Any]) -> Callable[..., Any]:
    def reload_then_call(*args: Any, **kwargs: Any) -> Any:
        for target in list(targets):
            if (attachment := attachment_of(target)) is not None:
                attachment.hook_steps = HOOK_IS_CALLED
                target.reload_states()
        return None if callback is None else callback(*args, **kwargs)

    return reload_then_call if callback is None else functools.update_wrapper(reload_then_call, callback)
