"""The model of the distributed tests, its batches, and the ways in which people shard it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from tests.conformance.axes import Block
from tests.distributed.launch import mesh, this_device

WIDTH = 16


class Net(nn.Module):
    """Rows that divide by no world size (61, 5), fewer rows than ranks (2), and parameters that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 24) for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, 5)
        self.small = nn.Linear(5, 2)
        self.head = nn.Linear(WIDTH, 61, bias=False)
        self.data_rank = 0  # ranks that share a batch (TP) have the same one

    def forward(self, tokens: Tensor, *, extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if extra:
            x = x + self.extra(x).sin()
        return self.head(x).float().logsumexp(-1).mean() + self.small(self.odd(x)).float().pow(2).mean()


def batch(seed: int) -> Tensor:
    """The same for the same seed, on any device."""
    return torch.randint(0, 61, (3, 7), generator=torch.Generator().manual_seed(seed)).to(this_device())


# Sharding ------------------------------------------------------------------------------------------------------------

ShardNet = Callable[[Net], Any]


def shard_groups(net: nn.Module, **options: Any) -> None:
    """The usual: one group for each block, and the rest in the root's."""
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)


def shard_even(net: Net) -> None:
    shard_groups(net, mesh=mesh(dist.get_world_size()))


def shard_columns(net: Net) -> None:
    """``Shard(1)`` wherever it divides evenly."""
    size = dist.get_world_size()

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() == 2 and param.shape[1] % size == 0 else None

    shard_groups(net, mesh=mesh(size), shard_placement_fn=place)


def shard_hybrid(net: Net) -> None:
    shard_groups(net, mesh=mesh(2, dist.get_world_size() // 2, names=("replicate", "shard")))


def shard_tensor_parallel(net: Net) -> None:
    """FSDP after TP: ``up`` is sharded twice on one dim (_StridedShard), ``down`` on two; the rest by FSDP alone."""
    two_dims = mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, two_dims["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_groups(net, mesh=two_dims["dp"])


def shard_bfloat16(net: Net) -> None:
    """Parameters, and so gradients and state, in bfloat16; reduced in float32."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    shard_groups(net.bfloat16(), mesh=mesh(dist.get_world_size()), mp_policy=policy)


# Building ------------------------------------------------------------------------------------------------------------

MakeOptimizer = Callable[[Net], Optimizer]


def build(shard: ShardNet, *, seed: int = 0, prepare: Callable[[Net], Any] | None = None) -> Net:
    """The same parameters on every rank, then sharded."""
    torch.manual_seed(seed)
    net = Net()
    if prepare is not None:
        prepare(net)
    net.to(this_device())
    shard(net)
    assert isinstance(net, FSDPModule)
    net.data_rank = dist.get_rank() // (2 if shard is shard_tensor_parallel else 1)
    return net


def decay_groups(net: Net) -> Iterator[dict[str, Any]]:
    """Weight decay for matrices only: the groups take turns in the model's order."""
    named = [(name, param) for name, param in net.named_parameters()]
    yield {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1}
    yield {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3}
