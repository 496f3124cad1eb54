"""The plan reproduces what was measured: iterations and peaks of the records in ``examples/benchmark_results``.

With offload, times are compared with today's engine, or where an earlier one kept as much; bytes of a number for
``device_bytes``, and training without offload, which no engine changes, with earlier days too.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.benchmarks.models import GPT, MODELS
from fsdp_offload import OffloadPolicy
from fsdp_offload.plan import Forecast, Model, builtin_models, plan
from fsdp_offload.plan.model import Decoder, _Layer
from fsdp_offload.policy import MIB

RECORDS = Path(__file__).resolve().parents[2] / "examples/benchmark_results"

# Offload --------------------------------------------------------------------------------------------------------------

CORE, BLOCKS, ROOM = (
    (RECORDS / f"{name}.txt").read_text(encoding="utf-8")
    for name in ("2026-11-25-h100-core", "2026-11-26-h100-blocks", "2026-11-29-h200-room-by-position")
)
ITERATION, PARAMETERS = {"overlap": "iteration"}, {"overlap": "iteration", "parameters": True}
KINDS = {
    "plain": (None, False),
    "plainclip": (None, True),
    "par1536": (OffloadPolicy(**PARAMETERS, device_bytes=1536 * MIB), False),
}
"""What the record's program trains with, and whether it clips."""

SMALL = {
    "i640b40": (OffloadPolicy(**ITERATION, device_bytes=640 * MIB, bucket_bytes=40 * MIB), False),
    "c1280b80": (OffloadPolicy(**ITERATION, device_bytes=1280 * MIB, bucket_bytes=80 * MIB), True),
}
"""About the sizes of buckets that ``bucket_bytes="auto"`` chooses since."""

AUTO = {"iter": OffloadPolicy(**ITERATION), "par": OffloadPolicy(**PARAMETERS)}
"""Policies whose blocks are learnt."""

IN_ROOM = {
    "iteration": AUTO["iter"],
    "parameters": AUTO["par"],
    "parameters:1280MiB": OffloadPolicy(**PARAMETERS, device_bytes=1280 * MIB),
    "iteration:640MiB": OffloadPolicy(**ITERATION, device_bytes=640 * MIB),
}
"""Rows of the record of today's engine, whose blocks come and go with the room that the model leaves."""


@cache
def forecasts(
    clip: bool, machine: str, ranks: int, tokens: int, other: int = 0
) -> dict[OffloadPolicy | None, Forecast]:
    with torch.device("meta"):
        model = GPT(24, 2048, 32_768)
    policies = [policy for policy, _ in (KINDS | SMALL).values() if policy is not None] + list(IN_ROOM.values())
    training = {"tokens_per_step": ranks * tokens, "sequence_length": 2048, "other_device_bytes": other}
    fixed = {"micro_batches": 1, "checkpointing": "none"}
    made = plan(model, machine=machine, ranks=ranks, clip=clip, policies=policies, **fixed, **training)
    return {one.policy: one for one in made.forecasts}


def measured_by_the_core() -> list[dict]:
    """Each line of it; ``host_gb``: what the report behind it says."""
    lines = [json.loads(text) for text in re.findall(r"^(?:src )?(\{.*\})$", CORE, re.M)]
    for line, text in zip(lines, re.split(r"^(?:src )?\{", CORE, flags=re.M)[1:], strict=True):
        line["host_gb"] = re.findall(r"host memory taken +([\d.]+) GB", text)
    return [line for line in lines if line["kind"] in KINDS]


@pytest.mark.parametrize("line", measured_by_the_core(), ids=lambda line: line["kind"])
def test_the_core_as_measured(line: dict) -> None:
    policy, clip = KINDS[line["kind"]]
    one = forecasts(clip, "H100", 1, 12 * 2048)[policy]
    # With a limit, blocks of state were up to an eighth larger than what lay in them then.
    assert one.device.peak_bytes / 1e9 == pytest.approx(line["peak"], rel=0.0005 if policy is None else 0.0015)
    if policy is None:  # with it, the model's room was not used then
        assert one.iteration_ms == pytest.approx(line["median_ms"], rel=0.02)
    for host_gb in line["host_gb"]:
        assert one.host_bytes / 1e9 == pytest.approx(float(host_gb), rel=1e-3)


@pytest.mark.parametrize("name", SMALL)
def test_small_blocks_as_measured(name: str) -> None:
    policy, clip = SMALL[name]
    lines = {line["name"]: line for line in map(json.loads, re.findall(r"^(\{.*\})$", BLOCKS, re.M))}
    one = forecasts(clip, "H100", 1, 12 * 2048)[policy]
    assert one.device.peak_bytes / 1e9 == pytest.approx(lines[name]["peak"], rel=0.0005)


def rows_in_room(part: str) -> dict[str, dict]:
    """The rows of one part of the record, of plain training the faster one."""
    text = re.split(r"^# \d\. ", ROOM, flags=re.M)[int(part)]
    lines = sorted(map(json.loads, re.findall(r"^(\{.*\})$", text, re.M)), key=lambda line: -line["ms"])
    return {line["row"]: line for line in lines}


@pytest.mark.parametrize("name", IN_ROOM)
def test_blocks_in_the_room_that_the_model_leaves_as_measured(name: str) -> None:
    """Beside plain training of the same kind: its kernels are deterministic there, and slower."""
    made, rows = forecasts(False, "H200", 1, 12 * 2048), rows_in_room("2")
    one, plain = made[IN_ROOM[name]], made[None]
    assert one.device.peak_bytes / 1e9 == pytest.approx(rows[name]["peak_gb"], rel=0.015)
    # Of the row of 640 MiB, updates were put off: the record says what it took without.
    measured_ms = 462 if name == "iteration:640MiB" else rows[name]["ms"]
    assert one.iteration_ms / plain.iteration_ms == pytest.approx(measured_ms / rows["plain"]["ms"], rel=0.035)


@pytest.mark.parametrize("name", ["step", "forward"])
def test_updates_behind_the_backward_as_measured(name: str) -> None:
    """Blocks that loads have filled ahead of ``step()`` are stored before the forward comes to the model's peak."""
    text = (RECORDS / "2026-11-29-h200-front-again.txt").read_text()
    lines = map(json.loads, re.findall(r'^(\{"bench": "front", .*"model": "lean".*\})$', text, re.M))
    rows = {line["row"]: line for line in [*lines][:8]}  # those without expandable segments; plain's last row counts
    with torch.device("meta"):
        model = GPT(24, 2048, 32_768)
    fixed = {"micro_batches": 1, "checkpointing": "none", "clip": False, "deterministic": True}
    sizes = {"tokens_per_step": 12 * 2048, "sequence_length": 2048}
    plain, one = plan(model, machine="H200", policies=[OffloadPolicy(overlap=name)], **fixed, **sizes).forecasts
    assert one.device.peak_bytes == pytest.approx(rows[name]["peak_bytes"], rel=0.035)
    assert one.iteration_ms / plain.iteration_ms == pytest.approx(rows[name]["ms"] / rows["plain"]["ms"], rel=0.04)


def test_a_llama_whose_link_is_late_as_measured() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "vocab_size": 128_256}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    policy = IN_ROOM["iteration:640MiB"]
    made = plan(model, machine="H200", tokens_per_step=4096, checkpointing="full", clip=False, policies=[policy])
    text = (RECORDS / "2026-12-01-h200-later.txt").read_text()
    line = next(json.loads(line) for line in text.splitlines() if line.endswith('"later": "a fourth", "machine": 3}'))
    assert made.forecasts[1].limit == "link"
    assert made.forecasts[1].iteration_ms == pytest.approx(line["ms"], rel=0.03)
    assert made.forecasts[1].device.peak_bytes == pytest.approx(line["peak_bytes"], rel=0.02)


# No offload -----------------------------------------------------------------------------------------------------------

TRAINED = ("2026-11-22-h200-train-latest", "2026-11-23-h200-parameters-shared-room", "2026-11-23-h200x2-parameters")
PLANNED = ("2026-11-22-h200x1-plan", "2026-11-22-h200x2-plan", "2026-11-23-h200x1-plan-auto")


def lines_of(name: str) -> list[dict]:
    return [json.loads(text) for text in (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def trained() -> Iterable[Any]:
    """World size, tokens of a rank, bytes of parameters that the bench had kept a copy of, and the line."""
    for name in TRAINED:
        parts: dict = {}
        for line in lines_of(name):
            parts = line if line["bench"] == "train-parts" else parts
            if line["bench"] == "train" and line["policy"] == "plain":
                yield parts["world_size"], parts["tokens"], name == TRAINED[0], line


@pytest.mark.parametrize(("ranks", "tokens", "copies", "line"), list(trained()))
def test_a_gpt_as_measured(ranks: int, tokens: int, copies: bool, line: dict) -> None:
    one = forecasts(copies, "H200", ranks, tokens, 4 * 1_342_820_352 // ranks * copies)[None]
    assert one.iteration_ms == pytest.approx(line["ms"], rel=0.035)
    assert one.device.peak_bytes == pytest.approx(line["peak_bytes"], rel=0.001)


def decoder(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Decoder:
    """A decoder with four query heads for each key; more fields of a config."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    return Decoder({"model_type": "llama", **sizes, **heads_of, **more})


Case = tuple[Callable[[], nn.Module], int, int, dict[str, Any]]
CASES: dict[str, Case] = {
    "gpt": (lambda: GPT(24, 2048, 32_768), 8, 2048, {}),
    "gpt-wide": (lambda: GPT(10, 4096, 50_304), 4, 2048, {"micro_batches": 2}),
    "decoder": (lambda: decoder(2048, 8192, 16, 32, 128_256, tie_word_embeddings=True), 4, 4096, {}),
    "decoder-recomputed": (
        lambda: decoder(3072, 8192, 28, 24, 64_000, model_type="qwen3"),
        *(2, 8192, {"checkpointing": "full"}),
    ),
    "auto-gpt": (lambda: GPT(16, 1536, 50_304), 8, 2048, {"clip": False}),
    "auto-recomputed": (
        lambda: decoder(1536, 6144, 20, 12, 32_000, model_type="qwen3"),
        *(2, 4096, {"checkpointing": "full", "clip": False}),
    ),
    "auto-bf16": (lambda: decoder(2560, 6912, 12, 20, 50_304), 10, 1024, {"dtype": "bf16", "clip": False}),
    "auto-short": (lambda: GPT(12, 1024, 32_768), 40, 512, {"micro_batches": 2, "clip": False}),
    "auto-long": (lambda: decoder(2048, 5632, 8, 16, 32_000), 1, 16_384, {}),
    "auto-experts": (
        lambda: decoder(1024, 2816, 8, 16, 32_000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
        *(16, 2048, {"clip": False}),
    ),
    "auto-deep": (lambda: GPT(20, 1280, 32_768), 11, 2048, {}),
    "auto-vocabulary": (lambda: decoder(2048, 8192, 8, 32, 128_256), 3, 2048, {"micro_batches": 2}),
    "auto-bf16-recomputed": (
        lambda: decoder(2304, 9216, 16, 24, 64_000, tie_word_embeddings=True),
        *(5, 1536, {"dtype": "bf16", "checkpointing": "full"}),
    ),
}
"""The module, sequences of one rank in one micro-batch, their length, and fields of ``fsdp_offload.plan.Training``."""

PLAIN = [
    line for name in PLANNED for line in lines_of(name) if line["bench"] == "plan" and line["policy"] == "no offload"
]


@pytest.mark.parametrize("line", PLAIN, ids=lambda line: f"{line['case']}, {line['ranks']}")
def test_other_models_dtypes_and_batches_as_measured(line: dict) -> None:
    build, sequences, length, training = CASES[line["case"]]
    with torch.device("meta"):
        model = build()
    tokens = line["ranks"] * sequences * length * training.get("micro_batches", 1)
    fixed = {"machine": "H200", "micro_batches": 1, "checkpointing": "none", "policies": []}
    made = plan(model, ranks=line["ranks"], tokens_per_step=tokens, sequence_length=length, **{**fixed, **training})
    assert made.forecasts[0].iteration_ms == pytest.approx(line["measured_ms"], rel=0.065)
    assert made.forecasts[0].device.peak_bytes == pytest.approx(line["measured_peak_bytes"], rel=0.004)


# Deterministic kernels ------------------------------------------------------------------------------------------------


def front_of(name: str) -> list[dict]:
    text = (RECORDS / f"{name}.txt").read_text().partition("# 2. Of that")[0]
    return [json.loads(line) for line in re.findall(r'^\{"bench": "front", .*\}$', text, re.M)]


LINES = {  # the last row of each training
    (line["model"], line["ranks"], line["recomputed"], line["row"]): line
    for name in ("2026-11-29-h200-front", "2026-11-29-h200-front-again")
    for line in front_of(name)
    if line["row"] == "plain" and line["model"] in ("lean", "llama-3b-32k", "llama-8b")
} | {
    (line["model"], line["ranks"], line["recomputed"], line["row"]): line
    for name in ("2026-11-30-h200-recompute", "2026-11-30-h200-queue")
    for line in front_of(name)
    if line["recomputed"] and (line["row"] == "plain" or (line["row"] == "iteration" and line["model"] != "llama-8b"))
}


@pytest.mark.parametrize("line", LINES.values(), ids=[", ".join(map(str, key)) for key in LINES])
def test_rows_of_the_front_as_measured(line: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shape = MODELS[line["model"]]
    with torch.device("meta"):
        llama = family != "lean" and AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        module = llama or GPT(**shape)
    tokens = {"tokens_per_step": line["ranks"] * line["batch"] * line["tokens"], "sequence_length": line["tokens"]}
    asked = {name: line[name] for name in ("dtype", "masters")} | {"ranks": line.get("ranks", 1), **tokens}
    asked["checkpointing"] = "full" if line["recomputed"] is None else line["recomputed"]
    policies = [] if line["row"] == "plain" else [OffloadPolicy(overlap="iteration")]
    fixed = {"machine": "H200", "micro_batches": 1, "deterministic": True, "clip": False}
    one = plan(module, policies=policies, **asked, **fixed).forecasts[-1]
    assert one.iteration_ms == pytest.approx(line["ms"], rel=0.03)
    assert one.device.peak_bytes == pytest.approx(line["peak_bytes"], rel=0.002)


# A large decoder, on as many H100s as share its state -----------------------------------------------------------------

LARGE = {1: "2026-11-26-h100-8g", 2: "2026-11-26-h100-8g", 4: "2026-11-26-h100x4"}
"""By number of ranks."""

LARGE_CASES = [
    *((1, 4, 4, "f4", None), (1, 8, 4, "f8", None), (1, 32, 4, "one_par", AUTO["par"])),
    *((2, 32, 1, "plain", None), (2, 32, 1, "iter", AUTO["iter"]), (2, 32, 1, "par", AUTO["par"])),
    *((4, 32, 2, "plain", None), (4, 32, 2, "step", OffloadPolicy())),
    *((4, 32, 2, "forward", OffloadPolicy(overlap="forward")), (4, 32, 2, "iteration", AUTO["iter"])),
    (4, 32, 2, "parameters", AUTO["par"]),
]
"""Ranks, blocks, sequences of each rank, the line of the record, and its policy."""


@cache
def large_model(layers: int) -> Model:
    """The record's, which has no rotary embeddings; without its root, which has no parameters."""
    with torch.device("meta"):
        made = LargeDecoder(layers)
    return Model("large", made, (made.embed, *made.layers, made), lambda module, tokens: module(tokens))


class LargeDecoder(Decoder):
    def __init__(self, layers: int) -> None:
        config = json.loads(builtin_models()["Llama-3.1-8B"].read_text(encoding="utf-8"))
        super().__init__(config | {"num_hidden_layers": layers})
        for layer in self.layers:
            layer.__class__ = LargeLayer


class LargeLayer(_Layer):
    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            one(x).unflatten(-1, (-1, 128)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def large_forecast(ranks: int, layers: int, sequences: int, policy: OffloadPolicy | None) -> Forecast:
    tokens = {"tokens_per_step": ranks * sequences * 4096, "sequence_length": 4096}
    asked = {"machine": "H100", "ranks": ranks, "checkpointing": "full", "clip": False, **tokens}
    return plan(large_model(layers), policies=[] if policy is None else [policy], **asked).forecasts[-1]


def large_line(ranks: int, name: str) -> dict:
    text = (RECORDS / f"{LARGE[ranks]}.txt").read_text(encoding="utf-8")
    (line,) = re.findall(rf'^(\{{"name": "{name}", .*\}})$', text, re.M)
    return json.loads(line)


@pytest.mark.parametrize(("ranks", "layers", "sequences", "name", "policy"), LARGE_CASES)
def test_a_large_decoder_as_measured(
    ranks: int, layers: int, sequences: int, name: str, policy: OffloadPolicy | None
) -> None:
    """The peak of ``"auto"`` is not compared: the engine of that day kept blocks where today's leave."""
    one, line = large_forecast(ranks, layers, sequences, policy), large_line(ranks, name)
    # On one GPU, all parameters stayed: "auto" took more than the plan expects.
    assert one.iteration_ms == pytest.approx(line["ms"], rel=0.06 if name == "one_par" else 0.05)
    if policy is None:
        assert one.device.peak_bytes / 1e9 == pytest.approx(line["peak"], rel=0.02)


def test_a_large_decoder_that_does_not_fit_takes_what_its_blocks_take() -> None:
    four_ms, eight_ms = (large_line(1, name)["ms"] for name in ("f4", "f8"))
    one = large_forecast(1, 32, 4, None)
    assert one.why_not.startswith("device")
    assert one.iteration_ms == pytest.approx(eight_ms + 6 * (eight_ms - four_ms), rel=0.05)
