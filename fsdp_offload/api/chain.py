"""Several optimizers inside one object of a framework: offloaded together, and sent through the phases together."""

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ..model.parking import ParkedParameters, owns_its_storage
from ..optimizers.transformer_engine import keep_unread_masters
from .attachment import HOOK_IS_CALLED, attached, attachment_of
from .wrapped import masters_in, optimizers_in, refuse_own_offload, savers_of_all_masters


def offload_each(
    optimizer: Any, offload: Callable[[Optimizer], Any], remove: Callable[[Optimizer], Any], limit_bytes: int | None
) -> None:
    """Call ``offload`` with every optimizer inside ``optimizer``; if one fails, those before it are removed again.

    They share streams, as all on a device do. fp32 masters that are their parameters get a place to go to.
    """
    refuse_own_offload(optimizer)
    for inner in savers_of_all_masters(optimizer):
        keep_unread_masters(inner)
    done: list[Optimizer] = []
    try:
        for inner in optimizers_in(optimizer):
            offload(inner)
            done.append(inner)
    except BaseException:
        for inner in reversed(done):
            remove(inner)
        raise
    for inner, masters in masters_in(optimizer).items():
        own = [master for master in masters if owns_its_storage(master)]
        if own:
            attached(inner).parked = ParkedParameters(own, limit_bytes)


def offload_states(optimizer: Any) -> None:
    """Call ``offload_states()`` of every offloaded optimizer in ``optimizer``: Megatron's, or a chain of them.

    fp32 masters that are parameters of Megatron's inner optimizer leave with the state; they may be used until
    :func:`release_states`. A TypeError says that one of the optimizers is not offloaded, here and below.

    Raises:
        MemoryError: there is not enough host memory for what leaves.
    """
    for inner in _offloaded(optimizer, "offload_states"):
        inner.offload_states()


def release_states(optimizer: Any) -> None:
    """Call ``release_states()`` of every offloaded optimizer in ``optimizer``."""
    for inner in _offloaded(optimizer, "release_states"):
        inner.release_states()


def reload_states(optimizer: Any, *, free_host_memory: bool = False) -> None:
    """Call ``reload_states()`` of every offloaded optimizer in ``optimizer``; there has to be room on the device."""
    for inner in _offloaded(optimizer, "reload_states"):
        inner.reload_states(free_host_memory=free_host_memory)


def _offloaded(optimizer: Any, function: str) -> list[Any]:
    found = optimizers_in(optimizer)
    for inner in found:
        if attachment_of(inner) is None:
            raise TypeError(
                f"{function}: this {type(inner).__name__} is not offloaded; call offload_optimizer() first."
            )
    return found


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
    for target in _offloaded(optimizer, "reload_before"):
        attachment = attached(target)
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
