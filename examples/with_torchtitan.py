"""torchtitan: its containers and its checkpoint manager, with the optimizer's state in host memory.

    torchrun --standalone --nproc-per-node 2 examples/with_torchtitan.py

In a ``Trainer.Config``, one line offloads: ``config.optimizer = offloaded(config.optimizer, policy)``. This example
instead assembles torchtitan's components by hand around a small model. It saves from host memory while training
continues, and loads the checkpoint into new components: the losses have to be the same, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.distributed.utils import clip_grad_norm_

from fsdp_offload import offload_report
from fsdp_offload.integrations.torchtitan import offloaded, save_from_arena


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(args: argparse.Namespace, device: torch.device, resume_at: int = 0) -> list[float]:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers))).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    policy = {"bucket_bytes": 1 << 20, "device_bytes": 8 << 20, "snapshot_bytes": 1 << 30}
    optimizers = offloaded(default_adamw(lr=1e-3), policy).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=args.steps)
    manager = CheckpointManager.Config(
        enable=True, interval=args.steps // 2, async_mode="async", keep_latest_k=0, last_save_model_only=False
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=args.folder,
    )
    save_from_arena(manager)
    if resume_at:
        manager.load(step=resume_at)
    losses = []
    for step in range(resume_at, args.steps):
        optimizers.zero_grad()
        x = torch.randn(16, args.width, generator=torch.Generator().manual_seed(ranks * step + dist.get_rank()))
        x = x.to(device)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
        if not resume_at:
            manager.save(step + 1, last_step=step + 1 == args.steps)
    manager.close()
    if dist.get_rank() == 0 and not resume_at:
        print(offload_report(optimizers.optimizers[0]))
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="runs/with-torchtitan", help="for checkpoints; all ranks have to see it")
    args = parser.parse_args(argv)
    on_device = torch.accelerator.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_device else torch.device("cpu")
    if on_device:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_device else "gloo")
    if dist.get_rank() == 0:
        shutil.rmtree(os.path.join(args.folder, "checkpoint"), ignore_errors=True)
    dist.barrier()
    half = args.steps // 2
    whole = train(args, device)
    dist.barrier()
    resumed = train(args, device, resume_at=half)
    same = resumed == whole[half:]
    print(
        f"rank {dist.get_rank()}: loss {whole[0]:.3f} -> {whole[-1]:.3f}; resumed: {'the same' if same else 'OTHERS'}"
    )
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
