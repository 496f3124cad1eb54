"""The commands under their own names, and the version that an installed package has."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fsdp_offload
from fsdp_offload.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def scripts() -> dict[str, str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "fsdp_offload.__version__"
    return project["project"]["scripts"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As pip's script of that name does."""
    module, function = scripts()[name].split(":")
    code = f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; sys.exit({function}())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("fsdp-offload", "--help"), "usage: fsdp-offload COMMAND"),
        (("fsdp-offload", "-h"), "doctor       versions, limits"),
        (("fsdp-offload", "--version"), f"fsdp-offload {fsdp_offload.__version__}"),
        (("fsdp-offload", "plan", "--help"), "Usage: fsdp-offload plan [OPTIONS]"),
    ],
    ids=["help", "h", "version", "plan"],
)
def test_help(
    command: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())  # type: ignore[func-returns-value]
    assert not ended.value.code
    assert expected in capsys.readouterr().out


def test_a_command_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp-offload", "nothing"])
    with pytest.raises(SystemExit, match=r"^fsdp-offload: unknown: nothing\n\nusage: fsdp-offload COMMAND"):
        main()


def test_doctor_says_what_a_bug_report_needs() -> None:
    found = run("fsdp-offload", "doctor")
    assert found.returncode == 0, found.stderr
    facts = dict(line.split(None, 1) for line in found.stdout.splitlines())
    assert facts["fsdp_offload"] == fsdp_offload.__version__
    assert {"torch", "host", "memlock", "NUMA", "CUDA_DEVICE_MAX_COPY_CONNECTIONS", "GPU"} <= facts.keys()


def test_every_script_is_there() -> None:
    assert scripts().keys() == {"fsdp-offload", "checkpoint-tools"}
    found = run("checkpoint-tools", "--help")
    assert found.returncode == 0, found.stderr
    assert "Usage: checkpoint-tools [OPTIONS] COMMAND" in found.stdout


def test_version() -> None:
    assert [int(part) for part in fsdp_offload.__version__.split(".")]
