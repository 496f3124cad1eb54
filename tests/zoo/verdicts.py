"""What the tracer says of a class, by the word that the package's table has for it."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_offload.optimizers.scratch import random_states, restore_random_states
from fsdp_offload.state.layout import leaves_of
from fsdp_offload.torch_compat.dtensor import compute_device

from .dependence import DependenceTrace
from .libraries import load
from .recipes import recipes_for
from .scratch import STEPS, NoStartError, Scratch, Trial, untouched
from .training import Training


def traced_verdict(name: str) -> str:
    """``"mixed: "`` and where, ``"parameters"``, or why the class of that name cannot be traced."""
    problem = ""
    for recipe in recipes_for(load(name)):
        try:
            Training(load(name), recipe, groups=1).step()
            return mixture(load(name), Training(load(name), recipe, groups=1).optimizer) or "parameters"
        except NoStartError as reason:
            return f"refused: {reason}"
        except Exception as error:  # noqa: BLE001  # whatever theirs raises
            problem = problem or f"does not run: {type(error).__name__}: {error}"
    return problem


def mixture(cls: type[Optimizer], optimizer: Optimizer) -> str:
    """Where values of several parameters come together in a step of ``optimizer``; empty if they do not.

    On scratch parameters, over steps in which counters jump.
    """
    device = compute_device(optimizer.param_groups[0]["params"][0])
    before = random_states(device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), untouched(optimizer):
        try:
            return _traced(Trial(cls, optimizer))
        finally:
            restore_random_states(device, before)


def _traced(trial: Trial) -> str:
    scratch, trace = trial.start(), DependenceTrace()
    for step in trial.steps_of(scratch, STEPS):
        trial.give_gradients(scratch, step)
        for number, param in enumerate(scratch.flat):
            trace.mark(param, number)
            trace.mark(param.grad, number)  # type: ignore[arg-type]
        try:
            with trace:
                scratch.step_whole()
        except Exception:  # counters have jumped
            if step < STEPS:
                raise
            break
        if trace.mixed_reads:
            return f"mixed: {trace.mixed_reads[0]}"
        for number, param in enumerate(scratch.flat):
            where = trace.foreign_origin(_written_for(scratch, param), number)
            if where:
                return f"mixed: {where}"
    return ""


def _written_for(scratch: Scratch, param: Tensor) -> list[Tensor]:
    state = (value for value in scratch.states.get(param, {}).values() if isinstance(value, Tensor))
    return [param.detach(), *(leaf for value in state for leaf in leaves_of(value))]
