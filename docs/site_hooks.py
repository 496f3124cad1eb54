"""Hooks for mkdocs: README.md is the site's front page, and links from the pages into the repository stay links.

Pages link to examples, records and tests by relative paths, as they are in the repository. The site has no repository
beside it, so each file that is linked is copied into its folder ``source/``.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>(~[\w.]+\.)?([\w.]+)</code>")
TABLE, ROW = re.compile(r"<table>.*?</table>", re.DOTALL), re.compile(r"<tr>.*?</tr>", re.DOTALL)
HEAD, CELL, TAG = re.compile(r"<th[^>]*>(.*?)</th>"), re.compile(r"<td([^>]*>)"), re.compile(r"<[^>]+>")
PLAIN_TEXT = (".jsonl", ".md", ".py", ".toml")  # a browser shows these as text where their name ends in .txt


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, and all files outside ``docs/`` that a page links to."""
    root = Path(config.config_file_path).parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=LINK.sub(_from_docs, readme)))
    for page in files.documentation_pages():
        for target, _ in LINK.findall(page.content_string):
            path = _outside(page.src_uri, target)
            if path and (root / path).is_file() and not files.get_file_from_path(_copy_of(path)):
                files.append(File.generated(config, _copy_of(path), content=(root / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave ``docs/`` to the copies."""

    def to_copy(link: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, link[1])
        if not path or not files.get_file_from_path(_copy_of(path)):
            return link[0]  # mkdocs itself warns of what leads nowhere
        return f"]({posixpath.relpath(_copy_of(path), posixpath.dirname(page.file.src_uri) or '.')})"

    return LINK.sub(to_copy, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show names in docstrings without the roles that Sphinx would read; let each cell know the name of its column."""
    return TABLE.sub(_with_labels, ROLE.sub(r"<code>\2</code>", html))


def _with_labels(table: re.Match[str]) -> str:
    """A table for ``figures/tables.css``, which shows rows as cards where there is no room for columns."""
    names = [TAG.sub("", name).partition(" (")[0].replace('"', "&quot;") for name in HEAD.findall(table[0])]

    def labelled(row: re.Match[str]) -> str:
        cells = iter(names)
        return CELL.sub(
            lambda cell: f'<td data-label="{name}"{cell[1]}' if (name := next(cells, "")) else cell[0], row[0]
        )

    return ROW.sub(labelled, table[0])


def _from_docs(link: re.Match[str]) -> str:
    """A link of the repository's root, as a page in ``docs/`` has it."""
    target = link[1].removeprefix("docs/") if link[1].startswith("docs/") else f"../{link[1]}"
    return f"]({target}{link[2] or ''})"


def _outside(page: str, target: str) -> str:
    """The path from the root of what a page links to, if that is outside ``docs/``; else nothing."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return "" if path.startswith("docs/") else path


def _copy_of(path: str) -> str:
    return f"source/{path}.txt" if path.endswith(PLAIN_TEXT) else f"source/{path}"
