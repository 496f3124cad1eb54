"""Exact matrix products, and parameters as Megatron has them, for the tests of real formats."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

SMALL_CONFIG: dict[str, Any] = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
SMALL_CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
"""Of a language model of transformers: two layers that run in no time."""


def exact(*modules: nn.Module, inputs_of: Sequence[type[nn.Module]] = (nn.Linear,)) -> None:
    """Make matrix products exact: a BLAS may sum in another order where the matrix has other columns beside it.

    Weights, and what comes into the modules of these types, are rounded to bfloat16 and kept in float64: products of
    two have 16 bits, and a sum of some of them, of sizes not too far apart, fits into 53.
    """
    for module in modules:
        module.double()
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
        for child in module.modules():
            if isinstance(child, tuple(inputs_of)):
                child.register_forward_pre_hook(_rounded)


def _rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    del module
    return (args[0].bfloat16().to(args[0].dtype), *args[1:])


def megatron_parameter(whole: Tensor, device_mesh: DeviceMesh, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A slice of the flat elements of its tensor-parallel rows, beginning and ending anywhere; and these elements.

    As Megatron-FSDP makes it (``param_and_grad_buffer.py`` of megatron-core 0.16.1).
    """
    dp, tp = device_mesh.get_coordinate()
    rows = whole.narrow(0, whole.shape[0] // device_mesh.size(1) * tp, whole.shape[0] // device_mesh.size(1))
    edges = [0, *(min(bound, rows.numel()) for bound in bounds), rows.numel()]
    local = rows.reshape(-1)[edges[dp] : edges[dp + 1]].clone()
    param: Any = DTensor.from_local(
        local, device_mesh, [Shard(0), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    param.megatron_fsdp_slice = slice(edges[dp], edges[dp + 1])
    param.megatron_fsdp_dist_index = SimpleNamespace(tp_dim="tp")
    return param, local


def stepped(module: nn.Module, optimizer: Optimizer | None = None) -> Optimizer:
    """An optimizer that has made two steps with random gradients."""
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.125)
    for _ in range(2):
        for param in module.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer
