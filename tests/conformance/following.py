"""A run whose weights are followed by deltas: a copy to which they are applied is what the weights are, bit by bit."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload.checkpoint.chunks import Chunk, chunks_of
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.fsdp.dtensor import canonical_fqn
from fsdp_offload.listeners import deltas, weight_deltas
from tests.conformance import axes, oracle
from tests.conformance.programs import HABITS
from tests.parity import local

SERVED: dict[str, tuple[Any, ...]] = {
    "layout": tuple(one for one in axes.AXES["layout"] if one != "unsharded"),
    "optimizer": tuple(one for one in axes.AXES["optimizer"] if one != "unlisted"),
    "host": (0.0,),
}
"""What :func:`weight_deltas` refuses is left out: no model, a class that moves as a whole, updates on the CPU."""

seen: Counter[str] = Counter()
"""What there has been of deltas, in elements, and of steps."""


class Followed(oracle.Loop):
    """The offloaded run, and a whole copy of its weights, of which this rank follows its part."""

    def attach(self) -> None:
        super().attach()
        self.deltas = weight_deltas(self.optimizer)
        self.names = {canonical_fqn(self.model, name): param for name, param in self.named.items()}
        self.copies: dict[str, Tensor] = {}
        self.at_last = 0
        for name, param in self.names.items():
            self.copies[name] = torch.zeros(param.shape, dtype=self.used(param))
            for chunk, now in self.parts(param):
                chunk.in_global(self.copies[name]).copy_(now)

    def used(self, param: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.case.dtype == "mixed" else param.dtype

    def parts(self, param: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        now = local(param.detach()).to("cpu", self.used(param)).contiguous()
        for chunk in chunks_of(param).chunks:
            if chunk.numel:
                yield chunk, chunk.in_local(now)

    def follow(self) -> None:
        """Apply what has changed, and compare."""
        engine: Any = engine_of(self.optimizer)
        is_next, self.at_last = engine.core.steps == self.at_last + 1, engine.core.steps
        for name, indices, values, dense in self.deltas:
            seen["dense" if dense else "sparse"] += len(indices)
            flat = self.copies[name].view(-1)
            assert values.dtype == flat.dtype
            if is_next and not dense:  # nothing that has not changed
                assert not (_bits(flat[indices]) == _bits(values)).any(), name
            assert len(indices.unique()) == len(indices)
            flat[indices] = values
        for name, param in self.names.items():
            for chunk, now in self.parts(param):
                differ = _bits(chunk.in_global(self.copies[name])) != _bits(now)
                assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} elements are missing"
            seen["elements"] += param.numel()

    def finish_saving(self) -> None:
        super().finish_saving()
        guesses = engine_of(self.optimizer)
        if guesses is not None:
            seen["taken back"] += guesses.guesses.rolled_back


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


@contextmanager
def followed(lr: float) -> Iterator[dict[str, Callable[[oracle.Loop, int], None]]]:
    """Within it, the oracle's runs are followed by the habits that this returns, and train with this learning rate."""

    def following(habit: Callable[[oracle.Loop, int], None]) -> Callable[[oracle.Loop, int], None]:
        def run(loop: oracle.Loop, at: int) -> None:
            habit(loop, at)
            if isinstance(loop, Followed) and (at * 7 + len(loop.case.program)) % 3:  # several steps in between, too
                loop.follow()

        return run

    made = axes.Made.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "Loop", Followed)
        patch.setattr(axes.Made, "__call__", lambda self, params, **more: made(self, params, **{"lr": lr, **more}))
        patch.setattr(deltas, "PIECE_NUMEL", 192)
        patch.setattr(deltas, "_DENSE_NUMEL", 100)
        patch.setattr(deltas, "DENSE_ABOVE", 1.0)  # else most of these small steps would be handed out whole
        yield {name: following(habit) for name, habit in HABITS.items()}
