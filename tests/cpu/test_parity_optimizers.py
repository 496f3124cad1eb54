"""Every optimizer of torch.optim, in each of its implementations: the same bits with and without offload."""

import importlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload.optimizers import capabilities_of
from fsdp_offload.optimizers.capabilities import row_of
from tests.conformance.oracle import different
from tests.overlapping import assert_same_each_step, assert_trained, pair, same
from tests.parity import SMALL, Matrices, Zoo, assert_at_home, params_of
from tests.tiers import every_nth, spread

# For each class the flags that change which state there is, or how it is used.
FLAGS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.Adadelta: [{}, {"weight_decay": 0.1, "rho": 0.8}, {"maximize": True}],
    optim.Adafactor: [{}, {"weight_decay": 0.1, "beta2_decay": -0.5}, {"maximize": True, "eps": (1e-4, 1e-2)}],
    optim.Adagrad: [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, {"weight_decay": 0.1, "maximize": True}],
    optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, {"decoupled_weight_decay": True}],
    optim.AdamW: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True, "betas": (0.0, 0.5)}],
    optim.Adamax: [{}, {"weight_decay": 0.1}, {"maximize": True}],
    optim.ASGD: [{}, {"t0": 4, "lambd": 0.1}, {"weight_decay": 0.1, "maximize": True}],
    optim.Muon: [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}],
    optim.NAdam: [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    optim.RAdam: [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"maximize": True}],
    optim.RMSprop: [
        {},
        {"centered": True, "weight_decay": 0.1},
        {"momentum": 0.9},
        {"centered": True, "momentum": 0.5},
    ],
    optim.Rprop: [{}, {"etas": (0.3, 1.4)}, {"maximize": True}],
    optim.SGD: [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3, "maximize": True},
        {},  # keeps no state at all
    ],
}
REFUSED = {optim.SparseAdam: "sparse gradients"}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OTHER_DTYPES = [torch.float64, torch.bfloat16]  # float16 is left out: Adam's eps is zero there, and all becomes NaN


def implementations(cls: type[optim.Optimizer]) -> Iterator[tuple[str, dict[str, bool]]]:
    known = inspect.signature(cls).parameters
    return ((name, chosen) for name, chosen in IMPLEMENTATIONS.items() if set(chosen) <= set(known))


def cases(*, each_flag: bool = True) -> Iterator[Any]:
    """Each class and implementation with each of its flags, or with the first."""
    for cls, all_flags in FLAGS.items():
        for name, chosen in implementations(cls):
            for flags in all_flags if each_flag else all_flags[:1]:
                label = "-".join([cls.__name__, name, *(f"{key}={value}" for key, value in flags.items())])
                yield pytest.param(cls, {**flags, **chosen}, id=label)


def model_for(cls: type[optim.Optimizer]) -> nn.Module:
    if cls is optim.Muon:
        return Matrices()
    return Zoo(empty=cls is not optim.Adafactor)  # torch's own Adafactor divides by the number of elements


@pytest.mark.parametrize(("cls", "kwargs"), every_nth(cases(), 3))
def test_same_bits(cls: type[optim.Optimizer], kwargs: dict[str, Any]) -> None:
    both = pair(None, SMALL, partial(cls, **kwargs), net=partial(model_for, cls))
    assert_same_each_step(*both, 10)
    assert_trained(both[0])


@spread(
    case={case.id: case.values for case in cases(each_flag=False)}, dtype={str(dtype): dtype for dtype in OTHER_DTYPES}
)
def test_same_bits_in_other_dtypes(case: tuple[type[optim.Optimizer], dict[str, Any]], dtype: torch.dtype) -> None:
    cls, kwargs = case
    if cls is optim.SGD and kwargs.get("fused") and dtype is torch.bfloat16:
        pytest.skip("torch's kernel does not repeat itself: momentum depends on what lies behind the tensor in memory")
    both = pair(None, SMALL, partial(cls, **kwargs, lr=0.02), net=lambda: model_for(cls).to(dtype))
    assert_same_each_step(*both, 10)


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        pytest.param(cls, {**flags, **chosen}, id=f"{cls.__name__}-{name}")
        for cls, flags in [(optim.Adam, {}), (optim.AdamW, {"amsgrad": True}), (optim.SGD, {"momentum": 0.9})]
        for name, chosen in implementations(cls)
        if name != "foreach"  # torch takes no tensor lr there without capturable
    ]
    + [pytest.param(optim.Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}, id="betas")],
)
def test_tensor_lr(cls: type[optim.Optimizer], kwargs: dict[str, Any]) -> None:
    both = pair(None, SMALL, lambda params: cls(params, lr=torch.tensor(0.01), **kwargs), net=Zoo)
    lrs = [run.optimizer.param_groups[0]["lr"] for run in both]
    assert_same_each_step(*both, 5)
    for lr in lrs:
        lr.mul_(0.5)  # the same tensor, changed in place
    assert_same_each_step(*both, 5)
    assert both[1].optimizer.param_groups[0]["lr"] is lrs[1]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(("cls", "kwargs"), every_nth(cases(each_flag=False), 3))
def test_complex_parameters(cls: type[optim.Optimizer], kwargs: dict[str, Any]) -> None:
    """What torch can train with complex parameters, we can; what it cannot is an error that says so."""

    def train() -> None:
        both = pair(None, SMALL, partial(cls, **kwargs), net=lambda: model_for(cls).to(torch.complex64))
        assert_same_each_step(*both, 10)
        assert_trained(both[0])

    if cls in (optim.Muon, optim.Adafactor) or kwargs.get("fused"):
        with pytest.raises((ValueError, RuntimeError), match=r"complex|floating point"):
            train()
    else:
        train()


@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_the_implementation_is_the_users(kwargs: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for each bucket: another one would give other bits, or be many times slower."""
    adam = importlib.import_module("torch.optim.adam")  # torch.optim hides it
    seen: set[str] = set()
    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        function = getattr(adam, name)

        def spy(*args: Any, _function: Any = function, _name: str = name, **more: Any) -> Any:
            seen.add(_name)
            return _function(*args, **more)

        monkeypatch.setattr(adam, name, spy)
    plain, loop = pair(None, SMALL, partial(optim.AdamW, **kwargs), net=Zoo)
    plain.train(1)
    of_plain = set(seen)
    seen.clear()
    loop.train(1)
    assert len(of_plain) == 1
    assert seen == of_plain


def test_every_class_of_torch_has_an_answer() -> None:
    """A new release of torch may bring a new class: it gets an entry in the table and a parity test, or a refusal."""
    classes = {
        value
        for value in vars(optim).values()
        if isinstance(value, type) and issubclass(value, optim.Optimizer) and value is not optim.Optimizer
    }
    assert {cls.__name__ for cls in classes} <= set(optim.__all__)
    assert not [cls.__name__ for cls in classes if not row_of(cls)]
    assert [cls for cls in classes if capabilities_of(cls).moves_whole] == [optim.LBFGS]
    refused = {cls for cls in classes if capabilities_of(cls).refusal}
    assert refused == set(REFUSED)
    assert classes - refused - {optim.LBFGS} == set(FLAGS)


def test_every_flag_of_a_group_is_one_that_we_know() -> None:
    """A new option may change which state there is, so it wants a place in FLAGS above."""
    known = set().union(*(set(flags) for all_flags in FLAGS.values() for flags in all_flags))
    known |= {"lr", "eps", "alpha", "rho", "betas", "step_sizes", "etas", "momentum_decay", "d", "ns_coefficients"}
    known |= {"foreach", "fused", "capturable", "differentiable", "params", "weight_decay", "maximize"}
    for cls, all_flags in FLAGS.items():
        group = cls(model_for(cls).parameters(), **all_flags[0]).param_groups[0]
        assert group.keys() - {"params"} <= known, cls


def test_sides_are_really_two() -> None:
    """The harness finds a single changed bit on either side, and state outside of the arena."""
    both = pair(None, SMALL, optim.Adam, net=Zoo)
    assert_same_each_step(*both, 2)
    optimizer = both[1].optimizer
    param, group = params_of(optimizer)[3], optimizer.param_groups[0]
    state = optimizer.state[param]

    def assert_found(what: str) -> None:
        assert different(*(run.everything() for run in both)) == [what]

    for changed, what in [(param.data, "weight"), (state["exp_avg"], "weight exp_avg 0")]:
        before = changed.clone()
        changed.view(-1)[700] = changed.view(-1)[700].nextafter(torch.tensor(1e9))
        assert_found(what)
        changed.copy_(before)
    state["step"], before = state["step"] + 1, state["step"]
    assert_found("weight step 0")
    state["step"] = before.item()
    assert not same(*both)
    state["step"] = before
    assert same(*both)
    group["lr"], before = group["lr"] * 1.0000001, group["lr"]
    assert_found("group 0 lr")
    group["lr"], state["exp_avg"] = before, state["exp_avg"].clone()
    with pytest.raises(AssertionError, match="not in the arena"):
        assert_at_home(optimizer)
