"""A training loop like Megatron's, which says explicitly when optimizer state leaves the device and when it returns.

    python examples/megatron_style_loop.py --compare
    torchrun --standalone --nproc-per-node 2 examples/megatron_style_loop.py --width 2048 --compare

Such loops take their functions from a ``config`` object, and finish the gradients of a step in
``config.finalize_model_grads_func``. Three call sites keep the state off the device from one step to the next:

- ``optimizer.offload_states()`` before the forward: the state that is on the device around the step (``device_bytes``)
  begins to leave during the first kernels of the forward;
- ``optimizer.release_states()`` before activations need the memory: frees state that has reached the host, in stream
  order, so that the host does not wait;
- ``reload_before`` around the hook: state comes back while gradients are finished; the wrapped hook is still called.

No call blocks the host, and none changes a bit: with ``--compare`` the same loop also runs with a plain optimizer, and
exit code 0 means that every loss and every parameter was the same. Runs on GPUs, or on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_optimizer, reload_before

TOKENS, LENGTH, IGNORED = 61, 32, -100
KIB, MIB = 1 << 10, 1 << 20

Tell = Callable[[str], None]


@dataclass
class Config:
    """Settings and functions that the loop is given, like Megatron's ``TransformerConfig``."""

    micro_batches: int
    finalize_model_grads_func: Callable[[nn.Module, Tensor], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# The loop ------------------------------------------------------------------------------------------------------------


def finalize_model_grads(model: nn.Module, num_tokens: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Divide gradients of loss sums by the number of tokens on all ranks; each rank has another number of tokens."""
    dist.all_reduce(num_tokens, group=group)
    for param in model.parameters():
        param.grad.mul_(dist.get_world_size(group) / num_tokens)  # fully_shard has averaged over ranks


def train_step(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, tell: Tell) -> Tensor:
    """Train one step over all micro-batches; return this rank's part of the mean loss."""
    device = next(model.parameters()).device
    offloads = isinstance(optimizer, OffloadedOptimizer)
    if offloads:
        optimizer.offload_states()
    optimizer.zero_grad()
    if offloads:
        optimizer.release_states()
        tell("released")
    loss_sum, num_tokens = torch.zeros((), device=device), torch.zeros((), device=device)
    for micro in range(config.micro_batches):
        model.set_requires_gradient_sync(micro + 1 == config.micro_batches)
        tokens, targets = batch(config.micro_batches * step + micro, device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        loss_sum += loss.detach()
        num_tokens += (targets != IGNORED).sum()
    config.finalize_model_grads_func(model, num_tokens)  # reloads
    tell("gradients finished")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    tell("stepped")
    return loss_sum / num_tokens


def batch(number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (4, LENGTH) tokens and, as targets, the token after each; they depend on number and rank only."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    first = torch.randint(0, TOKENS, (4, 1), generator=generator)
    sequence = (first + 7 * torch.arange(LENGTH + 1)) % TOKENS
    targets = sequence[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    return sequence[:, :-1].to(device), targets.to(device)


def train(options: argparse.Namespace, device: torch.device, *, offload: bool) -> tuple[list[float], list[Tensor]]:
    """Return the losses of all steps, and this rank's shards of the parameters after the last one."""
    torch.manual_seed(0)
    model = Model(options.width, options.layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # reload_before keeps calling the hook that the framework or the user has bound, here a partial.
    config = Config(options.micro_batches, partial(finalize_model_grads, group=mesh.get_group()))
    if offload:
        bucket_bytes = options.passing_kib * KIB // 4
        policy = OffloadPolicy(
            bucket_bytes=bucket_bytes, device_bytes=(options.passing_kib + options.staying_kib) * KIB
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="offload_optimizer: The parameters are on the CPU")
            offload_optimizer(optimizer, model=model, policy=policy)
        config.finalize_model_grads_func = reload_before(config.finalize_model_grads_func, optimizer)
    losses = []
    for step in range(options.steps):
        tell = teller(step, optimizer, device, quiet=not offload or step < options.steps - 1)
        loss = train_step(config, model, optimizer, step, tell)
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, [param.detach().to_local() for param in model.parameters()]


def teller(step: int, optimizer: torch.optim.Optimizer, device: torch.device, *, quiet: bool) -> Tell:
    """Return a function that prints a phase, the state on the device in it, and all memory that torch has allocated."""

    def tell(phase: str) -> None:
        if quiet or dist.get_rank() != 0:
            return
        report = optimizer.offload_report()
        allocated = torch.accelerator.memory_allocated(device) if device.type != "cpu" else 0
        print(
            f"step {step}, {phase + ':':<20}"
            f"{report.memory.kept_state_bytes / KIB:10.0f} KiB of state kept on the device"
            f"{report.memory.device_bytes / KIB:10.0f} KiB there in all"
            f"{report.memory.host_state_bytes / KIB:12.0f} KiB of state on the host"
            f"{allocated / MIB:12.2f} MiB allocated"
        )

    return tell


# The program ---------------------------------------------------------------------------------------------------------


def start() -> torch.device:
    """Join the ranks that torchrun started, or be the only rank; return this rank's device."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo", **alone)
        return torch.device("cpu")
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device), **alone)
    return device


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--passing-kib", type=int, default=1024, help="device memory through which state passes")
    parser.add_argument("--staying-kib", type=int, default=2048, help="state that stays on the device around a step")
    parser.add_argument("--compare", action="store_true", help="with the same loop and a plain optimizer")
    options = parser.parse_args(argv)
    device = start()
    try:
        losses, params = train(options, device, offload=True)
        same = True
        if options.compare:
            expected_losses, expected_params = train(options, device, offload=False)
            same = losses == expected_losses and all(map(torch.equal, params, expected_params))
    finally:
        rank = dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {options.steps} steps")
        if options.compare:
            print("PASS: the same bits as without offload" if same else "FAIL: other bits")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
