"""Transformer Engine's FusedAdam with masters, its state in host memory, saved and loaded.

    torchrun --standalone --nproc-per-node 2 examples/te_fused_adam.py
    torchrun --standalone --nproc-per-node 2 examples/te_fused_adam.py --masters remainder --moments bf16

Trains the same bf16 model twice: with FusedAdam alone, and with its state offloaded, saved and loaded half way. The
losses have to be the same, bit by bit: exit code 0 means that they were. Needs a GPU for each rank, and
transformer-engine >= 2.18 (`pip install 'transformer-engine[pytorch]>=2.18'`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch  # before transformer_engine, which loads torch's libraries
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict

MASTERS = {
    "fp32": {"master_weights": True},
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "none": {},
}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
WIDTH, LAYERS, STEPS = 1024, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(options: argparse.Namespace, *, offload: bool) -> tuple[nn.Module, Any]:
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    moments = MOMENTS[options.moments]
    optimizer = FusedAdam(
        model.parameters(),
        lr=1e-3,
        weight_decay=0.1,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        **MASTERS[options.masters],
    )
    if offload:
        policy = OffloadPolicy(bucket_bytes=8 << 20)
        offload_optimizer(optimizer, model=model, policy=policy)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator("cuda").manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(32, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        loss = (model(x) - x.roll(1, 1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(options: argparse.Namespace, folder: Path) -> bool:
    """Train with and without offload; tell whether offloading, saving and loading changed no loss."""
    expected = train(*build(options, offload=False), range(STEPS))
    model, optimizer = build(options, offload=True)
    losses = train(model, optimizer, range(STEPS // 2))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)

    model, optimizer = build(options, offload=True)  # as a new process would
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, for_load=True)}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    losses += train(model, optimizer, range(STEPS // 2, STEPS))
    # FusedAdam's own load scales fp16 and fp8 moments anew, which rounds: compare only the half before the load.
    compared = STEPS if options.moments in ("fp32", "bf16") else STEPS // 2
    same = losses[:compared] == expected[:compared]
    if dist.get_rank() == 0:
        print(optimizer.offload_report())
        print(f"losses alone     {expected}\nlosses offloaded {losses}\nthe same: {'yes' if same else 'NO'}")
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masters", choices=MASTERS, default="fp32")
    parser.add_argument("--moments", choices=MOMENTS, default="fp32")
    options = parser.parse_args(arguments)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        same = run(options, Path(folder[0]))
    finally:
        dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
