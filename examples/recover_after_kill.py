"""Kill a training process, and continue from its last step in another one, without a checkpoint on disk.

    python examples/recover_after_kill.py

Homes (host memory for what is recovered) are files in /dev/shm, which outlive the process. A process trains and is
killed (SIGKILL) in the middle of a step; the next one runs the same code and recovers. Exit code 0 means that it ends
with the weights of an uninterrupted run, bit for bit. Runs on a GPU, or on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy
from fsdp_offload.listeners import newest_commit, recover, recoverable


def train(folder: str, steps: int, width: int) -> None:
    """Train to the end, from the last commit if there is one; print each step, and a hash of the last weights."""
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29537", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    warnings.filterwarnings("ignore", message="offload_optimizer: ")  # it warns that a CPU gains nothing

    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    policy = OffloadPolicy(overlap="iteration")

    random = torch.random if device.type == "cpu" else torch.get_device_module(device)  # the generator of Dropout
    first = 0
    if newest_commit(folder) is None:
        run = recoverable(optimizer, folder, model=model, policy=policy)
    else:
        begin = time.perf_counter()
        run = recover(optimizer, folder, model=model, policy=policy)
        print(f"recovered {run.needed_bytes / 2e9:.1f} GB in {time.perf_counter() - begin:.1f} s")
        first = run.extra["step"] + 1
        scheduler.load_state_dict(run.extra["scheduler"])
        random.set_rng_state(run.extra["random"])
        print(f"goes on with step {first}", flush=True)
    for step in range(first, steps):
        batch = torch.randn(8, width, generator=torch.Generator().manual_seed(step)).to(device)
        model(batch).square().mean().backward()
        print(f"step {step}", flush=True)  # the parent kills this process from here on
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.commit({"step": step, "scheduler": scheduler.state_dict(), "random": random.get_rng_state()})

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.full_tensor().cpu().numpy())
    print("weights", digest.hexdigest())
    run.close()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Train without and with a kill; return 0 if both end with the same weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--folder", default=None, help="in memory; default: a new one in /dev/shm")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        train(args.folder, args.steps, args.width)
        return 0

    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = args.folder or memory
        sizes = ["--folder", folder, "--steps", str(args.steps), "--width", str(args.width)]
        command = [sys.executable, __file__, "--child", *sizes]
        peace = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="")
            if line.startswith(f"step {args.steps // 2}"):
                child.send_signal(signal.SIGKILL)
                break
        print(f"killed, exit code {child.wait()}; newest commit: {newest_commit(folder)}")
        again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(again, end="")
    is_same = peace.splitlines()[-1] == again.splitlines()[-1]
    print("the same weights as in peace" if is_same else "OTHER WEIGHTS THAN IN PEACE")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
