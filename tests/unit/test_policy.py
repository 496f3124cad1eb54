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
        "trust_separable": False,
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


SIZES = ("device_bytes", "bucket_bytes", "snapshot_bytes", "host_limit_bytes")
SMALL = {"device_bytes": (-1, 0), "bucket_bytes": (-64, 0, 100), "snapshot_bytes": (-1,), "host_limit_bytes": (-1,)}
OVERLAPS = r"overlap must be one of \('step', 'forward', 'iteration'\), got"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: value}, ValueError, rf"{name} must be at least \d+ bytes, got {value}$")
        for name, values in SMALL.items()
        for value in values
    ),
    *(
        ({name: value}, TypeError, f"{name} must be an integer number of bytes.*, got {value!r}")
        for name in SIZES
        for value in (1e9, "256M", "-1MB", "1.5.2GB", True)
    ),
    ({"device_bytes": "Auto"}, TypeError, "device_bytes must be an integer number of bytes, .* or 'auto', got 'Auto'"),
    *(({"overlap": value}, ValueError, rf"{OVERLAPS} {value!r}") for value in ("backward", None, 1)),
    *(({"host_fraction": value}, ValueError, "host_fraction must be") for value in (-0.1, 1.5)),
    *(({"host_fraction": value}, TypeError, "host_fraction must be") for value in ("auto", True)),
    ({"parameters": 1}, TypeError, "parameters must be a bool, got 1"),
    ({"serial": "yes"}, TypeError, "serial must be a bool, got 'yes'"),
    (
        {"parameters": True, "host_fraction": 0.5},
        ValueError,
        r"parameters=True updates on the device.*host_fraction=0\.5 on the CPU",
    ),
]


@pytest.mark.parametrize(("fields", "error", "message"), REFUSED, ids=str)
def test_what_is_wrong_is_named(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OffloadPolicy(**fields)


def test_a_device_that_does_not_hold_two_buckets_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="two buckets") as error:
        OffloadPolicy(device_bytes=100 * MIB, bucket_bytes=64 * MIB)
    for part in (100 * MIB, 64 * MIB, f"Write device_bytes={128 * MIB} or more", "lower bucket_bytes"):
        assert str(part) in str(error.value)
    OffloadPolicy(device_bytes=128 * MIB, bucket_bytes=64 * MIB)
