"""Save on one number of ranks, resume on another: with the same parameters and optimizer state, bit by bit.

    python examples/resume_other_world_size.py                             # 3 ranks, then 2
    python examples/resume_other_world_size.py --ranks 2 --resume-ranks 4

or each half by itself, as on two clusters:

    torchrun --standalone --nproc-per-node 3 examples/resume_other_world_size.py --save checkpoint
    torchrun --standalone --nproc-per-node 2 examples/resume_other_world_size.py --resume checkpoint

The first half writes a sharded checkpoint, to which each rank adds its part, and for the comparison `whole.pt`, with
every tensor in one piece. Exit code 0 means that nothing differs. Runs on CUDA devices if there is one for each rank,
else on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, load, set_optimizer_state_dict

STEPS = 5
WIDTH = 50  # rows that divide neither by 3 nor by 4, so shards are uneven and every boundary moves


def build(device: torch.device, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LinearLR]:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, 7)]
    model = nn.Sequential(*layers)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Buckets are small, so that even this little state needs several of them.
    policy = OffloadPolicy(bucket_bytes=8192)
    offload_optimizer(optimizer, model=model, policy=policy)
    return model, optimizer, LinearLR(optimizer, total_iters=4 * STEPS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LinearLR, device: torch.device) -> None:
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def save(folder: Path, device: torch.device) -> bool:
    model, optimizer, scheduler = build(device, seed=0)
    train(model, optimizer, scheduler, device)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
    }
    dcp.save(state, checkpoint_id=folder)
    whole = in_one_piece(state)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    log(f"saved by {dist.get_world_size()} ranks: {len(tensors_of(whole))} tensors")
    return True


def resume(folder: Path, device: torch.device) -> bool:
    model, optimizer, scheduler = build(device, seed=1)  # other weights: only the load can make them right
    # The optimizer has made no step, so it has no state to load into. for_load=True lists all state that it is going to
    # have, as this rank's shards in their host memory. DCP reads from the files of all old ranks only what this rank
    # needs, and nothing passes through the device.
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, for_load=True),
        "scheduler": scheduler.state_dict(),
    }
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])  # the loaded state is the optimizer's from now on

    scheduler.load_state_dict(state["scheduler"])

    saved = torch.load(folder / "whole.pt", weights_only=False)
    now = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    different = compare(saved, in_one_piece(now))
    different += [] if scheduler.state_dict() == saved["scheduler"] else ["scheduler"]
    train(model, optimizer, scheduler, device)
    report = "every bit is the same" if not different else f"DIFFERENT: {', '.join(different)}"
    log(f"resumed by {dist.get_world_size()} ranks: {report}")
    return not different


def in_one_piece(values: Any) -> Any:
    """Return a copy with whole tensors on the CPU. Only for small models: every rank gets all tensors."""
    if isinstance(values, dict):
        return {key: in_one_piece(value) for key, value in values.items()}
    if isinstance(values, DTensor):
        # full_tensor() gathers on the mesh's device: copy state there from host memory first.
        local = values.to_local().to(values.device_mesh.device_type)
        there = DTensor.from_local(
            local, values.device_mesh, values.placements, shape=values.shape, stride=values.stride(), run_check=False
        )
        return there.full_tensor().detach().cpu()
    return values.detach().cpu() if isinstance(values, Tensor) else values


def tensors_of(values: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(values, Tensor):
        return {name: values}
    found: dict[str, Tensor] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        found |= tensors_of(value, f"{name}.{key}".removeprefix("."))
    return found


def compare(saved: Any, loaded: Any) -> list[str]:
    """Return the names of tensors that differ, or that only one side has."""
    ones, others = tensors_of(saved), tensors_of(loaded)
    different = [name for name in ones.keys() & others.keys() if not torch.equal(ones[name], others[name])]
    return sorted([*different, *(ones.keys() ^ others.keys())])


# ---------------------------------------------------------------------------------------------------------------------
# Ranks and command line
# ---------------------------------------------------------------------------------------------------------------------


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run_as_rank(args: argparse.Namespace) -> bool:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    equal = save(args.save, device) if args.save else resume(args.resume, device)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # free the last references to the group, and so end its threads, before the interpreter shuts down
    return equal


def launch(ranks: int, *flags: str) -> bool:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # With one thread per rank, the ranks share the cores without waiting for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, __file__, *flags], env=environment, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="that save (%(default)s)")
    parser.add_argument("--resume-ranks", type=int, default=2, help="that go on (%(default)s)")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--save", type=Path, metavar="FOLDER", help="the first half only; run me with torchrun")
    half.add_argument("--resume", type=Path, metavar="FOLDER", help="the second half only; run me with torchrun")
    args = parser.parse_args(argv)
    if args.save or args.resume:
        if "RANK" not in os.environ:
            parser.error("--save and --resume are for the ranks that torchrun starts")
        return 0 if run_as_rank(args) else 1
    with tempfile.TemporaryDirectory(prefix="resume_other_world_size_") as folder:
        passed = launch(args.ranks, "--save", folder) and launch(args.resume_ranks, "--resume", folder)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
