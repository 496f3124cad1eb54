"""Loads that would be silently wrong are refused, with the keys, before anything changes; all others load as DCP does.

Real checkpoints, real files, one process; some with an edited ``.metadata``. ``distributed/test_checked_loads`` has
what needs several ranks.
"""

import itertools
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_offload.checkpoint import LoadPlanner, chunks, chunks_of, load, with_chunks
from fsdp_offload.checkpoint.chunks import ReadPart, overlapping
from fsdp_offload.fsdp.dtensor import over_local
from tests.async_writers import emptied
from tests.loading import WHOLE, edit_metadata, memory_of, ragged, refused, sharded, tensors_of

pytestmark = pytest.mark.usefixtures("mesh")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def zeros() -> Tensor:
    return torch.zeros(6, 4)


def some(*, missing: Any = False, extra: Any = False) -> LoadPlanner:
    return LoadPlanner(allow_missing=missing, allow_extra=extra)


# --- loads that fit ---------------------------------------------------------------------------------------------------


def test_a_load_that_fits_is_in_place(folder: Path, mesh: DeviceMesh):
    saved = {
        "model": {"plain": WHOLE.clone(), "sharded": sharded(WHOLE, mesh), "half": WHOLE.half(), "n": torch.tensor(7)},
        "empty": torch.empty(0, 4),
        "note": {"epoch": 3, "name": "x", "list": [1, 2], "tensors": [torch.ones(2), 5]},
        "ragged": ragged(WHOLE, mesh, 5, 11),
    }
    dcp.save(saved, checkpoint_id=folder)
    loaded = emptied({**saved, "ragged": 0}) | {"ragged": ragged(zeros(), mesh, 2, 14, 15)}
    tensors = dict(tensors_of(loaded))
    counts = []
    for function in (dcp.load, load):
        with CommDebugMode() as collectives:
            result = function(loaded, checkpoint_id=folder)
        counts.append(collectives.get_comm_counts())
    assert counts[0] == counts[1]
    assert result.missing == ()
    assert {"model.plain", "note.epoch"} < {*result.filled}
    assert dict(tensors_of(loaded)) == tensors, "other tensors than those that were given"  # compares identity first
    for key, tensor in tensors_of(saved):
        assert torch.equal(memory_of(tensors[key]), memory_of(tensor)), key
    assert loaded["note"] | {"tensors": 0} == {"epoch": 3, "name": "x", "list": [1, 2], "tensors": 0}
    assert loaded["note"]["tensors"][1] == 5


def test_objects_below_keys_that_are_no_strings(folder: Path):
    """As in ``optimizer.state_dict()``. DCP would leave state[0] as it is, and make a state["0"]."""
    dcp.save({"state": {0: {"step": 3, "exp_avg": WHOLE}, 1: {"step": 4}}}, checkpoint_id=folder)
    loaded = {"state": {0: {"step": 0, "exp_avg": zeros()}, 1: {"step": 0}}}
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
    load(loaded, checkpoint_id=folder, planner=some(missing=["*.b"]))
    assert loaded == {"a": {"dtype": torch.float32, "b": 1}, "groups": [{"dtype": torch.float32}]}
    assert loaded["groups"] is groups


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`", "ignore:Multiple backends")  # in DCP's own call
def test_meta_tensors_get_memory_only_if_the_load_is_right(folder: Path):
    dcp.save({"a": {"b": WHOLE, "c": WHOLE}}, checkpoint_id=folder)
    loaded = {"a": {"b": torch.empty(6, 4, device="meta"), "c": torch.empty(5, 4, device="meta")}}
    refused(loaded, folder, r"Size mismatch .* a\.c")
    assert loaded["a"]["b"].is_meta
    loaded["a"]["c"] = zeros()
    load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"]["b"], WHOLE)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_another_model(folder: Path):
    """All that is wrong with keys and dtypes is said at once."""
    dcp.save({"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()}, checkpoint_id=folder)
    other = nn.ModuleDict({"0": nn.Linear(4, 8, dtype=torch.bfloat16), "head": nn.Linear(4, 2)})
    loaded = {"model": {**other.state_dict(), **{f"k{i}": 0 for i in range(12)}}}
    error = refused(loaded, folder, "this checkpoint is not loaded, and nothing has been changed")
    for line in (
        r"14 requested, but not in the checkpoint: model.head.weight, model.head.bias, model.k0, model.k1 and",
        r"2 in the checkpoint, but not requested: model.1.weight, model.1.bias",
        r"2 of another dtype than in the checkpoint: model.0.weight (torch.bfloat16, saved as",
        "allow_missing",
        "allow_extra",
        "allow_cast",
    ):
        assert line in error


IN_SCOPE: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], str]] = {
    "the model alone, nested or flat": (
        {"model": {"a.b": WHOLE, "c": 1}, "optimizer": {"state": {"a": 1}}, "epoch": 3},
        [{"model": {"a.b": zeros(), "c": 0}}, {"model.a.b": zeros(), "model.c": 0}],
        {"model": {"a.b": zeros()}},
        "model.c",
    ),
    "the first component of flat dicts": (
        {"layers.0.weight": WHOLE, "layers.1.weight": WHOLE, "norm.weight": WHOLE},
        [{"layers.0.weight": zeros(), "layers.1.weight": zeros()}],
        {"layers.0.weight": zeros()},
        "layers.1.weight",
    ),
    "outer keys with dots": (
        {"ema.model": {"a": WHOLE, "b": 1}, "ema.decay": {"a": WHOLE}},
        [{"ema.model": {"a": zeros(), "b": 0}}],
        {"ema.model": {"a": zeros()}},
        "ema.model.b",
    ),
    "tensors without elements": (
        {"a": torch.empty(0, 4), "b": {"c": 1, "empty": torch.empty(0, 4), "d": 1}},
        [{"a": torch.empty(0, 4)}, {"b": {"c": 1, "d": 0}}],
        {"b": {"c": 1}},
        "b.d",
    ),
}


@pytest.mark.parametrize("what", IN_SCOPE)
@pytest.mark.parametrize("planner_data", [True, False], ids=["", "as other libraries write it"])
def test_keys_that_nobody_asks_for(folder: Path, what: str, planner_data: bool):
    """They may stay where nothing beside them is requested, and are refused where something is."""
    saved, fits, lacks, extra = IN_SCOPE[what]
    dcp.save(saved, checkpoint_id=folder)
    if not planner_data:
        edit_metadata(folder, lambda metadata: setattr(metadata, "planner_data", None))
    for loaded in fits:
        load(loaded, checkpoint_id=folder)
    refused(lacks, folder, rf"1 in the checkpoint, but not requested: {extra}\.")


def test_an_object_in_place_of_a_dict(folder: Path):
    """As dicts of numbers were saved before PyTorch 2.4."""
    dcp.save({"groups": {0.1}, "b": 1}, checkpoint_id=folder)
    refused({"groups": {"lr": 0.2}, "b": 0}, folder, r"1 in the checkpoint, .*: groups\.", planner=some(missing=True))


def test_partial_loads_on_purpose(folder: Path):
    dcp.save({"model": {"body.w": WHOLE, "old_head.w": WHOLE, "old_head.b": WHOLE}}, checkpoint_id=folder)
    loaded = {"model": {"body.w": zeros(), "head.w": torch.full((2,), 5.0), "head.scale": 7}}
    refused(loaded, folder, r"model\.old_head\.w", planner=some(missing=["model.head.*"]))
    refused(loaded, folder, r"2 requested", planner=some(extra=["model.old_head.*"]))
    refused(loaded, folder, r"1 in the.* model\.old_head\.b\.", planner=some(extra=["*.w"], missing=True))
    refused(loaded, folder, r"1 requested.* model\.head\.scale\.", planner=some(extra=True, missing=["*.w"]))
    planner = some(missing=["model.head.*"], extra=["model.old_head.?"])
    assert load(loaded, checkpoint_id=folder, planner=planner).missing == ("model.head.w", "model.head.scale")
    assert torch.equal(loaded["model"]["body.w"], WHOLE)
    assert loaded["model"]["head.w"].eq(5).all()
    assert loaded["model"]["head.scale"] == 7


@pytest.mark.parametrize("loaded", [{}, {"model": {}}, {"module": {"a": zeros()}}], ids=str)
def test_a_load_of_nothing(folder: Path, loaded: dict[str, Any]):
    dcp.save({"model": {"a": WHOLE}}, checkpoint_id=folder)
    refused(loaded, folder, r"nothing of what is requested: .*; it has model\.a", planner=some(missing=True))


@pytest.mark.parametrize("argument", ["allow_missing", "allow_extra", "allow_cast"])
@pytest.mark.parametrize("patterns", ["model.*", [1]])
def test_patterns_are_a_sequence(argument: str, patterns: Any):
    with pytest.raises(TypeError, match=rf"{argument}: expected .* got "):
        LoadPlanner(**{argument: patterns})


# --- optimizer state --------------------------------------------------------------------------------------------------

EVERYWHERE = pytest.mark.parametrize(("flat", "wrapped"), list(itertools.product([False, True], repeat=2)))


def optimizer_state(flat: bool, *, without: str | None = None, fill: float | None = None) -> dict[str, Any]:
    """What torch gives for an AdamW after a step; ``without`` the state of parameters whose names begin so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values() if fill is not None else ():
        for tensor in state.values():
            tensor.fill_(fill)
    for name, param in model.named_parameters():
        if without is not None and name.startswith(without):
            optimizer.state[param] = {}  # an entry stays in the mapping, or torch would make state for all of them
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


def given(state_dict: dict[str, Any], wrapped: bool) -> dict[str, Any]:
    return {"optimizer": state_dict} if wrapped else state_dict


@EVERYWHERE
@pytest.mark.parametrize("without", ["0.", "1."])
def test_parameters_that_had_no_state(folder: Path, without: str, flat: bool, wrapped: bool):
    """The parameters are called 0.weight and so on, as entries of nested groups are."""
    dcp.save(given(optimizer_state(flat, without=without), wrapped), checkpoint_id=folder)
    loaded = given(optimizer_state(flat, fill=9.0), wrapped)
    if not flat:  # who is listed is a value there, which only `load` reads
        with pytest.raises(CheckpointException, match=r"6 requested, .*allow_missing.* load\(\) takes out those"):
            dcp.load(loaded, checkpoint_id=folder, planner=LoadPlanner())
    requested = dict(tensors_of(loaded)).keys()
    missing = load(loaded, checkpoint_id=folder).missing
    names = [f"{without}{name}.{value}" for name in ("weight", "bias") for value in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(missing) == sorted(f"{'optimizer.' if wrapped else ''}state.{name}" for name in names)
    assert dict(tensors_of(loaded)).keys() == requested - {*missing}
    assert not any(tensor.eq(9).all() for _, tensor in tensors_of(loaded))


def test_a_stateful_is_given_what_the_checkpoint_says(folder: Path):
    class App:
        def state_dict(self) -> dict[str, Any]:
            return optimizer_state(flat=False, fill=9.0)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict["state"]

    app = App()
    dcp.save({"app": optimizer_state(flat=False, without="0.")}, checkpoint_id=folder)
    load({"app": app}, checkpoint_id=folder)
    assert [sorted(app.loaded[name]) for name in ("0.bias", "1.bias")] == [[], ["exp_avg", "exp_avg_sq", "step"]]


@EVERYWHERE
def test_state_that_would_stay_in_the_checkpoint(folder: Path, flat: bool, wrapped: bool):
    """State of a listed parameter; also where no state at all is requested, as by an SGD that was an AdamW."""
    dcp.save(given(optimizer_state(flat), wrapped), checkpoint_id=folder)
    for without, count in (("1.", 6), ("", 12)):
        loaded = given(optimizer_state(flat, without=without), wrapped)
        refused(loaded, folder, rf"{count} in the checkpoint, but not requested")


def test_flattened_state_that_is_missing_in_part_or_not_listed(folder: Path):
    saved = optimizer_state(flat=True)
    del saved["state.1.bias.exp_avg"]
    dcp.save(saved, checkpoint_id=folder / "part")
    refused(optimizer_state(True, fill=9.0), folder / "part", r"1 requested, .*: state\.1\.bias\.exp_avg\.")
    saved = {key: value for key, value in saved.items() if ".1.bias." not in key}
    dcp.save(saved, checkpoint_id=folder / "unlisted")
    loaded = {k: v for k, v in optimizer_state(True, fill=9.0).items() if not k.startswith("param_groups.1.b")}
    refused(loaded, folder / "unlisted", r"3 requested, .*state\.1\.bias\.")


def masters(folder: Path, saved: dict[str, torch.dtype], requested: dict[str, torch.dtype]) -> dict[str, Any]:
    """Saves the state of a and b with these masters; gives what to load into."""
    dicts: list[dict[str, Any]] = []
    for fill, dtypes in ((1.0, saved), (9.0, requested)):
        state = {f"state.{fqn}.exp_avg": torch.full((3,), fill) for fqn in "ab"}
        state |= {f"state.{fqn}.master_param": torch.full((3,), fill).to(dtype) for fqn, dtype in dtypes.items()}
        dicts.append({"optimizer": {**state, "param_groups.a.lr": 0.1, "param_groups.b.lr": 0.1}})
    dcp.save(dicts[0], checkpoint_id=folder)
    return dicts[1]


def test_masters_may_be_missing_or_stay_if_they_can_be_rebuilt(folder: Path):
    """Those of int16 cannot: they are valid only with the exact parameter that they were saved with."""
    whole, master = dict.fromkeys("ab", torch.float32), r"optimizer\.state\.a\.master_param"
    loaded = masters(folder, {"b": torch.float32}, whole)
    assert load(loaded, checkpoint_id=folder).missing == ("optimizer.state.a.master_param",)
    state = {key.removeprefix("optimizer.state."): tensor.tolist()[0] for key, tensor in tensors_of(loaded)}
    assert state == {"a.exp_avg": 1.0, "b.exp_avg": 1.0, "b.master_param": 1.0}
    load(masters(folder / "2", whole, {}), checkpoint_id=folder / "2")
    loaded = masters(folder / "3", {"a": torch.float32}, {})
    del loaded["optimizer"]["state.a.exp_avg"]
    refused(loaded, folder / "3", rf"2 in the checkpoint.*: optimizer\.state\.a\.exp_avg, {master}")
    refused(masters(folder / "4", {}, {"a": torch.int16}), folder / "4", rf"1 requested, .*: {master}")
    refused(masters(folder / "5", {"a": torch.int16}, {}), folder / "5", rf"1 in the checkpoint, .*: {master}")


def test_flat_state_gets_the_shape_of_its_parameter_and_a_flat_model_does_not(folder: Path, mesh: DeviceMesh):
    dcp.save({"model": {"weight": torch.arange(6.0)}}, checkpoint_id=folder)
    refused({"model": {"weight": torch.zeros(2, 3)}}, folder, "Size mismatch")
    dcp.save({"state": {"weight": {"exp_avg": torch.arange(6.0)}}}, checkpoint_id=folder / "state")
    state = {"state": {"weight": {"exp_avg": torch.zeros(2, 3)}}}
    load(state, checkpoint_id=folder / "state")
    assert torch.equal(state["state"]["weight"]["exp_avg"], torch.arange(6.0).view(2, 3))
    part = with_chunks(sharded(torch.zeros(2, 3), mesh), torch.zeros(4), chunks_of((2, 3), (1, 5)))
    load({"state": {"weight": {"exp_avg": part}}}, checkpoint_id=folder / "state")
    assert memory_of(part).tolist() == [1, 2, 3, 4]


# --- values -----------------------------------------------------------------------------------------------------------


def test_another_dtype(folder: Path, mesh: DeviceMesh):
    dcp.save({"a": sharded(WHOLE, mesh), "b": WHOLE.bfloat16(), "c": ragged(WHOLE, mesh, 5)}, checkpoint_id=folder)
    half = zeros().bfloat16()
    loaded = {"a": sharded(half, mesh), "b": zeros(), "c": ragged(half, mesh, 5)}
    error = refused(loaded, folder, "3 of another dtype .* allow_cast")
    assert "b (torch.float32, saved as torch.bfloat16)" in error
    refused(loaded, folder, r"1 of another dtype .*: b \(", planner=LoadPlanner(allow_cast=["[ac]"]))
    load(loaded, checkpoint_id=folder, planner=LoadPlanner(allow_cast=True))
    for tensor in loaded.values():
        assert torch.equal(memory_of(tensor).float().flatten(), WHOLE.flatten())


def test_another_kind(folder: Path):
    """DCP would put the object where the tensor was."""
    dcp.save({"step": torch.tensor(3.0), "lr": 0.1}, checkpoint_id=folder)
    refused(
        {"step": torch.tensor(0.0), "lr": torch.tensor(0.5)}, folder, r"another kind than was saved: lr \(a tensor,"
    )
    refused({"step": 0.0, "lr": 0.5}, folder, r"another kind than was saved: step \(a number or object,")


def test_tensors_that_dcp_would_fill_in_the_wrong_places(folder: Path, mesh: DeviceMesh):
    """DCP takes every local tensor for one rectangle of the size that the placements say."""
    dcp.save({"a": WHOLE, "b": WHOLE}, checkpoint_id=folder)
    uneven = over_local(sharded(WHOLE, mesh), torch.zeros(5, 4))
    term = DTensor.from_local(zeros(), mesh, [Partial()], run_check=False)
    error = refused({"a": uneven, "b": term}, folder, "2 that DCP cannot load into correctly")
    assert "has (6, 4) on this rank, and its local tensor is (5, 4): it is sharded unevenly" in error
    assert "b (a tensor with placements (Partial(sum),) has no chunks" in error


# --- coverage ---------------------------------------------------------------------------------------------------------

DESTINATIONS: dict[str, Callable[[DeviceMesh], Tensor]] = {
    "plain": lambda mesh: zeros(),
    "sharded": lambda mesh: sharded(zeros(), mesh),
    "ragged": lambda mesh: ragged(zeros(), mesh, 3, 6, 13),
    "whole": lambda mesh: distribute_tensor(zeros(), mesh, [Replicate()]),
}


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


# Where it is cut, which chunks are lost, and whether the first has a row more than its two.
DAMAGES: dict[str, tuple[tuple[int, ...], slice, bool, str]] = {
    "a hole": ((5, 11), slice(2, 3), False, r"1 only partly in the checkpoint: a \(21 of the 24 elements"),
    "nothing": ((5, 11), slice(None), False, r"1 only partly in the checkpoint: a \(0 of the 24 elements"),
    "an overlap": ((8, 16), slice(0), True, r"1 stored twice in part: a \(by .* at \(0, 0\) and \(2, 0\)\)"),
    # As many elements are stored as there should be; row 2 twice and row 5 never.
    "an overlap that hides a hole": ((8, 20), slice(-1, None), True, "1 stored twice in part: a"),
}


@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_holes_and_overlaps(folder: Path, mesh: DeviceMesh, destination: str, damage: str):
    bounds, lost, grows, match = DAMAGES[damage]
    dcp.save({"a": ragged(WHOLE, mesh, *bounds), "b": WHOLE}, checkpoint_id=folder)

    def edit(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata["a"].chunks
        del chunks[lost]
        if grows:
            chunks[0].sizes = torch.Size([3, 4])

    edit_metadata(folder, edit)
    error = refused({"a": DESTINATIONS[destination](mesh), "b": zeros()}, folder, match)
    assert ("only partly" in error) != ("twice" in error)


@pytest.mark.parametrize("edit", [list.clear, lambda chunks: chunks.append(chunk((), ()))], ids=["none", "two"])
def test_a_counter_that_is_stored_never_or_twice(folder: Path, edit: Callable[[list[Any]], Any]):
    dcp.save({"step": torch.tensor(3.0)}, checkpoint_id=folder)
    edit_metadata(folder, lambda metadata: edit(metadata.state_dict_metadata["step"].chunks))
    refused({"step": torch.tensor(0.0)}, folder, r"stored twice in part: step|step \(0 of the 1 elements")


def test_chunks_without_elements_do_no_harm(folder: Path, mesh: DeviceMesh):
    """Empty shards have the dimension's size as their offset; some writers put them elsewhere."""
    dcp.save({"a": sharded(WHOLE, mesh)}, checkpoint_id=folder)

    def add(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].chunks += [chunk((row, 0), (0, 4)) for row in (6, 0, 3)]
        metadata.storage_data[MetadataIndex("a", (3, 0))] = metadata.storage_data[MetadataIndex("a", (0, 0))]

    edit_metadata(folder, add)
    loaded = {"a": zeros()}
    load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"], WHOLE)
    load({"a": with_chunks(sharded(WHOLE, mesh), torch.zeros(0), chunks_of((6, 4), (24, 24)))}, checkpoint_id=folder)


def test_overlaps_are_found_as_by_painting():
    """Random rectangles of up to 3 dimensions, against elements counted one by one."""
    generator = random.Random(0)
    found = 0
    for _ in range(3000):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 3)))
        parts = [random_part(generator, shape) for _ in range(generator.randint(0, 5))]
        painted = [elements(part) for part in parts]
        expected = sum(map(len, painted)) != len(set().union(*painted))
        pair = overlapping(parts)
        assert (pair is not None) == expected, parts
        if pair is not None:
            assert elements(pair[0]) & elements(pair[1])
            found += 1
    assert 500 < found < 2500  # both answers are common


def random_part(generator: random.Random, shape: tuple[int, ...]) -> ReadPart:
    offsets = tuple(generator.randrange(size) for size in shape)
    sizes = tuple(generator.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))
    return ReadPart(offsets, sizes, offsets)


def elements(part: ReadPart) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))))


def test_overlaps_in_many_chunks_are_found_without_comparing_pairs(monkeypatch: pytest.MonkeyPatch):
    """Rows, a grid of 4096 chunks, and a column of 4000 ragged parts."""
    compared = []
    overlap = chunks._overlap
    monkeypatch.setattr(chunks, "_overlap", lambda *pair: compared.append(pair) or overlap(*pair))
    assert overlapping([ReadPart((i, 0), (1, 7), (i, 0)) for i in range(4096)]) is None
    grid = [ReadPart((8 * i, 8 * j), (8, 8), (8 * i, 8 * j)) for i in range(64) for j in range(64)]
    assert overlapping(grid) is None
    flat = [chunks_of((2001, 10), pair).chunks for pair in itertools.pairwise(range(0, 4001 * 5, 5))]
    assert overlapping([ReadPart(c.offsets, c.sizes, c.offsets) for chunks in flat for c in chunks]) is None
    assert compared == []
    extra = ReadPart((503, 503), (2, 2), (503, 503))
    assert extra in (overlapping([*grid, extra]) or ())
    assert 0 < len(compared) < 20


# --- files ------------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "path": lambda folder: {"checkpoint_id": folder},
    "string": lambda folder: {"checkpoint_id": str(folder)},
    "reader": lambda folder: {"storage_reader": dcp.FileSystemReader(folder)},
    "reader elsewhere": lambda folder: {"storage_reader": dcp.FileSystemReader("nowhere"), "checkpoint_id": folder},
}


@pytest.fixture
def two_files(folder: Path) -> dict[str, Any]:
    """A checkpoint whose tensors are in a file each; gives what to load into."""
    dcp.save({"a": WHOLE, "b": WHOLE + 1}, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False))
    return {"a": zeros(), "b": zeros()}


def file_of(folder: Path, key: str) -> Path:
    storage_data = dcp.FileSystemReader(folder).read_metadata().storage_data
    return next(folder / info.relative_path for index, info in storage_data.items() if index.fqn == key)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_files_that_are_gone_or_cut_short(folder: Path, two_files: dict[str, Any], way: str):
    """Those that are needed count. What one rank saved alone does not stand in for a damaged ``.metadata``."""
    where, file = WAYS[way](folder), file_of(folder, "b")
    content = file.read_bytes()
    os.truncate(file, len(content) - 1)
    refused(two_files, None, rf"{file.name} \({len(content) - 1} bytes of at least {len(content)}", **where)
    file.unlink()
    refused(two_files, None, rf"{file.name} \(it is not there", **where)
    load({"a": two_files["a"]}, planner=some(extra=True), **where)
    assert torch.equal(two_files["a"], WHOLE)
    file.write_bytes(content)
    metadata = (folder / ".metadata").read_bytes()
    for damaged in (b"", metadata[:100], pickle.dumps({"a": 1}), b"# notes\n"):
        (folder / ".metadata").write_bytes(damaged)
        refused(two_files, None, "metadata", **where)
        (folder / "__0.metadata").write_bytes(metadata)  # DCP reads it then; it may be of another save
        refused(two_files, None, r"/\.metadata \(damaged", **where)
        (folder / "__0.metadata").unlink()
    (folder / ".metadata").unlink()
    refused(two_files, None, r"No such file or directory: .*\.metadata", **where)
    (folder / "__0.metadata").write_bytes(metadata)  # as dcp.save(use_collectives=False) leaves it
    assert load(two_files, **where).filled == ("a", "b")


def test_the_end_of_what_is_needed_counts(folder: Path):
    """In whatever order it is requested. What follows in the file is not needed."""
    dcp.save({"x": {"a": WHOLE, "b": WHOLE + 1}}, checkpoint_id=folder)
    storage_data = dcp.FileSystemReader(folder).read_metadata().storage_data
    end_of = {index.fqn.removeprefix("x."): info.offset + info.length for index, info in storage_data.items()}
    first, last = sorted(end_of, key=lambda key: end_of[key])
    os.truncate(folder / "__0_0.distcp", end_of[first])
    load({"x": {first: zeros()}}, checkpoint_id=folder, planner=some(extra=True))
    for keys in ((first, last), (last, first)):
        loaded = {"x": {key: zeros() for key in keys}}
        refused(loaded, folder, rf"__0_0.distcp \({end_of[first]} bytes of at least {end_of[last]}")


def test_chunks_that_are_nowhere(folder: Path, two_files: dict[str, Any]):
    def forget(metadata: Metadata) -> None:
        metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "b"}

    edit_metadata(folder, forget)
    refused(two_files, folder, r"b \(the metadata does not say where it is")


@pytest.mark.filterwarnings("ignore:fsync not supported for this stream:UserWarning")  # torch 2.14 says so
def test_files_elsewhere(two_files: dict[str, Any]):
    """Through fsspec."""
    fsspec = pytest.importorskip("fsspec")
    url = "memory://test_files_elsewhere"
    dcp.save({"a": WHOLE, "b": WHOLE + 1}, checkpoint_id=url)
    load(two_files, checkpoint_id=url)
    assert torch.equal(two_files["a"], WHOLE)
    files = fsspec.filesystem("memory")
    content = files.cat_file(f"{url}/__0_0.distcp")
    files.pipe_file(f"{url}/__0_0.distcp", content[:-1])
    refused(two_files, url, f"{len(content) - 1} bytes of at least {len(content)}")
    files.rm(f"{url}/__0_0.distcp")
    refused(two_files, url, r"__0_0.distcp \(it is not there")


def test_safetensors(tmp_path: Path):
    """A FileSystemReader by class, but its metadata are in the files themselves."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": WHOLE}, tmp_path / "model.safetensors")
    loaded = {"a": zeros()}
    load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(loaded["a"], WHOLE)
    refused({"a": torch.zeros(4)}, None, "Size mismatch", storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
