"""How ``OffloadPolicy.device_bytes`` is divided between state that passes through the device and state that stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..policy import MIB, OffloadPolicy

JOINED_BYTES = 64 * MIB
"""Of a bucket whose size follows the groups of ``fully_shard``."""

_BUCKETS_IN_STEP = 4
"""Three in the ring let loads, updates and stores overlap; room for a fourth is kept for state under creation."""

_BUCKETS_BESIDE_COMPUTE = 10
"""As far ahead as loads are of use beside a forward or a backward; what else there is hides more as it stays."""

_BUCKETS_AT_FIRST = 5
"""Before it is known how much memory training leaves."""


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Device memory for offloaded state.

    Attributes:
        passing_bytes: through which buckets are loaded, updated and stored. One bucket's worth of it is not taken: it
            is for state under creation.
        passing_is_learnt: ``passing_bytes`` is only where it begins; it then comes and goes with the room that training
            leaves.
        staying_bytes: whole parameters' state that never leaves the device.
        staying_is_learnt: ``staying_bytes`` is only where it begins; it grows by what has to stay for the transfers of
            the rest to hide.
        staying_limit_bytes: the most that it may grow to. ``None``: as much as training leaves.
        window_limit_bytes: the most for parameters that live on the host, between a gather and the next, beside one
            group that needs more. ``None``: as much as is of use.
    """

    passing_bytes: int
    passing_is_learnt: bool = False
    staying_bytes: int = 0
    staying_is_learnt: bool = False
    staying_limit_bytes: int | None = None
    window_limit_bytes: int | None = None

    def window_bytes(self, group_bytes: Sequence[int]) -> int:
        """Device bytes for parameters that live on the host, when the groups that are gathered take so much.

        The largest, and two more, so that loads run ahead by one; the largest at least.
        """
        *_, second, largest = [0, 0, *sorted(group_bytes)]
        wanted_bytes = min(largest + 2 * second, sum(group_bytes))
        limit_bytes = wanted_bytes if self.window_limit_bytes is None else self.window_limit_bytes
        return max(largest, min(wanted_bytes, limit_bytes))

    def ring_bytes(self, bucket_bytes: int) -> int:
        """Device bytes through which buckets pass: without the room for state under creation."""
        return self.passing_bytes - bucket_bytes


def planned_bucket_bytes(policy: OffloadPolicy) -> int:
    """Return the size of buckets that a plan reckons with."""
    return JOINED_BYTES if policy.bucket_bytes == "auto" else policy.bucket_bytes


def device_share(policy: OffloadPolicy, *, elementwise: bool, group_bytes: Sequence[int] = ()) -> DeviceShare:
    """Divide what a policy allows on the device.

    Args:
        policy: in force.
        elementwise: whether the optimizer works element by element; for others, nothing that stays is learnt.
        group_bytes: of the parameters that live on the host, by the groups that are gathered.
    """
    bucket_bytes = planned_bucket_bytes(policy)
    buckets = _BUCKETS_BESIDE_COMPUTE if policy.runs_on_into_forward else _BUCKETS_IN_STEP
    if policy.device_bytes != "auto" and policy.parameters:
        passing_bytes = max(2 * bucket_bytes, min(policy.device_bytes // 3, buckets * bucket_bytes))
        # A group that stays saves 16 bytes of the link for 12 of the device; the one with which a forward begins saves
        # a load in the window, and the wait for all stores before it.
        share = DeviceShare(passing_bytes=passing_bytes, window_limit_bytes=policy.device_bytes - passing_bytes)
        rest_bytes = policy.device_bytes - passing_bytes - share.window_bytes(group_bytes)
        return replace(share, staying_bytes=max(0, rest_bytes))
    if policy.device_bytes != "auto":
        passing_bytes = min(policy.device_bytes, buckets * bucket_bytes)
        rest_bytes = policy.device_bytes - passing_bytes
        if policy.runs_on_into_forward and elementwise:
            return DeviceShare(passing_bytes=passing_bytes, staying_is_learnt=True, staying_limit_bytes=rest_bytes)
        return DeviceShare(passing_bytes=passing_bytes, staying_bytes=rest_bytes)
    if policy.runs_on_into_forward:
        begin_bytes = _BUCKETS_AT_FIRST * bucket_bytes
        return DeviceShare(passing_bytes=begin_bytes, passing_is_learnt=True, staying_is_learnt=elementwise)
    return DeviceShare(passing_bytes=buckets * bucket_bytes)
