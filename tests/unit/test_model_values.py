"""Values of a model's state dict get back what their parameters know of their chunks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_offload.checkpoint import chunks_of, with_parameter_chunks
from fsdp_offload.fsdp.dtensor import local_shard

SHAPE = (12, 5)


def model_of(mesh: DeviceMesh, begin: int, end: int) -> Any:
    model = nn.Module()
    model.module = nn.Module()
    local = torch.arange(float(begin), float(end))
    stride = (5, 1)
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(SHAPE), stride=stride)
    model.module.weight = nn.Parameter(made)
    model.module.weight.megatron_fsdp_slice = slice(begin, end)
    model.module.weight.megatron_fsdp_dist_index = SimpleNamespace(tp_dim=None)
    model.module.scale = nn.Parameter(torch.ones(3))
    return model


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "_orig_mod.module._checkpoint_wrapped_module."])
def test_a_slice_goes_with_the_value_under_any_prefix(mesh: DeviceMesh, prefix: str) -> None:
    model = model_of(mesh, 7, 31)
    values = {f"{prefix}{key.removeprefix('module.')}": value for key, value in model.state_dict().items()}
    assert not hasattr(values[f"{prefix}weight"], "megatron_fsdp_slice")
    found = with_parameter_chunks(model, values)
    assert chunks_of(found[f"{prefix}weight"]).chunks == chunks_of(SHAPE, (7, 31)).chunks
    assert local_shard(found[f"{prefix}weight"]).local.data_ptr() == local_shard(model.module.weight).data_ptr()
    assert found[f"{prefix}scale"] is values[f"{prefix}scale"]
    assert with_parameter_chunks(model, found)[f"{prefix}weight"] is found[f"{prefix}weight"]  # it has them already


def test_what_nobody_knows_is_refused(mesh: DeviceMesh) -> None:
    model = model_of(mesh, 7, 31)
    values = model.state_dict()
    with pytest.raises(ValueError, match=r"other: no parameter of the model has this name, and .*sharded unevenly"):
        with_parameter_chunks(model, {"other": values["module.weight"]})
    whole = torch.zeros(math.prod(SHAPE)).view(SHAPE)
    other = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match=r"module.weight: expected a local tensor of 24 elements"):
        with_parameter_chunks(model, {"module.weight": other})
