"""Random programs of what a training loop may do, phases among it, under every policy, against a plain optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.overlapping import POLICIES, SIZES, Loop, Net, adamw, look, same
from tests.policies import with_share

Operation = Callable[[Loop, int], None]


def step(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.step()


def step_without_some(loop: Loop, at: int) -> None:
    loop.backward(at, extra=False)
    loop.step()


def evaluate(loop: Loop, at: int) -> None:
    del at
    look(loop)


def read_state(loop: Loop, at: int) -> None:
    del at
    for state in loop.optimizer.state.values():
        loop.seen.extend(value.float().sum().item() for value in map(local, state.values()))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def write_state(loop: Loop, at: int) -> None:
    del at
    for state in loop.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def save(loop: Loop, at: int) -> None:
    del at
    model = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
    saved = loop.optimizer.state_dict()
    states = {key: {name: v.clone() for name, v in state.items()} for key, state in saved["state"].items()}
    loop.saved = model, {**saved, "state": states}  # type: ignore[attr-defined]


def load(loop: Loop, at: int) -> None:
    del at
    if hasattr(loop, "saved"):
        loop.model.load_state_dict(loop.saved[0])
        # A copy: torch's own optimizer goes on in the tensors that it is given, and they may be loaded again.
        loop.optimizer.load_state_dict(copy.deepcopy(loop.saved[1]))


def zero_in_place(loop: Loop, at: int) -> None:
    step(loop, at)
    loop.optimizer.zero_grad(set_to_none=False)


def change_hyperparameter(loop: Loop, at: int) -> None:
    loop.optimizer.param_groups[0]["weight_decay"] = 0.01 * (at % 3)


def skip(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.optimizer.zero_grad()


def clip(loop: Loop, at: int) -> None:
    loop.backward(at)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.step()


def look_before_step(loop: Loop, at: int) -> None:
    loop.backward(at)
    look(loop)
    read_state(loop, at)
    loop.step()


def write_before_step(loop: Loop, at: int) -> None:
    loop.backward(at)
    write_state(loop, at)
    loop.step()


def step_twice(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.optimizer.step()
    loop.step()


def phase(loop: Loop, *names: str) -> None:
    for name in names:
        if hasattr(loop.optimizer, name):  # a plain one has no phases
            getattr(loop.optimizer, name)()


def leave(loop: Loop, at: int) -> None:
    del at
    phase(loop, "offload_states", "release_states")


def start_to_leave(loop: Loop, at: int) -> None:
    del at
    phase(loop, "offload_states")


def release(loop: Loop, at: int) -> None:
    del at
    phase(loop, "release_states", "release_states")


def come_back(loop: Loop, at: int) -> None:
    del at
    phase(loop, "reload_states", "reload_states")


def reload_before_step(loop: Loop, at: int) -> None:
    """The three call sites of Megatron's loop."""
    phase(loop, "offload_states")
    loop.model(loop.batch(10 * at + 9))
    phase(loop, "release_states")
    loop.backward(at)
    phase(loop, "reload_states")
    loop.step()


PHASES = (leave, leave, start_to_leave, release, come_back, reload_before_step, reload_before_step)
ALWAYS = (step, step, step, step_without_some, evaluate, read_state, write_state, save, load, change_hyperparameter)
# With updates in the backward, parameters are new after it, and gradients are gone.
NOT_IN_BACKWARD = (skip, clip, look_before_step, write_before_step)
ONE_MICRO_BATCH = (zero_in_place, step_twice)


WITH_RESIDENT: dict[str, dict[str, Any]] = {
    "step-resident": {"staying": 20_000},
    **POLICIES,
    "forward-resident": {"overlap": "forward", "staying": 20_000},
    "iteration-resident": {"overlap": "iteration", "staying": 20_000},
}


@pytest.mark.parametrize("with_phases", [False, True], ids=["", "phases"])
@pytest.mark.parametrize("fields", WITH_RESIDENT.values(), ids=WITH_RESIDENT)
def test_any_program(mesh: DeviceMesh, fields: dict[str, Any], with_phases: bool) -> None:
    allowed: tuple[Operation, ...] = (*ALWAYS, *ONE_MICRO_BATCH, *(PHASES if with_phases else ()))
    if fields.get("overlap") != "iteration":
        allowed = (*allowed, *NOT_IN_BACKWARD)

    @settings(max_examples=32, deadline=None, suppress_health_check=list(HealthCheck))
    @given(program=st.lists(st.sampled_from(allowed), min_size=4, max_size=12), slots=st.integers(3, 6))
    def check(program: list[Operation], slots: int) -> None:
        policy = with_share(**{**SIZES, **fields, "passing": slots * SIZES["bucket_bytes"]})
        loops = [Loop(mesh, adamw, one, net=lambda: Net(width=16, layers=2)) for one in (None, policy)]
        for loop in loops:
            for at, operation in enumerate([step, step, *program, step]):
                operation(loop, at)
        assert same(*loops), [operation.__name__ for operation in program]

    check()
