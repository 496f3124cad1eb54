"""Storages that leave the device while every tensor over them stays, and come back at another address.

::

    storage ──store──▶ region of pinned host memory ──▶ resized to 0 bytes, so the device's memory is free
            ◀──load─── resized again, on the current stream

``sleep.py`` parks all of a model so; :class:`ParkedParameters` parks what an optimizer alone uses, in phases.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..device.arena import Region
from ..device.host_limits import check_host_memory
from ..device.lanes import Mark
from ..device.link import device_link
from ..planning.buckets import ALIGN_BYTES, BREAK_BYTES
from ..torch_compat.dtensor import local_shard
from ..torch_compat.guard import Guard, WriteWatch

Storage = torch.UntypedStorage


class Place(NamedTuple):
    """One storage, and where its bytes are kept in a region."""

    storage: Storage
    offset: int
    nbytes: int


def lay_out(storages: Sequence[Storage]) -> list[Place]:
    """A place for each, one after the other."""
    places, offset = [], 0
    for storage in storages:
        places.append(Place(storage, offset, storage.nbytes()))
        offset += -(-storage.nbytes() // ALIGN_BYTES) * ALIGN_BYTES
    return places


def new_region(nbytes: int, device: torch.device, no_room: str, limit_bytes: int | None = None) -> Region:
    """Host memory for what is parked, page-locked where there is an accelerator.

    Raises:
        MemoryError: there is not enough; says ``no_room``, with ``{nbytes}`` filled in.
    """
    try:
        check_host_memory(nbytes, limit_bytes)
    except MemoryError as error:
        raise MemoryError(no_room.format(nbytes=nbytes)) from error
    return Region(nbytes, device=device, pin=device.type != "cpu", breaks=range(BREAK_BYTES, nbytes, BREAK_BYTES))


def pieces(region: Region, places: Sequence[Place]) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes in the region, and in the storages that they are of, in pieces that cross no break."""
    for place in places:
        whole = torch.empty(0, dtype=torch.uint8, device=place.storage.device).set_(place.storage)
        begin, end = place.offset, place.offset + place.nbytes
        first_break = (begin // BREAK_BYTES + 1) * BREAK_BYTES
        for start, stop in pairwise([begin, *range(first_break, end, BREAK_BYTES), end]):
            yield region.bytes[start:stop], whole[start - begin : stop - begin]


# What an optimizer alone uses ----------------------------------------------------------------------------------------


class _Where(enum.Enum):
    """The place of parked parameters' bytes, and what memory they take meanwhile."""

    HERE = "on the device; the region is kept for the next time"
    LEAVING = "on the device, where they may be used, and on the host once a copy has ended"
    AWAY = "on the host alone"
    COMING = "on the host and, once a copy has ended, on the device"


_WATCH = WriteWatch("Leaving")

_GUARD = Guard(
    "Parked",
    "{what}: release_states() has freed the device memory of this fp32 master, which is on the host since "
    "offload_states(). Call reload_states() on its optimizer, and synchronize() to read it before the next step.",
    lets_gradients=True,
)

_NO_ROOM = (
    "offload_states() needs {nbytes} bytes of host memory for the fp32 masters that are the optimizer's parameters, "
    "and there is not enough. They stay where they are."
)


class ParkedParameters:
    """Parameters that only the optimizer's step uses: fp32 masters that a framework copies into its model afterwards.

    They leave and come back with the phases of the optimizer that has them, and may be used until they are released:
    Megatron copies masters into the buffers of MXFP8 parameters between the two calls. Afterwards gradients may be set;
    whatever else is done with the tensors themselves raises.

    Args:
        params: each with a storage of its own.
        limit_bytes: host memory that may be taken.
    """

    def __init__(self, params: Sequence[Tensor] = (), limit_bytes: int | None = None) -> None:
        self.params = list(params)
        self._limit_bytes = limit_bytes
        self._places: list[Place] = []
        self._region: Region | None = None
        self._copied: Mark | None = None
        self._copied_versions: list[int] = []
        self._take_off_guard: Callable[[], None] = lambda: None
        self._where = _Where.HERE

    @property
    def _device(self) -> torch.device:
        return self._places[0].storage.device

    @property
    def host_bytes(self) -> int:
        """Host memory taken for them."""
        return 0 if self._region is None else self._region.nbytes

    def offload(self) -> None:
        """Start copying them to the host, after what the current stream does now.

        Raises:
            MemoryError: host memory, taken at the first time, does not suffice.
        """
        self.settle()
        if self._where is not _Where.HERE:
            return
        # Looked up each time: `param.data = ...` gives a parameter another storage.
        storages = [local_shard(param).untyped_storage() for param in self.params if owns_its_storage(param)]
        self._places = lay_out([storage for storage in storages if storage.nbytes()])
        if not self._places:
            return
        device = self._device
        needed_bytes = self._places[-1].offset + self._places[-1].nbytes
        if self._region is None or self._region.nbytes < needed_bytes:
            self.free_host_memory()
            self._region = new_region(needed_bytes, device, _NO_ROOM, self._limit_bytes)
        self._store()
        self._guard(_WATCH)
        self._where = _Where.LEAVING

    def release(self) -> None:
        """Free the device's memory, in the order of the current stream."""
        if self._where is not _Where.LEAVING:
            return
        if self._versions() != self._copied_versions:
            self._store()
        self._wait_for_copy()
        self._guard(_GUARD)
        for place in self._places:
            place.storage.resize_(0)
        self._where = _Where.AWAY

    def reload(self) -> None:
        """Start bringing them back. :meth:`settle` comes before their use.

        Raises:
            torch.OutOfMemoryError: they have no room on the device, and stay on the host.
        """
        if self._where is _Where.LEAVING:
            self._where = _Where.COMING  # the device still has them
            return
        if self._where is not _Where.AWAY:
            return
        assert self._region is not None, "they have been parked in it"
        link = device_link(self._device)
        with link.in_use:
            lanes = link.lanes(serial=False)
            try:
                for place in self._places:
                    place.storage.resize_(place.nbytes)
            except BaseException:
                for place in self._places:
                    place.storage.resize_(0)
                raise
            # What the current stream gets may still be in use by what was issued to it before; so may the region.
            lanes["L"].wait(lanes["C"].mark())
            lanes["L"].copy([(own, host) for host, own in pieces(self._region, self._places)])
            self._copied = lanes["L"].mark()
        self._where = _Where.COMING

    def settle(self) -> None:
        """The current stream is about to use them: what has been reloaded is there, and may be used."""
        if self._where is not _Where.COMING:
            return
        self._wait_for_copy()
        self._take_off_guard()
        self._where = _Where.HERE

    def bring_back(self) -> None:
        """Have them on the device, wherever they are."""
        self.reload()
        self.settle()

    def _store(self) -> None:
        """Start copying them to the region."""
        assert self._region is not None, "there is one for all of them"
        link = device_link(self._device)
        with link.in_use:
            lanes = link.lanes(serial=False)
            lanes["S"].wait(lanes["C"].mark())  # the last update, and whoever has written to them
            lanes["S"].copy(list(pieces(self._region, self._places)))
            self._copied = lanes["S"].mark()
        self._copied_versions = self._versions()

    def _versions(self) -> list[int]:
        return [local_shard(param)._version for param in self.params]

    def _guard(self, guard: Guard) -> None:
        self._take_off_guard()
        self._take_off_guard = guard.put_on(layer for param in self.params for layer in (param, local_shard(param)))

    def _wait_for_copy(self) -> None:
        """Let the current stream wait: it is about to free the source, or to use the target."""
        assert self._copied is not None, "a copy has been issued"
        link = device_link(self._device)
        with link.in_use:
            link.lanes(serial=False)["C"].wait(self._copied)

    def free_host_memory(self) -> None:
        """Give back the region; the host waits for copies from it. Nothing if they are away."""
        if self._where in (_Where.HERE, _Where.COMING):
            if self._copied is not None:
                self._copied.synchronize()
            self._region = None


def owns_its_storage(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is all of a storage that torch can free."""
    local = local_shard(tensor)
    storage = local.untyped_storage()
    return local.is_contiguous() and storage.nbytes() == local.nbytes and (storage.nbytes() == 0 or storage.resizable())
