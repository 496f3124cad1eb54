"""Policies from plain values, and reports as plain values: what configurations and loggers of frameworks deal in."""

import ast
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..api.offload import is_offloaded, offload_report
from ..policy import OffloadPolicy

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "": None}


def policy_from(values: OffloadPolicy | Mapping[str, Any] | None = None) -> OffloadPolicy:
    """A policy from a dict as YAML or a command line gives it, and from the environment for what is not in it.

    ``FSDP_OFFLOAD_STAGING_BYTES=auto`` is the field ``staging_bytes``. A policy is returned as it is.

    Raises:
        ValueError: there is no field of that name, or it does not take that value.
    """
    if isinstance(values, OffloadPolicy):
        return values
    names = [field.name for field in dataclasses.fields(OffloadPolicy)]
    variables = {name: f"FSDP_OFFLOAD_{name.upper()}" for name in names}
    given = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    given.update(values or {})
    unknown = given.keys() - set(names)
    if unknown:
        raise ValueError(f"OffloadPolicy has no {', '.join(sorted(unknown))}; it has {', '.join(names)}.")
    return OffloadPolicy(**{name: _value(text) for name, text in given.items()})


def _value(text: object) -> Any:
    if not isinstance(text, str):
        return text
    if text.strip().lower() in _WORDS:
        return _WORDS[text.strip().lower()]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def metrics_of(optimizer: Optimizer, prefix: str = "offload/") -> dict[str, float]:
    """Numbers of the report, for a logger; empty where nothing is offloaded. Waits for the last step.

    Bytes by place, what the last step waited for (``exposed_ms``), and the share of its bound that was reached.
    """
    if not is_offloaded(optimizer):
        return {}
    report = offload_report(optimizer)
    took_ms = report.iteration_ms or report.step_ms
    numbers: dict[str, float] = {
        "host_bytes": report.host_bytes,
        "resident_bytes": report.resident_state_bytes,
        "staging_bytes": report.ring_bytes,
        "step_ms": report.step_ms,
        "exposed_ms": report.stalled_ms if report.iteration_ms else report.exposed_ms,
    }
    if report.bound_ms and took_ms:
        numbers["share_of_bound"] = report.bound_ms / took_ms
    return {prefix + name: value for name, value in numbers.items()}
