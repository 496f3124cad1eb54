"""Requests to split or merge, completed by what the checkpoint itself tells.

::

    --preset, --rules, --value, --exclude, --only, --yes ─┐
    split_record.json: what was taken apart, and how ─────┼──complete──▶ Complete ──▶ rewrite.plan
    args, config.json: values of the model's config ──────┘
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.errors import CheckpointError
from ..core.patterns import idle_patterns, is_excluded
from ..core.sizes import shortened
from ..stored.reading import Checkpoint
from .config_values import with_told
from .plan import Exchange
from .preset_files import preset_names
from .rules import ALL, DENSE_RANKS, EXPERT_RANKS, Match, Rule, Wanted, Way, match_of
from .split_record import RECORD_FILE, read_record

_NAMES_IN_ERRORS = 5


class Request(NamedTuple):
    """Request for a split or merge, as the user gave it.

    Attributes:
        rules: of presets and files; none, to undo the last split.
        values: of the model's config.
        excluded: patterns of keys that stay.
        only: patterns of fused tensors or parts, if not all of them are meant.
        is_sure: merge whatever the rules match, whether or not split took it apart.
    """

    rules: Sequence[Rule]
    values: Mapping[str, float]
    excluded: Sequence[str] = ()
    only: Sequence[str] = ()
    is_sure: bool = False


class Complete(NamedTuple):
    """Request with nothing left open.

    Attributes:
        rules, values, excluded: with which.
        wanted: which of the matches.
        is_known: a record or a person says which; otherwise the rules alone do.
        notes: what a person should know.
    """

    rules: Sequence[Rule]
    values: Mapping[str, float]
    excluded: Sequence[str]
    wanted: Wanted
    is_known: bool
    notes: list[str]


def complete(checkpoint: Checkpoint, way: Way, request: Request) -> Complete:
    """Complete a request by what the checkpoint tells.

    Raises:
        CheckpointError: there are no rules, values contradict how the checkpoint is stored, or a pattern means nothing.
    """
    rules, given, fused = request.rules, request.values, None
    splits = read_record(checkpoint) if way == "merge" else []
    if not rules and splits:
        _check_bounded(checkpoint, splits[-1].rules)
        rules, given, fused = splits[-1].rules, {**splits[-1].values, **given}, splits[-1].fused
    elif splits and not request.is_sure:
        fused = frozenset[str]().union(*(split.fused for split in splits))
    if not rules:
        hint = f", and {checkpoint.path} has no {RECORD_FILE}" if way == "merge" else ""
        raise CheckpointError(f"no rules{hint}; give --preset ({', '.join(preset_names())}) or --rules FILE")
    values, notes = with_told(checkpoint, {name for rule in rules for name in rule.value_names}, given)
    notes += _notes_on_experts(checkpoint, way, rules, values)
    return Complete(
        rules,
        values,
        request.excluded,
        _wanted(fused, request.only),
        fused is not None or bool(request.only) or request.is_sure or way == "split",
        notes,
    )


def _notes_on_experts(
    checkpoint: Checkpoint, way: Way, rules: Iterable[Rule], values: Mapping[str, float]
) -> list[str]:
    """Note that experts are taken to be divided as dense layers are, where nobody has said it."""
    if EXPERT_RANKS in values or DENSE_RANKS not in values:
        return []
    of_experts = [rule for rule in rules if rule.groups == EXPERT_RANKS]
    if not any(match_of(way, rule, key) for rule in of_experts for key in checkpoint.tensors):
        return []
    return [
        f"{EXPERT_RANKS} = {values[DENSE_RANKS]}, as {DENSE_RANKS}: the default, as nothing else is known of experts"
    ]


def _check_bounded(checkpoint: Checkpoint, rules: Iterable[Rule]) -> None:
    """Refuse a record's patterns that could take forever: its author may be hostile."""
    for rule in rules:
        if not rule.is_bounded:
            raise CheckpointError(
                f"{checkpoint.path}/{RECORD_FILE} has a rule of its own for {shortened(rule.fused)}, whose pattern "
                "could take forever; if you trust it, give the rules that were used for split with --rules"
            )


def _wanted(fused: frozenset[str] | None, only: Sequence[str]) -> Wanted:
    if fused is None and not only:
        return ALL

    def is_wanted(match: Match) -> bool:
        if fused is not None and match.fused not in fused:
            return False
        return not only or any(is_excluded(name, only) for name in (match.fused, *match.parts))

    return is_wanted


def check_used(request: Request, exchange: Exchange) -> None:
    """Check that each ``--only`` pattern chooses something.

    Raises:
        CheckpointError: names those that do not.
    """
    parts = (part for fusion in exchange.fusions for part in fusion.parts)
    idle = idle_patterns(request.only, [*exchange.matched, *parts])
    if idle:
        raise CheckpointError(f"--only that matches nothing: {', '.join(idle)}. See what there is with --dry-run")


def not_known(checkpoint: Checkpoint, matched: Sequence[str]) -> str:
    """Say that nobody knows whether these parts were ever fused, and how to go on."""
    more = len(matched) - _NAMES_IN_ERRORS
    names = ", ".join(matched[:_NAMES_IN_ERRORS]) + (f" and {more:,} more" if more > 0 else "")
    return (
        f"{checkpoint.path} has no {RECORD_FILE}, so that nobody knows which parts were ever fused; all that the rules "
        f"match would be: {names}. Look at it with --dry-run, and pass --yes, or --only PATTERN for some of it"
    )
