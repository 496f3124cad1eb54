"""A release describes itself correctly, and has its commands under their own names.

`.ci/release` builds one and tries it in empty environments.
"""

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest

import fsdp_offload
from checkpoint_tools.core.text import NEED_EXTRA
from fsdp_offload.__main__ import main
from fsdp_offload.device.copy_queues import VARIABLE
from tests.pages import ROOT

RELATIVE = re.compile(r"\]\((?!https?:)")


def project() -> dict[str, Any]:
    made = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in made["project"]["dynamic"]
    assert made["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "fsdp_offload.__version__"
    return made["project"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As pip's script of that name does."""
    module, function = project()["scripts"][name].split(":")
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
        (("fsdp-offload", "doctor", "--help"), "usage: fsdp-offload doctor [--json]"),
    ],
    ids=["help", "h", "version", "plan", "doctor"],
)
def test_help(
    command: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())  # type: ignore[func-returns-value]
    assert not ended.value.code
    assert expected in capsys.readouterr().out


def test_a_command_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp-offload", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("fsdp-offload: unknown: nothing\n\nusage: fsdp-offload COMMAND")


def test_doctor_says_what_a_bug_report_needs() -> None:
    lines, as_json = (run("fsdp-offload", "doctor", *flag) for flag in ((), ("--json",)))
    facts = json.loads(as_json.stdout)
    assert facts["fsdp_offload"] == fsdp_offload.__version__
    assert {"torch", "host memory", "memlock (ulimit -l)", "NUMA nodes", VARIABLE, "GPU"} <= facts.keys()
    assert [line[:32].strip() for line in lines.stdout.splitlines()] == list(facts)


@pytest.mark.parametrize(
    "command",
    ["fsdp_offload", "fsdp_offload doctor", "fsdp_offload plan", "checkpoint_tools", "checkpoint_tools split"],
)
def test_help_does_not_wait_for_torch(command: str) -> None:
    name, *words = command.split()
    code = f"""
import atexit, runpy, sys
atexit.register(lambda: print("torch._C" in sys.modules))
runpy.run_module({name!r}, run_name="__main__", alter_sys=True)
"""
    line = [sys.executable, "-c", code, *words, "--help"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "sage: " in found.stdout
    assert found.stdout.splitlines()[-1] == "False"


def test_every_script_is_there() -> None:
    assert project()["scripts"].keys() == {"fsdp-offload", "checkpoint-tools"}
    found = run("checkpoint-tools", "--help")
    assert found.returncode == 0, found.stderr
    assert "Usage: checkpoint-tools [OPTIONS] COMMAND" in found.stdout


def test_version() -> None:
    assert [int(part) for part in fsdp_offload.__version__.split(".")]


def run_line(message: str) -> list[str]:
    """The requirements in the line that a message gives to run."""
    return shlex.split(message.rpartition("python -m pip install ")[2])


def test_a_missing_extra_is_named_with_a_line_that_needs_no_index_to_have_us() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['x', 'plan']; import fsdp_offload.__main__ as m; m.main()"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    extras = project()["optional-dependencies"]
    assert run_line(run.stderr) == extras["plan"]
    assert run_line(NEED_EXTRA) == extras["tools"]
    assert run_line("python -m pip install 'a>=1' b") == ["a>=1", "b"]


def test_readme_has_no_relative_link_on_an_index_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    assert len(RELATIVE.findall(readme)) > 20
    alone, linked = description(readme, None), description(readme, "https://forge.example/us/fsdp_offload")
    assert not RELATIVE.search(alone)
    assert not RELATIVE.search(linked)
    assert "![" not in alone
    assert "[Start](" not in alone
    assert "Start · Choose a policy" not in alone
    assert "## Read on\n\nThe site with the reference" in alone
    assert "(https://forge.example/us/fsdp_offload/raw/HEAD/docs/figures/front.svg)" in linked
    assert "[Start](https://forge.example/us/fsdp_offload/blob/HEAD/docs/start.md)" in linked


def test_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fsdp_offload.__version__}\n" in citation
    assert f"\nlicense: {project()['license']}\n" in citation
