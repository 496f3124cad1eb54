"""The script of a user whom a message tells what to do."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.zoo.local import Momentum


def integration(name: str) -> Any:
    pytest.importorskip(name)
    return importlib.import_module(f"fsdp_offload.integrations.{name}")


def seen_of(optimizer: Optimizer) -> Any:
    """Return what a refusal leaves as it was."""
    entries = (vars(optimizer), optimizer.state, optimizer._optimizer_step_pre_hooks)
    return type(optimizer), [dict(entry) for entry in entries]


class Unlisted(torch.optim.SGD):
    """In no table, so that it moves as a whole: a subclass may do anything in its step."""


class Whole(Momentum):
    """A class of a user's, which no table has."""


class Script:
    """The names of a user's script: a sharded model of two towers, and its optimizer."""

    def __init__(
        self,
        make: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        shard: bool = True,
        attach: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.dtype = torch.float32
        self.model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5, bias=False))
        for part in (self.model[0], self.model[2], self.model) if shard else ():
            fully_shard(part)
        self.optimizer: Any = make(self.model.parameters(), **options)
        if attach:
            self.attach()

    def attach(self, **policy: Any) -> "Script":
        offload_optimizer(self.optimizer, model=self.model, policy=policy)
        return self

    def backward(self) -> None:
        self.model(torch.linspace(-1, 1, 14, dtype=self.dtype).view(2, 7)).square().sum().backward()

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def get(self, **options: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, **options)

    def template(self, **options: Any) -> dict[str, Any]:
        return self.get(for_load=True, **options)

    def set(self, state_dict: Any, **options: Any) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, **options)

    def weights(self) -> list[Tensor]:
        params: list[Any] = list(self.model.parameters())
        return [getattr(param, "full_tensor", param.detach)().detach().clone() for param in params]
