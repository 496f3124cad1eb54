"""Trains a sharded model under policies that overlap with forward and backward, and compares with a plain optimizer.

On any device and any number of ranks. A *habit* is what a loop does beside the usual in some steps.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp_offload import OffloadPolicy, is_offloaded
from fsdp_offload.device.lanes import Lane, TurnsLane
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.speculation import Speculation
from tests.at_home import not_at_home
from tests.conformance import oracle
from tests.conformance.axes import Block, Case
from tests.conformance.oracle import clip_by, different, rank, schedule, usual
from tests.parity import assert_at_home, attach, batch, local, random_state
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


def clipping(**more: Any) -> OffloadPolicy:
    """With updates in the backward."""
    return policy_of({"overlap": "iteration"}, **more)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, fused=params[0].device.type != "cpu" or None)


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


class Loop(oracle.Loop):
    """A run with a network, an optimizer and a policy of the test's own; ``None``: a plain one, or not sharded."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        make: Callable[[Any], Optimizer],
        policy: OffloadPolicy | None,
        *,
        net: Callable[[], Any] = Net,
        micro_batches: int = 1,
        prepare: Callable[[Any], object] = lambda model: None,
        device: str = "cpu",
    ) -> None:
        self.mesh, self.policy, self.net, self.made, self.prepare = mesh, policy, net, make, prepare
        device = device if mesh is None else mesh.device_type
        super().__init__(Case(micro=micro_batches), torch.device(device, rank() if device != "cpu" else None))
        if policy is not None:
            self.attach()

    def make(self) -> None:
        torch.manual_seed(0)
        self.model = self.net().to(self.device)
        for module in (*self.model.blocks, self.model.extra, self.model) if self.mesh is not None else ():
            fully_shard(module, mesh=self.mesh)
        self.prepare(self.model)
        # Sharded; after an evaluation, the model's own may be gathered.
        self.named = dict(self.model.named_parameters())
        self.optimizer = self.made(self.params)
        self.schedulers = [schedule(self.optimizer)]

    def attach(self) -> None:
        attach(self.optimizer, model=None if self.mesh is None else self.model, policy=self.policy)

    def batch(self, seed: int) -> Tensor:
        if self.mesh is None:
            return batch(seed, self.device, self.params[0].dtype)
        generator = torch.Generator().manual_seed(100 * seed + rank())
        return torch.randint(0, 51, (3, 7), generator=generator).to(self.device)

    def train(self, steps: int, habit: Habit | None = None, first: int = 0) -> "Loop":
        for step in range(first, first + steps):
            (habit or usual)(self, step)
        return self

    def clip(self, limit: float | None = None, **options: Any) -> None:
        """By our function if the optimizer is offloaded, by torch's if it is plain; without ``limit`` not at all."""
        if limit is not None:
            optimizers = [self.optimizer, *filter(None, [getattr(self, "second", None)])]
            ours = optimizers if is_offloaded(self.optimizer) else None
            self.seen.append(clip_by(limit, self.params, ours, **options))

    def clipped_step(self, at: int, limit: float, **options: Any) -> None:
        self.backward(at)
        self.clip(limit, **options)
        self.step()

    def train_clipped(self, limits: list[float]) -> "Loop":
        for at, limit in enumerate(limits):
            self.clipped_step(at, limit)
        return self


def pair(mesh: DeviceMesh | None, policy: OffloadPolicy | None, make: Any = adamw, **kwargs: Any) -> tuple[Loop, Loop]:
    return Loop(mesh, make, None, **kwargs), Loop(mesh, make, policy, **kwargs)


def assert_same_each_step(plain: Loop, loop: Loop, steps: int = 10, habit: Habit | None = None) -> None:
    """From where they are on; and state lives on the host, in the end with parameters that are to do so."""
    assert same(plain, loop), "before the first of these steps"
    for step in range(plain.schedulers[0].last_epoch, plain.schedulers[0].last_epoch + steps):
        drawn = []
        for one in (plain, loop):
            torch.manual_seed(step)
            one.train(1, habit, step)
            drawn.append(random_state(one.device))
        assert same(plain, loop), f"after step {step}"
        assert plain.orders() == loop.orders()
        assert torch.equal(*drawn), "offload has drawn random numbers of the user's"
        if is_offloaded(loop.optimizer):
            assert_at_home(loop.optimizer)
    assert not is_offloaded(loop.optimizer) or not not_at_home(loop.model, loop.optimizer)
    assert all(torch.isfinite(local(param.detach())).all() for param in plain.params), "equality of NaN shows little"


def assert_trained(loop: Loop, *untouched: str) -> None:
    """Show that something was shown: every parameter but ``untouched`` has changed since the seed."""
    torch.manual_seed(0)
    start = dict(loop.net().named_parameters())
    for name, one in loop.named.items():
        moved = not torch.equal(one.to(start[name]), start[name])
        assert moved == (name not in untouched and one.numel() > 0), f"{name} moved: {moved}"


def together(loops: tuple[Loop, Loop], steps: int) -> Iterator[tuple[int, Loop]]:
    """Yield each loop for each step, behind which they are the same."""
    for at in range(steps):
        for loop in loops:
            yield at, loop
        assert same(*loops), f"after step {at}"


def same(one: oracle.Loop, other: oracle.Loop) -> bool:
    return not different(one.everything(), other.everything())


def speculation_of(loop: Loop) -> Speculation:
    engine = engine_of(loop.optimizer)
    assert engine is not None
    return engine.speculation


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


def save_and_load(loop: Loop, step: int) -> None:
    usual(loop, step)
    if step in (2, 4):
        saved = loop.copy()
        usual(loop, step + 20)
        loop.restore(saved)
