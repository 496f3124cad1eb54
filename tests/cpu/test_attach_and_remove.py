"""Attaching at any time, removing, attaching again; and what users change by hand in between."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn, optim

from fsdp_offload.engine.engine import Engine
from tests.parity import SMALL, Net, Pair, Run, Zoo, attach, make_pair
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


def pair_of(kind: str, make: Callable[[Make], Make] = lambda make: make) -> Pair:
    return make_pair(Net, make(KINDS[kind]), policy=SHARED if kind == "on the CPU" else SMALL)


@spread(
    kind={kind: kind for kind in KINDS if kind != "adagrad"},  # torch's fails itself, up to 2.11
    after_steps={"0": 0, "3": 3},
)
def test_add_param_group(kind: str, after_steps: int) -> None:
    pair = pair_of(kind, lambda make: lambda params: make([param for param in params if param.dim() < 2]))
    pair.train(after_steps)
    for run in pair:
        matrices = [param for param in run.model.parameters() if param.dim() >= 2]
        run.optimizer.add_param_group({"params": matrices, "lr": 0.02, "weight_decay": 0.1})
    pair.assert_same()
    pair.train(10)
    pair.assert_trained("unused.weight", "unused.bias")


def change(**entries: Any) -> Callable[[Run], None]:
    def action(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group.update(entries)

    return action


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
    pair = make_pair(Zoo, make)
    before = [{name: run.optimizer.param_groups[0][name] for name in entries} for run in pair]
    pair.train(3)
    pair.each(change(**entries))
    pair.train(5)
    for run, old in zip(pair, before, strict=True):
        change(**old)(run)
    pair.train(5)
    pair.assert_trained()


def test_an_interrupt_in_the_middle_of_attaching_leaves_a_plain_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pair = make_pair(Zoo, KINDS["adamw"], policy=None)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "take_all_blocks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            attach(pair.offloaded.optimizer)
    assert type(pair.offloaded.optimizer) is optim.AdamW
    pair.train(2)
