"""Memory lent to the writer of an asynchronous save, and how to know that it has finished.

DCP does not tell a stager when the writer is done, so that is seen by what the writer holds and where it runs: in the
*writing thread*, the first other one that looks into the staged dict.
"""

import bisect
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, ItemsView, Iterable, Mapping
from operator import itemgetter
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..device.arena import Region

_POLL_SECONDS = 0.005

_BEGIN_SECONDS = 60
"""A writing thread begins in milliseconds. One that never comes must not hang training for ever."""

_LOOKED_AT_FRAMES = 8


class Loan:
    """The memory of one staged dict, and who reads it: a :class:`~fsdp_offload.state.shard.Reader` of homes.

    Ends when the tensors over it are gone. A writer that failed may leave its tensors to the exception that it raised,
    and that to whoever holds the future; but its thread ends, so that counts as well.
    """

    def __init__(self) -> None:
        self._memory: list[tuple[int, Any]] = []  # where each begins, while the loan is made
        self._alive: list[weakref.ref[Any]] = []
        self._owner = threading.current_thread()
        self.thread: threading.Thread | None = None  # that writes
        self._looks: list[Callable[[], object]] = []
        self._is_sealed = False
        self._is_over = False

    def add(self, regions: Iterable[Region]) -> None:
        """Memory that tensors of this loan may be over."""
        for region in regions:
            if region.nbytes:
                address = region.bytes.data_ptr()
                memory = (ctypes.c_ubyte * region.nbytes).from_address(address)
                memory.keeps = region  # type: ignore[attr-defined]  # as long as any tensor over it lives
                bisect.insort(self._memory, (address, memory), key=itemgetter(0))
                self._alive.append(weakref.ref(memory, self._is_gone))

    def tensor(self, like: Tensor) -> Tensor:
        """A tensor over the memory of ``like``, on the CPU, of which this loan knows when it goes."""
        if not like.numel():
            return like
        address = like.data_ptr()
        begin, memory = self._memory[bisect.bisect_right(self._memory, address, key=itemgetter(0)) - 1]
        flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=address - begin)
        return flat if like.dim() == 1 else flat.as_strided(like.shape, like.stride())

    def seal(self) -> None:
        """The loan is made: from now on only its tensors hold the memory."""
        self._memory.clear()
        self._is_sealed = True
        self._is_gone(None)

    def when_over(self, look: Callable[[], object]) -> None:
        """Have ``look`` called once nobody reads any more, before anybody may write: in the thread that has read."""
        self._looks.append(look)

    def _is_gone(self, _: object) -> None:
        if self._is_sealed and not any(memory() is not None for memory in self._alive):
            looks, self._looks = self._looks, []
            for look in () if self._is_abandoned() else looks:
                look()
            self._is_over = True

    def is_looked_into(self) -> None:
        """Called in whatever thread looks into the staged dict."""
        thread = threading.current_thread()
        if self.thread is None and thread is not self._owner and _is_called_by_dcp():
            self.thread = thread

    def is_reading(self) -> bool:
        """Return whether the writer may still look at what it was given."""
        if self._is_abandoned():
            self._looks.clear()  # what becomes of the memory from now on says nothing about a file
            return False
        return not self._is_over

    def _is_abandoned(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def wait(self) -> None:
        """Block until it no longer does.

        Raises:
            RuntimeError: nobody has begun to read for a long time.
        """
        give_up = time.monotonic() + _BEGIN_SECONDS
        while self.is_reading():
            if self.thread is None and time.monotonic() > give_up:
                raise RuntimeError(
                    f"an asynchronous save was staged, but for {_BEGIN_SECONDS} s no thread has begun to write it, and "
                    "somebody keeps it. If dcp.async_save failed, let go of its future; ArenaStager.stage() alone "
                    "lends state until its result is written or dropped."
                )
            if self.thread is None or self.thread is threading.current_thread():
                time.sleep(_POLL_SECONDS)
            else:
                self.thread.join(_POLL_SECONDS)  # a thread of a pool outlives the save: its tensors tell then


class StagedDict(dict[str, Any]):
    """The top level of what is handed to the writer: tells the loan which thread that is.

    It gives its contents to that thread once and forgets them, since ``torch.distributed.checkpoint`` keeps the dict
    itself for longer than it writes: in the work item of its thread, and in the traceback of a save that failed.
    """

    def __init__(self, loan: Loan, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._loan = loan
        self._is_handed_over = False

    def __getattribute__(self, name: str) -> Any:
        # The writing thread begins with isinstance(), which asks for __class__: so it is known before it looks at any
        # value, also where the save fails at once (no such folder, an unknown scheme).
        if name not in ("_loan", "_is_handed_over"):
            self._loan.is_looked_into()
        return super().__getattribute__(name)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As ``dict.items``; in the writing thread the only time.

        Raises:
            RuntimeError: the writing thread has had them already.
        """
        if self._is_handed_over:
            raise RuntimeError("a staged dict is written once; what it held has been handed to the writer")
        if threading.current_thread() is not self._loan.thread:
            return super().items()
        handed = dict(super().items())
        self.clear()
        self._is_handed_over = True
        return handed.items()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "ArenaStager lends memory of this process, which a process of its own cannot read. Use "
            "AsyncCheckpointerType.THREAD, or torch's DefaultStager, which copies."
        )


def _is_called_by_dcp() -> bool:
    """Return whether the call comes from ``torch.distributed``: a thread of a profiler may look at any object."""
    frame: FrameType | None = sys._getframe(2)
    callers: list[str] = []
    while frame is not None and len(callers) < _LOOKED_AT_FRAMES:
        callers.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return any(name.startswith("torch.distributed") for name in callers)
