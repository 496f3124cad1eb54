"""Reinforcement learning on one device in turns: generate, sleep, lend the memory to others, wake, train.

    python examples/rl_sleep.py
    torchrun --standalone --nproc-per-node 2 examples/rl_sleep.py --width 2048

A small model learns to generate tokens that are rewarded. In each round it generates tokens with its own weights. Then
model and optimizer sleep: parameters, gradients and optimizer state leave the device for pinned host memory, and
something else (a reward model, a generation engine, here a large tensor) uses the device's memory. Then they wake, and
train on the generated tokens. The same rounds without sleep have to give the same losses, bit by bit: exit code 0 means
that they did. Runs on GPUs, or on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, offload_model, offload_optimizer, reload_model

TOKENS, REWARDED = 32, 8  # the model is to learn to generate tokens below REWARDED
LENGTH, BATCH = 24, 16
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Policy(nn.Module):
    """Guesses the next token from the last one. The head is the embedding: one tensor under two names."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Policy(options.width, options.layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="offload_optimizer: The parameters are on the CPU")
        offload_optimizer(optimizer, model=model, policy=OffloadPolicy())
    return model, optimizer


# The phases ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(model: nn.Module, seed: int, device: torch.device) -> Tensor:
    """Return (BATCH, LENGTH) tokens, sampled one after the other."""
    generator = torch.Generator(device).manual_seed(1000 * seed + dist.get_rank())
    tokens = torch.randint(0, TOKENS, (BATCH, 1), device=device, generator=generator)
    for _ in range(LENGTH - 1):
        probabilities = model(tokens[:, -1:])[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return tokens


def sleep(model: nn.Module, optimizer: OffloadedOptimizer) -> None:
    optimizer.offload_states()  # starts copies of state that is not on the host yet
    optimizer.release_states()
    offload_model(model)  # returns when the memory is free
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()  # give the allocator's free memory to other processes, too


def wake(model: nn.Module, optimizer: OffloadedOptimizer) -> None:
    reload_model(model)
    optimizer.reload_states()


def reward(tokens: Tensor) -> Tensor:
    """Return the (BATCH,) rewards; meanwhile, a workspace of 64 MiB takes memory of the device."""
    nbytes = 64 * MIB
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=tokens.device).fill_(1)
    rewards = (tokens[:, 1:] < REWARDED).float().mean(dim=1)
    return rewards * workspace[:1].float()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, rewards: Tensor) -> float:
    """Train one step of REINFORCE; return the loss."""
    logits = model(tokens[:, :-1])
    log_probabilities = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].mean(dim=1)
    advantages = rewards - rewards.mean()
    loss = -(advantages * log_probabilities).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run(options: argparse.Namespace, device: torch.device, *, sleeping: bool) -> list[float]:
    """Train all rounds; return their losses."""
    model, optimizer = build(options, device)
    tell = teller(model, device, quiet=not sleeping)
    losses = []
    for number in range(options.rounds):
        tokens = generate(model, number, device)
        tell(f"round {number}: generated")
        if sleeping:
            sleep(model, optimizer)
            tell(f"round {number}: asleep")
        rewards = reward(tokens)
        if sleeping:
            wake(model, optimizer)
            tell(f"round {number}: awake")
        losses.append(train(model, optimizer, tokens, rewards))
        tell(f"round {number}: trained, reward {rewards.mean().item():.3f}")
    return losses


def teller(model: nn.Module, device: torch.device, *, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a phase, and the device memory of the parameters and of all of torch's tensors."""
    storages = {param.to_local().untyped_storage() for param in model.parameters()}

    def tell(phase: str) -> None:
        if quiet or dist.get_rank() != 0:
            return
        parameters = sum(storage.nbytes() for storage in storages)
        everything = torch.accelerator.memory_allocated(device) if device.type != "cpu" else parameters
        print(f"{phase:<32}{parameters / MIB:10.2f} MiB of parameters{everything / MIB:12.2f} MiB on the device")

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
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    device = start()
    try:
        losses = run(options, device, sleeping=True)
        expected = run(options, device, sleeping=False)
    finally:
        rank = dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        print("PASS: the same losses as without sleeping" if losses == expected else "FAIL: other losses")
    return int(losses != expected)


if __name__ == "__main__":
    sys.exit(main())
