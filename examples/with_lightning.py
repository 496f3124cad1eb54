"""Lightning: ModelParallelStrategy (FSDP2), with the optimizer's state in host memory.

    python examples/with_lightning.py --devices 2
    python examples/with_lightning.py           # one device, or the CPU

Only one callback differs from a script without offload. Trains with accumulation, clipping and a schedule, validates in
between, and fits again from the checkpoint half way: the losses have to be the same, bit by bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp_offload import offload_report
from fsdp_offload.integrations.lightning import OffloadCallback

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Shifted(LightningModule):
    """Learns to shift its input by one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(WIDTH) for _ in range(layers)))
        self.losses: dict[tuple[int, int], float] = {}

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, seed: torch.Tensor, number: int) -> torch.Tensor:
        # Draw the batch by step, not by the loader's position: a fit resumed in mid-epoch starts the loader anew.
        loss = self.loss(2 * self.global_step + number % 2)
        self.losses[self.global_step, number % 2] = loss.item()
        return loss

    def validation_step(self, seed: torch.Tensor, number: int) -> None:
        self.log("validation", self.loss(-1 - number), sync_dist=True, batch_size=16)

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 + seed)).to(self.device)
        return (self.net(x) - x.roll(1, -1)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(args: argparse.Namespace, checkpoint: str | None = None) -> tuple[Shifted, Trainer]:
    seed_everything(0, verbose=False)
    model = Shifted(args.layers)
    batches = torch.utils.data.DataLoader(range(2 * args.steps), batch_size=None)
    half = args.steps // 2
    trainer = Trainer(
        devices=args.devices,
        strategy=ModelParallelStrategy(data_parallel_size=args.devices, tensor_parallel_size=1),
        max_steps=args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=args.steps,
        limit_val_batches=2,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(args.folder, filename="{step}", every_n_train_steps=half, save_top_k=-1),
            OffloadCallback({"bucket_bytes": 1 << 20, "device_bytes": 8 << 20}),
        ],
    )
    trainer.fit(model, batches, batches, ckpt_path=checkpoint)
    return model, trainer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default="runs/with-lightning", help="for checkpoints; all ranks have to see it")
    args = parser.parse_args(argv)
    whole, trainer = fit(args)
    if trainer.is_global_zero:
        print(offload_report(trainer.optimizers[0]))
    resumed, _ = fit(args, f"{args.folder}/step={args.steps // 2}.ckpt")
    first, *_, last = whole.losses.values()
    same = len(resumed.losses) >= args.steps and resumed.losses.items() <= whole.losses.items()
    print(f"loss {first:.3f} -> {last:.3f}; resumed: {'the same' if same else 'OTHER LOSSES'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
