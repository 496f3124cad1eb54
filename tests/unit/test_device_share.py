"""How ``device_bytes`` is divided between what passes through the device and what stays. Pure."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_offload import OffloadPolicy
from fsdp_offload.plan.device_share import DeviceShare, device_share

KIB = 1024
OVERLAPS = ("step", "forward", "iteration")


def share_of(overlap: Any, device_buckets: Any, *, elementwise: bool = True) -> DeviceShare:
    device_bytes: Any = "auto" if device_buckets == "auto" else int(device_buckets * KIB)
    policy = OffloadPolicy(overlap=overlap, device_bytes=device_bytes, bucket_bytes=KIB)
    return device_share(policy, elementwise=elementwise)


def test_in_the_step_four_buckets_pass_and_the_rest_stays() -> None:
    assert share_of("step", "auto") == DeviceShare(passing_bytes=4 * KIB)
    assert share_of("step", 2) == DeviceShare(passing_bytes=2 * KIB)
    assert share_of("step", 4) == DeviceShare(passing_bytes=4 * KIB)
    assert share_of("step", 20.5) == DeviceShare(passing_bytes=4 * KIB, staying_bytes=16 * KIB + 512)
    assert share_of("step", 20, elementwise=False) == share_of("step", 20)


@pytest.mark.parametrize("overlap", ["forward", "iteration"])
def test_beside_compute_both_are_learnt(overlap: str) -> None:
    assert share_of(overlap, "auto") == DeviceShare(
        passing_bytes=5 * KIB, passing_is_learnt=True, staying_is_learnt=True
    )
    assert share_of(overlap, 7) == DeviceShare(passing_bytes=7 * KIB, staying_is_learnt=True, staying_limit_bytes=0)
    assert share_of(overlap, 30) == DeviceShare(
        passing_bytes=10 * KIB, staying_is_learnt=True, staying_limit_bytes=20 * KIB
    )


@pytest.mark.parametrize("overlap", ["forward", "iteration"])
def test_where_nothing_is_learnt_of_what_stays_the_rest_stays(overlap: str) -> None:
    assert share_of(overlap, "auto", elementwise=False) == DeviceShare(passing_bytes=5 * KIB, passing_is_learnt=True)
    assert share_of(overlap, 30, elementwise=False) == DeviceShare(passing_bytes=10 * KIB, staying_bytes=20 * KIB)


@given(st.sampled_from(OVERLAPS), st.integers(2 * KIB, 100 * KIB), st.booleans())
def test_a_number_is_never_exceeded_and_used_up(overlap: Any, device_bytes: int, elementwise: bool) -> None:
    policy = OffloadPolicy(overlap=overlap, device_bytes=device_bytes, bucket_bytes=KIB)
    share = device_share(policy, elementwise=elementwise)
    most_stays_bytes = share.staying_limit_bytes if share.staying_is_learnt else share.staying_bytes
    assert most_stays_bytes is not None
    assert share.passing_bytes + most_stays_bytes == device_bytes
    assert not share.passing_is_learnt
    assert share.passing_bytes - KIB == share.ring_bytes(KIB) >= KIB


@pytest.mark.parametrize(
    ("buckets", "window_bytes", "staying_bytes"),
    [(2, 3000, 0), (6, 4 * KIB, 0), (9, 5148, 6 * KIB - 5148), (40, 5148, 30 * KIB - 5148)],
)
def test_of_what_parameters_on_the_host_leave_to_the_window_the_rest_stays(
    buckets: int, window_bytes: int, staying_bytes: int
) -> None:
    """The window takes the largest group and twice the second, 7,096 bytes, but no more than all groups together."""
    groups = [100, 3000, 2048]
    policy = OffloadPolicy(parameters=True, overlap="iteration", device_bytes=buckets * KIB, bucket_bytes=KIB)
    share = device_share(policy, elementwise=True, group_bytes=groups)
    assert (share.window_bytes(groups), share.staying_bytes) == (window_bytes, staying_bytes)
    assert share.passing_bytes + staying_bytes + window_bytes <= max(buckets * KIB, share.passing_bytes + 3000)
    assert not share.staying_is_learnt


def test_parameters_on_the_host_have_a_window_without_a_limit_too() -> None:
    auto = device_share(OffloadPolicy(parameters=True, overlap="iteration"), elementwise=True)
    assert auto.staying_is_learnt
    assert auto.window_bytes([5, 9, 7]) == 21
    assert auto.window_bytes([5, 9]) == 14
    assert auto.window_bytes([]) == 0
