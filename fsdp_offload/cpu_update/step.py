"""One logical step on the host: the hyperparameters, as they were when it was called, that its buckets share.

Tensors among them are copied at once, and brought to the host by the thread that updates, when it comes to the step.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..device.lanes import Lane
from ..optimizers import Capabilities
from ..optimizers.shadow import Shadow
from ..optimizers.shared_values import SharedValues, instance_attributes
from ..state.shard import StateShard
from ..state.store import UserState


class HostStep:
    """Values that the buckets of one logical step share on the host; only the threads look into them.

    Attributes:
        gradient_divisor: of the user's gradients in a fused kernel.
        created: state that updates have made where there was none.
        failed: an update has failed, so that later ones are left out.
    """

    def __init__(
        self, cls: type[Optimizer], capabilities: Capabilities, optimizer: Optimizer, shards: Iterable[StateShard]
    ) -> None:
        """Note where the step starts. Tensors are copied: a scheduler may write them before they have been read."""
        attributes = instance_attributes(optimizer)
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._values = tree_map_only(Tensor, _copy, {**attributes, "param_groups": groups})
        self.gradient_divisor = _gradient_divisor(attributes)
        dtypes: defaultdict[int, set[torch.dtype]] = defaultdict(set)
        for shard in shards:
            dtypes[shard.group].add(shard.param.dtype)
        self._pinned = [capabilities.host_options(group, dtypes[number]) for number, group in enumerate(groups)]
        self.conventions = capabilities.conventions
        self.shadow = Shadow(cls, without_hooks=nullcontext)  # those tables are the main thread's
        self.group_count = len(groups)
        self.created: dict[Tensor, UserState] = {}
        self.failed = False
        self._shared: SharedValues | None = None

    def shared(self, down: Lane) -> SharedValues:
        """Hyperparameters, with tensors on the host: brought there for the first bucket."""
        if self._shared is None:
            with down.running():
                values = SimpleNamespace(**tree_map_only(Tensor, Tensor.cpu, self._values))
            self._shared = SharedValues(values, self._pinned)  # type: ignore[arg-type]
        return self._shared


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _gradient_divisor(attributes: Mapping[str, Any]) -> Tensor | None:
    """Return the divisor of the user's gradients in a fused kernel: the scale, or one where it skips the step."""
    scale, found_inf = attributes.get("grad_scale"), attributes.get("found_inf")
    if not isinstance(scale, Tensor):
        return None
    if not isinstance(found_inf, Tensor):
        return scale.clone()
    return torch.where(found_inf.to(scale.device) == 1, torch.ones_like(scale), scale)
