"""README.md, CONTRIBUTING.md and docs/, as the tests read them: their blocks of code, by language."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = {"docs/megatron.md"}
"""The page whose blocks are parts of another framework's loop."""
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [file.relative_to(ROOT).as_posix() for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS)]

OURS = ("fsdp_offload", "checkpoint_tools")
FENCE = re.compile(r"^( *)```(.*?)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: where it is, in which language, and what it says."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> Iterator[Block]:
    text = text_of(page)
    for fence in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, fence.start()) + 2, fence[2], fence[3])


def blocks_in(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]


def needs_a_framework(block: Block) -> bool:
    """Whether it imports more than Python, torch and us. Our integrations import their frameworks."""
    return block.page in NOT_RUN or any(
        module.startswith("fsdp_offload.integrations")
        or module.partition(".")[0] not in {"torch", *OURS, *sys.stdlib_module_names}
        for module in imports_of(ast.parse(block.code))
    )


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
