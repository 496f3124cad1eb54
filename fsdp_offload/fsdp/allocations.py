"""Records allocations and frees of torch's CUDA allocator, in order, from its private memory history.

Seen in torch 2.11, 2.13 and 2.14.1: ``torch.cuda.memory._record_memory_history`` and ``_snapshot``, and
``torch._C._cuda_isHistoryEnabled``. If one of them is missing, or the user records already, there is no history.
"""

import weakref

import torch

_MOST_EVENTS = 1 << 18


class History:
    """Records the allocations and frees of one device during an iteration."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> bool:
        """Begin to record, and return whether that worked. Each allocation costs the host about 1 us."""
        try:
            if self._device.type != "cuda" or torch._C._cuda_isHistoryEnabled():
                return False  # the user records
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=_MOST_EVENTS, clear_history=True
            )
        except (AttributeError, TypeError, RuntimeError):  # another torch, another allocator
            return False
        self._stop = weakref.finalize(self, torch.cuda.memory._record_memory_history, None)  # also without end()
        self._stop.atexit = False
        return True

    def end(self) -> list[int]:
        """Stop recording; return the bytes allocated (positive) and freed (negative), in the host's order."""
        try:
            events = torch.cuda.memory._snapshot()["device_traces"][self._device.index]
        finally:
            self._stop()
        signs = {"alloc": 1, "free_requested": -1}
        return [signs[one["action"]] * one["size"] for one in events if one["action"] in signs]
