"""Which optimizers the core moves: a private switch, until it moves all of them."""

import os

import torch
from torch import nn

from ..optimizers import Capabilities
from ..policy import OffloadPolicy
from ..torch_compat.fully_shard import sharding_groups

VARIABLE = "_FSDP_OFFLOAD_CORE"


def uses_core(capabilities: Capabilities, policy: OffloadPolicy, model: nn.Module | None, device: torch.device) -> bool:
    """Return whether the core moves the state of such an optimizer; everything else is the old engine's."""
    if os.environ.get(VARIABLE, "1") != "1":
        return False
    try:
        in_groups = model is not None and any(group.params for group in sharding_groups(model))
    except NotImplementedError:  # this torch's fully_shard has other hook points
        return False
    not_yet = (
        (policy.parameters or policy.runs_on_into_forward) and not in_groups,  # refused by the old engine, in its words
        policy.updates_in_backward and not capabilities.conventions.reads_param_grad,
        device.type not in ("cpu", "cuda"),
    )
    return not any(not_yet)
