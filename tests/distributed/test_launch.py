"""How ranks are started: a rank that fails, dies, hangs or skips says so, and the next ones know nothing of it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_offload.device import link
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


def skip(rank: int, world_size: int, only: int | None = None) -> None:
    if only is None or rank == only:
        pytest.importorskip("a_package_that_nobody_has", reason="nobody has it")


def runs(tmp_path: Path, world_size: int) -> bool:
    for path in tmp_path.glob(f"{world_size}-*"):
        path.unlink()
    spawn(note, world_size, tmp_path, tmp_path)
    return {path.name for path in tmp_path.glob(f"{world_size}-*")} == {f"{world_size}-{i}" for i in range(world_size)}


def test_every_rank_runs(tmp_path: Path) -> None:
    assert all(runs(tmp_path, world_size) for world_size in (1, 3, 2))


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


def test_what_a_rank_lacks_skips_the_test(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="nobody has it"):
        spawn(skip, 2, tmp_path)
    with pytest.raises(pytest.fail.Exception, match="only some skip: skipped-1"):
        spawn(skip, 2, tmp_path, 1)


def leave_traces(rank: int, world_size: int) -> None:
    os.environ["LEFT_BY_A_RANK"] = "1"
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    link.device_link(torch.device("cpu"))
    assert link._links


def find_none(rank: int, world_size: int) -> None:
    assert "LEFT_BY_A_RANK" not in os.environ
    assert torch.initial_seed() != 5
    assert torch.get_default_dtype() == torch.float32
    assert not link._links
    assert not multiprocessing.active_children()
    assert threading.active_count() == 1


def test_ranks_find_no_traces_of_others(tmp_path: Path) -> None:
    spawn(leave_traces, 2, tmp_path)
    spawn(find_none, 2, tmp_path)
