"""What an update on a stream of its own reads lives until compute has waited for it; a block that is given back dies.

On the CPU nothing is late: these look at what is alive. ``tests/gpu`` looks at bits and bytes.
"""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.engine import Engine, engine_of
from fsdp_offload.core.updates import BucketUpdates
from tests.overlapping import linear_blocks
from tests.parity import attach, host_copy


def make(
    mesh: DeviceMesh, overlap: Any, lr: float | Tensor = 1e-2, *, parameters: bool = False
) -> tuple[nn.Module, AdamW]:
    model = linear_blocks(mesh, 8)
    optimizer = AdamW(model.parameters(), lr=lr, fused=True)
    policy = OffloadPolicy(overlap=overlap, parameters=parameters, bucket_bytes=1024, device_bytes=4096)
    attach(optimizer, model=model, policy=policy)
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()


def alive(refs: list[Any]) -> int:
    return sum(one() is not None for one in refs)


def test_copies_of_hyperparameters_and_of_a_scale(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(mesh, "forward", torch.tensor(1e-2))
    refs: list[Any] = []
    plain_start = BucketUpdates.start

    def start(updates: BucketUpdates, *args: Any) -> None:
        plain_start(updates, *args)
        refs[:] = map(weakref.ref, updates.shared.copies)

    monkeypatch.setattr(BucketUpdates, "start", start)
    for _ in range(3):
        backward(model)
        assert alive(refs) == 0, "kept longer than needed"
        optimizer.found_inf = torch.tensor(0.0)  # a GradScaler sets it for the step
        optimizer.step()
        optimizer.zero_grad()
        assert refs
        assert alive(refs) == len(refs), "their memory is free while an update may still read it"
        del optimizer.found_inf


def test_gradients_of_which_some_came_late(mesh: DeviceMesh) -> None:
    model, optimizer = make(mesh, "iteration")
    for _ in range(4):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    late = model[0].bias
    late.requires_grad_(False)
    backward(model)
    late.requires_grad_(True)
    late.grad = torch.zeros_like(late)
    assert engine_of(optimizer).core.done, "the backward has updated nothing"
    refs = [weakref.ref(param.grad) for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    assert alive(refs) == len(refs)
    assert host_copy(late).isfinite().all()


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
def test_blocks_that_are_released_are_gone(mesh: DeviceMesh, overlap: str, parameters: bool) -> None:
    """Also from what updates were bound to."""
    model, optimizer = make(mesh, overlap, parameters=parameters)
    engine = engine_of(optimizer)
    assert isinstance(engine, Engine)
    for _ in range(4):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        cache = engine.core.cache
        blocks = [item.block for item in cache.held] + [block for pool in cache.pools for block in pool.free]
        memory = [StorageWeakRef(block.memory.untyped_storage()) for block in blocks]
        assert memory
        del blocks
        optimizer.offload_states()
        optimizer.release_states()
        assert all(one.expired() for one in memory)
        optimizer.reload_states()
