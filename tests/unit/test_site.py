"""The site of the pages: it builds without a warning, and whoever looks at it asks no other server for anything."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

# What a browser fetches by itself; a link waits until it is clicked.
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\">\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def test_nothing_comes_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 14
    found = {page.name: FETCHED.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: urls for name, urls in found.items() if urls} == {}
    styles = [sheet.read_text(encoding="utf-8") for sheet in site.rglob("*.css")]
    assert [url for sheet in styles for url in re.findall(r"url\(\"?((?:https?:)?//[^)]+)", sheet)] == []


def test_the_front_page_is_the_readme(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="figures/front.svg"' in front
    assert 'href="policy.html"' in front
    assert 'href="source/CONTRIBUTING.md.txt"' in front
    assert (site / "source/CONTRIBUTING.md.txt").read_bytes() == (ROOT / "CONTRIBUTING.md").read_bytes()


@pytest.mark.parametrize("module", ["fsdp_offload", "fsdp_offload.checkpoint", "checkpoint_tools"])
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    names = importlib.import_module(module).__all__
    assert [name for name in names if f'id="{module}.{name}"' not in page] == []


def test_the_reference_shows_signatures_and_no_markup_of_another_tool(site: Path) -> None:
    page = (site / "reference.html").read_text(encoding="utf-8")
    assert "exist_ok" in page
    assert not re.search(r":(func|class|meth):", page)
