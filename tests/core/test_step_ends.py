"""A step dies with its end: whatever ended it, nothing that it knew is reachable."""

import gc
import weakref
from collections.abc import Callable, Sized
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, clip_grad_norm_
from fsdp_offload.engine import step as steps
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.engine.homes import Turning
from tests.conformance.axes import Coupled
from tests.overlapping import Loop, adamw

LEARNT = {
    "core.steps": "a counter",
    "core.last_moved": "a measurement",
    "core.updated": "marks: the last updates",
    "reductions.marks": "the last reductions",
    "reductions._before": "learnt: how many reductions there are",
    "core._gradients": "of updates that no gather has waited for yet; on the CPU, they have run",
    "speculation.committed": "a counter",
    "speculation.rolled_back": "a counter",
    "speculation._clean_steps": "confidence",
    "speculation._history": "confidence",
    "speculation._is_on": "confidence",
    "speculation._learns_later": "confidence: the last factor is read later",
    "speculation.announced": "the loop clips",
    "speculation._watched": "gradients are watched until they are gone",
    "cache.held": "what is on the device",
    "timeline.there": "what is on the device",
    "engine._failure": "why the state is half updated",
}


def look(engine: Engine) -> dict[str, object]:
    """Summarize all fields of the objects of which an optimizer has one."""
    found: dict[str, object] = {}
    parts = {"engine": engine, "core": engine.core, "cache": engine.core.cache, "speculation": engine.speculation}
    parts |= {
        "lending": engine.lending,
        "ahead": engine.speculation.ahead,
        "way_back": engine.speculation.ahead.way_back,
        "timeline": engine.core.timeline,
        "reductions": engine.core.reductions,
    }
    for owner, part in parts.items():
        for name, value in vars(part).items():
            if isinstance(value, bool | int | str | None):
                found[f"{owner}.{name}"] = value
            elif isinstance(value, Sized) and not isinstance(value, torch.Tensor):
                found[f"{owner}.{name}"] = len(value)
    return found


def complete(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.step()


def clipped_never(loop: Loop, at: int) -> None:
    loop.backward(at)
    clip_grad_norm_(loop.optimizer, 1e9)
    loop.step()


def taken_back(loop: Loop, at: int) -> None:
    loop.backward(at)
    clip_grad_norm_(loop.optimizer, 1e9 if at < 12 else 1e-3)
    loop.step()


def looked_at(loop: Loop, at: int) -> None:
    loop.backward(at)
    clip_grad_norm_(loop.optimizer, 1e9)
    if at >= 12:
        loop.optimizer.state_dict()
    loop.step()


def failing(loop: Loop, at: int) -> None:
    """The third update of a step raises."""
    if at < 12:
        complete(loop, at)
        return
    update, calls = steps.update_bucket, [0]

    def third(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise LookupError
        update(*args)

    with pytest.MonkeyPatch.context() as patch, suppress(LookupError):
        patch.setattr(steps, "update_bucket", third)
        complete(loop, at)
    gradients = [weakref.ref(param.grad) for param in loop.params if param.grad is not None]
    gradients += [weakref.ref(param.grad.to_local()) for param in loop.params if param.grad is not None]
    for param in loop.params:
        param.grad = None
    gc.collect()
    assert gradients
    assert not [one for one in gradients if one() is not None]


def loaded(loop: Loop, at: int) -> None:
    saved = loop.optimizer.state_dict()
    loop.backward(at)
    if at >= 12:
        loop.optimizer.load_state_dict(saved)
    loop.step()


ENDINGS: dict[str, Callable[[Loop, int], None]] = {
    one.__name__: one for one in (complete, clipped_never, taken_back, looked_at, failing, loaded)
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Turning]]:
    """All steps that are opened."""
    found: list[weakref.ref[Turning]] = []
    made = Turning.__init__

    def noted(step: Turning, *args: Any, **options: Any) -> None:
        made(step, *args, **options)
        found.append(weakref.ref(step))

    monkeypatch.setattr(Turning, "__init__", noted)
    return found


@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_nothing_of_a_step_outlives_it(
    mesh: DeviceMesh, opened: list[weakref.ref[Turning]], overlap: Any, ending: Callable[[Loop, int], None]
) -> None:
    policy = OffloadPolicy(overlap=overlap, bucket_bytes=8192, device_bytes=6 * 8192)
    loop = Loop(mesh, adamw, policy)
    loop.train(12, ending)
    engine = engine_of(loop.optimizer)
    assert engine is not None
    before = look(engine)
    opened.clear()
    ending(loop, 12)
    gc.collect()
    assert opened
    assert not [one for one in opened if one() is not None]
    after = look(engine)
    differ = {name: (before.get(name), after[name]) for name in after if before.get(name) != after[name]}
    assert not {name: values for name, values in differ.items() if name not in LEARNT}


@pytest.mark.filterwarnings("ignore:offload_optimizer")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_step_on_all_state_outlives_it(
    mesh: DeviceMesh, opened: list[weakref.ref[Turning]], fails: bool
) -> None:
    def raising() -> None:
        raise LookupError

    loop = Loop(mesh, lambda params: Coupled(params, 0.01), OffloadPolicy()).train(3)
    engine = engine_of(loop.optimizer)
    assert engine is not None
    before = look(engine)
    opened.clear()
    loop.backward(3)
    with suppress(LookupError):
        loop.optimizer.step(raising if fails else None)
    gc.collect()
    assert len(opened) == 1
    assert opened[0]() is None
    after = look(engine)
    assert not {name for name in after if before.get(name) != after[name] and name not in LEARNT}
