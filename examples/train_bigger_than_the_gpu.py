"""Train a model whose parameters, gradients and optimizer state do not fit on the device; save it, and resume.

    python examples/train_bigger_than_the_gpu.py                              # one device, or the CPU
    torchrun --nproc-per-node 2 examples/train_bigger_than_the_gpu.py --save checkpoint
    torchrun --nproc-per-node 3 examples/train_bigger_than_the_gpu.py --resume checkpoint

The model is built on the meta device and initialized module by module, so it is never on the device as a whole. Its
parameters and optimizer state are in pinned host memory (`OffloadPolicy(parameters=True)`). `--limit-gb` limits torch's
allocator on each device: give less than plain training needs, which is 16 bytes per parameter.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_offload import OffloadPolicy, materialize_on_host, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict


class Block(nn.Module):
    """A residual MLP; the model has many, each sharded and gathered by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(width: int, layers: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, width, bias=False))
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device.type != "cpu" else MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    materialize_on_host(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    # overlap="iteration" updates parameters during the backward, so that their gradients are freed early.
    policy = OffloadPolicy(parameters=True, overlap="iteration")
    return model, offload_optimizer(optimizer, model=model, policy=policy)


def train(model: nn.Module, optimizer: Any, width: int, steps: range, device: torch.device) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(64, width, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(x).float() - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    # Parameters and state are in host memory: the load reads into that memory, and the device takes no part.
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, for_load=True)}
    load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-gb", type=float, help="of each device, for torch's allocator")
    parser.add_argument("--save", metavar="FOLDER")
    parser.add_argument("--resume", metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())
        device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    if chosen.limit_gb and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(chosen.limit_gb * 1e9 / torch.cuda.mem_get_info()[1])
    try:
        model, optimizer = build(chosen.width, chosen.layers, device)
        first = 0
        if chosen.resume:
            resume(model, optimizer, chosen.resume)
            first = chosen.steps
        losses = train(model, optimizer, chosen.width, range(first, first + chosen.steps), device)
        if chosen.save:
            save(model, optimizer, chosen.save)
        if dist.get_rank() == 0:
            numel = sum(param.numel() for param in model.parameters())
            whole_gb = 16 * numel / dist.get_world_size() / 1e9
            print(f"{numel / 1e6:.1f} M parameters: {whole_gb:.3f} GB a rank with their gradients and state")
            if device.type != "cpu":
                print(f"device peak {torch.accelerator.max_memory_allocated() / 1e9:.3f} GB")
            print("losses", " ".join(f"{loss:.9f}" for loss in losses))
            print(optimizer.offload_report())
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
