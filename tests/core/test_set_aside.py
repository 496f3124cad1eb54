"""State that is set aside and put back is what it was: a step that makes new state leaves it alone."""

import copy
from collections.abc import Iterable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.checkpoint import get_optimizer_state_dict
from fsdp_offload.state.shard import StateShard
from tests.conformance.axes import Coupled
from tests.cpu.test_host_fraction import fused_adamw
from tests.fused_adam_reference import FusedAdam
from tests.overlapping import POLICIES, Loop, pair, policy_of, same
from tests.parity import local


def train(loop: Loop, *, clips: bool, as_state_dict: bool) -> None:
    optimizer, state = loop.optimizer, loop.optimizer.state
    for at in range(9):
        loop.clipped_step(at, 1e9) if clips else loop.train(1, first=at)
        if at == 4:
            aside, kept = dict(state), optimizer.state_dict()
            if as_state_dict:
                aside.clear()
            state.clear()
        if at == 6 and as_state_dict:
            assert kept["state"]
            optimizer.load_state_dict(kept)
        elif at == 6:
            state.clear()
            state.update(aside)


@pytest.mark.parametrize("as_state_dict", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
@pytest.mark.parametrize("more", [{}, {"parameters": True}, {"host_fraction": 1.0}], ids=str)
def test_state_that_is_set_aside(
    mesh: DeviceMesh, overlap: str, more: dict[str, Any], *, clips: bool, as_state_dict: bool
) -> None:
    both = pair(mesh, policy_of({"overlap": overlap, **more}), fused_adamw)
    for loop in both:
        train(loop, clips=clips, as_state_dict=as_state_dict)
    assert same(*both)


def values_of(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [local(one).clone() for state in states for one in state.values() if isinstance(one, Tensor)]


@pytest.mark.parametrize(
    "hold",
    [
        lambda optimizer: list(optimizer.state.values()),
        lambda optimizer: [dict(entry) for entry in optimizer.state.values()],
        lambda optimizer: list(optimizer.state_dict()["state"].values()),
    ],
    ids=["entries", "their tensors", "a state dict"],
)
@pytest.mark.parametrize("make", [fused_adamw, partial(Coupled, lr=0.01)])
@pytest.mark.parametrize("fields", [*POLICIES.values(), {"parameters": True}], ids=str)
def test_what_is_held_is_not_loaded_into(mesh: DeviceMesh, fields: dict[str, Any], make: Any, hold: Any) -> None:
    """As plain training's, whose loads put other tensors into the state."""
    if make is not fused_adamw:
        fields = fields | {"parameters": False}
    both, kept = pair(mesh, policy_of(fields), make), []
    for loop in both:
        optimizer = loop.train(3).optimizer
        other = copy.deepcopy(optimizer.state_dict())
        loop.train(2, first=3)
        held = hold(optimizer)
        optimizer.load_state_dict(other)
        loop.train(2, first=5)
        kept.append(values_of(held))
    assert all(map(torch.equal, *kept))
    assert same(*both)


def test_entries_that_a_hook_of_the_load_keeps(mesh: DeviceMesh) -> None:
    held: list[dict[str, Any]] = []
    optimizer = Loop(mesh, fused_adamw, OffloadPolicy()).train(3).optimizer
    other = copy.deepcopy(optimizer.state_dict())
    other["state"][0]["exp_avg"].add_(1)
    before = values_of(optimizer.state.values())
    optimizer.register_load_state_dict_pre_hook(lambda *_: held.extend(optimizer.state.values()))
    optimizer.load_state_dict(other)
    assert all(map(torch.equal, values_of(held), before))


@pytest.mark.parametrize("make", [fused_adamw, partial(FusedAdam, lr=0.01), partial(Coupled, lr=0.01)])
def test_entries_that_are_views_of_each_others_homes(mesh: DeviceMesh, make: Any) -> None:
    both = pair(mesh, OffloadPolicy(), make)
    for loop in both:
        saved = loop.train(3).optimizer.state_dict()
        states = saved["state"]
        one, other = next(
            (one, other) for one, other in combinations(states, 2) if loop.params[one].shape == loop.params[other].shape
        )
        views = {at: {name: value.detach() for name, value in states[at].items()} for at in (one, other)}
        states[one], states[other] = views[other], views[one]
        loop.optimizer.load_state_dict(saved)
        loop.train(2, first=3)
    assert same(*both)


def refuse(*_: object) -> NoReturn:
    raise AssertionError


@pytest.mark.parametrize("make", [fused_adamw, partial(FusedAdam, lr=0.01), partial(Coupled, lr=0.01)])
def test_a_resume_leaves_nothing(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """A load into a state dict, or one while nothing is held, takes no more memory."""
    loop = Loop(mesh, make, policy_of({"overlap": "iteration"})).train(3)
    model, optimizer = loop.model, loop.optimizer
    monkeypatch.setattr(StateShard, "leave", refuse)
    for at, get in enumerate((state_dict.get_optimizer_state_dict, get_optimizer_state_dict)):
        dcp.save(get(model, optimizer), checkpoint_id=tmp_path / str(at))
        saved = get(model, optimizer)
        dcp.load(saved, checkpoint_id=tmp_path / str(at))
        state_dict.set_optimizer_state_dict(model, optimizer, saved)
        loop.train(1, first=3)
    other = copy.deepcopy(optimizer.state_dict())
    del saved
    optimizer.load_state_dict(other)
    loop.train(1, first=5)
