"""Trains a sharded model under policies that overlap with forward and backward, and compares with a plain optimizer.

On any device and any number of ranks. A *habit* is what a loop does beside the usual in some steps.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, is_offloaded
from fsdp_offload.device.lanes import Lane, TurnsLane
from tests.at_home import not_at_home
from tests.parity import attach, leaves, same_bits
from tests.policies import with_share

POLICIES: dict[str, dict[str, Any]] = {
    "step": {},
    "forward": {"overlap": "forward"},
    "iteration": {"overlap": "iteration"},
}
SIZES = {"bucket_bytes": 8192, "passing": 5 * 8192}
SMALL = {"bucket_bytes": 8192, "device_bytes": 6 * 8192}

EVERY_POLICY = pytest.mark.parametrize("fields", POLICIES.values(), ids=POLICIES)

Habit = Callable[["Loop", int], None]


def policy_of(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, **fields, **more})


def on_host(fields: dict[str, Any], **more: Any) -> OffloadPolicy:
    """With the parameters, too."""
    return policy_of(fields, **{"parameters": True, **more})


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, fused=params[0].device.type != "cpu" or None)


class Block(nn.Module):
    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or 2 * width
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding and a head in the root, blocks of their own, and a parameter that is used twice."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.extra = Block(width)
        self.head = nn.Linear(width, 51)

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if extra:
            x = self.extra(self.extra(x))  # its gradients are reduced twice
        return self.head(x).float().logsumexp(-1).mean()


def linear_blocks(mesh: DeviceMesh, width: int = 12, count: int = 3, *, bias: bool = True) -> nn.Sequential:
    """Linear layers, each in a group of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(count)))
    for block in model:
        fully_shard(block, mesh=mesh)
    return model


class Loop:
    """One training run."""

    def __init__(
        self,
        mesh: DeviceMesh,
        make: Callable[[Any], Optimizer],
        policy: OffloadPolicy | None,
        *,
        net: Callable[[], Net] = Net,
        micro_batches: int = 1,
        prepare: Callable[[Net], object] = lambda model: None,
    ) -> None:
        torch.manual_seed(0)
        self.device = torch.device(mesh.device_type, dist.get_rank() if mesh.device_type != "cpu" else None)
        self.model = net().to(self.device)
        for block in (*self.model.blocks, self.model.extra):
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        prepare(self.model)
        self.params = list(self.model.parameters())  # sharded; after an evaluation, the model's own may be gathered
        self.optimizer = make(self.params)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, 1.0, 5)
        self.micro_batches = micro_batches
        self.seen: list[float] = []
        if policy is not None:
            attach(self.optimizer, model=self.model, policy=policy)

    def batch(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        return torch.randint(0, 51, (3, 7), generator=generator).to(self.device)

    def backward(self, step: int, **options: Any) -> None:
        for micro in range(self.micro_batches):
            loss = self.model(self.batch(10 * step + micro), **options)
            loss.backward()
            self.seen.append(loss.item())

    def train(self, steps: int, habit: Habit | None = None, first: int = 0) -> "Loop":
        for step in range(first, first + steps):
            if habit is None:
                self.backward(step)
                self.step()
            else:
                habit(self, step)
        return self

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def everything(self) -> list[Tensor]:
        """Losses, parameters, state and counters."""
        params = [param.detach().to_local().cpu() for param in self.model.state_dict().values()]
        states = [self.optimizer.state[param] for param in self.model.parameters() if param in self.optimizer.state]
        values = [state[name] for state in states for name in sorted(state)]
        return [torch.tensor(self.seen), *params, *(leaf.cpu() for value in values for leaf in leaves(value))]


def pair(mesh: DeviceMesh, policy: OffloadPolicy, make: Any = adamw, **kwargs: Any) -> tuple[Loop, Loop]:
    return Loop(mesh, make, None, **kwargs), Loop(mesh, make, policy, **kwargs)


def assert_same_each_step(plain: Loop, loop: Loop, steps: int = 10, habit: Habit | None = None) -> None:
    """From where they are on; and in the end parameters that are to live on the host do so."""
    for step in range(plain.scheduler.last_epoch, plain.scheduler.last_epoch + steps):
        assert same(plain.train(1, habit, step), loop.train(1, habit, step)), f"after step {step}"
    assert not is_offloaded(loop.optimizer) or not not_at_home(loop.model, loop.optimizer)


def same(one: Loop, other: Loop) -> bool:
    return same_values(one.everything(), other.everything())


def same_values(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def slow_down(kind: str, cycles: int, patch: Callable[[Any, str, Any], object] = setattr) -> list[str]:
    """Put a busy kernel before every load (``"L"``), update (``"U"``) or store (``"S"``), on its own stream.

    What does not wait for it is found. Returns the lanes of those that are slow, one by one as they come.
    """
    name = {"L": "load", "S": "store", "U": None}[kind]
    owner, method = (Lane, "run") if kind == "U" else (TurnsLane, "copy")  # whether torch copies or the driver
    issue, found = getattr(owner, method), list[str]()

    def slowed(self: Lane, *args: Any, **options: Any) -> None:
        if name in (None, self.name):
            found.append(self.name)
            with self.running():
                torch.cuda._sleep(cycles)
        issue(self, *args, **options)

    patch(owner, method, slowed)
    return found


def deafen(name: str, patch: Callable[[Any, str, Any], object]) -> None:
    """Leave out all waits of the core's lanes whose names begin so."""
    wait = Lane.wait

    def deaf_wait(self: Lane, *marks: Any) -> None:
        if not self.name.startswith(name):
            wait(self, *marks)

    patch(Lane, "wait", deaf_wait)


# Habits --------------------------------------------------------------------------------------------------------------


def look(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.seen.append(loop.model(loop.batch(999)).item())
    loop.model.train()


def save_and_load(loop: Loop, step: int) -> None:
    loop.backward(step)
    loop.step()
    if step in (2, 4):
        model = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
        saved = loop.optimizer.state_dict()
        saved["state"] = {
            key: {name: value.clone() for name, value in state.items()} for key, state in saved["state"].items()
        }
        loop.backward(step + 20)
        loop.step()
        loop.model.load_state_dict(model)
        loop.optimizer.load_state_dict(saved)
