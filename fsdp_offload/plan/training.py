"""The training that a plan is for: the side of it that the user says, checked when it is made."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..policy import MasterKind
from .trace import Checkpointing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

OPTIMIZERS = {
    "adamw": 2,
    "adam": 2,
    "amsgrad": 3,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd-momentum": 1,
    "sgd": 0,
}
"""Tensors of state that have the parameter's shape and dtype."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training run.

    Attributes:
        ranks: devices in all.
        replicas: of these, the replicas of ``HSDP``; each group of ``ranks / replicas`` shards the model.
        tokens_per_step: of all ranks together.
        sequence_length: tokens of one sequence.
        micro_batches: forwards and backwards before one ``step()``.
        dtype: of the sharded parameters, which is also that of their gradients and of the optimizer's state.
        compute_dtype: of the gathered parameters, as ``MixedPrecisionPolicy.param_dtype``.
        optimizer: a name of ``OPTIMIZERS``.
        master_weights: as ``OffloadPolicy.master_weights``.
        checkpointing: ``"full"`` recomputes every block in the backward.
        clip: whether gradients are clipped by their global norm, wherever the policy allows it.
        other_device_bytes: what else is on each device all the time.
    """

    ranks: int = 1
    replicas: int = 1
    tokens_per_step: int
    sequence_length: int = 4096
    micro_batches: int = 1
    dtype: Literal["fp32", "bf16"] = "fp32"
    compute_dtype: Literal["fp32", "bf16"] = "bf16"
    optimizer: str = "adamw"
    master_weights: MasterKind = "none"
    checkpointing: Checkpointing = "none"
    clip: bool = True
    other_device_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "tokens_per_step", "sequence_length", "micro_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.ranks % self.replicas:
            raise ValueError(
                f"an impossible mesh: {self.ranks} ranks cannot be {self.replicas} replicas of equally many shards"
            )
        unit = self.ranks * self.sequence_length * self.micro_batches
        if self.tokens_per_step % unit:
            several = max(unit, round(self.tokens_per_step / unit) * unit)
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a multiple of ranks × sequence_length × micro_batches "
                f"= {unit}, so the ranks cannot have equally many sequences; {several} is"
            )
        for name, allowed in (
            ("dtype", DTYPES),
            ("compute_dtype", DTYPES),
            ("optimizer", OPTIMIZERS),
            ("master_weights", get_args(MasterKind)),
            ("checkpointing", get_args(Checkpointing)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.ranks // self.replicas

    @property
    def sequences(self) -> int:
        """Sequences of one rank in one micro-batch."""
        return self.tokens_per_step // (self.ranks * self.sequence_length * self.micro_batches)

    def state_itemsizes(self) -> tuple[int, ...]:
        """Bytes for each element of a parameter, of each tensor of state."""
        if self.master_weights == "none" or self.dtype == "fp32":
            return (DTYPES[self.dtype].itemsize,) * OPTIMIZERS[self.optimizer]
        return (*(4,) * OPTIMIZERS[self.optimizer], 4 if self.master_weights == "fp32" else 2)
