"""Command line: ``python -m tests.zoo``."""

import datetime
import fnmatch
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .libraries import Found, known_libraries
from .outcomes import COMBINATIONS, DO_NOT_COUNT, FROM_BEST_TO_WORST, REFUSED, SAME, Row
from .pool import run_all
from .table import TOML_MARK, count, problems_to_markdown, prose_of, to_markdown, to_toml

console = Console(emoji=False, soft_wrap=True)


def main(
    libraries: Annotated[str, typer.Option(help="Comma-separated; all that the requirements name, if left out.")] = "",
    classes: Annotated[str, typer.Option(help="Patterns of module:Class, comma-separated.")] = "*",
    combinations: Annotated[
        str, typer.Option(help="sample (two of them), quick (all of 10 steps) or full (also of 150).")
    ] = "quick",
    read: Annotated[
        list[Path] | None, typer.Option(help="Results of earlier runs; a class that runs again replaces its row.")
    ] = None,
    left: Annotated[bool, typer.Option(help="Only classes of which --read has no row.")] = False,
    run: Annotated[bool, typer.Option(help="--no-run only reads and writes.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the results.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="A page of the documentation: its table is replaced.")] = None,
    table: Annotated[Path | None, typer.Option(help="The package's table.toml: rows of others are replaced.")] = None,
    problems: Annotated[Path | None, typer.Option(help="Where to write defects, and why classes are refused.")] = None,
    processes: Annotated[int, typer.Option(help="How many run at the same time.")] = os.cpu_count() or 1,
    limit_s: Annotated[float, typer.Option(help="CPU seconds that a worker may take for one answer.")] = 300.0,
) -> None:
    """Train every optimizer class plain and offloaded. Fails if any has neither the same bits nor is refused."""
    rows = {row.cls: row for path in read or () for row in _read(path)}
    known = set(rows)
    missing: list[str] = []

    def write() -> None:
        of_all = sorted(rows.values(), key=lambda row: (row.library.lower(), row.cls.lower()))
        if json_file:
            json_file.write_text(json.dumps([row.to_json() for row in of_all], indent=1) + "\n")
        if markdown:
            markdown.write_text(prose_of(markdown) + to_markdown(of_all), encoding="utf-8")
        if table:
            date = datetime.date.today().isoformat()
            table.write_text(prose_of(table, TOML_MARK) + to_toml(of_all, date), encoding="utf-8")
        if problems:
            problems.write_text(problems_to_markdown(of_all), encoding="utf-8")

    if run:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("classes", total=0)
            patterns = classes.split(",")

            def wanted(cls: str) -> bool:
                return not (left and cls in known) and any(
                    fnmatch.fnmatch(cls, pattern) or cls.endswith(f":{pattern}") for pattern in patterns
                )

            def on_found(found: Found, number: int) -> None:
                progress.update(bar, total=(progress.tasks[0].total or 0) + number)
                missing.extend(f"{found.library}: {problem}" for problem in found.problems)
                progress.console.print(f"{found.library} {found.version}: {number} classes")

            def on_row(row: Row) -> None:
                rows[row.cls] = row
                progress.update(bar, advance=1, description=row.cls.split(":")[1])
                if row.outcome not in (SAME, REFUSED, *DO_NOT_COUNT):
                    progress.console.print(f"[red]{row.cls}: {row.outcome}[/]: {row.detail}", highlight=False)
                write()

            chosen = libraries.split(",") if libraries else known_libraries()
            run_all(
                *(chosen, wanted, COMBINATIONS[combinations]),
                processes=processes,
                limit_s=limit_s,
                on_found=on_found,
                on_row=on_row,
            )
    write()
    _print_counts(list(rows.values()), missing)
    if any(row.outcome not in (SAME, REFUSED, *DO_NOT_COUNT) for row in rows.values()):
        raise typer.Exit(1)


def _read(path: Path) -> list[Row]:
    return [Row.from_json(data) for data in json.loads(path.read_text())]


def _print_counts(rows: list[Row], missing: list[str]) -> None:
    counts = count(rows)
    table = Table("result", "classes", title=f"{len(rows)} classes of {len({row.library for row in rows})} libraries")
    for outcome in FROM_BEST_TO_WORST:
        table.add_row(outcome, str(counts[outcome]))
    console.print(table)
    if missing:
        console.print("Not imported:", *missing, sep="\n  ", highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
