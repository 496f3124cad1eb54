"""accelerate: FSDP2, with the optimizer's state in host memory.

    accelerate launch --num-processes 2 examples/with_accelerate.py
    python examples/with_accelerate.py          # on the CPU, where accelerate has no FSDP; the rest is the same

One line differs from a script without offload: ``prepare(accelerator, ...)`` for ``accelerator.prepare(...)``. Trains
with accumulation, clipping and a schedule, saves half way, and loads the save at the end: its loss has to be repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

from fsdp_offload import offload_report
from fsdp_offload.integrations.accelerate import prepare


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="runs/with-accelerate", help="for the checkpoint; all ranks have to see it")
    args = parser.parse_args(argv)

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    on_device = torch.accelerator.is_available()
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin if on_device else None)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    policy = {"bucket_bytes": 1 << 20, "device_bytes": 8 << 20}  # or FSDP_OFFLOAD_BUCKET_BYTES=... in the environment
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler, policy=policy)

    def loss_of(number: int) -> torch.Tensor:
        x = torch.randn(16, args.width, generator=torch.Generator().manual_seed(number)).to(accelerator.device)
        return (model(x) - x.roll(1, -1)).square().mean()

    losses, half = [], 2 * (args.steps // 2)
    for number in range(2 * args.steps):
        if number == half:
            accelerator.save_state(args.folder)
        with accelerator.accumulate(model):
            loss = loss_of(number)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(offload_report(optimizer))
    accelerator.load_state(args.folder)
    again = loss_of(half).item()
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; at the checkpoint {losses[half]!r}, loaded {again!r}")
    return 0 if again == losses[half] else 1


if __name__ == "__main__":
    raise SystemExit(main())
