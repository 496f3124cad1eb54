"""Between formats: DCP, safetensors and files of torch.save, with the same bits, keys, paths and objects."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.look.diff import all_keys, diff
from checkpoint_tools.stored.reading import open_checkpoint
from checkpoint_tools.stored.safetensors_folder import DTYPES
from tests.checkpoint_tools.checkpoints import STATE, assert_one_line, run_here, save, without_checksums
from tests.checkpoint_tools.offline import (
    FUSED,
    assert_same,
    check_zip_files,
    content,
    converted,
    rewritten,
    rule,
    same_bits,
    tiled,
    values_of,
)
from tests.cpu.checkpoint_tools.test_offline_round_trip import SETTINGS, tilings

ALL_DTYPES = list(DTYPES.values())

# To safetensors and back ---------------------------------------------------------------------------------------------


def loaded_file(file: Path) -> dict[str, Any]:
    """By the safetensors package."""
    with safe_open(file, framework="pt") as stream:
        assert stream.metadata() == {"format": "pt"}
        return {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118


def loaded(folder: Path) -> dict[str, Any]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in loaded_file(file).items()}


@SETTINGS
@given(data=st.data())
def test_there_and_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("case")
    wholes, state = {}, {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
        wholes[f"{number}.weight"] = whole = content(shape, data.draw(st.sampled_from(ALL_DTYPES)), number)
        state[f"{number}.weight"] = tiled(whole, data.draw(tilings(shape)))
    scalar = content((), data.draw(st.sampled_from([d for d in ALL_DTYPES if "float4" not in str(d)])), 9)
    everything = {"model": state, "optim": {"state": {"0.weight": {"step": scalar, "n": 3}}}}
    source = save(tmp_path / "source", everything, thread_count=data.draw(st.integers(1, 3)))
    options: dict[str, Any] = {
        "shard_bytes": data.draw(st.sampled_from([1, 100, 10_000])),
        "max_memory_bytes": data.draw(st.sampled_from([128, 300, 10_000])),
    }
    converted(source, tmp_path / "made", **options)
    found = loaded(tmp_path / "made")
    assert found.keys() == {*wholes, "optim.state.0.weight.step"}
    assert all(same_bits(found[key], whole) for key, whole in wholes.items())
    assert same_bits(found["optim.state.0.weight.step"], scalar)
    back = converted(tmp_path / "made", tmp_path / "back", **options)
    check_zip_files(back)
    assert_same(back, open_checkpoint(source))


STATES: dict[str, tuple[dict[str, Any], set[str]]] = {  # and the names in the files
    "nested": ({"model": {"model.a": torch.ones(1), "head": torch.ones(1)}}, {"model.a", "head"}),
    "flat": ({"model.a": torch.ones(1), "head": torch.ones(1)}, {"model.a", "head"}),
    "flat, all with a prefix": ({"model.a": torch.ones(1), "model.b": torch.ones(1)}, {"model.a", "model.b"}),
    "nested twice": ({"model": {"module": {"a": torch.ones(1)}}}, {"module.a"}),
    "one name twice": ({"model": {"x": torch.ones(2)}, "x": torch.zeros(3)}, {"x"}),
    "objects": ({**STATE, "rng": {"python": (3, (1, 2), None)}}, {"layers.10.weight", "layers.2.weight"}),
}


@pytest.mark.parametrize("case", STATES)
def test_names_paths_and_objects_come_back(tmp_path: Path, case: str) -> None:
    state, names = STATES[case]
    source = save(tmp_path / "source", state)
    made = converted(source, tmp_path / "made")
    assert {key for file in (tmp_path / "made").glob("model-*") for key in loaded_file(file)} == names
    old, back = open_checkpoint(source), converted(tmp_path / "made", tmp_path / "back")
    assert_same(back, old)
    if case != "one name twice":
        for one, other in ((old, back), (old, made)):
            assert diff(one, other, all_keys(one, other)) == []


def test_a_prefix_that_is_given(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {"module.a": torch.ones(1), "b": torch.ones(2)}})
    converted(source, tmp_path / "made", key_prefix="model.module.")
    assert loaded(tmp_path / "made").keys() == {"a", "model.b"}
    assert_same(converted(tmp_path / "made", tmp_path / "back"), open_checkpoint(source))
    other = converted(tmp_path / "made", tmp_path / "other", key_prefix="net.")
    assert set(other.tensors) == {"net.a", "model.b"}


def test_files_are_about_as_large_as_asked(tmp_path: Path) -> None:
    state = {f"{number}": torch.ones(25) for number in range(10)} | {"large": torch.ones(100)}
    source = save(tmp_path / "source", {"model": state})
    converted(source, tmp_path / "made", shard_bytes=250)
    names = [f"model-{number:05}-of-00006.safetensors" for number in range(1, 7)]
    assert sorted(file.name for file in (tmp_path / "made").glob("*.safetensors")) == names
    back = converted(tmp_path / "made", tmp_path / "back", shard_bytes=250)
    assert len(back.tensors["model.large"].chunks) == 2
    assert len(back.items_by_file()) == 7
    assert_same(back, open_checkpoint(source))


def test_the_model_alone_and_all_else_alone(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    model = converted(source, tmp_path / "model", what="model")
    others = converted(source, tmp_path / "others", what="optimizer")
    old = set(open_checkpoint(source).tensors) | set(open_checkpoint(source).objects)
    assert set(model.tensors) == {key for key in old if key.startswith("model.")}
    assert {*others.tensors, *others.objects} == old - set(model.tensors)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    back = converted(tmp_path / "model", tmp_path / "back")
    assert back.tensors.keys() == model.tensors.keys()
    both = converted(source, tmp_path / "both")
    only = converted(both.path, tmp_path / "only", what="optimizer", excluded=("optim.param_groups*",))
    assert {*only.tensors, *only.objects} == {key for key in old if key.startswith(("optim.state", "nothing"))}


# The model's floats are cast on the way; nothing else is --------------------------------------------------------------

# Values that are halfway between two of bf16, too large for fp16, and no numbers.
ODD = torch.tensor([1.0 + 2**-9, 3e38, 1e-45, torch.inf, -0.0, torch.nan] * 50_000).view(600, 500)
FLOATS = {
    "model": {
        "a": tiled(ODD, [((0, 0), (250, 500)), ((250, 0), (350, 200)), ((250, 200), (350, 300))]),
        "half": torch.ones(3, 2, dtype=torch.bfloat16),
        "count": torch.arange(5),
        "byte": torch.ones(4).to(torch.float8_e4m3fn),
    },
    "optim": {"state": {"a": {"exp_avg": ODD, "step": torch.tensor(3.0)}}},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_models_floats_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    source = save(tmp_path / "source", FLOATS)
    made = converted(source, tmp_path / "made", dtype=dtype, shard_bytes=1 << 20)
    values = values_of(made)
    assert same_bits(values["model.a"], ODD.to(dtype))
    assert same_bits(values["model.half"], torch.ones(3, 2, dtype=dtype))
    assert same_bits(values["model.count"], torch.arange(5))
    assert values["model.byte"].dtype == torch.float8_e4m3fn
    assert same_bits(values["optim.state.a.exp_avg"], ODD)
    back = converted(tmp_path / "made", tmp_path / "back", dtype=torch.float32, max_memory_bytes=1 << 18)
    assert same_bits(values_of(back)["model.a"], ODD.to(dtype).float())
    check_zip_files(back)


# Files of torch.save: everything, nested as it was --------------------------------------------------------------------

NESTED: dict[str, Any] = {
    "model": {"a.weight": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(2).bfloat16(), "none": torch.empty(0, 3)},
    "list": [torch.zeros(2), {"x": torch.ones(1)}, 5],
    "step": 3,
    "betas": (0.9, 0.99),
    "names": {"a", ("b", 1)},
    "generator": ({"state": 2**128 - 1, "inc": -(2**127) - 1},),  # as PCG64 of numpy has them
    "optim": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {at: each for key, inner in items for at, each in leaves(inner, (*path, key)).items()}


@pytest.mark.parametrize("without", [False, True])
def test_a_file_of_torch_save_there_and_back(tmp_path: Path, without: bool) -> None:
    with without_checksums() if without else contextlib.nullcontext():
        torch.save(NESTED, tmp_path / "model.pt")
    there = run_here("convert", tmp_path / "model.pt", tmp_path / "dcp")
    assert there.returncode == 0, there.stderr
    assert "7 values as a checkpoint of DCP" in there.stdout
    note = "model.pt cannot be compared with checksums: torch.serialization.set_crc32_options(False)"
    assert (note in there.stdout) == without
    back = run_here("convert", tmp_path / "dcp", tmp_path / "back.pt", "--to", "torch")
    assert back.returncode == 0, back.stderr
    before, after = leaves(NESTED), leaves(torch.load(tmp_path / "back.pt"))
    assert before.keys() == after.keys()
    assert all(same_bits(after[path], value) for path, value in before.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.pt", "dcp", "model.pt"]
    assert open_checkpoint(tmp_path / "dcp").manifest is not None
    command = ("convert", tmp_path / "dcp", tmp_path / "some.pt", "--to", "torch", "--exclude", "model.*")
    assert run_here(*command).returncode == 0
    assert torch.load(tmp_path / "some.pt").keys() == NESTED.keys() - {"model"}


def test_nothing_stays_of_what_did_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(NESTED, tmp_path / "model.pt")
    source = save(tmp_path / "dcp", NESTED)

    def full(descriptor: int) -> None:
        del descriptor
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_one_line(run_here("convert", tmp_path / "model.pt", tmp_path / "new"), "No space left on device")
    assert_one_line(run_here("convert", source, tmp_path / "new.pt", "--to", "torch"), "No space left on device")
    made = run_here("convert", source, tmp_path / "made", "--what", "model")
    assert_one_line(made, "the new checkpoint cannot be written: No space left on device; make room")
    monkeypatch.undo()
    fused = save(tmp_path / "fused", {FUSED: torch.ones(4, 2)})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; make room"):
        rewritten("split", fused, tmp_path / "split", rule())
    shutil.rmtree(fused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "model.pt"]
