"""The plan reproduces what was measured: iterations and peaks of the records in ``examples/benchmark_results``.

Of the ``plan`` records, the predictions that were committed before they were measured are in them as well.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from examples.benchmarks.train import GPT
from fsdp_offload.plan import CHOICES as CHOICES_OF_PLAN
from fsdp_offload.plan import Choice, Forecast, plan
from tests.plan_cases import CASES, choice_named, model_of_case, training_of_case

RECORDS = Path(__file__).resolve().parents[2] / "examples/benchmark_results"
RECORD = RECORDS / "2026-11-22-h200-train-latest.jsonl"
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


def measured() -> list[tuple[int, int, dict]]:
    """World size, tokens of a rank, and the line of each policy that the plan knows."""
    found, parts = [], {}
    for text in RECORD.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["bench"] == "train-parts":
            parts = line
        elif line["bench"] == "train" and line["policy"] in CHOICES:
            found.append((parts["world_size"], parts["tokens"], line))
    return found


@cache
def forecasts(ranks: int, tokens: int) -> dict[Choice | None, Forecast]:
    with torch.device("meta"):
        model = GPT(24, 2048, 32_768)
    made = plan(
        model,
        machine="H200",
        ranks=ranks,
        tokens_per_step=ranks * tokens,
        sequence_length=2048,
        other_device_bytes=4 * made_numel(model) // ranks,  # the bench keeps a copy of the first parameters
    )
    return {one.choice: one for one in made.forecasts}


def made_numel(model: torch.nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("ranks", "tokens", "line"),
    measured(),
    ids=lambda value: value["policy"] if isinstance(value, dict) else str(value),
)
def test_predicted_as_measured(ranks: int, tokens: int, line: dict) -> None:
    one = forecasts(ranks, tokens)[CHOICES[line["policy"]]]
    assert one.iteration_ms == pytest.approx(line["ms"], rel=0.06)
    keeps = (
        one.choice is not None and one.choice.keeps == "auto"
    )  # what "auto" keeps is measured, and predicted less well
    assert one.device.peak_bytes == pytest.approx(line["peak_bytes"], rel=0.025 if keeps else 0.001)


def test_the_record_has_one_and_two_devices_and_all_policies() -> None:
    assert {ranks for ranks, _, _ in measured()} == {1, 2}
    assert {line["policy"] for _, _, line in measured()} == CHOICES.keys()


def lines_of(name: str) -> list[dict]:
    return [json.loads(text) for text in (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def planned() -> list[dict]:
    """What the plan had said of, in the words of today; ``"step, keeping"`` is no choice any more."""
    lines = [line for name in PLANNED for line in lines_of(name)]
    return [line for line in lines if line["bench"] == "plan" and line["policy"] != "step, keeping"]


@cache
def forecasts_of(case: str, ranks: int) -> dict[str, Forecast]:
    wanted = CASES[case]
    choices = {one.name: one for one in (*CHOICES_OF_PLAN, *map(choice_named, wanted.policies)) if one is not None}
    made = plan(
        model_of_case(wanted),
        machine="H200",
        choices=list(choices.values()),
        **training_of_case(wanted, ranks),
    )
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
    ("auto-gpt", "iteration, keeping", 1): 0.05,
    ("auto-recomputed", "forward, keeping", 1): 0.035,
    ("auto-recomputed", "iteration, keeping", 1): 0.085,
    ("auto-bf16", "iteration, keeping", 1): 0.075,
    ("auto-short", "iteration, keeping", 1): 0.045,
    ("auto-long", "forward, keeping", 1): 0.035,
    ("auto-bf16-recomputed", "forward, keeping", 1): 0.095,
}
"""Where "auto" measured other times than the plan has. In the first, what came to stay took the room of staging."""


@pytest.mark.parametrize("line", planned(), ids=lambda line: f"{line['case']}, {line['policy']}, {line['ranks']}")
def test_other_models_dtypes_and_batches_as_measured(line: dict) -> None:
    one = forecasts_of(line["case"], line["ranks"])[line["policy"]]
    off_ms = FARTHER_MS.get((line["case"], line["policy"]), 0.07)
    assert one.iteration_ms == pytest.approx(line["measured_ms"], rel=off_ms)
    host_bytes = one.host_bytes
    if one.name == "step" and not line["resident_bytes"][1]:
        host_bytes += one.resident_bytes  # before the policies had today's words, nothing stayed in "step"
    assert host_bytes == pytest.approx(line["measured_host_bytes"], rel=2e-3)
    off_bytes = 0.03 if one.choice is not None and one.choice.keeps_some else 0.006
    off_bytes = KEEPS_OTHERWISE.get((line["case"], line["policy"], line["ranks"]), off_bytes)
    assert one.device.peak_bytes == pytest.approx(line["measured_peak_bytes"], rel=off_bytes)


def test_most_of_it_is_within_what_was_wanted() -> None:
    off = []
    for line in planned():
        one = forecasts_of(line["case"], line["ranks"])[line["policy"]]
        off.append(abs(one.iteration_ms / line["measured_ms"] - 1))
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


@cache
def with_parameters(ranks: int, tokens: int) -> dict[Choice | None, Forecast]:
    with torch.device("meta"):
        model = GPT(24, 2048, 32_768)
    made = plan(model, machine="H200", ranks=ranks, tokens_per_step=ranks * tokens, sequence_length=2048, clip=False)
    return {one.choice: one for one in made.forecasts}


def measured_with_parameters() -> list[tuple[int, int, dict]]:
    found, parts = [], {}
    for line in (line for name in WITH_PARAMETERS for line in lines_of(name)):
        if line["bench"] == "train-parts":
            parts = line
        elif line["bench"] == "train" and line["policy"] in ("plain", "parameters"):
            found.append((parts["world_size"], parts["tokens"], line))
    return found


@pytest.mark.parametrize(
    ("ranks", "tokens", "line"),
    measured_with_parameters(),
    ids=lambda value: value["policy"] if isinstance(value, dict) else str(value),
)
def test_peaks_with_parameters_on_the_host_as_measured(ranks: int, tokens: int, line: dict) -> None:
    one = with_parameters(ranks, tokens)[ON_HOST if line["policy"] == "parameters" else None]
    peak_bytes = one.device.peak_bytes
    if one.choice is not None:
        assert line["resident_state_bytes"] == 0  # at that time nothing could stay
        assert (one.resident_bytes > 0) == ((ranks, tokens) == (1, 24_576))
        peak_bytes -= one.resident_bytes
    assert peak_bytes == pytest.approx(line["peak_bytes"], rel=0.003)


def test_what_stays_with_twelve_sequences_as_measured() -> None:
    """The root: a third of it parameters, the rest state. Another machine, slower, let more stay."""
    lines = [one for one in lines_of("2026-11-23-h200-parameters-window-first") if one.get("policy") == "parameters"]
    assert 2 * with_parameters(1, 24_576)[ON_HOST].resident_bytes == 3 * lines[0]["resident_state_bytes"]


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


def settled_with_parameters() -> list[tuple[int, float, float]]:
    """Sequences, and milliseconds without offload and with everything on the host, once small copies need not wait."""
    text = QUEUES.read_text(encoding="utf-8")
    pattern = re.compile(
        r"^ *(\d+) x 2048 +parameters=True, iteration +.*?([\d.]+) +([\d.]+) \([\d.]+\) +[\d.]+ +[\d.]+$", re.M
    )
    return [(int(sequences), float(plain), float(ms)) for sequences, plain, ms in pattern.findall(text)]


def test_iterations_with_parameters_on_the_host_as_measured() -> None:
    settled = settled_with_parameters()
    assert settled == [(24, 809.3, 821.2), (12, 418.8, 433.3)]
    for sequences, plain_ms, ms in settled:
        forecasts = with_parameters(1, 2048 * sequences)
        assert forecasts[None].iteration_ms == pytest.approx(plain_ms, rel=0.03)
        assert forecasts[ON_HOST].iteration_ms == pytest.approx(ms, rel=0.02)
        assert forecasts[ON_HOST].limit == "compute"
