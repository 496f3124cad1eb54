"""A process that lives on beside the tests, from which the ranks of one test file are forked.

It has imported torch and the file (with whatever framework that is about), and does nothing else: no threads, no
process group, no optimizer. So ranks start quickly, and what one does to its process is gone with it.
"""

import atexit
import importlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

# Imported once, in the process from which all others are forked.
PRELOAD = [
    "torch",
    "torch._dynamo",  # the first backward of a fully_shard model imports it
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
]

_MORE = ["fsdp_offload.checkpoint", "tests.distributed.models", "tests.overlapping", "tests.twins"]

Work = Callable[[str, Any], str | None]


class Nursery:
    """The process of one test file."""

    def __init__(self, module: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD + _MORE)
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, module))
        self.process.start()
        theirs.close()

    def run(self, work: Work, case: object) -> str | None:
        try:
            self.connection.send((work, case))
            problem: str | None = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            problem = f"the process from which ranks are forked ended with {self.process.exitcode}"
        except BaseException:  # as by Ctrl-C: its answer would be taken for that to the next case
            self.process.kill()  # and its ranks get a signal
            raise
        return problem

    def end(self) -> None:
        self.connection.close()  # which it waits for
        self.process.join()


_living: dict[str, Nursery] = {}  # by module; at most one


def run(module: str, work: Work, case: object) -> str | None:
    """Call ``work("fork", case)`` in the process of ``module``; in a new one if there is none, or if it has died."""
    if module not in _living or not _living[module].process.is_alive():
        end()
        _living[module] = Nursery(module)
    return _living[module].run(work, case)


@atexit.register
def end() -> None:
    """Let the process go: before multiprocessing waits for it in vain."""
    while _living:
        _living.popitem()[1].end()


def _serve(connection: Connection, module: str) -> None:
    torch.set_num_threads(1)  # threads would not survive the fork
    importlib.import_module(module)
    while True:
        try:
            work, case = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        connection.send(work("fork", case))
