"""Frameworks wrap the optimizer and look at its signatures: looking, stepping and attaching go to the real one."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

import fsdp_offload
from fsdp_offload import OffloadedOptimizer, OffloadPolicy, is_offloaded, offload_report, remove_offload
from fsdp_offload.checkpoint import get_optimizer_state_dict
from fsdp_offload.optimizers.divided_step import ENGINE_ATTRIBUTE
from tests.cpu.test_megatron_chain import ChainedOptimizer
from tests.overlapping import Loop, assert_same_each_step, pair, same
from tests.parity import SMALL, Net, adamw, attach, params_of


@pytest.fixture
def accelerated() -> Iterator[Any]:
    """accelerate's wrapper around an optimizer, with a gradient scaler if one is given."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)  # the wrapper asks what has been set up

    def wrap(optimizer: optim.Optimizer, scaler: Any = None) -> optim.Optimizer:
        return accelerate.optimizer.AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)

    yield wrap
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def lightnings(optimizer: optim.Optimizer) -> Any:
    return pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)


def fabrics(optimizer: optim.Optimizer) -> Any:
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    strategies = pytest.importorskip("lightning.fabric.strategies")
    return wrappers._FabricOptimizer(optimizer, strategies.SingleDeviceStrategy())


def plain_pair() -> tuple[Loop, Loop]:
    return pair(None, None, adamw, net=Net)


@pytest.fixture(params=["accelerate", "lightning", "fabric"])
def wrap(request: pytest.FixtureRequest) -> Any:
    """What each framework puts around an optimizer."""
    if request.param == "accelerate":
        return request.getfixturevalue("accelerated")
    return {"lightning": lightnings, "fabric": fabrics}[request.param]


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_wrapper_is_looked_through(wrap: Any, wrapped_first: bool) -> None:
    model = Net()
    optimizer, names = adamw(model.parameters()), [name for name, _ in model.named_parameters()]
    wrapper = wrap(optimizer) if wrapped_first else None
    assert wrapper is None or not is_offloaded(wrapper)
    assert attach(optimizer if wrapper is None else wrapper) is (wrapper or optimizer)
    wrapper = wrapper or wrap(optimizer)
    assert is_offloaded(wrapper)
    assert isinstance(optimizer, OffloadedOptimizer)
    host_bytes = optimizer.offload_report().memory.host_state_bytes
    assert offload_report(wrapper).memory.host_state_bytes == host_bytes > 0
    fsdp_offload.synchronize(wrapper)
    hook = fsdp_offload.reload_before(None, wrapper)
    assert fsdp_offload.reload_before(hook, optimizer) is hook
    assert get_optimizer_state_dict(model, wrapper)["param_groups"][0]["params"] == names
    assert fsdp_offload.offload_optimizer(wrapper, exist_ok=True) is wrapper
    remove_offload(wrapper)
    assert not is_offloaded(wrapper)
    assert type(optimizer) is optim.AdamW


@pytest.mark.parametrize("set_to_none", [True, False])
def test_methods_on_lightnings_wrapper_run_on_the_real_optimizer(set_to_none: bool) -> None:
    """It is a subclass of the optimizer's class, so that our methods are called on an object without an engine."""
    both = _, loop = plain_pair()
    attach(loop.optimizer)
    wrapper = lightnings(loop.optimizer)
    assert isinstance(wrapper, OffloadedOptimizer)

    def seen_from(run: Loop) -> Any:
        return wrapper if run is loop else run.optimizer

    def step(run: Loop, number: int) -> None:
        run.backward(number)
        run.optimizer.step()  # LightningOptimizer.step asks its strategy, which has none of ours to call
        run.schedulers[0].step()
        seen_from(run).zero_grad(set_to_none=set_to_none)

    assert_same_each_step(*both, 3, step)
    for phase in (wrapper.offload_states, wrapper.release_states, wrapper.reload_states, wrapper.synchronize):
        phase()
    assert wrapper.param_groups is loop.optimizer.param_groups
    saved = copy.deepcopy(wrapper.state_dict())
    assert_same_each_step(*both, 2, step)
    for run in both:
        seen_from(run).load_state_dict(copy.deepcopy(saved))
    assert_same_each_step(*both, 2, step)
    for run in both:
        run.model.register_parameter("late", nn.Parameter(torch.ones(3)))
        seen_from(run).add_param_group({"params": [run.model.late]})
    assert same(*both)


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_a_scaler_of_accelerates(accelerated: Any, wrapped_first: bool) -> None:
    """The wrapper has captured ``optimizer.step``, and puts it back after each step; a scheduler wraps it as well."""
    both = plain, loop = plain_pair()

    def wrap(run: Loop) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        run.schedulers = [optim.lr_scheduler.LinearLR(run.optimizer, 0.5, 1.0, 5)]
        run.kept["wrapper"] = accelerated(run.optimizer, scaler)

    def step(run: Loop, number: int) -> None:
        wrapper = run.kept["wrapper"]
        wrapper.zero_grad()
        loss = run.model(run.batch(number))
        wrapper.scaler.scale(loss).backward()
        if number == 3:
            run.model.up.weight.grad[0, 0] = float("inf")
        wrapper.step()
        run.schedulers[0].step()
        run.seen += [loss.item(), wrapper.step_was_skipped]

    for run in both:
        if run is loop and not wrapped_first:
            attach(run.optimizer)
        wrap(run)
    wrapper = loop.kept["wrapper"]
    if wrapped_first:
        attach(wrapper)
    assert_same_each_step(plain, loop, 6, step)
    assert offload_report(loop.optimizer).step.stored_bytes > 0
    if wrapped_first:
        remove_offload(wrapper)
        assert_same_each_step(plain, loop, 4, step)


def test_exist_ok_attaches_once_and_refuses_another_offload() -> None:
    both = plain_pair()
    model, optimizer = both[1].model, both[1].optimizer
    attach(optimizer, exist_ok=True)
    assert is_offloaded(optimizer)
    with pytest.raises(RuntimeError, match=r"offloaded already.*call remove_offload\(\) first"):
        fsdp_offload.offload_optimizer(optimizer)
    for arguments, message in (
        ({"policy": OffloadPolicy()}, r"offloaded already, .*, with OffloadPolicy\(.*call remove_offload\(\) first"),
        ({"model": model}, r"offloaded already, without a model, .*call remove_offload"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fsdp_offload.offload_optimizer(optimizer, exist_ok=True, **arguments)
    assert_same_each_step(*both, 2)
    remove_offload(optimizer)
    attach(optimizer, policy=SMALL, model=model)
    for arguments in ({}, {"policy": SMALL}, {"model": model}, {"policy": SMALL, "model": model}):
        assert fsdp_offload.offload_optimizer(optimizer, exist_ok=True, **arguments) is optimizer
    assert_same_each_step(*both, 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    fsdp_offload.offload_optimizer(optimizer, exist_ok=True, model=model)


class Container(optim.Optimizer):
    """As torchtitan's: by its class one of torch's, and a list of those that train."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([param for one in optimizers for param in params_of(one)], {})


class Users(optim.Optimizer):
    """Somebody's wrapper, of which no framework knows."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        vars(self).update(vars(optimizer), optimizer=optimizer)
        del vars(self)[ENGINE_ATTRIBUTE]

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def test_a_wrapper_that_is_an_optimizer_itself_is_looked_through() -> None:
    both = _, loop = plain_pair()
    attach(loop.optimizer, policy=OffloadPolicy(), model=loop.model)
    assert_same_each_step(*both, 1)
    wrapper = Users(loop.optimizer)
    for function in (fsdp_offload.offload_states, fsdp_offload.release_states, fsdp_offload.reload_states):
        function(wrapper)
    fsdp_offload.reload_before(None, wrapper)
    fsdp_offload.clip_grad_norm_(wrapper, 1.0)
    get_optimizer_state_dict(loop.model, wrapper)
    remove_offload(wrapper)
    assert not is_offloaded(loop.optimizer)
    assert_same_each_step(*both, 1)


def test_a_container_stands_for_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = [adamw(Net().parameters()) for _ in range(2)]
    container = Container(*optimizers)
    assert not is_offloaded(container)
    attach(container)
    assert is_offloaded(container)
    assert all(map(is_offloaded, optimizers))
    reached: list[object] = []
    monkeypatch.setattr(OffloadedOptimizer, "synchronize", reached.append)
    fsdp_offload.synchronize(container)
    assert reached == container.optimizers
    fsdp_offload.remove_offload(container)
    assert not any(map(is_offloaded, optimizers))


def test_a_chain_of_which_one_is_refused_stays_as_it_was() -> None:
    both, plain = plain_pair(), adamw(Net().parameters())
    mine = attach(both[1].optimizer)
    sparse = optim.SparseAdam([torch.nn.Parameter(torch.ones(4))])
    chain = ChainedOptimizer([mine, plain, sparse])
    with pytest.raises(ValueError, match="sparse gradients"):
        attach(chain, exist_ok=True)
    with pytest.raises(RuntimeError, match="this AdamW is not offloaded"):
        fsdp_offload.remove_offload(chain)
    assert is_offloaded(mine)
    assert not is_offloaded(plain)
    assert_same_each_step(*both, 2)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_a_step_that_is_wrapped_by_what_is_defined_later() -> None:
    both = plain_pair()
    optimizer = both[1].optimizer
    plain_step = optimizer.step

    def step(*_: None) -> None:
        call(plain_step)

    optimizer.step = step
    attach(optimizer)

    def call(function: Any) -> None:
        function()

    assert_same_each_step(*both, 2)


# Signatures ----------------------------------------------------------------------------------------------------------


class Scaled(optim.AdamW):
    """Takes more than torch's optimizers do in one method and less in another, as Transformer Engine's FusedAdam."""

    def step(self, closure: Callable[[], float] | None = None, grad_scaler: float | None = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if grad_scaler is not None and param.grad is not None:
                    param.grad.div_(grad_scaler)
        return super().step(closure)

    def zero_grad(self) -> None:
        super().zero_grad()


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, Scaled])
def test_signatures_are_those_of_the_class(cls: type[optim.Optimizer]) -> None:
    plain, offloaded = (cls(nn.Linear(3, 3).parameters(), lr=0.1) for _ in range(2))
    attach(offloaded)
    for name in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        assert inspect.signature(getattr(offloaded, name)) == inspect.signature(getattr(plain, name)), name
        assert inspect.signature(getattr(type(offloaded), name)) == inspect.signature(getattr(cls, name)), name
