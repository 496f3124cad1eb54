"""torch's own database of optimizers: every configuration that it tests has the same bits, or is refused at attach.

The configurations are those for CUDA, as only these have ``capturable`` and all tensors as hyperparameters, each with
every implementation that its class has, plain and with ``maximize``. On the CPU torch refuses some of them itself, in
the first step.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn, optim

from tests.parity import Matrices, Pair, Run, Zoo, make_pair, train_step
from tests.tiers import every_nth

pytest.importorskip("expecttest", reason="torch's own test helpers import it")
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

# Why we refuse a configuration, and what the error says.
ALWAYS, DIFFERENTIABLE, CAPTURABLE = "always", "differentiable", "capturable"
MESSAGES = {
    "SparseAdam": "sparse gradients",
    DIFFERENTIABLE: "differentiable=True; a step that autograd follows",
    CAPTURABLE: "capturable=True, .* must be on supported devices",  # torch's own
}
# All that is refused, by class. What is not here has the same bits.
REFUSED: dict[str, set[str]] = {
    "Adadelta": {DIFFERENTIABLE, CAPTURABLE},
    "Adafactor": set(),
    "Adagrad": {DIFFERENTIABLE},
    "Adam": {DIFFERENTIABLE, CAPTURABLE},
    "AdamW": {DIFFERENTIABLE, CAPTURABLE},
    "Adamax": {DIFFERENTIABLE, CAPTURABLE},
    "ASGD": {DIFFERENTIABLE, CAPTURABLE},
    "LBFGS": set(),
    "Muon": set(),
    "NAdam": {DIFFERENTIABLE, CAPTURABLE},
    "RAdam": {DIFFERENTIABLE, CAPTURABLE},
    "RMSprop": {DIFFERENTIABLE, CAPTURABLE},
    "Rprop": {DIFFERENTIABLE, CAPTURABLE},
    "SGD": {DIFFERENTIABLE},
    "SparseAdam": {ALWAYS},
}

MakeOptimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def configurations(info: OptimizerInfo) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every input with every implementation: the for-loop, foreach, fused where the CPU has it, differentiable."""
    flags = [flag for flag in info.supported_impls if flag != "fused" or "cpu" in info.supports_fused_on]
    seen = set()
    for entry in info.optim_inputs_func("cuda"):
        takes_maximize = "maximize" in inspect.signature(info.optim_cls).parameters
        for chosen in ("", *flags):
            for maximize in (False, True) if takes_maximize else (False,):
                flag_values = {flag: flag == chosen for flag in flags}
                kwargs = {**entry.kwargs, **flag_values, **({"maximize": True} if maximize else {})}
                if repr(kwargs) not in seen:
                    seen.add(repr(kwargs))
                    yield f"{entry.desc}, {chosen or 'for-loop'}, {'maximize' if maximize else 'minimize'}", kwargs


def cases() -> list[Any]:
    return [
        pytest.param(info, kwargs, id=f"{info.optim_cls.__name__}: {label}")
        for info in optim_db
        for label, kwargs in configurations(info)
    ]


def with_closure(run: Run, step: int) -> float:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return loss

    return run.optimizer.step(closure).item()


def refusal_of(info: OptimizerInfo, kwargs: dict[str, Any]) -> str:
    """Which of :data:`REFUSED` this is; empty if it has to train."""
    reasons = {
        ALWAYS: True,
        DIFFERENTIABLE: kwargs.get("differentiable"),
        CAPTURABLE: kwargs.get("capturable") and not kwargs.get("fused"),  # fused kernels take it on the CPU too
    }
    refused = REFUSED[info.optim_cls.__name__]
    return next((reason for reason, holds in reasons.items() if holds and reason in refused), "")


def pair_for(info: OptimizerInfo, kwargs: dict[str, Any]) -> Pair:
    def model() -> nn.Module:
        if info.optim_cls in (optim.Muon, optim.LBFGS):  # matrices only, or contiguous tensors only
            return Matrices()
        return Zoo(empty=info.optim_cls is not optim.Adafactor)  # which divides by the number of elements

    def make(params: Iterable[nn.Parameter]) -> optim.Optimizer:
        own = copy.deepcopy(kwargs)  # a tensor lr belongs to one optimizer
        listed = list(params)
        if not info.supports_param_groups:
            return info.optim_cls(listed, **own)
        return info.optim_cls([{"params": listed[::2]}, {"params": listed[1::2]}], **own)

    return make_pair(model, make, policy=None)


def test_every_class_of_torch_is_in_the_table() -> None:
    assert {info.optim_cls.__name__ for info in optim_db} == set(REFUSED)


@pytest.mark.parametrize(("info", "kwargs"), every_nth(cases(), 11))
def test_same_bits_or_refused(info: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    """Attached before the first step, and taken off and attached again after the second."""
    pair = pair_for(info, kwargs)
    reason = refusal_of(info, kwargs)
    if reason:
        with pytest.raises(ValueError, match=MESSAGES[info.optim_cls.__name__ if reason == ALWAYS else reason]):
            pair.attach()
        assert type(pair.offloaded.optimizer) is info.optim_cls
        pair.assert_same()
        return
    action = with_closure if info.step_requires_closure else train_step
    pair.attach()
    pair.train(2, action)
    pair.detach()
    pair.train(1, action)
    pair.attach()
    pair.train(2, action)
    pair.assert_trained()


@pytest.mark.parametrize(
    "info",
    [info for info in optim_db if CAPTURABLE in REFUSED[info.optim_cls.__name__]],
    ids=lambda info: info.optim_cls.__name__,
)
def test_capturable_on_the_cpu_is_refused_by_torch_itself(info: OptimizerInfo) -> None:
    """So that what we refuse there is nothing that runs without us."""
    with pytest.raises(Exception, match=MESSAGES[CAPTURABLE]):
        train_step(pair_for(info, {"capturable": True}).plain, 0)
