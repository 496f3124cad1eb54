"""Rules as data: templates, sizes, files, presets, and what is reported rather than guessed."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from checkpoint_tools import Rule, excluding, load_rules, merge_state_dict, preset, preset_names, split_state_dict

GATE_UP = Rule(
    fused=r"{prefix}mlp.gate_up{suffix:\.weight|\.bias}", parts=("{prefix}mlp.gate{suffix}", "{prefix}mlp.up{suffix}")
)


def sizes_of(rules, values=None, **shapes) -> dict[str, int]:
    """The parts of tensors of these shapes, and how many rows each has."""
    state = {key.replace("__", "."): torch.ones(shape) for key, shape in shapes.items()}
    return {key: len(part) for key, part in split_state_dict(state, None, rules, values=values)[0].items()}


def test_optional_rules_may_match_nothing_but_not_all_of_them() -> None:
    rules = [Rule(fused=f"{name}.ab", parts=(f"{name}.a", f"{name}.b"), optional=True) for name in ("dense", "experts")]
    assert sizes_of(rules, dense__ab=(4,)) == {"dense.a": 2, "dense.b": 2}
    with pytest.raises(ValueError, match=r"match nothing: dense\.ab, experts\.ab"):
        sizes_of(rules, other=(2,))


# Sizes ---------------------------------------------------------------------------------------------------------------


def rule_with(**fields) -> Rule:
    return Rule(fused="x", parts=("a", "b"), **fields)


def test_sizes_and_the_config_values_that_they_name() -> None:
    values = {"heads": 2, "head_dim": 4}
    for sizes, expected in (("equal", [10, 10]), ((3, 17), [3, 17]), (("heads * head_dim", "rest"), [8, 12])):
        assert list(sizes_of([rule_with(sizes=sizes)], values, x=(20,)).values()) == expected
    assert rule_with(sizes=(3, "rest")).value_names == frozenset()
    assert rule_with(sizes=("q_heads * 2e3 + dim", "1 +")).value_names == {"q_heads", "dim"}
    assert rule_with(layout="grouped", groups="tp_size").value_names == {"tp_size"}


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 7, "no 2 equal parts"),
        ({"sizes": (3, 4)}, 8, "sizes .*7 together.* has 8"),
        ({"sizes": ("heads", 4)}, 8, "needs .* 'heads'; give it with .*values={'heads': ...}. Given are: no_value"),
        ({"sizes": ("9", "rest")}, 8, "sizes"),
        ({"sizes": ("__import__('os')", 4)}, 8, "only \\+ - \\* / //"),
        ({"sizes": ("8 / 3", "rest")}, 8, "not a whole number"),
        ({"layout": "grouped", "groups": 3}, 8, "do not divide into 3 groups"),
        ({"layout": "stacked"}, 3, "sizes \\[1, 1\\].* has 3"),
        ({"sizes": ("no_value", "rest")}, 8, "no_value is None"),
        ({"sizes": ("rest", "rest")}, 8, "sizes .*16 together"),
        ({"layout": "interleaved", "sizes": (3, 5)}, 8, "interleaved parts have equal sizes"),
        # What Python cannot parse or hold, in a file that somebody else has written.
        *(
            ({"sizes": (text, "rest")}, 8, "the size")
            for text in (
                "(" * 200 + "1" + ")" * 200,
                "-" * 20_000 + "1",
                "1" + "0" * 400 + ".0 * 2",
                "10**1000",
                "\ud800",
            )
        ),
    ],
)
def test_sizes_that_do_not_fit_are_errors_that_name_the_key(fields, size, message) -> None:
    with pytest.raises(ValueError, match=f"x.*{message}"):
        sizes_of([rule_with(**fields)], {"no_value": None}, x=(size, 2))


def test_a_module_without_a_gate_is_told_by_its_sibling() -> None:
    rule = Rule(fused="{p}fc1", parts=("{p}fc1_w", "{p}fc1_v"), same_size_as=("{p}fc2", 1))
    assert sizes_of([rule], mlp__fc1=(8,), mlp__fc2=(4, 4)) == {"mlp.fc1_w": 4, "mlp.fc1_v": 4, "mlp.fc2": 4}
    for rows in (8, 7):  # of which the second has no equal parts
        assert sizes_of([rule], mlp__fc1=(rows,), mlp__fc2=(4, rows)) == {"mlp.fc1": rows, "mlp.fc2": 4}
    # What is neither is told with what to do, and before the ranks that it does not divide by.
    per_rank = dataclasses.replace(rule, layout="grouped", groups="tp_size")
    for shapes, message in (
        ({"mlp__fc2": (4, 6)}, r"first part would have size 4, but mlp\.fc2 takes 6.*Exclude it"),
        ({}, "which is not there. Exclude it"),
        ({"mlp__fc2": (8,)}, r"expected mlp\.fc2 to have a dimension 1, got \(8,\)"),
        ({"mlp__fc2": (4, 4)}, r"do not divide into 3 groups: tp_size is 3.*or exclude it"),
    ):
        with pytest.raises(ValueError, match=message):
            sizes_of([per_rank], {"tp_size": 3}, mlp__fc1=(8,), **shapes)


def test_keys_can_be_excluded() -> None:
    keys = [f"{layer}.mlp.gate_up.weight" for layer in ("vision.0", "text.9", "text.0")]
    parts, _ = split_state_dict({key: torch.ones(2) for key in keys}, None, excluding([GATE_UP], "vision.*", "*.9.*"))
    assert list(parts) == [*keys[:2], "text.0.mlp.gate.weight", "text.0.mlp.up.weight"]
    merged, _ = merge_state_dict(dict.fromkeys(parts, torch.ones(1)), None, excluding([GATE_UP], "vision.*"))
    assert list(merged) == keys


# Files and presets ---------------------------------------------------------------------------------------------------


def test_rules_from_toml_and_json(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsizes = [1, 'n']\n")
    (tmp_path / "r.json").write_text(json.dumps({"rule": [{"fused": "x", "parts": ["a", "b"], "sizes": [1, "n"]}]}))
    expected = (Rule(fused="x", parts=("a", "b"), sizes=(1, "n")),)
    assert load_rules(tmp_path / "r.toml") == load_rules(tmp_path / "r.json") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule", "is no TOML"),
        ("a = 1", "expected \\[\\[rule\\]\\] tables"),
        ("[[rule]]\nfused = 'x'\nparts = ['a', 'b']\nsize = 1", "unexpected keyword argument 'size'"),
        ("[[rule]]\nfused = 'x'", "parts"),
        ("[[rule]]\nfused = 'x'\nparts = []", "at least one part"),
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
        *((text, r"r\.json") for text in ("[1]", '{"rule": {"fused": "x"}}', "{", "\udcff")),
    ],
)
def test_bad_files(text, message, tmp_path: Path) -> None:
    file = tmp_path / ("r.json" if text.startswith(("[1", "{", "\udcff")) else "r.toml")
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        load_rules(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


MEGATRON_KEYS = [
    "model.module.decoder.layers.0.mlp.linear_fc1.weight",
    "model.module.decoder.layers.0.mlp.linear_fc1.bias",
    "model.module.decoder.layers.1.mlp.experts.linear_fc1.weight3",
    "model.module.decoder.layers.1.mlp.experts.linear_fc1.bias3",
    "model.module.decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight",
    "model.module.decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
]


def test_presets() -> None:
    """Each names its source. Megatron's names are of dense layers, and of grouped, sequential and shared experts."""
    assert all(rule.source for name in preset_names() for rule in preset(name))
    for key in MEGATRON_KEYS:
        (match,) = [match for rule in preset("megatron-swiglu") if (match := rule.match(key)) is not None]
        assert match.parts == (f"{key}_w", f"{key}_v")
