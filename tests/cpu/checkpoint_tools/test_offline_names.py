"""Whose state it is: the keys that torch and others write, and what is refused rather than guessed."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.fuse.files import find_exchange
from checkpoint_tools.fuse.live import merge_state_dict, split_state_dict
from checkpoint_tools.fuse.request import Request
from checkpoint_tools.fuse.rules import Rule, Way, preset
from checkpoint_tools.stored.reading import open_checkpoint
from fsdp_offload.checkpoint.chunks import ragged_chunks
from tests.checkpoint_tools.checkpoints import changed, save
from tests.checkpoint_tools.offline import (
    DOWN,
    FUSED,
    GATE,
    UP,
    assert_same,
    chunks_of_keys,
    rewritten,
    rule,
    same_bits,
    tiled,
    values_of,
)

WHOLE = torch.arange(24.0).view(8, 3)
MEGATRON = "decoder.layers.0.mlp.linear_fc1.weight"


def optimizer(**state: Any) -> dict[str, Any]:
    return {"state": {FUSED: state}, "param_groups": [{"lr": 0.5, "params": [DOWN, FUSED]}]}


def round_trip(tmp_path: Path, state: dict[str, Any], *rules: Rule, **options: Any) -> dict[str, Any]:
    """What splitting makes of it; and merging gives it back."""
    tmp_path.mkdir(exist_ok=True)
    source = save(tmp_path / "source", state)
    split = rewritten("split", source, tmp_path / "split", *(rules or (rule(),)), **options)
    merged = rewritten("merge", tmp_path / "split", tmp_path / "merged", *(rules or (rule(),)), **options)
    assert_same(merged, open_checkpoint(source))
    return values_of(split)


# What is split -------------------------------------------------------------------------------------------------------


def test_only_optimizers_as_accelerate_saves_them(tmp_path: Path) -> None:
    """A master that repeats the parameter is split too: merging would not bring it back otherwise."""
    app = {
        "optimizer": optimizer(exp_avg=WHOLE, step=torch.tensor(1.0), kind="adam", nested={"x": WHOLE * 3}),
        "other": optimizer(momentum_buffer=WHOLE, master_param=WHOLE),
    }
    model = {FUSED: WHOLE, "state.weight": WHOLE}  # and that is no state
    for lead, state in (("", app), ("app.", {"app": {"model": model, **app}})):
        values = round_trip(tmp_path / f"0{lead}", state)
        assert same_bits(values[f"{lead}optimizer.state.{UP}.exp_avg"], WHOLE[4:])
        assert values[f"{lead}optimizer.state.{GATE}.kind"] == "adam"
        assert same_bits(values[f"{lead}optimizer.state.{GATE}.nested.x"], WHOLE[:4] * 3)
        assert values[f"{lead}optimizer.param_groups.0.params"] == [DOWN, GATE, UP]
        assert same_bits(values[f"{lead}other.state.{UP}.momentum_buffer"], WHOLE[4:])
        assert same_bits(values[f"{lead}other.state.{UP}.master_param"], WHOLE[4:])


@pytest.mark.parametrize("lead", ["x.", ""])
def test_state_without_a_model_is_excluded_by_any_of_its_names(tmp_path: Path, lead: str) -> None:
    state = {"state": {f"{layer}.gate_up.weight": {"exp_avg": WHOLE} for layer in "ab"}}
    checkpoint = open_checkpoint(save(tmp_path / "source", {"x": state} if lead else state))
    for pattern in (f"{lead}state.b.*", f"{lead}state.b.gate_up.weight", "b.*"):
        found = find_exchange("split", checkpoint, Request([rule()], {}, [pattern])).fusions
        assert [fusion.fused for fusion in found] == [f"{lead}state.a.gate_up.weight.exp_avg"]
        with pytest.raises(CheckpointError, match=r"--exclude that matches nothing: b, \?\."):
            find_exchange("split", checkpoint, Request([rule()], {}, ["b", pattern, "?."]))


def test_keys_of_torchtitan(tmp_path: Path) -> None:
    moments = {f"state.{FUSED}.exp_avg": WHOLE * 2, f"state.{FUSED}.step": torch.tensor(1.0)}
    groups = {f"param_groups.{FUSED}.lr": 0.5, f"param_groups.{FUSED}.betas": (0.9, 0.99)}
    values = round_trip(tmp_path, {FUSED: WHOLE, "optimizer": moments | groups, "train_state": {"step": 3}})
    assert same_bits(values[UP], WHOLE[4:])
    assert same_bits(values[f"optimizer.state.{UP}.exp_avg"], WHOLE[4:] * 2)
    assert values[f"optimizer.param_groups.{GATE}.betas"] == (0.9, 0.99)
    assert values["train_state.step"] == 3


def test_torchtitan_whose_model_has_the_parts_already(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 2, 3)
    model = {"layers.0.ff.w1.weight": whole[:, 0], "layers.0.ff.w3.weight": whole[:, 1]}
    state = {**model, "optimizer": {"state.layers.0.ff.w13.exp_avg": whole, "param_groups.layers.0.ff.w13.lr": 0.5}}
    source = save(tmp_path / "source", state)
    values = values_of(rewritten("split", source, tmp_path / "split", *preset("torchtitan-w13")))
    assert same_bits(values["optimizer.state.layers.0.ff.w3.weight.exp_avg"], whole[:, 1].contiguous())
    assert values["optimizer.param_groups.layers.0.ff.w1.weight.lr"] == 0.5


def test_keys_of_megatron(tmp_path: Path) -> None:
    down = MEGATRON.replace("fc1", "fc2")
    own = f"module.module.module.{MEGATRON}"
    state = {
        "model": {f"module.{MEGATRON}": WHOLE.bfloat16(), f"module.{down}": torch.zeros(3, 4)},
        "optimizer": {
            "state": {own: {"exp_avg": WHOLE + 1, "step": 2, "master_param": WHOLE}},
            "param_to_group_meta": {own: {"lr": 0.5, "wd_mult": 1.0}},
        },
    }
    values = round_trip(tmp_path, state, *preset("megatron-swiglu"), values={"tp_size": 2})
    assert same_bits(values[f"model.module.{MEGATRON}_w"], WHOLE[[0, 1, 4, 5]].bfloat16())
    assert same_bits(values[f"optimizer.state.{own}_v.exp_avg"], WHOLE[[2, 3, 6, 7]] + 1)
    assert same_bits(values[f"optimizer.state.{own}_v.master_param"], WHOLE[[2, 3, 6, 7]])
    assert values[f"optimizer.param_to_group_meta.{own}.wd_mult"] == 1.0  # as Megatron itself leaves it


def test_without_paths(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {FUSED: WHOLE}, "optim": optimizer(exp_avg=WHOLE)}
    for lead in ("", "app."):
        source = save(tmp_path / f"source{lead}", {"app": state} if lead else state)
        bare = changed(source, f"bare{lead}", lambda metadata: setattr(metadata, "planner_data", None))
        values = values_of(rewritten("split", bare, tmp_path / f"split{lead}", rule()))
        assert same_bits(values[f"{lead}optim.state.{GATE}.exp_avg"], WHOLE[:4])
        assert values[f"{lead}optim.param_groups.0.params"] == [DOWN, GATE, UP]


def test_transforms(tmp_path: Path) -> None:
    """Items that went through an extension are not rewritten."""
    source = save(tmp_path / "source", {"model": {FUSED: WHOLE, DOWN: WHOLE}})
    for name, key in (("kept", DOWN), ("fused", FUSED)):

        def edit(metadata: Any, key: str = f"model.{key}") -> None:
            (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == key)
            info.transform_descriptors = ["stream.zstd/1"]

        with pytest.raises(CheckpointError, match=r"was written through stream.zstd/1"):
            rewritten("split", changed(source, name, edit), tmp_path / "new", rule())


def test_flat_state_becomes_rectangles_of_the_parts(tmp_path: Path) -> None:
    flat = WHOLE.flatten() + 1
    ranges = [((0,), (8,)), ((8,), (9,)), ((17,), (7,))]
    state = {"model": {FUSED: WHOLE}, "optim": optimizer(exp_avg=tiled(flat, ranges))}
    source = save(tmp_path / "source", state)
    split = rewritten("split", source, tmp_path / "split", rule())
    assert same_bits(values_of(split)[f"optim.state.{UP}.exp_avg"], WHOLE[4:] + 1)
    expected = [
        (chunk.offsets, chunk.sizes)
        for begin, end in ((0, 5), (5, 12))
        for chunk in ragged_chunks((4, 3), ((0, 0), (4, 3)), begin, end).chunks
    ]
    assert chunks_of_keys(split)[f"optim.state.{UP}.exp_avg"] == expected


def test_what_is_excluded_stays_with_its_state_though_another_key_ends_as_it(tmp_path: Path) -> None:
    keys = [FUSED, f"encoder.{FUSED}", f"encoder.encoder.{FUSED}"]
    model = {key: WHOLE + number for number, key in enumerate(keys)}
    optim = {
        "state": {key: {"exp_avg": value * 2} for key, value in model.items()},
        "param_groups": [{"params": keys[:2]}],
    }
    values = round_trip(tmp_path, {"model": model, "optim": optim}, excluded=[f"model.encoder.{FUSED}"])
    assert values["optim.param_groups.0.params"] == [GATE, UP, keys[1]]
    assert same_bits(values[f"optim.state.encoder.encoder.{UP}.exp_avg"], (WHOLE[4:] + 2) * 2)
    assert f"optim.state.encoder.{FUSED}.exp_avg" in values


def parts(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state = {key: {"exp_avg": WHOLE[:4], "step": torch.tensor(1.0)} for key in (GATE, UP)}
    found = {"model": {GATE: WHOLE[:4], UP: WHOLE[4:]}, "optim": {"state": state}}
    edit(found)
    return found


FOUND = {"model": {FUSED: WHOLE}}
REFUSED: list[tuple[Way, str, dict[str, Any]]] = [
    ("split", "rules that match nothing", {"model": {DOWN: WHOLE}}),
    ("split", "rules that match nothing", {"model": {FUSED: "a text"}}),
    ("split", r"has shape \(\), and the rule divides dimension 0", {"model": {FUSED: torch.tensor(1.0)}}),
    ("split", "has no 2 equal parts", {"model": {FUSED: WHOLE[:7]}}),
    ("split", "are taken already", {"model": {FUSED: WHOLE, GATE: WHOLE}}),
    ("split", r"exp_avg|rows has shape \(8,\)", {**FOUND, "optim": optimizer(rows=torch.ones(8))}),
    ("split", r"columns has shape \(1, 3\)", {**FOUND, "optim": optimizer(columns=torch.ones(1, 3))}),
    ("split", "are numbered", {**FOUND, "optim": {"state": {0: {"exp_avg": WHOLE}}}}),
    ("split", "looks as if it belongs to", {**FOUND, "optim": {FUSED: {"exp_avg": WHOLE}}}),
    ("split", "looks as if it belongs to", {"model": {FUSED: WHOLE, f"{FUSED}.scale": WHOLE}}),
    ("split", "may be a tensor of a model, or state of", {"model": {FUSED: WHOLE, f"state.{FUSED}": WHOLE}}),
    ("split", "may belong to", {**FOUND, "ema": {FUSED: WHOLE[:4]}, "optim": optimizer(exp_avg=WHOLE)}),
    *(
        ("merge", match, parts(edit))
        for match, edit in {
            "missing": lambda found: found["model"].pop(UP),
            "one fused value cannot be both": lambda found: found["optim"]["state"][UP].update(step=torch.tensor(2.0)),
            "have exp_avg, and": lambda found: found["optim"]["state"][UP].pop("exp_avg"),
            "and they have": lambda found: found["model"].update({UP: WHOLE[4:, :2]}),
            "have the shapes": lambda found: found["model"].update({UP: torch.ones(4)}),
            "no 2 equal parts": lambda found: found["model"].update({UP: WHOLE[4:7]}),
            "bfloat16": lambda found: found["model"].update({UP: WHOLE[4:].bfloat16()}),
            "its parameter": lambda found: [
                found["optim"]["state"][key].update(rows=torch.ones(4)) for key in (GATE, UP)
            ],
            "is there already": lambda found: found["model"].update({FUSED: WHOLE}),
        }.items()
    ),
]


@pytest.mark.parametrize(("way", "match", "state"), REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, way: Way, match: str, state: dict[str, Any]) -> None:
    source = save(tmp_path / "source", state)
    with pytest.raises(CheckpointError, match=match):
        rewritten(way, source, tmp_path / "new", rule())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Metadata ------------------------------------------------------------------------------------------------------------


def test_what_else_the_metadata_say_stays(tmp_path: Path) -> None:
    def edit(metadata: Metadata) -> None:
        for key in (f"model.{FUSED}", f"model.{DOWN}"):
            properties = metadata.state_dict_metadata[key].properties  # type: ignore[union-attr]
            properties.requires_grad, properties.pin_memory = True, True
            properties.memory_format = torch.channels_last

    state = {"model": {FUSED: WHOLE, DOWN: WHOLE}, "optim": optimizer(exp_avg=WHOLE)}
    source = changed(save(tmp_path / "first", state), "source", edit)
    rewritten("split", source, tmp_path / "split", rule())
    old, new = (pickle.loads((folder / ".metadata").read_bytes()) for folder in (source, tmp_path / "split"))
    for key in (GATE, UP, DOWN):
        properties = new.state_dict_metadata[f"model.{key}"].properties
        assert properties == old.state_dict_metadata[f"model.{FUSED}"].properties
        assert properties.memory_format == torch.channels_last
    assert not new.state_dict_metadata[f"optim.state.{UP}.exp_avg"].properties.requires_grad
    assert (new.version, new.storage_meta.checkpoint_id) == (old.version, str(tmp_path / "split"))
    for index, info in new.storage_data.items():  # where DCP looks first for a chunk
        if index.offset is not None:
            assert new.state_dict_metadata[index.fqn].chunks[index.index].offsets == index.offset
        assert isinstance(info.relative_path, str)
    assert new.planner_data.keys() == new.state_dict_metadata.keys()


# What a merge may not decide by itself -------------------------------------------------------------------------------


def groups_of(*groups: dict[str, Any]) -> dict[str, Any]:
    listed = [fqn for group in groups for fqn in group["params"]]
    state = {fqn: {"exp_avg": torch.randn(4, 4)} for fqn in listed}
    return {
        "model": {fqn: torch.randn(4, 4) for fqn in (G, U, D)},
        "optim": {"state": state, "param_groups": list(groups)},
    }


G, U, D = (f"a.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([{"params": [G], "lr": 1e-3}, {"params": [U, D], "lr": 5e-2}], "param groups with different options"),
        ([{"params": [U, D], "lr": 1e-3}], "param groups list .*up_proj.* and not .*gate_proj"),
        ([{"params": [G, D], "lr": 1e-3}], "param groups list .*gate_proj.* and not .*up_proj"),
    ],
    ids=["different", "only-the-second", "only-the-first"],
)
def test_parts_in_different_param_groups_are_not_merged(groups: list[Any], match: str, tmp_path: Path) -> None:
    state: Any = groups_of(*groups)
    with pytest.raises(ValueError, match=match):
        merge_state_dict(state["model"], state["optim"], preset("hf-gate-up"))
    state["optim"]["state"] = {}  # or that of the other part is missed first
    saved = save(tmp_path / "saved", state)
    with pytest.raises(CheckpointError, match=match):
        find_exchange("merge", open_checkpoint(saved), Request(preset("hf-gate-up"), {}))


def test_what_is_merged_in_memory() -> None:
    state: Any = groups_of({"params": [G], "lr": 1e-3}, {"params": [U, D], "lr": 1e-3})
    _, optim = merge_state_dict(state["model"], state["optim"], preset("hf-gate-up"))
    assert optim is not None
    assert [group["params"] for group in optim["param_groups"]] == [["a.mlp.gate_up_proj.weight"], [D]]
    missing = r"b\.mlp\.up_proj\.weight cannot be merged .* b\.mlp\.gate_proj\.weight is mis"
    with pytest.raises(ValueError, match=missing):
        merge_state_dict({**state["model"], "b.mlp.up_proj.weight": torch.zeros(4, 4)}, None, preset("hf-gate-up"))
    rules = [rule(layout=layout) for layout in ("concatenated", "interleaved")]
    model, _ = split_state_dict({FUSED: torch.randn(6, 2)}, None, rules[:1])
    with pytest.raises(ValueError, match="were split with another rule"):
        merge_state_dict(model, None, rules[1:])


def test_an_object_of_tensors_is_not_copied_to_the_parts(tmp_path: Path) -> None:
    fused = "a.mlp.gate_up_proj.weight"
    model = {fused: torch.randn(8, 4), D: torch.randn(4, 4)}
    optim: Any = {"state": {fused: {"exp_avg": (torch.randn(8, 4),)}}, "param_groups": [{"params": [fused, D]}]}
    with pytest.raises(ValueError, match="is an object with tensors in it"):
        split_state_dict(model, optim, preset("hf-gate-up"))
    saved = save(tmp_path / "saved", {"model": model, "optim": optim})
    with pytest.raises(CheckpointError, match="is an object with tensors in it"):
        find_exchange("split", open_checkpoint(saved), Request(preset("hf-gate-up"), {}))
