"""Parameters whose home is on another device than their mesh says, here with ``meta`` in place of an accelerator."""

import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_offload.fsdp.dtensor import local_shard, over_local
from fsdp_offload.fsdp.homed import put_home, take_from_home


def on_the_mesh(local: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def test_a_gradient_made_from_host_memory_goes_to_the_device(mesh: DeviceMesh) -> None:
    # What torch.distributed.checkpoint does with a fresh optimizer, before it reads or sets state.
    param = nn.Parameter(on_the_mesh(torch.empty(3, 2, device="meta"), mesh))
    home = torch.ones(3, 2)
    param._local_tensor = home  # type: ignore[attr-defined]
    put_home(param, home, lambda _: nullcontext())
    param.grad = torch.zeros_like(param)
    assert param.grad.device.type == "meta"
    assert local_shard(param.grad).shape == (3, 2)
    param.grad = None
    assert param.grad is None
    take_from_home(param)


def test_remainders_are_copied_deeply(mesh: DeviceMesh) -> None:
    value = over_local(on_the_mesh(torch.zeros(5), mesh), torch.arange(5, dtype=torch.int16))
    for made in (value.clone(), copy.deepcopy(value)):
        assert type(made) is type(value)
        assert torch.equal(local_shard(made), local_shard(value))
        assert local_shard(made).data_ptr() != local_shard(value).data_ptr()


def test_what_an_evaluation_is_the_first_to_need_counts_writes(mesh: DeviceMesh) -> None:
    like = on_the_mesh(torch.zeros(5), mesh)
    with torch.inference_mode():
        value = over_local(like, local_shard(like))
    before = value._version
    value.add_(1)
    assert value._version > before
