"""Each class of others runs in a process of its own: one that hangs or takes the interpreter down is one row."""

import faulthandler
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .libraries import Found, find, load
from .outcomes import ATTACH_CRASHED, CRASHED, SAME, Combination, Outcome, Row
from .training import judge, resume, say
from .verdicts import traced_verdict

# A fresh interpreter that has imported torch once, from which each process is forked.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.zoo.training", "tests.zoo.libraries"])

# Read by libraries when they are imported. One thread: a sum over several is not the same twice. Eager: a step
# that is compiled for each class would take minutes, and what is compared is eager as well.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


class DiedError(Exception):
    """The process is gone, or did not answer in time."""


def answers(limit_s: float, task: Callable[..., Iterable[Any]], *args: Any) -> Iterator[Any]:
    """What ``task(*args)`` yields in a process of its own.

    Raises:
        DiedError: it has crashed, or there was nothing new for so many seconds.
    """
    log = Path(tempfile.mkstemp(prefix="zoo-", suffix=".log")[1])
    pipe, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(theirs, str(log), task, args), daemon=True)
    process.start()
    theirs.close()
    try:
        while pipe.poll(limit_s):
            yield pipe.recv()
        raise DiedError(f"no answer within {limit_s:g} s")
    except EOFError:
        process.join()
        if process.exitcode:
            lines = map(str.strip, log.read_text(errors="replace").splitlines())
            last_words = " / ".join(filter(None, lines))[:400]
            raise DiedError(f"the process ended with {process.exitcode}. {last_words}") from None
    finally:
        process.kill()
        process.join()
        pipe.close()
        log.unlink()


def _run(pipe: Connection, log: str, task: Callable[..., Iterable[Any]], args: tuple[Any, ...]) -> None:
    """The process: its output goes to the log, in which a crash leaves its traceback."""
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.enable()
    for message in task(*args):
        pipe.send(message)


def judge_class(cls: str, combinations: tuple[Combination, ...], folder: Path) -> Iterator[Any]:
    """What a process does to judge a class, in messages that can be sent."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # some ask for their rank
    try:
        loaded = load(cls)
    except Exception as error:  # noqa: BLE001  # found by one process, and not by another: a row
        yield "", say(error)
        return
    yield from judge(loaded, combinations, folder=folder)
    yield traced_verdict(cls)


def resume_class(cls: str, combination: Combination, folder: Path) -> Iterator[Any]:
    """What a fresh process does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield from resume(load(cls), combination, folder)


def judged_row(library: str, version: str, cls: str, combinations: tuple[Combination, ...], limit_s: float) -> Row:
    """Judge this class."""
    row = Row(library, version, cls)
    running: Combination | None = None
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            for message in answers(limit_s, judge_class, cls, combinations, Path(folder)):
                row.take(message)
                running = message if isinstance(message, Combination) else None
            for number, saved in enumerate(row.outcomes):
                if saved.combination.resume_after and saved.outcome == SAME:
                    running = saved.combination
                    row.outcomes[number] = next(answers(limit_s, resume_class, cls, running, Path(folder)))
        except DiedError as error:
            if running is None:
                row.problem = f"in a plain run: {error}"
            else:
                in_attach = "in offload_optimizer" in str(error)
                row.outcomes.append(Outcome(running, ATTACH_CRASHED if in_attach else CRASHED, str(error)))
    return row


def _find(library: str) -> Iterator[Found]:
    yield find(library)


def _look(limit_s: float, library: str) -> Found:
    try:
        return next(answers(limit_s, _find, library))
    except DiedError as error:
        return Found(library, "", (), (str(error),))


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
    with ThreadPoolExecutor(processes) as pool:
        tasks = []
        for found in pool.map(partial(_look, limit_s), libraries):
            classes = [cls for cls in found.classes if wanted(cls) and cls not in seen]
            seen.update(classes)
            on_found(found, len(classes))
            about = found.library, found.version
            tasks += [pool.submit(judged_row, *about, cls, combinations, limit_s) for cls in classes]
        for task in as_completed(tasks):
            on_row(task.result())
