"""Megatron-FSDP: its sharded model, with the optimizer's state in host memory. Needs GPUs.

    torchrun --standalone --nproc-per-node 2 examples/with_megatron_fsdp.py

Only one line differs from a script without offload. Megatron's ``fully_shard_optimizer`` runs a step that creates all
state on the device. If ``offload_optimizer`` comes before, this step creates state bucket by bucket, and none of it
stays on the device. ``offload_optimizer`` afterwards works too, but all state has to fit on the device in that step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_offload import OffloadPolicy, offload_optimizer, offload_report


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def sharded_and_offloaded(optimizer: torch.optim.Optimizer, policy: OffloadPolicy) -> torch.optim.Optimizer:
    return fully_shard_optimizer(offload_optimizer(optimizer, policy=policy))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    model = fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Block])
    optimizer = sharded_and_offloaded(
        torch.optim.AdamW(model.parameters(), lr=1e-3), OffloadPolicy(bucket_bytes=16 << 20, device_bytes=128 << 20)
    )
    for step in range(args.steps):
        x = torch.randn(64, args.width, device=device)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(offload_report(optimizer))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
