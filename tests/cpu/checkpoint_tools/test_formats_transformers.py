"""Fused modules of transformers: the parts, in modules of separate weights, give bitwise the same output; and merging
what was split gives the checkpoint that there was, also where other layers were never fused.

The modules are the real ones, of tiny configurations. Where transformers has the same module with separate weights,
that is the twin; else each fused layer's output is computed by its parts as well.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.pytorch_utils import Conv1D

from checkpoint_tools import merge_state_dict, preset, split_state_dict
from tests.checkpoint_tools.formats import SMALL_CONFIG, exact, stepped
from tests.checkpoint_tools.saves import save
from tests.checkpoint_tools.tool import assert_same, load, made, shown, values_of

TOKENS = torch.tensor([[1, 7, 3, 11, 2, 30, 5], [4, 4, 9, 0, 21, 8, 17]])
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
SMALL = SMALL_CONFIG | {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
SMALL["hidden_act"] = "relu"  # exact: torch's silu of a strided half is not bitwise that of a tensor of its own
GDN = {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 6}


def random_weights(module: nn.Module) -> None:
    torch.manual_seed(0)
    for param in module.parameters():
        param.detach().normal_()


def test_phi3_becomes_llama_with_its_optimizer_through_files(tmp_path: Path) -> None:
    phi = hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL, attn_implementation="eager"))
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, attn_implementation="eager"))
    random_weights(phi)
    exact(phi)
    llama.double()
    optimizer = stepped(phi)
    exact(phi)  # rounded again after the steps
    rules = (*preset("hf-gate-up"), *preset("hf-qkv"))
    model, optim = split_state_dict(phi.state_dict(), get_optimizer_state_dict(phi, optimizer), rules, values=HEADS)
    save(tmp_path / "checkpoint", {"model": model, "optim": optim})
    for param in llama.parameters():
        param.detach().fill_(float("nan"))
    other = torch.optim.AdamW(llama.parameters(), lr=1.0)
    target = {"model": llama.state_dict(), "optim": get_optimizer_state_dict(llama, other)}
    load(target, tmp_path / "checkpoint")
    set_optimizer_state_dict(llama, other, target["optim"])
    exact(llama)
    with torch.no_grad():
        assert torch.equal(phi(TOKENS).logits, llama(TOKENS).logits)
    # Moments, counters and groups: the next step with the same gradients gives the same weights.
    for param in phi.parameters():
        param.grad = torch.randn_like(param)
    gradients, _ = split_state_dict({name: p.grad for name, p in phi.named_parameters()}, None, rules, values=HEADS)
    for name, param in llama.named_parameters():
        param.grad = gradients[name]
    optimizer.step()
    other.step()
    expected, _ = split_state_dict(phi.state_dict(), None, rules, values=HEADS)
    weights = llama.state_dict()
    assert expected.keys() == weights.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


# Experts -------------------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Experts under the name that they have in a model."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


MIXTRAL = hf.MixtralConfig(**SMALL, num_local_experts=3, experts_implementation="eager")
GPT_OSS = hf.GptOssConfig(**SMALL, num_local_experts=3, experts_implementation="eager")
LLAMA4 = hf.Llama4TextConfig(**SMALL, head_dim=6, num_local_experts=3)


def parts_of(fused: nn.Module, name: str) -> dict[str, Tensor]:
    """Gate and up with their own weights, by that preset."""
    random_weights(fused)
    exact(fused)
    parts, _ = split_state_dict(Holder(fused).state_dict(), None, preset(name))
    return {key.removeprefix("experts."): part.contiguous() for key, part in parts.items()}


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_experts_of_which_each_token_goes_to_one(name: str) -> None:
    """Those of gpt-oss are transposed, interleaved, and have a bias."""
    is_oss = name == "gpt-oss"
    fused: Any = GptOssExperts(GPT_OSS) if is_oss else MixtralExperts(MIXTRAL)
    parts = parts_of(fused, "gpt-oss" if is_oss else "hf-gate-up")

    def times(x: Tensor, name: str, expert: int) -> Tensor:
        weight = parts[name][expert]
        return x @ weight + parts[f"{name}_bias"][expert] if is_oss else nn.functional.linear(x, weight)

    def glu(gate: Tensor, up: Tensor) -> Tensor:
        if not is_oss:
            return fused.act_fn(gate) * up
        return fused._apply_gate(torch.stack((gate, up), -1).flatten(-2))  # its sigmoid sees the same strides

    x = torch.randn(7, SMALL["hidden_size"]).bfloat16().double()
    experts = torch.arange(7) % 3
    with torch.no_grad():
        output = fused(x, experts[:, None], torch.ones(7, 1, dtype=torch.float64))
        for expert in range(3):
            gate, up = (times(x[experts == expert], each, expert) for each in ("gate_proj", "up_proj"))
            assert torch.equal(times(glu(gate, up), "down_proj", expert), output[experts == expert])


def test_llama4_experts_transposed() -> None:
    fused = Llama4TextExperts(LLAMA4)
    parts = parts_of(fused, "hf-experts-transposed")
    x = torch.randn(3, 4, SMALL["hidden_size"]).bfloat16().double()
    with torch.no_grad():
        output = fused(x.view(12, -1)).view_as(x)
        gate, up = torch.bmm(x, parts["gate_proj"]), torch.bmm(x, parts["up_proj"])
        assert torch.equal(torch.bmm(up * fused.act_fn(gate), parts["down_proj"]), output)


def test_the_layouts_of_experts_are_told_apart() -> None:
    """Concatenated and transposed: a preset of one refuses the tensors of the other."""
    mixtral, llama4 = (Holder(each).state_dict() for each in (MixtralExperts(MIXTRAL), Llama4TextExperts(LLAMA4)))
    for state, name in ((mixtral, "hf-experts-transposed"), (mixtral, "gpt-oss"), (llama4, "hf-gate-up")):
        with pytest.raises(ValueError, match="is not fused as the rule says"):
            split_state_dict(state, None, preset(name))


# Attention -----------------------------------------------------------------------------------------------------------


def per_head(heads: int) -> Callable[..., Tensor]:
    """Outputs joined group by group: the share of each in turns."""
    return lambda *outputs: torch.cat([output.unflatten(-1, (heads, -1)) for output in outputs], -1).flatten(-2)


def one_after_the_other(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, -1)


def parts_compute_the_same(
    model: nn.Module,
    name: str,
    values: Any,
    layers: dict[str, tuple[str, Callable[..., Tensor]]],
    run: Callable[[Any], Any] = lambda model: model(TOKENS),
) -> None:
    """As the fused layers of these names do, for what the model gives them; the parts' outputs are joined."""
    random_weights(model)
    exact(model, inputs_of=[nn.Linear, Conv1D])
    whole = model.state_dict()
    parts, _ = split_state_dict(whole, None, preset(name), values=values)
    computed: set[str] = set()

    def compute(fused: nn.Module, args: tuple[Tensor], output: Tensor, path: str) -> None:
        parent, _, last = path.rpartition(".")
        names, join = layers[last]
        outputs = []
        for key in (f"{parent}.{each}." for each in names.split()):
            weight, bias = parts[f"{key}weight"], parts.get(f"{key}bias")
            y = args[0] @ (weight if isinstance(fused, Conv1D) else weight.t())
            outputs.append(y if bias is None else y + bias)
            computed.update({f"{key}weight", f"{key}bias"} & parts.keys())
        assert torch.equal(join(*outputs), output)

    for path, module in model.named_modules():
        if path.rpartition(".")[2] in layers:
            module.register_forward_hook(functools.partial(compute, path=path))
    with torch.no_grad():
        run(model)
    assert computed == parts.keys() - whole.keys()


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["multi-query", "grouped"])
def test_falcon(kv_heads: int) -> None:
    options = {"new_decoder_architecture": True, "num_kv_heads": kv_heads} if kv_heads > 1 else {"multi_query": True}
    config = hf.FalconConfig(vocab_size=32, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, **options)
    config._attn_implementation = "eager"
    layers = {"query_key_value": ("q_proj k_proj v_proj", per_head(kv_heads))}
    values = HEADS | {"num_key_value_heads": kv_heads}
    parts_compute_the_same(hf.FalconForCausalLM(config), "hf-query-key-value", values, layers)


def test_gpt2() -> None:
    config = hf.GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    config._attn_implementation = "eager"
    layers = {"c_attn": ("q_attn k_attn v_attn", one_after_the_other)}
    parts_compute_the_same(hf.GPT2LMHeadModel(config).eval(), "hf-gpt2", None, layers)


def test_a_vision_tower() -> None:
    config = Qwen2VLVisionConfig(embed_dim=24, num_heads=4, depth=1)
    config._attn_implementation = "eager"
    x, cos_sin = torch.randn(5, 24, dtype=torch.float64), (torch.randn(5, 6), torch.randn(5, 6))
    parts_compute_the_same(
        nn.ModuleDict({"attn": VisionAttention(config)}),
        "hf-vision-qkv",
        None,
        {"qkv": ("q k v", one_after_the_other)},
        lambda model: model["attn"](x, torch.tensor([0, 5]), position_embeddings=cos_sin),
    )


def test_multi_head_latent_attention() -> None:
    values = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
    config = hf.DeepseekV3Config(**SMALL | {"num_key_value_heads": 4}, **values, q_lora_rank=12)
    config._attn_implementation = "eager"
    x, angles = torch.randn(2, 7, 24, dtype=torch.float64), torch.randn(1, 7, 4, dtype=torch.float64)
    parts_compute_the_same(
        nn.ModuleDict({"self_attn": DeepseekV3Attention(config, 0)}),
        "hf-mla",
        values | {"num_attention_heads": 4},
        {
            "kv_a_proj_with_mqa": ("kv_a_proj k_rope_proj", one_after_the_other),
            "kv_b_proj": ("k_b_proj v_b_proj", per_head(4)),
        },
        lambda model: model["self_attn"](x, (angles.cos(), angles.sin()), None),
    )


# Gated DeltaNet ------------------------------------------------------------------------------------------------------


def test_gated_delta_net_of_qwen3_next_becomes_that_of_qwen3_5() -> None:
    """The parts of one layout, merged into the other: q, k and v stay together in Qwen3.5, in another order."""
    small = {**SMALL, **GDN, "linear_conv_kernel_dim": 3, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    fused = nn.ModuleDict({"linear_attn": Qwen3NextGatedDeltaNet(hf.Qwen3NextConfig(**small), 0)})
    twin = nn.ModuleDict({"linear_attn": Qwen3_5GatedDeltaNet(hf.Qwen3_5TextConfig(**small), 0)})
    random_weights(fused)
    exact(fused)
    rules = preset("hf-gdn")
    parts, _ = split_state_dict(fused.state_dict(), None, rules, values=GDN)
    theirs = [rule for rule in rules if "in_proj_qkv." in rule.fused or "conv1d" in rule.fused]
    merged, _ = merge_state_dict(parts, None, theirs, values=GDN)
    twin.double().load_state_dict(merged)
    exact(twin)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(fused["linear_attn"](x), twin["linear_attn"](x))


# There and back, through files ---------------------------------------------------------------------------------------

SMALLER = {**SMALL, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "hidden_act": "silu"}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_key_value_heads"), 4),
}
DELTA = {**GDN, "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]}
FULL = {"layer_types": ["full_attention"] * 2}
ERNIE = {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}
OF_LLAMA4 = {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 24}

# The class's name, its options, the presets; and whether some layers have gate and up apart.
FAMILIES: list[tuple[str, dict[str, Any], str, bool]] = [
    ("DeepseekV3", {**ROUTED, **LATENT}, "hf-gate-up hf-mla", True),
    ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [0]}, "hf-gate-up", True),
    # They are apart, but the rules alone match a part in two ways, and are refused.
    ("Qwen3Next", {**EXPERTS, **DELTA, "num_experts": 4, "mlp_only_layers": [0]}, "hf-gate-up hf-gdn", False),
    ("Ernie4_5_Moe", ERNIE, "hf-gate-up", True),
    ("Afmoe", {**EXPERTS, **FULL, "num_experts": 4, "num_dense_layers": 1}, "hf-gate-up", True),
    ("Llama4", OF_LLAMA4, "hf-experts-transposed", False),
    ("GptOss", {**FULL, "num_local_experts": 4, "num_experts_per_tok": 2}, "gpt-oss", False),
    ("Mixtral", {"num_local_experts": 4}, "hf-gate-up", False),
    ("Phi3", {}, "hf-gate-up hf-qkv", False),
    ("GPTNeoX", {"num_key_value_heads": 4}, "hf-query-key-value", False),
]


@pytest.mark.parametrize(("name", "options", "presets", "is_mixed"), FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_merging_inverts_splitting(
    name: str, options: dict[str, Any], presets: str, is_mixed: bool, tmp_path: Path
) -> None:
    config = getattr(hf, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")(**{**SMALLER, **options})
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForCausalLM")(config)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, stepped(model))}
    source = save(tmp_path / "source", state)
    (source / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    rules = tuple(rule for each in presets.split() for rule in preset(each))
    split = made("split", source, tmp_path / "split", *rules)
    assert len(values_of(split)) > len(values_of(source))
    merged = made("merge", split, tmp_path / "merged")  # with what split has left, and nothing else
    assert_same(merged, source)
    assert not (merged / "split_record.json").exists()
    if is_mixed:  # the rules alone would merge what was never fused
        (split / "split_record.json").unlink()
        different = shown("diff", source, made("merge", split, tmp_path / "more", *rules, "--yes"), code=1)
        assert "only in A" in different
        assert "only in B" in different
