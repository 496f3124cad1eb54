"""A model to plan for: the parameters of each ``fully_shard`` group, and a way to run it on the meta device.

If only a config is given, a plain decoder stands for the model. A framework's fused kernels need less memory than the
decoder's plain torch operations.
"""

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .trace import Trace, trace


@dataclass(frozen=True)
class Model:
    """A model whose forward and backward can be traced."""

    name: str
    module: nn.Module  # usually on the meta device; its values are never read
    groups: tuple[nn.Module, ...]  # arguments of ``fully_shard``, in forward order, the root last
    loss: Callable[[nn.Module, Tensor], Tensor]  # of the module, for (sequences, length + 1) token numbers
    config: Mapping[str, Any] = field(default_factory=dict)  # from which :class:`Decoder` made the module
    _traced: dict[Any, Trace] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        module, given = vars(self)["module"], vars(self)["groups"]
        own = set(module.modules()) if isinstance(module, nn.Module) else set()
        groups = list(given) if isinstance(given, list | tuple) else []
        if not (own.issuperset(groups) and groups[-1:] == [module] and callable(self.loss)):
            raise ValueError(
                f"Model {self.name!r}: expected a module, a tuple of modules of it whose last is the module itself, "
                "and a loss that can be called. Write Model(name, module, (*module.layers, module), loss)."
            )

    @property
    def numel(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(param.numel() for param in self.module.parameters())

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of each group's parameters; shared ones belong to the first group that has them."""
        seen: set[nn.Parameter] = set()
        shapes = []
        for group in self.groups:
            own = [param for param in dict.fromkeys(group.parameters()) if param not in seen]
            seen.update(own)
            shapes.append([tuple(param.shape) for param in own if param.requires_grad])
        return shapes

    def trace(
        self, sequences: int, length: int, dtype: torch.dtype, recomputes: bool = False, expert_parallel: int = 1
    ) -> Trace:
        """Trace one micro-batch of one rank; raise a ValueError if the model cannot run on the meta device."""
        part, key = self, (sequences, length, dtype, recomputes, expert_parallel)
        if key in self._traced:
            return self._traced[key]
        if expert_parallel > 1:
            with torch.device("meta"):
                part = model_of(Decoder(self.config, expert_parallel))
        try:
            tokens = torch.empty(sequences, length + 1, dtype=torch.long, device="meta")
            made = trace(part.module, part.groups, lambda module: self.loss(module, tokens), dtype, recomputes)
            return self._traced.setdefault(key, made)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"model {self.name!r} cannot be run forward and backward on the meta device, for {sequences} × "
                f"{length + 1} token numbers: {type(error).__name__}: {first_line}"
            ) from error


def model_of(model: "Model | nn.Module | str | Path") -> Model:
    """Make a :class:`Model` of a module, a name or a path.

    A name is that of a built-in config (``builtin_models()``), or ``"package.module:name"`` of a function without
    arguments that makes a module or a :class:`Model`, with the meta device as default. A path is that of a
    ``config.json`` or its folder. If the module does not return its loss for token numbers, give a :class:`Model`.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 0]
        blocks = max(lists, key=lambda one: sum(param.numel() for param in one.parameters()), default=())
        return Model(type(model).__name__, model, (*blocks, model), _loss)
    if not isinstance(model, str | Path):
        raise ValueError(f"model must be a module, a name or a path; got {type(model).__name__}")
    if ":" not in str(model) or Path(model).exists():
        path = {name.lower(): path for name, path in builtin_models().items()}.get(str(model).lower(), Path(model))
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            why = "a folder without config.json" if Path(model).is_dir() else "no such file or built-in model"
            raise ValueError(f"model {str(model)!r}: {why}; there are {', '.join(builtin_models())}. Give {_CHOICES}.")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            with torch.device("meta"):
                decoder = model_of(Decoder(config if isinstance(config, dict) else {}))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"model {str(model)!r}: {path} is no JSON ({error}). Give {_CHOICES}.") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"model {str(model)!r}: {path}: {error}") from None
        return replace(decoder, name=path.resolve().parent.name if path.stem == "config" else path.stem, config=config)
    module, _, name = str(model).partition(":")
    try:
        with torch.device("meta"):
            made = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise ValueError(f"model {model!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Model | nn.Module):
        raise ValueError(f"model {model!r}: {name}() must return a module, got {type(made).__name__}")
    return model_of(made)


def builtin_models() -> dict[str, Path]:
    """List the configs that come with the package: name → file."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "models").glob("*.json"))}


_CHOICES = "a config.json, its folder, or package.module:function"


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the loss of a module that returns its loss, or of a model of transformers."""
    if hasattr(module, "config") and hasattr(module, "generation_config"):
        inputs = tokens[:, :-1]
        loss: Tensor = module(input_ids=inputs, labels=inputs, use_cache=False).loss
        return loss
    returned: object = module(tokens)
    if not isinstance(returned, Tensor) or returned.dim() > 0:
        raise ValueError(
            f"{type(module).__name__} must return its loss for token numbers; got {type(returned).__name__}. "
            "Give a fsdp_offload.plan.Model with a loss of your own"
        )
    return returned


FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "olmo3"),
    *("smollm3", "glm4", "seed_oss", "cohere2", "ernie4_5", "mixtral", "qwen3_moe", "deepseek_v3"),
)
"""Values of ``model_type`` for which :class:`Decoder` has as many parameters as the model of transformers; tested."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields of a config; raise a ValueError that names missing ones, or says why it is no decoder."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type is {kind!r}, of which the config does not say what a token costs. Configs "
            f"are enough for {', '.join(FAMILIES)}; otherwise give package.module:function, which makes the module"
        )
    experts = next((config[name] for name in _COUNTS if config.get(name)), 0)
    wanted = (*_SIZES, *_LATENT * (kind == "deepseek_v3"), *["num_experts_per_tok"] * bool(experts))
    if missing := [name for name in wanted if not isinstance(config.get(name), int) or config[name] < 1]:
        raise ValueError(f"not the config of a decoder: {', '.join(missing)} must be positive integers in it")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    key_heads = config.get("num_key_value_heads") or heads
    if heads % key_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={key_heads}")
    defaults = {"head_dim": hidden // heads, "moe_intermediate_size": config["intermediate_size"]}
    defaults |= {"first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": ()}
    given = {name: value for name, value in config.items() if value is not None}
    return {**defaults, **given, "num_key_value_heads": key_heads, "experts": experts}


class Decoder(nn.Module):
    """Decoder of a ``config.json``: RMSNorm, rotary attention, SwiGLU or the experts of one rank.

    Returns the loss of the next token for ``(batch, length + 1)`` tokens. ``expert_parallel`` ranks divide the experts.
    """

    def __init__(self, config: Mapping[str, Any], expert_parallel: int = 1) -> None:
        super().__init__()
        config, hidden = _checked(config), config.get("hidden_size", 0)
        experts, step, plain = (config[name] for name in ("experts", "decoder_sparse_step", "mlp_only_layers"))
        if expert_parallel > 1 and (not experts or experts % expert_parallel):
            count = f"must divide the number of experts, {experts}" if experts else "but this model has no experts"
            raise ValueError(f"expert_parallel={expert_parallel} {count}")
        layer = _LatentLayer if config["model_type"] == "deepseek_v3" else _Layer
        self.embed = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(layer(config) for _ in range(config["num_hidden_layers"]))
        for number in range(config["first_k_dense_replace"], len(self.layers)) if experts else ():
            if number not in plain and (number + 1) % step == 0:
                self.layers[number].mlp = Experts(config, experts // expert_parallel)
        self.norm, self.head = nn.RMSNorm(hidden), _linear(hidden, config["vocab_size"])
        if config.get("tie_word_embeddings"):
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


_linear = functools.partial(nn.Linear, bias=False)


class _SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = _linear(hidden, inner), _linear(hidden, inner), _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Experts of one rank, with equally many tokens each, as in a balanced batch; and the shared expert, if any."""

    def __init__(self, config: Mapping[str, Any], count: int) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.per_token, self.exchanges = config["num_experts_per_tok"], count < config["experts"]
        self.router = _linear(hidden, config["experts"])
        self.gate, self.up = (nn.Parameter(torch.empty(count, hidden, inner)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(count, inner, hidden))
        shared = config.get("n_shared_experts") or 0
        self.shared = _SwiGLU(hidden, shared * inner) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Dispatch tokens to the experts, and combine what they return."""
        tokens, own = x.flatten(0, 1), self.gate.shape[0]
        weights, experts = self.router(tokens).softmax(-1).topk(self.per_token)
        capacity = experts.numel() // own
        chosen = experts.flatten().argsort()[: capacity * own]  # expert by expert
        mine = self._exchanged(tokens[chosen // self.per_token]).unflatten(0, (own, capacity))
        inner = nn.functional.silu(mine @ self.gate) * (mine @ self.up)
        outs = self._exchanged((inner @ self.down).flatten(0, 1)) * weights.flatten()[chosen, None]
        out = torch.zeros_like(tokens).index_add(0, chosen // self.per_token, outs).view_as(x)
        return out if self.shared is None else out + self.shared(x)

    def _exchanged(self, x: Tensor) -> Tensor:
        return x.roll(1, 0) if self.exchanges else x  # stands for an all-to-all: the trace counts "roll" as "exchange"


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(config["hidden_size"]) for _ in range(2))
        self.heads, self.head_dim = config["num_attention_heads"], config["head_dim"]
        self._make_attention(config)
        self.mlp: nn.Module = _SwiGLU(config["hidden_size"], config["intermediate_size"])

    def _make_attention(self, config: Mapping[str, Any]) -> None:
        hidden, kind = config["hidden_size"], config["model_type"]
        wide, narrow = (self.head_dim * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
        bias = bool(config.get("attention_bias") or kind == "qwen2")
        self.query: nn.Module = nn.Linear(hidden, wide, bias=bias)
        self.key: nn.Module = nn.Linear(hidden, narrow, bias=bias)
        self.value: nn.Module = nn.Linear(hidden, narrow, bias=bias)
        self.head_norms = nn.ModuleList(nn.RMSNorm(self.head_dim) for _ in range(2 * kind.startswith("qwen3")))
        self.out = _linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norms[0](x))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        if self.head_norms:
            query, key = self.head_norms[0](query), self.head_norms[1](key)
        return self._mix(query, key, value)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        half = torch.linspace(0, 1, self.head_dim // 2, device=query.device)
        angles = torch.outer(torch.arange(query.shape[1], device=query.device), 10_000.0**-half)[:, None]
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        query, key, value = (one.transpose(1, 2) for one in (_rotated(query, cos, sin), _rotated(key, cos, sin), value))
        is_grouped = key.shape[1] != query.shape[1]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _LatentLayer(_Layer):
    """Latent attention: a narrow vector of each token gives all heads' keys and values; heads share a part of a key."""

    def _make_attention(self, config: Mapping[str, Any]) -> None:
        hidden, narrow = config["hidden_size"], config.get("q_lora_rank")
        latent, own, shared, value = (config[name] for name in _LATENT)
        self.head_dim, self.parts, self.both = own + shared, (latent, shared), (own, value)
        wide = self.heads * self.head_dim
        query = (_linear(hidden, narrow), nn.RMSNorm(narrow)) if narrow else ()
        self.query = nn.Sequential(*query, _linear(narrow or hidden, wide))
        self.key = _linear(hidden, latent + shared)
        self.value = nn.Sequential(nn.RMSNorm(latent), _linear(latent, self.heads * (own + value)))
        self.out = _linear(self.heads * value, hidden)

    def _attend(self, x: Tensor) -> Tensor:
        latent, shared = self.key(x).split(self.parts, -1)
        own, value = self.value(latent).unflatten(-1, (self.heads, -1)).split(self.both, -1)
        key = torch.cat((own, shared[:, :, None].expand(*own.shape[:3], -1)), -1)
        return self._mix(self.query(x).unflatten(-1, (self.heads, -1)), key, value)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
