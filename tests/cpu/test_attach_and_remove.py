"""Edit offloaded optimizers by hand. To attach and to remove at any time are axes and habits of ``conformance``."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn, optim

from tests.overlapping import Loop, assert_same_each_step, assert_trained, pair
from tests.parity import SMALL, Net, Zoo
from tests.tiers import spread

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

KINDS: dict[str, Make] = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "fused": lambda params: optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "sgd": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "on the CPU": lambda params: optim.AdamW(params, lr=0.01, fused=True),
}
SHARED = replace(SMALL, host_fraction=0.7)
"""Policy of ``on the CPU``: fused kernels have the same bits there."""


@spread(
    kind={kind: kind for kind in KINDS if kind != "adagrad"},  # torch's fails itself, up to 2.11
    after_steps={"0": 0, "3": 3},
)
def test_add_param_group(kind: str, after_steps: int) -> None:
    policy = SHARED if kind == "on the CPU" else SMALL
    both = pair(None, policy, lambda params: KINDS[kind]([one for one in params if one.dim() < 2]), net=Net)
    assert_same_each_step(*both, after_steps)
    for run in both:
        matrices = [param for param in run.params if param.dim() >= 2]
        run.optimizer.add_param_group({"params": matrices, "lr": 0.02, "weight_decay": 0.1})
    assert_same_each_step(*both, 10)
    assert_trained(both[0], "unused.weight", "unused.bias")


def change(run: Loop, entries: dict[str, Any]) -> None:
    for group in run.optimizer.param_groups:
        group.update(entries)


@pytest.mark.parametrize(
    ("make", "entries"),
    [
        (KINDS["adamw"], {"lr": 0.5, "betas": (0.5, 0.7)}),
        (KINDS["adamw"], {"foreach": True}),
        (KINDS["adamw"], {"fused": True, "foreach": False}),
        (KINDS["adagrad"], {"weight_decay": 0.1}),
        (KINDS["adagrad"], {"maximize": True}),
        *(
            (cls, {"lr": -1e-3, "maximize": True})  # what the constructor refuses, and a scheduler may set
            for cls in (optim.AdamW, optim.Adagrad, optim.RMSprop)
        ),
        (KINDS["sgd"], {"momentum": 0.0}),
        (KINDS["sgd"], {"nesterov": True}),
        (lambda params: optim.SGD(params, lr=0.05), {"momentum": 0.9}),
        (lambda params: optim.AdamW(params, amsgrad=True), {"amsgrad": False}),
        (lambda params: optim.RMSprop(params, momentum=0.9, centered=True), {"momentum": 0, "centered": False}),
    ],
)
def test_hyperparameters_changed_by_hand(make: Make, entries: dict[str, Any]) -> None:
    both = pair(None, SMALL, make, net=Zoo)
    before = {name: both[0].optimizer.param_groups[0][name] for name in entries}
    assert_same_each_step(*both, 3)
    for values in (entries, before):
        for run in both:
            change(run, values)
        assert_same_each_step(*both, 5)
    assert_trained(both[0])
