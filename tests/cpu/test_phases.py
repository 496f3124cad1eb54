"""Phases by hand: whatever is done in each of them, training is that of a plain optimizer, bit by bit.

The conformance suite mixes the phases with everything else; here is what each of them promises.
"""

import copy
import functools
import inspect
import itertools
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_model, reload_before, remove_offload
from fsdp_offload.core.cache import Cache
from fsdp_offload.device.lanes import Lane
from fsdp_offload.engine.engine import engine_of
from tests.cpu import test_async_save as saving
from tests.overlapping import POLICIES, SIZES, Loop, assert_same_each_step, pair, same
from tests.parity import SMALL, Zoo, adamw, assert_at_home, attach, fail_in_bucket, params_of, take_step
from tests.policies import with_share

RESIDENT = with_share(SMALL, staying=14_000)
ALL_RESIDENT = with_share(SMALL, staying=1 << 20)
PHASES = ("offload", "release", "reload")
SEQUENCES = {
    "none": (),
    "leaving": ("offload",),
    "away": ("offload", "release"),
    "back": PHASES,
    "back-unreleased": ("offload", "reload"),
    "gone-again": (*PHASES, "offload"),
    "repeated": ("release", "offload", "offload", "release", "release", "reload", "reload", "release"),
}
EVERY_SEQUENCE = pytest.mark.parametrize("phases", SEQUENCES.values(), ids=SEQUENCES)


def go_through(optimizer: Optimizer, phases: Sequence[str]) -> None:
    """Nothing for a plain optimizer, which has no phases."""
    for phase in phases if isinstance(optimizer, OffloadedOptimizer) else ():
        getattr(optimizer, f"{phase}_states")()


# reload_before -------------------------------------------------------------------------------------------------------


def offloaded(policy: OffloadPolicy = ALL_RESIDENT) -> OffloadedOptimizer:
    optimizer = attach(optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9), policy=policy)
    assert isinstance(optimizer, OffloadedOptimizer)
    return optimizer


def hook(calls: list[object]) -> Callable[..., str]:
    """A method, which is bound beside the functions and partials of ``tests/seeds/test_bridge_4217.py``."""

    class Trainer:
        def finalize(self, *args: object, **kwargs: object) -> str:
            calls.append((args, kwargs))
            return "result"

    return Trainer().finalize


def test_nothing_and_a_method_of_a_class_can_be_wrapped(calls: list[object]) -> None:
    optimizer = offloaded()

    class Trainer:
        def finalize(self, *args: object) -> object:
            return self, args

    assert reload_before(None, optimizer)("model", None, grads=3) is None
    Trainer.finalize = reload_before(Trainer.finalize, optimizer)  # type: ignore[method-assign]
    trainer = Trainer()
    assert trainer.finalize(1) == (trainer, (1,))
    assert reload_before(trainer.finalize, optimizer) == trainer.finalize
    assert calls == [optimizer, optimizer]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), (0, 1, 0, 2, 1, 0), (2, 2, 0, 1, 2)])
def test_each_of_several_optimizers_reloads_once(order: tuple[int, ...], calls: list[object]) -> None:
    optimizers = [offloaded() for _ in range(3)]
    callback: Callable[..., Any] = hook(calls)
    for number in order:
        callback = reload_before(callback, optimizers[number])
    assert callback("model") == "result"
    *reloaded, last = calls
    assert last == (("model",), {})
    assert sorted(map(id, reloaded)) == sorted(map(id, optimizers))


def test_a_wrapper_looks_like_what_it_wraps() -> None:
    def finalize_model_grads(model: list[nn.Module], num_tokens: int | None = None) -> None:
        """Sum over ranks."""

    wrapped = reload_before(finalize_model_grads, offloaded())
    assert wrapped.__name__ == "finalize_model_grads"
    assert wrapped.__doc__ == "Sum over ranks."
    assert inspect.signature(wrapped) == inspect.signature(finalize_model_grads)


def test_a_wrapper_keeps_nothing_alive_and_works_without_it(calls: list[object]) -> None:
    optimizer = offloaded()
    wrapped = reload_before(hook(calls), optimizer)
    take_step(optimizer)
    references = [weakref.ref(optimizer), weakref.ref(engine_of(optimizer)), weakref.ref(params_of(optimizer)[0])]
    wrapped()
    calls.clear()
    del optimizer
    assert [reference() for reference in references] == [None] * 3  # without the garbage collector
    assert wrapped("model") == "result"
    assert calls == [(("model",), {})]
    assert reload_before(wrapped, offloaded())() == "result"


def test_optimizers_that_are_gone_leave_no_wrappers_behind(calls: list[object]) -> None:
    """A trainer that is made anew, around a configuration that stays, as in a search over hyperparameters."""
    wrapped = reload_before(hook(calls), offloaded())
    for _ in range(sys.getrecursionlimit()):
        wrapped = reload_before(wrapped, offloaded())
    assert wrapped("model") == "result"
    assert calls == [(("model",), {})]


def test_what_others_wrap_around_a_wrapper_stays(calls: list[object]) -> None:
    ours = reload_before(hook(calls), offloaded())  # gone at once

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return ours(*args, **kwargs)

    optimizer = offloaded()
    assert reload_before(theirs, optimizer)("model") == "result"
    assert calls == [optimizer, "theirs", (("model",), {})]


def test_a_plain_optimizer_is_left_alone(calls: list[object]) -> None:
    optimizer = offloaded()
    wrapped = reload_before(hook(calls), optimizer)
    remove_offload(optimizer)
    assert wrapped("model") == "result"
    take_step(optimizer)
    assert calls == [(("model",), {})]
    with pytest.raises(TypeError, match=r"reload_before: this SGD is not offloaded; call offload_optimizer\(\) first"):
        reload_before(wrapped, optimizer)
    attach(optimizer)
    wrapped()
    assert calls[1:] == [optimizer, ((), {})]


def warned(optimizer: Optimizer, steps: int, wrapped: Callable[[], Any] | None = None) -> list[int]:
    """In which of so many steps, counted from 1, there was a warning."""
    found = []
    for number in range(1, steps + 1):
        if wrapped is not None:
            wrapped()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_step(optimizer)
        found += [number for warning in caught if re.search("wrapped a hook that was not called", str(warning.message))]
    return found


@pytest.mark.parametrize("first_call", [1, 2, 3])
@pytest.mark.parametrize("anew", [True, False], ids=["attached anew", "another hook"])
def test_a_hook_that_is_called_is_fine_and_another_one_is_watched_anew(first_call: int, anew: bool) -> None:
    optimizer = offloaded()
    wrapped = reload_before(None, optimizer)
    assert warned(optimizer, first_call - 1) == []
    assert warned(optimizer, 6, wrapped) == []
    if anew:
        attach(remove_offload(optimizer))
    assert (reload_before(wrapped if anew else lambda: None, optimizer) is wrapped) == anew
    assert warned(optimizer, 6) == [3]


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_let_go_with_the_rest(mesh: DeviceMesh, name: str, sleeps: bool) -> None:
    """Gradients that updates beside the model still read outlive ``zero_grad``, but no release and no sleep."""
    loop = Loop(mesh, adamw, with_share(**SIZES, **POLICIES[name])).train(3)
    loop.backward(3)
    gradients = [weakref.ref(param.grad) for param in loop.model.parameters() if param.grad is not None]
    loop.step()
    assert any(gradient() is not None for gradient in gradients) == (name != "step")
    if sleeps:
        offload_model(loop.model)
    go_through(loop.optimizer, () if sleeps else ("offload", "release"))
    assert not any(gradient() is not None for gradient in gradients)


# State while it is away ----------------------------------------------------------------------------------------------


class Twins(nn.Module):
    """Parameters of equal shape, and one of several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(40, 33)) for _ in range(3))
        self.small = nn.ParameterList(nn.Parameter(torch.randn(65)) for _ in range(2))

    forward = Zoo.forward


@EVERY_SEQUENCE
def test_state_of_another_shape_is_refused_as_in_a_step(phases: tuple[str, ...]) -> None:
    """A phase that moves state has to take over what the user has put there."""
    both = pair(None, RESIDENT, adamw, net=Twins)
    assert_same_each_step(*both, 2)
    optimizer = both[1].optimizer
    go_through(optimizer, phases)
    state = optimizer.state[params_of(optimizer)[0]]
    kept, state["exp_avg"] = state["exp_avg"], torch.ones(7)
    was_away = engine_of(optimizer).core.away
    with pytest.raises(ValueError, match=r"expected local tensors .*\(40, 33\).*Nothing has been changed"):
        go_through(optimizer, ["reload" if was_away else "offload"])
    assert engine_of(optimizer).core.away == was_away
    state["exp_avg"] = kept
    assert_same_each_step(*both, 2)


def more_parameters(run: Loop) -> None:
    torch.manual_seed(1)
    for number, size in enumerate((65, 700)):
        param = run.named[f"more{number}"] = nn.Parameter(torch.randn(size))
        run.model.register_parameter(f"more{number}", param)
        run.optimizer.add_param_group({"params": [param], "lr": 0.01})


def thaw(run: Loop) -> None:
    """A parameter without state gets it by a load."""
    saved = run.optimizer.state_dict()
    saved["state"] = {**copy.deepcopy(saved["state"]), 1: copy.deepcopy(saved["state"][0])}
    run.optimizer.load_state_dict(saved)
    params_of(run.optimizer)[1].requires_grad_(True)


def add_momentum(run: Loop) -> None:
    run.optimizer.param_groups[0]["momentum"] = 0.9


EDITS = {
    "parameters": (more_parameters, RESIDENT),
    "parameters, with room": (more_parameters, with_share(SMALL, staying=40_000)),
    "loaded": (thaw, with_share(SMALL, staying=60_000)),
    "momentum": (add_momentum, RESIDENT),
}


@pytest.mark.parametrize(("edit", "policy"), EDITS.values(), ids=EDITS)
@EVERY_SEQUENCE
def test_state_that_comes_later(edit: Callable[[Loop], None], policy: OffloadPolicy, phases: tuple[str, ...]) -> None:
    """It is on the device only if the rest is there."""
    make = functools.partial(optim.SGD, lr=0.1) if edit is add_momentum else adamw
    both = pair(None, None, make, net=Twins, prepare=lambda net: net.weights[1].requires_grad_(edit is not thaw))
    loop = both[1]
    attach(loop.optimizer, policy=policy)
    assert_same_each_step(*both, 2)
    loop.phase(*phases)
    for run in both:
        edit(run)
    assert same(*both)
    if engine_of(loop.optimizer).core.away:
        assert_at_home(loop.optimizer)
    assert_same_each_step(*both, 2)
    for phase in PHASES:
        loop.phase(phase)
        assert same(*both)
    assert_same_each_step(*both, 2)


def test_stores_begin_with_offload_and_loads_with_reload() -> None:
    """They would come later, too, where something waits for them."""
    loop = pair(None, RESIDENT, adamw, net=Zoo)[1].train(3)
    core = engine_of(loop.optimizer).core
    assert any(item.dirty for item in core.cache.held)
    loop.phase("offload")
    assert not any(item.dirty for item in core.cache.held)
    loop.phase("release")
    assert not core.cache.held
    loop.phase("reload")
    assert core.cache.held
    assert not core.away


def test_an_optimizer_is_dropped_in_any_phase() -> None:
    for phases in SEQUENCES.values():
        optimizer = offloaded()
        take_step(optimizer, 2)
        go_through(optimizer, phases)
        engine = weakref.ref(engine_of(optimizer))
        del optimizer
        assert engine() is None


# Exceptions ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mesh")
@EVERY_SEQUENCE
def test_a_step_that_fails(phases: tuple[str, ...], tmp_path: Path) -> None:
    training = saving.Training(with_share(saving.NO_SPARE, staying=9_000))
    optimizer = training.optimizer
    training.train(3)
    dcp.save(training.state(), checkpoint_id=tmp_path)
    go_through(optimizer, PHASES)
    saving.set_gradients(training.net, 3)
    fail_in_bucket(4, optimizer.step)
    for refused in ("step", "state_dict"):
        go_through(optimizer, phases)
        with pytest.raises(RuntimeError, match=rf"{refused}\(\) refused: an earlier step"):
            getattr(optimizer, refused)()
    go_through(optimizer, phases)
    training.load(tmp_path)
    go_through(optimizer, phases)
    training.train(2)
    saving.assert_exact_after(training)


def test_no_room_on_the_device_leaves_state_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(None, RESIDENT, adamw, net=Zoo)
    assert_same_each_step(*both, 2)
    optimizer = both[1].optimizer
    go_through(optimizer, ["offload", "release"])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "_take", full)
        go_through(optimizer, ["reload"])
    assert_at_home(optimizer)
    assert_same_each_step(*both, 2)


# Threads -------------------------------------------------------------------------------------------------------------


def test_threads_take_turns_on_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = offloaded()
    take_step(optimizer)
    lanes, held, foreach_copy = engine_of(optimizer).core.lanes, [], torch._foreach_copy_

    def is_held(lane: Lane) -> bool:
        return not (lane._in_use.acquire(blocking=False) and not lane._in_use.release())

    def noting(*args: Any, **kwargs: Any) -> None:
        thread = threading.Thread(target=lambda: held.append(is_held(lanes.load) or is_held(lanes.store)))
        thread.start()
        thread.join()
        foreach_copy(*args, **kwargs)

    monkeypatch.setattr(torch, "_foreach_copy_", noting)
    go_through(optimizer, PHASES)
    take_step(optimizer)
    assert held
    assert all(held)
