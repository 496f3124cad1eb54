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

from ..device.arena import BREAK_BYTES, Region, aligned
from ..device.host_limits import check_host_memory
from ..device.lanes import Lane, Mark
from ..device.link import Lanes, device_link
from ..fsdp.dtensor import local_shard
from ..fsdp.guard import Guard, WriteWatch

Storage = torch.UntypedStorage


class _Place(NamedTuple):
    storage: Storage
    nbytes: int
    offset: int  # in the region


Ends = list[tuple[Lane, Mark]]
"""The ends of copies, each with the lane of its device's current stream."""


def wait_for(ends: Ends) -> None:
    """Let the current streams wait for copies: they are about to free the source, or to use the target."""
    for compute, end in ends:
        compute.wait(end)


class Parking:
    """Host memory for storages that leave the device, kept from one time to the next.

    Attributes:
        region: the memory; ``None``: none has been taken.
        storages: those that are parked, or were the last to be.
    """

    def __init__(self, no_room: str, limit_bytes: int | None = None) -> None:
        """``no_room``: what a MemoryError says, with ``{nbytes}`` filled in. ``limit_bytes``: as a policy has it."""
        self.region: Region | None = None
        self.storages: Sequence[Storage] = ()
        self._no_room, self._limit_bytes = no_room, limit_bytes
        self._places: list[_Place] = []

    def make_room(self, storages: Sequence[Storage]) -> None:
        """Choose what is parked next, and take memory for it, page-locked where there is an accelerator.

        Raises:
            MemoryError: there is not enough.
        """
        self.storages, self._places, offset = storages, [], 0
        for storage in storages:
            self._places.append(_Place(storage, storage.nbytes(), offset))
            offset += aligned(storage.nbytes())
        if not storages or (self.region is not None and self.region.nbytes >= offset):
            return
        self.region = None  # before the next is taken: there may not be room for both
        try:
            check_host_memory(offset, self._limit_bytes)
        except MemoryError as error:
            raise MemoryError(self._no_room.format(nbytes=offset)) from error
        device, breaks = storages[0].device, range(BREAK_BYTES, offset, BREAK_BYTES)
        self.region = Region(offset, device=device, pin=device.type != "cpu", breaks=breaks)

    def store(self) -> Ends:
        """Start copying them to the region, after what the current streams do now."""
        ends = []
        for lanes, places in self._by_device():
            lanes.store.wait(lanes.compute.mark())
            lanes.store.copy(list(self._pieces(places)))
            ends.append((lanes.compute, lanes.store.mark()))
        return ends

    def free(self) -> None:
        """Give back the device's memory, in the order of the current streams."""
        for storage in self.storages:
            storage.resize_(0)

    def load(self) -> Ends:
        """Allocate on the current streams, start copying back, and forget the storages.

        Raises:
            torch.OutOfMemoryError: there is no room on the device. They stay away.
        """
        ends = []
        try:
            for lanes, places in self._by_device():
                for place in places:
                    place.storage.resize_(place.nbytes)
                # What the current stream gets may still be in use by what was issued to it before; so may the region,
                # by the copies that came before.
                lanes.load.wait(lanes.compute.mark())
                lanes.load.copy([(own, host) for host, own in self._pieces(places)])
                ends.append((lanes.compute, lanes.load.mark()))
        except BaseException:  # most likely, somebody else still has the memory
            for device in {storage.device for storage in self.storages}:
                device_link(device).synchronize()
            self.free()
            raise
        self.storages, self._places = (), []
        return ends

    def _by_device(self) -> Iterator[tuple[Lanes, list[_Place]]]:
        for device in dict.fromkeys(storage.device for storage in self.storages):
            places = [place for place in self._places if place.storage.device == device]
            yield device_link(device).lanes(serial=False), places

    def _pieces(self, places: Sequence[_Place]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes in the region, and in the storages that they are of, in pieces that cross no break."""
        assert self.region is not None
        for storage, nbytes, begin in places:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            end = begin + nbytes
            first_break = (begin // BREAK_BYTES + 1) * BREAK_BYTES
            for start, stop in pairwise([begin, *range(first_break, end, BREAK_BYTES), end]):
                yield self.region.bytes[start:stop], whole[start - begin : stop - begin]


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
        self._parking = Parking(_NO_ROOM, limit_bytes)
        self._copied: Ends = []
        self._copied_versions: list[int] = []
        self._take_off_guard: Callable[[], None] = lambda: None
        self._where = _Where.HERE

    @property
    def host_bytes(self) -> int:
        """Host memory taken for them."""
        region = self._parking.region
        return 0 if region is None else region.nbytes

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
        self._parking.make_room([storage for storage in storages if storage.nbytes()])
        if self._parking.storages:
            self._store()
            self._guard(_WATCH)
            self._where = _Where.LEAVING

    def release(self) -> None:
        """Free the device's memory, in the order of the current stream."""
        if self._where is not _Where.LEAVING:
            return
        if self._versions() != self._copied_versions:
            self._store()
        wait_for(self._copied)
        self._guard(_GUARD)
        self._parking.free()
        self._where = _Where.AWAY

    def reload(self) -> None:
        """Start bringing them back. :meth:`settle` comes before their use.

        Raises:
            torch.OutOfMemoryError: they have no room on the device, and stay on the host.
        """
        if self._where is _Where.AWAY:
            self._copied = self._parking.load()
        if self._where in (_Where.AWAY, _Where.LEAVING):  # in the latter case the device still has them
            self._where = _Where.COMING

    def settle(self) -> None:
        """The current stream is about to use them: what has been reloaded is there, and may be used."""
        if self._where is _Where.COMING:
            wait_for(self._copied)
            self._take_off_guard()
            self._where = _Where.HERE

    def bring_back(self) -> None:
        """Have them on the device, wherever they are."""
        self.reload()
        self.settle()

    def free_host_memory(self) -> None:
        """Give back the region; the host waits for copies from it. Nothing if they are away."""
        if self._where in (_Where.HERE, _Where.COMING):
            for _, end in self._copied:
                end.synchronize()
            self._parking.region = None

    def _store(self) -> None:
        self._copied = self._parking.store()  # after the last update, and whoever has written to them
        self._copied_versions = self._versions()

    def _versions(self) -> list[int]:
        return [local_shard(param)._version for param in self.params]

    def _guard(self, guard: Guard) -> None:
        self._take_off_guard()
        self._take_off_guard = guard.put_on(layer for param in self.params for layer in (param, local_shard(param)))


def owns_its_storage(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is all of a storage that torch can free."""
    local = local_shard(tensor)
    storage = local.untyped_storage()
    return local.is_contiguous() and storage.nbytes() == local.nbytes and (storage.nbytes() == 0 or storage.resizable())
