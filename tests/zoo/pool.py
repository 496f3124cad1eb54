"""Processes in which the classes of others run: one that hangs or takes the interpreter down is one row."""

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch.distributed as dist

from .libraries import Found, find, load
from .outcomes import ATTACH_CRASHED, CRASHED, Combination, Outcome, Row
from .training import judge, say
from .verdicts import traced_verdict

# A fresh interpreter that has imported torch once, from which each worker is forked.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.zoo.training", "tests.zoo.libraries"])

# Read by libraries when they are imported. One thread: a sum over several is not the same twice. Eager: a step
# that is compiled for each class would take minutes, and what is compared is eager as well.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


class WorkerDiedError(Exception):
    """The process is gone, or did not answer in time."""


class Worker:
    """A process that answers one task after the other, each with as many messages as it has to say."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._log = Path(tempfile.mkstemp(prefix="zoo-", suffix=".log")[1])
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._log.unlink(missing_ok=True)

    def ask(self, task: Callable[..., Iterable[Any]], *args: Any) -> Iterator[Any]:
        """What ``task(*args)`` yields over there."""
        try:
            self._pipe.send((task, args))
            while True:
                self._wait()
                ended, message = self._pipe.recv()
                if ended:
                    return
                yield message
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise WorkerDiedError(f"the process ended with {self._process.exitcode}. {self._last_words()}") from error

    def _wait(self) -> None:
        """For a message. A busy machine must not make a class look as if it hung: what counts is the worker's own time.

        Raises:
            WorkerDiedError: it has computed for longer than the limit, or stood still for ten times as long.
        """
        cpu = psutil.Process(self._process.pid).cpu_times
        begin, begin_cpu = time.monotonic(), cpu()
        while not self._pipe.poll(min(5.0, self._limit_s)):
            used_s = sum(cpu()[:2]) - sum(begin_cpu[:2])
            if used_s > self._limit_s or time.monotonic() - begin > 10 * self._limit_s:
                raise WorkerDiedError(f"no answer within {self._limit_s:g} s of CPU, in {self._where()}")

    def _where(self) -> str:
        """The innermost function that runs over there, and the outer ones, as faulthandler writes them."""
        assert self._process.pid is not None
        size = self._log.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        end = time.monotonic() + 10
        while self._log.stat().st_size == size and time.monotonic() < end:
            self._process.join(0.1)
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', self._log.read_text(errors="replace")[size:])
        return ", called by ".join(f"{name} ({Path(path).name}:{line})" for path, line, name in frames[:30])

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines if line.strip())[:400]


def _serve(pipe: Connection, log: str) -> None:
    """What a worker does: its output goes to the log, in which a crash leaves its traceback."""
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        os.truncate(log, 0)
        for message in task(*args):
            pipe.send((False, message))
        pipe.send((True, None))


def _end_with_parent() -> None:
    """A run that is interrupted must not leave a process behind that still computes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def find_in(library: str) -> Iterator[Any]:
    """What a worker does to look into a library."""
    yield find(library)


def judge_class(cls: str, combinations: tuple[Combination, ...]) -> Iterator[Any]:
    """What a worker does to judge a class, in messages that can be sent."""
    if not dist.is_initialized():  # some ask for their rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loaded = load(cls)
    except Exception as error:  # noqa: BLE001  # found by one process, and not by another: a row
        yield "", say(error)
        return
    for message in judge(loaded, combinations):
        yield (str(message[0] or ""), message[1]) if isinstance(message, tuple) else message
    yield traced_verdict(cls)


def rows_of(
    library: str, version: str, classes: list[str], combinations: tuple[Combination, ...], limit_s: float
) -> Iterator[Row]:
    """Judge these classes in one process, and in a fresh one after each that was its end."""
    left = list(classes)
    while left:
        with Worker(limit_s) as worker:
            died = False
            while left and not died:
                row, died = _row_of(worker, library, version, left.pop(0), combinations)
                yield row


def _row_of(
    worker: Worker, library: str, version: str, cls: str, combinations: tuple[Combination, ...]
) -> tuple[Row, bool]:
    row = Row(library, version, cls)
    running: Combination | None = None
    try:
        for message in worker.ask(judge_class, cls, combinations):
            if isinstance(message, Outcome):
                row.outcomes.append(message)
                running = None
            elif isinstance(message, Combination):
                running = message
            elif isinstance(message, str):
                row.verdict = message
            else:
                row.recipe, row.problem = message
    except WorkerDiedError as error:
        if running is None:
            row.problem = f"in a plain run: {error}"
        else:
            in_attach = "offload_optimizer (" in str(error)
            row.outcomes.append(Outcome(running, ATTACH_CRASHED if in_attach else CRASHED, str(error)))
        return row, True
    return row, False


def run_all(
    libraries: Iterable[str],
    wanted: Callable[[str], bool],
    combinations: tuple[Combination, ...],
    *,
    processes: int,
    limit_s: float,
    on_found: Callable[[Found, int], None],
    on_row: Callable[[Row], None],
) -> None:
    """Judge every class of ``libraries`` whose name is ``wanted``; each defining module counts once."""
    os.environ.update(ENVIRONMENT)
    seen: set[str] = set()
    telling = threading.Lock()

    def look(library: str) -> Found:
        try:
            with Worker(limit_s) as worker:
                return next(worker.ask(find_in, library))
        except WorkerDiedError as error:
            return Found(library, "", (), (str(error),))

    def work(library: str, version: str, classes: list[str]) -> None:
        for row in rows_of(library, version, classes, combinations, limit_s):
            with telling:
                on_row(row)

    def study(library: str) -> None:
        found = look(library)
        with telling:
            classes = [cls for cls in found.classes if wanted(cls) and cls not in seen]
            seen.update(classes)
            on_found(found, len(classes))
        first, *others = [classes[begin : begin + 25] for begin in range(0, len(classes), 25)] or [[]]
        tasks.extend(pool.submit(work, library, found.version, piece) for piece in others)
        work(library, found.version, first)

    with ThreadPoolExecutor(processes) as pool:
        tasks = [pool.submit(study, library) for library in libraries]
        while tasks:  # each may have added others before it ends
            tasks.pop().result()
