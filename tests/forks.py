"""Forked children, as DataLoader workers are."""

import gc
import os
from collections.abc import Callable


def in_forked_child(action: Callable[[], object]) -> int:
    """The exit code of a child that does ``action``: 0 if it is true, 1 if it is not, negative for a signal."""
    gc.collect()  # not in the child: process groups of earlier tests crash there, without their threads
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
