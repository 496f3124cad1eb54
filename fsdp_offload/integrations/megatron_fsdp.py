"""Megatron-FSDP: :func:`fully_shard_optimizer` in place of its own.

::

    model = fully_shard_model(model, ...)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()), policy={"device_bytes": 4 << 30})

Its own takes a step to create all state on the device. Here the optimizer is offloaded before: that step creates the
state bucket by bucket, and none of it stays. ``offload_optimizer`` behind its own works too, and pays for that step.
"""

from collections.abc import Mapping
from typing import Any

import megatron_fsdp
from torch.optim import Optimizer

from ..api.offload import offload_optimizer
from ..policy import OffloadPolicy
from .plain_values import policy_from


def fully_shard_optimizer(
    optimizer: Optimizer, *, policy: OffloadPolicy | Mapping[str, Any] | None = None, **options: Any
) -> Optimizer:
    """Offload ``optimizer``, then ``megatron_fsdp.fully_shard_optimizer(optimizer, **options)``.

    Args:
        optimizer: over the parameters of a model that ``fully_shard_model`` has returned.
        policy: a policy, or its fields as plain values; ``FSDP_OFFLOAD_...`` variables fill in the rest.
        options: of Megatron-FSDP.
    """
    offload_optimizer(optimizer, policy=policy_from(policy), exist_ok=True)
    sharded: Optimizer = megatron_fsdp.fully_shard_optimizer(optimizer, **options)
    return sharded
