"""Ranks killed in the middle of something: the newest complete checkpoint loads, and training from it is exact.

What is killed is ``examples/async_checkpoint.py``, the loop that we tell people to copy. Each rank stops at a known
place and says so; then all of them get SIGKILL, as from a scheduler or for want of memory.
"""

import functools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from examples import async_checkpoint
from fsdp_offload import OffloadPolicy
from tests.async_writers import TIMEOUT_S, read_checkpoint
from tests.distributed.nursery import PRELOAD
from tests.parity import same_value

pytestmark = pytest.mark.distributed

SAVE_EVERY, STEPS = 3, 12


# Ranks ---------------------------------------------------------------------------------------------------------------


def flags(folder: Path) -> list[str]:
    sizes = {"--steps": STEPS, "--save-every": SAVE_EVERY, "--width": 20, "--keep": 9}
    return ["--folder", str(folder), *(str(part) for pair in sizes.items() for part in pair)]


class Ranks:
    """A training in processes of its own, which may stop somewhere."""

    def __init__(self, world_size: int, folder: Path, stop_at: str = "", *, parameters: bool = False) -> None:
        multiprocessing.set_forkserver_preload(PRELOAD)
        context = multiprocessing.get_context("forkserver")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.reached = context.Semaphore(0)
        self.ranks = []
        for rank in range(world_size):
            args = rank, world_size, port, folder, stop_at, self.reached, parameters
            self.ranks.append(context.Process(target=run_rank, args=args, daemon=True))
            self.ranks[-1].start()

    def end(self, exit_code: int) -> None:
        for rank in self.ranks:
            rank.join(TIMEOUT_S)
        assert [rank.exitcode for rank in self.ranks] == [exit_code] * len(self.ranks)


def run_rank(rank: int, world_size: int, port: int, folder: Path, stop_at: str, reached: Any, parameters: bool) -> None:
    if parameters:  # on the host too, in the mode that has the most on its way at any time
        everything = functools.partial(OffloadPolicy, parameters=True, overlap="iteration")
        vars(async_checkpoint)["OffloadPolicy"] = everything
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    if stop_at:
        PLACES[stop_at](functools.partial(stop_here, reached))
    async_checkpoint.main(flags(folder))


def stop_here(reached: Any) -> NoReturn:
    reached.release()
    time.sleep(10 * TIMEOUT_S)  # it is killed here
    raise AssertionError("nobody has killed this process")


def finish(world_size: int, folder: Path, **options: Any) -> None:
    Ranks(world_size, folder, **options).end(0)


def kill(world_size: int, folder: Path, stop_at: str, **options: Any) -> None:
    """Start a training, wait until its ranks are at the place where they stop, and kill them."""
    training = Ranks(world_size, folder, stop_at, **options)
    for _ in training.ranks[: 1 if stop_at in ONLY_FIRST_RANK else None]:
        assert training.reached.acquire(timeout=TIMEOUT_S), f"nobody came to {stop_at}"
    assert all(rank.is_alive() for rank in training.ranks), f"a rank ended before all came to {stop_at}"
    for rank in training.ranks:
        rank.kill()
    training.end(-signal.SIGKILL)


# Where they stop: each is given what to call there, and puts it in place ----------------------------------------------

Stop = Callable[[], NoReturn]


def in_call(owner: Any, name: str, count: int, stop: Stop, *, after: bool = False) -> None:
    """In the ``count``-th call of a method or function, before or after it has done its work."""
    real, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < count:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        return stop()

    setattr(owner, name, counted)


PLACES: dict[str, Callable[[Stop], None]] = {
    "before data": lambda stop: in_call(FileSystemWriter, "write_data", 2, stop),
    "before metadata": lambda stop: in_call(FileSystemWriter, "write_data", 2, stop, after=True),
    "in metadata": lambda stop: in_call(os, "rename", 2, stop),
    "before latest": lambda stop: in_call(Path, "replace", 2, stop),
    "after latest": lambda stop: in_call(Path, "replace", 2, stop, after=True),
    "between steps": lambda stop: in_call(async_checkpoint, "train_step", 8, stop),
    "in the first step": lambda stop: in_call(async_checkpoint, "train_step", 1, stop, after=True),
    "after loading": lambda stop: in_call(FileSystemReader, "read_data", 1, stop, after=True),
}
ONLY_FIRST_RANK = {"in metadata", "before latest", "after latest"}


# Tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The checkpoints of a training that nobody has killed."""

    @functools.cache
    def run(world_size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks{world_size}") / "checkpoints"
        finish(world_size, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", *map(name_of, range(3, STEPS + 1, 3))]
        return folder

    return run


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def latest(folder: Path) -> str | None:
    return (folder / "latest").read_text() if (folder / "latest").exists() else None


def assert_equal(one: Path, other: Path) -> None:
    """Two checkpoints, everything in them, to the last bit."""
    values, others = read_checkpoint(one), read_checkpoint(other)
    assert values.keys() == others.keys()
    assert len(values) > 50
    assert [key for key in values if not same_value(values[key], others[key])] == []


@pytest.mark.parametrize(
    ("world_size", "stop_at", "survives", "parameters"),
    [
        (2, "before data", 3, False),
        (2, "in metadata", 3, False),
        (2, "between steps", 6, False),
        (1, "before metadata", 3, False),
        (1, "before latest", 3, False),
        (1, "after latest", 6, False),
        (1, "in the first step", None, False),
        (2, "before data", 3, True),
        (2, "between steps", 6, True),
        (1, "before metadata", 3, True),
        (1, "in the first step", None, True),
    ],
)
def test_what_was_complete_survives(
    world_size: int, stop_at: str, survives: int | None, parameters: bool, tmp_path: Path, uninterrupted: Any
) -> None:
    """Also with parameters on the host, whose checkpoints are those of a training without."""
    folder, whole = tmp_path / "checkpoints", uninterrupted(world_size)
    kill(world_size, folder, stop_at, parameters=parameters)
    found = latest(folder)
    # The second save of two may or may not have been found done between steps.
    assert found in ([name_of(3), name_of(6)] if stop_at == "between steps" else [survives and name_of(survives)])
    if found is not None:
        assert_equal(folder / found, whole / found)
    finish(world_size, folder, parameters=parameters)
    assert latest(folder) == name_of(STEPS)
    assert_equal(folder / name_of(STEPS), whole / name_of(STEPS))


def test_a_run_that_is_killed_while_it_loads_changes_nothing(tmp_path: Path, uninterrupted: Any) -> None:
    folder, whole = tmp_path / "checkpoints", uninterrupted(2)
    kill(2, folder, "before metadata")
    # All data is there, and only the metadata is missing: the tests above would see a file that is not complete.
    assert len(list((folder / name_of(6)).glob("*.distcp"))) == 2
    with pytest.raises(Exception, match="metadata"):
        read_checkpoint(folder / name_of(6))
    kill(2, folder, "after loading")
    assert latest(folder) == name_of(3)
    assert_equal(folder / name_of(3), whole / name_of(3))
    finish(2, folder)
    assert_equal(folder / name_of(STEPS), whole / name_of(STEPS))
