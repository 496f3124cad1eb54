"""The table of optimizers, ``table.toml``: what is known of exactly a class, and how that makes it run."""

import itertools
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch.optim import Optimizer

from .base import Capabilities

# On the CPU reduced precision is left whole: scalar and vector loops round it differently, and where the one takes over
# from the other depends on how a tensor's size divides among threads.
_FLOATS = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class Row:
    """What the table says of one class.

    Attributes:
        library: that defines it, and the name of its part of the table.
        versions: in which that was seen.
        name: ``module:Class``.
        verdict: ``"elementwise"``, ``"parameters"``, ``"refused"`` or ``"mixed"``.
        notes: what else its row says.
    """

    library: str
    versions: str
    name: str
    verdict: str
    notes: Mapping[str, Any]


@cache
def rows() -> dict[str, Row]:
    """All rows, by the names of their classes."""
    table = tomllib.loads((resources.files(__package__) / "table.toml").read_text(encoding="utf-8"))
    return {
        name: Row(library, part["versions"], name, notes["verdict"], notes)
        for library, part in table.items()
        for name, entry in part["classes"].items()
        for notes in [{"verdict": entry} if isinstance(entry, str) else entry]
    }


@cache
def _by_class_name() -> dict[str, list[Row]]:
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows().values():
        found[row.name.partition(":")[2]].append(row)
    return found


def row_of(cls: type[Optimizer]) -> Row | None:
    """The row of exactly this class: the one that its module has under that name, and no other of the same name."""
    for row in _by_class_name().get(cls.__qualname__, ()):
        if getattr(sys.modules.get(row.name.partition(":")[0]), cls.__qualname__, None) is cls:
            return row
    return None


def capabilities_of(cls: type[Optimizer], *, trust: bool = False) -> Capabilities:
    """Return the capabilities of exactly this class: a subclass may do anything in its ``step`` and inherits none.

    ``trust``: the user says that a class whose rows no test has proved here may be divided: as its row says, or each
    element for itself if it has none.

    Raises:
        ValueError: the row of a class that is trusted says that it mixes parameters.
    """
    row = row_of(cls)
    if row is None or row.library != "torch" or row.verdict == "mixed":
        if not trust:
            return Capabilities(known=False)
        if row is not None and row.verdict == "mixed":
            raise ValueError(
                f"trust_separable=True: what the step of {cls.__name__} writes to a parameter depends on others, says "
                f"optimizers/table.toml of {row.library} {row.versions}. So it cannot be divided. Leave it out."
            )
        of_elements = row is None or row.verdict == "elementwise"
        cuttable = _cuttable(()) if of_elements else frozenset()
        return Capabilities(known=False, trusted=True, elementwise=of_elements, cuttable=cuttable)
    elementwise = row.verdict == "elementwise"
    return Capabilities(
        elementwise=elementwise,
        state_like_param=row.notes.get("state-like-param", elementwise),
        takes_masters=elementwise,
        cuttable=_cuttable(row.notes.get("fused", ())) if elementwise else frozenset(),
        wrong_if_fused=frozenset(getattr(torch, dtype) for dtype in row.notes.get("wrong-if-fused", ())),
        refusal=row.notes.get("reason", ""),
        refuses_dtensor=row.notes.get("refuses-dtensor", ""),
    )


def _cuttable(fused_on: tuple[str, ...]) -> frozenset[tuple[str, str, torch.dtype]]:
    """What ``tests/cpu/test_cut_table.py`` proves: whole against cut, several steps, ``torch.equal``."""
    entries: set[tuple[str, str, torch.dtype]] = set()
    for device, dtypes in _FLOATS.items():
        implementations = ("for-loop", "foreach", "fused") if device in fused_on else ("for-loop", "foreach")
        entries |= set(itertools.product(implementations, (device,), dtypes))
    return frozenset(entries)
