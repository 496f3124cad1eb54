"""Beside the conformance suite: steps that fail before they write, and writes that are lost."""

from typing import NoReturn

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.engine import engine_of
from fsdp_offload.core.updates import BucketUpdates
from tests.overlapping import linear_blocks
from tests.parity import attach, host_copy


def no_room(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("inside", [False, True], ids=["before the update", "in the update, before it writes"])
def test_a_step_that_fails_before_it_writes_loses_nothing_that_is_kept(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """The state on the device is newer than at home, and there is no other."""
    sides = []
    for offloaded in (False, True):
        model = linear_blocks(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, foreach=True)
        if offloaded:
            attach(optimizer, model=model, policy=OffloadPolicy(bucket_bytes=2048, device_bytes=1 << 20))
        for step in range(5):
            model(torch.full((2, 12), 1.0 + step)).square().sum().backward()
            if offloaded and step == 3:
                assert any(bucket.state.dirty for bucket in engine_of(optimizer).core.buckets), "nothing is kept"
                with monkeypatch.context() as patch:
                    patch.setattr(*((torch, "_foreach_lerp_") if inside else (BucketUpdates, "job")), no_room)
                    with pytest.raises(torch.OutOfMemoryError):
                        optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        states = [state for param in model.parameters() for state in optimizer.state[param].values()]
        sides.append(list(map(host_copy, [*model.state_dict().values(), *states])))
    assert all(map(torch.equal, *sides))


def test_a_write_that_is_lost_is_told(mesh: DeviceMesh) -> None:
    """Through a tensor from before the last step, of state that is newer on the device; fetched again, it counts."""
    model = linear_blocks(mesh, count=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(optimizer, model=model, policy=OffloadPolicy(bucket_bytes=1024, device_bytes=1 << 20))

    def step() -> None:
        model(torch.ones(2, 12)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = optimizer.state[model[0].weight]["exp_avg"]
    held.mul_(0.5)
    for _ in range(2):
        step()  # nothing is told of a write that counts
    held.mul_(0.5)
    with pytest.warns(UserWarning, match=r"State of .*weight.* was written .* and the write is lost"):
        step()
    step()
    optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)
    step()


def test_an_optimizer_that_sees_dtensors_updates_in_the_backward(mesh: DeviceMesh) -> None:
    model = linear_blocks(mesh, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    policy = OffloadPolicy(parameters=True, overlap="iteration", bucket_bytes=1024, device_bytes=4096)
    attach(optimizer, model=model, policy=policy)
    for step in range(6):
        model(torch.full((2, 12), 1.0 + step)).square().sum().backward()
        assert engine_of(optimizer).core.done or step < 3
        optimizer.step()
        optimizer.zero_grad()
