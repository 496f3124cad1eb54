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

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, reload_before, remove_offload
from fsdp_offload.checkpoint import ArenaStager
from fsdp_offload.core.cache import Cache
from fsdp_offload.core.engine import engine_of
from fsdp_offload.core.lanes import Lane
from fsdp_offload.device import link as device_links
from tests.async_writers import Waits, copied
from tests.cpu import test_async_save as saving
from tests.cpu import test_state_edits as edits
from tests.overlapping import POLICIES, SIZES, Loop, adamw
from tests.parity import SMALL, Run, Zoo, assert_at_home, attach, fail_in_bucket, make_pair, params_of
from tests.policies import with_share
from tests.tiers import spread

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


def adamw_of(params: Any) -> Optimizer:
    return optim.AdamW(params, lr=0.02)


def momentum(params: Any) -> Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


# reload_before -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def a_link_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers of other tests hold staging until they are collected, whenever that is."""
    monkeypatch.setattr(device_links, "_links", {})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Everything that is called, in order: optimizers that reload, and what callbacks note."""
    noted: list[object] = []
    reload = OffloadedOptimizer.reload_states

    def noting(self: OffloadedOptimizer) -> None:
        noted.append(self)
        reload(self)

    monkeypatch.setattr(OffloadedOptimizer, "reload_states", noting)
    return noted


def offloaded(policy: OffloadPolicy = ALL_RESIDENT) -> OffloadedOptimizer:
    optimizer = attach(momentum([nn.Parameter(torch.ones(3))]), policy=policy)
    assert isinstance(optimizer, OffloadedOptimizer)
    return optimizer


def take_step(optimizer: Optimizer, count: int = 1) -> None:
    for _ in range(count):
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()


class Hooks:
    """Frameworks bind more than the functions and partials of ``tests/seeds/test_bridge_4217.py``."""

    def __init__(self, calls: list[object]) -> None:
        self.calls = calls

    def method(self, *args: object, **kwargs: object) -> str:
        self.calls.append((args, kwargs))
        return "result"

    __call__ = method

    def all(self) -> dict[str, Callable[..., Any]]:
        return {"method": self.method, "object": self}


@pytest.mark.parametrize("kind", [*Hooks([]).all(), "nothing"])
def test_what_was_bound_is_called_with_everything_after_the_reload(kind: str, calls: list[object]) -> None:
    callback = {**Hooks(calls).all(), "nothing": None}[kind]
    optimizer = offloaded()
    wrapped = reload_before(callback, optimizer)
    assert reload_before(wrapped, optimizer) is wrapped
    assert wrapped("model", None, grads=3) == (callback and "result")
    assert calls == [optimizer, *([(("model", None), {"grads": 3})] if callback else [])]


def test_a_method_of_a_class_can_be_wrapped(calls: list[object]) -> None:
    optimizer = offloaded()

    class Trainer:
        def finalize(self, *args: object) -> object:
            return self, args

    Trainer.finalize = reload_before(Trainer.finalize, optimizer)  # type: ignore[method-assign]
    trainer = Trainer()
    assert trainer.finalize(1) == (trainer, (1,))
    assert reload_before(trainer.finalize, optimizer) == trainer.finalize
    assert calls == [optimizer]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), (0, 1, 0, 2, 1, 0), (2, 2, 0, 1, 2)])
def test_each_of_several_optimizers_reloads_once(order: tuple[int, ...], calls: list[object]) -> None:
    optimizers = [offloaded() for _ in range(3)]
    callback: Callable[..., Any] = Hooks(calls).method
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
    wrapped = reload_before(Hooks(calls).method, optimizer)
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
    wrapped = reload_before(Hooks(calls).method, offloaded())
    for _ in range(sys.getrecursionlimit()):
        wrapped = reload_before(wrapped, offloaded())
    assert wrapped("model") == "result"
    assert calls == [(("model",), {})]


def test_what_others_wrap_around_a_wrapper_stays(calls: list[object]) -> None:
    ours = reload_before(Hooks(calls).method, offloaded())  # gone at once

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return ours(*args, **kwargs)

    optimizer = offloaded()
    assert reload_before(theirs, optimizer)("model") == "result"
    assert calls == [optimizer, "theirs", (("model",), {})]


def test_a_plain_optimizer_is_left_alone(calls: list[object]) -> None:
    optimizer = offloaded()
    wrapped = reload_before(Hooks(calls).method, optimizer)
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


def test_a_hook_that_nobody_calls_is_told_once() -> None:
    optimizer = offloaded()
    wrapped = reload_before(None, optimizer)
    assert warned(optimizer, 7) == [3]
    reload_before(wrapped, optimizer)  # as a loop that wraps in each iteration
    assert warned(optimizer, 7) == []


@pytest.mark.parametrize("first_call", [1, 2, 3])
def test_a_hook_that_is_called_is_fine(first_call: int) -> None:
    optimizer = offloaded()
    wrapped = reload_before(None, optimizer)
    assert warned(optimizer, first_call - 1) == []
    assert warned(optimizer, 6, wrapped) == []


@pytest.mark.parametrize("anew", [True, False], ids=["attached anew", "another hook"])
def test_a_hook_is_watched_anew(anew: bool) -> None:
    optimizer = offloaded()
    wrapped = reload_before(None, optimizer)
    assert warned(optimizer, 4, wrapped) == []
    if anew:
        attach(remove_offload(optimizer))
    assert (reload_before(wrapped if anew else lambda: None, optimizer) is wrapped) == anew
    assert warned(optimizer, 6) == [3]


def test_accelerates_wrapper_is_seen_through(calls: list[object]) -> None:
    accelerate = pytest.importorskip("accelerate.optimizer")
    optimizer = offloaded()
    outer = object.__new__(accelerate.AcceleratedOptimizer)  # its __init__ wants an accelerator to be set up
    outer.optimizer = optimizer
    wrapped = reload_before(None, outer)
    wrapped()
    assert calls == [optimizer]
    assert reload_before(wrapped, optimizer) is wrapped


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_let_go_with_the_rest(mesh: DeviceMesh, name: str) -> None:
    """What updates beside the model still read is kept beyond ``zero_grad``, but not beyond ``release_states``."""
    loop = Loop(mesh, adamw, with_share(**SIZES, **POLICIES[name])).train(3)
    loop.backward(3)
    gradients = [weakref.ref(param.grad) for param in loop.model.parameters() if param.grad is not None]
    loop.step()
    go_through(loop.optimizer, ("offload", "release"))
    assert not any(gradient() is not None for gradient in gradients)


# State while it is away ----------------------------------------------------------------------------------------------


@spread(
    phases=SEQUENCES,
    policy={"moves": SMALL, "resident": RESIDENT, "all-resident": ALL_RESIDENT},
    make={"adamw": adamw_of, "momentum": momentum},
)
def test_state_is_right_at_every_moment(
    make: Callable[[Any], Optimizer], policy: OffloadPolicy, phases: tuple[str, ...]
) -> None:
    pair = make_pair(Zoo, make, policy=policy)
    pair.assert_same()
    for _ in range(3):  # the first time, there is no state yet
        for phase in phases:
            go_through(pair.offloaded.optimizer, [phase])
            pair.assert_same()
        if engine_of(pair.offloaded.optimizer).phases.away:
            assert_at_home(pair.offloaded.optimizer)
        pair.train(2)
    pair.assert_trained("empty")


@EVERY_SEQUENCE
def test_state_of_another_shape_is_refused_as_in_a_step(phases: tuple[str, ...]) -> None:
    """A phase that moves state has to take over what the user has put there."""
    pair = make_pair(edits.Twins, adamw_of, policy=RESIDENT)
    pair.train(2)
    optimizer = pair.offloaded.optimizer
    go_through(optimizer, phases)
    state = optimizer.state[params_of(optimizer)[0]]
    kept, state["exp_avg"] = state["exp_avg"], torch.ones(7)
    was_away = engine_of(optimizer).phases.away
    with pytest.raises(ValueError, match=r"expected local tensors .*\(40, 33\).*Nothing has been changed"):
        go_through(optimizer, ["reload" if was_away else "offload"])
    assert engine_of(optimizer).phases.away == was_away
    state["exp_avg"] = kept
    pair.train(2)


def more_parameters(run: Run) -> None:
    torch.manual_seed(1)
    for number, size in enumerate((65, 700)):
        name = f"more{number}_{len(run.params)}"
        run.model.register_parameter(name, nn.Parameter(torch.randn(size)))
        run.parts["start"][name] = run.params[name].detach().clone()
        run.optimizer.add_param_group({"params": [run.params[name]], "lr": 0.01})


@spread(phases=SEQUENCES, policy={"full": RESIDENT, "room": with_share(RESIDENT, staying=40_000)})
def test_parameters_that_are_added(policy: OffloadPolicy, phases: tuple[str, ...]) -> None:
    pair = make_pair(edits.Twins, adamw_of, policy=policy)
    pair.train(2)
    optimizer = pair.offloaded.optimizer
    go_through(optimizer, phases)
    pair.each(more_parameters)
    pair.train(2)
    for phase in PHASES:
        go_through(optimizer, [phase])
        pair.assert_same()
    pair.train(2)


@EVERY_SEQUENCE
def test_state_that_is_loaded_for_a_parameter_without(phases: tuple[str, ...]) -> None:
    """A frozen one gets its place in the load; on the device only if the rest is there."""

    def thaw(run: Run) -> None:
        saved = run.optimizer.state_dict()
        saved["state"] = {**copy.deepcopy(saved["state"]), 1: copy.deepcopy(saved["state"][0])}
        run.optimizer.load_state_dict(saved)

    pair = make_pair(edits.Twins, adamw_of, policy=None)
    for run in pair:
        params_of(run.optimizer)[1].requires_grad_(False)
    pair.attach(with_share(SMALL, staying=60_000))
    pair.train(2)
    optimizer = pair.offloaded.optimizer
    go_through(optimizer, phases)
    pair.each(thaw)
    pair.assert_same()
    if engine_of(optimizer).phases.away:
        assert_at_home(optimizer)
    for run in pair:
        params_of(run.optimizer)[1].requires_grad_(True)
    go_through(optimizer, ["reload"])
    pair.train(2)


@EVERY_SEQUENCE
def test_hyperparameters_that_make_more_state(phases: tuple[str, ...]) -> None:
    pair = make_pair(Zoo, lambda params: optim.SGD(params, lr=0.1), policy=RESIDENT)
    pair.train(2)

    def add_momentum(run: Run) -> None:
        run.optimizer.param_groups[0]["momentum"] = 0.9

    go_through(pair.offloaded.optimizer, phases)
    pair.each(add_momentum)
    pair.train(2)
    go_through(pair.offloaded.optimizer, phases)
    pair.train(2)


def test_an_optimizer_is_dropped_in_any_phase() -> None:
    for phases in SEQUENCES.values():
        optimizer = offloaded()
        take_step(optimizer, 2)
        go_through(optimizer, phases)
        engine = weakref.ref(engine_of(optimizer))
        del optimizer
        assert engine() is None


# Checkpoints ---------------------------------------------------------------------------------------------------------


POLICY_WITH_RESIDENTS = {
    "spare": with_share(saving.POLICY, staying=9_000),
    "no spare": with_share(saving.NO_SPARE, staying=9_000),
    "all resident": with_share(saving.NO_SPARE, staying=1 << 20),
}
SEQUENCES_AND_RESIDENCIES = spread(phases=SEQUENCES, policy=POLICY_WITH_RESIDENTS)


@pytest.mark.usefixtures("mesh")
@SEQUENCES_AND_RESIDENCIES
def test_a_file_holds_the_state_of_its_call(
    policy: OffloadPolicy, phases: tuple[str, ...], tmp_path: Path, waits: Waits
) -> None:
    """Resident state leaves again, for the same host memory, while the writer has not read a byte."""
    training = saving.Training(saving.adamw, policy)
    training.train(saving.LATE_STEP + 1)
    stager = ArenaStager(*training.optimizers)
    go_through(training.optimizers[0], phases)
    expected = copied(training.state())
    future = saving.save(training, stager, waits.hold(tmp_path))
    for _ in range(3):
        go_through(training.optimizers[0], ("reload",))
        training.train()
        go_through(training.optimizers[0], ("offload", "release"))
    assert waits.count == (policy is not POLICY_WITH_RESIDENTS["spare"])
    waits.let_go()
    future.result()
    saving.assert_holds(tmp_path, expected)
    saving.assert_exact_after(training)


# Exceptions ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mesh")
@SEQUENCES_AND_RESIDENCIES
def test_a_step_that_fails(
    policy: OffloadPolicy, phases: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = saving.Training(saving.adamw, policy)
    optimizer = training.optimizers[0]
    training.train(3)
    dcp.save(training.state(), checkpoint_id=tmp_path)
    go_through(optimizer, ("offload", "release", "reload"))
    saving.set_gradients(training.net, 3)
    with monkeypatch.context() as patch:
        fail_in_bucket(patch, 4)
        with pytest.raises(ArithmeticError, match="a bit has flipped"):
            optimizer.step()
    go_through(optimizer, phases)
    with pytest.raises(RuntimeError, match=r"step\(\) refused: an earlier step"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"state_dict\(\) refused: an earlier step"):
        optimizer.state_dict()
    go_through(optimizer, phases)
    training.load(tmp_path)
    go_through(optimizer, phases)
    training.train(2)
    saving.assert_exact_after(training)


def test_no_room_on_the_device_leaves_state_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(Zoo, adamw_of, policy=RESIDENT)
    pair.train(2)
    optimizer = pair.offloaded.optimizer
    go_through(optimizer, ["offload", "release"])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "_take", full)
        with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
            go_through(optimizer, ["reload"])
    assert_at_home(optimizer)
    pair.assert_same()
    pair.train(2)


# Several optimizers --------------------------------------------------------------------------------------------------


@spread(sequence=SEQUENCES, who={str(who): who for who in ((0,), (1,), (0, 1), (1, 0))})
def test_optimizers_that_share_staging(sequence: tuple[str, ...], who: tuple[int, ...]) -> None:
    training = saving.Training(saving.several, POLICY_WITH_RESIDENTS["no spare"])
    training.train(2)
    for _ in range(3):
        for phase in sequence:
            for number in who:
                go_through(training.optimizers[number], [phase])
        saving.assert_exact_after(training, saving.several)
        training.train()
    saving.assert_exact_after(training, saving.several)


def test_threads_take_turns_on_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = offloaded()
    take_step(optimizer)
    lanes, held = engine_of(optimizer).core.lanes, []

    def free(lock: Any) -> bool:
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False) and not lock.release()))
        thread.start()
        thread.join()
        return found[0]

    copy_ = type(lanes.load)._copy

    def noting(self: Any, pieces: Any) -> None:
        held.append(not free(self._in_use))
        copy_(self, pieces)

    monkeypatch.setattr(type(lanes.load), "_copy", noting)
    go_through(optimizer, PHASES)
    take_step(optimizer)
    assert held
    assert all(held)


# The order of events -------------------------------------------------------------------------------------------------


def test_loads_come_before_the_reduction_and_updates_after_it(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of Megatron's three call sites, as the host issues it."""
    events: list[str] = []

    def noted(method: str, kinds: dict[str, str]) -> None:
        plain = getattr(Lane, method)

        def noting(self: Lane, *args: Any, **kwargs: Any) -> None:
            events.append(kinds[self.name])
            plain(self, *args, **kwargs)

        monkeypatch.setattr(Lane, method, noting)

    noted("copy", {"load": "L", "store": "S"})
    noted("run", {"update": "U", "compute": "U"})
    policy = with_share(**SIZES, staying=20_000)
    loop = Loop(mesh, adamw, None, micro_batches=2)
    attach(loop.optimizer, policy=policy)  # without the model, in whose backward loads would begin by themselves
    loop.train(3)
    finalize = reload_before(lambda: events.append("reduce"), loop.optimizer)
    for step in range(3, 6):
        events.clear()
        go_through(loop.optimizer, ["offload"])
        events.append("forward")
        go_through(loop.optimizer, ["release"])
        loop.backward(step)
        events.append("backward")
        finalize()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        down, events[:] = events[: events.index("forward")], events[events.index("forward") :]
        assert set(down) == {"S"}, "what is kept goes home"
        assert events[:2] == ["forward", "backward"]
        begun, rest = events[2 : events.index("reduce")], events[events.index("reduce") + 1 :]
        assert len(begun) >= 2
        assert set(begun) == {"L"}
        assert rest[0] == "U"
        assert rest.count("S") > 0
        assert rest.count("U") > len(begun)  # more than the device holds
