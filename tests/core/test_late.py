"""Whole engines on late lanes: random programs of the conformance suite have the bits of plain training, and no race.

Each wait of theirs in ``waits.toml`` is needed: without it, some program or story fails.
"""

import random
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

import fsdp_offload
from fsdp_offload import OffloadPolicy, clip_grad_norm_, cpu_update
from fsdp_offload.engine import whole
from fsdp_offload.engine.engine import engine_of
from tests.conformance.axes import AXES, Case, Coupled, legal
from tests.conformance.oracle import Loop, compare
from tests.conformance.programs import HABITS, usual
from tests.core.deferred import DeferredLane
from tests.core.late import LateLanes, late
from tests.parity import attach, local

CPU = torch.device("cpu")
FILES = {"cpu_update.py": "on the CPU", "engine/whole.py": "as a whole"}
LATE = AXES | {"masters": ("none",), "serial": (False,), "looks": ("each", "end", "end")}
KINDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "by elements": {"optimizer": ("adamw-fused",), "host": (0.0,)},
    "on the CPU": {"optimizer": ("adamw-fused",), "host": (0.5, 1.0)},
    "as a whole": {"optimizer": ("unlisted",), "parameters": (False,)},
}


def step_again(loop: Loop, at: int) -> None:
    """With the same gradients; nobody looks in between."""
    loop.backward(at)
    loop.clip()
    loop.update()
    loop.update()
    loop.clear()


def hold(loop: Loop, at: int) -> None:
    """Tensors over parameters stay what they are."""
    usual(loop, at)
    held = [local(param.detach()) for param in loop.params]
    usual(loop, at + 40)
    loop.seen += [one.double().sum().item() for one in held]


OWN = {**HABITS, "step again": step_again, "hold": hold}
MORE = {"by elements": (), "on the CPU": ("step again",), "as a whole": ("hold",)}


def drawn(kind: str, seed: int) -> Case:
    axes, rng = LATE | KINDS[kind], random.Random(seed)
    chosen = {axis: rng.choice(values) for axis, values in axes.items()}
    more = () if chosen["overlap"] == "iteration" else MORE[kind]
    habits = [*HABITS, *["usual", *more] * 8]
    case = legal(Case(**chosen, program=("usual", "usual", *rng.choices(habits, k=5))), axes)
    assert case is not None, "every rule says what to change"
    return case


# Stories that no program has -----------------------------------------------------------------------------------------


def train(optimizer: Optimizer, grads: Iterable[Tensor]) -> list[Tensor]:
    """One step with each of ``grads``."""
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return [param.detach().clone(), *(value.clone() for value in optimizer.state[param].values())]


def one_bucket_again(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """There is a slot that the last job of this bucket was not in, and no gather waits between two steps."""
    models = [nn.Linear(6, 7, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        fully_shard(model, mesh=mesh)
    optimizers = [AdamW(model.parameters(), lr=0.1, fused=True) for model in models]
    attach(optimizers[1], model=models[1], policy=OffloadPolicy(overlap="forward", host_fraction=1.0))
    for _ in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(*(local(model.state_dict()["weight"]) for model in models))


def strides(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """Ranges of gradients that lie otherwise in memory than their parameter are copied before they come down."""
    params = [nn.Parameter(torch.ones(60, 70)) for _ in range(2)]
    optimizers = [AdamW([param], lr=0.1, fused=True) for param in params]
    attach(optimizers[1], policy=OffloadPolicy(host_fraction=1.0, bucket_bytes=1024))
    grads = [torch.randn(60, 70) for _ in range(4)]
    plain, late_one = train(optimizers[0], grads), train(optimizers[1], [grad.t().contiguous().t() for grad in grads])
    assert all(map(torch.equal, plain, late_one))


class Sometimes(nn.Module):
    """Parameters of one group, of which a call may leave the large one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 5)
        self.large = nn.Parameter(torch.linspace(-1, 1, 800).view(160, 5))

    def forward(self, x: Tensor, *, all_of_it: bool) -> Tensor:
        x = self.last(self.first(x).tanh())
        return (x @ self.large.t() if all_of_it else x).square().mean()


def sometimes(mesh: DeviceMesh, **fields: Any) -> Iterator[tuple[Sometimes, Optimizer]]:
    """A plain one, and one that updates in the backward."""
    for policy in (None, OffloadPolicy(overlap="iteration", bucket_bytes=1024, **fields)):
        torch.manual_seed(0)
        fully_shard(model := Sometimes(), mesh=mesh)
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        yield model, optimizer if policy is None else attach(optimizer, model=model, policy=policy)


def backward(model: Sometimes, at: int, *, all_of_it: bool) -> None:
    model(torch.cos(torch.arange(15) + at).view(3, 5), all_of_it=all_of_it).backward()


def state_written_under_a_guess(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """Of a parameter without a gradient: a guess with its neighbours has written no home."""
    found = []
    for model, optimizer in sometimes(mesh):
        held = None
        for at in range(9):
            backward(model, at, all_of_it=at != 7)
            clip_grad_norm_(optimizer, 1e9)
            if held is not None:
                local(held).mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            held = optimizer.state[model.large]["exp_avg"] if at == 6 else None
        found.append([local(one).clone() for param in model.parameters() for one in optimizer.state[param].values()])
    assert engine_of(optimizer).speculation.committed
    assert all(map(torch.equal, *found))


def counters_read_before_a_step(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """On compute, through tensors that were fetched behind the last step."""
    *_, (model, optimizer) = sometimes(mesh)
    counters = []
    for at in range(7):
        backward(model, at, all_of_it=True)
        clip_grad_norm_(optimizer, 1e9)
        lanes.compute.touch(reads=counters)
        optimizer.step()
        optimizer.zero_grad()
        counters = [optimizer.state[param]["step"] for param in model.parameters()]
    assert engine_of(optimizer).speculation.committed


def counters_that_count_on_from_guesses(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """A gradient of kept state comes late: ``step()`` updates its bucket once more, right behind the commit."""
    found = []
    for policy in (None, OffloadPolicy(overlap="iteration", bucket_bytes=4096, device_bytes=6 * 4096)):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        for block in model:
            fully_shard(block, mesh=mesh)
        optimizer: Any = AdamW(model.parameters(), lr=0.05, fused=True)
        optimizer = optimizer if policy is None else attach(optimizer, model=model, policy=policy)
        for at in range(9):
            (late := model[0].bias).requires_grad_(at not in (6, 8))
            model(torch.full((2, 16), 0.1 + at)).square().sum().backward()
            if not late.requires_grad:
                late.requires_grad_(True)
                late.grad = torch.ones_like(late)
            if policy is not None:
                clip_grad_norm_(optimizer, 1e9)
            optimizer.step()
            optimizer.zero_grad()
        found.append([optimizer.state[param]["step"].item() for param in model.parameters()])
    assert engine_of(optimizer).speculation.committed
    assert found[0] == found[1]


def zeros_for_a_gradient_that_was_freed(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """They are made while others of its group are being reduced."""
    found = []
    for model, optimizer in sometimes(mesh, parameters=True):
        for at in range(9):
            backward(model, at, all_of_it=at % 4 != 3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append([local(value) for value in model.state_dict().values()])
    assert all(map(torch.equal, *found))


def two_streams(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """Steps with gradients of one parameter each, which plain training may run on streams that do not wait."""
    params = [nn.Parameter(torch.ones(5 + at)) for at in range(2)]
    optimizer = attach(Coupled(params, lr=0.1), policy=OffloadPolicy())
    before, streams = lanes.compute, [DeferredLane(lanes.world, f"stream {at}", at_once=True) for at in range(2)]
    for at in range(8):
        lanes.compute = streams[at % 2]
        params[at % 2].grad, params[1 - at % 2].grad = torch.ones_like(params[at % 2]), None
        optimizer.step()
    lanes.compute = before


def a_gradient_that_comes_late(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """A bucket is updated twice in one step: the counters of both count."""
    found = []
    for model, optimizer in sometimes(mesh, host_fraction=1.0):
        for at in range(6):
            model.large.requires_grad_(at != 4)
            backward(model, at, all_of_it=True)
            if at == 4:
                model.large.requires_grad_(True)
                model.large.grad = torch.ones_like(model.large)
            optimizer.step()
            optimizer.zero_grad()
        found.append([local(one).clone() for param in model.parameters() for one in optimizer.state[param].values()])
        found[-1] += [local(value) for value in model.state_dict().values()]
    assert all(map(torch.equal, *found))


def the_first_state(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """It is there behind the first step, in the order of plain training."""
    found = []
    for policy in (None, OffloadPolicy(overlap="forward", bucket_bytes=1024, host_fraction=0.5)):
        fully_shard(model := Sometimes(), mesh=mesh)
        numbers = {param: number for number, param in enumerate(model.parameters())}
        optimizer = AdamW([*numbers][::-1], lr=0.01, fused=True)
        if policy is not None:
            attach(optimizer, model=model, policy=policy)
        assert not optimizer.state[[*numbers][1]]  # a look makes an empty entry, which keeps its place
        backward(model, 0, all_of_it=True)
        optimizer.step()
        found.append([(numbers[param], [*dict.get(optimizer.state, param, {})]) for param in optimizer.state])
    assert found[0] == found[1]


def entries_exchanged(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """Those of before the step, so that nobody has waited for its stores."""
    params = [nn.Parameter(torch.ones(4) * at) for at in range(2)]
    optimizer = attach(Coupled(params, lr=0.1), policy=OffloadPolicy())
    entries: list[dict[str, Any]] = []
    for _ in range(4):
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
        for entry, value in zip(entries, [entry["velocity"] for entry in entries][::-1], strict=True):
            entry["velocity"] = value
        entries = entries or [optimizer.state[param] for param in params]


def state_read_behind_a_step(mesh: DeviceMesh, lanes: LateLanes) -> None:
    """By the host."""
    optimizer = attach(Coupled([param := nn.Parameter(torch.ones(5))], lr=0.1), policy=OffloadPolicy())
    train(optimizer, [torch.ones(5)] * 2)
    lanes.world.on_host(lambda: None, [optimizer.state[param]["velocity"]])


GUESSES = (
    *(state_written_under_a_guess, counters_read_before_a_step, counters_that_count_on_from_guesses),
    zeros_for_a_gradient_that_was_freed,
)
STORIES = {
    "by elements": GUESSES,
    "on the CPU": (one_bucket_again, strides, a_gradient_that_comes_late, the_first_state),
    "as a whole": (two_streams, entries_exchanged, state_read_behind_a_step),
}


@pytest.mark.parametrize("story", [one for some in STORIES.values() for one in some])
def test_stories(mesh: DeviceMesh, story: Callable[[DeviceMesh, LateLanes], None]) -> None:
    for seed in range(10):
        with late(seed) as lanes:
            story(mesh, lanes)


def wrong(kind: str, seeds: range) -> list[str]:
    """What is different in programs of a kind."""
    found = []
    for seed in seeds:
        with late(seed):
            case = drawn(kind, seed)
            found += [f"{seed}, {case}: {one}" for one in compare(case, CPU, OWN)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_have_the_bits_of_plain_training(mesh: DeviceMesh, kind: str) -> None:
    assert not wrong(kind, range(6))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_programs(mesh: DeviceMesh, kind: str) -> None:
    assert not wrong(kind, range(6, 50))


WAITS = [
    wait
    for wait in tomllib.loads(Path(__file__).with_name("waits.toml").read_text(encoding="utf-8"))["mutant"]
    if wait["file"] in FILES
]


def changed(wait: dict[str, str]) -> types.ModuleType:
    """A module without one of its waits."""
    path = Path(fsdp_offload.__file__).parent / wait["file"]
    text = path.read_text(encoding="utf-8")
    assert text.count(wait["line"]) == 1, f"{wait['line']!r} is {text.count(wait['line'])} times in {path}"
    module = types.ModuleType(f"changed_{path.stem}")
    module.__package__ = ".".join(["fsdp_offload", *Path(wait["file"]).parts[:-1]])
    sys.modules[module.__name__] = module
    exec(compile(text.replace(wait["line"], wait["replacement"]), str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait["note"])
def test_each_wait_is_needed(mesh: DeviceMesh, wait: dict[str, str]) -> None:
    module, kind = changed(wait), FILES[wait["file"]]
    classes = [getattr(module, "_Visit", whole._Visit), getattr(module, "HostUpdates", cpu_update.HostUpdates)]
    for seed in range(150):
        try:
            with late(seed, *classes) as lanes:
                for story in STORIES[kind]:
                    story(mesh, lanes)
                if compare(drawn(kind, seed), CPU, OWN):
                    return
        except (AssertionError, RuntimeError):
            return
    pytest.fail("no program has found it")
