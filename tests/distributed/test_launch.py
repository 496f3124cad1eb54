"""How ranks are started: a rank that fails, dies, hangs or skips says so, and the next ones know nothing of it."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import launch
from tests.distributed.launch import spawn

# On GPUs torch starts the ranks one by one.
pytestmark = [pytest.mark.distributed, pytest.mark.gloo]


def note(rank: int, world_size: int, folder: Path) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    (folder / f"{world_size}-{rank}").touch()


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("this rank has failed")
    dist.barrier()


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_nobody(rank: int, world_size: int) -> None:
    threading.Event().wait()


def runs(tmp_path: Path, world_size: int) -> bool:
    for path in tmp_path.glob(f"{world_size}-*"):
        path.unlink()
    spawn(note, world_size, tmp_path, tmp_path)
    return {path.name for path in tmp_path.glob(f"{world_size}-*")} == {f"{world_size}-{i}" for i in range(world_size)}


WRONGS: dict[str, tuple[Callable[..., None], str]] = {
    "fails, and shows its traceback": (fail, r"(?s)in fail\n.*ValueError: this rank has failed"),
    "dies": (die, "process 1 terminated with signal SIGKILL"),
    "hangs, and shows where": (wait_for_nobody, r"(?s)rank [01] was at:.* in wait_for_nobody\n"),
}


@pytest.mark.parametrize(("run", "match"), WRONGS.values(), ids=WRONGS)
def test_a_rank_that(run: Any, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        if run is wait_for_nobody:
            patch.setattr(launch, "STUCK_AFTER_S", 1.0)
        with pytest.raises(pytest.fail.Exception, match=match):
            spawn(run, 2, tmp_path)
    assert runs(tmp_path, 2)
