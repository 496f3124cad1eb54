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


class Wide(Optimizer):
    """fp32 momentum, whatever the dtype of the parameters is."""

    dtype = torch.float32

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for param in (one for one in group["params"] if one.grad is not None):
                state = self.state[param]
                if not state:
                    self.begin(param, state)
                param.copy_(param.float() - group["lr"] * self.direction(param.grad.float(), state))

    def begin(self, param: Tensor, state: dict[str, Any]) -> None:
        state["velocity"] = torch.zeros_like(param, dtype=self.dtype)

    def direction(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return state["velocity"].copy_(state["velocity"].float().lerp(grad, 0.3)).float()


class Narrow(Wide):
    """bf16 momentum."""

    dtype = torch.bfloat16


class Assorted(Wide):
    """State of many kinds: integers with a scale, counters of other dtypes, dicts, lists, ``None``."""

    dtype = torch.float64

    def begin(self, param: Tensor, state: dict[str, Any]) -> None:
        super().begin(param, state)
        state["step"] = torch.zeros((), dtype=torch.int64)
        state["decay"] = torch.ones((), dtype=torch.float64)
        state["codes"] = torch.zeros_like(param, dtype=torch.int8)
        state["positive"] = torch.zeros_like(param, dtype=torch.bool)
        state["table"] = torch.linspace(0, 1, 7, dtype=torch.float64)
        state["inner"] = {
            "half": torch.zeros_like(param, dtype=torch.float16),
            "step": torch.zeros((), dtype=torch.int32),
        }
        state["last"] = [torch.zeros_like(param, dtype=torch.float64), torch.ones((), dtype=torch.float64)]
        state["none"], state["kind"], state["count"] = None, "signed", 0

    def direction(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["step"] += 1
        state["count"] += 1
        state["inner"]["step"] += 2
        state["decay"] *= 0.9
        state["last"][1] /= 3
        state["codes"].copy_((grad * 1000).clamp(-100, 100))
        state["positive"].copy_(grad > 0)
        state["inner"]["half"].copy_(state["inner"]["half"].float().lerp(grad, 0.5))
        found = super().direction(grad, state) + state["codes"] * state["decay"] / 1000 + state["positive"] * 1e-4
        found = found + state["inner"]["half"] + state["last"][0] * state["last"][1] * state["table"][3]
        state["last"][0].copy_(found / 7)
        return found.float()
