"""Optimizers of our own, each for one thing that the harness has to tell."""

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


class SharedNorm(Momentum):
    """Not separable."""

    def direction(self, grad: Tensor) -> Tensor:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        return grad / torch.stack([one.norm() for one in grads]).norm()


class LateNorm(SharedNorm):
    """Not separable after a warm-up."""

    def direction(self, grad: Tensor) -> Tensor:
        return super().direction(grad) if self.calls > 100 else grad


class Around(Optimizer):
    """Wraps another optimizer."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.inner = Momentum(params, lr)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)
