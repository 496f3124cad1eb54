"""A truth value that the device computes and the host learns, without waiting for more than it."""

import torch
from torch import Tensor

from .lanes import current_stream


class HostFlag:
    """One truth value at a time, in memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_here = device.type == "cpu"
        pinned = {} if self._is_here else {"pin_memory": True}
        self._value = torch.zeros((), dtype=torch.bool, device="cpu", **pinned)  # type: ignore[call-overload]
        self._arrived = None if self._is_here else torch.Event(device)

    def put(self, flag: Tensor) -> None:
        """Send ``flag``, a ``bool`` of shape ``()``, behind what the current stream has been given."""
        self._value.copy_(flag, non_blocking=True)
        if self._arrived is not None:
            current_stream(self._device).record_event(self._arrived)

    def get(self) -> bool:
        """Return the value that was put last; blocks the host until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value)
