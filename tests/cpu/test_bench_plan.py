"""The bench of plans on the CPU: every kind of case is predicted, then trained; host bytes are as predicted."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_offload.bench import plan as bench
from fsdp_offload.bench.plan_cases import AUTO_CASES, NO_OFFLOAD, allowed_policies, choice_named, decoder
from fsdp_offload.bench.train import GPT
from tests.tiers import every_nth

SMALL = {
    "gpt": lambda: GPT(2, 128, 256),
    "gpt-wide": lambda: GPT(1, 256, 256),
    "decoder": lambda: decoder(64, 128, 2, 4, 256, tie_word_embeddings=True),
    "decoder-recomputed": lambda: decoder(64, 128, 2, 4, 256, qk_norm=True),
    "decoder-bf16": lambda: decoder(64, 128, 2, 4, 256),
    "experts": lambda: decoder(64, 128, 2, 4, 256, num_experts=4, num_experts_per_tok=2),
    "masters": lambda: decoder(64, 128, 2, 4, 256),
    "8b-remainder": lambda: decoder(64, 128, 2, 4, 256),
    "8b-fp32": lambda: decoder(64, 128, 2, 4, 256),
    "8b-parameters": lambda: decoder(64, 128, 2, 4, 256),
    "18b-parameters": lambda: decoder(64, 128, 2, 4, 256, qk_norm=True),
}


@pytest.mark.filterwarnings("ignore:offload_optimizer:UserWarning")  # nothing to gain on the CPU
@pytest.mark.filterwarnings("ignore:remove_offload. the masters:UserWarning")  # which nobody needs any more
@pytest.mark.parametrize("name", every_nth(map(pytest.param, SMALL), 3))
def test_what_is_predicted_can_be_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = bench.CASES[name]
    small = dataclasses.replace(case, build=SMALL[name], sequences=1, training={**case.training, "sequence_length": 16})
    monkeypatch.setitem(bench.CASES, name, small)
    file = tmp_path / "predictions.jsonl"
    bench.main(predict=file, cases=name, ranks=1, machine="H200", iterations=1)
    assert not dist.is_initialized()
    bench.main(compare=file, cases=name, iterations=1, seconds=1e6)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["policy"] for record in records] == list(case.policies)
    for record in records:
        assert record["predicted_host_bytes"] == record["measured_host_bytes"]
        assert record["measured_ms"] > 0


SMALL_AUTO = {
    "auto-gpt": lambda: GPT(2, 128, 256),
    "auto-bf16-recomputed": lambda: decoder(64, 128, 2, 4, 256, tie_word_embeddings=True),
    "auto-any": lambda: GPT(1, 128, 256),
}


@pytest.mark.filterwarnings("ignore:offload_optimizer:UserWarning")
@pytest.mark.parametrize("name", SMALL_AUTO)
def test_auto_is_tried_beside_what_it_chooses_among(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = bench.CASES[name]
    training = {**case.training, "sequence_length": 16}
    small = dataclasses.replace(case, build=SMALL_AUTO[name], sequences=1, training=training)
    monkeypatch.setitem(bench.CASES, name, small)
    file = tmp_path / "predictions.jsonl"
    bench.main(predict=file, cases=name, ranks=1, machine="H200", iterations=1)
    bench.main(compare=file, cases=name, iterations=1, seconds=1e6)
    *compared, auto = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["policy"] for record in compared] == list(case.policies)
    assert auto["bench"] == "plan-auto"
    assert auto["chosen"].startswith("policy='auto': OffloadPolicy(")
    assert auto["best_fixed"] in allowed_policies(case.loop)
    assert auto["over_best_fixed"] == pytest.approx(sum(auto["auto_ms"]) / sum(auto["best_fixed_ms"]), rel=1e-3)
    assert len(auto["auto_ms"]) == len(auto["best_fixed_ms"]) == 2


def test_every_case_for_devices_has_a_small_twin() -> None:
    assert SMALL.keys() == bench.CASES.keys() - {"tiny"} - AUTO_CASES.keys()
    assert {AUTO_CASES[name].loop for name in SMALL_AUTO} == {case.loop for case in AUTO_CASES.values()}


@pytest.mark.parametrize("name", sorted({name for case in bench.CASES.values() for name in case.policies}))
def test_policies_have_one_name(name: str) -> None:
    choice = choice_named(name)
    assert name == (NO_OFFLOAD if choice is None else choice.name)
