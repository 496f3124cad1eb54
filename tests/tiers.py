"""Which of many combinations the quick tier runs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def spread(*, pairs: bool = False, **axes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of ``axes``, of each the values by their names.

    The quick tier runs some of them, in which every value of each axis appears, or with ``pairs`` every two values of
    different axes together; the others are marked ``long``.
    """
    names = [list(axis) for axis in axes.values()]
    everything = list(itertools.product(*names))
    quick = _with_all_pairs(everything) if pairs else _diagonal(names)
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(axis[name] for axis, name in zip(axes.values(), chosen, strict=True)),
                marks=() if chosen in quick else pytest.mark.long,
                id="-".join(chosen),
            )
            for chosen in everything
        ],
    )


def _diagonal(names: Sequence[Sequence[str]]) -> set[tuple[str, ...]]:
    return {tuple(axis[place % len(axis)] for axis in names) for place in range(max(map(len, names)))}


def _with_all_pairs(everything: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Take whichever combination brings the most pairs that are still missing, until none is."""
    pairs_of = {chosen: set(itertools.combinations(enumerate(chosen), 2)) for chosen in everything}
    missing = set().union(*pairs_of.values())
    taken = set()
    while missing:
        best = max(everything, key=lambda chosen: len(pairs_of[chosen] & missing))
        taken.add(best)
        missing -= pairs_of[best]
    return taken


def every_nth(cases: Iterable[Any], count: int) -> list[Any]:
    """Mark all of these parameters (``pytest.param``) ``long`` but every ``count``-th."""
    return [
        case if number % count == 0 else pytest.param(*case.values, marks=pytest.mark.long, id=case.id)
        for number, case in enumerate(cases)
    ]


def some_cases(steps: Mapping[int, int]) -> pytest.MarkDecorator:
    """Parametrize a test over numbers of ranks, ``world_size``, and ``every``: it runs every so-manieth of its cases.

    The quick tier runs those that ``steps`` says for each number of ranks (0: none), and all are marked ``long``.
    Tables of three policies for each case want a number that three does not divide, so that each policy has its turn.
    """
    quick = [(size, every) for size, every in steps.items() if every]
    everything = [pytest.param(size, 1, marks=pytest.mark.long) for size, every in steps.items() if every != 1]
    return pytest.mark.parametrize(("world_size", "every"), [*quick, *everything])


def world_sizes(quick: int, *others: int) -> pytest.MarkDecorator:
    """Parametrize a test over numbers of ranks, of which the quick tier runs the first."""
    long = [pytest.param(size, marks=pytest.mark.long) for size in others]
    return pytest.mark.parametrize("world_size", [quick, *long])
