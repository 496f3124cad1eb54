"""The policies that a plan compares, their names, and the code that makes them. Pure."""

import json
from dataclasses import fields

from ..core.buckets import JOINED_BYTES, LARGEST_BYTES, PASSING
from ..policy import MIB, OffloadPolicy
from .training import Masters


def candidates(state_bytes: int, group_bytes: int = 0) -> tuple[OffloadPolicy, ...]:
    """List the policies to compare for so much state, and for so many bytes of parameters in a usual group.

    Each with the least ``device_bytes`` that moves state in few operations, and with "auto".
    """
    bucket_bytes = min(LARGEST_BYTES, max(JOINED_BYTES, state_bytes // 64 // MIB * MIB))
    state, both = ((PASSING + 1) * nbytes for nbytes in (bucket_bytes, bucket_bytes + -(-group_bytes // MIB) * MIB))
    return (
        OffloadPolicy(),
        OffloadPolicy(overlap="forward", device_bytes=state),
        OffloadPolicy(overlap="forward"),
        OffloadPolicy(overlap="iteration", device_bytes=state),
        OffloadPolicy(overlap="iteration"),
        OffloadPolicy(parameters=True, device_bytes=both),
        OffloadPolicy(parameters=True),
        OffloadPolicy(parameters=True, overlap="iteration", device_bytes=both),
        OffloadPolicy(parameters=True, overlap="iteration"),
    )


def name_of(policy: OffloadPolicy | None) -> str:
    """Name it for tables."""
    if policy is None:
        return "no offload"
    size = [] if policy.device_bytes == "auto" else [f"{policy.device_bytes // MIB} MiB"]
    return ", ".join([policy.overlap, *["parameters"] * policy.parameters, *size])


def lines_to_write(policy: OffloadPolicy | None, masters: Masters = "none") -> str:
    """The code of a policy; no offload needs none, unless masters are wanted."""
    lines = [] if masters == "none" else [f'add_masters(optimizer, "{masters}")']
    if policy is not None:
        texts = []
        for name, value in ((one.name, getattr(policy, one.name)) for one in fields(policy)):
            in_mib = name.endswith("bytes") and isinstance(value, int) and value % MIB == 0
            text = f"{value // MIB} << 20" if in_mib else json.dumps(value) if isinstance(value, str) else str(value)
            if value != getattr(OffloadPolicy, name):
                texts.append(f"{name}={text}")
        said = f", policy=OffloadPolicy({', '.join(texts)})" if texts else ""
        lines.append(f"offload_optimizer(optimizer, model=model{said})")
    return "\n".join(lines)
