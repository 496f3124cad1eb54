"""Several optimizers inside one object of a framework: offloaded together, and sent through the phases together."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..model.parking import ParkedParameters, owns_its_storage
from ..optimizers.transformer_engine import keep_unread_masters
from ..policy import OffloadPolicy
from .attachment import Attachment, attachment_of
from .wrapped import masters_in, optimizers_in, refuse_own_offload, savers_of_all_masters


def offload_each(
    optimizer: Any,
    offload: Callable[..., Optimizer],
    remove: Callable[[Optimizer], Optimizer],
    model: nn.Module | None,
    policy: OffloadPolicy | None,
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
            offload(inner, model=model, policy=policy)
            done.append(inner)
    except BaseException:
        for inner in reversed(done):
            remove(inner)
        raise
    limit_bytes = policy.host_limit_bytes if policy is not None else None
    for inner, masters in masters_in(optimizer).items():
        own = [master for master in masters if owns_its_storage(master)]
        if own:
            _attachment(inner, "offload_optimizer").parked = ParkedParameters(own, limit_bytes)


def offload_states(optimizer: Any) -> None:
    """Call ``offload_states()`` of every offloaded optimizer in ``optimizer``.

    ``optimizer`` may be Megatron's, or a chain of them. fp32 masters that are parameters of Megatron's inner optimizer
    leave with the state; they may be used until :func:`release_states`.

    Raises:
        TypeError: one of them is not offloaded.
        MemoryError: there is not enough host memory for what leaves.
    """
    for inner in _offloaded(optimizer, "offload_states"):
        inner.offload_states()


def release_states(optimizer: Any) -> None:
    """Call ``release_states()`` of every offloaded optimizer in ``optimizer``.

    Raises:
        TypeError: one of them is not offloaded.
    """
    for inner in _offloaded(optimizer, "release_states"):
        inner.release_states()


def reload_states(optimizer: Any, *, free_host_memory: bool = False) -> None:
    """Call ``reload_states()`` of every offloaded optimizer in ``optimizer``.

    Raises:
        TypeError: one of them is not offloaded.
        torch.OutOfMemoryError: what comes back has no room on the device.
    """
    for inner in _offloaded(optimizer, "reload_states"):
        inner.reload_states(free_host_memory=free_host_memory)


def _offloaded(optimizer: Any, function: str) -> list[Any]:
    found = optimizers_in(optimizer)
    for inner in found:
        _attachment(inner, function)
    return found


def _attachment(inner: Optimizer, function: str) -> Attachment:
    attachment = attachment_of(inner)
    if attachment is None:
        raise TypeError(f"{function}: this {type(inner).__name__} is not offloaded; call offload_optimizer() first.")
    return attachment
