"""Rules as data: templates, sizes, files, presets, and what is reported rather than guessed."""

import json
from pathlib import Path

import pytest
import torch

from checkpoint_tools.fuse.live import split_state_dict
from checkpoint_tools.fuse.rules import Rule, excluding, find_matches, load_rules, preset, preset_names

GATE_UP = Rule(
    fused=r"{prefix}mlp.gate_up{suffix:\.weight|\.bias}",
    parts=("{prefix}mlp.gate{suffix}", "{prefix}mlp.up{suffix}"),
)


def test_parts_are_named_with_what_the_placeholders_stand_for() -> None:
    (match,) = find_matches("split", ["a.0.mlp.gate_up.weight", "a.0.mlp.down.weight"], [GATE_UP])
    assert match.fused == "a.0.mlp.gate_up.weight"
    assert match.parts == ("a.0.mlp.gate.weight", "a.0.mlp.up.weight")


def test_a_rule_reads_in_both_directions() -> None:
    (match,) = find_matches("merge", ["mlp.gate.bias", "mlp.up.bias", "mlp.down.bias"], [GATE_UP])
    assert match.fused == "mlp.gate_up.bias"


@pytest.mark.parametrize(
    ("keys", "rules", "message"),
    [
        (["mlp.gate_up.weight"], [GATE_UP, GATE_UP], "matched by several rules"),
        (["mlp.gate_up.weight", "mlp.up.weight"], [GATE_UP], "taken already"),
    ],
)
def test_what_does_not_fit_the_keys_is_reported(keys, rules, message) -> None:
    with pytest.raises(ValueError, match=message):
        find_matches("split", keys, rules)


def test_merging_reports_missing_parts_and_a_taken_name() -> None:
    with pytest.raises(ValueError, match=r"mlp\.up\.weight.* missing"):
        find_matches("merge", ["mlp.gate.weight"], [GATE_UP])
    with pytest.raises(ValueError, match="there already"):
        find_matches("merge", ["mlp.gate.weight", "mlp.up.weight", "mlp.gate_up.weight"], [GATE_UP])


def test_optional_rules_may_match_nothing_but_not_all_of_them() -> None:
    rules = [Rule(fused=f"{name}.ab", parts=(f"{name}.a", f"{name}.b"), optional=True) for name in ("dense", "experts")]
    assert [match.fused for match in find_matches("split", ["dense.ab"], rules)] == ["dense.ab"]
    with pytest.raises(ValueError, match=r"match nothing: dense\.ab, experts\.ab"):
        split_state_dict({"other": torch.ones(2)}, None, rules)


# Sizes ---------------------------------------------------------------------------------------------------------------


def sizes_of(rule: Rule, size: int, **values: float) -> list[int]:
    return [comb.size for comb in rule.combs(size, values, "key")]


def rule_with(**fields) -> Rule:
    return Rule(fused="x", parts=("a", "b"), **fields)


def test_equal_given_and_computed_sizes() -> None:
    assert sizes_of(rule_with(), 8) == [4, 4]
    assert sizes_of(rule_with(sizes=(3, 5)), 8) == [3, 5]
    assert sizes_of(rule_with(sizes=("heads * head_dim", "rest")), 20, heads=2, head_dim=4) == [8, 12]


def test_the_config_values_that_a_rule_names() -> None:
    assert rule_with(sizes=(3, "rest")).value_names == frozenset()
    assert rule_with(sizes=("q_heads * 2e3 + dim", "1 +")).value_names == {"q_heads", "dim"}
    assert rule_with(layout="grouped", groups="tp_size").value_names == {"tp_size"}


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 7, "no 2 equal parts"),
        ({"sizes": (3, 4)}, 8, "sizes .*7 together.* has 8"),
        ({"sizes": ("heads", 4)}, 8, "needs .* 'heads'; give it with values={'heads': ...}. Given are: no_value"),
        ({"sizes": ("9", "rest")}, 8, "sizes"),
        ({"sizes": ("__import__('os')", 4)}, 8, "only \\+ - \\* / //"),
        ({"sizes": ("8 / 3", "rest")}, 8, "not a whole number"),
        ({"layout": "grouped", "groups": 3}, 8, "do not divide into 3 groups"),
        ({"layout": "stacked"}, 3, "sizes \\[1, 1\\].* has 3"),
        ({"sizes": ("no_value", "rest")}, 8, "no_value is None"),
        ({"sizes": ("rest", "rest")}, 8, "sizes .*16 together"),
    ],
)
def test_sizes_that_do_not_fit_are_errors_that_name_the_key(fields, size, message) -> None:
    with pytest.raises(ValueError, match=f"key.*{message}"):
        sizes_of(rule_with(**fields), size, no_value=None)


def test_a_module_without_a_gate_is_told_by_its_sibling() -> None:
    rule = Rule(fused="{p}fc1", parts=("{p}fc1_w", "{p}fc1_v"), same_size_as=("{p}fc2", 1))
    (match,) = find_matches("split", ["mlp.fc1"], [rule])
    match.check_sibling({"mlp.fc2": (4, 8)}, 8)
    with pytest.raises(ValueError, match="is not fused"):
        match.check_sibling({"mlp.fc2": (4, 16)}, 8)
    with pytest.raises(ValueError, match="which is not there"):
        match.check_sibling({}, 8)


def test_a_sibling_of_fewer_dimensions() -> None:
    rule = Rule(fused="{p}fc1", parts=("{p}fc1_w", "{p}fc1_v"), same_size_as=("{p}fc2", 1))
    (match,) = find_matches("split", ["mlp.fc1"], [rule])
    with pytest.raises(ValueError, match=r"expected mlp\.fc2 to have a dimension 1, got \(8,\)"):
        match.check_sibling({"mlp.fc2": (8,)}, 8)


def test_keys_can_be_excluded() -> None:
    chosen = excluding([GATE_UP], "vision.*", "*.9.*")
    keys = ["text.0.mlp.gate_up.weight", "vision.0.mlp.gate_up.weight", "text.9.mlp.gate_up.weight"]
    assert [match.fused for match in find_matches("split", keys, chosen)] == keys[:1]
    parts = [key.replace("gate_up", part) for key in keys for part in ("gate", "up")]
    assert [match.fused for match in find_matches("merge", parts, chosen)] == keys[:1]
    with pytest.raises(ValueError, match="match nothing"):
        split_state_dict(dict.fromkeys(keys, torch.ones(2)), None, excluding([GATE_UP], "*"))


# Files and presets ---------------------------------------------------------------------------------------------------


def test_rules_from_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsizes = [1, 'n']\n")
    (tmp_path / "r.json").write_text(json.dumps({"rule": [{"fused": "x", "parts": ["a", "b"], "sizes": [1, "n"]}]}))
    expected = (Rule(fused="x", parts=("a", "b"), sizes=(1, "n")),)
    assert load_rules(tmp_path / "r.toml") == load_rules(tmp_path / "r.json") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule", "not a rules file"),
        ("a = 1", "expected \\[\\[rule\\]\\] tables"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsize = 1", "unknown fields \\['size'\\]"),
        ("[[rule]]\nfused = 'x'", "parts"),
        ("[[rule]]\nfused = 'x'\nparts = ['a']", "at least two parts"),
        ("[[rule]]\nfused = '{p}x'\nparts = ['{q}a', '{p}b']", "other placeholders"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nlayout = 'mixed'", "layout"),
        ("rule = ['x']", "expected \\[\\[rule\\]\\] tables"),
        ("[[rule]]\nfused = 'x'\nparts = 'ab'", "parts must be a list of strings, got 'ab'"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\ndim = '0'", "dim must be a number"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsizes = [1.5, 2]", "sizes must be"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsizes = [1, 2, 3]", "2 sizes"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\noptional = 1", "optional must be true or false"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsame_size_as = 'c'", "a template and a dimension"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\ngroups = 2", "groups are of the layout 'grouped'"),
        (
            "[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nlayout = 'stacked'\nsizes = [1, 1]",
            "stacked parts have no sizes",
        ),
        ("[[rule]]\nfused = '{p:(}x'\nparts = ['{p}a', '{p}b']", "a placeholder cannot be used"),
        ("[[rule]]\nfused = '{p}{p}x'\nparts = ['{p}a', '{p}b']", "a placeholder cannot be used"),
        ("[[rule]]\nfused = '{p x'\nparts = ['a', 'b']", "expected placeholders such as"),
    ],
)
def test_bad_files(text, message, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_rules(tmp_path / "r.toml")
    assert str(tmp_path / "r.toml") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1]", '{"rule": {"fused": "x"}}', "{", "\udcff"])
def test_bad_json_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"r\.json"):
        load_rules(tmp_path / "r.json")


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_whole_and_name_their_source(name: str) -> None:
    assert all(rule.source for rule in preset(name))


def test_an_unknown_preset_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="megatron-swiglu"):
        preset("nonsense")


MEGATRON_KEYS = [
    "model.module.decoder.layers.0.mlp.linear_fc1.weight",
    "model.module.decoder.layers.0.mlp.linear_fc1.bias",
    "model.module.decoder.layers.1.mlp.experts.linear_fc1.weight3",
    "model.module.decoder.layers.1.mlp.experts.linear_fc1.bias3",
    "model.module.decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight",
    "model.module.decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
]


@pytest.mark.parametrize("key", MEGATRON_KEYS)
def test_megatron_names_of_dense_grouped_sequential_and_shared_experts(key: str) -> None:
    (match,) = [match for rule in preset("megatron-swiglu") if (match := rule.match(key)) is not None]
    assert match.parts == (f"{key}_w", f"{key}_v")


@pytest.mark.parametrize(
    "size", ["(" * 200 + "1" + ")" * 200, "-" * 20_000 + "1", "1" + "0" * 400 + ".0 * 2", "10**1000"]
)
def test_sizes_that_python_cannot_parse_or_hold(size: str) -> None:
    """From a file that somebody else has written: what is wrong is said in a line."""
    with pytest.raises(ValueError, match="x: the size"):
        rule_with(sizes=(size, "rest")).combs(8, {}, "x")
