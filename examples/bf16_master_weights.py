"""Train a bf16 model without masters, with masters, and with their lower 16 bits only; compare with an fp32 reference.

    python examples/bf16_master_weights.py                # 2 ranks
    python examples/bf16_master_weights.py --ranks 3 --steps 100

or the ranks by themselves:

    torchrun --standalone --nproc-per-node 2 examples/bf16_master_weights.py

A bf16 number has 8 significant bits, so the neighbours of a weight of 0.1 are 0.0005 away, and smaller updates are
rounded off: without masters the loss stops falling early. After `add_masters` the optimizer updates fp32 masters, here
in host memory, and writes the bf16 weights from them. The reference, an fp32 model with a plain optimizer, is given the
bf16 model's gradients in every step; its weights must be the masters, bit by bit. Exit code 0 means that they are.
Runs on CUDA devices if there is one for each rank, else on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, add_masters, offload_optimizer

WIDTH = 48
LR = 1e-4
NAMES = {"none": "bf16, no masters", "fp32": "bf16, masters", "remainder": "bf16, remainders of masters"}


def build(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with the same bf16 weights on every call; the reference has them as fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model.to(device, torch.bfloat16).to(dtype)
    fully_shard(model, mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
    return (model(x.bfloat16()).float() - x.roll(1, 1)).square().mean()


def master_of(param: Tensor, kept: Tensor) -> Tensor:
    """Return the fp32 master. int16 ``kept`` are its lower 16 bits; the parameter is its upper 16 bits, rounded."""
    if kept.dtype == torch.float32:
        return kept
    lower = kept.int()
    upper = param.cpu().view(torch.int16).int() - (lower < 0).int()
    return (upper << 16 | lower & 0xFFFF).view(torch.float32)


def differs(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module) -> bool:
    """Tell whether, on any rank, a bit of the masters differs from the reference's weights."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    different = not all(
        torch.equal(
            master_of(param.detach().to_local(), optimizer.state[param]["master_param"].to_local()),
            expected.detach().to_local().cpu(),
        )
        for param, expected in pairs
    )
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, different)
    return any(answers)


def train(kind: str, steps: int, device: torch.device) -> tuple[float, float, str]:
    """Train; return the last loss, bytes of state per parameter, and the result of the comparison."""
    model, optimizer = build(device, torch.bfloat16)
    reference, reference_optimizer = build(device, torch.float32)
    # Buckets are small, so that even this little state needs several of them.
    policy = OffloadPolicy(bucket_bytes=16384)
    if kind != "none":
        add_masters(optimizer, kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="offload_optimizer: ")  # on the CPU there is nothing to gain
        offload_optimizer(optimizer, model=model, policy=policy)
    local_numel = sum(param.to_local().numel() for param in model.parameters())
    first_difference = 0
    for step in range(1, steps + 1):
        loss_of(model, step * dist.get_world_size() + dist.get_rank(), device).backward()
        for param, twin in zip(model.parameters(), reference.parameters(), strict=True):
            twin.grad = param.grad.float()
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        if kind != "none" and not first_difference and differs(model, optimizer, reference):
            first_difference = step
    with torch.no_grad():
        loss = loss_of(model, 0, device).item()
    state_bytes = optimizer.offload_report().memory.host_state_bytes / local_numel
    same = f"DIFFERENT from step {first_difference}" if first_difference else "the same bits in every step"
    return loss, state_bytes, "-" if kind == "none" else same


def run_as_rank(steps: int) -> bool:
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    log(f"{'':30}{f'loss, step {steps}':>16}{'state':>22}   masters and fp32 weights")
    passed = True
    for kind, name in NAMES.items():
        loss, state_bytes, comparison = train(kind, steps, device)
        log(f"{name:30}{loss:16.4f}{state_bytes:>8.0f} bytes/parameter   {comparison}")
        passed = passed and "DIFFERENT" not in comparison
    log("PASS" if passed else "FAIL")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # free the last references to the group, and so end its threads, before the interpreter shuts down
    return passed


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (%(default)s)")
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.steps < 1:
        parser.error("expected at least 1 rank and 1 step")
    if "RANK" in os.environ:
        return 0 if run_as_rank(args.steps) else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [sys.executable, *launcher, __file__, "--steps", str(args.steps)]
    # With one thread per rank, the ranks share the cores without waiting for each other.
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
