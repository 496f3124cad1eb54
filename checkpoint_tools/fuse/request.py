"""Requests to split or merge, completed by what the checkpoint itself contains.

::

    --preset, --rules, --value, --exclude, --only, --yes ─┐
    split_record.json: what was taken apart, and how ─────┼──complete──▶ Complete ──▶ rewrite.plan
    args, config.json: values of the model's config ──────┘

The names of parts do not tell whether they were ever fused: a model may have layers of both kinds. So split records
beside its checkpoint which tensors it took apart, by which rules and values, and merge exchanges these and no others.
The record is JSON, and is copied like all files beside the data.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import CheckpointError
from ..core.text import idle_patterns, is_excluded, shortened
from ..stored.reading import Checkpoint
from ..stored.storage import read_small
from .config_values import with_told
from .plan import Exchange
from .preset_files import preset_names
from .rules import ALL, DENSE_RANKS, EXPERT_RANKS, Match, Rule, Wanted, Way, match_of, rules_of

RECORD_FILE = "split_record.json"
_FORMAT = "checkpoint_tools split 1"
_MAX_BYTES = 256 << 20


class Split(NamedTuple):
    """One run of split: by which rules and values of the model's config, and what, by the names that rules match."""

    rules: tuple[Rule, ...]
    values: Mapping[str, float]
    fused: frozenset[str]


def read_record(checkpoint: Checkpoint) -> list[Split]:
    """Read the splits that a checkpoint went through and that were not undone, the latest last."""
    try:
        content = read_small(checkpoint.folder, RECORD_FILE, _MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path}/{RECORD_FILE} cannot be read: {error.strerror or error}") from error
    splits = []
    try:
        found = json.loads(content)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {shortened(repr(found['format']))}")
        if found["crc32"] != _crc(found["splits"]):
            raise ValueError("its CRC-32 is not the one that was written with it")
        for each in found["splits"]:
            tables = [{name: value for name, value in table.items() if value is not None} for table in each["rules"]]
            values = {str(name): value for name, value in each["values"].items() if isinstance(value, int | float)}
            if not all(isinstance(name, str) for name in each["fused"]):
                raise TypeError("a name is no text")
            splits.append(Split(rules_of({"rule": tables}, RECORD_FILE), values, frozenset(each["fused"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint.path}/{RECORD_FILE} is not what split leaves ({type(error).__name__}: "
            f"{shortened(str(error))}); remove it, and say with --preset or --rules what is to be merged"
        ) from error
    return splits


def record_bytes(splits: Sequence[Split]) -> bytes:
    """Serialize the record."""
    found = []
    for split in splits:
        rules = [dataclasses.asdict(rule) for rule in split.rules]
        values = {name: v for name, v in split.values.items() if any(name in rule.value_names for rule in split.rules)}
        found.append({"rules": rules, "values": values, "fused": sorted(split.fused)})
    return json.dumps({"format": _FORMAT, "crc32": _crc(found), "splits": found}, indent=1).encode() + b"\n"


def _crc(splits: Any) -> int:
    """Compute the CRC-32 of the record's meaning, however it is formatted."""
    return zlib.crc32(json.dumps(splits).encode())


_NAMES_IN_ERRORS = 5


class Request(NamedTuple):
    """Request for a split or merge, as the user gave it; without rules, to undo the last split.

    ``excluded`` keys stay; ``only`` chooses fused tensors or parts; ``is_sure``: merge whatever the rules match.
    """

    rules: Sequence[Rule]
    values: Mapping[str, float]
    excluded: Sequence[str] = ()
    only: Sequence[str] = ()
    is_sure: bool = False


class Complete(NamedTuple):
    """Request with nothing left open. ``is_known``: a record or the user says which; otherwise the rules alone do."""

    rules: Sequence[Rule]
    values: Mapping[str, float]
    excluded: Sequence[str]
    wanted: Wanted
    is_known: bool
    notes: list[str]


def complete(checkpoint: Checkpoint, way: Way, request: Request) -> Complete:
    """Complete a request by what the checkpoint contains."""
    rules, given, fused = request.rules, request.values, None
    splits = read_record(checkpoint) if way == "merge" else []
    if not rules and splits:
        rules, given, fused = splits[-1].rules, {**splits[-1].values, **given}, splits[-1].fused
        for rule in rules:
            if not rule.is_bounded:  # its author may be hostile
                raise CheckpointError(
                    f"{checkpoint.path}/{RECORD_FILE} has a rule of its own for {shortened(rule.fused)}, whose pattern "
                    "could take forever; if you trust it, give the rules that were used for split with --rules"
                )
    elif splits and not request.is_sure:
        fused = frozenset[str]().union(*(split.fused for split in splits))
    if not rules:
        hint = f", and {checkpoint.path} has no {RECORD_FILE}" if way == "merge" else ""
        raise CheckpointError(f"no rules{hint}; give --preset ({', '.join(preset_names())}) or --rules FILE")
    values, notes = with_told(checkpoint, {name for rule in rules for name in rule.value_names}, given)
    if EXPERT_RANKS not in values and DENSE_RANKS in values:
        of_experts = [rule for rule in rules if rule.groups == EXPERT_RANKS]
        if any(match_of(way, rule, key) for rule in of_experts for key in checkpoint.tensors):
            ranks = values[DENSE_RANKS]
            notes.append(f"{EXPERT_RANKS} = {ranks}, as {DENSE_RANKS}: the default, since nothing else is known")

    def wanted(match: Match) -> bool:
        if fused is not None and match.fused not in fused:
            return False
        return not request.only or any(is_excluded(name, request.only) for name in (match.fused, *match.parts))

    chooses = fused is not None or bool(request.only)
    is_known = chooses or request.is_sure or way == "split"
    return Complete(rules, values, request.excluded, wanted if chooses else ALL, is_known, notes)


def check_used(request: Request, exchange: Exchange) -> None:
    """Check that each ``--only`` pattern chooses something."""
    parts = (part for fusion in exchange.fusions for part in fusion.parts)
    idle = idle_patterns(request.only, [*exchange.matched, *parts])
    if idle:
        raise CheckpointError(f"--only that matches nothing: {', '.join(idle)}. See what there is with --dry-run")


def not_known(checkpoint: Checkpoint, matched: Sequence[str]) -> str:
    """Format the error for parts of which no record says that they were ever fused, and how to go on."""
    more = len(matched) - _NAMES_IN_ERRORS
    names = ", ".join(matched[:_NAMES_IN_ERRORS]) + (f" and {more:,} more" if more > 0 else "")
    return (
        f"{checkpoint.path} has no {RECORD_FILE}, so that nobody knows which parts were ever fused; all that the rules "
        f"match would be: {names}. Look at it with --dry-run, and pass --yes, or --only PATTERN for some of it"
    )
