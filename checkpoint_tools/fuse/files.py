"""Splits and merges of checkpoints in files: complete a user's request from the files' content, and plan it.

::

    --preset, --rules, --value, --exclude, --only, --yes ─┐
    split_record.json: tensors split before, and rules ───┼──find_exchange──▶ Exchange
    args, config.json: values of the model's config ──────┘

The names of parts do not tell whether they were ever fused: a model may have layers of both kinds. So split records in
its checkpoint which tensors it split, with rules and values, and merge exchanges only those.

Values of the model's config are read from the checkpoint: numbers of ranks are 1 in Megatron's ``torch_dist``; sizes
and heads are in Megatron's ``args``, whose code is not run; other models have a Hugging Face ``config.json``.
"""

import contextlib
import dataclasses
import json
import math
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import torch

from ..core.regions import Shape, whole_of
from ..core.text import CheckpointError, check_patterns, is_count, is_excluded, shortened, some_of
from ..stored.checkpoint import Checkpoint
from ..stored.items import Archive, DamagedError, ItemReader, plain_pickle
from ..stored.storage import read_file
from ..stored.unpickle import PickledObject
from .names import GroupName, sorted_out
from .plan import Exchange, Source, plan_exchange
from .rules import ALL, DENSE_RANKS, EXPERT_RANKS, Match, Rule, Wanted, Way, match_of, presets_for, rules_of

RECORD_FILE = "split_record.json"
_FORMAT = "checkpoint_tools split 1"
_MAX_BYTES = 256 << 20


class Split(NamedTuple):
    """One run of split: its rules, its values of the model's config, and the names of the tensors that it split."""

    rules: tuple[Rule, ...]
    values: Mapping[str, float]
    fused: frozenset[str]


def read_record(checkpoint: Checkpoint) -> list[Split]:
    """Read the splits of a checkpoint that no merge has undone, the latest last."""
    try:
        content = read_file(checkpoint.folder, RECORD_FILE, _MAX_BYTES)
    except FileNotFoundError:
        return []
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


def new_record(checkpoint: Checkpoint, way: Way, asked: "Request", fused: Sequence[str]) -> dict[str, bytes]:
    """Return the record file after the tensors ``fused`` are split or merged; no file if no split is left."""
    matched, splits = frozenset(fused), read_record(checkpoint)
    if way == "split":
        splits.append(Split(tuple(asked.rules), asked.values, matched))
    else:
        splits = [left for split in splits if (left := split._replace(fused=split.fused - matched)).fused]
    found = []
    for split in splits:
        rules = [dataclasses.asdict(rule) for rule in split.rules]
        values = {name: v for name, v in split.values.items() if any(name in rule.value_names for rule in split.rules)}
        found.append({"rules": rules, "values": values, "fused": sorted(split.fused)})
    record = json.dumps({"format": _FORMAT, "crc32": _crc(found), "splits": found}, indent=1).encode() + b"\n"
    return {RECORD_FILE: record} if splits else {}


def _crc(splits: Any) -> int:
    """Compute the CRC-32 of the record's content, independent of its formatting."""
    return zlib.crc32(json.dumps(splits).encode())


class Request(NamedTuple):
    """A user's request to split or merge; a merge without rules undoes the last split."""

    rules: Sequence[Rule]
    values: Mapping[str, float]
    excluded: Sequence[str] = ()  # patterns of keys that stay as they are
    only: Sequence[str] = ()  # patterns of the only fused tensors or parts to exchange
    is_sure: bool = False  # --yes: merge everything that the rules match
    is_dry: bool = False  # plan only
    # Completed from the checkpoint:
    wanted: Wanted = ALL  # which matches are exchanged
    is_known: bool = False  # whether a record or the user chose the matches, or the rules alone
    notes: Sequence[str] = ()


def _of_record(
    checkpoint: Checkpoint, request: Request
) -> tuple[Sequence[Rule], frozenset[str] | None, list[tuple[str, float]]]:
    """Return the rules of a merge; from the record: names of fused tensors (None if not recorded), and values."""
    rules, splits = request.rules, read_record(checkpoint)
    if rules:
        splits = [] if request.is_sure else splits
    elif splits:
        splits = splits[-1:]
        rules = splits[0].rules
        for rule in rules:
            if not rule.is_bounded:  # the author of the record may be hostile
                raise CheckpointError(
                    f"{checkpoint.path}/{RECORD_FILE} has a rule of its own for {shortened(rule.fused)}, whose pattern "
                    "could take forever; if you trust it, give the rules that were used for split with --rules"
                )
    fused = frozenset[str]().union(*(split.fused for split in splits)) if splits else None
    return rules, fused, [value for split in splits for value in split.values.items()]


def _completed(checkpoint: Checkpoint, way: Way, request: Request) -> Request:
    rules, fused, recorded = _of_record(checkpoint, request) if way == "merge" else (request.rules, None, [])
    if not rules:
        hint = f", and {checkpoint.path} has no {RECORD_FILE}" if way == "merge" else ""
        keys = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
        fitting = presets_for(way, [*keys.others, *(name.fqn for name in keys.states)])
        raise CheckpointError(f"no rules{hint}; give --preset NAME or --rules FILE: {fitting}")
    known, given = {name for rule in rules for name in rule.value_names}, dict(request.values)
    recorded = [(name, value) for name, value in recorded if name in known]
    for name, value in recorded:  # recorded values take precedence over the model's config
        if given.setdefault(name, value) != value and name not in request.values:
            raise CheckpointError(f"{RECORD_FILE} has several values of {name}; give the one with --value")
    values, notes = with_told(checkpoint, known, given)
    rules = [rule.expanded(values) for rule in rules]
    notes += [f"{n} = {given[n]} as given; {RECORD_FILE} has {v}" for n, v in recorded if given[n] != v]
    idle = [name for name in values if name not in known]
    if idle:  # typos
        names = ", ".join(sorted(known)) or "none"
        raise CheckpointError(f"--value that no rule uses: {', '.join(idle)}. The rules name {names}")
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
    chosen = wanted if chooses else ALL
    return request._replace(rules=rules, values=values, wanted=chosen, is_known=is_known, notes=notes)


# The plan -------------------------------------------------------------------------------------------------------------


def find_exchange(way: Way, checkpoint: Checkpoint, request: Request) -> tuple[Exchange, Request]:
    """Plan a split or merge of a checkpoint; return the completed request too."""
    asked = _completed(checkpoint, way, request)
    source = _Files(checkpoint, asked.values)
    found = plan_exchange(way, source, asked.rules, asked.excluded, asked.wanted)
    if not found.matched:
        raise CheckpointError(f"nothing to {way}; {'; '.join(found.notes)}")
    check_patterns("--only", asked.only, [*found.matched, *(part for fusion in found.fusions for part in fusion.parts)])
    # Refuse keys that seem to belong to an exchanged tensor but are not planned: they would silently stay unchanged.
    old = {key for fusion in found.fusions for key in (fusion.fused, *fusion.parts) if key in source.tensors}
    others = source.names.others
    known = old.intersection(others)
    known |= {key.partition(".")[2] for key in known if "." in key}
    lengths = {key.count(".") + 1 for key in known}
    for key in others:
        if key in old or key not in source.tensors or is_excluded(key, asked.excluded):
            continue
        words = key.split(".")
        ends = ((start, start + length) for start in range(len(words)) for length in lengths)
        names = (".".join(words[start:stop]) for start, stop in ends if stop < len(words))
        inside = next((name for name in names if name in known), None)
        if inside is not None:
            raise CheckpointError(
                f"{key} looks as if it belongs to {inside}, and it is not known how; --exclude the one to leave it as "
                "it is, or the other"
            )
    if not (asked.is_known or asked.is_dry):
        raise CheckpointError(
            f"{checkpoint.path} has no {RECORD_FILE}, so it is not known which parts were ever fused; all that the "
            f"rules match would be: {some_of(found.matched, 5)}. Look at it with --dry-run, and pass --yes, or --only "
            "PATTERN for some of it"
        )
    return found, asked._replace(notes=(*asked.notes, *found.notes))


class _Files(Source):
    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, float]) -> None:
        names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
        super().__init__(names, checkpoint.tensors, checkpoint.paths, read_groups(checkpoint, names.groups), values)
        self._checkpoint = checkpoint
        self._reader = ItemReader(checkpoint)

    def value(self, key: str) -> Any:
        if key in self._checkpoint.objects:
            return self._reader.read_object(self._checkpoint.objects[key])
        tensor = self._checkpoint.tensors[key]
        if tensor.shape != ():
            raise CheckpointError(f"{key} has shape {tensor.shape}, and other parts have a number there")
        return self._reader.read_region(tensor, whole_of(()))

    def check_state(self, key: str, shape: Shape, fused: str) -> None:
        found = self._checkpoint.tensors[key].shape
        if found not in (shape, (torch.Size(shape).numel(),)):
            raise CheckpointError(
                f"{key} has shape {found}, its parameter {shape}: it is not known how to split that; leave {fused} "
                "out, with --exclude"
            )


def read_groups(checkpoint: Checkpoint, names: Iterable[GroupName]) -> dict[GroupName, Any]:
    """Read those param groups of ``names`` that are stored as objects."""
    reader = ItemReader(checkpoint)
    return {name: reader.read_object(checkpoint.objects[name.key]) for name in names if name.key in checkpoint.objects}


# Values that the checkpoint knows itself ------------------------------------------------------------------------------

COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"
_CONFIG_FILE = "config.json"
_ARGS = "args"
_MAX_CONFIG_BYTES = 64 << 20  # limit of a file with config values

_MEGATRON: Mapping[str, list[str]] = tomllib.loads(resources.files(__package__).joinpath("megatron.toml").read_text())
"""Name of a value in presets → the Megatron arguments whose product is that value."""


class _Known(NamedTuple):
    """A config value and its source; ``is_layout``: it says how tensors are stored, so users cannot override it."""

    value: float
    where: str
    is_layout: bool = False


def with_told(
    checkpoint: Checkpoint, names: Iterable[str], given: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Add the values of ``names`` that the checkpoint knows to ``given``; return all values, and notes on sources."""
    wanted = set(names)
    found = {**_of_config(checkpoint), **_of_args(checkpoint)} if wanted else {}
    if is_torch_dist(checkpoint):
        one = _Known(1, "torch_dist, which stores gate and up as one rank has them", is_layout=True)
        found.update({DENSE_RANKS: one, EXPERT_RANKS: one})
    values, notes = dict(given), []
    for name in sorted(wanted & found.keys()):
        value, where, is_layout = found[name]
        if name not in given:
            if name in (DENSE_RANKS, EXPERT_RANKS) and value > 1 and COMMON_FILE in where:
                raise CheckpointError(
                    f"{where} have {value} as {name}, but without {FORMAT_FILE} they do not say how rows are stored. "
                    f"Give --value {name}=1 if they are [gate; up], as in torch_dist; {name}={value} if in turns"
                )
            values[name] = value
            notes.append(f"{name} = {value}, from {where}")
        elif given[name] != value and is_layout:
            raise CheckpointError(f"--value {name}={given[name]}, but it is {value} here ({where}); leave it out")
        elif given[name] != value:
            notes.append(f"{name} = {given[name]} as given; {where} has {value}")
    return values, notes


def is_torch_dist(checkpoint: Checkpoint) -> bool:
    """Tell whether ``metadata.json`` says that Megatron-Core wrote the checkpoint as ``torch_dist``."""
    return bool(_json(checkpoint, FORMAT_FILE).get("sharded_backend") == "torch_dist")


def _json(checkpoint: Checkpoint, file: str) -> dict[str, Any]:
    try:
        found = json.loads(read_file(checkpoint.folder, file, _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_args(checkpoint: Checkpoint) -> dict[str, _Known]:
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        common = _unpickled(checkpoint, COMMON_FILE, 0, checkpoint.folder.size_bytes(COMMON_FILE))
        found[COMMON_FILE] = common.get(_ARGS) if isinstance(common, dict) else None
    stored = checkpoint.objects.get(_ARGS)
    if stored is not None and stored.content is None:
        found[f"the object {_ARGS}"] = _unpickled(checkpoint, *stored.place)
    for where, args in found.items():
        if isinstance(args, PickledObject) and isinstance(args.state, dict):
            state = args.state
            if state.get("group_query_attention") is False:  # Megatron ignores num_query_groups=1 in args then
                state = {**state, "num_query_groups": state.get("num_attention_heads")}
            counts: dict[str, list[Any]] = {name: [state.get(each) for each in of] for name, of in _MEGATRON.items()}
            # No other source says how many ranks share an expert, so users cannot override this value.
            return {
                name: _Known(math.prod(factors), f"args in {where}", is_layout=name == EXPERT_RANKS)
                for name, factors in counts.items()
                if all(is_count(each) and each for each in factors) and is_count(math.prod(factors))
            }
    return {}


def _of_config(checkpoint: Checkpoint) -> dict[str, _Known]:
    config = _json(checkpoint, _CONFIG_FILE)
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    found = {name: value for name, value in config.items() if is_count(value) and value}
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    if heads:
        found.setdefault("num_key_value_heads", heads)
        if hidden and hidden % heads == 0:
            found.setdefault("head_dim", hidden // heads)
    for other in ("num_local_experts", "n_routed_experts"):
        if other in found:
            found.setdefault("num_experts", found[other])
    return {name: _Known(value, _CONFIG_FILE) for name, value in found.items()}


def _unpickled(checkpoint: Checkpoint, file: str, offset_bytes: int, length_bytes: int) -> Any:
    try:
        content = Archive(checkpoint.folder.view(file, offset_bytes, length_bytes)).pickled()
        return plain_pickle(content) if len(content) <= _MAX_CONFIG_BYTES else None
    except (OSError, ValueError, DamagedError):
        return None
