"""The benchmarks read their options; where nothing can be measured they say so. Figures are drawn on the CPU too."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import typer
from torch import distributed as dist

from examples.benchmarks import figures

OPTIONS = {
    "checkpoint": ["--params", "3000", "--tensors", "3", "--repeats", "1"],
    "link": ["--gib", "0.25", "--repeats", "2"],
    "sleep": ["--gigabytes", "0.01", "--no-sharded"],
    "step": ["--params", "3000", "--implementation", "foreach", "--masters", "remainder"],
    "train": ["--layers", "1", "--width", "128", "--only", "forward,iteration_always", "--no-clip"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_known_and_a_machine_without_an_accelerator_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    main = importlib.import_module(f"examples.benchmarks.{name}").main
    with pytest.raises(SystemExit, match="there is no accelerator here"):
        main(OPTIONS[name])
    assert not dist.is_initialized()
    with pytest.raises(typer.BadParameter, match="Input should be a valid"):
        main([OPTIONS[name][0], "many"])


def test_figures_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures.main([str(tmp_path), "--layers", "2", "--width", "128", "--length", "16", "--bucket-mib", "1"])
    assert {path.name for path in tmp_path.iterdir()} == {"memory.svg", "timeline.svg", "trace.json.gz"}
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert record["bench"] == "figures"
    assert record["profiled_ms"] > 0
