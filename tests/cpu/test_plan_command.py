"""``fsdp-offload plan``: table and JSON; errors in one line; large models in little memory, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_offload.plan.command import app

ROOT = Path(__file__).resolve().parents[2]
QWEN = ["Qwen3-14B", "--tokens-per-step", "16384", "--checkpointing", "full", "--no-clip"]


def test_the_table_and_the_line_to_write() -> None:
    result = CliRunner().invoke(app, QWEN, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "no offload does not fit: device: 102.5 GB too little" in result.stdout
    assert result.stdout.rstrip().endswith('policy=OffloadPolicy(bucket_bytes=128 << 20, overlap="iteration"))')
    assert "…" not in result.stdout


def test_exit_code_one_where_nothing_fits() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--device-gb", "2"])
    assert result.exit_code == 1
    assert "Nothing fits. iteration, parameters would, with " in result.stdout
    needed_gb = float(result.stdout.partition("would, with ")[2].partition(" GB of each device (2.0 GB here)")[0])
    more = CliRunner().invoke(app, [*QWEN, "--device-gb", str(needed_gb + 0.1)])
    assert more.exit_code == 0
    assert "Best: iteration, parameters." in more.stdout


@pytest.mark.parametrize(
    ("device_gb", "checkpointing", "changes"),
    [("2", "full", 0), ("30", "full", 1), ("50", "none", 2)],
    ids=["nothing does", "more ranks do", "more ranks or recomputation do"],
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
        assert f"Best: {policy}. " in more.stdout


def test_exit_code_one_with_json() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--device-gb", "2", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["best"] is None


def test_json() -> None:
    result = CliRunner().invoke(app, [*QWEN, "--json", "--loop", "synchronizes"])
    made = json.loads(result.stdout)
    assert made["best"] == "forward, keeping"
    assert made["policies"][0]["policy"] == "no offload"
    assert made["policies"][1]["device"]["peak_bytes"] < made["policies"][0]["device"]["peak_bytes"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["nobody", "--tokens-per-step", "4096"],
        ["nobody.home:model", "--tokens-per-step", "4096"],
        ["json:dumps", "--tokens-per-step", "4096"],
        ["Qwen3-14B", "--tokens-per-step", "0"],
        ["Qwen3-14B", "--tokens-per-step", "4096", "--machine", "nowhere"],
        ["Qwen3-14B", "--tokens-per-step", "24576", "--ranks", "6", "--replicas", "4"],
        ["Qwen3-14B", "--tokens-per-step", "many"],
        ["Qwen3-14B", "--tokens-per-step", "4096", "--device-gb", "0"],
        ["Qwen3-14B", "--tokens-per-step", "4096", "--device-gb", "nan"],
        ["deepseek_v3", "--tokens-per-step", "4096"],
        ["bert", "--tokens-per-step", "4096"],
        ["Qwen3-14B"],
    ],
    ids=" ".join,
)
def test_errors_are_one_line_and_exit_code_two(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    message = [line for line in result.stderr.splitlines() if line.lower().startswith("error")]
    assert len(message) == 1
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

class Frozen(Fails):
    def forward(self, tokens): return self.embed(tokens).detach().mean()

class DependsOnValues(Fails):
    def forward(self, tokens): return self.embed(tokens)[tokens > 0].mean()
"""


@pytest.mark.parametrize("name", ["OtherArguments", "Logits", "Frozen", "DependsOnValues"])
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


_RUN = """
import resource, runpy, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("a plan needs no network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9))
sys.argv = ["fsdp_offload", "plan", *sys.argv[1:]]
try:
    runpy.run_module("fsdp_offload", run_name="__main__")
finally:
    # Not ru_maxrss: that begins with what the process that started this one had.
    high_water_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(int(high_water_kb) * 1024, file=sys.stderr)
"""


@pytest.mark.long
def test_seventy_billion_parameters_in_less_than_a_gigabyte_and_without_a_network() -> None:
    arguments = ["Llama-3.1-70B", "--machine", "H100", "--ranks", "64", "--tokens-per-step", "524288", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments, "--sequence-length", "8192", "--checkpointing", "full"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["parameters"] == 70_553_706_496
    assert int(done.stderr.splitlines()[-1]) < 10**9
