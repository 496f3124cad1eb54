"""The trainings whose records the plan is held to: models, batches, and the policies that were tried with each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.benchmarks.train import GPT
from fsdp_offload.plan import CHOICES, Choice, Model, model_of
from fsdp_offload.plan.model import Decoder


@dataclass(frozen=True)
class Case:
    """A model, how one rank trains it, and the policies to try.

    Attributes:
        build: makes the model.
        sequences: of one rank in one micro-batch.
        training: fields of ``fsdp_offload.plan.Training``.
        policies: by name, as :func:`choice_named` knows them.
    """

    build: Callable[[], nn.Module]
    sequences: int
    training: dict[str, Any]
    policies: tuple[str, ...]


NO_OFFLOAD = "no offload"


def choice_named(name: str) -> Choice | None:
    """The choice of a name; ``None`` is no offload."""
    if name == NO_OFFLOAD:
        return None
    if name.endswith(" MiB"):
        unlimited, _, mib = name.removesuffix(" MiB").rpartition(", ")
        one = next(one for one in CHOICES if one.name == unlimited)
        return Choice(one.overlap, device_bytes=int(mib) << 20, parameters=one.parameters)
    return next(one for one in CHOICES if one.name == name)


def decoder(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Decoder:
    """A decoder with four query heads for each key; more fields of a config."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    return Decoder({"model_type": "llama", **sizes, **heads_of, **more})


class Experts(nn.Module):
    """Experts that get equally many tokens each, as in a balanced batch; what is over is dropped."""

    def __init__(self, count: int, per_token: int, outer: int, inner: int) -> None:
        super().__init__()
        self.per_token = per_token
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


def decoder_with_experts() -> Decoder:
    """A decoder whose MLPs are eight experts, of which each token goes to two."""
    made = decoder(1024, 2816, 8, 16, 32_000)
    for layer in made.layers:
        layer.mlp = Experts(8, 2, 1024, 2816)
    return made


CASES = {
    "gpt": Case(
        lambda: GPT(24, 2048, 32_768),
        8,
        {"sequence_length": 2048},
        ("no offload", "step", "forward", "forward, keeping", "iteration"),
    ),
    "gpt-wide": Case(
        lambda: GPT(10, 4096, 50_304),
        4,
        {"sequence_length": 2048, "micro_batches": 2},
        ("no offload", "forward", "iteration", "iteration, keeping"),
    ),
    "decoder": Case(
        lambda: decoder(2048, 8192, 16, 32, 128_256, tie_word_embeddings=True),
        4,
        {"sequence_length": 4096},
        ("no offload", "forward, keeping", "iteration", "iteration, keeping"),
    ),
    "decoder-recomputed": Case(
        lambda: decoder(3072, 8192, 28, 24, 64_000, model_type="qwen3"),
        2,
        {"sequence_length": 8192, "checkpointing": "full"},
        ("no offload", "step", "iteration"),
    ),
    "decoder-bf16": Case(
        lambda: decoder(3072, 8192, 20, 24, 64_000),
        6,
        {"sequence_length": 2048, "dtype": "bf16", "masters": "remainder"},
        ("step", "iteration", "iteration, keeping"),
    ),
}


def _with_all(
    build: Callable[[], nn.Module], sequences: int, length: int, overlap: str, *others: str, **training: Any
) -> Case:
    """A case with every policy up to an overlap, but for those with parameters on the host."""
    fields = {"sequence_length": length, "clip": overlap != "iteration", **training}
    overlaps = ("step", "forward", "iteration") if overlap == "iteration" else ("step", "forward")
    allowed = (one.name for one in CHOICES if one.overlap in overlaps and not one.parameters)
    return Case(build, sequences, fields, (NO_OFFLOAD, *allowed, *others))


CASES |= {
    "auto-gpt": _with_all(lambda: GPT(16, 1536, 50_304), 8, 2048, "iteration", "iteration, 2048 MiB"),
    "auto-recomputed": _with_all(
        lambda: decoder(1536, 6144, 20, 12, 32_000, model_type="qwen3"), 2, 4096, "iteration", checkpointing="full"
    ),
    "auto-bf16": _with_all(
        lambda: decoder(2560, 6912, 12, 20, 50_304), 10, 1024, "iteration", "iteration, 1024 MiB", dtype="bf16"
    ),
    "auto-short": _with_all(lambda: GPT(12, 1024, 32_768), 40, 512, "iteration", micro_batches=2),
    "auto-long": _with_all(lambda: decoder(2048, 5632, 8, 16, 32_000), 1, 16_384, "forward"),
    "auto-experts": _with_all(decoder_with_experts, 16, 2048, "iteration"),
    "auto-deep": _with_all(lambda: GPT(20, 1280, 32_768), 11, 2048, "forward", "forward, 3072 MiB"),
    "auto-vocabulary": _with_all(lambda: decoder(2048, 8192, 8, 32, 128_256), 3, 2048, "forward", micro_batches=2),
    "auto-bf16-recomputed": _with_all(
        lambda: decoder(2304, 9216, 16, 24, 64_000, tie_word_embeddings=True),
        5,
        1536,
        "forward",
        dtype="bf16",
        checkpointing="full",
    ),
}


def model_of_case(case: Case) -> Model:
    """Build a case's model on the meta device."""
    with torch.device("meta"):
        return model_of(case.build())


def training_of_case(case: Case, ranks: int) -> dict[str, Any]:
    """Return how a case is trained, as arguments of :func:`fsdp_offload.plan.plan`."""
    tokens = ranks * case.sequences * case.training["sequence_length"] * case.training.get("micro_batches", 1)
    return {"ranks": ranks, "tokens_per_step": tokens, **case.training}
