"""Settings of the training that a plan is for, checked when they are made."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..policy import check_choices, tells

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Masters = Literal["none", "remainder", "fp32"]
"""Argument ``kind`` of ``add_masters``."""

OPTIMIZERS = {"adamw": 2, "adam": 2, "amsgrad": 3, "rmsprop": 1, "adagrad": 1, "sgd-momentum": 1, "sgd": 0}
"""Tensors of state that have the parameter's shape and dtype."""


@tells("plan(model, tokens_per_step=16384, ranks=8)")
@dataclass(frozen=True, kw_only=True)
class Training:
    """One training run."""

    ranks: int = 1
    replicas: int = 1  # of the ranks, as in HSDP: each group of ranks / replicas shards the model
    expert_parallel: int = 1  # shards among which experts are divided
    tokens_per_step: int  # of all ranks together
    sequence_length: int = 4096
    micro_batches: int = 1
    dtype: Literal["fp32", "bf16"] = "fp32"  # of the sharded parameters, their gradients and the optimizer's state
    compute_dtype: Literal["fp32", "bf16"] = "bf16"  # of gathered parameters: MixedPrecisionPolicy.param_dtype
    optimizer: str = "adamw"
    masters: Masters = "none"
    clip: bool = True  # gradients are clipped by their global norm
    deterministic: bool = False  # torch.use_deterministic_algorithms
    other_device_bytes: int = 0  # other memory that is in use on each device all the time

    def __post_init__(self) -> None:
        names = ("ranks", "replicas", "expert_parallel", "tokens_per_step", "sequence_length", "micro_batches")
        for name in (*names, "other_device_bytes"):
            value, least = getattr(self, name), 0 if name.endswith("_bytes") else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                wanted = "a positive integer" if least else "0 or more bytes"
                raise ValueError(f"{name} must be {wanted}, got {value!r}")
        check_choices("Training", clip=self.clip, deterministic=self.deterministic)
        choices: dict[str, Collection[str]] = {"dtype": DTYPES, "compute_dtype": DTYPES, "optimizer": OPTIMIZERS}
        choices["masters"] = get_args(Masters)
        for name, values in choices.items():
            if getattr(self, name) not in list(values):
                raise ValueError(f"{name} must be one of {', '.join(values)}; got {getattr(self, name)!r:.60}")
        if self.masters != "none" and self.dtype == "fp32":
            raise ValueError(f"masters={self.masters!r} are for dtype='bf16': fp32 parameters need none")
        if self.ranks % self.replicas:
            raise ValueError(f"{self.ranks} ranks cannot be {self.replicas} replicas of equally many shards")
        if self.shards % self.expert_parallel:
            raise ValueError(f"expert_parallel={self.expert_parallel} must divide the {self.shards} ranks of a replica")
        unit = self.ranks * self.sequence_length * self.micro_batches
        if self.tokens_per_step % unit:
            several = max(unit, round(self.tokens_per_step / unit) * unit)
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a multiple of ranks × sequence_length × micro_batches "
                f"= {unit}, so the ranks cannot have equally many sequences; {several} is"
            )

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.ranks // self.replicas

    @property
    def sequences(self) -> int:
        """Sequences of one rank in one micro-batch."""
        return self.tokens_per_step // (self.ranks * self.sequence_length * self.micro_batches)

    def state_itemsizes(self) -> tuple[int, ...]:
        """Return the bytes of each tensor of state for one element of a parameter."""
        count = OPTIMIZERS[self.optimizer]
        if self.masters == "none" or self.dtype == "fp32":
            return (DTYPES[self.dtype].itemsize,) * count
        return (*(4,) * count, 4 if self.masters == "fp32" else 2)
