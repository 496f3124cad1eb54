"""Optimizers whose state has an unusual structure give the bits of plain training; and what is around a step."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.parity import Run, Zoo, attach, batch, make_pair, params_of


class Plain(Optimizer):
    """Momentum, one parameter after the other; ``update`` is what a subclass adds to it."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.before()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(param)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(param.grad)
                self.update(group, param, state)

    def before(self) -> None: ...

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        param.sub_(state["momentum"] * group["lr"])

    def trained(self) -> list[Tensor]:
        return [param for param in params_of(self) if param.grad is not None]


class TwoNames(Plain):
    """Two names in the state for one tensor."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("velocity", state["momentum"])
        param.sub_(state["velocity"] * group["lr"])


class SharesWithTheParameter(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("weights", param.detach())
        super().update(group, param, state)


class HangsAGradientOnItsState(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("before", torch.zeros_like(param)).grad = param.grad.clone()
        super().update(group, param, state)


class HangsANoteOnItsState(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state["momentum"].largest = state["momentum"].abs().max()
        super().update(group, param, state)


class GradientAsState(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        state["before"] = param.grad
        super().update(group, param, state)


class EstimatesTheHessian(Plain):
    """Goes through the graph of the gradients now and then, for all parameters; each bucket would do it anew."""

    def before(self) -> Any:
        trained = [param for param in self.trained() if param.grad is not None and param.grad.requires_grad]
        if not trained or self.state[trained[0]].get("step", 0) % 10 != 9:
            return
        grads = [param.grad for param in trained]
        with torch.enable_grad():
            products = torch.autograd.grad(grads, trained, grad_outputs=[torch.ones_like(g) for g in grads])  # type: ignore[arg-type]
        for param, product in zip(trained, products, strict=True):
            self.state[param]["hessian"] = product.abs()


class Twins(nn.Module):
    """Several parameters of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.randn(4, 3, 3, 3) for _ in range(2))
        self.matrices = nn.ParameterList(torch.randn(24, 20) for _ in range(3))
        self.vectors = nn.ParameterList(torch.randn(24) for _ in range(3))

    forward = Zoo.forward


def in_two_groups(cls: Callable[..., Optimizer]) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        return cls([{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}])

    return make


class StateInTheConstructor(Plain):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for param in params_of(self):
            self.state[param]["momentum"] = torch.zeros_like(param)
            self.state[param]["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["momentum"].mul_(0.9).add_(param.grad)
                    self.state[param]["step"] += 1
                    param.sub_(self.state[param]["momentum"] * group["lr"])


def without_some_gradients(run: Run, step: int) -> float:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward(create_graph=isinstance(run.optimizer, EstimatesTheHessian))
    if step % 4 == 3:
        params_of(run.optimizer)[0].grad = None
    run.optimizer.step()
    return loss.item()


CLASSES: list[type[Plain]] = [
    *(TwoNames, SharesWithTheParameter, HangsAGradientOnItsState, HangsANoteOnItsState),
    *(GradientAsState, EstimatesTheHessian, StateInTheConstructor),
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("cls", CLASSES)
def test_the_same_bits(cls: type[Plain]) -> None:
    pair = make_pair(Twins, in_two_groups(cls))
    pair.train(11, without_some_gradients)
    pair.assert_trained()
    pair.detach()
    pair.train(2, without_some_gradients)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_layouts_are_learnt_anew_outside_what_the_constructor_accepts(cls: type[Optimizer]) -> None:
    pair = make_pair(Twins, lambda params: cls(params, lr=0.1))
    pair.train(2)
    for run in pair:
        run.optimizer.param_groups[0]["lr"] = -1e-3  # a scheduler may do that
        run.optimizer.param_groups[0]["maximize"] = True
    pair.train(3)


def test_a_parameter_that_is_listed_twice_is_refused() -> None:
    param = nn.Parameter(torch.randn(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([param, param])
    with pytest.raises(ValueError, match="lists a parameter more than once"):
        attach(optimizer)


# Around the step ------------------------------------------------------------------------------------------------------


def test_what_a_user_adds_to_the_state_is_saved_and_loaded() -> None:
    pair = make_pair(Zoo, torch.optim.AdamW)
    pair.train(2)
    for run in pair:
        for param in params_of(run.optimizer)[:3]:
            run.optimizer.state[param]["note"] = torch.arange(3.0)
    pair.train(2)
    for run in pair:
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    pair.train(2)
    state = pair.plain.optimizer.state_dict()
    fresh = make_pair(Zoo, torch.optim.AdamW)
    fresh.each(lambda run: run.optimizer.load_state_dict(state))
    with torch.no_grad():
        for run in fresh:
            for param, trained in zip(run.model.parameters(), pair.plain.model.parameters(), strict=True):
                param.copy_(trained)
    fresh.assert_same()
    fresh.train(2)


def test_a_profiler_sees_the_name_of_the_users_class() -> None:
    pair = make_pair(Zoo, torch.optim.AdamW)
    pair.train(1)
    pair.offloaded.loss(1).backward()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:  # or torch 2.11 warns
        pair.offloaded.optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#AdamW.step" in names
    assert not any("Offloaded" in name for name in names)


def test_a_pre_hook_may_replace_the_arguments_of_a_step() -> None:
    model = Zoo()
    optimizer = attach(torch.optim.AdamW(model.parameters()))
    model(batch(0, torch.device("cpu"), torch.float32)).backward()
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0
    handle = optimizer.register_step_pre_hook(lambda *_: 1)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()
    handle.remove()


def test_a_compiled_step_says_that_it_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = Zoo()
    optimizer = attach(torch.optim.AdamW(model.parameters()))
    model(batch(0, torch.device("cpu"), torch.float32)).backward()
    torch.compile(optimizer.step)()
    assert len(re.findall("runs as it is", caplog.text)) == 1
    caplog.clear()
    other = attach(torch.optim.AdamW(model.parameters()))
    other.step()
    assert not caplog.text
