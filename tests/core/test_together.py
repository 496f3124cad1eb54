"""The core beside others: sleep of the model, several optimizers on one model, and models one after the other."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, AdamW, Optimizer

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_model, reload_model, remove_offload
from fsdp_offload.core.engine import engine_of
from tests.overlapping import linear_blocks
from tests.parity import attach, host_copy

OVERLAPS = ["step", "forward", "iteration"]


def by_kind(model: nn.Module) -> list[list[Tensor]]:
    """Matrices by one, vectors of the same groups by another."""
    params = list(model.parameters())
    return [[one for one in params if one.dim() == 2], [one for one in params if one.dim() == 1]]


def by_layer(model: nn.Module) -> list[list[Tensor]]:
    """Whole groups by each."""
    return [list(model[:2].parameters()), list(model[2:].parameters())]


class Side:
    """A model with its optimizers; ``policies`` is empty for the plain one."""

    def __init__(
        self,
        mesh: DeviceMesh,
        split: Callable[[nn.Module], list[list[Tensor]]],
        policies: list[OffloadPolicy],
        *,
        frozen: bool = True,
    ) -> None:
        self.model = linear_blocks(mesh, count=4)
        self.model[1].bias.requires_grad_(not frozen)
        classes = [AdamW, SGD] if split is by_kind else [AdamW, Adam]
        self.optimizers: list[Optimizer] = [
            cls(params, lr=1e-2) for cls, params in zip(classes, split(self.model), strict=False)
        ]
        for optimizer, policy in zip(self.optimizers, policies, strict=False):
            attach(optimizer, model=self.model, policy=policy)

    def train(self, step: int) -> Tensor:
        loss = self.model(torch.full((2, 12), 1.0 + step)).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.detach()

    def values(self) -> list[Tensor]:
        values = [host_copy(value) for value in self.model.state_dict().values()]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                values += [host_copy(state[name]) for name in sorted(state) if isinstance(state[name], Tensor)]
        return values


def assert_same(plain: Side, ours: Side, step: int) -> None:
    assert torch.equal(plain.train(step), ours.train(step)), f"loss of step {step}"
    if step % 2:  # looking changes what is where
        assert all(map(torch.equal, plain.values(), ours.values())), f"after step {step}"


def policy(overlap: str, *, parameters: bool) -> OffloadPolicy:
    return OffloadPolicy(overlap=overlap, parameters=parameters, bucket_bytes=1024, device_bytes=4096)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("split", [by_kind, by_layer])
@pytest.mark.parametrize("parameters", [(False, False), (True, True), (False, True), (True, False)])
def test_several_optimizers_of_one_model(
    mesh: DeviceMesh, overlap: str, split: Callable[[nn.Module], list[list[Tensor]]], parameters: tuple[bool, bool]
) -> None:
    frozen = parameters != (True, False)  # the first takes what is frozen along, and the second would have it
    plain = Side(mesh, split, [], frozen=frozen)
    ours = Side(mesh, split, [policy(overlap, parameters=one) for one in parameters], frozen=frozen)
    for step in range(6):
        assert_same(plain, ours, step)
    ours.model[1].bias.requires_grad_(True)  # which the first had moved home, where both stream
    plain.model[1].bias.requires_grad_(True)
    for step in range(6, 10):
        assert_same(plain, ours, step)
    for gone in range(2):  # the other one goes on with what is left
        remove_offload(ours.optimizers[gone])
        for step in range(10 + 3 * gone, 13 + 3 * gone):
            assert_same(plain, ours, step)


def test_while_all_is_away_only_what_is_used_comes_back(mesh: DeviceMesh) -> None:
    ours = Side(mesh, lambda model: [list(model.parameters())], [policy("forward", parameters=True)])
    (optimizer,) = ours.optimizers
    for step in range(3):
        ours.train(step)
    optimizer.offload_states()
    optimizer.release_states()
    with torch.no_grad():
        ours.model(torch.full((1, 12), 0.5))
    core = engine_of(optimizer).core
    assert set(core.cache.held) <= set(core.weights.values()), "state has come back for an evaluation"
    optimizer.release_states()
    assert engine_of(optimizer).staging_bytes() == 0


def random_split(rng: random.Random, model: nn.Module) -> list[list[int]]:
    """Each parameter, by number, to one of up to three optimizers."""
    count = rng.randint(1, 3)
    owners = [rng.randrange(count) for _ in model.parameters()]
    return [mine for one in range(count) if (mine := [at for at, owner in enumerate(owners) if owner == one])]


class RandomSide:
    """Up to two models, each with up to three optimizers of several classes; drawn from the seed."""

    def __init__(self, seed: int, mesh: DeviceMesh, *, offloaded: bool) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.models, self.optimizers = [], []
        self.early = False
        for _ in range(rng.randint(1, 2)):
            sizes = [rng.choice([4, 8, 20]) for _ in range(rng.randint(2, 5))]
            model = nn.Sequential(*(nn.Sequential(nn.Linear(6, size), nn.Linear(size, 6)) for size in sizes))
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            self.models.append(model)
            streams, overlap = rng.random() < 0.5, rng.choice(OVERLAPS)
            params = list(model.parameters())
            for numbers in random_split(rng, model):
                cls = rng.choice([AdamW, Adam, SGD])
                optimizer = cls([params[at] for at in numbers], lr=1e-2, **({"momentum": 0.9} if cls is SGD else {}))
                self.optimizers.append(optimizer)
                chosen = OffloadPolicy(
                    overlap=overlap,
                    parameters=streams,
                    device_bytes=rng.choice(["auto", 2048, 5000]),
                    bucket_bytes=1024,
                )
                self.early = self.early or overlap == "iteration"
                if offloaded:
                    attach(optimizer, model=model, policy=chosen)

    def run(self, seed: int) -> Iterator[list[Tensor]]:
        """What can be seen after each of some steps."""
        rng = random.Random(seed + 1)
        for step in range(rng.randint(4, 8)):
            roll = [rng.random() for _ in range(6)]
            seen = []
            for model in self.models:
                if roll[0] < 0.3:
                    with torch.no_grad():
                        seen.append(model(torch.full((1, 6), 0.3)))
                for micro in range(2 if roll[1] < 0.2 and not self.early else 1):
                    model(torch.full((2, 6), 1.0 + step + micro)).square().mean().backward()
            if not (roll[2] < 0.15 and not self.early):  # else the step is skipped
                for optimizer in self.optimizers:
                    optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            sleeper = rng.choice(self.optimizers)
            if roll[3] < 0.4 and isinstance(sleeper, OffloadedOptimizer):
                sleeper.offload_states()
                sleeper.release_states()
            if roll[4] < 0.2:
                offload_model(self.models[0])
                reload_model(self.models[0])
            if roll[5] < 0.5:
                seen += [host_copy(value) for model in self.models for value in model.state_dict().values()]
                states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
                seen += [host_copy(one[name]) for one in states for name in sorted(one) if one[name] is not None]
            yield seen


CUT = 121  # one group has ranges of a parameter in two buckets, of which another group shares the first


@pytest.mark.parametrize("seed", [*range(16), CUT])
def test_random_optimizers_of_random_models(mesh: DeviceMesh, seed: int) -> None:
    plain, ours = (RandomSide(seed, mesh, offloaded=one) for one in (False, True))
    for step, (one, other) in enumerate(zip(plain.run(seed), ours.run(seed), strict=True)):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other)), f"after step {step}"
