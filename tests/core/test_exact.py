"""Parameters, state, losses and counters are bitwise those of plain training, whatever the loop does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy
from fsdp_offload.core.attached import CoreEngine
from fsdp_offload.core.switch import VARIABLE
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.torch_compat.homed import is_homed
from tests.core.programs import check, local
from tests.distributed.launch import DEVICE_TYPE, spawn
from tests.parity import attach


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


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
    assert engine_of(optimizer)._clean_steps > 0, "updates have not begun in the backward"
    assert all(map(torch.equal, values(plain), values(ours)))


def test_after_a_failed_step_a_model_is_not_saved_but_loaded(mesh: DeviceMesh) -> None:
    model, optimizer = trained(mesh, offloaded=True)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    engine_of(optimizer).steps.failure = "an earlier step() stopped"
    with pytest.raises(RuntimeError, match=r"model.state_dict\(\) refused"):
        model.state_dict()
    model.load_state_dict(saved)


def updated_on_cpu(mesh: DeviceMesh, policy: OffloadPolicy, *, on_core: bool) -> list[list[Tensor]]:
    """What there is after each of six steps, in one of which only some parameters have gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(int(on_core)))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        for block in model:
            fully_shard(block, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        attach(optimizer, model=model, policy=policy)
    assert isinstance(engine_of(optimizer), CoreEngine) is on_core
    seen = []
    for step in range(6):
        model(torch.full((2, 24), float(step))).square().sum().backward()
        if step == 4 and policy.overlap != "iteration":
            model[1].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        states = [state for param in model.parameters() for state in optimizer.state[param].values()]
        seen.append([value.clone() for value in (*values(model), *map(local, states))])
    assert optimizer.offload_report().step.host_updated_bytes > 0
    return seen


@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_the_cpu_updates_the_same_share_with_the_same_bits(mesh: DeviceMesh, overlap: str, fraction: float) -> None:
    policy = OffloadPolicy(overlap=overlap, host_fraction=fraction, bucket_bytes=2048, device_bytes=8192)
    before, ours = (updated_on_cpu(mesh, policy, on_core=one) for one in (False, True))
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
            assert isinstance(engine_of(optimizer), CoreEngine)
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        for seed in range(first, last):
            check(seed, mesh)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("first", range(100, 200, 20))
def test_random_programs_on_two_ranks(tmp_path: Path, first: int) -> None:
    spawn(run_programs, 2, tmp_path, first, first + 20)
