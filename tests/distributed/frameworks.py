"""What the tests of the integrations share: each rank records what a script has seen, and the test compares scripts.

A script trains from step 0 or from a checkpoint, offloaded or not. Whatever it records (losses, norms, parameters and
state at the end) has to be the same bit by bit with and without offload, on every rank.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity import leaves, same_bits

POLICY: dict[str, Any] = {"bucket_bytes": 4096, "device_bytes": 4 * 4096}
"""Plain values, as configurations have them; so little that the models have many buckets."""

SAVED_AT, STEPS = 6, 12


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


def record(folder: Path, name: str, rank: int, seen: Iterable[Any], tensors: list[Tensor]) -> None:
    """Note what ``rank`` of the script ``name`` has seen and what is left."""
    numbers = torch.tensor([float(value) for value in seen], dtype=torch.float64)
    torch.save([numbers, *tensors], folder / f"{name}-{rank}.pt")


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
