"""Policies in the terms of tests: bytes that pass through the device, and bytes that are kept there."""

from dataclasses import fields, replace
from typing import Any, Literal

from fsdp_offload import OffloadPolicy


def with_share(
    policy: OffloadPolicy | None = None,
    /,
    *,
    passing: int | Literal["auto"] | None = None,
    staying: int = 0,
    **changed: Any,
) -> OffloadPolicy:
    """``policy``, or the default, with these fields, and ``device_bytes`` for so much.

    Args:
        policy: what is not said otherwise.
        passing: bytes through which buckets pass, or ``"auto"``: as few as do well. By default, four buckets.
        staying: bytes beside these.
        changed: other fields.
    """
    given = {} if policy is None else {one.name: getattr(policy, one.name) for one in fields(OffloadPolicy)}
    plain = OffloadPolicy(**{**given, **changed})
    if passing == "auto":
        return replace(plain, device_bytes="auto")
    bucket_bytes = 64 << 20 if plain.bucket_bytes == "auto" else plain.bucket_bytes
    passing = max(2 * bucket_bytes, passing or 4 * bucket_bytes)
    return replace(plain, device_bytes=passing + staying)
