"""Commits on late lanes: where a process is killed, the files hold the newest commit, bit for bit, without a race.

The thread that writes records comes as late as it may: when training waits for it.
"""

import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, clip_grad_norm_, offload_optimizer
from fsdp_offload.listeners import newest_commit, recover, recoverable, recovery
from tests.core.late import late
from tests.parity import leaves, same_values

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


class Loop:
    """Trains; some steps clip."""

    def __init__(self, mesh: DeviceMesh, policy: OffloadPolicy | None, *, clips: bool) -> None:
        torch.manual_seed(0)
        self.device = torch.device(mesh.device_type)
        self.model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))).to(self.device)
        for block in self.model[:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=True)
        self.clips = clips
        if policy is not None:
            offload_optimizer(self.optimizer, model=self.model, policy=policy)

    def backward(self, step: int) -> None:
        data = torch.randn(3, 24, generator=torch.Generator().manual_seed(step))
        self.model(data.to(self.device)).square().mean().backward()

    def update(self, step: int) -> None:
        if self.clips:
            clip_grad_norm_(self.optimizer, 1e9 if step % 3 else 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        states = [self.optimizer.state.get(param, {}) for param in self.model.parameters()]
        found = [leaf for state in states for name in sorted(state) for leaf in leaves(state[name])]
        return [
            one.detach().cpu().clone() for one in (*(param.to_local() for param in self.model.parameters()), *found)
        ]


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
    plain, wanted = Loop(mesh, None, clips=clips), []
    for step in range(steps):
        plain.backward(step)
        plain.update(step)
        wanted.append(plain.values())
    with late(seed):
        loop = Loop(mesh, policy, clips=clips)
        run = recoverable(loop.optimizer, folder)
        for step in range(steps):
            loop.backward(step)
            loop.update(step)
            if (step + 1) % every == 0:
                run.commit(step)
        if in_backward:
            loop.backward(steps)
        number = newest_commit(folder)
        run.folder.leave(deletes=False)  # killed
    if number is None:
        return 0
    other = Loop(mesh, policy, clips=clips)
    found = recover(other.optimizer, folder)
    assert isinstance(found.extra, int)
    assert same_values(other.values(), wanted[found.extra]), (
        f"seed {seed}: {policy}, commit {number}, step {found.extra}"
    )
    assert found.extra >= steps - (1 if in_backward else 2) * every
    found.close()
    return number


@pytest.mark.filterwarnings("ignore:offload_optimizer. ")
def test_the_newest_commit_is_whole_wherever_training_is_killed(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ThreadPoolExecutor", LateWriter)
    found = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            found.append(check(mesh, seed, Path(memory) / "run"))
    assert max(found) > 3
