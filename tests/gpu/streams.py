"""What tests on real streams share: times in cycles, a model that is wide enough, policies of a few blocks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer
from tests.overlapping import Loop, Net, adamw

MIB = 1 << 20
BUCKET_BYTES = 256 << 10
SIZES = {"bucket_bytes": BUCKET_BYTES, "device_bytes": 6 * BUCKET_BYTES}
SLEEP_CYCLES = 2_000_000  # about 1 ms: longer than anything else that a group does here
LONG_CYCLES = 40_000_000  # longer than the host takes to issue what follows, so that a missing wait is surely seen

Slow = Callable[..., None]
"""``slow(kind, cycles)``: :func:`tests.overlapping.slow_down` for one test."""


def net() -> Net:
    return Net(width=128, layers=5)


def plain(mesh: DeviceMesh, make: Callable[[Any], Optimizer] = adamw, **more: Any) -> Loop:
    return Loop(mesh, make, None, net=net, **more)


def offloaded(mesh: DeviceMesh, fields: dict[str, Any], make: Callable[[Any], Optimizer] = adamw, **more: Any) -> Loop:
    return Loop(mesh, make, OffloadPolicy(**{**SIZES, **fields}), net=net, **more)


# Without fully_shard -------------------------------------------------------------------------------------------------

Trained = tuple[nn.Module, AdamW]


def make(policy: OffloadPolicy | None, **options: Any) -> Trained:
    """A list of parameters, whose state is cut into buckets of 1 MiB."""
    torch.manual_seed(0)
    sizes = [(512, 700), (64,), (300, 1100), (1, 1), (7, 12345), (128, 128), (1_000_003,)]
    model = nn.ParameterList(nn.Parameter(torch.randn(size, device="cuda")) for size in sizes)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True, **options)
    return model, optimizer if policy is None else offload_optimizer(optimizer, model=model, policy=policy)


def policy_of(**options: Any) -> OffloadPolicy:
    return OffloadPolicy(**{"device_bytes": 5 * MIB, "bucket_bytes": MIB, **options})


def train(*pairs: Trained, steps: Iterable[int]) -> Trained:
    """In turns, where there are several."""
    for step in steps:
        for model, optimizer in pairs:
            for number, param in enumerate(model.parameters()):
                generator = torch.Generator("cuda").manual_seed(100 * step + number)
                param.grad = torch.randn(param.shape, device="cuda", generator=generator)
            optimizer.step()
            optimizer.zero_grad()
    return pairs[0]
