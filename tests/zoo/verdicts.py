"""What the tracer says of a class, by the word that the package's table has for it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_offload.fsdp.optim import plain_step_of
from fsdp_offload.state.layout import leaves_of

from .dependence import DependenceTrace
from .libraries import load
from .recipes import recipes_for
from .training import Training, say, seed

STEPS = 12
_JUMPS = (99, 2_519, 9_999, 65_535)
"""Counters of steps are set to these, as some classes begin something after a warm-up or do it every so often: 2,520 is
a multiple of all numbers to 10 and of many above, 65,536 of the powers of two."""


def traced_verdict(name: str) -> str:
    """``"mixed: "`` and where, ``"parameters"``, or why the class of that name cannot be traced."""
    problem = ""
    for recipe in recipes_for(load(name)):
        try:
            Training(load(name), recipe, groups=1).step()
            return mixture(Training(load(name), recipe, groups=1).optimizer) or "parameters"
        except Exception as error:  # noqa: BLE001  # whatever theirs raises
            problem = problem or f"does not run: {say(error)}"
    return problem


def mixture(optimizer: Optimizer) -> str:
    """Where values of several parameters come together in steps of ``optimizer``; empty if they do not."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trace = DependenceTrace()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for step in _steps_of(optimizer):
            seed(step)
            for number, param in enumerate(params):
                param.grad = torch.randn_like(param)
                trace.mark(param, number)
                trace.mark(param.grad, number)
            try:
                with trace:
                    plain_step_of(type(optimizer))(optimizer)
            except Exception:  # counters have jumped
                if step < STEPS:
                    raise
                break
            if trace.mixed_reads:
                return f"mixed: {trace.mixed_reads[0]}"
            for number, param in enumerate(params):
                where = trace.foreign_origin(_written_for(optimizer, param), number)
                if where:
                    return f"mixed: {where}"
    return ""


def _written_for(optimizer: Optimizer, param: Tensor) -> list[Tensor]:
    state = (value for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor))
    return [param.detach(), *(leaf for value in state for leaf in leaves_of(value))]


def _steps_of(optimizer: Optimizer) -> Iterator[int]:
    """Numbers of steps to make; between the last ones, counters jump ahead."""
    before: dict[tuple[int, Any], float] = {}
    for step in range(STEPS):
        before = _numbers_in(optimizer)
        yield step
    counters = [place for place, value in _numbers_in(optimizer).items() if before.get(place) == value - 1 < 1e9]
    for jump in _JUMPS:
        for number, name in counters:
            holder = _holders(optimizer)[number]
            value = holder[name]
            holder[name] = torch.full_like(value, jump) if isinstance(value, Tensor) else type(value)(jump)
        yield from (jump, jump + 1)


def _holders(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """What a step may count in: the optimizer, its groups, the state of parameters."""
    return [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]


def _numbers_in(optimizer: Optimizer) -> dict[tuple[int, Any], float]:
    return {
        (number, name): float(value)
        for number, holder in enumerate(_holders(optimizer))
        for name, value in holder.items()
        if _is_number(value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)
