"""Whole engines on late lanes: random programs of the conformance suite have the bits of plain training, and no race.

Each wait of theirs in ``waits.toml`` is needed: without it, some program or story fails.
"""

import random
import sys
import tomllib
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

import fsdp_offload
from fsdp_offload import OffloadPolicy, cpu_update
from fsdp_offload.engine import whole
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
    "as a whole": {"optimizer": ("unlisted",), "parameters": (False, True, True)},
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
    held = [local(param.detach()) for param in loop.params.values()]
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


STORIES = {"by elements": (), "on the CPU": (one_bucket_again, strides), "as a whole": (two_streams,)}


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
    assert not wrong(kind, range(6, 100))


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
