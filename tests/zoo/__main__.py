"""Command line: ``python -m tests.zoo``."""

import datetime
import fnmatch
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .libraries import Found, known_libraries
from .outcomes import COMBINATIONS, DO_NOT_COUNT, FROM_BEST_TO_WORST, REFUSED, SAME, Row
from .pool import run_all
from .table import TOML_MARK, count, prose_of, to_markdown, to_toml

console = Console(emoji=False, soft_wrap=True, highlight=False, markup=False)


def main(
    libraries: Annotated[str, typer.Option(help="Comma-separated; all that the requirements name, if left out.")] = "",
    classes: Annotated[str, typer.Option(help="Patterns of module:Class, comma-separated.")] = "*",
    combinations: Annotated[
        str,
        typer.Option(
            help="sample (two of them), quick (all of 10 steps), long (the two of 150), resumed (saved, and loaded in "
            "fresh processes) or full (all three)."
        ),
    ] = "quick",
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the results.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="A page of the documentation: its table is replaced.")] = None,
    table: Annotated[Path | None, typer.Option(help="The package's table.toml: rows of others are replaced.")] = None,
    processes: Annotated[int, typer.Option(help="How many run at the same time.")] = os.cpu_count() or 1,
    limit_s: Annotated[float, typer.Option(help="Seconds that a worker may take for one answer.")] = 900.0,
) -> list[Row]:
    """Train every optimizer class plain and offloaded. Fails if any has neither the same bits nor is refused."""
    rows: list[Row] = []
    patterns = classes.split(",")

    def wanted(cls: str) -> bool:
        return any(fnmatch.fnmatch(cls, pattern) or cls.endswith(f":{pattern}") for pattern in patterns)

    def on_found(found: Found, number: int) -> None:
        console.print(f"{found.library} {found.version}: {number} classes")
        console.print(*(f"  not imported: {problem}\n" for problem in found.problems), end="")

    def on_row(row: Row) -> None:
        rows.append(row)
        if row.outcome not in (SAME, *DO_NOT_COUNT):
            console.print(f"{row.cls}: {row.outcome}: {row.detail}")

    run_all(
        *(libraries.split(",") if libraries else known_libraries(), wanted, COMBINATIONS[combinations]),
        processes=processes,
        limit_s=limit_s,
        on_found=on_found,
        on_row=on_row,
    )
    rows.sort(key=lambda row: (row.library.lower(), row.cls.lower()))
    if json_file:
        json_file.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
    if markdown:
        markdown.write_text(prose_of(markdown) + to_markdown(rows), encoding="utf-8")
    if table:
        date = datetime.date.today().isoformat()
        table.write_text(prose_of(table, TOML_MARK) + to_toml(rows, date), encoding="utf-8")
    counts = count(rows)
    console.print(*(f"{outcome}: {counts[outcome]}" for outcome in FROM_BEST_TO_WORST), sep="\n")
    if any(row.outcome not in (SAME, REFUSED, *DO_NOT_COUNT) for row in rows):
        raise typer.Exit(1)
    return rows


if __name__ == "__main__":
    typer.run(main)
