"""Host memory of exactly the size asked for, page-locked where there is an accelerator, freed with its last user.

torch's caching host allocator rounds every request up to a power of two and keeps what is freed. A region is instead a
mapping (private, or of a file in memory), touched in parallel and then registered with the driver. Its life:

    map -> touch (several threads, so pages come from the toucher's NUMA node) -> register -> ... -> unregister -> unmap

A tensor over a region keeps the region alive: it is unregistered and unmapped with the last such tensor.
"""

import ctypes
import errno
import functools
import itertools
import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from .host_limits import cores_of_rank, is_replaced

logger = logging.getLogger(__name__)

ALIGN_BYTES = 64
"""Every tensor starts on a multiple of this: more than the widest vector access of torch's fused kernels (32 bytes)."""

PAGE_BYTES = 4096

BREAK_BYTES = 256 << 20
"""Distance between the breaks of a region, which let its memory be prepared in parallel pieces."""

_TOUCH_CHUNK_BYTES = 32 << 20

_MADV_POPULATE_WRITE = 23
"""Advice of ``madvise`` that makes all pages of a range, or fails if there is no room; since Linux 5.14."""


def aligned(nbytes: int, to_bytes: int = ALIGN_BYTES) -> int:
    """Round up to a multiple of ``to_bytes``."""
    return -(-nbytes // to_bytes) * to_bytes


class _Mapping(mmap.mmap):
    """A mapping that exported buffers keep alive. ``before_unmap`` is called after the last of them."""

    before_unmap: Callable[[], None] | None = None

    def __init__(self, *_: object, **__: object) -> None:
        self._creator_pid = os.getpid()

    def __del__(
        self,
        exiting: Callable[[], bool] = sys.is_finalizing,
        getpid: Callable[[], int] = os.getpid,
        add_reference: Callable[[object], None] = ctypes.pythonapi.Py_IncRef,
        as_argument: Callable[[object], object] = ctypes.py_object,
    ) -> None:
        if getpid() != self._creator_pid:
            # A forked child has no such pages, and no usable driver. By now it may have mapped pages of its own at this
            # address, which must not be unmapped.
            add_reference(as_argument(self))
            return
        # Not weakref.finalize: mmap unmaps first and tells its weak references afterwards. And not at exit: the driver
        # is gone by then, and the process's memory goes anyway.
        if self.before_unmap is not None and not exiting():
            self.before_unmap()


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Allocate normal tensors, which later updates can write, even if the caller is in ``inference_mode``.

    An evaluation or a reload may be the first to need the memory; inference tensors cannot be written outside the mode.
    """
    with torch.inference_mode(False), torch.no_grad():  # the first lets autograd record again
        yield


class Region:
    """One block of host memory; ``bytes`` is all of it, ``uint8`` of shape ``(nbytes,)`` on the CPU."""

    @normal_tensors()
    def __init__(
        self, nbytes: int, *, device: torch.device, pin: bool, breaks: Sequence[int] = (), file: int | None = None
    ) -> None:
        """Take ``nbytes`` bytes, and page-lock them if ``pin``, or raise a RuntimeError. Private mappings are zeroed.

        ``breaks`` are page-aligned offsets, ascending, that no tensor and no copy will cross: the pieces between them
        are touched and locked in parallel, and the driver refuses a copy across two. ``file``: descriptor of a file in
        memory, whose bytes become the region as they are, and outlive the process.
        """
        if sys.platform != "linux":
            raise RuntimeError(f"fsdp_offload runs on Linux, whose mmap.MADV_DONTFORK it needs, not on {sys.platform}.")
        self.nbytes = nbytes
        is_short = is_replaced.get()
        self.pinned, self.taken_bytes = pin and nbytes > 0 and not is_short, 0 if is_short else nbytes
        if self.pinned and device.type != "cuda":
            # Only CUDA registers memory. Other accelerators get memory of torch's host allocator, with its rounding.
            self._owner: object = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
            self.bytes: Tensor = self._owner
            return
        if file is None:
            mapping = _Mapping(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = _Mapping(file, nbytes, flags=mmap.MAP_SHARED)
        # A forked child (a DataLoader worker) must neither inherit these pages nor copy them when we write.
        mapping.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel may have no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults: touching is about twice as fast, and so is locking
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        pieces = [(address + begin, end - begin) for begin, end in itertools.pairwise([0, *breaks, nbytes])]
        locked: dict[int, int] = {}
        mapping.before_unmap = partial(_unregister, locked, device)
        if not is_short:
            touch = _clear if file is None else partial(_populate, file, address)
            _touch_and_lock(pieces, touch, partial(_register, device) if self.pinned else None, locked)
        if failed := {code for code in locked.values() if code}:
            raise RuntimeError(
                f"cudaHostRegister refused to page-lock {nbytes} bytes of host memory (CUDA error {sorted(failed)}). "
                "Check the memory that may be locked (ulimit -l, the container's limits), or pass "
                "OffloadPolicy(pin_memory=False) to go on with slower, pageable memory."
            )
        self._owner = mapping
        self.bytes = self.range(0, nbytes, torch.uint8, (nbytes,), (1,))

    @normal_tensors()
    def range(
        self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Tensor:
        """Return a tensor over ``nbytes`` bytes at ``offset``, with a storage of exactly these bytes.

        torch.distributed.checkpoint stages whole *storages*: it would copy a shared one once for each of its views.
        """
        if nbytes == 0:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        if isinstance(self._owner, Tensor):
            flat = torch.utils.dlpack.from_dlpack(self._owner[offset : offset + nbytes]).view(dtype)
        else:
            count = nbytes // dtype.itemsize
            flat = torch.frombuffer(self._owner, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(shape, stride)


def _clear(address: int, nbytes: int) -> None:
    ctypes.memset(address, 0, nbytes)


def _populate(file: int, begin: int, address: int, nbytes: int) -> None:
    """Map the ``nbytes`` at ``address``, of a ``file`` in memory mapped from ``begin`` on, and make missing pages.

    Raises an OSError here if there is no room, before an update gets a SIGBUS.
    """
    if _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
        if (code := ctypes.get_errno()) != errno.EINVAL:
            raise OSError(errno.ENOSPC if code == errno.EFAULT else code, "madvise(MADV_POPULATE_WRITE)")
        os.posix_fallocate(file, address - begin, nbytes)  # an older kernel: one thread at a time


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _touch_and_lock(
    pieces: Sequence[tuple[int, int]],
    touch: Callable[[int, int], None],
    lock: Callable[[int, int], int] | None,
    errors: dict[int, int],
) -> None:
    """Touch each page of ``pieces`` (address, bytes), then lock the piece; fill ``errors`` with codes by address.

    Neither ``memset`` nor system calls need the interpreter lock, so the threads really run at once.
    """

    def lock_when_touched(address: int, nbytes: int, touches: Sequence[Future[None]]) -> None:
        # Cannot deadlock: the pool starts tasks in order, so these touches run or have run.
        for one in touches:
            one.result()
        if lock is not None:
            errors[address] = lock(address, nbytes)

    locks: list[Future[None]] = []
    with ThreadPoolExecutor(max_workers=cores_of_rank()) as pool:
        for address, nbytes in pieces:
            touches = [
                pool.submit(touch, address + start, min(_TOUCH_CHUNK_BYTES, nbytes - start))
                for start in range(0, nbytes, _TOUCH_CHUNK_BYTES)
            ]
            if nbytes:
                locks.append(pool.submit(lock_when_touched, address, nbytes, touches))
    for locking in locks:
        locking.result()  # raises what it raised


def _register(device: torch.device, address: int, nbytes: int) -> int:
    with torch.cuda.device(device):
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def _unregister(locked: Mapping[int, int], device: torch.device) -> None:
    addresses = [address for address, error in locked.items() if not error]
    if not addresses:
        return
    # Copies to and from this memory may still be running.
    torch.cuda.synchronize(device)
    errors = {int(torch.cuda.cudart().cudaHostUnregister(address)) for address in addresses} - {0}
    if errors:
        logger.warning("cudaHostUnregister failed with CUDA errors %s", errors)
