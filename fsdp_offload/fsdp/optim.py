"""Internals of torch.optim around a step: hooks, the choice of an implementation, unusable gradients."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .dtensor import is_unreduced, local_shard
from .gradients import SpentGradient
from .guard import unguarded_class

_MODULE: Any = sys.modules[Optimizer.__module__]


def unsupported_gradient(param: Tensor, grad: Tensor) -> str | None:
    """Return why ``grad`` cannot be used shard by shard, or ``None``."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and getattr(grad, "_spec", None) is param._spec:
        return None  # as fully_shard makes them; comparing placements costs more than the rest of the step's checks
    if isinstance(grad, SpentGradient):
        return (
            "its gradient was used in the backward before the last step() and freed (parameters=True, "
            "overlap='iteration'); call zero_grad() after each step(), or use overlap='forward' to step with it again"
        )
    if is_unreduced(grad):
        return (
            "its gradient is not reduced; call set_requires_gradient_sync(True) before the last micro-batch, or "
            "model.synchronize_gradients() before step()"
        )
    if local_shard(grad).layout != torch.strided:
        return f"its gradient is {local_shard(grad).layout}, and only dense ones move: nn.Embedding(..., sparse=False)"
    if isinstance(param, DTensor) and (not isinstance(grad, DTensor) or grad.placements != param.placements):
        has = grad.placements if isinstance(grad, DTensor) else "no placements"
        return (
            f"its gradient has {has} where the parameter has {param.placements}; redistribute the gradient to the "
            "parameter's placements before step()"
        )
    return None


def pinned_implementations(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return, per group, options that stop torch from choosing foreach if it would not for the user's parameters."""
    pinned: list[dict[str, object]] = []
    for group in optimizer.param_groups:
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        types = (unguarded_class(param) for param in group["params"] if param.grad is not None)  # as torch chooses
        refuses = undecided and not all(one in _MODULE._foreach_supported_types for one in types)
        pinned.append({"foreach": False} if refuses else {})
    return pinned


def plain_step_of(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the ``step`` of ``cls`` without the hooks that torch wraps around it."""
    step: Callable[..., Any] = cls.step
    return getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step


@contextmanager
def no_global_step_hooks(optimizer: Optimizer | None = None) -> Iterator[None]:
    """Suppress global hooks and those of ``optimizer`` inside the block; the logical step has fired them."""
    tables = [_MODULE._global_optimizer_pre_hooks, _MODULE._global_optimizer_post_hooks]
    if optimizer is not None:
        tables += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def scaler_decides(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Return whether this step depends on the infinities that a GradScaler has found."""
    return bool(kwargs) or getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf")
