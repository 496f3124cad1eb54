"""Forked children, as DataLoader workers are, and the memory of this process."""

import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path


def in_forked_child(action: Callable[[], object]) -> int:
    """The exit code of a child that does ``action``: 0 if it is true, 1 if it is not, negative for a signal."""
    gc.collect()  # not in the child: process groups of earlier tests crash there, without their threads
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if action() else 1
        except BaseException:  # noqa: BLE001  # the child ends behind it
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def address_space_bytes() -> int:
    return _statm_bytes(0)


def resident_bytes() -> int:
    return _statm_bytes(1)


def _statm_bytes(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")
