"""Loads that would be silently wrong are refused, with the keys, before anything changes; all others load as DCP does.

Real checkpoints, real files, one process. ``test_load_coverage``, ``test_load_optimizer_state`` and ``test_load_files``
have more of what is refused, ``distributed/test_checked_loads`` what needs several ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_offload.checkpoint.load_planner import LoadPlanner, load
from fsdp_offload.torch_compat.dtensor import over_local
from tests.loading import WHOLE, edit_metadata, emptied, memory_of, one_rank, ragged, refused, sharded, tensors_of


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    yield from one_rank(tmp_path_factory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


# --- loads that fit ---------------------------------------------------------------------------------------------------


def test_a_load_that_fits_is_in_place(folder: Path, mesh: DeviceMesh):
    saved = {
        "model": {
            "plain": WHOLE.clone(),
            "sharded": sharded(WHOLE, mesh),
            "half": WHOLE.half(),
            "count": torch.tensor(7),
        },
        "empty": torch.empty(0, 4),
        "note": {"epoch": 3, "name": "x", "list": [1, 2], "tensors": [torch.ones(2), 5]},
    }
    dcp.save(saved, checkpoint_id=folder)
    loaded = emptied(saved)
    tensors = dict(tensors_of(loaded))
    planner = LoadPlanner()
    load(loaded, checkpoint_id=folder, planner=planner)
    assert planner.missing_keys == ()
    assert dict(tensors_of(loaded)) == tensors, "other tensors than those that were given"  # compares identity first
    for key, tensor in tensors_of(saved):
        assert torch.equal(memory_of(tensors[key]), memory_of(tensor)), key
    assert loaded["note"]["epoch"] == 3
    assert loaded["note"]["name"] == "x"
    assert loaded["note"]["list"] == [1, 2]
    assert loaded["note"]["tensors"][1] == 5


def test_several_chunks_are_loaded(folder: Path, mesh: DeviceMesh):
    dcp.save({"a": ragged(WHOLE, mesh, 5, 11)}, checkpoint_id=folder)
    loaded = {"a": ragged(torch.zeros(6, 4), mesh, 2, 14, 15)}
    load(loaded, checkpoint_id=folder)
    assert torch.equal(memory_of(loaded["a"]), WHOLE.flatten())


def test_no_more_collectives_than_dcp(folder: Path):
    dcp.save({"a": WHOLE}, checkpoint_id=folder)
    counts = []
    for load_function in (dcp.load, load):
        with CommDebugMode() as collectives:
            load_function({"a": torch.zeros(6, 4)}, checkpoint_id=folder)
        counts.append(collectives.get_comm_counts())
    assert counts[0] == counts[1]


def test_objects_below_keys_that_are_no_strings(folder: Path):
    """As in ``optimizer.state_dict()``. DCP would leave state[0] as it is, and make a state["0"]."""
    dcp.save({"state": {0: {"step": 3, "exp_avg": WHOLE}, 1: {"step": 4}}}, checkpoint_id=folder)
    loaded = {"state": {0: {"step": 0, "exp_avg": torch.zeros(6, 4)}, 1: {"step": 0}}}
    load(loaded, checkpoint_id=folder)
    assert list(loaded["state"]) == [0, 1]
    assert [state["step"] for state in loaded["state"].values()] == [3, 4]


def test_objects_of_any_kind_stay_after_a_refusal(folder: Path):
    """DCP's own planner, as it begins, puts None for what it does not know into dicts, also those in lists."""
    dcp.save({"a": {"dtype": torch.float32}, "groups": [{"dtype": torch.float32}]}, checkpoint_id=folder)
    loaded = {"a": {"dtype": torch.int8, "b": 1}, "groups": [{"dtype": torch.int8}]}
    refused(loaded, folder, r"1 requested, .*: a\.b\.")
    assert loaded == {"a": {"dtype": torch.int8, "b": 1}, "groups": [{"dtype": torch.int8}]}
    groups = loaded["groups"]
    load(loaded, checkpoint_id=folder, planner=LoadPlanner(allow_missing=["*.b"]))
    assert loaded == {"a": {"dtype": torch.float32, "b": 1}, "groups": [{"dtype": torch.float32}]}
    assert loaded["groups"] is groups


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`", "ignore:Multiple backends")  # in DCP's own call
def test_meta_tensors_get_memory_only_if_the_load_is_right(folder: Path):
    dcp.save({"a": {"b": WHOLE, "c": WHOLE}}, checkpoint_id=folder)
    loaded = {"a": {"b": torch.empty(6, 4, device="meta"), "c": torch.empty(5, 4, device="meta")}}
    refused(loaded, folder, r"a\.c \(\(5, 4\), saved as \(6, 4\)\)")
    assert loaded["a"]["b"].is_meta
    loaded["a"]["c"] = torch.zeros(6, 4)
    load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"]["b"], WHOLE)


def test_a_planner_can_be_used_again(folder: Path):
    dcp.save({"a": WHOLE}, checkpoint_id=folder)
    planner = LoadPlanner(allow_missing=True)
    load({"a": torch.zeros(6, 4), "b": 1}, checkpoint_id=folder, planner=planner)
    assert planner.missing_keys == ("b",)
    refused({"a": torch.zeros(2), "b": 1}, folder, "1 of another shape", planner=planner)
    assert planner.missing_keys == ()
    load({"a": torch.zeros(6, 4)}, checkpoint_id=folder, planner=planner)
    assert planner.missing_keys == ()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_missing_keys(folder: Path):
    dcp.save({"model": {"a": WHOLE}}, checkpoint_id=folder)
    loaded = {"model": {"a": torch.zeros(6, 4), "b": torch.zeros(2), "c": 3}}
    refused(loaded, folder, r"2 requested, but not in the checkpoint: model\.b, model\.c\. .*allow_missing")


def test_many_keys_are_counted(folder: Path):
    dcp.save({"model": {"a": WHOLE}}, checkpoint_id=folder)
    loaded = {"model": {"a": torch.zeros(6, 4), **{f"k{i}": 0 for i in range(12)}}}
    refused(loaded, folder, r"12 requested, .*: model\.k0, model\.k1, model\.k2, model\.k3, model\.k4 and 7 more\.")


def test_extra_keys(folder: Path):
    dcp.save({"model": {"a": WHOLE, "b": WHOLE, "c": 1}}, checkpoint_id=folder)
    loaded = {"model": {"a": torch.zeros(6, 4)}}
    refused(loaded, folder, r"2 in the checkpoint, but not requested: model\.b, model\.c\. .*allow_extra")


def test_another_model(folder: Path):
    """All that is wrong is said at once, each kind with its keys."""
    dcp.save({"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()}, checkpoint_id=folder)
    other = nn.ModuleDict({"0": nn.Linear(4, 8, dtype=torch.bfloat16), "head": nn.Linear(4, 2)})
    error = refused(
        {"model": other.state_dict()}, folder, "this checkpoint is not loaded, and nothing has been changed"
    )
    for line in (
        r"2 requested, but not in the checkpoint: model.head.weight, model.head.bias",
        r"2 in the checkpoint, but not requested: model.1.weight, model.1.bias",
        r"2 of another shape than in the checkpoint: model.0.weight ((8, 4), saved as (4, 4)), model.0.bias",
        r"2 of another dtype than in the checkpoint, and would be cast: model.0.weight (torch.bfloat16, saved as",
    ):
        assert line in error


def test_parts_that_nobody_asks_for_may_stay(folder: Path):
    """The model alone, nested or flat: keys outside what is requested do not count."""
    dcp.save({"model": {"a.b": WHOLE}, "optimizer": {"state": {"a": 1}}, "epoch": 3}, checkpoint_id=folder)
    for loaded in ({"model": {"a.b": torch.zeros(6, 4)}}, {"model.a.b": torch.zeros(6, 4)}):
        load(loaded, checkpoint_id=folder)
        assert torch.equal(next(iter(tensors_of(loaded)))[1], WHOLE)


def test_of_flat_dicts_the_first_component_counts(folder: Path):
    dcp.save({"layers.0.weight": WHOLE, "layers.1.weight": WHOLE, "norm.weight": WHOLE}, checkpoint_id=folder)
    refused({"layers.0.weight": torch.zeros(6, 4)}, folder, r"1 in the checkpoint, .*: layers\.1\.weight\. ")
    load({"layers.0.weight": torch.zeros(6, 4), "layers.1.weight": torch.zeros(6, 4)}, checkpoint_id=folder)


def test_outer_keys_with_dots(folder: Path):
    dcp.save({"ema.model": {"a": WHOLE}, "ema.decay": {"a": WHOLE}}, checkpoint_id=folder)
    load({"ema.model": {"a": torch.zeros(6, 4)}}, checkpoint_id=folder)


def test_an_object_in_place_of_a_dict(folder: Path):
    """As dicts of numbers were saved before PyTorch 2.4."""
    dcp.save({"groups": {0.1}, "b": 1}, checkpoint_id=folder)
    loaded = {"groups": {"lr": 0.2}, "b": 0}
    refused(loaded, folder, r"1 in the checkpoint, .*: groups\.", planner=LoadPlanner(allow_missing=True))


def test_keys_are_compared_without_planner_data(folder: Path):
    """Other libraries write none."""
    dcp.save({"model": {"a": WHOLE, "b": WHOLE}, "other": 1}, checkpoint_id=folder)
    edit_metadata(folder, lambda metadata: setattr(metadata, "planner_data", None))
    refused({"model": {"a": torch.zeros(6, 4)}}, folder, r"1 in the checkpoint, but not requested: model\.b\.")
    load({"model": {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4)}}, checkpoint_id=folder)


def test_partial_loads_on_purpose(folder: Path):
    dcp.save({"model": {"body.w": WHOLE, "old_head.w": WHOLE, "old_head.b": WHOLE}}, checkpoint_id=folder)
    loaded = {"model": {"body.w": torch.zeros(6, 4), "head.w": torch.full((2,), 5.0), "head.scale": 7}}
    refused(loaded, folder, r"model\.old_head\.w", planner=LoadPlanner(allow_missing=["model.head.*"]))
    refused(loaded, folder, r"2 requested", planner=LoadPlanner(allow_extra=["model.old_head.*"]))
    refused(loaded, folder, r"1 in the.* model\.old_head\.b\.", planner=some(extra=["*.w"], missing=True))
    refused(loaded, folder, r"1 requested.* model\.head\.scale\.", planner=some(extra=True, missing=["*.w"]))
    planner = some(missing=["model.head.*"], extra=["model.old_head.?"])
    load(loaded, checkpoint_id=folder, planner=planner)
    assert torch.equal(loaded["model"]["body.w"], WHOLE)
    assert loaded["model"]["head.w"].eq(5).all()
    assert loaded["model"]["head.scale"] == 7
    assert planner.missing_keys == ("model.head.w", "model.head.scale")


def test_a_load_of_nothing(folder: Path):
    dcp.save({"model": {"a": WHOLE}}, checkpoint_id=folder)
    refused({}, folder, "got an empty one")
    refused({"model": {}}, folder, "got an empty one", planner=LoadPlanner(allow_missing=True))
    loaded = {"module": {"a": torch.zeros(6, 4)}}
    refused(loaded, folder, r"nothing of what is requested: .*module\.a; it has model\.a", planner=some(missing=True))


def test_an_empty_tensor_is_something(folder: Path):
    dcp.save({"a": torch.empty(0, 4), "b": {"c": 1, "empty": torch.empty(0, 4)}}, checkpoint_id=folder)
    load({"a": torch.empty(0, 4)}, checkpoint_id=folder)
    load({"b": {"c": 1}}, checkpoint_id=folder)  # and nothing is lost without it


@pytest.mark.parametrize("argument", ["allow_missing", "allow_extra", "allow_cast"])
def test_patterns_are_a_sequence(argument: str):
    with pytest.raises(TypeError, match=rf"{argument}: expected .* got 'model\.\*'"):
        LoadPlanner(**{argument: "model.*"})
    with pytest.raises(TypeError, match=argument):
        LoadPlanner(**{argument: [1]})


# --- values -----------------------------------------------------------------------------------------------------------


def test_another_shape(folder: Path, mesh: DeviceMesh):
    dcp.save({"a": sharded(WHOLE, mesh), "b": WHOLE, "c": torch.tensor(1.0)}, checkpoint_id=folder)
    loaded = {"a": sharded(torch.zeros(4, 6), mesh), "b": torch.zeros(24), "c": torch.zeros(1)}
    error = refused(loaded, folder, "3 of another shape")
    for detail in ("a ((4, 6), saved as (6, 4))", "b ((24,), saved as (6, 4))", "c ((1,), saved as ())"):
        assert detail in error


def test_another_dtype(folder: Path, mesh: DeviceMesh):
    dcp.save({"a": sharded(WHOLE, mesh), "b": WHOLE.bfloat16(), "c": ragged(WHOLE, mesh, 5)}, checkpoint_id=folder)
    loaded = {
        "a": sharded(torch.zeros(6, 4).bfloat16(), mesh),
        "b": torch.zeros(6, 4),
        "c": ragged(torch.zeros(6, 4).bfloat16(), mesh, 5),
    }
    error = refused(loaded, folder, "3 of another dtype .* allow_cast")
    assert "b (torch.float32, saved as torch.bfloat16)" in error
    refused(loaded, folder, r"1 of another dtype .*: b \(", planner=LoadPlanner(allow_cast=["[ac]"]))
    load(loaded, checkpoint_id=folder, planner=LoadPlanner(allow_cast=True))
    for tensor in loaded.values():
        assert torch.equal(memory_of(tensor).float().flatten(), WHOLE.flatten())


def test_another_kind(folder: Path):
    dcp.save({"step": torch.tensor(3.0), "lr": 0.1}, checkpoint_id=folder)
    loaded = {"step": 0.0, "lr": torch.tensor(0.5)}
    error = refused(loaded, folder, "2 of another kind")
    assert "step (float, where a tensor was saved)" in error
    assert "lr (a tensor, where an object was saved)" in error


def test_metadata_of_an_unknown_kind(folder: Path):
    dcp.save({"a": WHOLE, "b": WHOLE, "c": 1}, checkpoint_id=folder)

    def damage(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"] = "a tensor of sorts"
        metadata.state_dict_metadata["b"].chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([24]))

    edit_metadata(folder, damage)
    error = refused({"a": torch.zeros(6, 4), "b": torch.zeros(6, 4), "c": 0}, folder, "2 described .* not understood")
    assert "a (str), b (chunks of other than 2 dimensions)" in error


def test_no_metadata():
    planner = LoadPlanner()
    planner.set_up_planner({"a": torch.zeros(2)}, None)
    with pytest.raises(ValueError, match="got NoneType"):
        planner.create_local_plan()


def test_tensors_that_dcp_would_fill_in_the_wrong_places(folder: Path, mesh: DeviceMesh):
    """DCP takes every local tensor for one rectangle of the size that the placements say."""
    dcp.save({"a": WHOLE, "b": WHOLE}, checkpoint_id=folder)
    like = sharded(WHOLE, mesh)
    uneven = over_local(like, torch.zeros(5, 4))
    term = DTensor.from_local(torch.zeros(6, 4), mesh, [Partial()], run_check=False)
    error = refused({"a": uneven, "b": term}, folder, "2 that DCP cannot load into correctly")
    assert "has (6, 4) on this rank, and its local tensor is (5, 4): it is sharded unevenly" in error
    assert "b (a tensor with placements (Partial(sum),) has no chunks" in error


# --- helpers ----------------------------------------------------------------------------------------------------------


def some(*, missing: Any = False, extra: Any = False) -> LoadPlanner:
    return LoadPlanner(allow_missing=missing, allow_extra=extra)
