"""Send an inference engine only the weights that each step has changed.

    python examples/send_deltas.py
    torchrun --standalone --nproc-per-node 2 examples/send_deltas.py

A bf16 model is trained with fp32 masters. At its learning rate, one of reinforcement learning, a step changes few bf16
weights. The engine, here a plain model on rank 0, gets the index and value of each changed weight. Exit code 0 means
that the engine has the trainer's weights, bit by bit. Runs on GPUs, or on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, add_masters, offload_optimizer
from fsdp_offload.listeners import WeightDelta, weight_deltas


def build(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
    return nn.Sequential(*blocks).to(torch.bfloat16)


def send(deltas: Iterable[WeightDelta]) -> list[list[WeightDelta]]:
    """Gather the deltas of all ranks on rank 0. (A real trainer has its own transport.)"""
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(list(deltas), found)
    return found or []


@dataclasses.dataclass
class Patch:
    """Stand-in for vLLM's ``SparseWeightPatch``, with its fields; ``indices``: int32, into the whole tensor, flat.

    vLLM added ``full_shape`` when names became those of checkpoints. Before that, names were those of vLLM's own
    parameters, some of which are fused.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]


def as_patches(received: Sequence[Sequence[WeightDelta]], shapes: dict[str, tuple[int, ...]]) -> Iterator[Patch]:
    """Join the deltas of all ranks to one patch per parameter. Of ranks that are replicas, pass only one."""
    of_name: dict[str, list[WeightDelta]] = {}
    for delta in itertools.chain.from_iterable(received):
        of_name.setdefault(delta.name, []).append(delta)
    for name, deltas in of_name.items():
        indices = torch.cat([delta.indices for delta in deltas]).to(torch.int32)
        yield Patch(name, indices, torch.cat([delta.values for delta in deltas]), shapes[name])


@torch.no_grad()
def receive(engine: nn.Module, patches: Iterable[Patch]) -> int:
    """Write patches into the engine's weights, in place; return how many weights were written."""
    params, count = dict(engine.named_parameters()), 0
    for patch in patches:
        params[patch.name].view(-1)[patch.indices] = patch.values
        count += len(patch.indices)
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Train, send, compare; return 0 if the engine has the trainer's weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args(argv)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    warnings.filterwarnings("ignore", message="offload_optimizer: ")  # it warns that a CPU gains nothing

    model, engine = build(args.width, args.layers).to(device), build(args.width, args.layers)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = add_masters(torch.optim.AdamW(model.parameters(), lr=1e-6))
    offload_optimizer(optimizer, model=model, policy=OffloadPolicy(overlap="forward"))
    deltas = weight_deltas(optimizer)  # deltas count from now on; the engine starts with the same weights

    shapes = {name: tuple(param.shape) for name, param in engine.named_parameters()}
    total, differ = sum(param.numel() for param in engine.parameters()), 0
    for step in range(args.steps):
        loss: Tensor = model(torch.randn(8, args.width, device=device, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        changed = receive(engine, as_patches(send(deltas), shapes))
        if dist.get_rank() == 0:
            print(f"step {step}: {changed} of {total} weights sent ({changed / total:.2%})")
    for (_, own), other in zip(engine.named_parameters(), model.parameters(), strict=True):
        whole = other.full_tensor().cpu()  # type: ignore[attr-defined]
        differ += int((own.view(torch.int16) != whole.view(torch.int16)).sum()) if dist.get_rank() == 0 else 0
    if dist.get_rank() == 0:
        print("the engine has the trainer's weights" if not differ else f"{differ} weights differ")
    dist.destroy_process_group()
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
