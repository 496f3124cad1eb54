"""Parameters, state, losses and counters are bitwise those of plain training, whatever the loop does."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, remove_offload
from fsdp_offload.core.engine import engine_of
from fsdp_offload.core.updates import BucketUpdates
from fsdp_offload.torch_compat.fully_shard import sharded_data
from fsdp_offload.torch_compat.homed import is_homed
from tests.core.programs import check, local
from tests.distributed.launch import DEVICE_TYPE, spawn
from tests.parity import attach


@pytest.mark.parametrize("seed", range(40))
def test_random_program(mesh: DeviceMesh, seed: int) -> None:
    check(seed, mesh)


def trained(mesh: DeviceMesh, *, offloaded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two blocks that have trained for six steps; gradients are zeroed, and not cleared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for block in model:
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if offloaded:
        policy = OffloadPolicy(parameters=True, overlap="iteration")
        attach(optimizer, model=model, policy=policy)
    for step in range(6):
        model(torch.full((2, 8), float(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model, optimizer


def values(model: nn.Module) -> list[Tensor]:
    return [local(value) for value in model.state_dict().values()]


def test_gradients_may_be_zeroed_instead_of_cleared(mesh: DeviceMesh) -> None:
    (plain, _), (ours, optimizer) = (trained(mesh, offloaded=one) for one in (False, True))
    assert engine_of(optimizer).early._clean_steps > 0, "updates have not begun in the backward"
    assert all(map(torch.equal, values(plain), values(ours)))


def test_after_a_failed_step_a_model_is_not_saved_but_loaded(mesh: DeviceMesh) -> None:
    model, optimizer = trained(mesh, offloaded=True)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    engine_of(optimizer).steps.failure = "an earlier step() stopped"
    with pytest.raises(RuntimeError, match=r"model.state_dict\(\) refused"):
        model.state_dict()
    model.load_state_dict(saved)


@pytest.mark.parametrize("inside", [False, True], ids=["before the update", "in the update, before it writes"])
def test_a_step_that_fails_before_it_writes_loses_nothing_that_is_kept(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """The state on the device is newer than at home, and there is no other."""
    sides = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))
        for block in model:
            fully_shard(block, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, foreach=True)
        if offloaded:
            attach(optimizer, model=model, policy=OffloadPolicy(bucket_bytes=2048, device_bytes=1 << 20))
        for step in range(5):
            model(torch.full((2, 12), 1.0 + step)).square().sum().backward()
            if offloaded and step == 3:
                assert any(bucket.state.dirty for bucket in engine_of(optimizer).core.buckets), "nothing is kept"
                with monkeypatch.context() as patch:
                    if inside:
                        patch.setattr(torch, "_foreach_lerp_", no_room)
                    else:
                        patch.setattr(BucketUpdates, "job", no_room)
                    with pytest.raises(torch.OutOfMemoryError):
                        optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        states = [state for param in model.parameters() for state in optimizer.state[param].values()]
        sides.append([*values(model), *map(local, states)])
    assert all(map(torch.equal, *sides))


def test_a_write_that_is_lost_is_told(mesh: DeviceMesh) -> None:
    """Through a tensor from before the last step, of state that is newer on the device; fetched again, it counts."""
    model = nn.Linear(12, 12)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(optimizer, model=model, policy=OffloadPolicy(bucket_bytes=1024, device_bytes=1 << 20))

    def step() -> None:
        model(torch.ones(2, 12)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = optimizer.state[model.weight]["exp_avg"]
    held.mul_(0.5)
    for _ in range(2):
        step()  # nothing is told of a write that counts
    held.mul_(0.5)
    with pytest.warns(UserWarning, match=r"State of .*weight.* was written .* and the write is lost"):
        step()
    step()
    optimizer.state[model.weight]["exp_avg"].mul_(0.5)
    step()


def no_room(*_: object) -> NoReturn:
    raise torch.OutOfMemoryError("full")


def updated_on_cpu(mesh: DeviceMesh, policy: OffloadPolicy, *, offloaded: bool) -> list[list[Tensor]]:
    """What there is after each of six steps, in one of which only some parameters have gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    if offloaded:
        attach(optimizer, model=model, policy=policy)
    seen = []
    for step in range(6):
        model(torch.full((2, 24), float(step))).square().sum().backward()
        if step == 4 and policy.overlap != "iteration":
            model[1].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        states = [state for param in model.parameters() for state in optimizer.state[param].values()]
        seen.append([value.clone() for value in (*values(model), *map(local, states))])
    return seen


@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_the_cpu_updates_the_same_share_with_the_same_bits(mesh: DeviceMesh, overlap: str, fraction: float) -> None:
    policy = OffloadPolicy(overlap=overlap, host_fraction=fraction, bucket_bytes=2048, device_bytes=8192)
    before, ours = (updated_on_cpu(mesh, policy, offloaded=one) for one in (False, True))
    for one, other in zip(before, ours, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
def test_an_optimizer_that_sees_dtensors_sees_streamed_ones(mesh: DeviceMesh, overlap: str) -> None:
    policy = OffloadPolicy(parameters=True, overlap=overlap, bucket_bytes=1024, device_bytes=4096)
    sides = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(5)))
        for block in model:
            fully_shard(block, mesh=mesh)
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
        if offloaded:
            attach(optimizer, model=model, policy=policy)
            assert all(map(is_homed, model.parameters()))
        for step in range(6):
            model(torch.full((2, 12), 1.0 + step)).square().sum().backward()
            if offloaded and overlap == "iteration" and step > 2:
                assert engine_of(optimizer).core.done, "the backward has updated nothing"
            optimizer.step()
            optimizer.zero_grad()
        states = [optimizer.state[param] for param in model.parameters()]
        sides.append([*values(model), *(local(state[name]) for state in states for name in sorted(state))])
    assert all(map(torch.equal, *sides))


def run_programs(rank: int, world_size: int, first: int, last: int) -> None:
    mesh = init_device_mesh(DEVICE_TYPE, (world_size,))
    for seed in range(first, last):
        check(seed, mesh)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("first", range(100, 200, 20))
def test_random_programs_on_two_ranks(tmp_path: Path, first: int) -> None:
    spawn(run_programs, 2, tmp_path, first, first + 20)


def train_past_removal(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(DEVICE_TYPE, (world_size,))
    seen = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8)).to(DEVICE_TYPE)
        for block in model:
            fully_shard(block, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if offloaded:
            attach(optimizer, model=model, policy=OffloadPolicy(parameters=True))
        for step in range(4):
            if offloaded and step == 2:
                remove_offload(optimizer)
                for data in sharded_data(model):
                    assert data.numel(), f"rank {rank} has no padding to gather, and the others wait for it"
            model(torch.ones(2, 8, device=DEVICE_TYPE)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(values(model))
    assert all(map(torch.equal, *seen))


def test_an_empty_shard_is_gathered_after_removal(tmp_path: Path) -> None:
    spawn(train_past_removal, 2, tmp_path)
