"""What hooks on a model still know when the optimizer that they were for is gone."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .fully_shard import abandon_backward, runs_in_backward, sharding_groups
from .spent_gradient import is_spent, lift_zeroed


class LeftBehind:
    """The hooks on one model without their optimizer.

    Attributes:
        is_half_updated: a backward had updated parameters, and there was no ``step()``.
    """

    def __init__(self, model: "weakref.ref[nn.Module]", wait: Callable[[], None] | None) -> None:
        """Take a function that waits for updates on the CPU, which may still run."""
        self._model, self._wait = model, wait
        self.is_half_updated = False

    def call(self, method: str, *args: Any) -> None:
        """One of the hooks is called.

        Raises:
            RuntimeError: the model is about to be used, or saved, half updated.
        """
        model, refuses = self._model(), self.is_half_updated and method in _USES
        if method == "_before_load":
            self.is_half_updated = False
        if method == "_before_reduce" and model is not None:
            params = sharding_groups(model)[args[0]].params
            refuses = refuses or any(map(is_spent, params))
            lift_zeroed(params)
        if refuses:
            if model is not None and runs_in_backward():
                abandon_backward(model)
            raise RuntimeError(_DROPPED)
        if self._wait is not None:
            self._wait()  # dropped right after its last step


_USES = ("_before_gather", "_before_use", "_before_reduce", "_before_state_dict")
_DROPPED = (
    "the optimizer was dropped (garbage collected) behind a backward that had updated parameters "
    "(OffloadPolicy(overlap='iteration')), before step() or before zero_grad(): gradients are gone, and without step() "
    "the parameters are half updated. Keep the optimizer until both have been called. To go on with this model, load "
    "its weights (model.load_state_dict()) and clear its gradients (model.zero_grad())."
)
