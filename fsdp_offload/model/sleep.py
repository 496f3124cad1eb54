"""The sleep of a model: its parameters, buffers and gradients leave the device, and come back to the same objects.

What is moved are *storages*, each once, however many tensors look into it: the flat view that ``fully_shard`` reads,
its DTensor and that one's local tensor, tied parameters, gradients that are views of one reduced buffer. A storage that
is resized to nothing gives its memory back while every tensor over it stays; resized again and filled, all of them are
as they were, at another address. ::

    offload_model:  wait for the device ──▶ storages ──store──▶ arena ──▶ storages resized to 0 ──▶ use is refused
    reload_model:   use is allowed ──▶ storages resized, on the current stream ──load──▶ the current stream waits

The arena is one pinned region for each model. It is kept from one sleep to the next and goes with the model.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..device.link import device_link
from ..fsdp.dtensor import is_dtensor, local_shard
from ..fsdp.fully_shard import (
    drop_gathered_gradients,
    fsdp_modules,
    gathered_gradients,
    sharded_data,
    uses_cpu_offload_policy,
    wait_for_updates,
)
from ..fsdp.guard import Guard
from .parking import Parking, Storage, wait_for

logger = logging.getLogger(__name__)


def offload_model(model: nn.Module, *, gradients: Literal["offload", "drop"] = "offload") -> int:
    """Move the memory of ``model`` to pinned host memory; a generation engine may have the device then.

    Parameters, buffers and gradients are moved, with everything that shares a storage with them. All tensor objects
    stay the same, and so do the references that optimizers, ``fully_shard`` and others hold. Until
    :func:`reload_model`, forwards, state dicts, copies, and anything else that reads or writes these tensors (and so
    ``optimizer.step()``, ``zero_grad()``, clipping) raise ``RuntimeError``. Not caught are views of them that the
    caller made, backwards of graphs made before, and CUDA graphs: do not use them meanwhile.

    When it returns, the device's memory is free: torch's allocator has it. For another process or another allocator
    call ``torch.accelerator.empty_cache()`` next, after ``optimizer.release_states()``. The host memory is one region
    of exactly the bytes to be kept, page-locked where there is an accelerator; later calls use it again, and replace
    it where they need more. Called again while the model is asleep, this does nothing. A model on the CPU is treated
    in the same way; what a model has on the CPU beside an accelerator, or through ``CPUOffloadPolicy``, stays.

    The addresses of the tensors change: capture CUDA graphs again; close CUDA IPC handles in other processes before,
    and send new ones after waking. Memory that is not torch's to free (received by CUDA IPC, from dlpack or numpy, in
    shared memory) stays where it is, and so do tensors that are not dense; a warning names them.

    Args:
        model: the whole model or a part of it. Where ``fully_shard`` keeps parameters gathered, they are resharded.
        gradients: ``"offload"`` keeps them; ``"drop"`` sets them to ``None``, as ``zero_grad()`` does.

    Returns:
        Bytes that have left the device.

    Raises:
        ValueError: ``gradients`` is something else.
        MemoryError: there is not enough host memory. Nothing has been changed.
        RuntimeError: the driver refuses to page-lock the memory. Nothing has been changed.
    """
    if gradients not in ("offload", "drop"):
        raise ValueError(f"offload_model: gradients must be 'offload' or 'drop', got {gradients!r}.")
    if _SLEEP in model.__dict__:
        return 0
    for module in fsdp_modules(model):
        # The root keeps its parameters gathered after a forward without backward.
        module.reshard()
    wait_for_updates(model)
    # A part of the model, or another model with which it shares parameters, may be asleep already.
    awake = {name: param for name, param in model.named_parameters() if not _GUARD.guards(param)}
    found = [*model.named_parameters(), *model.named_buffers()]
    if gradients == "offload":
        found += [(f"{name}.grad", param.grad) for name, param in awake.items() if param.grad is not None]
        found += [("a gradient that is not reduced yet", grad) for grad in gathered_gradients(model)]
    storages = _storages_of(model, found)
    moved_bytes, parking = sum(storage.nbytes() for storage in storages), _parkings.setdefault(model, Parking(_NO_ROOM))
    parking.make_room(storages)
    for device in dict.fromkeys(storage.device for storage in storages):
        # Any stream may still write the parameters or read them: those of fully_shard, of updates, of the caller.
        device_link(device).synchronize()
    for _, end in parking.store():
        end.synchronize()
    if gradients == "drop":
        for param in awake.values():
            param.grad = None
        drop_gathered_gradients(model)
    if storages:
        tensors = [*(tensor for _, tensor in found), *sharded_data(model)]
        away = {storage._cdata for storage in storages}
        asleep = [layer for tensor in tensors if _lives_in(tensor, away) for layer in _layers(tensor)]
        parking.free()
        modules: list[Any] = [model, *fsdp_modules(model)]
        refuse = partial(_refuse_use, asleep, modules)
        model.__dict__[_SLEEP] = refuse, refuse()
    return moved_bytes


def reload_model(model: nn.Module, *, free_host_memory: bool = False) -> None:
    """Bring back what :func:`offload_model` moved, into the same tensors, bit by bit.

    Device memory is allocated on the current stream, which then waits for the copies; the host does not. What is
    issued to the current stream afterwards sees the model. Does nothing to a model that is awake.

    Args:
        model: what was given to :func:`offload_model`.
        free_host_memory: give back the pinned memory as well, instead of keeping it for the next sleep. The host waits
            for the copies then.

    Raises:
        torch.OutOfMemoryError: the device's memory is not free yet (on the CPU a ``RuntimeError``). The model is still
            asleep, and it can be called again.
    """
    if _SLEEP in model.__dict__:
        refuse, allow = model.__dict__.pop(_SLEEP)
        allow()
        try:
            wait_for(_parkings[model].load())
        except BaseException:
            model.__dict__[_SLEEP] = refuse, refuse()
            raise
    if free_host_memory:
        _parkings.pop(model, None)  # a region waits for the device before it lets go of its pages


def _refuse_use(tensors: Sequence[Tensor], modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Refuse to compute with tensors, to save them, and to call modules; returns what ends it.

    torch does not notice an empty storage everywhere: most kernels read address 0, which ends the process on the CPU
    and makes a CUDA context unusable, and ``torch.save`` writes a file that lacks the bytes.
    """
    take_off = _GUARD.put_on(tensors)
    # Before fully_shard's own hook, which would be left half way by an error within it.
    hooks = [module.register_forward_pre_hook(_refuse_call, prepend=True) for module in dict.fromkeys(modules)]

    def allow() -> None:
        take_off()
        for hook in hooks:
            hook.remove()

    return allow


def _refuse_call(module: nn.Module, args: object) -> None:
    _GUARD.refuse(f"{type(module).__name__}.forward()")


# Gradients are refused as well: to an optimizer, and to clipping, a parameter without one is to be skipped in silence.
_GUARD = Guard(
    "Asleep",
    "{what}: offload_model() has moved the memory of this model's tensors to the host. Call reload_model(model) first.",
    lets_gradients=False,
)


_NO_ROOM = (
    "offload_model needs {nbytes} bytes of host memory for this rank's part of the model, and there is not enough. "
    "Shard over more ranks, or pass gradients='drop'. Nothing has been changed."
)

_SLEEP = "_fsdp_offload_sleep"
"""A model's attribute while it is asleep. Not a table: what its tensors refer to may refer to the model."""

_parkings: "weakref.WeakKeyDictionary[nn.Module, Parking]" = weakref.WeakKeyDictionary()
_told: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


# What a model consists of -------------------------------------------------------------------------------------------


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors inside a DTensor or a wrapper; none for a tensor with memory of its own.

    Not ``layout.leaves_of``: that drops what Transformer Engine's tensors cache, and here it is to come back.
    """
    if is_dtensor(tensor):
        return [local_shard(tensor)]
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names if isinstance(part := getattr(tensor, name), Tensor)]
    return []


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    for part in _parts(tensor):
        yield from _layers(part)


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    return (layer for layer in _layers(tensor) if not _parts(layer))


def _lives_in(tensor: Tensor, away: set[int]) -> bool:
    return any(leaf.layout == torch.strided and leaf.untyped_storage()._cdata in away for leaf in _leaves(tensor))


def _storages_of(model: nn.Module, found: Sequence[tuple[str, Tensor]]) -> list[Storage]:
    """The storages to move, each once; a warning names others, once: a loop sleeps thousands of times."""
    leaves = [(name, leaf) for name, tensor in found for leaf in _leaves(tensor)]
    at_home = uses_cpu_offload_policy(model) or any(leaf.device.type not in ("cpu", "meta") for _, leaf in leaves)
    movable: dict[int, tuple[str, Storage]] = {}
    left: dict[str, str] = {}
    fixed: list[Storage] = []
    for name, leaf in leaves:
        if leaf.device.type == "meta" or (at_home and leaf.device.type == "cpu"):
            continue
        if leaf.layout != torch.strided:
            left[name] = f"it is {leaf.layout}"
            continue
        storage = leaf.untyped_storage()
        # Resizing shared memory would end the sharing. (Of CUDA's, is_shared says that it could be.)
        if not storage.resizable() or (leaf.device.type == "cpu" and storage.is_shared()):
            left[name] = "its memory is not torch's to free"
            fixed.append(storage)
        elif storage.nbytes():  # nothing, or asleep as a part of something else
            movable[storage._cdata] = (name, storage)
    for key, (name, storage) in list(movable.items() if fixed else ()):
        if any(_overlap(storage, other) for other in fixed):
            left[name] = "it shares memory that is not torch's to free"
            del movable[key]
    told = _told.setdefault(model, set())
    if new := left.keys() - told:
        told |= new
        shown = "; ".join([f"{name}: {why}" for name, why in left.items() if name in new][:4])
        logger.warning("offload_model leaves %d tensors where they are (%s)", len(new), shown)
    return [storage for _, storage in movable.values()]


def _overlap(one: Storage, other: Storage) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes()
    return one.device == other.device and begin < other.data_ptr() + other.nbytes() and other.data_ptr() < end
