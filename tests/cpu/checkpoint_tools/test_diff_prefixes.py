"""Checkpoints of one model whose keys have a prefix on one side alone, as after a round trip, are compared."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from checkpoint_tools.look.diff import aligned
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import run_here, save
from tests.checkpoint_tools.converted import converted
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line

WEIGHTS = {"model.layers.0.weight": torch.arange(6.0).view(2, 3), "lm_head.weight": torch.ones(4)}


def test_hugging_face_and_what_convert_makes_of_it(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    converted(tmp_path / "model.safetensors", tmp_path / "dcp")
    same = run_here("diff", tmp_path / "model.safetensors", tmp_path / "dcp")
    turned = run_here("diff", tmp_path / "dcp", tmp_path / "model.safetensors", "--json")
    assert same.returncode == 0, same.stdout
    assert same.stdout.splitlines() == [
        "note: keys of the model begin with 'model.' in B alone, compared without",
        "the same: 2 keys, bit by bit",
    ]
    assert turned.returncode == 0
    assert json.loads(turned.stdout)["notes"] == ["keys of the model begin with 'model.' in A alone, compared without"]
    plain = run_here("diff", tmp_path / "model.safetensors", tmp_path / "dcp", "--key-prefix", "")
    assert plain.returncode == 1
    assert "different: 4 of 4 keys" in plain.stdout


def test_a_difference_is_still_found(tmp_path: Path) -> None:
    first = save(tmp_path / "first", {key: value.clone() for key, value in WEIGHTS.items()})
    changed = {**WEIGHTS, "lm_head.weight": torch.zeros(4), "new": torch.ones(1)}
    second = save(tmp_path / "second", {f"module.{key}": value for key, value in changed.items()})
    different = run_here("diff", first, second)
    assert different.returncode == 1
    assert "lm_head.weight  values" in different.stdout
    assert "different: 2 of 3 keys" in different.stdout


def test_keys_of_both_sides_are_left_alone(tmp_path: Path) -> None:
    first = open_checkpoint(save(tmp_path / "first", WEIGHTS))
    second = open_checkpoint(save(tmp_path / "second", {**WEIGHTS, "model.lm_head.weight": torch.ones(1)}))
    assert aligned(first, second) == (first, second, [])
    other = open_checkpoint(save(tmp_path / "other", {"a": torch.ones(1)}))
    assert aligned(first, other) == (first, other, [])


def test_a_prefix_that_nothing_has(tmp_path: Path) -> None:
    first, second = save(tmp_path / "first", WEIGHTS), save(tmp_path / "second", WEIGHTS)
    message = "no key of one side is that and a key of the other"
    assert_one_line(run_here("diff", first, second, "--key-prefix", "x."), message)
    assert_one_line(run_here("diff", first, second, "--key-prefix", "model."), message)
