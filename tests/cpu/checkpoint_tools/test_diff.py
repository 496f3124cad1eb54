"""What differs between two checkpoints, bit by bit and within tolerances, however they are divided."""

import copy
import itertools
import math
import os
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_tools.core.values import same_values
from checkpoint_tools.stored.safetensors_folder import DTYPES
from tests.checkpoint_tools.saves import MATRIX, Opaque, changed, divided, entry_of, save, save_on_two_ranks
from tests.checkpoint_tools.tool import as_json, assert_one_line, made, place_of, run, shown

Saves = Callable[..., tuple[Path, ...]]


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    """Save each state in a folder of its own: ``0``, ``1`` and so on."""
    count = itertools.count()
    return lambda *states: tuple(save(tmp_path / f"{next(count)}", state) for state in states)


def differences(*command: object) -> list[tuple[Any, ...]]:
    """Key, what differs and how; of values also how many of how many, and by how much at most."""
    code = run("diff", *command).returncode
    found = as_json("diff", *command, code=code)["differences"]
    assert bool(found) == code
    return [tuple(value for value in each.values() if value is not None) for each in found]


def counts(*command: object) -> dict[str, tuple[Any, ...]]:
    """Of what differs in values: how many of how many, and by how much."""
    return {key: tuple(rest) for key, _, _, *rest in differences(*command)}


# Divided otherwise, and the same -------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_divided_otherwise(saves: Saves, tmp_path: Path) -> None:
    """No difference, and neither is the order in memory; each element is one."""
    wholes = saves(divided(MATRIX), divided(MATRIX.t().contiguous().t()))
    ranks = save_on_two_ranks(tmp_path)
    places = [(0, 0), (3, 5), (4, 2), (6, 5)]
    others = saves(*(divided(MATRIX.index_put(tuple(map(torch.tensor, at)), torch.tensor(9.0))) for at in places))
    for memory in ("1GiB", 16 * 2 * 50, 512):
        for a, b in itertools.permutations((*ranks, wholes[0]), 2):
            assert shown("diff", a, b, "--max-memory", memory) == "the same: 3 keys, bit by bit\n"
        assert differences(*wholes, "--max-memory", max(memory, 1 << 14) if memory != "1GiB" else memory) == []
        for a, (place, other) in itertools.product(ranks, zip(places, others, strict=True)):
            found = counts(a, other, "model.fused", "--max-memory", memory)
            assert found == {"model.fused": (1, 42, pytest.approx(9 - MATRIX[place].item()))}


# Different -----------------------------------------------------------------------------------------------------------


def test_keys_kinds_shapes_dtypes_and_objects(saves: Saves) -> None:
    x = torch.zeros(2, 3)
    a = {"a": x, "kind": x, "shape": x, "dtype": x, "same": x, "object": 1, "lost": "text", "nan": math.nan}
    b = {"b": x, "kind": 1, "shape": x.t().contiguous(), "dtype": x.half(), "same": x, "object": 2, "nan": math.nan}
    a |= {"tensors": (torch.zeros(2), 1), "custom": Opaque(1), "opaque": Opaque(1), "zero": 0.0}
    b |= {"tensors": (torch.ones(2), 1), "custom": Opaque(2), "opaque": Opaque(1), "zero": -0.0}
    found = {key: rest for key, *rest in differences(*saves(a, b))}
    assert found.pop("tensors")[0] == "object"
    assert found == {
        "a": ["only in A", "tensor"],
        "b": ["only in B", "tensor"],
        "custom": ["object", "their bytes differ; they cannot be looked into"],
        "dtype": ["dtype", "float32 in A, float16 in B"],
        "kind": ["kind", "tensor in A, object in B"],
        "lost": ["only in A", "object"],
        "object": ["object", "1 in A, 2 in B"],
        "shape": ["shape", "2 × 3 in A, 3 × 2 in B"],
        "zero": ["object", "0.0 in A, -0.0 in B"],
    }


NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, 0x7FF8 << 48 | 1))

OBJECTS: list[Any] = [
    *(0, 0.0, -0.0, False, 0j, -0j, complex(0.0, -0.0), NAN, OTHER_NAN, "0", b"0", None, torch.tensor(0.0)),
    *(torch.tensor(-0.0), torch.tensor(0), (0,), [0], (0.0,), (-0.0,), (True,), [[-0.0]], [[0.0]], {0}, {0.0}, {-0.0}),
    *({False}, frozenset({0}), {0: 1}, {0.0: 1}, {-0.0: 1}, {False: 1}, {0: True}, {0: 1.0}, {"a": [-0.0]}),
    *({"a": [0.0]}, {(0,): 1}, {(0.0,): 1}, torch.Size([0]), {NAN}, {OTHER_NAN}, {NAN: 1}, OrderedDict({0: 1})),
]


def test_objects_are_the_same_only_with_the_same_types_and_bits() -> None:
    again = copy.deepcopy(OBJECTS)
    for at, one in enumerate(OBJECTS):
        assert [number for number, value in enumerate(again) if same_values(one, value)] == [at]


def floats(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


# Key → A's values, B's, and how many differ of how many by how much; then the same with a tolerance of 1.
NANS = floats(0x7FC00000), floats(0x7FC00001)
MANY = torch.zeros(1_000_003)
VALUES: dict[str, tuple[Tensor, Tensor, tuple[Any, ...], tuple[Any, ...]]] = {
    "floats": (torch.zeros(5), torch.tensor([0, 0.5, 0, -2, 0]), (2, 5, 2.0), (1, 5, 2.0)),
    "ints": (torch.arange(4), torch.tensor([0, 1, 2, 7]), (1, 4, 4.0), (1, 4, 4.0)),
    "complex": (torch.tensor([1 + 1j]), torch.tensor([4 + 5j]), (1, 1, 5.0), (1, 1, 5.0)),
    "large": (torch.tensor([2**60 + 1]), torch.tensor([2**60]), (1, 1, 1.0), ()),
    "nan": (NANS[0], NANS[0], (), ()),
    "other nan": (*NANS, (1, 1, 0.0), ()),
    "zeros": (torch.tensor([0.0]), torch.tensor([-0.0]), (1, 1, 0.0), ()),
    "zero and nan": (torch.tensor([0.0]), NANS[0], (1, 1, math.inf), (1, 1, math.inf)),
    "infinities": (torch.tensor([math.inf]), torch.tensor([-math.inf]), (1, 1, math.inf), (1, 1, math.inf)),
    "infinity and nan": (torch.tensor([math.inf]), NANS[0], (1, 1, math.inf), (1, 1, math.inf)),
    "many": (MANY, MANY.index_fill(0, torch.arange(0, 1_000_000, 1000), 3.0), (1000, 1_000_003, 3.0), (1000,)),
    "packed": (*(torch.full((3,), n, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for n in (1, 2)), (3, 3), (3,)),
    **{
        f"{dtype}": (torch.zeros(3).to(dtype), torch.tensor([0, 1.0, 0]).to(dtype), (1, 3, 1.0), ())
        for dtype in {*DTYPES.values(), torch.complex128} - {DTYPES["F8_E8M0"]}  # which has no zero
    },
}


def test_values_bit_by_bit_and_within_tolerances(saves: Saves) -> None:
    folders = saves(*({key: case[number] for key, case in VALUES.items()} for number in (0, 1)))
    assert counts(*folders) == {key: exact for key, (_, _, exact, _) in VALUES.items() if exact}
    found = counts(*folders, "--atol", 1)
    expected = {key: within for key, (*_, within) in VALUES.items() if within}
    assert {key: each[: len(expected[key])] for key, each in found.items()} == expected
    a, b = saves({"x": torch.tensor([1.0, 100.0, 0.0])}, {"x": torch.tensor([1.5, 101.0, 0.25])})
    for options, number in (((), 3), (("--atol", 0.5), 1), (("--rtol", 0.01), 2), (("--rtol", 0.01, "--atol", 0.5), 0)):
        assert sum(each[0] for each in counts(a, b, *options).values()) == number


def test_many_small_tensors_are_each_compared(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.float8_e4m3fn]
    random = torch.Generator().manual_seed(1)
    states: list[dict[str, Any]] = [{}, {}]
    expected = {}
    for number in range(150):
        dtype, is_strided = dtypes[number % len(dtypes)], number % 5 == 0
        bits = [torch.randint(-128, 128, (16 * (number % 4),), dtype=torch.int8, generator=random) for _ in states]
        bits[1][:24] = bits[0][:24]
        differing = int((bits[0] != bits[1]).view(-1, dtype.itemsize).any(1).sum())
        if differing:
            expected[f"{number}"] = differing * (2 if is_strided else 1)
        for state, values in zip(states, bits, strict=True):  # some are not row by row
            state[f"{number}"] = values.view(dtype).expand(2, -1).T if is_strided else values.view(dtype)
    first, second, again = saves(*states, states[0])
    found = counts(first, second)
    assert {key: each[0] for key, each in found.items()} == expected
    assert list(found) == sorted(found, key=int)
    assert len(found) > 50
    monkeypatch.delattr(torch, "load")  # nor are those of the same bytes taken apart
    assert differences(first, again) == []


# Trouble -------------------------------------------------------------------------------------------------------------


def test_a_dtype_that_is_not_stored(saves: Saves) -> None:
    def edit(metadata: Any) -> None:
        entry_of(metadata, "x").properties.dtype = torch.int32

    broken, another = (changed(each, f"{each.name} broken", edit) for each in saves({"x": MATRIX}, {"x": MATRIX + 1}))
    assert_one_line(run("diff", broken, another), "stored as torch.float32, not as torch.int32")
    assert differences(broken, broken) == []  # the same bytes: whatever they mean, it is the same


def test_files_are_not_opened_for_each_key(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand small tensors of two steps of one training took a minute and a half."""
    folders = saves(*({f"{n}": torch.tensor([n + i]) for n in range(100)} for i in range(2)))
    opened: list[str] = []
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda file, *args: opened.append(str(file)) or open_file(file, *args))
    assert run("diff", *folders).returncode == 1
    assert len([file for file in opened if file.endswith(".distcp")]) <= 2 * 2  # each checkpoint's in each thread


def test_damaged_elements_are_not_taken_for_others(saves: Saves) -> None:
    """Of many small tensors: after the first of a shape, only the CRC-32 behind the elements tells, and the head."""
    a, b = saves(*({f"{key}": torch.full((8,), key + n) for key in range(2)} for n in (0.25, 0.5)))
    whole = (b / "__0_0.distcp").read_bytes()
    item = place_of(b, "1")
    for what, at in ((torch.tensor(1.5).numpy().tobytes() * 8, 20), (b"data.pkl", 60)):
        content = bytearray(whole)
        content[whole.index(what, item.offset) + at] ^= 1
        (b / "__0_0.distcp").write_bytes(content)
        assert_one_line(run("diff", a, b, "--threads", 1), "not what torch.save writes")


def test_keys_with_a_prefix_on_one_side_alone(saves: Saves, tmp_path: Path) -> None:
    weights = {"model.layers.0.weight": torch.arange(6.0).view(2, 3), "lm_head.weight": torch.ones(4)}
    file = tmp_path / "hf.safetensors"
    save_file(weights, file)
    dcp = made("convert", file, tmp_path / "dcp")
    (other,) = saves({f"module.{key}": value for key, value in {**weights, "lm_head.weight": torch.zeros(4)}.items()})
    for a, b, prefix, code, expected in (
        (file, dcp, "model.", 0, "the same: 2 keys"),
        (dcp, file, "model.", 0, "the same: 2 keys"),
        (file, other, "module.", 1, "different: 1 of 2 keys"),
        (file, dcp, "", 1, "different: 4 of 4 keys"),
    ):
        assert expected in shown("diff", a, b, "--key-prefix", prefix, code=code)
