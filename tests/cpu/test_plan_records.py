"""The plan reproduces what was measured: iterations and peaks of the records in ``examples/benchmark_results``.

Of the ``plan`` records, the predictions that were committed before they were measured are in them as well.
"""

import json
import re
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch

from examples.benchmarks.train import GPT
from fsdp_offload.plan import CHOICES as CHOICES_OF_PLAN
from fsdp_offload.plan import Choice, Forecast, plan
from tests.plan_cases import CASES, choice_named, model_of_case, training_of_case

RECORDS = Path(__file__).resolve().parents[2] / "examples/benchmark_results"
RECORD = "2026-11-22-h200-train-latest"
NUMEL = 1_342_820_352  # parameters of its model
PLANNED = {
    "2026-11-22-h200x1-plan": "2026-11-22-h200x1-plan-predicted",
    "2026-11-22-h200x2-plan": "2026-11-22-h200x2-plan-predicted",
    "2026-11-23-h200x1-plan-auto": "2026-11-22-h200x1-plan-auto-predicted",
}
"""What was measured, and what had been committed before."""

CHOICES = {
    "plain": None,
    "step": Choice("step"),
    "overlap_forward": Choice("forward"),
    "backward": Choice("iteration"),
    "overlap_forward_resident": Choice("forward", "auto"),
    "backward_resident": Choice("iteration", "auto"),
}


def lines_of(name: str) -> list[dict]:
    return [json.loads(text) for text in (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(names: Iterable[str], policies: Container[str]) -> list[tuple[int, int, dict]]:
    """World size, tokens of a rank, and the line of each policy that was measured."""
    found, parts = [], {}
    for line in (line for name in names for line in lines_of(name)):
        if line["bench"] == "train-parts":
            parts = line
        elif line["bench"] == "train" and line["policy"] in policies:
            found.append((parts["world_size"], parts["tokens"], line))
    return found


def said(value: object) -> str:
    return value["policy"] if isinstance(value, dict) else str(value)


@cache
def forecasts(ranks: int, tokens: int, **training: int) -> dict[Choice | None, Forecast]:
    """By policy, for the model of ``examples/benchmarks/train.py``."""
    with torch.device("meta"):
        model = GPT(24, 2048, 32_768)
    made = plan(model, ranks=ranks, tokens_per_step=ranks * tokens, sequence_length=2048, **training)
    return {one.choice: one for one in made.forecasts}


@pytest.mark.parametrize(("ranks", "tokens", "line"), trained([RECORD], CHOICES), ids=said)
def test_predicted_as_measured(ranks: int, tokens: int, line: dict) -> None:
    copy_bytes = 4 * NUMEL // ranks  # the bench keeps a copy of the first parameters
    one = forecasts(ranks, tokens, other_device_bytes=copy_bytes)[CHOICES[line["policy"]]]
    assert one.iteration_ms == pytest.approx(line["ms"], rel=0.06)
    keeps = one.choice is not None and one.choice.device_bytes == "auto"  # which is measured, and predicted less well
    assert one.device.peak_bytes == pytest.approx(line["peak_bytes"], rel=0.02 if keeps else 0.001)


def test_the_record_has_one_and_two_devices_and_all_policies() -> None:
    assert {ranks for ranks, _, _ in trained([RECORD], CHOICES)} == {1, 2}
    assert {line["policy"] for _, _, line in trained([RECORD], CHOICES)} == CHOICES.keys()


def planned() -> list[dict]:
    """What the plan had said of, in the words of today; ``"step, keeping"`` is no choice any more."""
    lines = [line for name in PLANNED for line in lines_of(name)]
    return [line for line in lines if line["bench"] == "plan" and line["policy"] != "step, keeping"]


@cache
def forecasts_of(case: str, ranks: int) -> dict[str, Forecast]:
    wanted = CASES[case]
    choices = {one.name: one for one in (*CHOICES_OF_PLAN, *map(choice_named, wanted.policies)) if one is not None}
    made = plan(model_of_case(wanted), choices=list(choices.values()), **training_of_case(wanted, ranks))
    return {one.name: one for one in made.forecasts}


FARTHER_MS = {
    ("auto-recomputed", "step"): 0.085,
    ("auto-recomputed", "forward"): 0.17,
    ("auto-recomputed", "iteration, keeping"): 0.11,
    ("auto-short", "forward"): 0.15,
    ("auto-short", "forward, keeping"): 0.15,
    ("auto-short", "iteration, keeping"): 0.08,
    ("auto-long", "forward"): 0.08,
}
"""In the first two the device waits for the host, whose times are between 212 and 273 ms for the same iteration."""

KEEPS_OTHERWISE = {
    ("gpt-wide", "iteration, keeping", 1): 0.13,
    ("gpt-wide", "iteration, keeping", 2): 0.035,
    ("auto-gpt", "iteration, keeping", 1): 0.05,
    ("auto-recomputed", "forward, keeping", 1): 0.035,
    ("auto-recomputed", "iteration, keeping", 1): 0.085,
    ("auto-bf16", "iteration, keeping", 1): 0.075,
    ("auto-short", "iteration, keeping", 1): 0.045,
    ("auto-long", "forward, keeping", 1): 0.035,
    ("auto-bf16-recomputed", "forward, keeping", 1): 0.095,
}
"""Where "auto" measured other times than the plan has. In the first, what came to stay took the room of staging;
in the second, one block more stayed than the plan, which does not follow the iteration bucket by bucket, has."""


@pytest.mark.parametrize("line", planned(), ids=lambda line: f"{line['case']}, {line['policy']}, {line['ranks']}")
def test_other_models_dtypes_and_batches_as_measured(line: dict) -> None:
    one = forecasts_of(line["case"], line["ranks"])[line["policy"]]
    off_ms = FARTHER_MS.get((line["case"], line["policy"]), 0.07)
    assert one.iteration_ms == pytest.approx(line["measured_ms"], rel=off_ms)
    host_bytes = one.host_bytes
    if one.name == "step" and not line["resident_bytes"][1]:
        host_bytes += one.resident_bytes  # before the policies had today's words, nothing stayed in "step"
    assert host_bytes == pytest.approx(line["measured_host_bytes"], rel=2e-3)
    keeps = one.choice is not None and one.choice.device_bytes is not None
    off_bytes = 0.03 if keeps else 0.006
    off_bytes = KEEPS_OTHERWISE.get((line["case"], line["policy"], line["ranks"]), off_bytes)
    assert one.device.peak_bytes == pytest.approx(line["measured_peak_bytes"], rel=off_bytes)


def test_most_of_it_is_within_what_was_wanted() -> None:
    pairs = [(forecasts_of(line["case"], line["ranks"])[line["policy"]], line["measured_ms"]) for line in planned()]
    off = [abs(one.iteration_ms / ms - 1) for one, ms in pairs]
    assert len(off) == 84
    assert sum(ms <= 0.07 for ms in off) == len(off) - len(FARTHER_MS)
    assert sum(ms <= 0.05 for ms in off) >= 60


def test_what_was_predicted_was_predicted_before() -> None:
    for measured_name, predicted_name in PLANNED.items():
        predicted = {(one["case"], one["policy"]): one for one in lines_of(predicted_name)}
        for line in lines_of(measured_name):
            if line["bench"] == "plan":
                before = predicted[line["case"], line["policy"]]
                assert (before["ms"], before["peak_bytes"]) == (line["predicted_ms"], line["predicted_peak_bytes"])


# Parameters on the host ----------------------------------------------------------------------------------------------

ON_HOST = Choice("iteration", "auto", parameters=True)
WITH_PARAMETERS = ("2026-11-23-h200-parameters-shared-room", "2026-11-23-h200x2-parameters")
QUEUES = RECORDS / "2026-11-23-h200-copy-queues.txt"


TRAINED = trained(WITH_PARAMETERS, ("plain", "parameters"))


@pytest.mark.parametrize(("ranks", "tokens", "line"), TRAINED, ids=said)
def test_peaks_with_parameters_on_the_host_as_measured(ranks: int, tokens: int, line: dict) -> None:
    one = forecasts(ranks, tokens, clip=False)[ON_HOST if line["policy"] == "parameters" else None]
    peak_bytes = one.device.peak_bytes
    if one.choice is not None:
        assert line["resident_state_bytes"] == 0  # at that time nothing could stay
        assert (one.resident_bytes > 0) == ((ranks, tokens) == (1, 24_576))
        peak_bytes -= one.resident_bytes
    assert peak_bytes == pytest.approx(line["peak_bytes"], rel=0.003)


def test_what_stays_with_twelve_sequences_as_measured() -> None:
    """The root: a third of it parameters, the rest state. Another machine, slower, let more stay."""
    lines = [one for one in lines_of("2026-11-23-h200-parameters-window-first") if one.get("policy") == "parameters"]
    assert 2 * forecasts(1, 24_576, clip=False)[ON_HOST].resident_bytes == 3 * lines[0]["resident_state_bytes"]


EIGHT_G = "2026-11-23-h200x1-plan-parameters-window-first"


def test_eight_g_parameters_on_the_host_as_measured() -> None:
    predicted = {(one["case"], one["policy"]): one for one in lines_of(f"{EIGHT_G}-predicted")}
    measured = [line for line in lines_of(EIGHT_G) if line["bench"] == "plan"]
    assert len(measured) == 3
    for line in measured:
        before = predicted[line["case"], line["policy"]]
        assert (before["ms"], before["peak_bytes"]) == (line["predicted_ms"], line["predicted_peak_bytes"])
        assert before["host_bytes"] == pytest.approx(line["measured_host_bytes"], rel=1e-3)
        assert before["ms"] == pytest.approx(line["measured_ms"], rel=0.07)
        if line["policy"].endswith(" MiB"):  # "auto" lets more stay than the plan thinks it has to
            assert before["peak_bytes"] == pytest.approx(line["measured_peak_bytes"], rel=1e-3)


def test_iterations_with_parameters_on_the_host_as_measured() -> None:
    """Without offload and with everything on the host, once small copies need not wait."""
    pattern = r"^ *(\d+) x 2048 +parameters=True, iteration +.*?([\d.]+) +([\d.]+) \([\d.]+\) +[\d.]+ +[\d.]+$"
    settled = re.findall(pattern, QUEUES.read_text(encoding="utf-8"), re.M)
    assert settled == [("24", "809.3", "821.2"), ("12", "418.8", "433.3")]
    for sequences, plain_ms, ms in settled:
        found = forecasts(1, 2048 * int(sequences), clip=False)
        assert found[None].iteration_ms == pytest.approx(float(plain_ms), rel=0.03)
        assert found[ON_HOST].iteration_ms == pytest.approx(float(ms), rel=0.02)
        assert found[ON_HOST].limit == "compute"
