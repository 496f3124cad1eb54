"""Plain state of parameters that are sharded over one rank resumes, also where it has the shape of the parameter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fsdp_offload.checkpoint import load, save
from fsdp_offload.fsdp.dtensor import is_dtensor, local_shard
from tests.remedies import Script


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


def through_a_file(source: Script, target: Script, folder: Path) -> None:
    save({"o": source.get()}, checkpoint_id=folder)
    target.train()  # has state to load into
    load(state := {"o": target.template()}, checkpoint_id=folder)
    target.set(state["o"])


def copies(source: Script, target: Script, folder: Path) -> None:
    target.set(source.get(cpu_offload=True))


def full(source: Script, target: Script, folder: Path) -> None:
    """As torch's functions make them with ``full_state_dict=True``."""
    target.train()
    target.set(tree_map_only(Tensor, lambda one: (one.full_tensor() if is_dtensor(one) else one).clone(), source.get()))


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings("ignore:offload_optimizer")
@pytest.mark.parametrize("resume", [through_a_file, copies, full])
def test_one_rank_resumes(resume: Callable[[Script, Script, Path], None], tmp_path: Path) -> None:
    source, target = (Script(Factored, defaults={"lr": 0.05}, attach=True) for _ in range(2))
    source.train()
    resume(source, target, tmp_path)
    target.model.load_state_dict(source.model.state_dict())
    before = target.weights()
    for one in (source, target):
        one.train()
    assert all(map(torch.equal, source.weights(), target.weights()))
    assert not any(map(torch.equal, before, target.weights()))
    assert not is_dtensor(target.optimizer.state[target.model[0].bias]["squares"])
