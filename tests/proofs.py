"""What tests prove of each framework: the table of docs/frameworks.md. ``python -m tests.proofs`` prints it.

A test says so by ``@proves("accelerate", "accelerate", TRAINS, RESUMES)``. The table has the tests that pytest collects
here, long ones too, and the versions that are installed.
"""

import contextlib
import io
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

TRAINS, RESUMES, OTHER_RANKS = "trains the same bits", "resumes in a fresh process", "on another number of ranks"


def proves(framework: str, package: str, *claims: str) -> pytest.MarkDecorator:
    """Mark a test that compares with plain training: ``package`` is what ``framework`` is installed by."""
    return pytest.mark.proves(framework, package, *claims)


class _Collected:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def table(items: Iterable[pytest.Item]) -> str:
    """A row for each framework, in the order of the alphabet."""
    rows: dict[str, set[str]] = {}
    for name, package, *claims in (mark.args for item in items for mark in item.iter_markers("proves")):
        rows.setdefault(f"{name} | {package} {version(package)}", set()).update(claims)
    claims = (TRAINS, RESUMES, OTHER_RANKS)
    head = [f"| framework | version | {' | '.join(claims)} |", f"|{' --- |' * (2 + len(claims))}"]
    cells = ((row, " | ".join("yes" if claim in found else "–" for claim in claims)) for row, found in rows.items())
    return "\n".join([*head, *(f"| {row} | {cell} |" for row, cell in sorted(cells, key=lambda one: one[0].lower()))])


def main() -> int:
    """Collect the files in which a test proves something, and print the table."""
    folder, collected, said = Path(__file__).parent, _Collected(), io.StringIO()
    files = [str(file) for file in sorted(folder.rglob("test_*.py")) if "proves(" in file.read_text(encoding="utf-8")]
    with contextlib.redirect_stdout(said):
        code = pytest.main(["--collect-only", "-qq", "-m", "long or not long", *files], plugins=[collected])
    sys.stdout.write(said.getvalue() if code else table(collected.items) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
