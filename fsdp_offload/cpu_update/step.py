"""One logical step on the host: the hyperparameters, as they were when it was called, that its buckets share.

Tensors among them are copied at once, and brought to the host by the thread that updates, when it comes to the step.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device.lanes import Lane
from ..optimizers import Capabilities
from ..optimizers.shadow import Shadow
from ..optimizers.shared_values import SharedValues, instance_attributes
from ..state.shard import StateShard
from ..state.store import UserState


class HostStep:
    """Values that the buckets of one logical step share on the host; only the worker looks into them."""

    def __init__(
        self, cls: type[Optimizer], capabilities: Capabilities, optimizer: Optimizer, shards: Iterable[StateShard]
    ) -> None:
        """Note where the step starts. Tensors are copied: a scheduler may write them before they have been read."""
        attributes = instance_attributes(optimizer)
        self.values = SimpleNamespace(**{name: _cloned(value) for name, value in attributes.items()})
        self.values.param_groups = [
            {name: _cloned(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.gradient_divisor = _gradient_divisor(attributes)
        dtypes: list[set[torch.dtype]] = [set() for _ in optimizer.param_groups]
        for shard in shards:
            if shard.group >= 0:
                dtypes[shard.group].add(shard.param.dtype)
        self.pinned = [
            capabilities.host_options(group, of_group)
            for group, of_group in zip(optimizer.param_groups, dtypes, strict=True)
        ]
        self.shadow = Shadow(cls, without_hooks=nullcontext)  # those tables are the main thread's
        self.created: dict[Tensor, UserState] = {}
        self.failed = False
        self._shared: SharedValues | None = None

    def shared(self, down: Lane) -> SharedValues:
        """Hyperparameters, with tensors on the host: brought there for the first bucket."""
        if self._shared is None:
            values = self.values
            with down.running():
                values.__dict__.update({name: _on_host(value) for name, value in values.__dict__.items()})
                values.param_groups = [
                    {name: _on_host(value) for name, value in group.items()} for group in values.param_groups
                ]
            self._shared = SharedValues(values, self.pinned)  # type: ignore[arg-type]
        return self._shared


def _gradient_divisor(attributes: Mapping[str, Any]) -> Tensor | None:
    """Return the divisor of the user's gradients in a fused kernel: the scale, or one where it skips the step."""
    scale, found_inf = attributes.get("grad_scale"), attributes.get("found_inf")
    if not isinstance(scale, Tensor):
        return None
    if not isinstance(found_inf, Tensor):
        return scale.clone()
    return torch.where(found_inf.to(scale.device) == 1, torch.ones_like(scale), scale)


def _cloned(value: Any) -> Any:
    return _with_tensors(value, lambda tensor: tensor.detach().clone())


def _on_host(value: Any) -> Any:
    return _with_tensors(value, Tensor.cpu)


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to the tensors in it: betas may be a tuple of them."""
    if type(value) in (tuple, list):
        return type(value)(_with_tensors(one, change) for one in value)
    return change(value) if isinstance(value, Tensor) else value
