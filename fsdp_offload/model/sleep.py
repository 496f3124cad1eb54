"""Sleep: moves storages to the host and back to another address, while all tensors over them stay the same objects.

::

    storage ──store──▶ region of pinned host memory ──▶ resized to 0 bytes, so the device's memory is free
            ◀──load─── resized again, on the current stream, which then waits

:func:`offload_model` moves the parameters, buffers and gradients of a model, and :class:`ParkedParameters` moves
masters that only an optimizer uses. Each *storage* is moved once, however many tensors share it: the flat view that
``fully_shard`` reads, the DTensor and its local tensor; tied parameters; gradients that are views of one reduced
buffer. These tensors cannot be used while the storage is on the host.
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
    """Host memory for storages that leave a device, kept for the next time they leave."""

    def __init__(self, what: str, limit_bytes: int | None, instead: str = IF_THE_KERNEL_KNOWS_LESS) -> None:
        """``what`` and ``instead``: subject and remedy of a MemoryError; ``limit_bytes``: a policy's limit."""
        self.region: Region | None = None
        self.link: DeviceLink  # of the storages' device
        self._places: list[_Place] = []  # storages to park next, or parked now
        self._is_away = False  # their bytes are in the region alone
        self._lanes: Lanes
        self._check_room = functools.partial(check_host_memory, limit_bytes=limit_bytes, what=what, instead=instead)

    def make_room(self, storages: Sequence[Storage]) -> None:
        """Choose the storages to park next, at least one, and take host memory for them, or raise a MemoryError."""
        device = storages[0].device
        self.link = device_link(device)
        self._lanes = self.link.lanes(serial=False)
        self._places, needed_bytes = [], 0
        for storage in storages:
            self._places.append(_Place(storage, storage.nbytes(), needed_bytes))
            needed_bytes += aligned(storage.nbytes())
        if self.region is None or self.region.nbytes < needed_bytes:
            self.region = None  # frees it first: there may be no room for both
            self._check_room(needed_bytes)
            breaks = range(BREAK_BYTES, needed_bytes, BREAK_BYTES)
            self.region = Region(needed_bytes, device=device, pin=device.type != "cpu", breaks=breaks)

    def leave(self) -> None:
        """Copy the storages to the region and free their device memory, in the order of the current stream."""
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
        """Allocate on the current stream, start copying back, and forget the storages; on failure they stay parked."""
        lanes = self._lanes
        if self._is_away:
            try:
                for place in self._places:
                    place.storage.resize_(place.nbytes)
                # Earlier work on the current stream may still use the memory that is allocated now, and earlier copies
                # may still use the region.
                lanes.load.wait(lanes.compute.mark())
                lanes.load.copy([(own, host) for host, own in self._pieces()])
            except BaseException:  # most likely, another program still has the memory
                self.link.synchronize()
                self._free()
                raise
        self._places, self._is_away = [], False
        mark = lanes.load.mark()
        mark.resolved()  # no point of the model follows that would issue copies which were put off
        return mark

    def wait(self, end: Mark) -> None:
        """Make the current stream wait for the copies of :meth:`load`."""
        self._lanes.compute.wait(end)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the region with the matching pieces of storages; none crosses a break."""
        assert self.region is not None
        for storage, nbytes, begin in self._places:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            end = begin + nbytes
            first_break = (begin // BREAK_BYTES + 1) * BREAK_BYTES
            for start, stop in pairwise([begin, *range(first_break, end, BREAK_BYTES), end]):
                yield self.region.bytes[start:stop], whole[start - begin : stop - begin]


# A model --------------------------------------------------------------------------------------------------------------

# Gradients are guarded too: optimizers and clipping skip a parameter without one in silence.
_ASLEEP = Guard(
    "Asleep",
    "{what}: offload_model() has moved the memory of this model's tensors to the host. Call reload_model(model) first.",
    lets_gradients=False,
)
_SLEEP = "_fsdp_offload_sleep"
"""Attribute of a sleeping model: functions that allow its use. Not in a weak table: they may refer to the model."""

_parkings: "weakref.WeakKeyDictionary[nn.Module, Parking]" = weakref.WeakKeyDictionary()


@tells("offload_model(model)")
def offload_model(model: nn.Module, *, gradients: Literal["offload", "drop"] = "offload") -> int:
    """Move ``model`` to pinned host memory, so that for example a generation engine can use the device.

    Parameters, buffers and gradients are moved, with all tensors that share a storage with them. The tensor objects
    stay the same, so references that optimizers, ``fully_shard`` and others hold stay valid. Until
    :func:`reload_model`, every read or write of the tensors raises ``RuntimeError``: forwards, state dicts, copies,
    ``optimizer.step()``, ``zero_grad()``, clipping. Views that the caller made, backwards of earlier graphs, and CUDA
    graphs are not caught: do not use them meanwhile.

    When it returns, the device memory is back in torch's allocator. For another process or another allocator, call
    ``optimizer.release_states()`` and then ``torch.accelerator.empty_cache()``. The host memory is one page-locked
    region of exactly the bytes to keep, which later calls reuse. A call for a sleeping model does nothing. If the model
    is on an accelerator or uses ``CPUOffloadPolicy``, its tensors on the CPU stay.

    The addresses of the tensors change: capture CUDA graphs again; close CUDA IPC handles in other processes before,
    and send new ones after waking. Memory that torch cannot free (received by CUDA IPC, from dlpack or numpy, in shared
    memory) stays where it is, and so do tensors that are not dense; a warning names them.

    Args:
        model: the whole model or a part of it. Parameters that ``fully_shard`` keeps gathered are resharded.
        gradients: ``"offload"`` keeps them; ``"drop"`` sets them to ``None``, as ``zero_grad()`` does.

    Returns:
        Bytes that have left the device.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``gradients`` has another value, or the model is on several accelerators.
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
    # A part of the model, or another model that shares its parameters, may be asleep already.
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
    # Refuse a call ahead of fully_shard's own hook, which an error would interrupt half way.
    modules: Any = dict.fromkeys([model, *fsdp_modules(model)])
    hooks = [module.register_forward_pre_hook(_refuse_call, prepend=True) for module in modules]
    model.__dict__[_SLEEP] = [take_off, *(hook.remove for hook in hooks)]
    # Streams of fully_shard, of updates and of the caller may still read or write the parameters. An interrupt from
    # here on leaves a model that can be woken.
    parking.link.synchronize()
    parking.leave()
    parking.link.synchronize()
    return moved_bytes


@tells("reload_model(model)")
def reload_model(model: nn.Module, *, free_host_memory: bool = False) -> None:
    """Bring a model back that :func:`offload_model` moved, into the same tensors, with the same bits.

    Allocates device memory on the current stream and makes it wait for the copies; the host does not wait. Later work
    on the current stream sees the model. Does nothing to a model that is awake.

    Args:
        model: the module that was given to :func:`offload_model`.
        free_host_memory: free the pinned memory as well, instead of keeping it for the next sleep. The host waits for
            the copies then.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: the model is asleep as a part of another model, or has a part that is asleep by itself.
        torch.OutOfMemoryError: the device's memory is not free yet (on the CPU a ``RuntimeError``). The model is still
            asleep, and the call can be repeated.
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
        del model.__dict__[_SLEEP]  # last: after an interrupt, another call continues
    if free_host_memory and model in _parkings:
        _parkings[model].region = None  # the region waits for the device before it is unmapped


def check_is_module(model: object, function: str) -> None:
    """Raise a TypeError that names ``function`` if ``model`` is no module."""
    line = f"{function}(model). Optimizers have offload_states() and reload_states()"
    check_is(model, nn.Module, f"{function}: expected a torch.nn.Module", line)


def is_asleep(model: nn.Module) -> bool:
    """Return whether any parameter of ``model`` is on the host because of :func:`offload_model`."""
    return any(map(_ASLEEP.guards, model.parameters()))


def _refuse_call(module: nn.Module, args: object) -> None:
    _ASLEEP.refuse(f"{type(module).__name__}.forward()")


def _parts(tensor: Tensor) -> list[Tensor]:
    """List the tensors inside ``tensor``. ``layout.leaves_of`` would drop the cached ones of Transformer Engine."""
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


_warn_once = functools.cache(logger.warning)  # a loop may sleep thousands of times


def _storages_of(model: nn.Module, found: Sequence[tuple[str, Tensor]]) -> list[Storage]:
    """List the storages to move, each once, and warn of tensors that have to stay."""
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
        # Resizing shared memory would end the sharing. (Of CUDA storages, is_shared() is always true.)
        if not storage.resizable() or (leaf.device.type == "cpu" and storage.is_shared()):
            left[name] = "its memory is not torch's to free"
            fixed.append(storage)
        elif storage.nbytes():  # else empty, or asleep as a part of another model
            movable[storage._cdata] = (name, storage)
    for key, (name, storage) in list(movable.items() if fixed else ()):
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        near = ((one.data_ptr(), one.nbytes()) for one in fixed if one.device == storage.device)
        if any(begin < at + nbytes and at < end for at, nbytes in near):
            left[name] = "it shares memory that is not torch's to free"
            del movable[key]
    if len(devices := {str(storage.device) for _, storage in movable.values()}) > 1:
        raise ValueError(f"offload_model: this model is on several devices: {', '.join(sorted(devices))}.")
    if left:
        shown = listed(f"{name}: {why}" for name, why in left.items())
        _warn_once(f"offload_model leaves {len(left)} tensors where they are ({shown})")
    return [storage for _, storage in movable.values()]


# Masters of an optimizer --------------------------------------------------------------------------------------------


class _Where(enum.Enum):
    """Place of parked parameters."""

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
    """fp32 masters that a framework copies into its model. Only the optimizer uses them, so they leave with its state.

    They can be used until :meth:`release`: after :meth:`offload`, Megatron still copies masters into the buffers of
    MXFP8 parameters. After :meth:`release`, gradients may be set; any other use of the tensors raises.
    """

    def __init__(self, params: Sequence[Tensor] = (), limit_bytes: int | None = None) -> None:
        """``params``: masters, each with a storage of its own; ``limit_bytes``: limit of host memory."""
        super().__init__("offload_states(), for fp32 masters,", limit_bytes)
        self.params = list(params)
        self._loaded: Mark | None = None
        self._take_off_guard: Callable[[], None] = lambda: None
        self._where = _Where.HERE

    def offload(self) -> None:
        """Take the host memory for :meth:`release`, or raise a MemoryError."""
        self.settle()
        if self._where is _Where.HERE and self._has_room():
            self._where = _Where.LEAVING

    def release(self) -> None:
        """Move the parameters to the host, in the order of the current stream."""
        if self._where is _Where.LEAVING and self._has_room():
            layers = (layer for param in self.params for layer in (param, local_shard(param)))
            self._take_off_guard, self._where = _AWAY.put_on(layers), _Where.AWAY  # an interrupt leaves them guarded
            self.leave()

    def reload(self) -> None:
        """Start bringing the parameters back, or raise an OutOfMemoryError. Call :meth:`settle` before their use."""
        if self._where is _Where.AWAY:
            self._loaded = self.load()
            self._where = _Where.COMING
        elif self._where is _Where.LEAVING:
            self._where = _Where.HERE

    def settle(self) -> None:
        """Make the current stream wait for reloaded parameters, and allow their use."""
        if self._where is _Where.COMING:
            assert self._loaded is not None, "reload() has set it"
            self.wait(self._loaded)
            self._take_off_guard()
            self._where = _Where.HERE

    def bring_back(self) -> None:
        self.reload()
        self.settle()

    def free_host_memory(self) -> None:
        """Free the region once copies from it have ended, unless the parameters are leaving or away."""
        if self._where in (_Where.HERE, _Where.COMING):
            if self._loaded is not None:
                self._loaded.synchronize()
            self.region = None

    def _has_room(self) -> bool:
        """Take host memory for the current storages (``param.data = ...`` replaces them); False if all are empty."""
        storages = [local_shard(param).untyped_storage() for param in self.params if owns_its_storage(param)]
        if storages := [storage for storage in storages if storage.nbytes()]:
            self.make_room(storages)
        return bool(storages)


def owns_its_storage(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is all of a storage that torch can free."""
    local = local_shard(tensor)
    storage = local.untyped_storage()
    return local.is_contiguous() and storage.nbytes() == local.nbytes and (storage.nbytes() == 0 or storage.resizable())
