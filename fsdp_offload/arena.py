"""Host memory of exactly the size asked for, page-locked where there is an accelerator, freed with its last user.

torch's caching host allocator rounds every request up to a power of two and keeps what is freed, so a region is a
private mapping that is touched in parallel and then registered with the driver. The life of a region:

    map -> touch (several threads, so pages come from the toucher's NUMA node) -> register -> ... -> unregister -> unmap

Whoever holds a tensor over a region holds the region: unregistering and unmapping happen when the last one goes.
"""

import ctypes
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_TOUCH_CHUNK_BYTES = 32 << 20


class _Mapping(mmap.mmap):
    """A private mapping that can be referenced weakly; exporting its buffer keeps it alive."""


class Region:
    """One block of host memory.

    Attributes:
        nbytes: exactly what was asked for.
        pinned: whether copies to and from it can be asynchronous.
        bytes: the whole region as a ``uint8`` tensor of shape ``(nbytes,)`` on the CPU.
    """

    def __init__(self, nbytes: int, *, device: torch.device, pin: bool) -> None:
        """Take ``nbytes`` bytes, zeroed, and page-lock them for ``device`` if ``pin``.

        Raises:
            RuntimeError: the driver refuses to page-lock the memory.
            OSError: the address space is used up.
        """
        self.nbytes = nbytes
        self.pinned = pin and nbytes > 0
        if self.pinned and device.type != "cuda":
            # Registering memory is CUDA's alone: elsewhere the host allocator of torch has to do, with its rounding.
            self._owner: object = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self.bytes: Tensor = self._owner
            return
        mapping = _map(max(nbytes, 1))
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        _touch(address, nbytes)
        if self.pinned:
            _register(mapping, address, nbytes, device)
        self._owner = mapping
        self.bytes = self.range(0, nbytes, torch.uint8, (nbytes,), (1,))

    def range(
        self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Tensor:
        """A tensor over ``nbytes`` bytes at ``offset``, with a storage of its own that begins there and ends with it.

        The storage matters: the stagers and writers of torch.distributed.checkpoint copy a tensor's whole *storage*,
        so views of one large storage would each be staged as all of it.
        """
        if nbytes == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        if isinstance(self._owner, Tensor):
            flat = torch.utils.dlpack.from_dlpack(self._owner[offset : offset + nbytes]).view(dtype)
        else:
            count = nbytes // dtype.itemsize
            flat = torch.frombuffer(self._owner, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(shape, stride)


def _map(nbytes: int) -> _Mapping:
    mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked child (a DataLoader worker) must neither inherit these pages nor copy them when we write.
    mapping.madvise(mmap.MADV_DONTFORK)
    # Huge pages are no faster to copy from and take the driver many times longer to register.
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


def _touch(address: int, nbytes: int) -> None:
    """Write every page once. ``memset`` runs without the interpreter lock, so the threads really run at once."""
    starts = range(0, nbytes, _TOUCH_CHUNK_BYTES)
    with ThreadPoolExecutor(max_workers=max(1, min(len(starts), _usable_cores()))) as pool:
        for start in starts:
            pool.submit(ctypes.memset, address + start, 0, min(_TOUCH_CHUNK_BYTES, nbytes - start))


def _usable_cores() -> int:
    """Cores of this process, shared among the ranks of this host."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _register(mapping: _Mapping, address: int, nbytes: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if error:
        raise RuntimeError(
            f"cudaHostRegister refused to page-lock {nbytes} bytes of host memory (CUDA error {error}). "
            "Check the memory that may be locked (ulimit -l, the container's limits), or pass "
            "OffloadPolicy(pin_memory=False) to go on with slower, pageable memory."
        )
    # Before the pages are unmapped. Not at exit: the driver is gone by then, and the process's memory goes anyway.
    weakref.finalize(mapping, _unregister, address, device, os.getpid()).atexit = False


def _unregister(address: int, device: torch.device, creator_pid: int) -> None:
    if os.getpid() != creator_pid:
        return  # a forked child has neither the pages nor a usable driver
    # Copies to and from this memory may still be on their way.
    torch.cuda.synchronize(device)
    error = int(torch.cuda.cudart().cudaHostUnregister(address))
    if error:
        logger.warning("cudaHostUnregister failed with CUDA error %d", error)
