"""What users do to ``optimizer.state`` between steps, and how they copy it: nothing is lost or read too early."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload.engine.engine import Engine
from tests.parity import Run, adamw, attach, make_pair, params_of, train_step


class Twins(nn.Module):
    """Parameters of equal shape, whose states can be exchanged, and one of several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(40, 33)) for _ in range(3))
        self.small = nn.ParameterList(nn.Parameter(torch.randn(65)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((param * x.flatten()[i]).sin().sum() for i, param in enumerate(self.parameters()))


def swap_states(run: Run) -> None:
    one, other = params_of(run.optimizer)[:2]
    state = run.optimizer.state
    state[one], state[other] = state[other], state[one]


def rotate_one_name(run: Run) -> None:
    params = params_of(run.optimizer)[:3]
    values = [run.optimizer.state[param]["exp_avg"] for param in params]
    for param, value in zip(params, values[1:] + values[:1], strict=True):
        run.optimizer.state[param]["exp_avg"] = value


def exchange_within_a_parameter(run: Run) -> None:
    state = run.optimizer.state[params_of(run.optimizer)[0]]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def give_a_part_away(run: Run) -> None:
    one, other = run.optimizer.state[run.model.weights[0]], run.optimizer.state[run.model.small[0]]
    part = one["exp_avg"].flatten()[100:165]
    one["exp_avg"], other["exp_avg"] = torch.zeros_like(one["exp_avg"]), part


def load_permuted(run: Run) -> None:
    saved = run.optimizer.state_dict()
    saved["state"] = {**saved["state"], 0: saved["state"][1], 1: saved["state"][0]}
    # torch keeps the tensors it is given; what is shared between two parameters there would be updated twice.
    run.optimizer.load_state_dict(copy.deepcopy(saved) if not run.is_offloaded else saved)


def replace_counter(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["step"] = torch.tensor(100.0)


def exchange_mapping(run: Run) -> None:
    """A plain dict in place of optimizer.state, as some libraries do."""
    kept: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    kept.update({param: dict(state) for param, state in run.optimizer.state.items()})
    run.optimizer.state = kept


def clear(run: Run) -> None:
    run.optimizer.state.clear()


EDITS = [swap_states, rotate_one_name, exchange_within_a_parameter, give_a_part_away, load_permuted]
EDITS += [replace_counter, exchange_mapping, clear]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_exchanged_state_is_read_before_it_is_overwritten(edit: Callable[[Run], None], removed: bool) -> None:
    """In the next step, or when offload is removed."""
    pair = make_pair(Twins, adamw)
    pair.train(3)
    pair.each(edit)
    if removed:
        pair.detach()
    pair.train(3)


def test_the_memory_of_a_home_in_another_order_is_copied() -> None:
    params = [nn.Parameter(torch.linspace(0, 1, 16).view(4, 4)) for _ in range(2)]
    optimizers = [optim.AdamW([param]) for param in params]
    attach(optimizers[1])
    for step in range(3):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.linspace(step, 2, 16).view(4, 4).sin()
            optimizer.step()
            optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].t()
    assert torch.equal(*params)


def test_none_is_no_momentum() -> None:
    """Written by hand, and in a checkpoint of SGD that says so."""
    pair = make_pair(Twins, lambda params: optim.SGD(params, lr=0.1, momentum=0.9))
    pair.train(3)

    def reset(run: Run) -> None:
        run.optimizer.state[params_of(run.optimizer)[1]]["momentum_buffer"] = None

    pair.each(reset)
    pair.train(3)
    optimizer = pair.offloaded.optimizer
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": None}}})
    assert not any(optimizer.state.values())


def test_a_tensor_of_the_users_own_is_left_alone() -> None:
    """It is saved and loaded, and does not stand in the way of attaching again."""
    pair = make_pair(Twins, adamw)
    pair.train(2)

    def keep_average(run: Run) -> None:
        for param in params_of(run.optimizer)[:3]:
            run.optimizer.state[param]["ema"] = param.detach().clone()
            run.optimizer.state[param]["extent"] = torch.ones(5)

    pair.each(keep_average)
    pair.train(2)
    pair.each(lambda run: run.optimizer.load_state_dict(copy.deepcopy(pair.plain.optimizer.state_dict())))
    pair.train(2)
    pair.detach()
    pair.attach()
    pair.train(2)
    fresh = make_pair(Twins, adamw)
    fresh.each(lambda run: run.optimizer.load_state_dict(copy.deepcopy(pair.plain.optimizer.state_dict())))
    fresh.assert_same()
    fresh.train(1)


def test_hyperparameters_that_need_state_which_is_not_there_are_refused_before_the_step() -> None:
    pair = make_pair(Twins, adamw)
    pair.train(2)
    run = pair.offloaded
    run.optimizer.zero_grad()
    run.loss(9).backward()
    run.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RuntimeError, match=r"max_exp_avg_sq.*Nothing has been changed"):
        run.optimizer.step()
    run.optimizer.param_groups[0]["amsgrad"] = False
    pair.assert_same()
    pair.train(2)


def test_memory_of_parameters_that_are_exchanged_again_and_again_does_not_grow() -> None:
    """As in Gaussian splatting: parameters and their state are replaced by larger or smaller ones."""
    param = nn.Parameter(torch.randn(1000))
    optimizer = attach(optim.Adam([param]))
    for size in range(1000, 1040):
        old, new = optimizer.param_groups[0]["params"][0], nn.Parameter(torch.randn(size))
        state = optimizer.state.pop(old, None)
        if state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(size)
            optimizer.state[new] = state
        optimizer.param_groups[0]["params"][0] = new
        new.grad = torch.ones(size)
        optimizer.step()
    report = optimizer.offload_report()
    assert report.memory.host_state_bytes <= 3 * 8 * 1040
    assert optimizer.state[new]["step"].item() == 40


def divide_group(optimizer: optim.Optimizer) -> None:
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": [first["params"].pop()], "lr": 0.1})


def add_group(optimizer: optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop(0)], "lr": 0.1})


def join_groups(optimizer: optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"] += second["params"]
    del optimizer.param_groups[1]


def move_between_groups(optimizer: optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


@pytest.mark.parametrize(
    "edits",
    [[divide_group], [add_group], [divide_group, move_between_groups], [divide_group, join_groups]],
    ids=["divided", "added", "moved", "joined"],
)
def test_groups_that_are_divided_elsewhere(edits: list[Callable[[optim.Optimizer], None]]) -> None:
    """All parameters come in the same order as before, but not in the same groups."""
    pair = make_pair(Twins, adamw)
    pair.train(2)
    for edit in edits:
        for run in pair:
            edit(run.optimizer)
        pair.train(2)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda state: state.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "dict": dict,
    "unpacked": lambda state: {**state},
    "or": lambda state: state | {},
    "ror": lambda state: {} | state,
    "update": lambda state: defaultdict(dict).__ior__(state),
    "items": lambda state: dict(state.items()),
    "values": lambda state: list(state.values()),
    "popitem": lambda state: state.popitem(),
    "repr": repr,
}


@pytest.mark.parametrize("name", COPIES)
def test_every_way_of_reading_all_state_waits_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(Twins, adamw)
    pair.train(2)
    optimizer = pair.offloaded.optimizer
    waited: set[int] = set()
    wait_home, wait_all = Engine.wait_home, Engine.wait_all_home

    def note_one(engine: Engine, param: torch.Tensor) -> None:
        waited.add(id(param))
        wait_home(engine, param)

    def note_all(engine: Engine) -> None:
        waited.update(map(id, params_of(optimizer)))
        wait_all(engine)

    monkeypatch.setattr(Engine, "wait_home", note_one)
    monkeypatch.setattr(Engine, "wait_all_home", note_all)
    COPIES[name](optimizer.state)
    assert waited >= {id(param) for param in params_of(optimizer)}


def test_a_pickled_copy_of_the_state_is_a_plain_one() -> None:
    pair = make_pair(Twins, adamw)
    pair.train(2)
    restored = pickle.loads(pickle.dumps(pair.offloaded.optimizer.state))
    assert type(restored) is defaultdict
    for state, original in zip(restored.values(), pair.offloaded.optimizer.state.values(), strict=True):
        assert all(torch.equal(state[name], original[name]) for name in original)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_part_of_the_state_that_is_gone_is_refused_before_any_update(name: str, is_deleted: bool) -> None:
    """Of a parameter in a later bucket: the class would have updated others before it fails."""
    pair = make_pair(Twins, adamw)
    pair.train(3)
    optimizer, model = pair.offloaded.optimizer, pair.offloaded.model
    state = optimizer.state[model.weights[1]]
    kept = state[name].clone()
    if is_deleted:
        del state[name]
    else:
        state[name] = None
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=f"has no {name}. Put a tensor there, or delete .* Nothing has been changed"):
        train_step(pair.offloaded, 3)
    assert all(map(torch.equal, before, model.parameters()))
    state[name] = kept
    if is_deleted:  # the order of names counts
        plain = pair.plain.optimizer.state[pair.plain.model.weights[1]]
        plain[name] = plain.pop(name)
    pair.train(3)


def test_none_is_no_state() -> None:
    """A step makes it anew, as if the entry had been deleted; the plain class fails."""
    pair = make_pair(Twins, adamw)
    pair.train(2)
    for run in pair:
        run.optimizer.state.pop(run.model.weights[1])
    pair.offloaded.optimizer.state[pair.offloaded.model.weights[1]] = None
    pair.train(3)
