"""A checkpoint's writer reads state and parameters in their homes while training goes on."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from tests.async_writers import Waits, copied, loaded, not_the_same
from tests.core.programs import local
from tests.parity import attach


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


class Side:
    """Four blocks in training; ``policy`` is ``None`` for the plain one."""

    def __init__(self, mesh: DeviceMesh, policy: OffloadPolicy | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.model[2].bias.requires_grad_(False)
        for block in self.model:
            fully_shard(block, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if policy is not None:
            attach(self.optimizer, model=self.model, policy=policy)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.full((2, 16), float(self.steps))).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def state(self) -> dict[str, object]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }


ALL = 1 << 20


@pytest.mark.parametrize(
    ("overlap", "device_bytes", "spare"),
    [
        ("step", "auto", 0),
        ("iteration", 6000, 0),
        ("forward", 6000, 6000),
        ("step", 6000, ALL),
        ("forward", "auto", ALL),
        ("iteration", "auto", ALL),
    ],
)
def test_a_save_holds_what_was_there_at_the_call(
    mesh: DeviceMesh, tmp_path: Path, waits: Waits, overlap: str, device_bytes: int, spare: int
) -> None:
    policy = OffloadPolicy(
        parameters=True, overlap=overlap, device_bytes=device_bytes, bucket_bytes=2048, snapshot_bytes=spare
    )
    plain, ours = Side(mesh, None), Side(mesh, policy)
    stager = ArenaStager(ours.optimizer)
    for number in range(3):
        for side in (plain, ours):
            side.train(3)
        state, path = ours.state(), tmp_path / str(number)
        expected = copied(state)
        writer = waits.hold(path)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        writer.in_use = True
        assert stager._buffer.nbytes < 1024, "only counters are copied"
        for side in (plain, ours):
            side.train(2)
        assert bool(waits.count) == (spare < ALL), "who has spare homes for everything waits for nobody"
        waits.let_go()
        waits.count = 0
        future.result()
        assert not list(not_the_same(expected, loaded(path, expected)))
    stager.close()
    assert all(map(torch.equal, map(local, plain.model.parameters()), map(local, ours.model.parameters())))
    for one, other in zip(plain.optimizer.state.values(), ours.optimizer.state.values(), strict=True):
        assert all(torch.equal(local(value), local(other[name])) for name, value in one.items())
