"""Plain state of parameters that are sharded over one rank resumes, also where it has the shape of the parameter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fsdp_offload.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from fsdp_offload.fsdp.dtensor import is_dtensor, local_shard
from tests.parity import attach


class Factored(Optimizer):
    """Keeps a momentum as sharded as its parameter, and plain squares: by rows and columns, or of all of a vector."""

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            state, local, grad = self.state[param], local_shard(param), local_shard(param.grad)
            if not state:
                squares = [grad.new_zeros(size) for size in grad.shape] if grad.dim() > 1 else torch.zeros_like(grad)
                state |= {"momentum": torch.zeros_like(param), "squares": squares}
            local_shard(state["momentum"]).lerp_(grad, 0.2)
            if grad.dim() > 1:
                for dim, squares in enumerate(state["squares"]):
                    squares.lerp_(grad.square().mean(1 - dim), 0.1)
                scale = state["squares"][0][:, None] * state["squares"][1]
            else:
                scale = state["squares"].lerp_(grad.square(), 0.1)
            local.sub_(local_shard(state["momentum"]) / (scale.sqrt() + 0.1), alpha=self.param_groups[0]["lr"])


class Training:
    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.LayerNorm(7))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = attach(Factored(self.model.parameters(), {"lr": 0.05}), model=self.model)

    def train(self, *steps: int) -> "Training":
        for step in steps:
            torch.manual_seed(step)
            self.model(torch.randn(3, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self, **options: Any) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, **options)
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def set(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def through_a_file(source: Training, target: Training, folder: Path) -> None:
    save(source.state(), checkpoint_id=folder)
    target.train(9)  # has state to load into
    state = target.state(for_load=True)
    load(state, checkpoint_id=folder)
    target.set(state)


def copies(source: Training, target: Training, folder: Path) -> None:
    target.set(source.state(cpu_offload=True))


def full(source: Training, target: Training, folder: Path) -> None:
    """As torch's functions make them with ``full_state_dict=True``."""
    target.train(9)
    whole = tree_map_only(Tensor, lambda one: (one.full_tensor() if is_dtensor(one) else one).clone(), source.state())
    target.set(whole)


@pytest.mark.parametrize("resume", [through_a_file, copies, full])
def test_one_rank_resumes(resume: Callable[[Training, Training, Path], None], mesh: DeviceMesh, tmp_path: Path) -> None:
    source, target = Training(mesh).train(0, 1), Training(mesh)
    resume(source, target, tmp_path)
    with torch.no_grad():
        for one, other in zip(target.model.parameters(), source.model.parameters(), strict=True):
            local_shard(one).copy_(local_shard(other))
    source.train(2, 3)
    target.train(2, 3)
    for one, other in zip(target.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(local_shard(one), local_shard(other))
    kinds = {name: type(value) for state in target.optimizer.state.values() for name, value in state.items()}
    assert not is_dtensor(target.optimizer.state[target.model[3].weight]["squares"]), kinds
