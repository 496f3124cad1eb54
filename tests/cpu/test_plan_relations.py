"""Answers of the plan do not contradict each other: more of what is good makes no row worse, whatever the training."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from examples.benchmarks.train import GPT
from fsdp_offload import OffloadPolicy
from fsdp_offload.plan import Forecast, Model, machine_of, model_of, plan

LENGTH = 96
H200 = machine_of("H200")


def model(layers: int, width: int, vocabulary: int) -> Model:
    with torch.device("meta"):
        return model_of(GPT(layers, width, vocabulary))


MODELS = [model(4, 1024, 1536), model(3, 512, 8192), model(6, 2048, 1536)]


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of ``plan``: a slow link, the usual one, none to speak of; much memory, or little."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    ranks, micro_batches, dtype = one_of(1, 2, 4), one_of(1, 2), one_of("fp32", "bf16")
    rates = {"contention": one_of(0.0, H200.contention), "host_gb_per_s": one_of(H200.host_gb_per_s, 1e6)}
    return {
        "model": MODELS[one_of(*range(len(MODELS)))],
        "ranks": ranks,
        "micro_batches": micro_batches,
        "sequence_length": LENGTH,
        "tokens_per_step": ranks * micro_batches * LENGTH * one_of(1, 4, 32),
        "checkpointing": one_of("none", 1, "full"),
        "dtype": dtype,
        "masters": one_of("none", "remainder", "fp32") if dtype == "bf16" else "none",
        "optimizer": one_of("adamw", "sgd-momentum", "sgd"),
        "clip": one_of(False, True),
        "deterministic": one_of(False, True),
        "link_gb_per_s": one_of(0.5, 5.0, 50.0, 1e3, 1e6),
        "device_gb": one_of(1.0, 2.0, 5.0, 100.0),
        "machine": dataclasses.replace(H200, launch_us=one_of(0.0, H200.launch_us), **rates),
    }


def rows(asked: dict[str, Any], **changes: Any) -> dict[str, Forecast]:
    return {one.name: one for one in plan(**{**asked, **changes}).forecasts}


def is_fixed(one: Forecast) -> bool:
    """Return whether a row's blocks are given. "auto" keeps what compute waits for: less where there is more time."""
    return one.policy is None or one.policy.device_bytes != "auto"


def is_plain(one: Forecast) -> bool:
    return one.policy is None


def less(more: float, than: float) -> bool:
    """Return whether it is less by more than a thousandth: shares of a pass are not exact if the host is late."""
    return more < than * (1 - 1e-3)


Sizes = tuple[str, ...]
BYTES: Sizes = ("needed_bytes", "host_bytes")
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], Sizes, Sizes, Callable[[Forecast], bool]]] = {
    "twice the tokens": (lambda one: {"tokens_per_step": 2 * one["tokens_per_step"]}, (), BYTES, is_fixed),
    "twice the tokens, in time": (
        lambda one: {"tokens_per_step": 2 * one["tokens_per_step"]},
        *((), ("iteration_ms",)),
        lambda row: is_plain(row) or (is_fixed(row) and row.policy.overlap == "step"),
    ),
    "twice the link": (lambda one: {"link_gb_per_s": 2 * one["link_gb_per_s"]}, ("iteration_ms",), (), is_fixed),
    "no clipping": (lambda one: {"clip": False}, (*BYTES, "iteration_ms"), (), is_fixed),
    "twice the ranks": (
        lambda one: {"ranks": 2 * max(2, one["ranks"]), "tokens_per_step": 2 * one["tokens_per_step"]},
        *(BYTES, (), is_fixed),
    ),
    "all recomputed": (lambda one: {"checkpointing": "full"}, BYTES, (), is_fixed),
    "all recomputed, in time": (lambda one: {"checkpointing": "full"}, (), ("iteration_ms",), is_plain),
    "more memory": (lambda one: {"device_gb": 1.5 * one["device_gb"]}, ("iteration_ms",), (), is_fixed),
}
"""By change: the arguments that change, what is no more of each row behind it, what is no less, and of which rows."""


@pytest.mark.parametrize("change", CHANGES)
@settings(
    max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(asked=questions())
def test_no_row_is_worse(change: str, asked: dict[str, Any]) -> None:
    changes, no_more, no_less, counts = CHANGES[change]
    if change == "twice the ranks" and asked["ranks"] == 1:  # alone, a rank gathers nothing
        asked |= {"ranks": 2, "tokens_per_step": 2 * asked["tokens_per_step"]}
    before, after = rows(asked), rows(asked, **changes(asked))
    for name, one in before.items():
        if name in after and counts(one):
            worse = [each for each in no_more if less(getattr(one, each), getattr(after[name], each))]
            worse += [each for each in no_less if less(getattr(after[name], each), getattr(one, each))]
            assert not worse, (name, one, after[name])
            assert change != "more memory" or after[name].fits or not one.fits


@settings(
    max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(asked=questions(), checkpointing=st.sampled_from(["auto", "none", 1]))
def test_offload_is_not_faster_than_plain_training_that_recomputes_as_much(
    asked: dict[str, Any], checkpointing: Any
) -> None:
    plain, *others = rows(asked | {"checkpointing": checkpointing}).values()
    for one in others:
        assert one.recomputed != plain.recomputed or not less(one.iteration_ms, plain.iteration_ms), (plain, one)


LARGE = {"model": "Llama-3.1-8B", "tokens_per_step": 16_384, "machine": H200}
LINKED = [
    LARGE | {"device_gb": 145.0, "policies": [OffloadPolicy(overlap="forward")]},
    LARGE
    | {"tokens_per_step": 12_288, "sequence_length": 12_288, "dtype": "bf16", "masters": "remainder", "clip": False}
    | {"device_gb": 80.0, "policies": [OffloadPolicy(overlap="iteration", device_bytes=1 << 30)]},
]


@pytest.mark.parametrize("asked", LINKED, ids=["forward", "iteration"])
def test_one_block_more_or_less_is_not_faster(asked: dict[str, Any]) -> None:
    """Where the link limits, as with fewer blocks. With the number that a row names, the row is the same."""
    (name, one), *_ = reversed(rows(asked).items())
    for number in range(one.recomputed - 1, one.recomputed + 2):
        other = rows(asked, checkpointing=number)[name]
        assert not other.fits or not less(other.iteration_ms, one.iteration_ms), (one, other)
        assert number != one.recomputed or other == one
