"""What Megatron-LM names and fuses in another way since pull request 6271: split as its own handlers do, and back."""

from pathlib import Path

import torch

from tests.checkpoint_tools.saves import same_bits, save
from tests.checkpoint_tools.tool import assert_same, made, values_of

SIZES = {"q_lora_rank": 4, "kv_lora_rank": 6, "qk_pos_emb_head_dim": 2, "tp_size": 2}
MLA = [word for name, value in SIZES.items() for word in ("--value", f"{name}={value}")]
DOWN = "decoder.layers.0.self_attention.linear_qkv_down_proj"
INNER = "mtp.layers.0.mtp_model_layer"


def fsdp_dtensor(folder: Path) -> Path:
    """As core 0.17 to 0.19 write it, with an extra state in the model."""
    shapes = {
        f"{DOWN}.weight": (12, 3),
        f"{DOWN}.layer_norm_weight": (3,),
        f"{INNER}.mlp.linear_fc1.weight": (8, 3),
        f"{INNER}.mlp.linear_fc2.weight": (3, 4),
        "mtp.layers.0.enorm.weight": (3,),
    }
    model = {f"module.{name}": torch.randn(shape) for name, shape in shapes.items()}
    state = {
        f"module.module.module.{name}": {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in shapes.items()
    }
    extra = {f"module.{name}._extra_state": b"\0" for name in (DOWN, f"{INNER}.mlp.linear_fc1")}
    meta = {name: {"lr": 0.5, "step": 7} for name in state}
    return save(folder, {"model": model | extra, "optimizer": {"state": state, "param_to_group_meta": meta}})


def test_the_fused_down_projection_of_mla(tmp_path: Path) -> None:
    source = fsdp_dtensor(tmp_path / "source")
    split = made("split", source, tmp_path / "split", "--preset", "megatron-mla", *MLA)
    before, after = values_of(source), values_of(split)
    for lead, end in (("model.module.", ""), *(("optimizer.state.module.module.module.", e) for e in STATE)):
        attention = f"{lead}decoder.layers.0.self_attention"
        ranks = before.pop(f"{lead}{DOWN}.weight{end}").view(2, 6, 3)  # each has 2 rows of q and 4 of kv
        assert same_bits(after.pop(f"{attention}.linear_q_down_proj.weight{end}"), ranks[:, :2].flatten(0, 1))
        assert same_bits(after.pop(f"{attention}.linear_kv_down_proj.weight{end}"), ranks[:, 2:].flatten(0, 1))
        norm = before.pop(f"{lead}{DOWN}.layer_norm_weight{end}")
        assert same_bits(after.pop(f"{lead}decoder.layers.0.input_layernorm.weight{end}"), norm)
    assert before.keys() == after.keys()
    assert all(same_bits(value, after[key]) for key, value in before.items())
    assert_same(made("merge", split, tmp_path / "merged"), source)


STATE = (".exp_avg", ".exp_avg_sq")


def test_layers_of_multi_token_prediction(tmp_path: Path) -> None:
    source = fsdp_dtensor(tmp_path / "source")
    renamed = made("split", source, tmp_path / "renamed", "--preset", "megatron-mtp")
    before, after = values_of(source), values_of(renamed)
    kept = ("_extra_state", "param_to_group_meta")  # as they are: Megatron drops the one, and asks for the other so
    new = {key: key if any(word in key for word in kept) else key.replace(*INNERS) for key in before}
    assert {*new.values()} == after.keys()
    assert all(same_bits(value, after[new[key]]) for key, value in before.items())
    gate = made("split", renamed, tmp_path / "split", "--preset", "megatron-swiglu", "--value", "tp_size=1")
    assert "model.module.mtp.layers.0.transformer_layer.mlp.linear_fc1.weight_w" in values_of(gate)
    assert_same(made("merge", made("merge", gate, tmp_path / "one"), tmp_path / "merged"), source)


INNERS = ("mtp_model_layer", "transformer_layer")
