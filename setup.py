"""The description on an index page: README.md, whose relative links lead nowhere there. All else: pyproject.toml.

With ``Repository`` in ``[project.urls]`` of pyproject.toml, links and pictures become absolute. Without it, a link
becomes its text, and pictures and paragraphs of links alone are left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINKS_ALONE = re.compile(r"^(?:\[[^\]]+\]\([^)\s]+\)(?: ·\s)?){2,}\n", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def description(readme: str, repository: str | None) -> str:
    """``readme`` without relative links; ``repository`` is the URL of its page on a forge."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/HEAD/{target})"
        return "" if picture else text

    shown = readme if repository else LINKS_ALONE.sub("", readme)
    return re.sub(r"\n{3,}", "\n\n", LINK.sub(absolute, shown))  # what is left out leaves an empty line


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=description(
            (ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
