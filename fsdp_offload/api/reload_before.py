"""A framework's hook, wrapped so that an optimizer reloads while it runs: for loops that own their schedule."""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .attachment import Attachment, attachment_of
from .wrapped import optimizers_in


def reload_before(callback: Callable[..., Any] | None, optimizer: Optimizer) -> Callable[..., Any]:
    """Wrap a framework's hook that ends the gradients of a step, so that ``optimizer`` reloads while it runs.

    For hooks such as Megatron's ``finalize_model_grads_func``::

        config.finalize_model_grads_func = reload_before(config.finalize_model_grads_func, optimizer)

    The wrapper calls ``optimizer.reload_states()`` and then ``callback``, with whatever was bound into it, and returns
    what that returns. Wrapped again for the same optimizer, ``callback`` itself is returned. It does not keep the
    optimizer alive, and does nothing of its own once that is gone, or plain again. If no call of it ever comes, the
    optimizer warns in its third step.

    Args:
        callback: what has been bound; ``None`` if nothing has.
        optimizer: an offloaded one, or an object of Megatron's or a chain that holds some: then all reload. Of several
            others, wrap once for each.

    Raises:
        TypeError: ``optimizer`` is not offloaded.
    """
    *others, target = optimizers_in(optimizer)
    for other in others:
        callback = reload_before(callback, other)
    attachment = attachment_of(target)
    if attachment is None:
        raise TypeError(
            f"reload_before: this {type(target).__name__} is not offloaded; call offload_optimizer() first."
        )
    callback = _without_dead(callback)
    inner = callback
    while isinstance(inner, functools.partial):
        inner = inner.func
    wrapped_for = getattr(inner, _RELOADS, ())
    if not isinstance(wrapped_for, tuple):  # of an object that has every attribute
        wrapped_for = ()
    if callback is not None and any(reference() is target for reference in wrapped_for):
        if attachment.steps == 0:
            attachment.reloads = attachment.reloads or 0  # attached anew, after remove_offload()
        return callback
    reference = weakref.ref(target)
    attachment.reloads = attachment.steps = 0

    def reload_then_call(*args: Any, **kwargs: Any) -> Any:
        offloaded = reference()
        attachment = None if offloaded is None else attachment_of(offloaded)
        if attachment is not None:
            attachment.reloads = (attachment.reloads or 0) + 1
            offloaded.reload_states()  # type: ignore[union-attr]  # has it as long as it is attached
        return None if callback is None else callback(*args, **kwargs)

    if callback is not None:
        functools.update_wrapper(reload_then_call, callback)
    setattr(reload_then_call, _RELOADS, (*wrapped_for, reference))
    setattr(reload_then_call, _MYSELF, weakref.ref(reload_then_call))
    return reload_then_call


def _without_dead(callback: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Take the wrappers in front off a chain whose optimizers are gone."""
    while _is_ours(callback) and getattr(callback, _RELOADS)[-1]() is None:
        callback = getattr(callback, "__wrapped__", None)
    return callback


def _is_ours(callback: object) -> bool:
    """Return whether it is a wrapper made here; ``functools.wraps`` of somebody else copies the attributes of one."""
    myself = getattr(callback, _MYSELF, None)
    return isinstance(myself, weakref.ref) and myself() is callback


_RELOADS, _MYSELF = "_fsdp_offload_reloads", "_fsdp_offload_reload_before"


def tell_if_never_reloaded(attachment: Attachment) -> None:
    """Warn if the training loop never calls the hook that :func:`reload_before` wrapped."""
    if attachment.reloads is None:
        return
    attachment.steps += 1
    if attachment.steps == _STEPS_UNTIL_TOLD:
        if not attachment.reloads:
            warnings.warn(
                f"reload_before() has wrapped a hook that was not called in {_STEPS_UNTIL_TOLD} steps: the training "
                "loop does not use it, and loads begin in step() only. Bind the wrapper where the loop looks for it.",
                stacklevel=2,
            )
        attachment.reloads = None


_STEPS_UNTIL_TOLD = 3
