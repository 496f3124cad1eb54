"""``materialize_on_host`` beside the example that trains a model larger than the GPU: what is not on meta stays."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import materialize_on_host
from tests.parity import local


class Scaled(nn.Module):
    """A weight on the meta device beside a table that was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))
        self.register_buffer("table", torch.arange(6.0, device="cpu"))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.table


def test_a_buffer_that_has_memory_stays(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled(), Scaled())
    tables = [block.table for block in model]
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize_on_host(model)
    for block, table in zip(model, tables, strict=True):
        assert block.table is table
        assert torch.equal(table, torch.arange(6.0))
        assert torch.equal(local(block.weight), torch.full((6, 6), 0.5))
