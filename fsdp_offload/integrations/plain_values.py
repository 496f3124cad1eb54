"""Policies from plain values, for configurations, and reports as plain values, for loggers of frameworks."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..api.attach import is_offloaded, offload_optimizer, offload_report
from ..api.wrapped import attachment_of, optimizers_in
from ..policy import OffloadPolicy, as_policy, check_is
from ..state.layout import params_of

_PREFIX = "FSDP_OFFLOAD_"
_OF_TESTS = "FSDP_OFFLOAD_TEST_"  # variables of this project's tests


def policy_from(values: OffloadPolicy | Mapping[str, Any] | None = None) -> OffloadPolicy:
    """Make a policy from a dict, as YAML or a command line gives it, and from environment variables for other fields.

    ``FSDP_OFFLOAD_DEVICE_BYTES=auto`` sets ``device_bytes``; empty variables are ignored. A policy is returned
    unchanged.

    Raises:
        TypeError, ValueError: a field, in ``values`` or the environment, is unknown, or does not accept its value.
    """
    if not isinstance(values, Mapping | None):
        return as_policy(values)
    said = {
        name.removeprefix(_PREFIX).lower(): text
        for name, text in os.environ.items()
        if name.startswith(_PREFIX) and not name.startswith(_OF_TESTS) and text
    }
    asked = dict(values or {})
    try:
        return as_policy({name: _value(name, value) for name, value in (said | asked).items()})
    except (TypeError, ValueError) as error:
        used = ", ".join(_PREFIX + name.upper() for name in said if name not in asked)
        raise type(error)(f"{error} (from the environment: {used})" if used else str(error)) from None


def offload(optimizer: Optimizer, model: nn.Module | None, policy: OffloadPolicy | Mapping[str, Any] | None) -> None:
    """Offload from a framework's script; a second call without a policy keeps the first one's."""
    optimizers_in(optimizer, "offload")
    chosen = None if policy is None and is_offloaded(optimizer) else policy_from(policy)
    offload_optimizer(optimizer, model=model, policy=chosen, exist_ok=True)


def _value(name: str, value: Any) -> Any:
    """Convert ``value`` to the field's type without changing its meaning: from text, 1 for true, 1e9 for bytes."""
    default = getattr(OffloadPolicy, name, None)
    if isinstance(value, str):
        value = value.strip().lower()
        with suppress(ValueError):
            value = json.loads({"none": "null"}.get(value, value))
    if (isinstance(default, bool) or name == "pin_memory") and value in (0, 1):
        return bool(value)
    return int(value) if name.endswith("_bytes") and isinstance(value, float) and value.is_integer() else value


def model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    """Find the model that has all of the optimizer's parameters."""
    line = "model_of(optimizer, [model])"
    check_is(optimizer, Optimizer, "model_of: expected a torch.optim.Optimizer first", line)
    check_is(models, list | tuple, "model_of: expected a list of models", line)
    params = set(params_of(optimizer))
    return next((model for model in models if params <= set(model.parameters())), None)


def metrics_of(optimizer: Optimizer, prefix: str = "offload/") -> dict[str, float]:
    """Return :meth:`OffloadReport.metrics` with ``prefix``, for a logger; empty if not offloaded. Wait for the step."""
    if not all(attachment_of(one) is not None for one in optimizers_in(optimizer, "metrics_of")):
        return {}
    check_is(prefix, str, "metrics_of: the prefix must be text", "metrics_of(optimizer, 'offload/')")
    return {prefix + name: value for name, value in offload_report(optimizer).metrics().items()}


def metrics_of_each(optimizers: Sequence[Optimizer], numbered: str) -> dict[str, float]:
    """Return the metrics of several optimizers, with each one's number in the prefix; a single one has no number."""
    line = 'metrics_of_each([optimizer], "optimizer{}/")'
    check_is(optimizers, list | tuple, "metrics_of_each: expected a list of optimizers", line)
    if "{}" not in str(numbered):
        raise TypeError(f"metrics_of_each: the prefix needs {{}} for the number, got {numbered!r}. Write {line}.")
    found: dict[str, float] = {}
    for number, optimizer in enumerate(optimizers):
        found |= metrics_of(optimizer, numbered.replace("{}", str(number)) if len(optimizers) > 1 else "offload/")
    return found
