"""``fsdp-offload plan``: table and JSON; errors in one line; large models in little memory, without a network."""

import json
import re
import shlex
import sys
from collections import ChainMap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsdp_offload.plan import builtin_models, plan
from fsdp_offload.plan.command import LEGEND, app
from fsdp_offload.plan.forecast import SLACK

ROOT = Path(__file__).resolve().parents[2]
QWEN = ["Qwen3-14B", "--tokens-per-step", "16384", "--checkpointing", "full", "--no-clip", "--machine", "H200"]


def test_the_line_of_readme_is_answered_with_a_policy_that_fits() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("fsdp-offload plan ")]
    result = CliRunner().invoke(app, shlex.split(line, comments=True)[2:])
    assert result.exit_code == 0
    assert "\nBest: forward" in result.stdout
    assert 'policy=OffloadPolicy(overlap="forward"' in result.stdout.splitlines()[-1]


def test_the_answer_is_one_screen_and_the_legend_is_asked_for(small: Path) -> None:
    options = [str(small), "--tokens-per-step=32768", "--machine=H200", "--no-clip", "--overlap=forward"]
    options.append("--device-gb=40")
    result = CliRunner().invoke(app, options, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) <= 30
    (head,) = [line.split() for line in lines if line.startswith("policy ")]
    rows = {line.partition("  ")[0]: line.split() for line in lines if " of 12 " in line}
    assert rows["no offload"][-1] == "device"
    assert rows["iteration"][-1] == "loop"  # --overlap forward does not allow it
    asked = CliRunner().invoke(app, [*options, "--legend"]).stdout.splitlines()
    legend = [line for line in asked if line not in lines]
    text = "\n".join(legend)
    assert text.strip() == LEGEND.read_text(encoding="utf-8").strip()
    explained = {word for line in legend if not line.startswith(" ") for word in line.partition(": ")[0].split(", ")}
    assert {*head, "device", "host"} - {"GB", "GB/rank"} <= explained
    assert {"compute", "gathers", "link", "launches", "device", "host", "clip", "loop", "close"} <= {
        *re.findall(r"\w+", text)
    }
    assert f"the peak, {100 * SLACK:.0f} % for the allocator" in text


@pytest.mark.parametrize("checkpointing", ["auto", "full", "2"])
def test_plain_training_and_offload_are_compared_each_at_its_best(checkpointing: str, small: Path) -> None:
    asked = [str(small), "--tokens-per-step", "32768", "--machine", "H200", "--checkpointing", checkpointing]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    counted = {"auto": "nothing", "full": "all 12 blocks", "2": "2 of 12 blocks"}[checkpointing]
    (plain,) = [line for line in lines if line.startswith("Best: no offload, ")]
    assert f"{counted} recomputed and 1 micro-batch" in plain
    verdict, offload = (lines[lines.index(plain) + step] for step in (-1, 1))
    ms = [float(re.findall(r"([\d,]+) ms", line)[0].replace(",", "")) for line in (plain, offload)]
    if "level" not in verdict:
        assert verdict.startswith("Plain training is best: offload takes ")
        assert 100 * (ms[1] / ms[0] - 1) == pytest.approx(float(re.findall(r"(\d+) % more", verdict)[0]), abs=1)
    else:
        given = "" if checkpointing == "auto" else f" (both with --checkpointing {checkpointing})"
        assert verdict == f"Plain training and offload are level, within 1 %{given}."
        assert ms[1] < 1.02 * ms[0]
    assert lines[-1].startswith("# with offload: offload_optimizer(optimizer, model=model")
    counts = re.findall(r"^recomputed = (\d+)", result.stdout, re.M)
    assert counts == {"auto": counts[:1], "full": ["12"], "2": ["2"]}[checkpointing]
    assert counts in ([], ["0"]) or checkpointing != "auto"


def test_exit_code_one_where_nothing_fits() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--device-gb", "2"])
    assert result.exit_code == 1
    name = result.stdout.partition("Nothing fits. ")[2].partition(" would, with ")[0]
    assert name.startswith("iteration, parameters, ")
    needed_gb = float(result.stdout.partition("would, with ")[2].partition(" GB of each device (2.0 GB here)")[0])
    more = CliRunner().invoke(app, [*QWEN, "--device-gb", str(needed_gb + 0.1)])
    assert more.exit_code == 0
    assert f"Best: {name}, " in more.stdout


MORE, ANY, NO_CLIP = {"micro_batches": None}, {"checkpointing": "auto"}, {"clip": False}
TWICE = {"ranks": 2, "tokens_per_step": 32_768}
REMEDIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "--micro-batches": ({"micro_batches": 1, "checkpointing": "full", "clip": True}, [MORE]),
    "--no-clip": ({"checkpointing": "full", "clip": True}, [NO_CLIP]),
    "--checkpointing": ({"checkpointing": 0, "clip": False}, [ANY]),
    "--ranks --tokens-per-step": ({"checkpointing": "full", "clip": False}, [TWICE]),
}
"""Options that are named; what is asked, which does not fit; and what is changed."""


@pytest.mark.parametrize("wanted", REMEDIES)
def test_the_cheapest_options_with_which_something_fits_are_named_with_their_price(wanted: str, small: Path) -> None:
    """The device has memory for the training with all of these changes, and not for that with one less."""
    asked, changes = REMEDIES[wanted]
    fewer = changes if len(changes) > 1 else [{}]
    least_gb = [least_needed_gb(small, asked | one) for one in (dict(ChainMap(*changes)), *fewer)]
    assert least_gb[0] < min(least_gb[1:])
    options = [f"--device-gb={(least_gb[0] + min(least_gb[1:])) / 2}", "--machine=H200", f"--tokens-per-step={TOKENS}"]
    options += [f"--checkpointing={asked['checkpointing']}", "--clip" if asked["clip"] else "--no-clip"]
    options += ["--micro-batches=1"] * ("micro_batches" in asked)
    result = CliRunner().invoke(app, [str(small), *options])
    assert result.exit_code == 1
    found = re.search(r"What fits: (--.*) \((.*), (.*) and (.*): ([\d,]+ ms), (-?\d+) % more than plain", result.stdout)
    assert found is not None, result.stdout
    assert " ".join(word for word in found[1].split() if word.startswith("--")) == wanted
    again = CliRunner().invoke(app, [str(small), *options, *found[1].split()])
    assert again.exit_code == 0
    assert f"Best: {found[2]}, {found[5]}, {found[3]} and {found[4]}, " in again.stdout


def least_needed_gb(model: Path, asked: dict[str, Any]) -> float:
    made = plan(model, machine="H200", device_gb=0.1, **{"tokens_per_step": TOKENS, **asked})
    return min(one.needed_bytes for one in made._allowed(None)) / 1e9


TOKENS = 16_384


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A decoder with the layers of Llama-3.1-8B, twelve of them."""
    config = json.loads(builtin_models()["Llama-3.1-8B"].read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 12, "vocab_size": 8192}))
    return tmp_path


def test_a_device_for_which_no_option_is_enough() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--device-gb", "2"])
    assert "8 times the ranks are not enough: try shorter sequences (--sequence-length)." in result.stdout


def test_json() -> None:
    made = json.loads(CliRunner().invoke(app, [*QWEN, "--json", "--overlap", "forward"]).stdout)
    assert made["best"] == "forward"
    assert made["policies"][0]["name"] == "no offload"
    assert made["policies"][0]["passed_over"].startswith("device: ")
    assert made["verdict"].startswith("Plain training does not fit, with all 40 blocks recomputed and 1 micro-batch: ")
    assert made["policies"][1]["peak_bytes"] < made["policies"][0]["peak_bytes"]
    result = CliRunner().invoke(app, [*QWEN, "--json", "--device-gb", "2"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["best"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        "Qwen3-14B --tokens-per-step 4096",  # there is no GPU
        "Qwen3-14B --tokens-per-step 4096 --machine H200 --checkpointing some",
        "Qwen3-14B --tokens-per-step 4096 --machine H200 --checkpointing 41",
        "Qwen3-14B --tokens-per-step 4096 --machine H200 --expert-parallel 2",
        "nobody --tokens-per-step 4096",
        "nobody.home:model --tokens-per-step 4096",
        "json:dumps --tokens-per-step 4096",
        "Qwen3-14B --tokens-per-step 4096 --machine nowhere",
        "Qwen3-14B --tokens-per-step 24576 --ranks 6 --replicas 4",
        "Qwen3-14B --tokens-per-step many",
        "Qwen3-14B --tokens-per-step 4096 --device-gb nan",
        "Qwen3-14B",
    ],
)
def test_errors_are_one_line_and_exit_code_two(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert sum(line.lower().startswith("error") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


MODELS = """
from torch import nn

class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)

class OtherArguments(Fails):
    def forward(self, tokens, labels): ...

class Logits(Fails):
    def forward(self, tokens): return self.embed(tokens)
"""


@pytest.mark.parametrize("name", ["OtherArguments", "Logits"])
def test_a_module_that_cannot_be_run_is_one_line_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_mine.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    result = CliRunner().invoke(app, [f"models_of_mine:{name}", "--tokens-per-step", "4096", "--machine", "H200"])
    assert result.exit_code == 2
    (message,) = result.stderr.splitlines()
    assert message.startswith(f"error: model '{name}' cannot be run forward and backward on the meta device")
