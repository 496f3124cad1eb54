"""What the tests of the integrations share: each rank records what a script has seen, and the test compares scripts.

A script trains from step 0 or from a checkpoint, offloaded or not. Whatever it records (losses, norms, parameters and
state at the end) has to be the same bit by bit with and without offload, on every rank.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_offload import OffloadPolicy
from tests.distributed.launch import spawn, this_device
from tests.parity import leaves, same_bits

POLICY: dict[str, Any] = {"bucket_bytes": 4096, "device_bytes": 4 * 4096}
"""Plain values, as configurations have them; so little that the models have many buckets."""

WITH_ROOM: dict[str, Any] = {"bucket_bytes": 1 << 12, "device_bytes": 1 << 15}
POLICIES = {
    "step": OffloadPolicy(**WITH_ROOM),
    "iteration": OffloadPolicy(overlap="iteration", **WITH_ROOM),
    "parameters": OffloadPolicy(overlap="iteration", parameters=True, **WITH_ROOM),
}
OVERLAPPED = {**POLICY, "overlap": "forward"}
IN_BACKWARD = {**POLICY, "overlap": "iteration"}
SAVED_AT, STEPS = 6, 12
MICRO_BATCHES = 2


def batch(number: int, rank: int) -> Tensor:
    return torch.randint(0, 61, (3, 7), generator=torch.Generator().manual_seed(100 * number + rank)).to(this_device())


def as_torchrun(rank: int, world_size: int) -> None:
    """Set the environment; the process group is there already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world_size)}


def run_scripts(
    rank: int, world_size: int, folder: Path, script: Callable[..., None], scripts: Mapping[str, Mapping[str, Any]]
) -> None:
    """Run ``script`` by each of these names with its options, in one process."""
    warnings.filterwarnings("ignore", message="offload_optimizer: ")
    for name, options in scripts.items():
        script(rank, world_size, folder, name, **options)


def same_scripts(
    script: Callable[..., None],
    folder: Path,
    ranks: int,
    scripts: Mapping[str, Mapping[str, Any]],
    *,
    like: str = "",
    seen_since: int = 0,
) -> None:
    """Run scripts in fresh processes: each leaves what ``like`` has, or else the first of them."""
    spawn(run_scripts, ranks, folder, folder, script, scripts, module=script.__module__)
    first, *others = [like, *scripts] if like else scripts
    for name in others:
        assert_same(folder, first, name, ranks, seen_since=seen_since)


def everything(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Parameters, state and counters of this rank."""
    values = [param.detach() for param in model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                values += [torch.as_tensor(state[name]) for name in sorted(state)]
            values.append(torch.as_tensor(group["lr"], dtype=torch.float64))
    return [leaf.clone().cpu() for value in values for leaf in leaves(value)]


def record(
    folder: Path, name: str, rank: int, seen: Iterable[Any], model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Note what ``rank`` of the script ``name`` has seen and what is left."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # an evaluation leaves the root gathered
    numbers = torch.tensor([float(value) for value in seen], dtype=torch.float64)
    torch.save([numbers, *everything(model, optimizers)], folder / f"{name}-{rank}.pt")


def recorded(folder: Path, name: str, rank: int = 0) -> list[Tensor]:
    """What :func:`record` has noted."""
    return torch.load(folder / f"{name}-{rank}.pt")


def assert_same(folder: Path, one: str, other: str, ranks: int, *, seen_since: int = 0) -> None:
    """``other`` has seen what ``one`` has from there on, and has left the same."""
    for rank in range(ranks):
        (first, *lefts), (second, *others) = recorded(folder, one, rank), recorded(folder, other, rank)
        assert len(first) > seen_since
        assert first[seen_since:].tolist() == second.tolist(), f"{one} and {other} differ on rank {rank}"
        assert len(lefts) == len(others) > 0
        assert all(map(same_bits, lefts, others)), f"{one} and {other} left other tensors on rank {rank}"
