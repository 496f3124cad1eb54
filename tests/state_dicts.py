"""A model with an optimizer, for tests of state dicts, and comparisons of what they hold."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.async_writers import not_the_same
from tests.parity import attach

POLICY = OffloadPolicy(bucket_bytes=2048)

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


def adamw(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def sgd(params: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def rmsprop(params: Iterable[Any]) -> Optimizer:
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True)


class Counted(Optimizer):
    """The mean of all gradients, with a counter that is a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                param.sub_(state["sum"] / state["count"], alpha=group["lr"])


def counted(params: Iterable[Any]) -> Optimizer:
    return Counted(params, {"lr": 0.01})


MAKERS = {make.__name__: make for make in (adamw, sgd, rmsprop, counted)}
NESTED: dict[str, Any] = {}
FLAT: dict[str, Any] = {"flatten_optimizer_state_dict": True}
FORMS = {"nested": NESTED, "flattened": FLAT}
SIDES = {"plain": False, "offloaded": True}
EVERY_SIDE = pytest.mark.parametrize("offload", SIDES.values(), ids=SIDES)
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


class Net(nn.Module):
    """Two layers that are trained, one that is frozen, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Linear(32, 4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``norm`` computes in fp32."""
        hidden = self.norm(self.up(x.to(self.up.weight.dtype)).float())
        return self.down(hidden.relu().to(self.down.weight.dtype)).float()


USED = ["up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight", "down.bias"]


def all_used(net: Net) -> None:
    del net.frozen, net.unused


def by_dimension(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


class Run:
    """A model with an optimizer; offloaded or not; the same start for the same seed."""

    def __init__(
        self,
        make: MakeOptimizer = adamw,
        *,
        offload: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        groups: Callable[[nn.Module], Any] = by_dimension,
        prepare: Callable[[Net], Any] = lambda net: None,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Net().to(dtype)
        self.model.norm.float()
        prepare(self.model)
        self.optimizer = make(groups(self.model))
        if offload:
            attach(self.optimizer, model=self.model, policy=POLICY, trust_separable=True)

    def backward(self, step: int) -> None:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        self.model(batch).pow(2).sum().backward()

    def train(self, *steps: int) -> "Run":
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()
        return self

    def params(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def values(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.params().items()}

    def state(self, name: str) -> dict[str, Any]:
        return self.optimizer.state[self.params()[name]]

    def weights_from(self, other: "Run") -> "Run":
        self.model.load_state_dict(copy.deepcopy(other.model.state_dict()))
        return self

    def get(self, **options: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, **options)

    def set(self, state: dict[str, Any], **options: Any) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, **options)


def save(run: Run, folder: Path, **options: Any) -> None:
    dcp.save({"model": run.model.state_dict(), "optimizer": run.get(**options)}, checkpoint_id=folder)


def load(run: Run, folder: Path, *, partial: bool = False, **options: Any) -> None:
    """As a fresh process does; ``partial``: what the checkpoint lacks is left as it is."""
    state = {"model": run.model.state_dict(), "optimizer": run.get(for_load=True, **options)}
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=partial))
    run.set(state["optimizer"])


def assert_same(one: Any, other: Any, place: str = "") -> None:
    """The same types, keys, order and values, bit by bit."""
    assert not (found := [*not_the_same(one, other, place)]), found


def assert_same_runs(one: Run, other: Run) -> None:
    assert_same(dict(one.model.state_dict()), dict(other.model.state_dict()))
    assert_same(one.optimizer.state_dict(), other.optimizer.state_dict())


def is_home(run: Run) -> bool:
    """Whether all state that moves is in the arena: in storages of exactly its size that the engine knows."""
    shards = run.optimizer._offload_engine.engine.plan.shards
    for param, state in run.optimizer.state.items():
        for name, home in shards[param].homes.items():
            if name in state and state[name] is not home:
                return False
    return True
