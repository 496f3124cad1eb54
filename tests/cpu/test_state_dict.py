"""``optimizer.state``, ``state_dict`` and ``load_state_dict`` are as users and torch expect them.

``distributed/test_sharded_checkpoints`` and ``same_files`` go through torch.distributed.checkpoint.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.parity import attach, take_step
from tests.state_dicts import USED, MakeOptimizer, Run, adamw, assert_same, assert_same_runs, counted, is_home, sgd


def test_state_is_keyed_by_the_models_parameters() -> None:
    run = Run()
    param, state = run.model.up.weight, run.optimizer.state
    assert len(state) == 0
    assert param not in state
    run.train(0)
    assert set(state) == {run.params()[name] for name in USED} == {param for param, _ in state.items()}
    assert sorted(state[param]) == ["exp_avg", "exp_avg_sq", "step"]
    assert state[param]["exp_avg"].shape == (32, 16)
    assert state[param]["exp_avg"].untyped_storage().nbytes() == 32 * 16 * 4
    assert state[param]["step"] == 1
    assert state.get(nn.Parameter(torch.ones(1))) is None
    assert state.get(param) is state[param] is state.setdefault(param, {})
    assert [len(values) for values in state.values()] == [3] * 6


def test_state_that_the_state_dict_does_not_have_is_gone() -> None:
    saver, loader = Run(), Run().train(0, 1)
    loader.weights_from(saver)
    loader.optimizer.load_state_dict(saver.optimizer.state_dict())
    assert len(loader.optimizer.state) == 0
    assert_same_runs(loader.train(0, 1), Run(offload=False).train(0, 1))


def amsgrad(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


def without_momentum(params: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.01)


@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
@pytest.mark.parametrize("makes", [(adamw, amsgrad), (amsgrad, adamw, amsgrad), (sgd, without_momentum, sgd)])
def test_what_an_optimizer_keeps_comes_and_goes_with_the_groups(
    makes: tuple[MakeOptimizer, ...], steps_before: int
) -> None:
    own, *others = makes
    loader = Run(own).train(*range(steps_before))
    for make in others:
        saver = Run(make, offload=False).train(0, 1)
        loader.weights_from(saver)
        loader.optimizer.load_state_dict(saver.optimizer.state_dict())
        assert is_home(loader)
        assert_same_runs(loader, saver)
        assert_same_runs(loader.train(2, 3), saver.train(2, 3))


def test_old_checkpoints_have_counters_that_are_floats() -> None:
    saver, loader = Run(offload=False).train(0, 1), Run()
    saved = saver.optimizer.state_dict()
    saved["state"] = {key: {**state, "step": float(state["step"])} for key, state in saved["state"].items()}
    loader.weights_from(saver)
    loader.optimizer.load_state_dict(saved)
    assert isinstance(saved["state"][0]["step"], float)
    assert_same_runs(loader.train(2), saver.train(2))


@pytest.mark.parametrize("offload", [False, True])
def test_hooks_fire_once_and_in_order_and_may_rewrite(offload: bool) -> None:
    run = Run(offload=offload).train(0)
    events: list[str] = []

    def rewrite(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        events.append("load pre")
        state = {key: {**state, "step": state["step"] + 5} for key, state in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def loaded(optimizer: Optimizer) -> None:
        events.append(f"load post {optimizer.state[run.model.up.weight]['step'].item()}")

    def saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        events.append("save post")
        return {**state_dict, "extra": 1}

    run.optimizer.register_state_dict_pre_hook(lambda _: events.append("save pre"))
    run.optimizer.register_state_dict_post_hook(saved)
    run.optimizer.register_load_state_dict_pre_hook(rewrite)
    run.optimizer.register_load_state_dict_post_hook(loaded)
    state_dict = run.optimizer.state_dict()
    assert state_dict["extra"] == 1
    for _ in range(2):
        run.optimizer.load_state_dict(state_dict)
        assert events == ["save pre", "save post", "load pre", "load post 6.0"]
        del events[2:]


# Other values in the state of the first parameter, which has no more what is ``None``.
IN_STATE: list[tuple[dict[str, Any], str]] = [
    ({"exp_avg": None}, r"state of up\.weight should have .*missing \['exp_avg'\], extra \[\]"),
    ({"exp_avg": None, "other": torch.zeros(32, 16)}, r"up\.weight .*missing \['exp_avg'\], extra \['other'\]"),
    ({"exp_avg": torch.zeros(16, 32)}, r"up\.weight, 'exp_avg' should have .*\(32, 16\).*got .*\(16, 32\)"),
    ({"exp_avg_sq": torch.zeros(32, 16).bfloat16()}, r"up\.weight, 'exp_avg_sq' .*float32.*bfloat16.*Nothing is cast"),
    ({"exp_avg": [0.0] * 512}, r"up\.weight, 'exp_avg' should have local tensors of .*, got list"),
    ({"step": torch.ones(3)}, r"up\.weight, 'step' should be a number .*got a tensor of shape \(3,\)"),
    ({"step": "two"}, r"up\.weight, 'step' should be a number .*got 'two'"),
]


def with_values(values: dict[str, Any], saved: dict[str, Any]) -> None:
    changed = {**saved["state"][0], **values}
    saved["state"][0] = {name: value for name, value in changed.items() if value is not None}


SPOILT: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    *((partial(with_values, values), message) for values, message in IN_STATE),
    (lambda saved: saved["state"].update({99: saved["state"][0]}), r"for 99, which none of its param groups lists"),
    (lambda saved: saved.update(state={"up.weight": saved["state"][0]}), r"for 'up.weight', which none of its"),
    (lambda saved: saved["param_groups"].pop(), r"param groups of \[4, 6\] parameters, the state dict \[4\]"),
    (
        lambda saved: saved["param_groups"][1]["params"].append(99),
        r"param groups of \[4, 6\] parameters, the state dict \[4, 7\]",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_what_does_not_fit_is_named_and_nothing_has_changed(
    spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    run = Run().train(0)
    saved = copy.deepcopy(Run(offload=False).train(5, 6, 7).optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 123.0
    before = copy.deepcopy(run.optimizer.state_dict())
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(saved)
    assert_same(run.optimizer.state_dict(), before)
    assert is_home(run)
    assert_same_runs(run.train(1), Run(offload=False).train(0, 1))


def test_an_entry_of_the_users_beside_the_parameters_comes_back() -> None:
    run = Run().train(0)
    run.optimizer.state["mine"] = {"steps": 7}
    saved = copy.deepcopy(run.optimizer.state_dict())
    fresh = Run()
    fresh.optimizer.load_state_dict(saved)
    assert_same(fresh.optimizer.state_dict()["state"], saved["state"])
    fresh.train(1)


def test_a_counter_that_was_not_saved_is_not_asked_of_a_class_that_is_not_known() -> None:
    param = nn.Parameter(torch.ones(8))
    optimizer = attach(counted([param]), trust_separable=True)
    for _ in range(2):
        take_step(optimizer)
        saved = optimizer.state_dict()
        del saved["state"][0]["count"]
        optimizer.load_state_dict(saved)
        assert list(optimizer.state[param]) == ["sum"]
