"""The plan reproduces what was measured: iterations and peaks of the records in ``examples/benchmark_results``.

Of the ``plan`` record, the predictions that were committed before it was measured are in it as well.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from fsdp_offload.bench import plan as bench
from fsdp_offload.bench.train import GPT
from fsdp_offload.plan import Choice, Forecast, plan

RECORDS = Path(__file__).resolve().parents[2] / "examples/benchmark_results"
RECORD = RECORDS / "2026-11-22-h200-train-latest.jsonl"
PLANNED = [RECORDS / f"2026-11-22-h200x{ranks}-plan.jsonl" for ranks in (1, 2)]

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
    assert one.iteration_ms == pytest.approx(line["ms"], rel=0.05)
    keeps = (
        one.choice is not None and one.choice.keeps == "auto"
    )  # what "auto" keeps is measured, and predicted less well
    assert one.device.peak_bytes == pytest.approx(line["peak_bytes"], rel=0.025 if keeps else 0.001)


def test_the_record_has_one_and_two_devices_and_all_policies() -> None:
    assert {ranks for ranks, _, _ in measured()} == {1, 2}
    assert {line["policy"] for _, _, line in measured()} == CHOICES.keys()


def planned() -> list[dict]:
    """What the plan had said of, in the words of today; ``"step, keeping"`` is no choice any more."""
    lines = [json.loads(text) for path in PLANNED for text in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["bench"] == "plan" and line["policy"] != "step, keeping"]


@cache
def forecasts_of(case: str, ranks: int) -> dict[str, Forecast]:
    wanted = bench.CASES[case]
    made = plan(bench.model_of_case(wanted), machine="H200", **bench.training_of_case(wanted, ranks))
    return {one.name: one for one in made.forecasts}


KEEPS_MORE = [("gpt-wide", 1)]
"""What "auto" kept there is all but one group, as groups are large and their transfers only just fit."""


@pytest.mark.parametrize("line", planned(), ids=lambda line: f"{line['case']}, {line['policy']}, {line['ranks']}")
def test_other_models_dtypes_and_batches_as_measured(line: dict) -> None:
    one = forecasts_of(line["case"], line["ranks"])[line["policy"]]
    assert one.iteration_ms == pytest.approx(line["measured_ms"], rel=0.05)
    assert one.host_bytes == pytest.approx(line["measured_host_bytes"], rel=1e-6)  # a few pages between the groups
    if one.choice is None or one.choice.keeps == "none":
        assert one.device.peak_bytes == pytest.approx(line["measured_peak_bytes"], rel=0.002)
    elif (line["case"], line["ranks"]) not in KEEPS_MORE:
        assert one.device.peak_bytes == pytest.approx(line["measured_peak_bytes"], rel=0.03)


def test_what_was_predicted_was_predicted_before() -> None:
    for path in PLANNED:
        said = path.with_name(f"{path.stem}-predicted.jsonl").read_text(encoding="utf-8").splitlines()
        predicted = {(one["case"], one["policy"]): one for one in map(json.loads, said)}
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if line["bench"] == "plan":
                before = predicted[line["case"], line["policy"]]
                assert (before["ms"], before["peak_bytes"]) == (line["predicted_ms"], line["predicted_peak_bytes"])
