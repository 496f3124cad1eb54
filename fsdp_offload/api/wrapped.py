"""Find optimizers inside objects of frameworks; offload, release and reload the state of several together.

Wrappers of accelerate, Lightning and Fabric hold an optimizer as ``optimizer`` or ``_optimizer``. Megatron's optimizers
hold one as ``optimizer``, and its ``ChainedOptimizer`` several as ``chained_optimizers``. Megatron's also list their
fp32 masters (``shard_fp32_from_float16_groups``, ``fp32_from_float16_groups``), and parameters that are fp32 in the
model (``shard_fp32_groups``). Read in ``megatron/core/optimizer`` of megatron-core 0.16.1; nothing of it is imported.
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..engine.engine import Engine, find_offloaded, inside
from ..engine.hooks import ModelHooks
from ..model.sleep import ParkedParameters
from ..optimizers.divided_step import ENGINE_ATTRIBUTE
from ..policy import check_is, tells
from ..state.layout import params_of


@dataclass(eq=False)
class Attachment:
    """Data that attaching adds to an optimizer."""

    engine: Engine
    model: "weakref.ref[nn.Module] | None"
    undo: list[Callable[[], None]] = field(default_factory=list)  # remove hooks, restore captured steps
    hooks: ModelHooks | None = None
    parked: ParkedParameters = field(default_factory=ParkedParameters)  # masters that leave the device with the state
    stepping: bool = False
    has_loaded_inside_step: bool = False
    expects_gradients: bool = True  # no step has found a gradient, and the user has not been warned
    has_others: bool = False  # groups were added, perhaps of parameters outside the model
    is_new: bool = True  # no step yet: perhaps it was attached too early, or another optimizer steps
    hook_steps: int | None = None  # steps since a hook was wrapped to reload it; None: no hook was


def attachment_of(optimizer: object) -> Attachment | None:
    """Return the attachment of ``optimizer``; ``None`` if it is not offloaded."""
    return cast("Attachment | None", getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE))


def attached(optimizer: Optimizer) -> Attachment:
    """Return the attachment of an offloaded optimizer."""
    attachment = attachment_of(optimizer)
    assert attachment is not None, "an OffloadedOptimizer always has one"
    return attachment


offloaded: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""The currently offloaded optimizers, held weakly."""


_WRAPPING_PACKAGES = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}


def wrappers_around(optimizer: Optimizer) -> list[Optimizer]:
    """List wrappers of accelerate, Lightning and Fabric, outermost first, and then the real optimizer."""
    found = [optimizer]
    while _WRAPPING_PACKAGES & {base.__module__.partition(".")[0] for base in type(found[-1]).__mro__}:
        inner = inside(found[-1])
        if inner is None:
            break
        found.append(inner)
    return found


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a known framework's wrapper; an offloaded one is found inside any wrapper."""
    return find_offloaded(optimizer) or wrappers_around(optimizer)[-1]


def redirect_captured_step(
    optimizer: Optimizer, old: Any, new: Any, wrappers: Sequence[object] = ()
) -> list[Callable[[], None]]:
    """Make objects that captured ``optimizer.step`` before attaching call the new step; return functions that undo it.

    A scheduler holds the class's old ``step`` in a closure; accelerate's wrapper holds it to restore it after a scaler.
    """
    undo: list[Callable[[], None]] = []

    def exchange(holder: object, name: str, value: object) -> bool:
        is_bound = isinstance(value, types.MethodType) and value.__self__ is optimizer and value.__func__ is old
        if value is old or is_bound:
            setattr(holder, name, types.MethodType(new, optimizer) if is_bound else new)
            undo.append(functools.partial(setattr, holder, name, value))
        return value is old or is_bound

    held = [(wrapper, name, value) for wrapper in wrappers for name, value in vars(wrapper).items()]
    pending = [vars(optimizer).get("step"), *(one[-1] for one in held if not exchange(*one))]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            filled = (cell for cell in function.__closure__ or () if cell != types.CellType())
            cells = [(cell, "cell_contents", cell.cell_contents) for cell in filled]
            pending += [one[-1] for one in cells if not exchange(*one)]
    return undo


# Megatron's objects and chains ----------------------------------------------------------------------------------------


def holders_in(optimizer: Any) -> dict[Optimizer, Any]:
    """Map torch's optimizers inside one of Megatron's or a chain to their holders; empty if it is one of torch's.

    torchtitan's container is a chain, although its class is derived from ``torch.optim.Optimizer``.
    """
    held = vars(optimizer).get("optimizers") if isinstance(optimizer, Optimizer) else None
    if isinstance(held, list) and held and all(isinstance(one, Optimizer) for one in held):
        return dict.fromkeys(held, optimizer)
    if isinstance(wrappers_around(optimizer)[-1], Optimizer) or not hasattr(optimizer, "zero_grad"):
        return {}
    chained = getattr(optimizer, "chained_optimizers", None)
    if not isinstance(chained, Iterable):
        chained = [unwrap(getattr(optimizer, "optimizer", None))]  # type: ignore[arg-type]  # None: nothing is trained
    found: dict[Optimizer, Any] = {}
    for one in chained:
        inner = {one: optimizer} if isinstance(one, Optimizer) else {} if one is optimizer else holders_in(one)
        found |= {each: holder for each, holder in inner.items() if each not in found}
    return found


def parts_of(optimizer: Any) -> list[Any]:
    """List torch's optimizers inside one of Megatron's or a chain; any other ``optimizer`` is the only element."""
    return list(holders_in(optimizer)) or [optimizer]


_ARGUMENTS = {
    "clip_grad_norm_": "optimizer, max_norm",
    "clip_with": "accelerator, optimizer",
    "get_optimizer_state_dict": "model, optimizer",
    "offload": "optimizer, model, policy",
    "set_optimizer_state_dict": "model, optimizer, state_dict",
    "reload_before": "callback, optimizer",
}
"""Arguments to write in messages, for functions that take more than an optimizer."""


def optimizers_in(optimizer: Any, function: str) -> list[Optimizer]:
    """List the optimizers of torch inside ``optimizer``, or inside a list, in order, each once.

    For other objects, raise a TypeError in the name of ``function``.
    """
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found: list[Any] = [unwrap(part) for each in several for part in parts_of(each)]
    wrong = [type(one).__name__ for one in found if not isinstance(one, Optimizer)]
    if wrong or not found:
        raise TypeError(
            f"{function}: expected a torch.optim.Optimizer, a list of them, or one of Megatron's that holds some, got "
            f"{wrong[0] if wrong else 'an empty list'}. Write {function}({_ARGUMENTS.get(function, 'optimizer')})."
        )
    return list(dict.fromkeys(found))


def masters_in(holder: Any, optimizer: Optimizer) -> list[Tensor]:
    """List the fp32 masters of Megatron's ``holder`` that are parameters of ``optimizer``."""
    params = set(params_of(optimizer))
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    named = (tensor for name in names for tensor in tree_leaves(getattr(holder, name, ())))
    return [tensor for tensor in dict.fromkeys(named) if tensor in params]


def saves_all_masters(holder: Any) -> bool:
    """Return whether Megatron also saves masters of fp32 parameters: its optimizer is precision-aware, and has some."""
    is_aware = getattr(getattr(holder, "config", None), "use_precision_aware_optimizer", False)
    return bool(
        is_aware and any(isinstance(one, Tensor) for one in tree_leaves(getattr(holder, "shard_fp32_groups", ())))
    )


# All of them together -------------------------------------------------------------------------------------------------


def offload_states(optimizer: Any) -> None:
    """Call ``offload_states()`` of every offloaded optimizer in ``optimizer``: Megatron's, a chain, or a list of them.

    fp32 masters that are parameters of Megatron's inner optimizer leave with the state; they may be used until
    :func:`release_states`.

    Raises:
        TypeError: one of the optimizers is not offloaded; the two functions below raise it as well.
        MemoryError: there is not enough host memory for the state and masters.
    """
    for inner in _offloaded_in(optimizer, "offload_states"):
        inner.offload_states()


def release_states(optimizer: Any) -> None:
    """Call ``release_states()`` of every offloaded optimizer in ``optimizer``."""
    for inner in _offloaded_in(optimizer, "release_states"):
        inner.release_states()


@tells("reload_states(optimizer)")
def reload_states(optimizer: Any, *, free_host_memory: bool = False) -> None:
    """Call ``reload_states()`` of every offloaded optimizer in ``optimizer``; masters need room on the device."""
    for inner in _offloaded_in(optimizer, "reload_states"):
        inner.reload_states(free_host_memory=free_host_memory)


def _offloaded_in(optimizer: Any, function: str) -> list[Any]:
    found = optimizers_in(optimizer, function)
    for inner in found:
        if attachment_of(inner) is None:
            raise TypeError(f"{function}: this {type(inner).__name__} is not offloaded; {IF_NOT}.")
    return found


IF_NOT = "call offload_optimizer() first, or, to train without offload, write `if is_offloaded(optimizer):` before this"
"""Advice to a loop that runs with and without offload; no call is silently ignored."""

HOOK_IS_CALLED = 3
"""Steps without a call of a wrapped hook, after which to warn once. A call sets ``hook_steps`` to it: no warning."""

_TARGETS: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Optimizers to reload by wrapped hook, in the order in which they reload."""


def reload_before(callback: Callable[..., Any] | None, optimizer: Optimizer) -> Callable[..., Any]:
    """Wrap a hook such as Megatron's ``finalize_model_grads_func``, so that ``optimizer`` reloads before it is called.

    Args:
        callback: the hook that the loop calls now, partials included, or ``None``. If it is wrapped already, it is
            returned as it is, and reloads ``optimizer`` as well.
        optimizer: an offloaded one, or a chain or object of Megatron's that holds some. The hook skips one that is
            deleted or plain again. An optimizer's third step warns if the hook was not called by then.

    Returns:
        The hook for the loop to call.

    Raises:
        TypeError: an optimizer is not offloaded, or ``callback`` cannot be called.
    """
    says = "reload_before: expected a hook that can be called, or None"
    check_is(callback, Callable | None, says, "reload_before(callback, optimizer)")
    targets: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def reload_then_call(*args: Any, **kwargs: Any) -> Any:
        for target in list(targets):
            if (attachment := attachment_of(target)) is not None:
                attachment.hook_steps = HOOK_IS_CALLED
                target.reload_states()
        return None if callback is None else callback(*args, **kwargs)

    hook: Any = callback
    while isinstance(hook, functools.partial | types.MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    wrapped: Any = callback
    if not isinstance(hook, types.FunctionType) or hook not in _TARGETS:
        hook = wrapped = reload_then_call if callback is None else functools.update_wrapper(reload_then_call, callback)
        _TARGETS[hook] = targets
    for target in _offloaded_in(optimizer, "reload_before"):
        attachment = attached(target)
        if target not in _TARGETS[hook] or attachment.hook_steps is None:
            attachment.hook_steps = 0
        _TARGETS[hook][target] = None
    return wrapped  # type: ignore[no-any-return]
