"""Merging what was split gives the checkpoint that there was: every key, bit by bit, also where others are not fused.

The models are real ones of transformers, of tiny configurations, most with dense layers whose gate and up were never
together beside experts that have them fused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from checkpoint_tools import preset
from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.fuse.request import RECORD_FILE, Split, read_record, record_bytes
from checkpoint_tools.fuse.rules import preset_names
from checkpoint_tools.look.diff import all_keys, diff
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import assert_one_line, run_here, save
from tests.checkpoint_tools.formats import stepped
from tests.checkpoint_tools.offline import assert_same, converted, rewritten, rule
from tests.cpu.checkpoint_tools.test_formats_transformers import GDN
from tests.cpu.checkpoint_tools.test_formats_transformers import SMALL as LARGER

SMALL = {**LARGER, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "hidden_act": "silu"}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_key_value_heads"), 4),
}
DELTA = {**GDN, "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention"] * 2}

# Family → the class's name, its options, the presets; and whether some layers have gate and up apart.
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], bool]] = {
    "DeepSeek-V3": ("DeepseekV3", {**ROUTED, **LATENT}, ("hf-gate-up", "hf-mla"), True),
    "Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [0]}, ("hf-gate-up",), True),
    "Qwen3-Next": (
        "Qwen3Next",
        {**EXPERTS, **DELTA, "num_experts": 4, "mlp_only_layers": [0]},
        ("hf-gate-up", "hf-gdn"),
        False,  # they are apart, but the rules alone match a part in two ways, and are refused
    ),
    "ERNIE 4.5": (
        "Ernie4_5_Moe",
        {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
        ("hf-gate-up",),
        True,
    ),
    "AFMoE": ("Afmoe", {**EXPERTS, **FULL, "num_experts": 4, "num_dense_layers": 1}, ("hf-gate-up",), True),
    "Llama 4": (
        "Llama4",
        {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 24},
        ("hf-experts-transposed",),
        False,
    ),
    "gpt-oss": ("GptOss", {**FULL, "num_local_experts": 4, "num_experts_per_tok": 2}, ("gpt-oss",), False),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}, ("hf-gate-up",), False),
    "Phi-3": ("Phi3", {}, ("hf-gate-up", "hf-qkv"), False),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": 4}, ("hf-query-key-value",), False),
}


def model_of(name: str, options: dict[str, Any]) -> Any:
    config = getattr(hf, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")(**{**SMALL, **options})
    torch.manual_seed(0)
    return getattr(hf, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_merging_inverts_splitting(family: str, tmp_path: Path) -> None:
    name, options, presets, is_mixed = FAMILIES[family]
    model = model_of(name, options)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, stepped(model))}
    source = save(tmp_path / "source", state)
    (source / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    rules = tuple(rule for name in presets for rule in preset(name))
    before = open_checkpoint(source)
    split = rewritten("split", source, tmp_path / "split", *rules)
    assert len(split.tensors) > len(before.tensors)
    merged = rewritten("merge", tmp_path / "split", tmp_path / "merged")  # with what split has left, and nothing else
    assert_same(merged, before)
    assert not (tmp_path / "merged" / RECORD_FILE).exists()
    if is_mixed:  # the rules alone would merge what was never fused
        (tmp_path / "split" / RECORD_FILE).unlink()
        more = rewritten("merge", tmp_path / "split", tmp_path / "more", *rules, is_sure=True)
        assert {found.kind for found in diff(before, more, all_keys(before, more))} >= {"only in A", "only in B"}


# The record ----------------------------------------------------------------------------------------------------------

PARTS = {"0.gate.weight": torch.ones(2, 3), "0.up.weight": torch.zeros(2, 3)}
WHOLE = {"1.gate_up.weight": torch.arange(24.0).view(8, 3)}


def test_splits_are_undone(tmp_path: Path) -> None:
    """Two of them one after the other; also through safetensors, without a model, and with rules."""
    first, second = rule(), rule(fused="{p}up.weight", parts=("{p}a.weight", "{p}b.weight"))
    source = save(tmp_path / "source", WHOLE)
    rewritten("split", source, tmp_path / "1", first)
    rewritten("split", tmp_path / "1", tmp_path / "2", second)
    record = read_record(open_checkpoint(tmp_path / "2"))
    assert [each.fused for each in record] == [{"1.gate_up.weight"}, {"1.up.weight"}]
    back = rewritten("merge", tmp_path / "2", tmp_path / "3")
    assert set(back.tensors) == {"1.gate.weight", "1.up.weight"}
    assert_same(rewritten("merge", tmp_path / "3", tmp_path / "4"), open_checkpoint(source))
    of_state = {"state": {key: {"exp_avg": value} for key, value in (PARTS | WHOLE).items()}}
    for name, state in {"model": PARTS | WHOLE, "optim": of_state}.items():
        source = save(tmp_path / name, {name: state})
        rewritten("split", source, tmp_path / f"{name}-split", rule())
        converted(tmp_path / f"{name}-split", tmp_path / f"{name}-safetensors")
        converted(tmp_path / f"{name}-safetensors", tmp_path / f"{name}-back")
        for n, rules in enumerate(([], [rule()])):  # with rules too, only what was fused is merged
            merged = rewritten("merge", tmp_path / f"{name}-back", tmp_path / f"{name}-merged-{n}", *rules)
            assert_same(merged, open_checkpoint(source))


def test_without_a_record_a_person_has_to_say(tmp_path: Path) -> None:
    source = save(tmp_path / "source", PARTS | {f"1{key[1:]}": value for key, value in PARTS.items()})
    text = '{"rule": [{"fused": "{p}gate_up.weight", "parts": ["{p}gate.weight", "{p}up.weight"]}]}'
    (tmp_path / "rules.json").write_text(text)
    command = ("merge", source, tmp_path / "new", "--rules", tmp_path / "rules.json")
    assert_one_line(
        run_here(*command),
        f"{source} has no split_record.json",
        "would be: 0.gate_up.weight, 1.gate_up.weight. Look at it with --dry-run, and pass --yes, or --only PATTERN",
    )
    assert not (tmp_path / "new").exists()
    assert "2 tensors and 0 state tensors merged" in run_here(*command, "--dry-run").stdout
    assert_one_line(run_here("merge", source, tmp_path / "new"), "no rules, and", "has no split_record.json; give")
    assert_one_line(run_here(*command, "--only", "0.*", "--only", "7.*"), "--only that matches nothing: 7.*")
    assert run_here(*command, "--only", "0.*").returncode == 0
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"0.gate_up.weight", "1.gate.weight", "1.up.weight"}
    everything = ("merge", source, tmp_path / "all", "--rules", tmp_path / "rules.json", "--yes")
    assert run_here(*everything).returncode == 0
    assert set(open_checkpoint(tmp_path / "all").tensors) == {"0.gate_up.weight", "1.gate_up.weight"}


def test_a_record_that_is_none(tmp_path: Path) -> None:
    source = save(tmp_path / "source", PARTS)
    for content in ("[]", "{", '{"format": 2}', '{"format": "checkpoint_tools split 1", "splits": [{"rules": [1]}]}'):
        (source / RECORD_FILE).write_text(content)
        with pytest.raises(CheckpointError, match="is not what split leaves"):
            rewritten("merge", source, tmp_path / "new", rule())


UNBOUNDED = ("{p:(a+)+}", "{p:(a|aa)*}", "{p:a*a*a*a*a*}", "{p:.*.*.*}", "{p:(?=.*)a?}", "{p}{q}{r}")
BOUNDED = ("{p}.{q:weight|weight\\d+|}", "{p:.*a\\.}")


@pytest.mark.parametrize("placeholders", [*UNBOUNDED, *BOUNDED])
def test_patterns_of_a_record_that_somebody_else_has_written(tmp_path: Path, placeholders: str) -> None:
    """Not one of them is tried: matching a name of thirty letters with the first takes minutes."""
    text = "".join(f"{{{name}}}" for name in "pqr" if f"{{{name}" in placeholders)
    own = rule(fused=f"{placeholders}gate_up", parts=(f"{text}gate", f"{text}up"))
    assert own.is_bounded == (placeholders in BOUNDED)
    source = save(tmp_path / "source", {"b.gate": torch.ones(2, 2), f"{'a' * 40}!gate": torch.ones(2, 2)})
    (source / RECORD_FILE).write_bytes(record_bytes([Split((own,), {}, frozenset(["b.gate_up"]))]))
    if not own.is_bounded:
        with pytest.raises(CheckpointError, match="has a rule of its own"):
            rewritten("merge", source, tmp_path / "new")


def test_the_presets_are_bounded_and_long_keys_are_matched_by_none() -> None:
    for name in preset_names():
        for own in preset(name):
            assert own.is_bounded
            assert own.match("a." * 5000 + "weight") is None
    (first, *_) = preset("megatron-swiglu")
    assert first.match("a." * 300 + "linear_fc1.weight") is not None
    assert first.match("a." * 600 + "linear_fc1.weight") is None
