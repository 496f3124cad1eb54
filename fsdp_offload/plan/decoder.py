"""A plain decoder from a Hugging Face config: RMSNorm, rotary attention with grouped heads, SwiGLU or experts.

It stands for a model of which only the config is known, and trains for real in the bench. Fused kernels of a framework
need less memory than its plain torch operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields of a config that sizes and times depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0

    @staticmethod
    def of(config: Mapping[str, Any]) -> "DecoderConfig":
        """Read a ``config.json``.

        Raises:
            ValueError: a field is missing, or says of something that this decoder has not; the message names it.
        """
        config = config.get("text_config", config)
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in needed if not isinstance(config.get(name), int) or config[name] < 1]
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        wide: Any = config.get("moe_intermediate_size") if experts else None
        wide = wide or config.get("intermediate_size")
        missing += [] if isinstance(wide, int) and wide > 0 else ["intermediate_size"]
        if missing:
            raise ValueError(f"not the config of a decoder: {', '.join(missing)} must be positive integers in it")
        if others := _other_parts(config):
            raise ValueError(
                f"not a plain decoder: it has {', '.join(others)}. Give package.module:function, which makes the module"
            )
        heads = config["num_attention_heads"]
        if heads % (config.get("num_key_value_heads") or heads):
            raise ValueError(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={config['num_key_value_heads']}"
            )
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=wide,
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            attention_bias=bool(config.get("attention_bias") or config.get("model_type") == "qwen2"),
            qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
            num_experts=experts,
            num_experts_per_tok=config.get("num_experts_per_tok") or 0,
        )


_OTHER_PARTS = {
    "kv_lora_rank": "latent attention",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "first_k_dense_replace": "layers of two kinds",
    "interleave_moe_layer_step": "layers of two kinds",
}


def _other_parts(config: Mapping[str, Any]) -> list[str]:
    """List what a model of this config has and a :class:`Decoder` has not, where it would change sizes."""
    parts = [f"{what} ({field})" for field, what in _OTHER_PARTS.items() if config.get(field)]
    if "linear_attention" in (config.get("layer_types") or ()):
        parts.append("linear attention (layer_types)")
    activation = config.get("hidden_act") or config.get("activation_function") or ""
    if "rms_norm_eps" not in config and activation.startswith(("gelu", "relu", "quick_gelu")):
        parts.append(f"an MLP without a gate (hidden_act={activation!r}, no rms_norm_eps)")
    return parts


class Decoder(nn.Module):
    """Returns the loss of the next token for ``(batch, length + 1)`` tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)])
        self.attention = _Attention(config)
        self.mlp = _Experts(config) if config.num_experts else _MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, wide, bias=config.attention_bias)
        self.key = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.value = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.out = nn.Linear(wide, config.hidden_size, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(self.head_dim) for _ in range(2 if config.qk_norm else 0))

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        angles = torch.outer(
            torch.arange(x.shape[1], device=x.device),
            10_000.0 ** -torch.linspace(0, 1, self.head_dim // 2, device=x.device),
        )[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        query, key, value = (one.transpose(1, 2) for one in (_rotated(query, cos, sin), _rotated(key, cos, sin), value))
        is_grouped = key.shape[1] != query.shape[1]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class _Experts(nn.Module):
    """Experts that get equally many tokens each, as in a balanced batch; what is over is dropped."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        count, inner, outer = config.num_experts, config.intermediate_size, config.hidden_size
        self.per_token = config.num_experts_per_tok
        self.router = nn.Linear(outer, count, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(count, outer, inner) * outer**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, inner, outer) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).softmax(-1).topk(self.per_token)
        capacity = experts.numel() // self.gate.shape[0]
        chosen = experts.flatten().argsort()[: capacity * self.gate.shape[0]]  # expert by expert
        mine = tokens[chosen // self.per_token].unflatten(0, (-1, capacity))
        inner = nn.functional.silu(mine @ self.gate) * (mine @ self.up)
        outs = (inner @ self.down).flatten(0, 1) * weights.flatten()[chosen, None]
        return torch.zeros_like(tokens).index_add(0, chosen // self.per_token, outs).view_as(x)
