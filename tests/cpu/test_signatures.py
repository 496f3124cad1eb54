"""Frameworks look at signatures: those of an offloaded optimizer are its class's own."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.parity import Net, attach, make_pair


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


def test_a_step_that_takes_more() -> None:
    pair = make_pair(Net, lambda params: Scaled(params, lr=0.01))

    def step(run: Any, number: int) -> float:
        run.optimizer.zero_grad()
        loss = run.loss(number)
        loss.backward()
        run.optimizer.step(grad_scaler=4.0)
        return loss.item()

    pair.train(4, step)


@pytest.mark.parametrize("arguments", [(), (True,), (False,)])
def test_zero_grad(arguments: tuple[bool, ...]) -> None:
    net = nn.Linear(3, 3)
    optimizer = attach(optim.AdamW(net.parameters()))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.zero_grad(*arguments)
    grad = net.weight.grad
    assert grad is None if arguments != (False,) else torch.equal(grad, torch.zeros(3, 3))
