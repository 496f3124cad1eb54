"""What users do to ``optimizer.state`` between steps, and how they copy it: nothing is lost or read too early."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import is_offloaded
from fsdp_offload.engine.engine import Engine
from tests.conformance.axes import Case
from tests.conformance.oracle import Loop, compare
from tests.conformance.programs import HABITS
from tests.parity import Zoo, adamw, attach, params_of, take_step

pytestmark = pytest.mark.usefixtures("mesh")

ALIKE = ("blocks.0.up.weight", "blocks.1.up.weight", "extra.up.weight")
"""Parameters of equal shape, each of several buckets."""


def wrong(*program: str, optimizer: str = "adamw", **habits: Callable[[Loop, int], None]) -> list[str]:
    """Say what is different from a plain optimizer after steps with these habits."""
    return compare(Case(optimizer=optimizer, program=program), torch.device("cpu"), {**HABITS, **habits})


def edited(edit: Callable[[Loop], None], habit: str, run: Loop, at: int) -> None:
    edit(run)
    HABITS[habit](run, at)


def swap_states(run: Loop) -> None:
    one, other = (run.named[name] for name in ALIKE[:2])
    state = run.optimizer.state
    state[one], state[other] = state[other], state[one]


def rotate_one_name(run: Loop) -> None:
    states = [run.live_state(name) for name in ALIKE]
    values = [state["exp_avg"] for state in states]
    for state, value in zip(states, values[1:] + values[:1], strict=True):
        state["exp_avg"] = value


def exchange_within_a_parameter(run: Loop) -> None:
    state = run.live_state(ALIKE[0])
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def give_a_part_away(run: Loop) -> None:
    one, other = run.live_state(ALIKE[2]), run.live_state("blocks.0.norm.weight")
    part = one["exp_avg"].flatten()[100:116]
    one["exp_avg"], other["exp_avg"] = torch.zeros_like(one["exp_avg"]), part


def load_permuted(run: Loop) -> None:
    saved = run.optimizer.state_dict()
    one, other = ([*run.named].index(name) for name in ALIKE[:2])
    saved["state"] = {**saved["state"], one: saved["state"][other], other: saved["state"][one]}
    # torch keeps the tensors it is given; what is shared between two parameters there would be updated twice.
    run.optimizer.load_state_dict(copy.deepcopy(saved) if not is_offloaded(run.optimizer) else saved)


def replace_counter(run: Loop) -> None:
    for state in run.optimizer.state.values():
        state["step"] = torch.tensor(100.0)


def exchange_mapping(run: Loop) -> None:
    """A plain dict in place of optimizer.state, as some libraries do."""
    kept: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    kept.update({param: dict(state) for param, state in run.optimizer.state.items()})
    run.optimizer.state = kept


def clear(run: Loop) -> None:
    run.optimizer.state.clear()


def reset_momentum(run: Loop) -> None:
    run.live_state(ALIKE[0])["momentum_buffer"] = None


def keep_average(run: Loop) -> None:
    for name in ALIKE:
        run.live_state(name)["ema"] = run.named[name].detach().clone()
        run.live_state(name)["extent"] = torch.ones(5)


def load_in_new_objects(run: Loop) -> None:
    saved = run.copy()
    run.make()
    run.attach()
    run.restore(saved)


def divide_group(run: Loop) -> None:
    first = run.optimizer.param_groups[0]
    run.optimizer.param_groups.append({**first, "params": [first["params"].pop()], "lr": 0.1})


def add_group(run: Loop) -> None:
    """Add one of a parameter that has been in another."""
    run.optimizer.add_param_group({"params": [run.optimizer.param_groups[0]["params"].pop(0)], "lr": 0.1})


def join_groups(run: Loop) -> None:
    first, second = run.optimizer.param_groups
    first["params"] += second["params"]
    del run.optimizer.param_groups[1]


def move_between_groups(run: Loop) -> None:
    first, second = run.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


EDITS = [swap_states, rotate_one_name, exchange_within_a_parameter, give_a_part_away, load_permuted]
EDITS += [replace_counter, exchange_mapping, clear]


@pytest.mark.parametrize("habit", ["usual", "reattach"])
@pytest.mark.parametrize("edit", [*EDITS, reset_momentum])
def test_exchanged_state_is_read_before_it_is_overwritten(edit: Callable[[Loop], None], habit: str) -> None:
    """In the next step, or when offload is removed. SGD has no momentum where it is ``None``, then, too."""
    optimizer = "sgd-momentum" if edit is reset_momentum else "adamw"
    program = ("usual", "usual", "edited", "usual", "usual")
    assert not wrong(*program, optimizer=optimizer, edited=partial(edited, edit, habit))


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


PROGRAMS = {
    "a tensor of the user's own": (keep_average, load_in_new_objects),
    # All parameters come in the same order as before, but not in the same groups.
    "a divided group": (divide_group,),
    "an added group": (add_group,),
    "another group": (divide_group, move_between_groups),
    "one group again": (divide_group, join_groups),
}


@pytest.mark.parametrize("edits", PROGRAMS.values(), ids=PROGRAMS)
def test_edits_one_after_the_other(edits: tuple[Callable[[Loop], None], ...]) -> None:
    habits = {edit.__name__: partial(edited, edit, "usual") for edit in edits}
    program = (one for name in habits for one in (name, "usual", "reattach"))
    assert not wrong("usual", "usual", *program, **habits)


def test_none_in_a_checkpoint_is_no_momentum() -> None:
    optimizer = attach(optim.SGD(Zoo().parameters(), lr=0.1, momentum=0.9))
    take_step(optimizer)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": None}}})
    assert not any(optimizer.state.values())


def want_more_state(run: Loop, at: int) -> None:
    """Refused before the step."""
    run.backward(at)
    if is_offloaded(run.optimizer):
        run.optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises(RuntimeError, match=r"max_exp_avg_sq.*Nothing has been changed"):
            run.update()
        run.optimizer.param_groups[0]["amsgrad"] = False
    run.step()


def lose(name: str, is_deleted: bool, run: Loop, at: int) -> None:
    """Take a part away from a parameter in a later bucket: the class would have updated others before it fails."""
    run.backward(at)
    state = run.live_state(ALIKE[2])
    kept = state.pop(name).clone()
    if is_offloaded(run.optimizer):
        if not is_deleted:
            state[name] = None
        with pytest.raises(
            ValueError, match=f"has no {name}. Put a tensor there, or delete .* Nothing has been changed"
        ):
            run.update()
    state[name] = kept
    run.step()


def forget(run: Loop, at: int) -> None:
    """``None`` is no state: a step makes it anew, as if it had been deleted; the plain class fails."""
    param = run.named[ALIKE[1]]
    run.optimizer.state.pop(param)
    if is_offloaded(run.optimizer):
        run.optimizer.state[param] = None  # type: ignore[assignment]
    HABITS["usual"](run, at)


MISSING = {
    "hyperparameters want more": want_more_state,
    "all of it": forget,
    **{
        f"{name} is {'gone' if is_deleted else None}": partial(lose, name, is_deleted)
        for name in ("exp_avg", "exp_avg_sq", "step")
        for is_deleted in (False, True)
    },
}


@pytest.mark.parametrize("habit", MISSING.values(), ids=MISSING)
def test_state_that_is_not_there(habit: Callable[[Loop, int], None]) -> None:
    assert not wrong("usual", "usual", "habit", "usual", "usual", habit=habit)


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
    optimizer = attach(adamw(Zoo().parameters()))
    take_step(optimizer, 2)
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
    optimizer = attach(adamw(Zoo().parameters()))
    take_step(optimizer, 2)
    restored = pickle.loads(pickle.dumps(optimizer.state))
    assert type(restored) is defaultdict
    for state, original in zip(restored.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(state[name], original[name]) for name in original)
