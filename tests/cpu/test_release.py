"""A release describes itself correctly; `.ci/release` builds one and tries it in empty environments."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import fsdp_offload
from checkpoint_tools.core.errors import NEED_EXTRA
from tests.pages import ROOT

RELATIVE = re.compile(r"\]\((?!https?:)")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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
    assert "Start · Choose a policy" in alone
    assert "(https://forge.example/us/fsdp_offload/raw/HEAD/docs/figures/offload.svg)" in linked
    assert "[Start](https://forge.example/us/fsdp_offload/blob/HEAD/docs/start.md)" in linked


def test_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fsdp_offload.__version__}\n" in citation
    assert f"\nlicense: {project()['license']}\n" in citation
