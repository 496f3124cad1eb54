"""The table of optimizers, ``table.toml``: what is known of exactly a class, and how that makes it run."""

import sys
import tomllib
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
    """What the table says of one class."""

    library: str  # that defines it, and the name of its part of the table
    versions: str  # in which that was seen
    name: str  # ``module:Class``
    verdict: str  # ``"elementwise"``, ``"parameters"``, ``"refused"`` or ``"mixed"``
    notes: Mapping[str, Any]  # what else its row says


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


def row_of(cls: type[Optimizer]) -> Row | None:
    """The row of exactly this class: the one that its module has under that name, and no other of the same name."""
    for row in rows().values():
        module, _, name = row.name.partition(":")
        if name == cls.__qualname__ and getattr(sys.modules.get(module), name, None) is cls:
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
    return frozenset(
        (how, device, dtype)
        for device, dtypes in _FLOATS.items()
        for how in ("for-loop", "foreach", *(["fused"] if device in fused_on else []))
        for dtype in dtypes
    )
