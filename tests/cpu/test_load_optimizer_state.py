"""What of an optimizer's state may be missing or extra in a checkpoint: state that never was, and masters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload.checkpoint.load_planner import LoadPlanner, load
from tests.loading import emptied, one_rank, refused, tensors_of


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    yield from one_rank(tmp_path_factory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_optimizer_state_that_fits(folder: Path):
    for flat in (False, True):
        dcp.save({"optimizer": optimizer_state(flat)}, checkpoint_id=folder / str(flat))
        loaded = {"optimizer": emptied(optimizer_state(flat))}
        planner = LoadPlanner()
        load(loaded, checkpoint_id=folder / str(flat), planner=planner)
        assert planner.missing_keys == ()
        for (_, tensor), (_, saved) in zip(
            tensors_of(loaded["optimizer"]), tensors_of(optimizer_state(flat)), strict=True
        ):
            assert torch.equal(tensor, saved)


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "below a prefix"])
def test_flattened_parameters_that_had_no_state(folder: Path, wrapped: bool):
    """The parameters are called 0.weight and so on, as entries of nested groups are."""
    save_optimizer(folder, optimizer_state(flat=True, without="1."), wrapped)
    loaded = as_given(optimizer_state(flat=True, fill=9.0), wrapped)
    planner = LoadPlanner()
    load(loaded, checkpoint_id=folder, planner=planner)
    prefix = "optimizer." if wrapped else ""
    names = [f"1.{name}.{value}" for name in ("weight", "bias") for value in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(planner.missing_keys) == sorted(f"{prefix}state.{name}" for name in names)
    for key, tensor in tensors_of(loaded):
        assert tensor.eq(9).all() == (key in planner.missing_keys), key


def test_flattened_state_that_is_missing_in_part(folder: Path):
    saved = optimizer_state(flat=True)
    del saved["state.1.bias.exp_avg"]
    dcp.save(saved, checkpoint_id=folder)
    refused(optimizer_state(flat=True, fill=9.0), folder, r"1 requested, .*: state\.1\.bias\.exp_avg\.")


def test_flattened_state_of_a_parameter_that_is_not_listed(folder: Path):
    saved = {key: value for key, value in optimizer_state(flat=True).items() if ".1.bias." not in key}
    dcp.save(saved, checkpoint_id=folder)
    loaded = {
        key: value for key, value in optimizer_state(True, fill=9.0).items() if not key.startswith("param_groups.1.b")
    }
    refused(loaded, folder, r"3 requested, .*state\.1\.bias\.")


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "below a prefix"])
def test_nested_parameters_that_had_no_state(folder: Path, wrapped: bool):
    """Who is listed is a value there, which only ``load`` reads. Group 0 is not the parameter 0.weight."""
    save_optimizer(folder, optimizer_state(flat=False, without="0."), wrapped)
    loaded = as_given(optimizer_state(flat=False, fill=9.0), wrapped)
    with pytest.raises(CheckpointException, match=r"6 keys of optimizer state that are requested, .* allow_missing"):
        dcp.load(loaded, checkpoint_id=folder, planner=LoadPlanner())
    planner = LoadPlanner()
    load(loaded, checkpoint_id=folder, planner=planner)
    assert len(planner.missing_keys) == 6


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "below a prefix"])
def test_state_that_would_stay_in_the_checkpoint(folder: Path, flat: bool, wrapped: bool):
    """State of a listed parameter; also where no state at all is requested, as by an SGD that was an AdamW."""
    save_optimizer(folder, optimizer_state(flat), wrapped)
    refused(as_given(optimizer_state(flat, without="1."), wrapped), folder, r"6 in the checkpoint, but not requested")
    refused(as_given(optimizer_state(flat, without=""), wrapped), folder, r"12 in the checkpoint, but not requested")


def masters(folder: Path, *, saved: dict[str, torch.dtype], requested: dict[str, torch.dtype]) -> dict[str, Any]:
    """Saves the state of a and b with these masters; gives what to load into."""
    dicts: list[dict[str, Any]] = []
    for fill, dtypes in ((1.0, saved), (9.0, requested)):
        state = {f"state.{fqn}.exp_avg": torch.full((3,), fill) for fqn in "ab"}
        state |= {f"state.{fqn}.master_param": torch.full((3,), fill).to(dtype) for fqn, dtype in dtypes.items()}
        dicts.append({"optimizer": {**state, "param_groups.a.lr": 0.1, "param_groups.b.lr": 0.1}})
    dcp.save(dicts[0], checkpoint_id=folder)
    return dicts[1]


def test_missing_masters_are_left_out(folder: Path):
    loaded = masters(folder, saved={"b": torch.float32}, requested=dict.fromkeys("ab", torch.float32))
    planner = LoadPlanner()
    load(loaded, checkpoint_id=folder, planner=planner)
    assert planner.missing_keys == ("optimizer.state.a.master_param",)
    state = {key: tensor.tolist()[0] for key, tensor in tensors_of(loaded)}
    assert state == {
        "optimizer.state.a.exp_avg": 1.0,
        "optimizer.state.b.exp_avg": 1.0,
        "optimizer.state.a.master_param": 9.0,
        "optimizer.state.b.master_param": 1.0,
    }


def test_extra_masters_are_left_in_the_checkpoint(folder: Path):
    load(masters(folder, saved=dict.fromkeys("ab", torch.float32), requested={}), checkpoint_id=folder)


def test_an_extra_master_of_a_parameter_without_requested_state(folder: Path):
    loaded = masters(folder, saved={"b": torch.float32}, requested={})
    del loaded["optimizer"]["state.b.exp_avg"]
    refused(loaded, folder, r"2 in the checkpoint.*: optimizer\.state\.b\.exp_avg, optimizer\.state\.b\.master_param")


def test_lower_bits_are_no_masters_that_can_be_rebuilt(folder: Path):
    """int16: valid only with the exact parameter that they were saved with."""
    loaded = masters(folder, saved={}, requested={"a": torch.int16})
    refused(loaded, folder, r"1 requested, .*: optimizer\.state\.a\.master_param")
    loaded = masters(folder / "2", saved={"a": torch.int16}, requested={})
    refused(loaded, folder / "2", r"1 in the checkpoint, .*: optimizer\.state\.a\.master_param")


# --- helpers ----------------------------------------------------------------------------------------------------------


def optimizer_state(flat: bool, *, without: str | None = None, fill: float | None = None) -> dict[str, Any]:
    """What torch gives for an AdamW after a step; ``without`` the state of parameters whose names begin so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values() if fill is not None else ():
        for tensor in state.values():
            tensor.fill_(fill)
    for name, param in model.named_parameters():
        if without is not None and name.startswith(without):
            # One entry stays in the mapping, or torch would make state for all of them.
            optimizer.state[param] = {}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_optimizer_state_dict(model, optimizer, options=options)


def as_given(state_dict: dict[str, Any], wrapped: bool) -> dict[str, Any]:
    return {"optimizer": state_dict} if wrapped else state_dict


def save_optimizer(folder: Path, state_dict: dict[str, Any], wrapped: bool) -> None:
    dcp.save(as_given(state_dict, wrapped), checkpoint_id=folder)
