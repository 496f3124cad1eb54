"""AdamW's state as FusedAdam's and back."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_offload.checkpoint import (
    adamw_to_fused_adam,
    fused_adam_to_adamw,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from tests.fused_adam_reference import FusedAdam
from tests.parity import attach, same_value


def trained(make: Any, steps: int = 3) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    params = list(model.parameters())
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}])
    attach(optimizer, model=model)
    for step in range(steps):
        for number, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + number))
        optimizer.step()
    return model, optimizer


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, foreach=False)


def fused_adam(params: Any, **kwargs: Any) -> Any:
    return FusedAdam(params, lr=0.1, weight_decay=0.1, **kwargs)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert same_value(one, other), (one, other)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_there_and_back(flat: bool) -> None:
    model, optimizer = trained(adamw)
    saved = get_optimizer_state_dict(model, optimizer, flatten_optimizer_state_dict=flat)
    converted = adamw_to_fused_adam(saved)
    other_model, other = trained(fused_adam, steps=0)
    set_optimizer_state_dict(other_model, other, converted)
    assert [group["step"] for group in other.param_groups] == [3, 3]
    back = fused_adam_to_adamw(get_optimizer_state_dict(other_model, other, flatten_optimizer_state_dict=flat))
    third_model, third = trained(adamw, steps=0)
    set_optimizer_state_dict(third_model, third, back)
    assert_equal(
        optimizer.state_dict()["state"],
        third.state_dict()["state"],
    )
    if not flat:
        plain = torch.optim.AdamW(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).parameters())
        plain.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert back["param_groups"][0].keys() == plain.state_dict()["param_groups"][0].keys()


def test_by_position() -> None:
    _, optimizer = trained(adamw)
    converted = adamw_to_fused_adam(optimizer.state_dict())
    _, other = trained(fused_adam, steps=0)
    other.load_state_dict(converted)
    for state, expected in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"])


def test_masters_are_made_from_the_weights() -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([param], lr=0.1)
    param.grad = torch.ones_like(param)
    plain.step()
    optimizer = FusedAdam([param], lr=0.1, master_weights=True)
    attach(optimizer)
    optimizer.load_state_dict(adamw_to_fused_adam(plain.state_dict()))
    assert torch.equal(optimizer.state[param]["master_param"], param.detach().float())
    assert torch.equal(optimizer.state[param]["exp_avg"], plain.state[param]["exp_avg"].float())


def test_refusals() -> None:
    _, optimizer = trained(adamw)
    saved = optimizer.state_dict()
    different = {**saved, "state": {**saved["state"], 1: {**saved["state"][1], "step": torch.tensor(7.0)}}}
    with pytest.raises(ValueError, match="counts the steps of a whole group"):
        adamw_to_fused_adam(different)
    with pytest.raises(ValueError, match="neither amsgrad nor maximize"):
        adamw_to_fused_adam({**saved, "param_groups": [{**saved["param_groups"][0], "amsgrad": True}]})
    with pytest.raises(ValueError, match=r"has \['exp_avg'"):
        fused_adam_to_adamw({**saved, "param_groups": [{**group, "step": 3} for group in saved["param_groups"]]})
    _, fused = trained(fused_adam)
    with pytest.raises(ValueError, match=r"has \['exp_avg', 'exp_avg_sq'\], expected"):
        adamw_to_fused_adam(fused.state_dict())
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    remainder = FusedAdam([param], master_weights=True, store_param_remainders=True)
    param.grad = torch.ones_like(param)
    remainder.step()
    with pytest.raises(ValueError, match="the lower 16 bits"):
        fused_adam_to_adamw(remainder.state_dict())
