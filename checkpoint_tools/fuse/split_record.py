"""Record what split took apart, beside the checkpoint that it writes, so that merge restores the original.

The names of parts do not tell whether they were ever fused: a model may have layers of both kinds. So split writes
which tensors it took apart, by which rules and values, into a file of its own, and merge exchanges these and no others.
The file is JSON, and goes wherever the checkpoint goes: files beside the data are copied.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.errors import CheckpointError
from ..core.sizes import shortened
from ..stored.reading import Checkpoint
from ..stored.storage import read_small
from .rules import Rule, rules_of

RECORD_FILE = "split_record.json"
_FORMAT = "checkpoint_tools split 1"
_MAX_BYTES = 256 << 20


class Split(NamedTuple):
    """One run of split.

    Attributes:
        rules: by which.
        values: of the model's config, that the rules name.
        fused: what was taken apart, by the names that the rules match.
    """

    rules: tuple[Rule, ...]
    values: Mapping[str, float]
    fused: frozenset[str]


def read_record(checkpoint: Checkpoint) -> list[Split]:
    """Read the splits that a checkpoint went through and that were not undone, the latest last.

    Raises:
        CheckpointError: the file is no such record.
    """
    try:
        content = read_small(checkpoint.folder, RECORD_FILE, _MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path}/{RECORD_FILE} cannot be read: {error.strerror or error}") from error
    try:
        found = json.loads(content)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {shortened(repr(found['format']))}")
        if found["crc32"] != _crc(found["splits"]):
            raise ValueError("its CRC-32 is not the one that was written with it")
        return [_split_of(each) for each in found["splits"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint.path}/{RECORD_FILE} is not what split leaves ({type(error).__name__}: "
            f"{shortened(str(error))}); remove it, and say with --preset or --rules what is to be merged"
        ) from error


def _split_of(found: Any) -> Split:
    rules = rules_of({"rule": [_without_none(table) for table in found["rules"]]}, RECORD_FILE)
    values = {str(name): value for name, value in found["values"].items() if isinstance(value, int | float)}
    if not all(isinstance(name, str) for name in found["fused"]):
        raise TypeError("a name is no text")
    return Split(rules, values, frozenset(found["fused"]))


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def record_bytes(splits: Sequence[Split]) -> bytes:
    """Serialize the record."""
    found = [_as_json(split) for split in splits]
    return json.dumps({"format": _FORMAT, "crc32": _crc(found), "splits": found}, indent=1).encode() + b"\n"


def _crc(splits: Any) -> int:
    """Compute the CRC-32 of the record's meaning, however it is formatted."""
    return zlib.crc32(json.dumps(splits).encode())


def _as_json(split: Split) -> dict[str, Any]:
    names = {name for rule in split.rules for name in rule.value_names}
    return {
        "rules": [dataclasses.asdict(rule) for rule in split.rules],
        "values": {name: value for name, value in split.values.items() if name in names},
        "fused": sorted(split.fused),
    }


def without(splits: Iterable[Split], merged: Iterable[str]) -> list[Split]:
    """Return what is left of a record after these were merged."""
    gone = frozenset(merged)
    left = (split._replace(fused=split.fused - gone) for split in splits)
    return [split for split in left if split.fused]
