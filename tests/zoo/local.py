"""Optimizers of our own, each for one thing that the harness has to tell."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Momentum(Optimizer):
    """Separable, with a count in the group and one in an attribute."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    velocity = self.state[param].setdefault("velocity", torch.zeros_like(param))
                    velocity.mul_(0.9).add_(self.direction(param.grad))
                    param.sub_(velocity * group["lr"])

    def direction(self, grad: Tensor) -> Tensor:
        return grad


class Noisy(Momentum):
    """Separable, and every parameter draws."""

    def direction(self, grad: Tensor) -> Tensor:
        return grad + torch.randn_like(grad) * 1e-3


class Matrices(Momentum):
    """For matrices only."""

    def direction(self, grad: Tensor) -> Tensor:
        rows, _ = grad.shape
        return grad / rows


class SharedNorm(Momentum):
    """Not separable."""

    def direction(self, grad: Tensor) -> Tensor:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        return grad / torch.stack([one.norm() for one in grads]).norm()


class LateNorm(SharedNorm):
    """Not separable after a warm-up."""

    def direction(self, grad: Tensor) -> Tensor:
        return super().direction(grad) if self.calls > 100 else grad


class Closure(Momentum):
    """Its step needs one."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step()


class Diverging(Momentum):
    """With its own learning rate only."""

    def __init__(self, params: Any, lr: float = 1e20) -> None:
        super().__init__(params, lr)


class Unrepeatable(Momentum):
    """No seed brings its numbers back."""

    def direction(self, grad: Tensor) -> Tensor:
        return grad * (1 + os.urandom(1)[0] / 256)


class NeedsMore(Momentum):
    """Than the table of arguments has."""

    def __init__(self, params: Any, horizon_of_the_universe: float) -> None:
        super().__init__(params, horizon_of_the_universe)


class Idle(Momentum):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None


class Hanging(Momentum):
    def direction(self, grad: Tensor) -> Tensor:
        while True:
            grad = grad + 0


class Dying(Momentum):
    def direction(self, grad: Tensor) -> Tensor:
        os.abort()
