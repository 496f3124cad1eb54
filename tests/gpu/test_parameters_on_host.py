"""Parameters on the host, on a device: what lies where, and how much of it. The bits: ``test_conformance``."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from fsdp_offload import OffloadPolicy
from fsdp_offload.device.lanes import DeviceLink
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.hooks import ModelHooks
from fsdp_offload.fsdp.dtensor import local_shard
from tests.conformance.oracle import different
from tests.gpu.streams import SLEEP_CYCLES, Slow, offloaded
from tests.overlapping import Loop, Net, adamw, save_and_load


def deep() -> Net:
    return Net(width=1024, layers=48)


def test_gradients_go_however_late_the_link_is(mesh: DeviceMesh, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a group lie in one tensor, which one bucket that waits keeps alive."""
    slow("S", SLEEP_CYCLES // 2)
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=8 << 20, device_bytes=160 << 20)
    loop = Loop(mesh, adamw, policy, net=deep).train(6)
    allocated, reduced = [torch.cuda.memory_allocated()], ModelHooks._reduced

    def spy(*args: Any) -> None:
        reduced(*args)
        allocated.append(torch.cuda.memory_allocated())

    monkeypatch.setattr(ModelHooks, "_reduced", spy)
    loop.train(1)
    group_bytes = sum(local_shard(param).nbytes for param in loop.model.blocks[0].parameters())
    assert len(allocated) > 48
    # Five whose updates may be under way, and two that are gathered, with their gradients.
    assert max(allocated) - allocated[0] < 12 * group_bytes


def test_what_the_first_steps_took_is_no_room(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep all gradients; what comes and goes would fill that."""
    real = DeviceLink.room_bytes  # else all would stay, as it cannot be hidden
    monkeypatch.setattr(DeviceLink, "room_bytes", lambda self, when: real(self, when) if when == "current" else 0)
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=8 << 20)
    loop = Loop(mesh, adamw, policy, net=deep).train(20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    lasting_bytes = torch.cuda.memory_allocated()
    loop.train(2)
    sizes = [local_shard(param).nbytes for param in loop.model.parameters()]
    assert torch.cuda.max_memory_allocated() - lasting_bytes < sum(sizes) // 2


@pytest.mark.parametrize("device_bytes", ["auto", 160 << 20])
def test_a_steady_step_takes_no_memory(mesh: DeviceMesh, device_bytes: Any) -> None:
    """From the driver, neither on the device nor pinned. ``"auto"`` is steady once waits change its blocks no more."""
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=8 << 20, device_bytes=device_bytes)
    loop = Loop(mesh, adamw, policy, net=deep).train(22)
    engine = engine_of(loop.optimizer)
    assert engine is not None

    def taken() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        on_device, pinned = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
        return engine.core.cache.lasting_bytes, on_device["num_device_alloc"], pinned["num_host_alloc"]

    settled, before = (0,), taken()
    for step in range(22, 122, 5):
        loop.train(5, first=step)
        after = taken()
        if settled[0] == before[0] == after[0]:
            assert after == before
            return
        settled, before = before, after
    pytest.fail("never steady")


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """``limited(nbytes)`` leaves this process so much device memory beside what it has."""

    def limit(nbytes: int) -> None:
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + nbytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_first_steps_need_no_room_for_all_gradients(mesh: DeviceMesh, limited: Callable[[int], None]) -> None:
    """Nor those that measure the model alone, and that come after a checkpoint."""
    wanted = Loop(mesh, adamw, None, net=deep).train(20, save_and_load).everything()
    wanted = tree_map_only(torch.Tensor, torch.Tensor.cpu, wanted)  # pieces of the device's memory would stay with it
    gc.collect()
    policy = OffloadPolicy(parameters=True, overlap="iteration")
    loop = Loop(mesh, adamw, policy, net=deep)
    limited(sum(local_shard(param).nbytes for param in loop.model.parameters()) * 2 // 3)
    assert not different(wanted, loop.train(20, save_and_load).everything())


@pytest.mark.parametrize("nbytes", [1 << 30, 3 << 29])
def test_what_comes_to_stay_leaves_iterations_their_room(
    mesh: DeviceMesh, slow: Slow, limited: Callable[[int], None], nbytes: int
) -> None:
    """Also those that keep all gradients, in a loop that resets the statistics after each."""
    slow("S", SLEEP_CYCLES // 2)  # all would stay, as it cannot be hidden
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=8 << 20)
    loop = Loop(mesh, adamw, policy, net=deep)
    limited(nbytes)
    for step in range(20):
        torch.cuda.reset_peak_memory_stats()
        if step == 12:  # after which nothing is known of the last step
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())
        loop.train(1, first=step)
    assert engine_of(loop.optimizer).core.cache.lasting_bytes < nbytes


def test_where_the_parameters_are(mesh: DeviceMesh) -> None:
    loop = offloaded(mesh, {"overlap": "iteration", "parameters": True})
    params = list(loop.model.parameters())
    assert {param.device.type for param in params} == {"cuda"}
    assert all(param.detach().to_local().is_pinned() for param in params)
    loop.train(6)
    assert all(value.to_local().device.type == "cpu" for value in loop.model.state_dict().values())
    other = torch.zeros_like(params[0], device="cuda")
    with torch.no_grad(), pytest.raises(RuntimeError, match="same device"):
        params[0].add(other)
