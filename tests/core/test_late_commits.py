"""Commits on late lanes: where a process is killed, the files hold the newest commit, bit for bit, without a race.

The thread that writes records comes as late as it may: when training waits for it.
"""

import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_offload import OffloadPolicy
from fsdp_offload.api.wrapped import attached
from fsdp_offload.listeners import newest_commit, recover, recoverable, recovery
from tests.conformance.oracle import ALWAYS, NEVER, different
from tests.core.late import late
from tests.overlapping import Loop, Net

SEEDS = int(os.environ.get("LATE_COMMITS", "40"))


class LateFuture(Future[None]):
    """Runs its function when it is waited for."""

    function: Callable[[], None]

    def exception(self, timeout: float | None = None) -> None:
        self.function()


class LateWriter:
    """Stands in for the executor of commits."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., None], *args: Any) -> LateFuture:
        future = LateFuture()
        future.function = lambda: function(*args)
        return future


class Committing(Loop):
    """Some of its steps clip, if any."""

    def __init__(self, mesh: DeviceMesh, policy: OffloadPolicy | None, *, clips: bool) -> None:
        make, net = partial(torch.optim.AdamW, lr=0.02, fused=True), partial(Net, width=12, layers=1)
        super().__init__(mesh, make, policy, net=net)
        self.clips = clips

    def step(self) -> None:
        if self.clips:
            self.clip(NEVER if self.schedulers[0].last_epoch % 3 else ALWAYS)
        super().step()

    def values(self) -> dict[str, Any]:
        """Copy what a recovery restores."""
        return {name: value for name, value in self.everything().items() if name != "seen"}


def check(mesh: DeviceMesh, seed: int, folder: Path) -> int:
    rng = random.Random(seed)
    mode = rng.choice(["step", "forward", "iteration"])
    policy = OffloadPolicy(
        overlap=mode,  # type: ignore[arg-type]
        parameters=rng.random() < 0.5,
        bucket_bytes=2048,
        device_bytes=rng.choice([5, 9]) * 4096,
    )
    clips, every, steps, in_backward = rng.random() < 0.4, rng.choice([1, 1, 2]), rng.randint(3, 8), rng.random() < 0.5
    with late(seed) as lanes:
        loop = Committing(mesh, policy, clips=clips)
        note = loop.optimizer.param_groups[0]["note"] = torch.zeros(())
        run = recoverable(loop.optimizer, folder)
        for step in range(steps):
            loop.train(1, first=step)
            if (step + 1) % every == 0:
                run.commit(step)
                note.add_(1)  # as a loop writes the learning rate before the next backward
        if in_backward:
            loop.backward(steps)
        for _ in range(rng.choice([0, 10, 200])):  # the device is ahead of where the host waits for it
            lanes.world.run_one()
        number = newest_commit(folder)
        run.folder.leave(deletes=False)  # killed
    if number is None:
        return 0
    other = Committing(mesh, policy, clips=clips)
    found = recover(other.optimizer, folder)
    assert isinstance(found.extra, int)
    assert other.optimizer.param_groups[0].pop("note").item() == number - 1
    plain = Committing(mesh, None, clips=clips).train(found.extra + 1)
    problems = different(other.values(), plain.values())
    assert not problems, f"seed {seed}: {policy}, commit {number}, step {found.extra}: {problems}"
    assert found.extra >= steps - (1 if in_backward else 2) * every
    found.close()
    return number


@pytest.mark.filterwarnings("ignore:offload_optimizer. ")
def test_copies_live_until_the_store_that_reads_them_has_run(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "Worker", LateWriter)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        loop = Committing(mesh, OffloadPolicy(), clips=False)
        loop.model.register_buffer("more", torch.ones(3))
        run = recoverable(loop.optimizer, Path(memory) / "run")
        loop.train(1)
        store, read = attached(loop.optimizer).engine.core.lanes.store, list[StorageWeakRef]()
        plainly = store.run

        def seen(function: Callable[[], None], reads: Any = (), writes: Any = ()) -> None:
            read.extend(StorageWeakRef(one.untyped_storage()) for one in reads)
            plainly(function, reads, writes)

        monkeypatch.setattr(store, "run", seen)
        run.commit()
        assert read
        assert not any(one.expired() for one in read)
        run.close()


@pytest.mark.filterwarnings("ignore:offload_optimizer. ")
def test_the_newest_commit_is_whole_wherever_training_is_killed(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "Worker", LateWriter)
    found = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            found.append(check(mesh, seed, Path(memory) / "run"))
    assert max(found) > 3
