"""What came out, as text: for the terminal, for the documentation, and for the package's table of optimizers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .outcomes import DO_NOT_COUNT, FULL, REFUSED, SAME, Row

MARK = "<!-- Below this line: `python -m tests.zoo --markdown docs/optimizers.md`. Do not edit it. -->"

_HEAD = """\

## Every class that was tried

The test zoo trains each class of these libraries on the CPU, plain and offloaded: one and two param groups, attached
before the first step and after the third, default and smallest buckets, 10 and 150 steps, resumed in a fresh process
({full} combinations, if plain training runs in all of them). It compares parameters bit by bit after each step, and
state, param groups and random generators at the end.
Of {classes} classes, {ran} run plain: {same} give the same bits, and {refused} are refused.

All but those of torch move as a whole. *m*: what is written to a parameter depends on others, so `trust_separable` is
refused. Refused: *w* it wraps another optimizer, so attach to the inner one; *o* another reason, which the error says.
*in K* means in K combinations only.

| library | same bits | refused |
| --- | --- | --- |"""


def count(rows: Iterable[Row]) -> Counter[str]:
    """How many classes there are of each outcome."""
    return Counter(row.outcome for row in rows)


def prose_of(page: Path, mark: str = MARK) -> str:
    """What somebody has written above the table of ``page``."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    return text.partition(mark)[0] if mark in text else ""


def to_markdown(rows: Sequence[Row]) -> str:
    """The table in the documentation: a line for each library; what is neither the same nor refused below it."""
    counts = count(rows)
    ran = len(rows) - sum(counts[outcome] for outcome in DO_NOT_COUNT)
    head = _HEAD.format(full=len(FULL), classes=len(rows), ran=ran, same=counts[SAME], refused=counts[REFUSED])
    lines = [MARK, *head.splitlines()]
    for library, version in sorted({(row.library, row.version) for row in rows}, key=lambda one: one[0].lower()):
        of_library = sorted((row for row in rows if row.library == library), key=lambda row: row.cls.lower())
        same = _listed(_name(row) + _mixes(row) for row in of_library if row.outcome == SAME)
        refused = _listed(_refusal(row) for row in of_library if row.outcome == REFUSED)
        if same or refused:
            lines.append(f"| {library} {version} | {same} | {refused} |")
    defects = [row for row in rows if row.outcome not in (SAME, REFUSED, *DO_NOT_COUNT)]
    if defects:
        lines += ["", "Defects:", "", *(f"- {_name(row)} ({row.library}): {row.outcome}" for row in defects)]
    return "\n".join(lines) + "\n"


TOML_MARK = "# Below this line: `python -m tests.zoo --table fsdp_offload/optimizers/table.toml`. Do not edit it.\n"


def to_toml(rows: Sequence[Row], date: str) -> str:
    """Rows of the package's table: classes of other libraries that train with the same bits, and whether they mix."""
    lines = [TOML_MARK]
    for library, version in sorted({(row.library, row.version) for row in rows if row.library != "torch"}):
        of_library = sorted((row for row in rows if row.library == library), key=lambda row: row.cls.lower())
        verdicts = {row.cls: _verdict(row) for row in of_library}
        if any(verdicts.values()):
            lines += [f"[{library}]", f'versions = "{version}"', f"date = {date}", "", f"[{library}.classes]"]
            lines += [*(f'"{cls}" = "{verdict}"' for cls, verdict in verdicts.items() if verdict), ""]
    return "\n".join(lines)


def _verdict(row: Row) -> str:
    """Empty where there is none: not run, refused in some combinations, or not traced."""
    outcomes = {one.outcome for one in row.outcomes} - {*DO_NOT_COUNT}
    word = row.verdict.partition(":")[0]
    return word if outcomes == {SAME} and word in ("parameters", "mixed") else ""


def _mixes(row: Row) -> str:
    return " *m*" if _verdict(row) == "mixed" else ""


def _name(row: Row) -> str:
    return row.cls.split(":")[1]


def _refusal(row: Row) -> str:
    """The class with the letter of its reason, and in how many combinations, if not in all that ran."""
    compared = [one.outcome for one in row.outcomes if one.outcome not in DO_NOT_COUNT]
    some = f" in {compared.count(REFUSED)}" if set(compared) != {REFUSED} else ""
    letter = "w" if "wraps another optimizer" in row.detail else "o"
    return f"{_name(row)} *{letter}*{some}"


def _listed(names: Iterable[str]) -> str:
    """Each once, with how many classes have that name."""
    return ", ".join(f"{name} ×{number}" if number > 1 else name for name, number in Counter(names).items())
