""":func:`add_masters`: fp32 masters for an optimizer that has none."""

import warnings
from typing import Any, TypeVar, get_args

import torch
from torch.optim import Optimizer

from ..optimizers import capabilities_for
from ..optimizers.masters import MasterKind, WithMasters, class_with_masters, has_master, widen_state
from ..state.layout import params_of
from .checks import names_by_place, refuse_bypass
from .wrapped import attachment_of, is_wrapped, redirect_captured_step, wrappers_around

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


def add_masters(optimizer: _Optimizer, kind: MasterKind = "remainder") -> _Optimizer:
    """Update fp32 masters of bf16 and fp16 parameters from now on, and round the parameters from them.

    In place: the optimizer stays the same object and an instance of its class. Results are bitwise those of the same
    optimizer on an fp32 copy of the model that receives the same gradients, rounded. ``optimizer.state[param]`` has one
    tensor more, ``"master_param"``, of the parameter's shape and sharding, and its other tensors are fp32.

    It works without :func:`offload_optimizer` and with it; call it before that. State that exists is widened, and its
    masters start at the parameters. Weights that somebody writes into parameters win over fp32 masters; of a remainder,
    the lower 16 bits stay. A second call with the same ``kind`` changes nothing.

    Args:
        optimizer: an elementwise one of ``torch.optim``; the wrappers of accelerate and Lightning are seen through.
        kind: ``"fp32"`` keeps whole masters, and rounds to nearest, ties to even. ``"remainder"`` keeps only the 16
            bits that a bf16 parameter does not have, as int16, and rounds ties away from zero.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer of torch.
        ValueError: the class cannot be run on masters or has its own, or ``"remainder"`` was asked for fp16.
        RuntimeError: the optimizer is offloaded without masters, or has masters of the other kind.
    """
    if kind not in get_args(MasterKind):
        raise ValueError(f"add_masters: kind must be one of {get_args(MasterKind)}, got {kind!r}")
    *wrappers, target = (optimizer,) if is_wrapped(optimizer) else wrappers_around(optimizer)
    if isinstance(target, WithMasters) and target.master_kind == kind:
        return optimizer
    _check(target, kind)
    if not any(map(has_master, params_of(target))):
        warnings.warn(
            "add_masters has no effect: no parameter is bf16 or fp16, and fp32 parameters are their own masters.",
            stacklevel=2,
        )
    plain: Any = type(target)
    target.__class__ = class_with_masters(plain, kind)
    assert isinstance(target, WithMasters)
    redirect_captured_step(target, plain.step, type(target).step, wrappers)
    target.register_step_pre_hook(refuse_bypass)
    widen_state(target)
    return optimizer


def _check(optimizer: Optimizer, kind: MasterKind) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"add_masters: expected a torch.optim.Optimizer, got {name}. Megatron's have masters already.")
    if isinstance(optimizer, WithMasters):
        raise RuntimeError(f"add_masters: this {name} has masters already, of kind {optimizer.master_kind!r}.")
    if attachment_of(optimizer) is not None:
        raise RuntimeError(
            f"add_masters: this {name} is offloaded already, without masters. Add them first:\n"
            f"    add_masters(optimizer, {kind!r})\n"
            "    offload_optimizer(optimizer, ...)\n"
            "After training has begun, call remove_offload(optimizer) before these lines."
        )
    if not capabilities_for(optimizer).takes_masters:
        raise ValueError(
            f"add_masters is for the elementwise optimizers of torch.optim, and {name} is not one of them, or has "
            "parameters that are made of several tensors. Shard an fp32 model with "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16) instead."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("add_masters: differentiable=True is not supported; autograd cannot follow a rounded update.")
    fp16 = [name for param, name in names_by_place(optimizer).items() if param.dtype is torch.float16]
    if kind == "remainder" and fp16:
        raise ValueError(
            "add_masters: 'remainder' is for bf16, whose 16 bits are the upper ones of fp32; "
            f"{len(fp16)} parameters are fp16 ({', '.join(fp16[:4])}). Use 'fp32'."
        )
