"""Copy queues of the CUDA driver: enough of them that the model's small copies do not wait behind ours.

The driver sends the copies of all streams through a few queues, first come, first served in each. With its default of
eight, streams share one as soon as loads of state and of parameters are under way together. A small pinned copy in the
model's own stream (``fully_shard`` makes one in each reduction, and in each gather of several ranks) then waits for the
*last* load that was issued before it: 56 ms in each backward of 24 sequences, measured on an H200. With 32 queues it
waits for one piece. Megatron asks the driver for one compute queue, and so gets only one copy queue.

Source: the environment variables in the appendix of the CUDA programming guide; compute capability 8.0 and above.
"""

import ctypes
import os
import sys
from collections.abc import MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
ENOUGH = 32
"""The most that the driver takes."""

_NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``, which every function of the driver returns before ``cuInit``."""

TOO_FEW = (
    "CUDA was in use before fsdp_offload was imported, so small copies of fully_shard may wait behind loads of state. "
    f"Import fsdp_offload first, or start with {VARIABLE}={ENOUGH}."
)
"""Warning for users who initialized CUDA before :func:`ask_for_copy_queues` ran."""


def ask_for_copy_queues(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set ``CUDA_DEVICE_MAX_COPY_CONNECTIONS`` for this process, unless it is set. Never initialises CUDA.

    Returns ``False`` if it is too late: the driver reads the variable once, when it is initialised. Does not import
    torch; if a torch build without CUDA has been imported, does not set the variable.
    """
    torch = sys.modules.get("torch")
    if VARIABLE in environment or (torch is not None and torch.version.cuda is None):
        return True
    environment[VARIABLE] = str(ENOUGH)
    return not _driver_is_initialized()


def _driver_is_initialized() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver here
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)
