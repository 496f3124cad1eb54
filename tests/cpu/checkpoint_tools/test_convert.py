"""Between formats: DCP, safetensors and files of torch.save, with the same keys, paths and objects."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools.core.text import CheckpointError
from tests.checkpoint_tools import tool
from tests.checkpoint_tools.saves import FUSED, MATRIX, PLAIN, full, rule, same_bits, save, tiled, without_checksums
from tests.cpu.checkpoint_tools.test_round_trip import loaded
from tests.distributed.launch import mesh, spawn

# To safetensors and back ---------------------------------------------------------------------------------------------

ONE = torch.ones(1)
STATES: dict[str, tuple[dict[str, Any], set[str]]] = {  # and the names in the files
    "nested": ({"model": {"model.a": ONE, "head": ONE}}, {"model.a", "head"}),
    "flat": ({"model.a": ONE, "head": ONE}, {"model.a", "head"}),
    "flat, all with a prefix": ({"model.a": ONE, "model.b": ONE}, {"model.a", "model.b"}),
    "nested twice": ({"model": {"module": {"a": ONE}}}, {"module.a"}),
    "one name twice": ({"model": {"x": torch.ones(2)}, "x": torch.zeros(3)}, {"x"}),
    "objects": ({**PLAIN, "rng": {"python": (3, (1, 2), None)}}, {"layers.10.weight", "layers.2.weight"}),
}


@pytest.mark.parametrize("case", STATES)
def test_names_paths_and_objects_come_back(tmp_path: Path, case: str) -> None:
    state, in_files = STATES[case]
    source = save(tmp_path / "source", state)
    there = tool.made("convert", source, tmp_path / "made")
    assert loaded(there, "model-*").keys() == in_files
    back = tool.made("convert", there, tmp_path / "back")
    tool.assert_same(back, source)
    if case != "one name twice":
        assert all(tool.shown("diff", source, other).startswith("the same") for other in (back, there))


def test_a_prefix_that_is_given(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {"module.a": ONE, "b": torch.ones(2)}})
    there = tool.made("convert", source, tmp_path / "made", "--key-prefix", "model.module.")
    assert loaded(there).keys() == {"a", "model.b"}
    tool.assert_same(tool.made("convert", there, tmp_path / "back"), source)
    assert set(tool.values_of(tool.made("convert", there, tmp_path / "other", "--key-prefix", "net."))) == {
        "net.a",
        "model.b",
    }


def test_files_are_about_as_large_as_asked(tmp_path: Path) -> None:
    state = {f"{number}": torch.ones(25) for number in range(10)} | {"large": torch.ones(100)}
    source = save(tmp_path / "source", {"model": state})
    there = tool.made("convert", source, tmp_path / "made", "--shard-size", 250)
    assert [file for file in tool.names(there) if file.endswith(".safetensors")] == [
        f"model-{number:05}-of-00006.safetensors" for number in range(1, 7)
    ]
    back = tool.made("convert", there, tmp_path / "back", "--shard-size", 250)
    assert len(tool.chunks_of(back)["model.large"]) == 2
    assert len(list(back.glob("*.distcp"))) == 7
    tool.assert_same(back, source)


def test_the_index_is_that_of_hugging_face_and_elements_are_aligned(tmp_path: Path) -> None:
    model = {"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64), "c": torch.ones(5, dtype=torch.bool)}
    source = save(tmp_path / "source", {"model": model, "odd": torch.ones(1).bfloat16()})
    there = tool.made("convert", source, tmp_path / "made", "--shard-size", 21)
    for key in ("model.a", "model.b", "model.c", "odd"):
        found = tool.as_json("inspect", there, "--tiling", key)
        (chunk,) = found["chunks"]
        assert chunk["offset_bytes"] % getattr(torch, found["dtype"]).itemsize == 0
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert json.loads((there / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 37, "key_prefix": "model."},
        "weight_map": {"a": first, "b": second, "c": second},
    }
    assert load_file(there / second)["b"].tolist() == [0, 0]
    shutil.rmtree(source)
    assert tool.metadata_of(tool.made("convert", there, tmp_path / "back")).version == "1.0.0"


def test_the_model_alone_and_all_else_alone(tmp_path: Path) -> None:
    source = save(tmp_path / "source", PLAIN)
    old = tool.shapes_of(source).keys()
    of_model = {key for key in old if key.startswith("model.")}
    model = tool.made("convert", source, tmp_path / "model", "--exclude", "optim.*", "--exclude", "nothing")
    others = tool.made("convert", source, tmp_path / "others", "--exclude", "model.*")
    assert (tool.shapes_of(model).keys(), tool.shapes_of(others).keys()) == (of_model, old - of_model)
    assert tool.names(model) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert set(tool.values_of(tool.made("convert", model, tmp_path / "back"))) == of_model


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


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "fp64"])
def test_the_models_floats_are_cast(name: str, tmp_path: Path) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]
    source = save(tmp_path / "source", FLOATS)
    there = tool.made("convert", source, tmp_path / "made", "--dtype", name, "--shard-size", 1 << 20)
    values = loaded(there)
    assert same_bits(values["a"], ODD.to(dtype))
    assert same_bits(values["half"], torch.ones(3, 2, dtype=dtype))
    assert same_bits(values["count"], torch.arange(5))
    assert values["byte"].dtype == torch.float8_e4m3fn
    assert same_bits(values["optim.state.a.exp_avg"], ODD)
    back = tool.made("convert", there, tmp_path / "back", "--dtype", "fp32", "--max-memory", 1 << 18)
    assert same_bits(tool.values_of(back)["model.a"], ODD.to(dtype).float())


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
        torch.save(NESTED | ({"sgd": {"state": {}}, "empty": {}} if without else {}), tmp_path / "model.pt")
    there = tool.shown("convert", tmp_path / "model.pt", tmp_path / "dcp")
    assert f"{9 if without else 7} values as a checkpoint of DCP" in there
    note = "model.pt cannot be compared with checksums: torch.serialization.set_crc32_options(False)"
    assert (note in there) == without
    tool.shown("convert", tmp_path / "dcp", tmp_path / "back.pt", "--to", "torch")
    before, after = leaves(NESTED), leaves(torch.load(tmp_path / "back.pt"))
    assert before.keys() == after.keys()
    assert all(same_bits(after[path], value) for path, value in before.items())
    assert tool.names(tmp_path) == ["back.pt", "dcp", "model.pt"]
    assert ("note: left out, as DCP keeps no dict without values: sgd.state, empty\n" in there) == without
    assert (tmp_path / "dcp" / ".checksums").exists()
    tool.shown("convert", tmp_path / "dcp", tmp_path / "some.pt", "--to", "torch", "--exclude", "model.*")
    assert torch.load(tmp_path / "some.pt").keys() == NESTED.keys() - {"model"}


def test_nothing_stays_of_what_did_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(NESTED, tmp_path / "model.pt")
    source, fused = save(tmp_path / "dcp", NESTED), save(tmp_path / "fused", {FUSED: torch.ones(4, 2)})

    monkeypatch.setattr(os, "fsync", full)
    for old, new, *options in (
        (tmp_path / "model.pt", "new"),
        (source, "new.pt", "--to", "torch"),
        (source, "made", "--exclude", "list*"),
        (fused, "split", rule()),
    ):
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            tool.made("split" if new == "split" else "convert", old, tmp_path / new, *options)
        if options and new != "new.pt":
            assert "the new checkpoint cannot be written: No space left on device; make room" in str(error.value)
    assert tool.names(tmp_path) == ["dcp", "fused", "model.pt"]


@pytest.mark.parametrize("command", ["split", "convert"])
def test_what_is_written_is_on_the_disk_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    source = save(tmp_path / "dcp", {FUSED: torch.ones(4, 2), "step": torch.ones(1)}, thread_count=2)
    synced, fsync = set[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".unfinished")[0])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    made = tool.made(command, source, tmp_path / "new", *[rule()] * (command == "split"))
    assert {file.name for file in made.iterdir()} <= synced


# What other libraries have written -----------------------------------------------------------------------------------


def save_sharded(rank: int, world_size: int, tmp_path: Path) -> None:
    del rank
    device_mesh = mesh(world_size)
    for name, dim in (("rows", 0), ("columns", 1)):
        state = {"fused": distribute_tensor(MATRIX.clone(), device_mesh, [Shard(dim)]), "all": torch.ones(3)}
        state["tiny"] = distribute_tensor(torch.arange(4.0).view(2, 2), device_mesh, [Shard(0)])
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / name), save_distributed=True))
    whole = HuggingFaceStorageWriter(str(tmp_path / "whole"), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=whole)
    dist.barrier()


@pytest.mark.distributed
def test_parts_of_tensors_as_ranks_have_written_them(tmp_path: Path) -> None:
    """An empty part tells where a tensor ends; what nobody can know is noted."""
    spawn(save_sharded, 3, tmp_path, tmp_path)
    whole = tool.made("convert", tmp_path / "whole", tmp_path / "whole-made", "--key-prefix=")
    for name in ("rows", "columns"):
        there = tool.made("convert", tmp_path / name, tmp_path / f"{name}-made", "--max-memory", 128)
        assert len(tool.chunks_of(there)["fused"]) == 3
        assert torch.equal(tool.values_of(there)["fused"], MATRIX)
        tool.shown("diff", there, whole)
    # The first rank's file is missing: of the columns' tensor, it had the beginning.
    (tmp_path / "columns" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    missing = tool.run("convert", tmp_path / "columns", tmp_path / "new")
    tool.assert_one_line(missing, "fused: 14 of 42 elements are in no chunk")
    assert not (tmp_path / "new").exists()
    (tmp_path / "rows" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = tool.as_json("verify", tmp_path / "rows", code=1)
    assert {"where": "tiny", "text": "2 of 4 elements are in no chunk"} in found["problems"]
    assert "if the last ones are missing, this cannot be detected" in found["notes"][0]
    assert tool.as_json("inspect", tmp_path / "rows")["notes"] == found["notes"]
