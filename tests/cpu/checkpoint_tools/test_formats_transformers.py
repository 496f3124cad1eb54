"""Fused modules of transformers, split and loaded into modules of separate weights: bitwise the same output.

The modules are the real ones, of tiny configurations. Where transformers has the same module with separate weights,
that is the twin; else the fused Linear is exchanged in a copy.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from tests.checkpoint_tools.checkpoints import save
from tests.checkpoint_tools.formats import exact, separated, stepped

TOKENS = torch.tensor([[1, 7, 3, 11, 2, 30, 5], [4, 4, 9, 0, 21, 8, 17]])
SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    # Exact: torch's silu of a strided half is not bitwise that of a tensor of its own.
    "hidden_act": "relu",
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}


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
    optim_state = get_optimizer_state_dict(phi, optimizer)
    model, optim = split_state_dict(phi.state_dict(), optim_state, rules, values=HEADS)
    save(tmp_path / "checkpoint", {"model": model, "optim": optim})
    for param in llama.parameters():
        param.detach().fill_(float("nan"))
    other = torch.optim.AdamW(llama.parameters(), lr=1.0)
    target = {"model": llama.state_dict(), "optim": get_optimizer_state_dict(llama, other)}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.load(target, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
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


def parts_of(fused: nn.Module, name: str) -> dict[str, Tensor]:
    """Gate and up with their own weights, by that preset."""
    random_weights(fused)
    exact(fused)
    parts, _ = split_state_dict(Holder(fused).state_dict(), None, preset(name))
    return {key.removeprefix("experts."): part.contiguous() for key, part in parts.items()}


def routed_equally(fused: nn.Module, parts: dict[str, Tensor], glu: Any, *, is_transposed: bool) -> None:
    """Every token goes to one expert, with weight 1; of the parts, one expert at a time."""

    def times(x: Tensor, name: str, expert: int) -> Tensor:
        weight, bias = parts[name][expert], parts.get(f"{name}_bias")
        y = x @ weight if is_transposed else nn.functional.linear(x, weight)
        return y if bias is None else y + bias[expert]

    x = torch.randn(7, SMALL["hidden_size"]).bfloat16().double()
    experts = torch.arange(7) % 3
    with torch.no_grad():
        output = fused(x, experts[:, None], torch.ones(7, 1, dtype=torch.float64))
        for expert in range(3):
            gate, up = (times(x[experts == expert], name, expert) for name in ("gate_proj", "up_proj"))
            assert torch.equal(times(glu(gate, up), "down_proj", expert), output[experts == expert])


def test_mixtral_experts() -> None:
    fused = MixtralExperts(hf.MixtralConfig(**SMALL, num_local_experts=3, experts_implementation="eager"))
    parts = parts_of(fused, "hf-gate-up")
    routed_equally(fused, parts, lambda gate, up: fused.act_fn(gate) * up, is_transposed=False)


def test_gpt_oss_experts_interleaved_with_their_bias() -> None:
    fused = GptOssExperts(hf.GptOssConfig(**SMALL, num_local_experts=3, experts_implementation="eager"))

    def glu(gate: Tensor, up: Tensor) -> Tensor:
        return fused._apply_gate(torch.stack((gate, up), -1).flatten(-2))  # its sigmoid sees the same strides

    routed_equally(fused, parts_of(fused, "gpt-oss"), glu, is_transposed=True)


def test_llama4_experts_transposed() -> None:
    fused = Llama4TextExperts(hf.Llama4TextConfig(**SMALL, head_dim=6, num_local_experts=3))
    parts = parts_of(fused, "hf-experts-transposed")
    x = torch.randn(3, 4, SMALL["hidden_size"]).bfloat16().double()
    with torch.no_grad():
        output = fused(x.view(12, -1)).view_as(x)
        gate, up = torch.bmm(x, parts["gate_proj"]), torch.bmm(x, parts["up_proj"])
        assert torch.equal(torch.bmm(up * fused.act_fn(gate), parts["down_proj"]), output)


def test_the_layouts_of_experts_are_told_apart() -> None:
    """Concatenated and transposed: a preset of one refuses the tensors of the other."""
    mixtral = Holder(MixtralExperts(hf.MixtralConfig(**SMALL, num_local_experts=3))).state_dict()
    llama4 = Holder(Llama4TextExperts(hf.Llama4TextConfig(**SMALL, head_dim=6, num_local_experts=3))).state_dict()
    for state, name in ((mixtral, "hf-experts-transposed"), (mixtral, "gpt-oss"), (llama4, "hf-gate-up")):
        with pytest.raises(ValueError, match="is not fused as the rule says"):
            split_state_dict(state, None, preset(name))


# Attention -----------------------------------------------------------------------------------------------------------


def per_head(heads: int) -> Callable[..., Tensor]:
    """Outputs joined group by group: the share of each in turns."""
    return lambda *outputs: torch.cat([output.unflatten(-1, (heads, -1)) for output in outputs], -1).flatten(-2)


def one_after_the_other(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, -1)


def linears(**sizes: int) -> Callable[[nn.Module], dict[str, nn.Module]]:
    """Of these output sizes, otherwise as the fused one."""
    return lambda fused: {
        name: nn.Linear(fused.in_features, size, fused.bias is not None) for name, size in sizes.items()
    }


def outputs_are_equal(
    fused: nn.Module, twin: nn.Module, rules: Any, values: Any, run: Callable[[nn.Module], Tensor]
) -> None:
    random_weights(fused)
    exact(fused, inputs_of=[nn.Linear, Conv1D])
    parts, _ = split_state_dict(fused.state_dict(), None, rules, values=values)
    twin.double().load_state_dict(parts)
    exact(twin, inputs_of=[nn.Linear, Conv1D])
    with torch.no_grad():
        assert torch.equal(run(twin), run(fused))


def logits(model: nn.Module) -> Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["multi-query", "grouped"])
def test_falcon(kv_heads: int) -> None:
    options = {"new_decoder_architecture": True, "num_kv_heads": kv_heads} if kv_heads > 1 else {"multi_query": True}
    config = hf.FalconConfig(vocab_size=32, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, **options)
    config._attn_implementation = "eager"
    model = hf.FalconForCausalLM(config)
    sizes = linears(q_proj=24, k_proj=6 * kv_heads, v_proj=6 * kv_heads)
    twin = separated(model, "query_key_value", sizes, per_head(kv_heads))
    values = HEADS | {"num_key_value_heads": kv_heads}
    outputs_are_equal(model, twin, preset("hf-query-key-value"), values, logits)


def test_gpt2() -> None:
    config = hf.GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    config._attn_implementation = "eager"
    model = hf.GPT2LMHeadModel(config).eval()
    twin = separated(
        model,
        "c_attn",
        lambda fused: {name: Conv1D(24, fused.nx) for name in ("q_attn", "k_attn", "v_attn")},
        one_after_the_other,
    )
    outputs_are_equal(model, twin, preset("hf-gpt2"), None, logits)


def test_a_vision_tower() -> None:
    config = Qwen2VLVisionConfig(embed_dim=24, num_heads=4, depth=1)
    config._attn_implementation = "eager"
    model = nn.ModuleDict({"attn": VisionAttention(config)})
    twin = separated(model, "qkv", linears(q=24, k=24, v=24), one_after_the_other)
    x = torch.randn(5, 24, dtype=torch.float64)
    cos_sin = (torch.randn(5, 6), torch.randn(5, 6))
    outputs_are_equal(
        model,
        twin,
        preset("hf-vision-qkv"),
        None,
        lambda module: module["attn"](x, torch.tensor([0, 5]), position_embeddings=cos_sin),
    )


def test_multi_head_latent_attention() -> None:
    values = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
    config = hf.DeepseekV3Config(**SMALL | {"num_key_value_heads": 4}, **values, q_lora_rank=12)
    config._attn_implementation = "eager"
    model = nn.ModuleDict({"self_attn": DeepseekV3Attention(config, 0)})
    twin = separated(model, "kv_a_proj_with_mqa", linears(kv_a_proj=10, k_rope_proj=4), one_after_the_other)
    twin = separated(twin, "kv_b_proj", linears(k_b_proj=24, v_b_proj=20), per_head(4))
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    angles = torch.randn(1, 7, 4, dtype=torch.float64)
    outputs_are_equal(
        model,
        twin,
        preset("hf-mla"),
        values | {"num_attention_heads": 4},
        lambda module: module["self_attn"](x, (angles.cos(), angles.sin()), None)[0],
    )


# Gated DeltaNet ------------------------------------------------------------------------------------------------------

GDN = {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 6}


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
