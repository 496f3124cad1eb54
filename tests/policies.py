"""Policies that say themselves how much passes through the device and how much stays: for tests, not for users."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from fsdp_offload import OffloadPolicy
from fsdp_offload.plan.device_share import DeviceShare, device_share

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class DividedPolicy(OffloadPolicy):
    """A policy whose ``share`` is in force, whatever its ``device_bytes`` are."""

    share: DeviceShare


@device_share.register
def _(policy: DividedPolicy, *, elementwise: bool, group_bytes: Sequence[int] = ()) -> DeviceShare:
    return policy.share


def with_share(
    policy: OffloadPolicy | None = None,
    /,
    *,
    passing: int | Auto | None = None,
    staying: int | Auto | None = None,
    staying_limit_bytes: int | None = None,
    **changed: Any,
) -> OffloadPolicy:
    """``policy``, or the default, with these fields and this share of the device.

    Args:
        policy: what is not said otherwise.
        passing: bytes through which buckets pass, room for one under creation included, or ``"auto"``: learnt. By
            default those of ``policy``.
        staying: bytes of state that stays, or ``"auto"``: learnt. By default those of ``policy``, or none.
        staying_limit_bytes: the most that ``staying="auto"`` may choose.
        changed: other fields.
    """
    given = {} if policy is None else {one.name: getattr(policy, one.name) for one in fields(OffloadPolicy)}
    plain = OffloadPolicy(**{**given, **changed})
    share = policy.share if isinstance(policy, DividedPolicy) else DeviceShare(passing_bytes=4 * plain.bucket_bytes)
    if passing is not None:
        passing_bytes = 5 * plain.bucket_bytes if passing == "auto" else passing
        share = replace(share, passing_bytes=passing_bytes, passing_is_learnt=passing == "auto")
    if staying is not None:
        staying_bytes = 0 if staying == "auto" else staying
        share = replace(share, staying_bytes=staying_bytes, staying_is_learnt=staying == "auto")
    if staying_limit_bytes is not None:
        share = replace(share, staying_limit_bytes=staying_limit_bytes)
    return DividedPolicy(**{one.name: getattr(plain, one.name) for one in fields(plain)}, share=share)
