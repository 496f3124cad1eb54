"""Tells who was attached too early, or to an optimizer that nobody steps, and says the right order."""

import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..torch_compat.dtensor import is_dtensor, local_shard
from ..torch_compat.fully_shard import parameters_of
from .attachment import Attachment, attachment_of

RIGHT_ORDER = (
    "call fully_shard(model), build the optimizer, then offload_optimizer(optimizer, model=model); in a framework that "
    "does these itself, see fsdp_offload.integrations"
)


def note_if_unsharded(params: Collection[Tensor]) -> str:
    """Return a warning where several ranks would each keep the whole state; empty elsewhere.

    No proof: DDP is so on purpose. Whether parameters will be exchanged cannot be known before they are.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    if not params or any(is_dtensor(param) for param in params):
        return ""
    if not all(isinstance(param, nn.Parameter) for param in params):
        return ""  # a framework's own shards of them, as Megatron's DistributedOptimizer makes
    return (
        f"None of the optimizer's parameters is a DTensor, and there are {dist.get_world_size()} ranks: each pins the "
        f"state of all that it holds. If the model is yet to be sharded, attach afterwards: {RIGHT_ORDER}."
    )


def refuse_exchanged(known: Collection[Tensor], groups: list[dict[str, Any]]) -> None:
    """Raise where none of the parameters in ``groups`` is one of those that were there at attach.

    Frameworks that shard a model after its optimizer was built (accelerate's ``prepare``) put others there. What was
    sharded at attach is not meant: a second ``prepare`` puts it back.
    """
    params = [param for group in groups for param in group["params"]]
    if not params or params[0] in known or any(param in known for param in params):
        return
    if not known or any(is_dtensor(param) for param in known):
        return
    raise RuntimeError(
        "The parameters of this optimizer were exchanged after offload_optimizer(): it was attached before the model "
        f"was sharded, and holds the unsharded state. Attach afterwards: {RIGHT_ORDER}."
    )


def check_at_first_forward(model: nn.Module, attachment: Attachment) -> Callable[[], None] | None:
    """Refuse the first forward of a model that was sharded after its optimizer was attached.

    Returns:
        What ends that; ``None`` where it cannot happen any more: all parameters are sharded.
    """
    if all(map(is_dtensor, attachment.engine.names)):
        return None
    reference = weakref.ref(attachment)

    def check(model: nn.Module, args: object) -> None:
        del model, args
        handle.remove()
        if (attachment := reference()) is not None:
            refuse_foreign(attachment)

    handle = model.register_forward_pre_hook(check)
    return handle.remove


def refuse_foreign(attachment: Attachment) -> None:
    """Raise where the optimizer has parameters without a gradient that its model no longer uses."""
    model = None if attachment.model is None else attachment.model()
    if model is None:
        return
    of_model = parameters_of(model)  # and not by their names: a look must not change what the next forward gathers
    names = attachment.engine.names
    foreign = [name for param, name in names.items() if param.grad is None and param not in of_model]
    if foreign:
        raise RuntimeError(
            f"{len(foreign)} of the optimizer's parameters have no gradient and are no longer the model's "
            f"({', '.join(foreign[:4])}): they were exchanged when the model was sharded, after offload_optimizer(). "
            f"Attach afterwards: {RIGHT_ORDER}. Nothing has been changed."
        )


class _Watch(NamedTuple):
    """Parameters of an optimizer that is offloaded and has not stepped yet, by storage and offset.

    These are known as long as the storage lives, and kept alive by nobody who looks. ``model.to()`` refuses parameters
    with a weak reference, even where it changes nothing.
    """

    name: str
    places: set[tuple[StorageWeakRef, int]]


def _places_of(optimizer: Optimizer) -> set[tuple[StorageWeakRef, int]]:
    locals_ = [local_shard(param) for group in optimizer.param_groups for param in group["params"]]
    strided = [one for one in locals_ if one.layout is torch.strided]  # sparse tensors have no storage
    return {(StorageWeakRef(one.untyped_storage()), int(one.storage_offset())) for one in strided}


def _is_over(watch: _Watch) -> bool:
    return all(storage.expired() for storage, _ in watch.places)


_watches: list[_Watch] = []
_hook: list[RemovableHandle] = []  # one for all watches, while there are any: torch calls it after each step


def warn_if_another_steps(optimizer: Optimizer) -> Callable[[], None]:
    """Warn when another optimizer updates the parameters of ``optimizer``, before that has taken a step.

    Frameworks that build their optimizer anew leave the offloaded one behind, and nothing would be offloaded.

    Returns:
        What ends the watch. Without that, it ends with the parameters.
    """
    watch = _Watch(type(optimizer).__mro__[2].__name__, _places_of(optimizer))
    _watches[:] = [other for other in _watches if not _is_over(other)] + [watch]
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(_look_who_steps))

    def end() -> None:
        if watch in _watches:
            _watches.remove(watch)
        if not _watches and _hook:
            _hook.pop().remove()

    return end


def _look_who_steps(other: Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    if attachment_of(other) is not None:
        return
    # The hook stays even without a watch: torch is going through its hooks, and none may leave meanwhile.
    _watches[:] = [watch for watch in _watches if not _is_over(watch)]
    stepped = _places_of(other) if _watches else set()
    for watch in [one for one in _watches if any(not storage.expired() for storage, _ in one.places & stepped)]:
        _watches.remove(watch)
        warnings.warn(
            f"{type(other).__name__}.step() updated the parameters of the {watch.name} that offload_optimizer() was "
            "given, which has never stepped: training goes on with another optimizer, and NOTHING IS OFFLOADED. "
            f"Attach to the one that steps, once it is built: {RIGHT_ORDER}.",
            stacklevel=2,
        )
