"""Optimizers whose state has an unusual structure give the bits of plain training; and what is around a step."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.parity import Matrices, Run, Zoo, attach, batch, make_pair, params_of

Update = Callable[[Tensor, dict[str, Any]], object]


class Unusual(Optimizer):
    """Momentum; ``update`` keeps something in its state beside that, and says what the parameter goes by."""

    def __init__(self, params: Any, update: Update, *, lr: float = 0.05, early: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.update = update
        for param in params_of(self) if early else ():
            self.state[param] = {"step": 0, "momentum": torch.zeros_like(param)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "momentum": torch.zeros_like(param)}
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(param.grad)
                self.update(param, state)
                param.sub_(state.get("velocity", state["momentum"]), alpha=group["lr"])


def gradient_on_state(param: Tensor, state: dict[str, Any]) -> None:
    state.setdefault("before", torch.zeros_like(param)).grad = param.grad.clone()


def note_on_state(param: Tensor, state: dict[str, Any]) -> None:
    state["momentum"].largest = state["momentum"].abs().max()


def hessian(param: Tensor, state: dict[str, Any]) -> None:
    """Goes through the graph of the gradient now and then."""
    if state["step"] % 10 == 9 and param.grad.requires_grad:
        with torch.enable_grad():
            (product,) = torch.autograd.grad(param.grad, param, torch.ones_like(param.grad), retain_graph=True)
        state["hessian"] = product.abs()


UPDATES: dict[str, Update] = {
    "two names for one tensor": lambda param, state: state.setdefault("velocity", state["momentum"]),
    "the parameter": lambda param, state: state.setdefault("weights", param.detach()),
    "the gradient": lambda param, state: state.update(before=param.grad),
    "a gradient on state": gradient_on_state,
    "a note on state": note_on_state,
    "the hessian": hessian,
}


def without_some_gradients(run: Run, step: int) -> float:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward(create_graph=run.optimizer.update is hessian)
    if step % 4 == 3:
        params_of(run.optimizer)[0].grad = None
    run.optimizer.step()
    return loss.item()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("early", [False, True], ids=["state in the step", "state in the constructor"])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_the_same_bits(update: Update, early: bool) -> None:
    """What ``core/test_whole.py`` has no class for."""

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        return Unusual([{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}], update, early=early)

    pair = make_pair(Matrices, make)
    pair.train(11, without_some_gradients)
    pair.assert_trained()
    pair.detach()
    pair.train(2, without_some_gradients)


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


def test_a_compiled_step_runs_as_it_is() -> None:
    pair = make_pair(Zoo, torch.optim.AdamW)
    compiled = torch.compile(pair.offloaded.optimizer.step)

    def step(run: Run, number: int) -> None:
        run.loss(number).backward()
        compiled() if run is pair.offloaded else run.optimizer.step()

    pair.train(2, step)
