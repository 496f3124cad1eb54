"""``OffloadPolicy``: plain data that is right once it exists."""

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from fsdp_offload import OffloadPolicy

MIB = 1 << 20


def test_its_fields_and_their_defaults() -> None:
    assert {field.name: field.default for field in dataclasses.fields(OffloadPolicy)} == {
        "parameters": False,
        "overlap": "step",
        "device_bytes": "auto",
        "bucket_bytes": "auto",
        "host_fraction": 0.0,
        "snapshot_bytes": 0,
        "host_limit_bytes": None,
        "pin_memory": None,
        "serial": False,
    }


def test_every_field_is_documented() -> None:
    described = inspect.getdoc(OffloadPolicy) or ""
    missing = [field.name for field in dataclasses.fields(OffloadPolicy) if f"\n    {field.name}: " not in described]
    assert missing == []


def test_it_cannot_be_changed_and_has_no_positional_arguments() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadPolicy().bucket_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        OffloadPolicy(1)  # type: ignore[call-arg, arg-type]


def test_equal_policies_are_equal_and_travel_between_processes() -> None:
    policy = OffloadPolicy(bucket_bytes=MIB, device_bytes=4 * MIB, serial=True)
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert hash(policy) == hash(dataclasses.replace(policy))
    assert dataclasses.replace(policy, overlap="forward") == OffloadPolicy(
        bucket_bytes=MIB, device_bytes=4 * MIB, serial=True, overlap="forward"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_bytes", -1),
        ("device_bytes", 0),
        ("bucket_bytes", -64),
        ("bucket_bytes", 0),
        ("bucket_bytes", 100),
        ("snapshot_bytes", -1),
        ("host_limit_bytes", -1),
    ],
)
def test_a_negative_or_too_small_size_is_an_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least \d+ bytes, got {value}$"):
        OffloadPolicy(**{name: value})


@pytest.mark.parametrize("name", ["device_bytes", "bucket_bytes", "snapshot_bytes", "host_limit_bytes"])
@pytest.mark.parametrize("value", [1e9, "256MiB", True])
def test_a_size_is_an_integer(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer number of bytes.*, got {value!r}"):
        OffloadPolicy(**{name: value})


def test_a_word_that_is_not_auto_is_told_of_auto() -> None:
    with pytest.raises(TypeError, match="device_bytes must be an integer number of bytes or 'auto', got 'Auto'"):
        OffloadPolicy(device_bytes="Auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["backward", None, 1])
def test_a_choice_is_one_of_those_there_are(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"overlap must be one of \('step', 'forward', 'iteration'\), got {value!r}"):
        OffloadPolicy(overlap=value)


def test_a_device_that_does_not_hold_two_buckets_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="two buckets") as error:
        OffloadPolicy(device_bytes=100 * MIB, bucket_bytes=64 * MIB)
    for part in (100 * MIB, 64 * MIB, f"Write device_bytes={128 * MIB} or more", "lower bucket_bytes"):
        assert str(part) in str(error.value)
    OffloadPolicy(device_bytes=128 * MIB, bucket_bytes=64 * MIB)


def test_offloaded_parameters_are_updated_on_the_device() -> None:
    assert OffloadPolicy(parameters=True).parameters
    with pytest.raises(ValueError, match=r"parameters=True updates on the device.*host_fraction=0\.5 on the CPU"):
        OffloadPolicy(parameters=True, host_fraction=0.5)
    with pytest.raises(TypeError, match="parameters must be a bool, got 1"):
        OffloadPolicy(parameters=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="serial must be a bool, got 'yes'"):
        OffloadPolicy(serial="yes")  # type: ignore[arg-type]
