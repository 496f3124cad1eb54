"""``OffloadPolicy``: plain data that is right once it exists."""

import dataclasses
import pickle

import pytest

from fsdp_offload import OffloadPolicy

MIB = 1 << 20


def test_the_default_lets_loads_updates_and_stores_overlap() -> None:
    policy = OffloadPolicy()
    assert policy.ring_bytes >= 3 * policy.bucket_bytes
    assert policy.ring_bytes + policy.bucket_bytes == policy.staging_bytes
    assert (policy.resident_bytes, policy.pin_memory, policy.host_limit_bytes) == (0, None, None)


def test_it_cannot_be_changed_and_has_no_positional_arguments() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadPolicy().bucket_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        OffloadPolicy(1)  # type: ignore[misc]


def test_equal_policies_are_equal_and_travel_between_processes() -> None:
    policy = OffloadPolicy(bucket_bytes=MIB, staging_bytes=4 * MIB, serial=True)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(dataclasses.replace(policy))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("staging_bytes", -1),
        ("staging_bytes", 0),
        ("bucket_bytes", -64),
        ("bucket_bytes", 0),
        ("bucket_bytes", 100),
        ("resident_bytes", -1),
        ("host_limit_bytes", -1),
    ],
)
def test_a_negative_or_too_small_size_is_an_error_that_names_it(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least \d+ bytes, got {value}$"):
        OffloadPolicy(**{name: value})


@pytest.mark.parametrize("name", ["staging_bytes", "bucket_bytes", "resident_bytes", "host_limit_bytes"])
@pytest.mark.parametrize("value", [1e9, "256MiB", True])
def test_a_size_is_an_integer(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer number of bytes.*, got {value!r}"):
        OffloadPolicy(**{name: value})


@pytest.mark.parametrize("name", ["staging_bytes", "resident_bytes"])
def test_a_word_that_is_not_auto_is_told_of_auto(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer number of bytes or 'auto', got 'Auto'"):
        OffloadPolicy(**{name: "Auto"}, prefetch="backward")


def test_staging_that_does_not_hold_two_buckets_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="two buckets") as error:
        OffloadPolicy(staging_bytes=100 * MIB, bucket_bytes=64 * MIB)
    for part in (100 * MIB, 64 * MIB, f"Raise staging_bytes to {128 * MIB}", "lower bucket_bytes"):
        assert str(part) in str(error.value)
    assert OffloadPolicy(staging_bytes=128 * MIB, bucket_bytes=64 * MIB).ring_bytes == 64 * MIB
