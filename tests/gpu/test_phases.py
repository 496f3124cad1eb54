"""Phases on a device: what leaves is gone, and nothing blocks. The bits: ``test_conformance``."""

import gc
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.cpu.test_phases import PHASES, go_through
from tests.gpu.streams import BUCKET_BYTES, MIB, offloaded, plain
from tests.overlapping import EVERY_POLICY
from tests.parity import leaves

KIB = 1 << 10
BLOCKED_CYCLES = 1_000_000_000  # about 0.5 s: no call may last until the device has done that
ROOM = {"device_bytes": 10 * BUCKET_BYTES}

pytestmark = pytest.mark.usefixtures("clean_device")


# Bytes ---------------------------------------------------------------------------------------------------------------


@EVERY_POLICY
def test_what_was_released_is_not_on_the_device_beside_a_model(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """As with a plain optimizer without its state. Gradients are gone as well, which updates beside the model read."""
    plain(mesh).train(1)  # what libraries take the first time is not ours
    gc.collect()
    before = torch.cuda.memory_allocated()
    alone = plain(mesh).train(3)
    moments = [state[name] for state in alone.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    state_bytes = sum(leaf.untyped_storage().nbytes() for moment in moments for leaf in leaves(moment))
    without_state = torch.cuda.memory_allocated() - before - state_bytes
    assert state_bytes > 2 * MIB
    del alone, moments
    gc.collect()
    before = torch.cuda.memory_allocated()
    loop = offloaded(mesh, {**ROOM, **fields})
    for at in range(0, 9, 3):
        loop.train(3, first=at)
        go_through(loop.optimizer, ["offload", "release"])
        # Each tensor of the plain one's state took a multiple of 512 bytes.
        assert torch.cuda.memory_allocated() - before == pytest.approx(without_state, abs=128 * KIB)


# Nothing blocks ------------------------------------------------------------------------------------------------------


@EVERY_POLICY
def test_no_phase_blocks_the_host(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    """Each returns before the device has done what it was given earlier."""
    loop = offloaded(mesh, {**ROOM, **fields}).train(4)
    go_through(loop.optimizer, PHASES)
    for phase in (*PHASES, *PHASES):
        torch.cuda.synchronize()
        torch.cuda._sleep(BLOCKED_CYCLES)
        passed = torch.cuda.Event()
        passed.record()
        go_through(loop.optimizer, [phase])
        assert not passed.query(), f"{phase}_states() waited for the device"
    torch.cuda.synchronize()
