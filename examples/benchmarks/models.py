"""Models of the benchmarks, with random weights: a lean GPT, and the shapes of transformers' models that users train.

This file does not import ``fsdp_offload``, so that plain training can be measured in a process without it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class GPTBlock(nn.Module):
    """Attention and a GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, sequence, width)`` to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return x + inner


class GPT(nn.Module):
    """A lean GPT; with the default sizes of the benchmark ``train``, it has 1.35 G parameters."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GPTBlock(width, width // 128) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each next token; ``tokens``: ``(batch, sequence + 1)``."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# Shapes ---------------------------------------------------------------------------------------------------------------


def _llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> Any:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


def _gpt2(width: int, layers: int, heads: int, vocabulary: int) -> Any:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, **dropouts}


# Name → transformers' type of the model, or "lean" for the GPT above, and the fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3b": ("llama", _llama(3072, 8192, 28, 24, 8, 128_256, tie_word_embeddings=True)),
    "llama-3b-32k": ("llama", _llama(3072, 8192, 28, 24, 8, 32_768, tie_word_embeddings=False)),
    "llama-8b": ("llama", _llama(4096, 14336, 32, 32, 8, 128_256, tie_word_embeddings=False)),
    "llama-tiny": ("llama", _llama(64, 128, 3, 4, 2, 512, tie_word_embeddings=True)),
    "qwen3-1.7b": ("qwen3", _llama(2048, 6144, 28, 16, 8, 151_936, head_dim=128, tie_word_embeddings=True)),
    "qwen3-tiny": ("qwen3", _llama(64, 128, 3, 4, 2, 512, head_dim=32, tie_word_embeddings=True)),
    "gpt2-xl": ("gpt2", _gpt2(1600, 48, 25, 50_257)),
    "gpt2-tiny": ("gpt2", _gpt2(64, 3, 4, 512)),
    "lean": ("lean", {"layers": 24, "width": 2048, "vocabulary": 32_768}),
    "lean-tiny": ("lean", {"layers": 3, "width": 128, "vocabulary": 512}),
}
_BLOCKS = {"llama": "model.layers", "qwen3": "model.layers", "gpt2": "transformer.h", "lean": "blocks"}


class Trained(NamedTuple):
    """A sharded model, a function that returns the loss of tokens ``(batch, sequence)``, and the vocabulary's size."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    vocabulary: int


def build(name: str, mesh: DeviceMesh, *, dtype: torch.dtype, tokens: int, recomputed: int | None) -> Trained:
    """Make one of :data:`MODELS` on the mesh's device, without ever allocating a whole model.

    Args:
        name: name of the model.
        mesh: mesh on which each block and the root are sharded.
        dtype: dtype of the parameters; compute is in bf16.
        tokens: number of tokens in a sequence.
        recomputed: number of blocks, the first ones, that the backward recomputes; ``None``: all.

    Raises:
        SystemExit: ``recomputed`` is a part of the blocks, which this version of transformers cannot do.
    """
    family, shape = MODELS[name]
    with _parameters_on_meta(dtype):
        model = GPT(**shape) if family == "lean" else _transformers_model(family, shape, tokens)
    blocks = list(model.get_submodule(_BLOCKS[family]).children())
    _recompute(model, blocks, len(blocks) if recomputed is None else recomputed)
    reduce_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    buffers = {name: buffer.to(mesh.device_type, copy=True) for name, buffer in model.named_buffers()}
    model.to_empty(device=mesh.device_type)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])  # such as rotary frequencies and masks, which ``to_empty`` has lost
    _fill(model, torch.Generator(mesh.device_type).manual_seed(1 + dist.get_rank()))
    model.train()
    if family == "lean":
        return Trained(model, model, shape["vocabulary"])
    return Trained(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, shape["vocab_size"])


def _transformers_model(family: str, shape: dict[str, Any], tokens: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    config = AutoConfig.for_model(family, use_cache=False, **{positions: max(1024, tokens)}, **shape)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model


@contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """In the context, create parameters on the meta device, but buffers with their values, to be copied later."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not (param.is_meta and param.dtype == dtype):  # a tied one is on meta already
            param = nn.Parameter(param.detach().to("meta", dtype), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _recompute(model: Any, blocks: list[nn.Module], count: int) -> None:
    if not count:
        return
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # new and old transformers
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        for block in blocks[:count]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return
    enable({"use_reentrant": False})
    if count < len(blocks) and not all(hasattr(block, "gradient_checkpointing") for block in blocks):
        raise SystemExit("This transformers recomputes all blocks of this model or none: --recompute all, or none.")
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number < count  # type: ignore[assignment]


def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Fill each rank's shards in place: biases with zeros, norms with ones, others with random values."""
    for name, param in model.named_parameters():
        local: Tensor = param.detach().to_local()  # type: ignore[attr-defined]
        if param.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            local.normal_(0, 0.02, generator=generator)
