"""Lazy imports: a package imports its public names at their first use, so ``--help`` does not wait for torch."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def names_later(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package with these public ``names``, which ``modules`` define.

    The first use of any name imports all modules, in this order.
    """
    ours = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        for module in modules:
            found = vars(importlib.import_module(f".{module}", package))
            ours.update({each: found[each] for each in names if each in found})
        return ours[name]

    return get, lambda: sorted({*ours, *names})
