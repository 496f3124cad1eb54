"""Parameters whose home is on another device than their mesh says, here with ``meta`` in place of an accelerator."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_offload.torch_compat.dtensor import local_shard, over_local
from fsdp_offload.torch_compat.homed import put_home, take_from_home


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_the_mesh(local: Tensor) -> DTensor:
    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)


def test_a_gradient_made_from_host_memory_goes_to_the_device() -> None:
    # What torch.distributed.checkpoint does with a fresh optimizer, before it reads or sets state.
    param = nn.Parameter(on_the_mesh(torch.empty(3, 2, device="meta")))
    home = torch.ones(3, 2)
    param._local_tensor = home  # type: ignore[attr-defined]
    put_home(param, home, lambda _: None)
    param.grad = torch.zeros_like(param)
    assert param.grad.device.type == "meta"
    assert local_shard(param.grad).shape == (3, 2)
    param.grad = None
    assert param.grad is None
    take_from_home(param)


def test_remainders_are_copied_deeply() -> None:
    value = over_local(on_the_mesh(torch.zeros(5)), torch.arange(5, dtype=torch.int16))
    for made in (value.clone(), copy.deepcopy(value)):
        assert type(made) is type(value)
        assert torch.equal(local_shard(made), local_shard(value))
        assert local_shard(made).data_ptr() != local_shard(value).data_ptr()


def test_what_an_evaluation_is_the_first_to_need_counts_writes() -> None:
    like = on_the_mesh(torch.zeros(5))
    with torch.inference_mode():
        value = over_local(like, local_shard(like))
    before = value._version
    value.add_(1)
    assert value._version > before
