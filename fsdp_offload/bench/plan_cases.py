"""What the bench of plans trains: models, batches, and the policies to try with each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..plan.decoder import Decoder, DecoderConfig
from ..planning.choices import CHOICES, OVERLAPS, Choice, Loop
from ..policy import MasterKind
from .train import GPT


@dataclass(frozen=True)
class Case:
    """A model, how one rank trains it, and the policies to try.

    Attributes:
        build: makes the model.
        sequences: of one rank in one micro-batch.
        training: fields of ``fsdp_offload.plan.Training``.
        policies: by name, as :func:`choice_named` knows them.
        loop: what it promises to ``policy="auto"``, which is tried as well; ``None`` does not try it.
    """

    build: Callable[[], nn.Module]
    sequences: int
    training: dict[str, Any]
    policies: tuple[str, ...]
    loop: Loop | None = None


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


def allowed_policies(loop: Loop) -> tuple[str, ...]:
    """Those among which ``policy="auto"`` chooses."""
    return tuple(one.name for one in CHOICES if one.overlap in OVERLAPS[loop] and not one.parameters)


def decoder(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Decoder:
    """A decoder with four query heads for each key."""
    return Decoder(
        DecoderConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            head_dim=hidden // heads,
            **more,
        )
    )


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
        lambda: decoder(3072, 8192, 28, 24, 64_000, qk_norm=True),
        2,
        {"sequence_length": 8192, "checkpointing": "full"},
        ("no offload", "step", "iteration"),
    ),
    "decoder-bf16": Case(
        lambda: decoder(3072, 8192, 20, 24, 64_000),
        6,
        {"sequence_length": 2048, "dtype": "bf16", "master_weights": "remainder"},
        ("step", "iteration", "iteration, keeping"),
    ),
    "experts": Case(
        lambda: decoder(1024, 3584, 10, 16, 32_000, num_experts=8, num_experts_per_tok=2),
        16,
        {"sequence_length": 1024},
        ("no offload", "forward"),
    ),
    "tiny": Case(lambda: decoder(64, 128, 2, 4, 256), 2, {"sequence_length": 32}, ("no offload", "step", "iteration")),
}


def _with_auto(
    build: Callable[[], nn.Module], sequences: int, length: int, loop: Loop, *others: str, **training: Any
) -> Case:
    """A case in which ``policy="auto"`` is compared with what it chooses among."""
    clip = loop != "no_clipping"
    fields = {"sequence_length": length, "clip": clip, **training}
    return Case(build, sequences, fields, (NO_OFFLOAD, *allowed_policies(loop), *others), loop)


AUTO_CASES = {
    "auto-gpt": _with_auto(lambda: GPT(16, 1536, 50_304), 8, 2048, "no_clipping", "iteration, 2048 MiB"),
    "auto-recomputed": _with_auto(
        lambda: decoder(1536, 6144, 20, 12, 32_000, qk_norm=True), 2, 4096, "no_clipping", checkpointing="full"
    ),
    "auto-bf16": _with_auto(
        lambda: decoder(2560, 6912, 12, 20, 50_304), 10, 1024, "no_clipping", "iteration, 1024 MiB", dtype="bf16"
    ),
    "auto-short": _with_auto(lambda: GPT(12, 1024, 32_768), 40, 512, "no_clipping", micro_batches=2),
    "auto-long": _with_auto(lambda: decoder(2048, 5632, 8, 16, 32_000), 1, 16_384, "synchronizes"),
    "auto-experts": _with_auto(
        lambda: decoder(1024, 2816, 8, 16, 32_000, num_experts=8, num_experts_per_tok=2), 16, 2048, "no_clipping"
    ),
    "auto-deep": _with_auto(lambda: GPT(20, 1280, 32_768), 11, 2048, "synchronizes", "forward, 3072 MiB"),
    "auto-vocabulary": _with_auto(
        lambda: decoder(2048, 8192, 8, 32, 128_256), 3, 2048, "synchronizes", micro_batches=2
    ),
    "auto-bf16-recomputed": _with_auto(
        lambda: decoder(2304, 9216, 16, 24, 64_000, tie_word_embeddings=True),
        5,
        1536,
        "synchronizes",
        dtype="bf16",
        checkpointing="full",
    ),
    "auto-wide": _with_auto(lambda: GPT(6, 3072, 32_768), 7, 1024, "synchronizes", micro_batches=2),
    "auto-biases": _with_auto(
        lambda: decoder(1792, 4864, 16, 28, 151_936, tie_word_embeddings=True, attention_bias=True),
        3,
        4096,
        "synchronizes",
    ),
    "auto-any": _with_auto(lambda: GPT(12, 2048, 32_768), 15, 1024, "any", "step, 2048 MiB"),
    "auto-any-bf16": _with_auto(lambda: decoder(3072, 8192, 8, 24, 32_000), 3, 4096, "any", dtype="bf16"),
}
"""Cases with batches that were never measured before, small enough to try all policies with each in seconds."""

CASES |= AUTO_CASES

CASES["masters"] = Case(
    lambda: decoder(2048, 7168, 12, 16, 50_304),
    6,
    {"sequence_length": 2048, "dtype": "bf16", "master_weights": "fp32"},
    ("step", "forward, keeping", "iteration"),
)


def _llama_8b(masters: MasterKind) -> Case:
    """A Llama-3.1-8B shape in bf16, whose blocks are recomputed; without offload it is trained without masters."""
    training = {"sequence_length": 4096, "dtype": "bf16", "checkpointing": "full", "clip": False}
    return Case(
        lambda: decoder(4096, 14_336, 32, 32, 128_256),
        4,
        {**training, "master_weights": masters},
        (NO_OFFLOAD, "iteration", "iteration, keeping"),
    )


CASES |= {"8b-remainder": _llama_8b("remainder"), "8b-fp32": _llama_8b("fp32")}


def _fp32_decoder(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Case:
    """A decoder of fp32 parameters whose blocks are recomputed; what is not offloaded does not fit one device."""
    training = {"sequence_length": 4096, "checkpointing": "full", "clip": False}
    return Case(
        lambda: decoder(hidden, inner, layers, heads, vocabulary, **more),
        4,
        training,
        ("iteration, parameters", "iteration, parameters, 9216 MiB", "iteration, parameters, 6144 MiB"),
    )


CASES |= {
    "8b-parameters": _fp32_decoder(4096, 14_336, 32, 32, 128_256),
    "18b-parameters": _fp32_decoder(5120, 17_408, 49, 40, 151_936, qk_norm=True),
}
