"""The command line in a process that may take little memory and little time, for input that asks for more."""

import ctypes
import gc
import multiprocessing
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.distributed.nursery import PRELOAD

MEMORY_BYTES = 512 << 20  # beside what the process has when it begins
_M_ARENA_MAX = -8
SECONDS = 60  # for one command, on a machine that does other things as well


class Ran(NamedTuple):
    """How a command has ended."""

    code: int
    output: str


class Limited:
    """A process that runs one command after the other."""

    def __init__(self, connection: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._connection = connection
        self._process = process

    def run(self, *arguments: object) -> Ran:
        """A command; an AssertionError if it does not end, or ends the process."""
        self._connection.send([str(argument) for argument in arguments])
        assert self._connection.poll(SECONDS), f"{arguments} takes longer than {SECONDS} s"
        try:
            return Ran(*self._connection.recv())
        except EOFError:
            self._process.join()
            raise AssertionError(f"{arguments} ended the process: {self._process.exitcode}") from None


@contextmanager
def limited() -> Iterator[Limited]:
    """Such a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*PRELOAD, "tests.checkpoint_tools.limited"]
    )  # other tests are forked from it as well
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Limited(ours, process)
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(connection: Connection) -> None:
    from typer.testing import CliRunner

    from checkpoint_tools.__main__ import app

    runner = CliRunner()
    for command in ("inspect a", "diff a a", "split a b --preset hf-gate-up", "convert a b", "convert a b --to torch"):
        runner.invoke(app, command.split())  # imports what there is to import
    runner.invoke(app, ["rename", "a", "b", "--family", "llama", "--from", "hf", "--to", "megatron"])
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # each thread would reserve 64 MiB, of which it uses next to nothing
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    gc.freeze()  # so that collecting is quick
    while True:
        gc.collect()  # what the last one has left in cycles does not count for this one
        result = runner.invoke(app, connection.recv())
        connection.send((result.exit_code, result.output))
