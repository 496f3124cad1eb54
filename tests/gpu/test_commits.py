"""Commits on streams, one of which is slow: where a process is killed, files hold the newest commit, bit for bit."""

import tempfile
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.listeners import newest_commit, recover, recoverable
from tests.conformance.oracle import different
from tests.core.test_interrupts import POLICIES
from tests.core.test_late_commits import Committing
from tests.gpu.test_conformance import LANES, SLEEP_CYCLES
from tests.overlapping import slow_down

STEPS = 7


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("mode", POLICIES)
@pytest.mark.parametrize("clips", [False, True])
def test_the_newest_commit_is_whole_wherever_training_is_killed(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, mode: str, lane: str, clips: bool
) -> None:
    policy = OffloadPolicy(bucket_bytes=2048, device_bytes=9 * 4096, **POLICIES[mode])
    plain = Committing(mesh, None, clips=clips).train(STEPS)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, monkeypatch.context() as patch:
        folder = Path(memory) / "run"
        slow_down(lane, SLEEP_CYCLES, patch.setattr)
        loop = Committing(mesh, policy, clips=clips)
        run = recoverable(loop.optimizer, folder)
        for step in range(STEPS):
            loop.train(1, first=step)
            run.commit(step)
        loop.backward(STEPS)  # waits for the commit, and overwrites the one before
        run.folder.leave(deletes=False)  # killed
        assert newest_commit(folder) == STEPS
        other = Committing(mesh, policy, clips=clips)
        found = recover(other.optimizer, folder)
        assert found.extra == STEPS - 1
        assert not different(other.values(), plain.values())
        found.close()
