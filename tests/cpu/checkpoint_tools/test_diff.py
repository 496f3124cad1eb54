"""What differs between two checkpoints, bit by bit and within tolerances, however they are divided."""

import copy
import itertools
import math
import os
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.core.values import compare_values, same_values
from checkpoint_tools.look.diff import EXACT, Difference, Tolerance, aligned, all_keys, bytes_to_compare, diff
from checkpoint_tools.stored.reading import open_checkpoint
from checkpoint_tools.stored.safetensors_folder import DTYPES
from tests.checkpoint_tools.checkpoints import FUSED, Opaque, changed, chunks_in, run_here, save, save_on_two_ranks
from tests.checkpoint_tools.offline import converted


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_on_two_ranks(tmp_path_factory.mktemp("ranks"))


def differences(a: Path, b: Path, tolerance: Tolerance = EXACT, max_memory_bytes: int = 1 << 30) -> list[Difference]:
    first, second = open_checkpoint(a), open_checkpoint(b)
    keys = all_keys(first, second)
    advanced: list[int] = []
    found = diff(first, second, keys, tolerance, max_memory_bytes, 2, advanced.append)
    assert sum(advanced) == bytes_to_compare(first, second, keys)
    return found


def of_states(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], tolerance: Tolerance = EXACT) -> list[Difference]:
    return differences(save(tmp_path / "a", a), save(tmp_path / "b", b), tolerance)


# The same ------------------------------------------------------------------------------------------------------------


def whole(folder: Path, fused: Tensor) -> Path:
    moments = {"exp_avg": FUSED * 2, "step": torch.tensor(5.0)}
    return save(folder, {"model": {"fused": fused}, "optim": {"state": {"fused": moments}}})


@pytest.mark.distributed
@pytest.mark.parametrize("max_memory_bytes", [1 << 30, 16 * 2 * 50, 512])
def test_divided_otherwise(two_ranks: tuple[Path, Path], tmp_path: Path, max_memory_bytes: int) -> None:
    """No difference, and neither is the order in memory; each element is one."""
    folders = (*two_ranks, whole(tmp_path / "whole", FUSED))
    for a, b in itertools.permutations(folders, 2):
        assert differences(a, b, max_memory_bytes=max_memory_bytes) == []
    turned = whole(tmp_path / "turned", FUSED.t().contiguous().t())
    assert differences(folders[-1], turned, max_memory_bytes=max(max_memory_bytes, 1 << 14)) == []
    for row, column in [(0, 0), (3, 5), (4, 2), (6, 5)]:
        other = FUSED.clone()
        other[row, column] += 1
        folder = whole(tmp_path / f"{row}{column}", other)
        for ranks in two_ranks:
            (found,) = differences(ranks, folder, max_memory_bytes=max_memory_bytes)
            assert found[:2] == ("model.fused", "values")
            assert (found.differing, found.numel) == (1, 42)
            assert found.max_abs_diff == pytest.approx(1, abs=1e-6)


# Different -----------------------------------------------------------------------------------------------------------


def test_keys_kinds_shapes_and_dtypes(tmp_path: Path) -> None:
    x = torch.zeros(2, 3)
    a = {"a": x, "kind": x, "shape": x, "dtype": x, "same": x, "object": 1, "lost": "text"}
    b = {"b": x, "kind": 1, "shape": x.t().contiguous(), "dtype": x.half(), "same": x, "object": 2}
    assert of_states(tmp_path, a, b) == [
        Difference("a", "only in A", "tensor"),
        Difference("b", "only in B", "tensor"),
        Difference("dtype", "dtype", "float32 in A, float16 in B"),
        Difference("kind", "kind", "tensor in A, object in B"),
        Difference("lost", "only in A", "object"),
        Difference("object", "object", "1 in A, 2 in B"),
        Difference("shape", "shape", "2 × 3 in A, 3 × 2 in B"),
    ]


def test_values_and_tolerances(tmp_path: Path) -> None:
    a = {"x": torch.zeros(5), "y": torch.arange(4), "z": torch.tensor([1 + 1j]), "large": torch.tensor([2**60 + 1])}
    b = {"x": torch.tensor([0, 0.5, 0, -2, 0]), "y": torch.tensor([0, 1, 2, 7]), "z": torch.tensor([4 + 5j])}
    b["large"] = torch.tensor([2**60])
    found = [
        Difference("large", "values", "1 of 1 differ", 1, 1, 1.0),
        Difference("x", "values", "2 of 5 differ", 2, 5, 2.0),
        Difference("y", "values", "1 of 4 differ", 1, 4, 4.0),
        Difference("z", "values", "1 of 1 differ", 1, 1, 5.0),
    ]
    assert of_states(tmp_path, a, b) == found
    assert differences(tmp_path / "a", tmp_path / "b", Tolerance(atol=0.5))[0] == found[0]
    assert [each.key for each in differences(tmp_path / "a", tmp_path / "b", Tolerance(atol=1.0))] == ["x", "y", "z"]
    a = save(tmp_path / "c", {"x": torch.tensor([1.0, 100.0, 0.0])})
    b = save(tmp_path / "d", {"x": torch.tensor([1.5, 101.0, 0.25])})
    counts = {EXACT: [3], Tolerance(atol=0.5): [1], Tolerance(rtol=0.01): [2], Tolerance(rtol=0.01, atol=0.5): []}
    assert {each: [found.differing for found in differences(a, b, each)] for each in counts} == counts


def test_objects(tmp_path: Path) -> None:
    a = {"nan": math.nan, "tensors": (torch.zeros(2), 1), "custom": Opaque(1), "same": Opaque(1), "zero": 0.0}
    b = {"nan": math.nan, "tensors": (torch.ones(2), 1), "custom": Opaque(2), "same": Opaque(1), "zero": -0.0}
    found = of_states(tmp_path, a, b)
    assert [each.key for each in found] == ["custom", "tensors", "zero"]
    assert found[-1] == Difference("zero", "object", "0.0 in A, -0.0 in B")
    assert found[0].detail == "their bytes differ; they cannot be looked into"


NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, 0x7FF8 << 48 | 1))

VALUES: list[Any] = [
    *(0, 0.0, -0.0, False, 0j, -0j, complex(0.0, -0.0), NAN, OTHER_NAN, "0", b"0", None, torch.tensor(0.0)),
    *(torch.tensor(-0.0), torch.tensor(0), (0,), [0], (0.0,), (-0.0,), (True,), [[-0.0]], [[0.0]], {0}, {0.0}, {-0.0}),
    *({False}, frozenset({0}), {0: 1}, {0.0: 1}, {-0.0: 1}, {False: 1}, {0: True}, {0: 1.0}, {"a": [-0.0]}),
    *({"a": [0.0]}, {(0,): 1}, {(0.0,): 1}, torch.Size([0]), {NAN}, {OTHER_NAN}, {NAN: 1}, OrderedDict({0: 1})),
]


@pytest.mark.parametrize("at", range(len(VALUES)))
def test_objects_are_the_same_only_with_the_same_types_and_bits(at: int) -> None:
    again = copy.deepcopy(VALUES)
    assert [number for number, value in enumerate(again) if same_values(VALUES[at], value)] == [at]


# Trouble -------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_holes_are_not_compared(two_ranks: tuple[Path, Path], tmp_path: Path) -> None:
    rows, columns = two_ranks
    broken = changed(rows, "broken", lambda metadata: chunks_in(metadata, "model.fused").pop())
    with pytest.raises(CheckpointError, match=r"model.fused in .*elements are in no chunk; see the command verify"):
        differences(broken, columns)


def test_a_dtype_that_is_not_stored(tmp_path: Path) -> None:
    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata["x"].properties.dtype = torch.int32

    folder, other = save(tmp_path / "a", {"x": torch.zeros(4)}), save(tmp_path / "b", {"x": torch.ones(4)})
    broken, another = changed(folder, "broken", edit), changed(other, "another", edit)
    with pytest.raises(CheckpointError, match=r"stored as torch.float32, not as torch.int32"):
        differences(broken, another)
    assert differences(broken, broken) == []  # the same bytes: whatever they mean, it is the same


@pytest.mark.parametrize("tolerance", [EXACT, Tolerance(0.1, 0.5)])
def test_many_small_tensors_are_compared_as_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tolerance: Tolerance
) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]
    random = torch.Generator().manual_seed(1)
    states: list[dict[str, Any]] = [{}, {}]
    for number in range(150):
        dtype = dtypes[number % len(dtypes)]
        bits = [torch.randint(-128, 128, (16 * (number % 4),), dtype=torch.int8, generator=random) for _ in states]
        bits[1][:24] = bits[0][:24]
        for state, each in zip(states, bits, strict=True):
            values = (each & 1 if dtype is torch.bool else each).view(dtype)
            state[f"{number}"] = values if number % 5 else values.expand(2, -1).T  # which is not row by row
    folders = [save(tmp_path / name, state) for name, state in zip("ab", states, strict=True)]
    with monkeypatch.context() as patch:  # nor are those of the same bytes taken apart
        patch.delattr("checkpoint_tools.stored.items.ItemReader.bits")
        assert differences(folders[0], save(tmp_path / "c", states[0])) == []
    together = differences(*folders, tolerance)
    monkeypatch.setattr("checkpoint_tools.look.diff._SMALL_BYTES", 0)
    assert repr(together) == repr(differences(*folders, tolerance))  # also NaN, of which none is equal to another
    assert [each.key for each in together] == sorted((each.key for each in together), key=int)
    assert len(together) > 50


def test_files_are_not_opened_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand small tensors of two steps of one training took a minute and a half."""
    folders = [
        save(tmp_path / name, {f"{n}": torch.tensor([n + i]) for n in range(100)}) for i, name in enumerate("ab")
    ]
    opened: list[str] = []
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda file, *args: opened.append(file) or open_file(file, *args))
    assert len(differences(*folders)) == 100
    assert len(opened) <= 2 * 2  # each checkpoint's data in each thread


def test_damaged_elements_are_not_taken_for_others(tmp_path: Path) -> None:
    """What is read with its CRC-32 behind it is compared with that; what differs from it, is read as all others are."""
    a, b = (save(tmp_path / name, {"x": torch.full((8,), float(i))}) for i, name in enumerate("ab"))
    (chunk,) = open_checkpoint(a).tensors["x"].chunks
    content = bytearray((a / chunk.file).read_bytes())
    content[chunk.offset_bytes + content[chunk.offset_bytes :].index(b"data.pkl") + 60] ^= 1
    (a / chunk.file).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not what torch\.save writes"):
        differences(a, b)


# Values --------------------------------------------------------------------------------------------------------------


def test_bits_are_compared() -> None:
    nan, other_nan = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert compare_values(nan, nan.clone()).differing == 0
    assert compare_values(nan, other_nan) == (1, 1, 0.0)
    assert compare_values(nan, other_nan, atol=1.0) == (0, 1, None)
    assert compare_values(torch.tensor([0.0]), torch.tensor([-0.0])) == (1, 1, 0.0)
    assert compare_values(torch.tensor([0.0]), nan) == (1, 1, torch.inf)
    assert compare_values(torch.tensor([torch.inf]), torch.tensor([-torch.inf])) == (1, 1, torch.inf)
    assert compare_values(torch.tensor([torch.inf]), nan, atol=1.0) == (1, 1, torch.inf)
    many = torch.zeros(1_000_003)  # in several blocks
    assert compare_values(many, many.index_fill(0, torch.arange(0, 1_000_000, 1000), 3.0)) == (1000, 1_000_003, 3.0)


WITHOUT_ZERO = {DTYPES["F4"], DTYPES["F8_E8M0"]}


@pytest.mark.parametrize("dtype", [*(each for each in DTYPES.values() if each not in WITHOUT_ZERO), torch.complex128])
def test_all_dtypes(dtype: torch.dtype) -> None:
    a = torch.zeros(3, dtype=torch.float32).to(dtype)
    b = torch.tensor([0.0, 1.0, 0.0]).to(dtype)
    assert compare_values(a, a.clone()) == (0, 3, None)
    assert compare_values(a, b) == (1, 3, 1.0)
    assert compare_values(a, b, atol=2.0) == (0, 3, None)


def test_keys_with_a_prefix_on_one_side_alone(tmp_path: Path) -> None:
    weights = {"model.layers.0.weight": torch.arange(6.0).view(2, 3), "lm_head.weight": torch.ones(4)}
    save_file(weights, tmp_path / "hf.safetensors")
    converted(tmp_path / "hf.safetensors", tmp_path / "dcp")
    save(tmp_path / "other", {f"module.{key}": t for key, t in {**weights, "lm_head.weight": torch.zeros(4)}.items()})
    for command, code, expected in (
        ("hf.safetensors dcp", 0, "begin with 'model.' in B alone, compared without\nthe same: 2"),
        ("dcp hf.safetensors --json", 0, "keys of the model begin with 'model.' in A alone, compared without"),
        ("hf.safetensors dcp --key-prefix=", 1, "different: 4 of 4 keys"),
        ("hf.safetensors other", 1, "different: 1 of 2 keys"),
    ):
        run = run_here("diff", *command.split(), cwd=tmp_path)
        assert run.returncode == code, run
        assert expected in run.stdout
    first = open_checkpoint(save(tmp_path / "first", weights))
    for more in ({**weights, "model.lm_head.weight": torch.ones(1)}, {"a": torch.ones(1)}):  # are left alone
        second = open_checkpoint(save(tmp_path / f"second{len(more)}", more))
        assert aligned(first, second) == (first, second, [])
