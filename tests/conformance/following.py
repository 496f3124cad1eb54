"""A copy of a run's weights, to which deltas are applied: it is what the weights are, bit by bit."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload.checkpoint.chunks import Chunk, chunks_of
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.fsdp.dtensor import canonical_fqn
from fsdp_offload.listeners import deltas, weight_deltas
from tests.parity import local

seen: Counter[str] = Counter()
"""What there has been of deltas, in elements, and of steps."""


class Followed:
    """The weights of an offloaded run, and a whole copy of them, of which this rank follows its part."""

    def __init__(self, run: Any) -> None:
        self.engine: Any = engine_of(run.optimizer)
        self.deltas = weight_deltas(run.optimizer)
        self.is_mixed = run.case.dtype == "mixed"
        self.params = {canonical_fqn(run.model, name): param for name, param in run.named.items()}
        self.copies: dict[str, Tensor] = {}
        self.at_last = 0
        for name, param in self.params.items():
            self.copies[name] = torch.zeros(param.shape, dtype=self.used(param))
            for chunk, now in self.parts(param):
                chunk.in_global(self.copies[name]).copy_(now)

    def used(self, param: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.is_mixed else param.dtype

    def parts(self, param: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        now = local(param.detach()).to("cpu", self.used(param)).contiguous()
        for chunk in chunks_of(param).chunks:
            if chunk.numel:
                yield chunk, chunk.in_local(now)

    def follow(self) -> None:
        """Apply what has changed, and compare."""
        is_next, self.at_last = self.engine.core.steps == self.at_last + 1, self.engine.core.steps
        for name, indices, values, dense in self.deltas:
            seen["dense" if dense else "sparse"] += len(indices)
            flat = self.copies[name].view(-1)
            assert values.dtype == flat.dtype
            if is_next and not dense:  # nothing that has not changed
                assert not (_bits(flat[indices]) == _bits(values)).any(), name
            assert len(indices.unique()) == len(indices)
            flat[indices] = values
        for name, param in self.params.items():
            for chunk, now in self.parts(param):
                differ = _bits(chunk.in_global(self.copies[name])) != _bits(now)
                assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} elements are missing"
            seen["elements"] += param.numel()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def of_small_pieces(patch: pytest.MonkeyPatch) -> None:
    """Have deltas in several pieces of a parameter, and those of small steps one by one."""
    patch.setattr(deltas, "PIECE_NUMEL", 192)
    patch.setattr(deltas, "_DENSE_NUMEL", 100)
    patch.setattr(deltas, "DENSE_ABOVE", 1.0)
