"""CONTRIBUTING.md's map and its picture of imports: what they name exists, and every room is in both."""

import re
import sys
from pathlib import Path

from tests.unit.test_import_direction import MAY_IMPORT

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = ("fsdp_offload", "checkpoint_tools")
PATH = re.compile(r"`([\w./]+(?:\.(?:py|md|yml)|/))`")


def lines_of_the_map() -> dict[str, str]:
    """Room → the rest of its line."""
    table = TEXT.partition("\n## The map\n")[2].partition("\nThe words")[0]
    return dict(re.findall(r"^\| `([\w./]+)` \| (.+) \|$", table, re.MULTILINE))


def arrows_of_the_picture() -> set[tuple[str, str]]:
    picture = TEXT.partition("```mermaid\n")[2].partition("```")[0]
    lines = re.findall(r"(\w+) --> (.+)", picture)
    return {(room, other) for room, others in lines for other in others.split(" & ")}


def test_every_room_has_a_line_and_every_line_a_room() -> None:
    lines = lines_of_the_map()
    rooms = {
        f"{file.relative_to(ROOT).as_posix()}{'/' if file.is_dir() else ''}"
        for package in PACKAGES
        for file in (ROOT / package).iterdir()
        if file.is_dir() or package == "fsdp_offload"
        if file.suffix == ".py" or (file.is_dir() and any(file.rglob("*.*")) and file.name != "__pycache__")
    }
    assert rooms - lines.keys() == set(), "give each a line in CONTRIBUTING.md's map"
    assert [room for room in lines if not (ROOT / room).exists()] == []


def test_files_that_the_map_names_exist() -> None:
    for room, line in lines_of_the_map().items():
        for name in PATH.findall(line):
            path = ROOT / name if "/" in name.rstrip("/") or not (ROOT / room).is_dir() else ROOT / room / name
            assert path.exists() or (ROOT / name).exists(), f"{room}: {name}"


def test_the_picture_has_an_arrow_for_each_import_that_no_other_implies() -> None:
    below: dict[str, set[str]] = {}  # by any number of arrows; the table begins with the lowest room
    for room, allowed in MAY_IMPORT.items():
        below[room] = allowed.union(*(below[other] for other in allowed))
    implied = {(room, far) for room, allowed in MAY_IMPORT.items() for other in allowed for far in below[other]}
    assert (
        arrows_of_the_picture()
        == {(room, other) for room, allowed in MAY_IMPORT.items() for other in allowed} - implied
    )


def test_files_that_the_source_and_the_other_table_name_exist() -> None:
    """A docstring that names a file, or says ``:mod:``, was right before the file was moved."""
    missing = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            paths = re.findall(rf"\b(?:{'|'.join(PACKAGES)}|docs|tests|examples)/[\w/]+\.(?:py|md|toml)\b", text)
            modules = set(re.findall(r":mod:`~?([\w.]+)`", text)) - sys.stdlib_module_names
            named = [*paths, *(module.replace(".", "/") + ".py" for module in modules)]
            lost = [name for name in named if not any((folder / name).exists() for folder in (ROOT, file.parent))]
            missing += [f"{file.relative_to(ROOT)}: {name}" for name in lost]
    table = TEXT.partition("\n### Where to change what\n")[2].partition("\n### ")[0]
    missing += [name for name in PATH.findall(table) if not any((ROOT / one / name).exists() for one in PACKAGES)]
    assert missing == []
