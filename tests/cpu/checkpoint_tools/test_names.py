"""Whose state it is: the keys that torch and others write, and what is refused rather than guessed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import Rule, merge_state_dict, preset, split_state_dict
from checkpoint_tools.core.text import CheckpointError
from fsdp_offload.checkpoint.chunks import ragged_chunks
from tests.checkpoint_tools.saves import DOWN, FUSED, GATE, UP, changed, rule, same_bits, save, tiled
from tests.checkpoint_tools.tool import assert_same, chunks_of, made, names, run, values_of

WHOLE = torch.arange(24.0).view(8, 3)
MEGATRON = "decoder.layers.0.mlp.linear_fc1.weight"


def optimizer(**state: Any) -> dict[str, Any]:
    return {"state": {FUSED: state}, "param_groups": [{"lr": 0.5, "params": [DOWN, FUSED]}]}


def round_trip(tmp_path: Path, state: dict[str, Any], *options: object) -> dict[str, Any]:
    """What splitting makes of it; and merging gives it back."""
    tmp_path.mkdir(exist_ok=True)
    if not any(isinstance(each, Rule) for each in options):
        options = (rule(), *options)
    source = save(tmp_path / "source", state)
    split = made("split", source, tmp_path / "split", *options)
    assert_same(made("merge", split, tmp_path / "merged", *options), source)
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
    source = save(tmp_path / "source", {"x": state} if lead else state)
    for n, pattern in enumerate((f"{lead}state.b.*", f"{lead}state.b.gate_up.weight", "b.*")):
        found = values_of(made("split", source, tmp_path / f"{n}", rule(), "--exclude", pattern))
        whole = [f"{lead}state.b.gate_up.weight.exp_avg"]
        assert set(found) == {*whole, *(f"{lead}state.a.{part}.weight.exp_avg" for part in ("gate", "up"))}
        idle = ("--exclude", "b", "--exclude", pattern, "--exclude", "?.")
        with pytest.raises(CheckpointError, match=r"--exclude that matches nothing: b, \?\."):
            made("split", source, tmp_path / "new", rule(), *idle)


def test_keys_of_torchtitan(tmp_path: Path) -> None:
    moments = {f"state.{FUSED}.exp_avg": WHOLE * 2, f"state.{FUSED}.step": torch.tensor(1.0)}
    moments[f"state.{FUSED}.pre.l"] = WHOLE * 3  # a name in a dict of state
    groups = {f"param_groups.{FUSED}.lr": 0.5, f"param_groups.{FUSED}.betas": (0.9, 0.99)}
    values = round_trip(tmp_path, {FUSED: WHOLE, "optimizer": moments | groups, "train_state": {"step": 3}})
    assert same_bits(values[UP], WHOLE[4:])
    assert same_bits(values[f"optimizer.state.{UP}.exp_avg"], WHOLE[4:] * 2)
    assert same_bits(values[f"optimizer.state.{UP}.pre.l"], WHOLE[4:] * 3)
    assert not any(FUSED in key for key in values)
    assert values[f"optimizer.param_groups.{GATE}.betas"] == (0.9, 0.99)
    assert values["train_state.step"] == 3
    # The model may have the parts already.
    whole = torch.arange(24.0).view(4, 2, 3)
    model = {"layers.0.ff.w1.weight": whole[:, 0], "layers.0.ff.w3.weight": whole[:, 1]}
    state = {**model, "optimizer": {"state.layers.0.ff.w13.exp_avg": whole, "param_groups.layers.0.ff.w13.lr": 0.5}}
    experts = {"layers.1.routed_experts.inner_experts.w13": torch.arange(48.0).view(2, 4, 2, 3)}
    source = save(tmp_path / "parts", state | experts)
    values = values_of(made("split", source, tmp_path / "new", *preset("torchtitan-w13")))
    for key, stack in experts.items():  # whose forward takes w13.unbind(-2) for gate and up
        for name, half in zip(("w1_EFD", "w3_EFD"), stack.unbind(-2), strict=True):
            assert same_bits(values[key.replace("w13", name)], half)
            live, _ = split_state_dict(experts, None, preset("torchtitan-w13"))
            assert same_bits(live[key.replace("w13", name)], half)
    assert same_bits(values["optimizer.state.layers.0.ff.w3.weight.exp_avg"], whole[:, 1].contiguous())
    assert values["optimizer.param_groups.layers.0.ff.w1.weight.lr"] == 0.5


def test_keys_of_megatron(tmp_path: Path) -> None:
    down, own = MEGATRON.replace("fc1", "fc2"), f"module.module.module.{MEGATRON}"
    state = {
        "model": {f"module.{MEGATRON}": WHOLE.bfloat16(), f"module.{down}": torch.zeros(3, 4)},
        "optimizer": {
            "state": {own: {"exp_avg": WHOLE + 1, "step": 2, "master_param": WHOLE}},
            "param_to_group_meta": {own: {"lr": 0.5, "wd_mult": 1.0}},
        },
    }
    values = round_trip(tmp_path, state, *preset("megatron-swiglu"), "--value", "tp_size=2")
    assert same_bits(values[f"model.module.{MEGATRON}_w"], WHOLE[[0, 1, 4, 5]].bfloat16())
    assert same_bits(values[f"optimizer.state.{own}_v.exp_avg"], WHOLE[[2, 3, 6, 7]] + 1)
    assert same_bits(values[f"optimizer.state.{own}_v.master_param"], WHOLE[[2, 3, 6, 7]])
    assert values[f"optimizer.param_to_group_meta.{own}.wd_mult"] == 1.0  # as Megatron itself leaves it


@pytest.mark.parametrize(
    ("key", "fqn"),
    [
        ("encoder._orig_mod.1.{}", "encoder.1.{}"),
        ("encoder.{}", "encoder._orig_mod.{}"),
        ("encoder.1.{}", "module.encoder._orig_mod.1._checkpoint_wrapped_module.{}"),
        ("_orig_mod.encoder.1._orig_mod.{}", "encoder._checkpoint_wrapped_module.1.{}"),
    ],
)
def test_wrappers_in_the_names_of_either(tmp_path: Path, key: str, fqn: str) -> None:
    """Forgive what torch.compile and checkpoint_wrapper put into the keys of a model, or of its state."""
    state = {"state": {fqn.format(FUSED): {"exp_avg": WHOLE}}, "param_groups": [{"params": [fqn.format(FUSED)]}]}
    values = round_trip(tmp_path, {"model": {key.format(FUSED): WHOLE * 2}, "optim": state})
    assert same_bits(values[f"model.{key.format(UP)}"], WHOLE[4:] * 2)
    assert same_bits(values[f"optim.state.{fqn.format(UP)}.exp_avg"], WHOLE[4:])
    assert values["optim.param_groups.0.params"] == [fqn.format(GATE), fqn.format(UP)]
    model = {key.format(FUSED): WHOLE * 2}
    parts, optim = split_state_dict(model, state, [rule()])
    assert optim["state"][fqn.format(UP)]["exp_avg"].equal(WHOLE[4:])
    assert merge_state_dict(parts, optim, [rule()])[0][key.format(FUSED)] is model[key.format(FUSED)]
    # Where a name is exact, it is another tensor's nowhere: this twin is not fused.
    narrow = {"state": {fqn.format(FUSED): {"exp_avg": WHOLE[:2]}}, "param_groups": [{"params": [fqn.format(FUSED)]}]}
    twins = {key.format(FUSED): WHOLE, fqn.format(FUSED): WHOLE[:2]}
    assert split_state_dict(twins, narrow, [rule(exclude=(fqn.format(FUSED),))])[1] == narrow


@pytest.mark.parametrize("rows", [14, 9])
def test_towers_without_a_gate_stay(tmp_path: Path, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    """Their linear_fc1 is as large as what linear_fc2 takes, also where that divides by no rank. A note says so."""
    layer = "vision.encoder.layers.4.mlp.{}"
    fc1, bias, fc2 = map(layer.format, ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"))
    expert = "vision.mlp.experts.linear_fc{}.weight2"
    tower = {fc1: torch.randn(rows, 5), bias: torch.randn(rows), fc2: torch.randn(5, rows)}
    tower |= {expert.format(1): torch.randn(rows, 5), expert.format(2): torch.randn(5, rows)}
    decoder = {MEGATRON: WHOLE, MEGATRON.replace("fc1", "fc2"): torch.zeros(3, 4)}
    rules, values = preset("megatron-swiglu"), {"tp_size": 4}
    moments = {key: {"exp_avg": value + 1} for key, value in (tower | decoder).items()}
    by_kind = {f"optimizer.state.exp_avg.{key}": value["exp_avg"] for key, value in moments.items()}
    for name, state in (
        ("model", {**tower, **decoder, **by_kind}),
        ("nested", {"model": tower | decoder, "optim": {"state": moments}}),
        ("state alone", by_kind),
    ):
        source = save(tmp_path / name, state)
        ran = run("split", source, tmp_path / f"{name} split", "--preset", "megatron-swiglu", "--value", "tp_size=4")
        assert re.search(
            r"note: left as they are: (model\.)?vision\.encoder\.layers\.4\.mlp\.linear_fc1", ran.stdout
        ), ran
        split = {key.removeprefix("model.") for key in values_of(tmp_path / f"{name} split")}
        ends = tuple(end for key in tower for end in (key, f"{key}.exp_avg"))
        assert {key for key in split if key.endswith(ends)} == {
            key.removeprefix("model.") for key in values_of(source) if key.endswith(ends)
        }
        assert any(key.endswith((f"{MEGATRON}_w", f"{MEGATRON}_w.exp_avg")) for key in split)
        assert_same(made("merge", tmp_path / f"{name} split", tmp_path / f"{name} merged"), source)
    optim = {"state": moments, "param_groups": [{"params": [*moments]}]}
    with caplog.at_level("INFO", "checkpoint_tools"):
        parts, part_optim = split_state_dict({**tower, **decoder}, optim, rules, values=values)
    assert f"left as they are: {fc1}, {bias}, " in caplog.text
    assert all(parts[key] is value for key, value in tower.items())
    assert all(part_optim["state"][key]["exp_avg"] is moments[key]["exp_avg"] for key in tower)
    assert f"{MEGATRON}_v" in part_optim["param_groups"][0]["params"]
    # A rank may have the tower alone; a file of it would be a copy.
    assert split_state_dict(tower, None, rules)[0] == tower
    with pytest.raises(CheckpointError, match=r"nothing to split; left as they are: "):
        made("split", save(tmp_path / "tower", tower), tmp_path / "new", *rules)


def test_an_empty_state_of_an_optimizer(tmp_path: Path) -> None:
    """As torch's DCP gives for an optimizer that is not there, or has no state."""
    for empty in ({}, {"state": {}}, {"state": {}, "param_groups": []}, None):
        parts, optim = split_state_dict({FUSED: WHOLE}, empty, [rule()])
        assert (list(parts), optim) == ([GATE, UP], empty)
        assert merge_state_dict(parts, optim, [rule()])[1] == empty


def test_without_paths(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {FUSED: WHOLE}, "optim": optimizer(exp_avg=WHOLE)}
    for lead in ("", "app."):
        source = save(tmp_path / f"source{lead}", {"app": state} if lead else state)
        bare = changed(source, f"bare{lead}", lambda metadata: setattr(metadata, "planner_data", None))
        values = values_of(made("split", bare, tmp_path / f"split{lead}", rule()))
        assert same_bits(values[f"{lead}optim.state.{GATE}.exp_avg"], WHOLE[:4])
        assert values[f"{lead}optim.param_groups.0.params"] == [DOWN, GATE, UP]


def test_flat_state_becomes_rectangles_of_the_parts(tmp_path: Path) -> None:
    ranges = [((0,), (8,)), ((8,), (9,)), ((17,), (7,))]
    state = {"model": {FUSED: WHOLE}, "optim": optimizer(exp_avg=tiled(WHOLE.flatten() + 1, ranges))}
    split = made("split", save(tmp_path / "source", state), tmp_path / "split", rule())
    assert same_bits(values_of(split)[f"optim.state.{UP}.exp_avg"], WHOLE[4:] + 1)
    assert chunks_of(split)[f"optim.state.{UP}.exp_avg"] == [
        (chunk.offsets, chunk.sizes)
        for begin, end in ((0, 5), (5, 12))
        for chunk in ragged_chunks((4, 3), ((0, 0), (4, 3)), begin, end).chunks
    ]


def test_what_is_excluded_stays_with_its_state_though_another_key_ends_as_it(tmp_path: Path) -> None:
    keys = [FUSED, f"encoder.{FUSED}", f"encoder.encoder.{FUSED}"]
    model = {key: WHOLE + number for number, key in enumerate(keys)}
    optim = {
        "state": {key: {"exp_avg": value * 2} for key, value in model.items()},
        "param_groups": [{"params": keys[:2]}],
    }
    values = round_trip(tmp_path, {"model": model, "optim": optim}, "--exclude", f"model.encoder.{FUSED}")
    assert values["optim.param_groups.0.params"] == [GATE, UP, keys[1]]
    assert same_bits(values[f"optim.state.encoder.encoder.{UP}.exp_avg"], (WHOLE[4:] + 2) * 2)
    assert f"optim.state.encoder.{FUSED}.exp_avg" in values


# What is refused -----------------------------------------------------------------------------------------------------


def parts(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state = {key: {"exp_avg": WHOLE[:4], "step": torch.tensor(1.0)} for key in (GATE, UP)}
    found = {"model": {GATE: WHOLE[:4], UP: WHOLE[4:]}, "optim": {"state": state}}
    edit(found)
    return found


def in_groups(*groups: tuple[list[str], float]) -> dict[str, Any]:
    """Parts without moments, of which one would be missed first."""
    listed = [{"params": keys, "lr": lr} for keys, lr in groups]
    return {
        "model": {key: torch.ones(4, 3) for key in (GATE, UP, DOWN)},
        "optim": {"state": {}, "param_groups": listed},
    }


FOUND = {"model": {FUSED: WHOLE}}
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("split", "rules that match nothing", {"model": {DOWN: WHOLE}}),
    ("split", "rules that match nothing", {"model": {FUSED: "a text"}}),
    ("split", r"has shape \(\), and the rule divides dimension 0", {"model": {FUSED: torch.tensor(1.0)}}),
    ("split", "has no 2 equal parts", {"model": {FUSED: WHOLE[:7]}}),
    ("split", "are taken already", {"model": {FUSED: WHOLE, GATE: WHOLE}}),
    ("split", r"rows has shape \(8,\)", {**FOUND, "optim": optimizer(rows=torch.ones(8))}),
    ("split", r"columns has shape \(1, 3\)", {**FOUND, "optim": optimizer(columns=torch.ones(1, 3))}),
    ("split", "are numbered", {**FOUND, "optim": {"state": {0: {"exp_avg": WHOLE}}}}),
    ("split", "looks as if it belongs to", {**FOUND, "optim": {FUSED: {"exp_avg": WHOLE}}}),
    ("split", "looks as if it belongs to", {"model": {FUSED: WHOLE, f"{FUSED}.scale": WHOLE}}),
    ("split", "may be a tensor of a model, or state of", {"model": {FUSED: WHOLE, f"state.{FUSED}": WHOLE}}),
    ("split", "may belong to", {**FOUND, "ema": {FUSED: WHOLE[:4]}, "optim": optimizer(exp_avg=WHOLE)}),
    ("split", "is an object with tensors in it", {**FOUND, "optim": optimizer(exp_avg=(WHOLE,))}),
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
    ("merge", "param groups with different options", in_groups(([GATE], 1e-3), ([UP, DOWN], 5e-2))),
    ("merge", "param groups list .*up.* and not .*gate", in_groups(([UP, DOWN], 1e-3))),
    ("merge", "param groups list .*gate.* and not .*up", in_groups(([GATE, DOWN], 1e-3))),
]
LIVE = ("is an object with tensors", "has no 2", "are taken", "param groups")


@pytest.mark.parametrize(("way", "match", "state"), REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, way: str, match: str, state: dict[str, Any]) -> None:
    """Of a checkpoint; and much of it of a live state dict."""
    source = save(tmp_path / "source", state)
    with pytest.raises(CheckpointError, match=match):
        made(way, source, tmp_path / "new", rule(), *["--yes"] * (way == "merge"))
    assert names(tmp_path) == ["source"]
    if match.startswith(LIVE):
        live = split_state_dict if way == "split" else merge_state_dict
        with pytest.raises(ValueError, match=match):
            live(state["model"], state.get("optim"), [rule()])


def test_parts_in_groups_with_the_same_options_are_merged() -> None:
    state = in_groups(([GATE], 1e-3), ([UP, DOWN], 1e-3))
    _, optim = merge_state_dict(state["model"], state["optim"], [rule()])
    assert optim is not None
    assert [group["params"] for group in optim["param_groups"]] == [[FUSED], [DOWN]]
    with pytest.raises(ValueError, match=r"b\.up\.weight cannot be merged .* b\.gate\.weight is missing"):
        merge_state_dict({**state["model"], "b.up.weight": torch.zeros(4, 3)}, None, [rule()])
    rules = [rule(layout=layout) for layout in ("concatenated", "interleaved")]
    whole = torch.randn(6, 2)
    model, _ = split_state_dict({FUSED: whole}, None, rules[:1])
    assert merge_state_dict(model, None, rules[1:])[0][FUSED] is whole
