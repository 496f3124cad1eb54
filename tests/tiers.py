"""Which of many combinations the quick tier runs."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest


def spread(**axes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of ``axes``, of each the values by their names.

    The quick tier runs a diagonal of them, in which every value of each axis appears; the others are marked ``long``.
    """
    names = [list(axis) for axis in axes.values()]
    count = max(map(len, names))
    diagonal = {tuple(axis[place % len(axis)] for axis in names) for place in range(count)}
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(axis[name] for axis, name in zip(axes.values(), chosen, strict=True)),
                marks=() if chosen in diagonal else pytest.mark.long,
                id="-".join(chosen),
            )
            for chosen in itertools.product(*names)
        ],
    )
