"""Trains a low-precision model with masters, offloaded or not, beside the same optimizer on an fp32 copy of the model.

    twins = make_twins(Zoo, lambda params: torch.optim.AdamW(params), "remainder")
    twins.train(10)

The low-precision side computes gradients; both sides are updated with them. After each step every master, moment,
counter and entry of the param groups has to be that of the fp32 side, bit by bit, and every low-precision parameter
what its master rounds to. Works on any device and with DTensors.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_offload import OffloadPolicy, add_masters
from tests.parity import (
    SMALL,
    MakeModel,
    MakeOptimizer,
    Pair,
    Run,
    group_differences,
    local,
    same_bits,
    state_differences,
)

MASTER = "master_param"
LOW = (torch.bfloat16, torch.float16)

MakeGradients = Callable[[Run, int], Any]


def gradients(run: Run, step: int) -> None:
    run.loss(step).backward()


class Twins(Pair):
    """The fp32 side, which is plain, and the low-precision one."""

    def __init__(self, full: Run, low: Run, kind: str) -> None:
        super().__init__(full, low)
        self.full, self.low, self.kind = full, low, kind
        self.updated: set[str] = set()  # since attaching: what must have a master

    def add_masters(self) -> None:
        """Before :meth:`attach`, if at all."""
        add_masters(self.low.optimizer, self.kind)  # type: ignore[arg-type]

    def train(self, steps: int = 6, make_gradients: MakeGradients = gradients) -> None:
        for _ in range(steps):
            self.step(make_gradients)

    def step(self, make_gradients: MakeGradients = gradients) -> None:
        """One step of both with the same gradients, and :meth:`assert_same`."""
        self.update(make_gradients)
        self.assert_same()

    def update(self, make_gradients: MakeGradients = gradients) -> None:
        """One step of both with the same gradients."""
        for run in self:
            run.optimizer.zero_grad()
        make_gradients(self.low, self.steps)
        self.hand_over()
        for run in self:
            run.optimizer.step()
        self.steps += 1

    def hand_over(self) -> None:
        """Give the fp32 side the gradients of the other."""
        for (name, one), other in zip(self.full.params.items(), self.low.params.values(), strict=True):
            one.grad = None if other.grad is None else other.grad.detach().to(torch.float32, copy=True)
            if other.grad is not None:
                self.updated.add(name)

    def differences(self) -> Iterator[str]:
        """What is not the same, in words."""
        yield from group_differences(self.full.optimizer, self.low.optimizer)
        for (name, one), other in zip(self.full.params.items(), self.low.params.values(), strict=True):
            state = dict(self.low.optimizer.state.get(other, {}))
            kept = state.pop(MASTER, None)
            yield from state_differences(name, self.full.optimizer.state.get(one, {}), state)
            yield from self._master_differences(name, local(one.detach()), other.detach(), kept)

    def _master_differences(self, name: str, full: Tensor, param: Tensor, kept: Tensor | None) -> Iterator[str]:
        if (kept is not None) != (param.dtype in LOW and name in self.updated):
            yield f"{name} has {'a' if kept is not None else 'no'} master"
            return
        if kept is None:
            if not same_bits(full, local(param).float()):
                yield f"parameter {name}"
            return
        if isinstance(param, DTensor) and not (isinstance(kept, DTensor) and kept.placements == param.placements):
            yield f"the master of {name} is not sharded like it"
        master = master_of(self.kind, local(param).cpu(), local(kept).cpu())
        if not same_bits(full, master):
            yield f"the master of {name}"
        if not same_bits(local(param), rounded(self.kind, master, param.dtype)):
            yield f"parameter {name} is not what its master rounds to"

    def assert_trained(self) -> None:
        """That something was shown: parameters have changed since the seed, and masters say more than they do."""
        for name, param in self.low.params.items():
            value, start = local(self.full.params[name].detach()), self.full.parts["start"][name]
            assert torch.isfinite(value).all(), f"{name} is not finite"
            assert not torch.equal(value.cpu(), start) or not value.numel(), f"{name} has not moved"
            if param.dtype in LOW and value.numel() > 1:  # a single one may be so by chance
                assert not torch.equal(value, value.to(param.dtype).float()), f"the master of {name} says nothing more"


def make_twins(
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    kind: str = "fp32",
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    device: torch.device | str = "cpu",
    policy: OffloadPolicy | None = SMALL,
) -> Twins:
    """Both sides from the same low-precision weights, with masters; not offloaded if ``policy`` is ``None``.

    ``dtype=None`` leaves the model's own dtypes.
    """
    torch.manual_seed(0)
    device = torch.device(device)
    model = make_model().to(device).to(dtype)
    twins = twins_of(copy.deepcopy(model).float(), model, make_optimizer, kind, dtype or torch.float32)
    twins.add_masters()
    if policy is not None:
        twins.attach(policy)
    return twins


def twins_of(
    full: nn.Module, low: nn.Module, make_optimizer: MakeOptimizer, kind: str, batch_dtype: torch.dtype
) -> Twins:
    runs = []
    for model in (full, low):
        device = next(iter(model.parameters())).device
        runs.append(Run(model, make_optimizer(model.parameters()), device, batch_dtype))
        runs[-1].parts["start"] = {name: local(param).detach().cpu().clone() for name, param in runs[-1].params.items()}
    return Twins(*runs, kind)


# What the formats mean -----------------------------------------------------------------------------------------------


def master_of(kind: str, param: Tensor, kept: Tensor) -> Tensor:
    """The fp32 master in the order of ``param``'s memory, put together with integers only."""
    if kind == "fp32":
        return kept
    bits, lower = (value.view(torch.int16).to(torch.int64) for value in (param, kept))
    master = (((bits & 0xFFFF) - (lower < 0).to(torch.int64)) << 16) | (lower & 0xFFFF)
    return (((master & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32)


def rounded(kind: str, master: Tensor, dtype: torch.dtype) -> Tensor:
    """What the parameter must be: to nearest, where ties go to even, or for remainders away from zero."""
    if kind == "fp32":
        return master.to(dtype)
    return ((master.view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
