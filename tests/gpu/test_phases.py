"""Phases on real streams: what leaves is gone, nothing grows, nothing blocks."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadedOptimizer, OffloadPolicy
from fsdp_offload.core.engine import Engine, engine_of
from tests.gpu.streams import BUCKET_BYTES, MIB, Slow, offloaded, plain
from tests.gpu.test_memory import make, step
from tests.overlapping import EVERY_POLICY, Loop, same
from tests.parity import attach, leaves

KIB = 1 << 10
BLOCKED_CYCLES = 1_000_000_000  # about 0.5 s: no call may last until the device has done that
PHASES = ("offload", "release", "reload")
ROOM = {"device_bytes": 10 * BUCKET_BYTES}

pytestmark = pytest.mark.usefixtures("clean_device")


def go_through(optimizer: Optimizer, phases: Sequence[str]) -> None:
    """Nothing for a plain optimizer, which has no phases."""
    for phase in phases if isinstance(optimizer, OffloadedOptimizer) else ():
        getattr(optimizer, f"{phase}_states")()


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_bytes", [96 * MIB, 256 * MIB, 1 << 40])
def test_what_was_released_is_not_on_the_device(device: torch.device, device_bytes: int) -> None:
    model, optimizer = make(device)
    before = torch.cuda.memory_allocated()
    attach(optimizer, model=model, policy=OffloadPolicy(device_bytes=device_bytes, bucket_bytes=16 * MIB))
    for number in range(4):
        step(model, optimizer)
        assert 0 < torch.cuda.memory_allocated() - before <= device_bytes + MIB, f"cycle {number}"
        go_through(optimizer, ["offload", "release"])
        # In program order: copies may still run. Counters stay: fused optimizers have them on the device.
        assert torch.cuda.memory_allocated() - before < 64 * KIB, f"cycle {number}"
        go_through(optimizer, ["reload"])


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


# The same bits, whichever lane is slow -------------------------------------------------------------------------------


def take_what_is_released(optimizer: Optimizer) -> list[Tensor]:
    """Release, and fill what that frees with sevens: who reads it now is wrong, and so is who still writes it."""
    if not isinstance(optimizer, OffloadedOptimizer):
        return []
    engine = engine_of(optimizer)
    assert isinstance(engine, Engine)
    cache = engine.core.cache
    blocks = [*(item.block for item in cache.held), *(block for pool in cache.pools for block in pool.free)]
    addresses = {block.memory.data_ptr(): block.memory.numel() for block in blocks if block is not None}
    assert addresses
    del blocks
    go_through(optimizer, ["release"])
    taken: list[Tensor] = []
    while any(not any(one.data_ptr() <= at < one.data_ptr() + one.numel() for one in taken) for at in addresses):
        assert len(taken) < 2048, "the allocator has not given the memory out again"
        taken += [torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda") for nbytes in addresses.values()]
    return taken


def assert_untouched(taken: list[Tensor]) -> None:
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in taken), "released memory was written"


def megatron(loop: Loop, at: int) -> None:
    """Offload, release what others take at once, reload between the backward and the step."""
    go_through(loop.optimizer, ["offload"])
    taken = take_what_is_released(loop.optimizer) if at > 1 else []
    loop.backward(at)
    assert_untouched(taken)
    del taken
    go_through(loop.optimizer, ["reload"])
    loop.step()


def at_once(loop: Loop, at: int) -> None:
    """All phases right after the step, while its last updates and stores still run."""
    loop.backward(at)
    loop.step()
    go_through(loop.optimizer, ["offload"])
    taken = take_what_is_released(loop.optimizer) if at > 1 else []
    go_through(loop.optimizer, ["reload", "offload", "reload"])
    assert_untouched(taken)


@pytest.fixture(scope="module")
def expected(mesh: DeviceMesh) -> Loop:
    return plain(mesh).train(8)


@pytest.mark.parametrize("habit", [megatron, at_once])
@pytest.mark.parametrize("kind", ["none", "L", "U", "S"])
@EVERY_POLICY
def test_same_bits_whichever_lane_is_slow(
    mesh: DeviceMesh, expected: Loop, slow: Slow, fields: dict[str, Any], kind: str, habit: Callable[[Loop, int], None]
) -> None:
    slow(kind)
    assert same(expected, offloaded(mesh, {**ROOM, **fields}).train(8, habit))


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
