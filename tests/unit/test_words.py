"""Docstrings, comments and messages of the rooms that are done name what they speak of, and begin with the verb."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT

ROOMS = ("fsdp_offload", "checkpoint_tools", "examples/benchmarks")
"""Folders that have been rewritten."""

ODD = re.compile(r"\b(whoever|whatever|nobody|somebody|so many|of these|beside|goes on|has come)\b", re.IGNORECASE)

OPENINGS = re.compile(r"(What|Those|Of|As|All|Where|How|Whether|These|Within it)\b")
"""Of docstrings that have no verb, and of definitions by a relative clause."""


def files_of(room: str) -> list[Path]:
    path = ROOT / room
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in (".py", ".toml"))


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def odd_lines_of(file: Path) -> list[str]:
    """List the lines of a file with an odd word, names of variables included, and docstrings with an odd opening."""
    source, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
    found = [f"{name}:{at}: {line.strip()}" for at, line in enumerate(source.splitlines(), 1) if ODD.search(line)]
    if file.suffix == ".py":
        texts = docstrings_of(ast.parse(source))
        found += [f"{name}:{at}: {text.splitlines()[0]}" for at, text in texts if OPENINGS.match(text)]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_plainly_what_it_does(room: str) -> None:
    found = [line for file in files_of(room) for line in odd_lines_of(file)]
    assert not found, "name the thing, and begin with the verb:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        '"""Whoever wants to know what is done with tensors."""',
        'def reads():\n    """All of them as a forward needs them."""',
        "x = 1  # a file beside the data",
        'raise ValueError("run this again when nobody writes it")',
    ],
)
def test_odd_words_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "odd.py").write_text(text + "\n")
    assert len(odd_lines_of(tmp_path / "odd.py")) == 1
