"""Experts in one tensor, as transformers 5 trains them, and one by one, as it saves them: there and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from checkpoint_tools import Rule, merge_state_dict, split_state_dict
from tests.checkpoint_tools.formats import SMALL_CONFIG, stepped
from tests.checkpoint_tools.saves import same_bits, save
from tests.checkpoint_tools.tool import assert_same, made, metadata_of, values_of

SMALL: dict[str, Any] = SMALL_CONFIG | {"head_dim": 4, "num_experts_per_tok": 1, "pad_token_id": 0}
EXPERTS = 3
VALUE = ("--value", f"num_experts={EXPERTS}")


def saved(model: nn.Module, folder: Path) -> Path:
    """The model and its optimizer's state, after two steps."""
    torch.manual_seed(0)
    optimizer = stepped(model)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    return save(folder, state)


def split(source: Path, folder: Path, *presets: str) -> Path:
    for number, name in enumerate(presets):
        source = made("split", source, folder / f"split {number}", "--preset", name, *VALUE * (name == "hf-experts"))
    return source


def merged(source: Path, folder: Path, presets: Sequence[str]) -> Path:
    for number, _ in enumerate(presets):  # each as the last split that is left
        source = made("merge", source, folder / f"merged {number}")
    return source


def test_qwen3_moe_as_transformers_itself_saves_it(tmp_path: Path) -> None:
    config = hf.Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, moe_intermediate_size=6, decoder_sparse_step=2)
    model = hf.Qwen3MoeForCausalLM(config)
    presets = ("hf-gate-up", "hf-experts")
    source = saved(model, tmp_path / "source")
    found = values_of(split(source, tmp_path, *presets))
    model.save_pretrained(tmp_path / "hub")
    expected = load_file(tmp_path / "hub" / "model.safetensors")
    assert {key.removeprefix("model.") for key in found if key.startswith("model.")} == expected.keys() | {
        "lm_head.weight"
    }
    assert all(same_bits(value, found[f"model.{name}"]) for name, value in expected.items())
    before = values_of(source)
    for entry in ("exp_avg", "exp_avg_sq", "step"):
        for number in range(EXPERTS):
            for part, fused in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj")):
                lead = "optim.state.model.layers.1.mlp.experts"
                whole, own = before[f"{lead}.{fused}.{entry}"], found[f"{lead}.{number}.{part}.weight.{entry}"]
                parts = whole[number].chunk(2) if fused == "gate_up_proj" and whole.dim() else ()
                assert same_bits(own, parts[part == "up_proj"] if parts else whole[number] if whole.dim() else whole)
    assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight" in found["optim.param_groups.0.params"]
    assert_same(merged(tmp_path / "split 1", tmp_path, presets), source)


def test_gpt_oss_keeps_its_experts_transposed(tmp_path: Path) -> None:
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, num_local_experts=EXPERTS))
    presets = ("gpt-oss", "hf-experts")
    source = saved(model, tmp_path / "source")
    found, before = values_of(split(source, tmp_path, *presets)), values_of(source)
    for lead, end in (("model.model", ""), ("optim.state.model", ".exp_avg")):
        own = f"{lead}.layers.0.mlp.experts."
        for number in range(EXPERTS):
            for name, first in (("gate_proj", 0), ("up_proj", 1)):
                assert same_bits(
                    found[f"{own}{number}.{name}.weight{end}"], before[f"{own}gate_up_proj{end}"][number, :, first::2]
                )
                assert same_bits(
                    found[f"{own}{number}.{name}.bias{end}"], before[f"{own}gate_up_proj_bias{end}"][number, first::2]
                )
            assert same_bits(found[f"{own}{number}.down_proj.weight{end}"], before[f"{own}down_proj{end}"][number])
            assert same_bits(found[f"{own}{number}.down_proj.bias{end}"], before[f"{own}down_proj_bias{end}"][number])
    assert_same(merged(tmp_path / "split 1", tmp_path, presets), source)


def test_mixtral_by_its_old_names(tmp_path: Path) -> None:
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=EXPERTS))
    source = saved(model, tmp_path / "source")
    options = ("--family", "mixtral", *VALUE)
    there = made("rename", source, tmp_path / "there", "--from", "transformers5", "--to", "hf", *options)
    found = values_of(there)
    model.save_pretrained(tmp_path / "hub")
    expected = load_file(tmp_path / "hub" / "model.safetensors")
    assert metadata_of(there).planner_data["model.lm_head.weight"] == ("model", "lm_head.weight")
    assert any("block_sparse_moe.experts.2.w2.weight" in name for name in expected)
    assert all(same_bits(value, found[f"model.{name}"]) for name, value in expected.items())
    before, own = values_of(source), "optim.state.model.layers.1."
    gate_up = before[f"{own}mlp.experts.gate_up_proj.exp_avg"]
    assert same_bits(found[f"{own}block_sparse_moe.experts.2.w3.weight.exp_avg"], gate_up[2].chunk(2)[1])
    assert same_bits(found[f"{own}block_sparse_moe.gate.weight.exp_avg"], before[f"{own}mlp.gate.weight.exp_avg"])
    back = made("rename", there, tmp_path / "back", "--from", "hf", "--to", "transformers5", *options)
    after = values_of(back)
    assert after.keys() == before.keys()
    assert [key for key, value in before.items() if not same_bits(value, after[key])] == []


def test_a_rule_whose_parts_are_counted_by_a_value() -> None:
    with pytest.raises(ValueError, match="has other placeholders"):
        Rule(fused="{p}", parts=("{p}.{each}", "{q}"), layout="stacked", each="n")
    rule = Rule(fused="{p}.all", parts=("{p}.{each}.w",), layout="stacked", each="2 * n")
    assert rule.value_names == {"n"}
    state = {"experts.all": torch.arange(24.0).view(4, 2, 3)}
    found, _ = split_state_dict(state, None, [rule], values={"n": 2})
    assert list(found) == [f"experts.{n}.w" for n in range(4)]
    back, _ = merge_state_dict(found, None, [rule], values={"n": 2})
    assert back["experts.all"] is state["experts.all"]
