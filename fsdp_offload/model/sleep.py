"""Sleep: storages that leave the device while every tensor over them stays, and come back at another address.

::

    storage ──store──▶ region of pinned host memory ──▶ resized to 0 bytes, so the device's memory is free
            ◀──load─── resized again, on the current stream, which then waits

A model's parameters, buffers and gradients leave so (:func:`offload_model`), and what an optimizer alone uses, in its
phases (:class:`ParkedParameters`). What is moved are *storages*, each once, however many tensors look into it: the flat
view that ``fully_shard`` reads, its DTensor and that one's local tensor, tied parameters, gradients that are views of
one reduced buffer. All of these objects stay the same, and nobody can use them meanwhile.
"""

import enum
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..device.arena import BREAK_BYTES, Region, aligned
from ..device.host_limits import IF_THE_KERNEL_KNOWS_LESS, check_host_memory
from ..device.lanes import DeviceLink, Lanes, Mark, device_link
from ..fsdp.dtensor import is_dtensor, local_shard
from ..fsdp.fully_shard import (
    drop_gathered_gradients,
    fsdp_modules,
    gathered_gradients,
    sharded_data,
    uses_cpu_offload_policy,
    wait_for_updates,
)
from ..fsdp.gradients import has_no_memory
from ..fsdp.guard import Guard
from ..policy import check_choices, check_is, listed, tells

logger = logging.getLogger(__name__)

Storage = torch.UntypedStorage


class _Place(NamedTuple):
    storage: Storage
    nbytes: int
    offset: int  # in the region


class Parking:
    """Host memory for storages that leave a device, kept from one time to the next."""

    def __init__(self, what: str, limit_bytes: int | None, instead: str = IF_THE_KERNEL_KNOWS_LESS) -> None:
        """``what`` needs it, within ``limit_bytes`` as a policy has them; ``instead``: what to do if there is none."""
        self.region: Region | None = None
        self.link: DeviceLink  # of their device
        self._places: list[_Place] = []  # that are parked, or were the last to be
        self._is_away = False  # the region has their bytes
        self._lanes: Lanes
        self._check_room = functools.partial(check_host_memory, limit_bytes=limit_bytes, what=what, instead=instead)

    def make_room(self, storages: Sequence[Storage]) -> None:
        """Choose what is parked next, one or more, and take memory for it, or raise a MemoryError."""
        device = storages[0].device
        self.link = device_link(device)
        self._lanes = self.link.lanes(serial=False)
        self._places, needed_bytes = [], 0
        for storage in storages:
            self._places.append(_Place(storage, storage.nbytes(), needed_bytes))
            needed_bytes += aligned(storage.nbytes())
        if self.region is None or self.region.nbytes < needed_bytes:
            self.region = None  # before the next is taken: there may not be room for both
            self._check_room(needed_bytes)
            breaks = range(BREAK_BYTES, needed_bytes, BREAK_BYTES)
            self.region = Region(needed_bytes, device=device, pin=device.type != "cpu", breaks=breaks)

    def leave(self) -> None:
        """Copy them to the region and give back the device's memory, all in the order of the current stream."""
        lanes = self._lanes
        lanes.store.wait(lanes.compute.mark())
        lanes.store.copy(list(self._pieces()))
        lanes.compute.wait(lanes.store.mark())
        self._is_away = True
        self._free()

    def _free(self) -> None:
        for place in self._places:
            place.storage.resize_(0)

    def load(self) -> Mark:
        """Allocate on the current stream, start copying back, and forget the storages; without room, they stay away."""
        lanes = self._lanes
        if self._is_away:
            try:
                for place in self._places:
                    place.storage.resize_(place.nbytes)
                # Work issued to the current stream before may still use the memory that it gets now, and earlier
                # copies may still use the region.
                lanes.load.wait(lanes.compute.mark())
                lanes.load.copy([(own, host) for host, own in self._pieces()])
            except BaseException:  # most likely, somebody else still has the memory
                self.link.synchronize()
                self._free()
                raise
        self._places, self._is_away = [], False
        return lanes.load.mark()

    def wait(self, end: Mark) -> None:
        """Let the current stream wait for what :meth:`load` has started."""
        self._lanes.compute.wait(end)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes in the region, and in the storages that they are of, in pieces that cross no break."""
        assert self.region is not None
        for storage, nbytes, begin in self._places:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            end = begin + nbytes
            first_break = (begin // BREAK_BYTES + 1) * BREAK_BYTES
            for start, stop in pairwise([begin, *range(first_break, end, BREAK_BYTES), end]):
                yield self.region.bytes[start:stop], whole[start - begin : stop - begin]


# A model --------------------------------------------------------------------------------------------------------------

# Gradients, too: to an optimizer, and to clipping, a parameter without one is to be skipped in silence.
_ASLEEP = Guard(
    "Asleep",
    "{what}: offload_model() has moved the memory of this model's tensors to the host. Call reload_model(model) first.",
    lets_gradients=False,
)
_SLEEP = "_fsdp_offload_sleep"
"""A model's attribute while it is asleep: what allows its use. In no table: its tensors may refer to the model."""

_parkings: "weakref.WeakKeyDictionary[nn.Module, Parking]" = weakref.WeakKeyDictionary()


@tells("offload_model(model)")
def offload_model(model: nn.Module, *, gradients: Literal["offload", "drop"] = "offload") -> int:
    """Move the memory of ``model`` to pinned host memory; a generation engine may have the device then.

    Parameters, buffers and gradients are moved, with everything that shares a storage with them. All tensor objects
    stay the same, and so do the references that optimizers, ``fully_shard`` and others hold. Until
    :func:`reload_model`, forwards, state dicts, copies, and anything else that reads or writes these tensors (and so
    ``optimizer.step()``, ``zero_grad()``, clipping) raise ``RuntimeError``. Not caught are views of them that the
    caller made, backwards of graphs made before, and CUDA graphs: do not use them meanwhile.

    When it returns, torch's allocator has the device's memory. For another process or another allocator call
    ``torch.accelerator.empty_cache()`` next, after ``optimizer.release_states()``. The host memory is one page-locked
    region of exactly the bytes to be kept, which later calls use again. Called again while the model is asleep, this
    does nothing. What a model has on the CPU beside an accelerator, or through ``CPUOffloadPolicy``, stays.

    The addresses of the tensors change: capture CUDA graphs again; close CUDA IPC handles in other processes before,
    and send new ones after waking. Memory that is not torch's to free (received by CUDA IPC, from dlpack or numpy, in
    shared memory) stays where it is, and so do tensors that are not dense; a warning names them.

    Args:
        model: the whole model or a part of it. Where ``fully_shard`` keeps parameters gathered, they are resharded.
        gradients: ``"offload"`` keeps them; ``"drop"`` sets them to ``None``, as ``zero_grad()`` does.

    Returns:
        Bytes that have left the device.

    Raises:
        TypeError: it is no module.
        ValueError: ``gradients`` is something else, or the model is on several accelerators.
        MemoryError: there is not enough host memory. Nothing has been changed.
        RuntimeError: the driver refuses to page-lock the memory. Nothing has been changed.
    """
    check_is_module(model, "offload_model")
    if gradients not in ("offload", "drop"):
        raise ValueError(f"offload_model: gradients must be 'offload' or 'drop', got {gradients!r}.")
    if _SLEEP in model.__dict__:
        return 0
    for module in fsdp_modules(model):
        # The root keeps its parameters gathered after a forward without backward.
        module.reshard()
    wait_for_updates(model)
    # A part of the model, or another model with which it shares parameters, may be asleep already.
    awake = {name: param for name, param in model.named_parameters() if not _ASLEEP.guards(param)}
    found = [*model.named_parameters(), *model.named_buffers()]
    if gradients == "offload":
        gradients_of = {name: param.grad for name, param in awake.items() if not has_no_memory(param)}
        found += [(f"{name}.grad", grad) for name, grad in gradients_of.items() if grad is not None]
        found += [("a gradient that is not reduced yet", grad) for grad in gathered_gradients(model)]
    parking = _parkings.setdefault(model, Parking("offload_model", None, "pass gradients='drop'"))
    storages = _storages_of(model, found)
    moved_bytes = sum(storage.nbytes() for storage in storages)
    if storages:
        parking.make_room(storages)
    if gradients == "drop":
        for param in awake.values():
            param.grad = None
        drop_gathered_gradients(model)
    if not storages:
        return 0
    tensors = [*(tensor for _, tensor in found), *sharded_data(model)]
    away = {storage._cdata for storage in storages}
    dense = ((tensor, leaf) for tensor in tensors for leaf in _leaves(tensor) if leaf.layout == torch.strided)
    asleep = [layer for tensor, leaf in dense if leaf.untyped_storage()._cdata in away for layer in _layers(tensor)]
    # torch does not notice an empty storage everywhere: most kernels read address 0, which ends the process or breaks a
    # CUDA context, and torch.save writes a file that lacks the bytes.
    take_off = _ASLEEP.put_on(asleep)
    # Before fully_shard's own hook, which would be left half way by an error within it.
    modules: Any = dict.fromkeys([model, *fsdp_modules(model)])
    hooks = [module.register_forward_pre_hook(_refuse_call, prepend=True) for module in modules]
    model.__dict__[_SLEEP] = [take_off, *(hook.remove for hook in hooks)]
    # Any stream may still write the parameters or read them: those of fully_shard, of updates, of the caller. An
    # interrupt from here on leaves a model that can be woken.
    parking.link.synchronize()
    parking.leave()
    parking.link.synchronize()
    return moved_bytes


@tells("reload_model(model)")
def reload_model(model: nn.Module, *, free_host_memory: bool = False) -> None:
    """Bring back what :func:`offload_model` moved, into the same tensors, bit by bit.

    Device memory is allocated on the current stream, which then waits for the copies; the host does not. What is
    issued to the current stream afterwards sees the model. Does nothing to a model that is awake.

    Args:
        model: what was given to :func:`offload_model`.
        free_host_memory: give back the pinned memory as well, instead of keeping it for the next sleep. The host waits
            for the copies then.

    Raises:
        TypeError: it is no module.
        RuntimeError: it is asleep as a part of another model, or has a part that is asleep by itself.
        torch.OutOfMemoryError: the device's memory is not free yet (on the CPU a ``RuntimeError``). The model is still
            asleep, and it can be called again.
    """
    check_is_module(model, "reload_model")
    check_choices("reload_model", free_host_memory=free_host_memory)
    if _SLEEP not in model.__dict__ and is_asleep(model):
        raise RuntimeError(
            f"reload_model: parameters of this {type(model).__name__} are asleep because offload_model() was called "
            "with another module. Call reload_model() with that one."
        )
    if _SLEEP in model.__dict__:
        parking = _parkings[model]
        parking.wait(parking.load())
        for allow in model.__dict__[_SLEEP]:
            allow()
        del model.__dict__[_SLEEP]  # last: after an interrupt, another call goes on
    if free_host_memory and model in _parkings:
        _parkings[model].region = None  # which waits for the device before it lets go of its pages


def check_is_module(model: object, function: str) -> None:
    """Refuse what is no module, with a TypeError of ``function``."""
    line = f"{function}(model). Optimizers have offload_states() and reload_states()"
    check_is(model, nn.Module, f"{function}: expected a torch.nn.Module", line)


def is_asleep(model: nn.Module) -> bool:
    """Return whether any parameter of ``model`` is on the host because of :func:`offload_model`."""
    return any(map(_ASLEEP.guards, model.parameters()))


def _refuse_call(module: nn.Module, args: object) -> None:
    _ASLEEP.refuse(f"{type(module).__name__}.forward()")


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors inside; not ``layout.leaves_of``, which drops what Transformer Engine's cache, to come back here."""
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


_warn_once = functools.cache(logger.warning)  # a loop sleeps thousands of times


def _storages_of(model: nn.Module, found: Sequence[tuple[str, Tensor]]) -> list[Storage]:
    """The storages to move, each once; a warning names others."""
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
    if len(devices := {str(storage.device) for _, storage in movable.values()}) > 1:
        raise ValueError(f"offload_model: this model is on several devices: {', '.join(sorted(devices))}.")
    if left:
        shown = listed(f"{name}: {why}" for name, why in left.items())
        _warn_once(f"offload_model leaves {len(left)} tensors where they are ({shown})")
    return [storage for _, storage in movable.values()]


def _overlap(one: Storage, other: Storage) -> bool:
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes()
    return one.device == other.device and begin < other.data_ptr() + other.nbytes() and other.data_ptr() < end


# What an optimizer alone uses ----------------------------------------------------------------------------------------


class _Where(enum.Enum):
    """Where parked parameters are."""

    HERE = "on the device"
    LEAVING = "on the device, where they may be used; there is room for them on the host"
    AWAY = "on the host alone"
    COMING = "on the host and, once a copy has ended, on the device"


_AWAY = Guard(
    "Parked",
    "{what}: release_states() has freed the device memory of this fp32 master, which is on the host since "
    "offload_states(). Call reload_states() on its optimizer, and synchronize() to read it before the next step.",
    lets_gradients=True,
)


class ParkedParameters(Parking):
    """fp32 masters that a framework copies into its model: only the optimizer's step uses them, and they leave with it.

    They may be used until they are released: Megatron copies masters into the buffers of MXFP8 parameters between the
    two calls. Afterwards gradients may be set; whatever else is done with the tensors themselves raises.
    """

    def __init__(self, params: Sequence[Tensor] = (), limit_bytes: int | None = None) -> None:
        """Each of ``params`` has a storage of its own; ``limit_bytes`` of host memory may be taken."""
        super().__init__("offload_states(), for fp32 masters,", limit_bytes)
        self.params = list(params)
        self._loaded: Mark | None = None
        self._take_off_guard: Callable[[], None] = lambda: None
        self._where = _Where.HERE

    @property
    def host_bytes(self) -> int:
        return 0 if self.region is None else self.region.nbytes

    def offload(self) -> None:
        """Take the host memory for :meth:`release`, or raise a MemoryError."""
        self.settle()
        if self._where is _Where.HERE and self._has_room():
            self._where = _Where.LEAVING

    def release(self) -> None:
        """Move them to the host, in the order of the current stream."""
        if self._where is _Where.LEAVING and self._has_room():
            layers = (layer for param in self.params for layer in (param, local_shard(param)))
            self._take_off_guard, self._where = _AWAY.put_on(layers), _Where.AWAY  # an interrupt leaves them guarded
            self.leave()

    def reload(self) -> None:
        """Start bringing them back, or raise an OutOfMemoryError; :meth:`settle` comes before their use."""
        if self._where is _Where.AWAY:
            self._loaded = self.load()
            self._where = _Where.COMING
        elif self._where is _Where.LEAVING:
            self._where = _Where.HERE

    def settle(self) -> None:
        """The current stream is about to use them: what has been reloaded is there, and may be used."""
        if self._where is _Where.COMING:
            assert self._loaded is not None, "reload() has set it"
            self.wait(self._loaded)
            self._take_off_guard()
            self._where = _Where.HERE

    def bring_back(self) -> None:
        self.reload()
        self.settle()

    def free_host_memory(self) -> None:
        """Give back the region; the host waits for copies from it. Nothing if they are away."""
        if self._where in (_Where.HERE, _Where.COMING):
            if self._loaded is not None:
                self._loaded.synchronize()
            self.region = None

    def _has_room(self) -> bool:
        """Looked up each time, as ``param.data = ...`` gives a parameter another storage; False: all are empty."""
        storages = [local_shard(param).untyped_storage() for param in self.params if owns_its_storage(param)]
        if storages := [storage for storage in storages if storage.nbytes()]:
            self.make_room(storages)
        return bool(storages)


def owns_its_storage(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is all of a storage that torch can free."""
    local = local_shard(tensor)
    storage = local.untyped_storage()
    return local.is_contiguous() and storage.nbytes() == local.nbytes and (storage.nbytes() == 0 or storage.resizable())
