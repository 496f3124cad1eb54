"""``fsdp-offload plan``: table and JSON; errors in one line; large models in little memory, without a network."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_offload.plan.command import LEGEND, app

ROOT = Path(__file__).resolve().parents[2]
QWEN = ["Qwen3-14B", "--tokens-per-step", "16384", "--checkpointing", "full", "--no-clip"]


def test_the_line_of_readme_is_answered_with_a_policy_that_fits() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("fsdp-offload plan ")]
    result = CliRunner().invoke(app, shlex.split(line, comments=True)[2:])
    assert result.exit_code == 0
    assert "Best: forward, with " in result.stdout
    assert result.stdout.rstrip().endswith('policy=OffloadPolicy(overlap="forward"))')


def test_the_table_says_what_its_words_mean_and_why_faster_rows_are_passed_over() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--overlap", "forward"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert "no offload is passed over (device: 102.6 GB too little)" in result.stdout
    assert "iteration is passed over (loop: --overlap forward does not allow it)" in result.stdout
    head, *rest = result.stdout.partition("\npolicy ")[2].partition("\nMiB: ")[0].splitlines()
    words = {*head.split()[1:], *(word for row in rest for word in row.replace(",", "").split())}
    words = {word for word in words if word in LEGEND}
    explained = {line.partition(": ")[0] for line in result.stdout.splitlines()} & LEGEND.keys()
    assert words <= explained
    assert {"device", "host", "link", "not", "MiB"} <= explained
    assert "gathers" not in explained  # which the table does not say


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_where_nothing_is_offloaded_recomputed_blocks_are_named(checkpointing: str) -> None:
    """In the memory that offload frees, blocks may not need to be recomputed: that can be faster."""
    asked = ["Llama-3.1-8B", "--tokens-per-step", "32768", "--ranks", "8", "--checkpointing", checkpointing]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0
    assert "Best: no offload, with " in result.stdout
    assert "no policy is more than 1 % faster" in result.stdout
    assert ("Compare --checkpointing none" in result.stdout) == (checkpointing == "full")


def test_exit_code_one_where_nothing_fits() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--device-gb", "2"])
    assert result.exit_code == 1
    name = result.stdout.partition("Nothing fits. ")[2].partition(" would, with ")[0]
    assert name.startswith("iteration, parameters, ")
    needed_gb = float(result.stdout.partition("would, with ")[2].partition(" GB of each device (2.0 GB here)")[0])
    more = CliRunner().invoke(app, [*QWEN, "--device-gb", str(needed_gb + 0.1)])
    assert more.exit_code == 0
    assert f"Best: {name}, with " in more.stdout


@pytest.mark.parametrize(
    ("device_gb", "checkpointing", "changes"),
    [("2", "full", 0), *(pytest.param(*one, marks=pytest.mark.long) for one in (("20", "full", 1), ("50", "none", 2)))],
)
def test_options_are_named_that_fit(device_gb: str, checkpointing: str, changes: int) -> None:
    asked = ["Qwen3-14B", "--tokens-per-step", "4096", "--no-clip", "--device-gb", device_gb]
    asked += ["--checkpointing", checkpointing]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    if not changes:
        assert "8 times the ranks with --checkpointing full are not enough" in result.stdout
        return
    named = result.stdout.partition("What fits: ")[2].rstrip().removesuffix(".").split("; ")
    assert len(named) == changes
    for one in named:
        policy, _, options = one.partition(" with ")
        more = CliRunner().invoke(app, [*asked, *options.split()])
        assert more.exit_code == 0
        assert f"Best: {policy}, with " in more.stdout


def test_json() -> None:
    made = json.loads(CliRunner().invoke(app, [*QWEN, "--json", "--overlap", "forward"]).stdout)
    assert made["best"] == "forward"
    assert made["policies"][0]["name"] == "no offload"
    assert made["policies"][0]["passed_over"].startswith("device: ")
    assert made["policies"][1]["peak_bytes"] < made["policies"][0]["peak_bytes"]
    result = CliRunner().invoke(app, [*QWEN, "--json", "--device-gb", "2"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["best"] is None


@pytest.mark.parametrize(
    "arguments",
    [
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
    result = CliRunner().invoke(app, [f"models_of_mine:{name}", "--tokens-per-step", "4096"])
    assert result.exit_code == 2
    (message,) = result.stderr.splitlines()
    assert message.startswith(f"error: model '{name}' cannot be run forward and backward on the meta device")
