"""Plain values in JSON: the same values again, and nothing else gets in."""

import json
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.core.values import same_values
from checkpoint_tools.stored.json_values import NotPlainError, from_json, to_json
from tests.cpu.checkpoint_tools.test_offline_round_trip import SETTINGS

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.complex_numbers() | st.binary(),
    lambda values: (
        st.lists(values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$float"), values, max_size=3)
        | st.dictionaries(st.text(max_size=3), values, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


def again(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))


@SETTINGS
@given(value=PLAIN)
def test_plain_values(value: Any) -> None:
    # Compared as text: that tells 0.0 from -0.0, and a NaN equals another one.
    assert repr(again(value)) == repr(value)
    assert type(again(value)) is type(value)


@SETTINGS
@given(bits=st.integers(0, 2**64 - 1))
def test_floats_bit_by_bit(bits: int) -> None:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    assert struct.pack(">d", again(value)) == bits.to_bytes(8, "big")


def test_values_of_torch() -> None:
    values = {
        "lr": torch.tensor(1e-3, dtype=torch.float64),
        "step": torch.tensor(3),
        "nothing": torch.empty(0, 2),
        "strided": torch.arange(6.0).bfloat16().view(2, 3).t(),
        "float8": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "some": {1, 2},
    }
    assert same_values(again(values), values)


def test_what_has_no_form() -> None:
    inside: list[Any] = []
    inside.append(inside)
    for value, match in (
        (Path("x"), "PosixPath"),
        (math.sqrt, "builtin_function"),
        (torch.ones(2).to_sparse(), "sparse"),
        (inside, "contains itself"),
        ({"a": [object()]}, "builtins.object"),
    ):
        with pytest.raises(NotPlainError, match=match):
            to_json(value)


@pytest.mark.parametrize(
    "found",
    [
        {"$tuple": 3},
        {"$nothing": 3},
        {"$tuple": [], "more": 1},
        {"$float": "xy"},
        {"$float": "00"},
        {"$dict": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$dtype": "nn"},
        {"$bytes": "?"},
        {"$tensor": {"dtype": "float32", "shape": [3], "data": "AAAAAA=="}},
        {"$tensor": {"dtype": "float32", "shape": [-1], "data": "AAAA"}},
        {"$tensor": []},
    ],
)
def test_what_is_damaged(found: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(found)
