"""Policies given as dicts, and options that change nothing."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.engine.engine import engine_of
from tests.parity import take_step


def adamw(dtype: torch.dtype = torch.float32) -> torch.optim.AdamW:
    return torch.optim.AdamW([nn.Parameter(torch.ones(64, dtype=dtype))])


def test_a_dict_is_a_policy() -> None:
    optimizer = offload_optimizer(adamw(), policy={"bucket_bytes": 2048, "serial": True})
    policy = OffloadPolicy(bucket_bytes=2048, serial=True)
    engine = engine_of(optimizer)
    assert engine is not None
    assert engine.policy == policy
    assert offload_optimizer(optimizer, policy=policy, exist_ok=True) is optimizer
    assert offload_optimizer(optimizer, policy={"bucket_bytes": 2048, "serial": True}, exist_ok=True) is optimizer


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ValueError, match=r"OffloadPolicy has no paramters\. Did you mean parameters\? It has parameters, "
    ):
        offload_optimizer(adamw(), policy={"paramters": True})
    with pytest.raises(ValueError, match=r"OffloadPolicy has no xyz\. It has parameters, "):
        offload_optimizer(adamw(), policy={"xyz": True})
    with pytest.raises(TypeError, match="must be an OffloadPolicy or a dict, got str"):
        offload_optimizer(adamw(), policy="auto")  # type: ignore[arg-type]


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "snapshot": ({"snapshot_bytes": 16}, r"snapshot_bytes=16 has no effect: no state fits into it"),
    "share": ({"host_fraction": 1e-6}, r"host_fraction=1e-06 has no effect"),
}


@pytest.mark.parametrize(("policy", "message"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_an_option_without_effect_is_warned_of_once(policy: dict[str, Any], message: str) -> None:
    optimizer = adamw()
    with pytest.warns(UserWarning, match=message) as told:
        offload_optimizer(optimizer, policy=policy)
    assert sum("has no effect" in str(one.message) for one in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(optimizer)


def test_options_with_an_effect_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "offload_optimizer: The parameters are on the CPU")
        offload_optimizer(adamw(), policy={"snapshot_bytes": 1 << 16})
        offload_optimizer(adamw(), policy={"host_fraction": 1.0})


@pytest.mark.parametrize("overlap", ["forward", "iteration"])
def test_one_group_hides_nothing(mesh: DeviceMesh, overlap: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    with pytest.warns(UserWarning, match=f"overlap='{overlap}' hides nothing: .* Apply fully_shard to each block"):
        offload_optimizer(torch.optim.AdamW(model.parameters()), model=model, policy={"overlap": overlap})
