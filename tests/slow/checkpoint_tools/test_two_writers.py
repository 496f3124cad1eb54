"""Two processes that write to one place, either of them killed at any point: what one has finished is whole.

A process counts what it asks of the operating system in that place, and ends itself at a number that is drawn: by the
signal that nothing can catch, or as by Ctrl-C. ``TRIALS=100`` in the environment takes some minutes.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.stored.reading import open_checkpoint
from checkpoint_tools.write.sinks import CLAIM_PREFIX, remote_sink
from tests.checkpoint_tools.checkpoints import save
from tests.checkpoint_tools.offline import DOWN, FUSED, assert_same, rewritten, rule

TRIALS = int(os.environ.get("TRIALS", "8"))
DONE, REFUSED, INTERRUPTED = 0, 2, 130
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "tests.checkpoint_tools.offline",
    "fsspec.implementations.local",
    __name__,
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "source"
    state = {FUSED: torch.arange(60_000.0).view(600, 100), DOWN: torch.ones(300, 40), "other": torch.zeros(30)}
    return save(folder, {"model": state}, single_file_per_rank=False)


def write(source: Path, destination: str, how: signal.Signals, last: int) -> None:
    """In a process of its own, which ends itself at its ``last`` request; never, if that is beyond all of them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = 0
    here = destination.removeprefix("file://")

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal requests
        if event in _EVENTS and any(isinstance(arg, str | bytes) and here in os.fsdecode(arg) for arg in args):
            requests += 1
            if requests == last:
                os.kill(os.getpid(), how)

    sys.addaudithook(count)
    try:
        rewritten("split", source, destination, rule(), threads=1)
    except CheckpointError:
        os._exit(REFUSED)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    os._exit(DONE)


_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_one_has_finished_is_whole(source: Path, tmp_path: Path, scheme: str) -> None:
    expected = rewritten("split", source, tmp_path / "expected", rule())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    choose = random.Random(4)
    finished = killed = 0
    for trial in range(TRIALS):
        place = tmp_path / f"{trial}"
        place.mkdir()
        how = choose.choice([signal.SIGKILL, signal.SIGINT])
        ends = [choose.randrange(1, 60), choose.choice([10_000, choose.randrange(1, 60)])]
        choose.shuffle(ends)
        arguments = [(source, f"{scheme}{place / 'made'}", how, last) for last in ends]
        processes = [context.Process(target=write, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = [process.exitcode for process in processes]
        assert set(codes) <= {DONE, REFUSED, INTERRUPTED, -signal.SIGKILL}, codes
        if DONE in codes or (place / "made" / ".metadata").exists():
            made = open_checkpoint(place / "made")
            assert not check_structure(made, 1)[0], (trial, codes, ends, how)
            assert_same(made, expected)
            finished += 1
        killed += -signal.SIGKILL in codes
        assert codes != [DONE, DONE]
        shutil.rmtree(place)
    assert finished
    assert killed


def test_whoever_is_not_alone_leaves_and_takes_nothing_along(tmp_path: Path) -> None:
    for url in ("memory://two_writers", f"file://{tmp_path}/made"):
        fs, root = fsspec.url_to_fs(url)
        with remote_sink(url) as first:
            with pytest.raises(CheckpointError, match="another process is writing to"), remote_sink(url):
                pytest.fail("both write")
            first.write_metadata(b"first", "a/file")
            first.write_metadata(b"metadata")
        assert sorted(path.removeprefix(root).strip("/") for path in fs.find(root)) == [".metadata", "a/file"]
        with pytest.raises(CheckpointError, match="exists; give a name that is not taken"), remote_sink(url):
            pytest.fail("over what is finished")
        assert fs.cat_file(f"{root}/.metadata") == b"metadata"


def test_who_is_interrupted_removes_what_it_has_sent(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/made"

    def interrupted() -> None:
        with remote_sink(url) as sink:
            sink.write_metadata(b"1")
            (tmp_path / "made" / "another").write_text("not ours")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["another"]


def test_a_claim_that_a_kill_has_left(source: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/made"
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / f"{CLAIM_PREFIX}0").touch()
    with pytest.raises(CheckpointError, match="was killed while it did: wait for it, remove what it has left"):
        rewritten("split", source, url, rule())
