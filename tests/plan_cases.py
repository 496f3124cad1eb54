"""The trainings whose records the plan is held to: models, batches, and the policies that were tried with each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.benchmarks.train import GPT
from fsdp_offload.plan import CHOICES, OVERLAPS, Choice, Model, model_of
from fsdp_offload.plan.choices import Loop
from fsdp_offload.plan.decoder import Decoder, DecoderConfig


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


def allowed_policies(loop: Loop) -> tuple[str, ...]:
    """Those that a loop allows."""
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
}


def _with_all(
    build: Callable[[], nn.Module], sequences: int, length: int, loop: Loop, *others: str, **training: Any
) -> Case:
    """A case with every policy that its loop allows."""
    clip = loop != "no_clipping"
    fields = {"sequence_length": length, "clip": clip, **training}
    return Case(build, sequences, fields, (NO_OFFLOAD, *allowed_policies(loop), *others))


CASES |= {
    "auto-gpt": _with_all(lambda: GPT(16, 1536, 50_304), 8, 2048, "no_clipping", "iteration, 2048 MiB"),
    "auto-recomputed": _with_all(
        lambda: decoder(1536, 6144, 20, 12, 32_000, qk_norm=True), 2, 4096, "no_clipping", checkpointing="full"
    ),
    "auto-bf16": _with_all(
        lambda: decoder(2560, 6912, 12, 20, 50_304), 10, 1024, "no_clipping", "iteration, 1024 MiB", dtype="bf16"
    ),
    "auto-short": _with_all(lambda: GPT(12, 1024, 32_768), 40, 512, "no_clipping", micro_batches=2),
    "auto-long": _with_all(lambda: decoder(2048, 5632, 8, 16, 32_000), 1, 16_384, "synchronizes"),
    "auto-experts": _with_all(
        lambda: decoder(1024, 2816, 8, 16, 32_000, num_experts=8, num_experts_per_tok=2), 16, 2048, "no_clipping"
    ),
    "auto-deep": _with_all(lambda: GPT(20, 1280, 32_768), 11, 2048, "synchronizes", "forward, 3072 MiB"),
    "auto-vocabulary": _with_all(lambda: decoder(2048, 8192, 8, 32, 128_256), 3, 2048, "synchronizes", micro_batches=2),
    "auto-bf16-recomputed": _with_all(
        lambda: decoder(2304, 9216, 16, 24, 64_000, tie_word_embeddings=True),
        5,
        1536,
        "synchronizes",
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
