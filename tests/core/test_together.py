"""The core beside others: several models, several optimizers on each, and models that sleep."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, AdamW

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, is_offloaded, offload_model, reload_model, remove_offload
from fsdp_offload.device.lanes import Lane
from fsdp_offload.engine.engine import engine_of
from tests.overlapping import Loop, adamw, linear_blocks, pair, same
from tests.parity import SMALL, Zoo, attach, host_copy

OVERLAPS = ["step", "forward", "iteration"]


def test_while_all_is_away_only_what_is_used_comes_back(mesh: DeviceMesh) -> None:
    model = linear_blocks(mesh)
    optimizer = AdamW(model.parameters())
    policy = OffloadPolicy(overlap="forward", parameters=True, bucket_bytes=1024, device_bytes=4096)
    attach(optimizer, model=model, policy=policy)
    for _ in range(3):
        model(torch.ones(2, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.offload_states()
    optimizer.release_states()
    with torch.no_grad():
        model(torch.full((1, 12), 0.5))
    core = engine_of(optimizer).core
    assert set(core.cache.held) <= set(core.weights.values()), "state has come back for an evaluation"
    optimizer.release_states()
    assert engine_of(optimizer).core.cache.lasting_bytes == 0


def random_split(rng: random.Random, model: nn.Module) -> list[list[int]]:
    """Each parameter, by number, to one of up to three optimizers."""
    count = rng.randint(1, 3)
    owners = [rng.randrange(count) for _ in model.parameters()]
    return [mine for one in range(count) if (mine := [at for at, owner in enumerate(owners) if owner == one])]


class RandomSide:
    """Up to two models, each with up to three optimizers of several classes; drawn from the seed.

    Some of those of one model stream their parameters, some do not. A parameter may be frozen at first. In the end the
    optimizers are removed, one by one, and the others go on.
    """

    def __init__(self, seed: int, mesh: DeviceMesh, *, offloaded: bool) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.models, self.optimizers = [], []
        self.early, self.frozen = False, []
        more = random.Random(f"more {seed}")
        for _ in range(rng.randint(1, 2)):
            sizes = [rng.choice([4, 8, 20]) for _ in range(rng.randint(2, 5))]
            model = nn.Sequential(*(nn.Sequential(nn.Linear(6, size), nn.Linear(size, 6)) for size in sizes))
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            self.models.append(model)
            streams, overlap = rng.random() < 0.5, rng.choice(OVERLAPS)
            params = list(model.parameters())
            mixed = seed != CUT and more.random() < 0.5
            if not mixed and seed != CUT:  # else the first would take along what the second has
                self.frozen.append(more.choice(params).requires_grad_(False))
            shared = more.choice([0.0, 0.5])  # fused kernels of the CPU update it
            for numbers in random_split(rng, model):
                cls = rng.choice([AdamW, Adam, SGD])
                options = {"momentum": 0.9} if cls is SGD else {"fused": True}
                optimizer = cls([params[at] for at in numbers], lr=1e-2, **options)
                self.optimizers.append(optimizer)
                chosen = OffloadPolicy(
                    overlap=overlap,
                    parameters=more.random() < 0.5 if mixed else streams,
                    device_bytes=rng.choice(["auto", 2048, 5000]),
                    bucket_bytes=1024,
                    host_fraction=shared if cls is not SGD and not mixed and not streams else 0.0,
                )
                self.early = self.early or overlap == "iteration"
                if offloaded:
                    attach(optimizer, model=model, policy=chosen)

    def change(self, step: int, over: int) -> None:
        """Unfreeze early, and remove an optimizer every other step that there is ``over``."""
        for param in self.frozen if step == 3 else ():
            param.requires_grad_(True)
        if over >= 0 and over % 2 == 0 and is_offloaded(self.optimizers[over // 2]):
            remove_offload(self.optimizers[over // 2])

    def run(self, seed: int) -> Iterator[list[Tensor]]:
        """What can be seen after each of some steps."""
        rng = random.Random(seed + 1)
        steps = rng.randint(4, 8)
        for step in range(steps + 2 * len(self.optimizers)):
            self.change(step, step - steps)
            roll = [rng.random() for _ in range(6)]
            seen = []
            for model in self.models:
                if roll[0] < 0.3:
                    with torch.no_grad():
                        seen.append(model(torch.full((1, 6), 0.3)))
                for micro in range(2 if roll[1] < 0.2 and not self.early else 1):
                    loss = model(torch.full((2, 6), 1.0 + step + micro)).square().mean()
                    loss.backward()
                    seen.append(loss.detach())
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


@pytest.mark.parametrize("seed", [*range(24), CUT])
def test_random_optimizers_of_random_models(mesh: DeviceMesh, seed: int) -> None:
    plain, ours = (RandomSide(seed, mesh, offloaded=one) for one in (False, True))
    for step, (one, other) in enumerate(zip(plain.run(seed), ours.run(seed), strict=True)):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other)), f"after step {step}"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_parameters_that_another_optimizer_has_moved_home_while_they_were_frozen(
    mesh: DeviceMesh, overlap: str
) -> None:
    """Theirs takes them over; when it has been removed, gathers must not read the first one's home."""
    models = [linear_blocks(mesh) for _ in range(2)]
    optimizers = [(AdamW(model[1].parameters(), lr=0.1), SGD(model[::2].parameters(), lr=0.1)) for model in models]

    def train() -> None:
        losses = []
        for model, both in zip(models, optimizers, strict=True):
            for optimizer in both:
                optimizer.zero_grad()
            loss = model(torch.ones(2, 12)).square().mean()
            loss.backward()
            losses.append(loss)
            for optimizer in both:
                optimizer.step()
        assert torch.equal(*losses)

    for model in models:
        model[1].bias.requires_grad_(requires_grad=False)
    for optimizer in reversed(optimizers[1]):
        policy = OffloadPolicy(overlap=overlap, parameters=True, bucket_bytes=1024)
        attach(optimizer, model=models[1], policy=policy)
    train()
    for model in models:
        model[1].bias.requires_grad_(requires_grad=True)
    train()
    for optimizer in optimizers[1]:
        optimizer.zero_grad()
    remove_offload(optimizers[1][0])
    for _ in range(3):
        train()


def test_threads_with_optimizers_of_their_own() -> None:
    """All optimizers of a device share its lanes; steps of several threads take turns."""
    pairs = [pair(None, SMALL, adamw, net=Zoo) for _ in range(3)]
    before = threading.Barrier(len(pairs))

    def train(number: int, run: Loop, wait: Callable[[], object]) -> None:
        for step in range(40):
            wait()
            for index, param in enumerate(run.model.parameters()):
                param.grad = torch.full_like(param, 0.1 * (1 + number + step % 3 + index))
            run.optimizer.step()

    threads = [threading.Thread(target=train, args=(at, loop, before.wait)) for at, (_, loop) in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, both in enumerate(pairs):
        train(number, both[0], lambda: None)
        assert same(*both)


def test_loads_that_were_put_off_go_on_in_a_forward(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing is known of the model's memory, as in the first iterations."""
    loop, called = Loop(mesh, adamw, OffloadPolicy(overlap="iteration")).train(2), list[str]()
    monkeypatch.setattr(Lane, "go_on", lambda lane: called.append(lane.name))
    loop.model(loop.batch(2))
    assert "load" in called
