"""Families of models: how each framework names and fuses their weights, read from the files in ``frameworks/``.

Hugging Face's names are the middle: each file says what the others call the same weights, and which of theirs are fused
of several::

    torchtitan ──split──▶ names ──merge──▶ hf ──split──▶ names ──merge──▶ megatron

A step is one run over a checkpoint.
"""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import CheckpointError
from ..exchange.request import Way
from ..fused.rules import Rule, rules_of, template_filled, template_pattern

HUB = "hf"

_LEAD = r"{lead:(?:.*\.)?}"  # what keys may have in front, such as model.


class Rename(NamedTuple):
    """A step that gives other names.

    Attributes:
        pairs: templates, old and new.
        ignored: patterns of keys that the other framework has not, and that are left out.
    """

    pairs: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    def renamed(self, key: str) -> str | None:
        """Return the new name of a key, or None if the step has none."""
        for old, new in self.pairs:
            found = template_pattern(old).fullmatch(key)
            if found is not None:
                return template_filled(new, found.groupdict())
        return None


class Fuse(NamedTuple):
    """A step that splits by rules, or merges by them."""

    way: Way
    rules: tuple[Rule, ...]


Step = Rename | Fuse


@functools.cache
def family_names() -> tuple[str, ...]:
    """Names of the families."""
    files = (resources.files(__package__) / "frameworks").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@functools.cache
def _family(name: str) -> Mapping[str, Any]:
    """Read the data file of a family: one that comes with the tools, or a TOML file of the user's."""
    if not name.endswith(".toml"):
        if name not in family_names():
            raise CheckpointError(
                f"no family {name!r}; there are {', '.join(family_names())}, or a TOML file of your own"
            )
        return tomllib.loads((resources.files(__package__) / "frameworks" / f"{name}.toml").read_text())
    try:
        found = tomllib.loads(Path(name).read_text())
    except ValueError as error:
        raise CheckpointError(f"{name} is no TOML: {error}") from error
    tables = [found.get("name"), found.get("rule", [])]
    if not isinstance(found.get("source"), dict) or not all(
        isinstance(table, list) and all(isinstance(each, dict) for each in table) for table in tables
    ):
        raise CheckpointError(
            f"{name} has to have [source] with a line for each framework, and [[name]]; see docs/checkpoints.md"
        )
    return {"rule": [], **found}


def value_names(family: str) -> frozenset[str]:
    """Name the config values that any of the family's steps needs."""
    tables = _family(family)["rule"]
    counted = {table["each"] for table in tables if "each" in table}
    rules = (rule for table in tables for rule in _rules([table], dict.fromkeys(counted, 2)))
    return frozenset(counted).union(*(rule.value_names for rule in rules))


def steps(family: str, source: str, target: str, values: Mapping[str, float]) -> list[Step]:
    """List the steps from one framework's names to the other's.

    Raises:
        CheckpointError: there is no such family or framework, or a value is missing.
    """
    known = _family(family)["source"]
    for name in (source, target):
        if name not in known:
            raise CheckpointError(f"no framework {name!r} in the family {family}; there are {', '.join(known)}")
    if source == target:
        raise CheckpointError(f"--from and --to are both {source}")
    if HUB not in (source, target):
        return [*steps(family, source, HUB, values), *steps(family, HUB, target, values)]
    other = target if source == HUB else source
    pairs = [(name[HUB], name[other]) for name in _family(family)["name"] if other in name]
    own = _fusions(family, other, None, values)  # of the other framework's tensors, the first to be merged first
    hubs = _fusions(family, HUB, other, values)
    ignored = tuple(_family(family).get("ignore", {}).get(source, ()))
    if source == HUB:
        middle = Rename(tuple(pairs), ignored)
        return [*(Fuse("split", rules) for rules in hubs[::-1]), middle, *(Fuse("merge", rules) for rules in own)]
    middle = Rename(tuple((theirs, ours) for ours, theirs in pairs), ignored)
    return [*(Fuse("split", rules) for rules in own[::-1]), middle, *(Fuse("merge", rules) for rules in hubs)]


def _fusions(family: str, of: str, toward: str | None, values: Mapping[str, float]) -> list[tuple[Rule, ...]]:
    tables = [table for table in _family(family)["rule"] if table["of"] == of and table.get("toward") == toward]
    stages = sorted({table.get("stage", 1) for table in tables})
    return [_rules([table for table in tables if table.get("stage", 1) == stage], values) for stage in stages]


def _rules(tables: Sequence[Mapping[str, Any]], values: Mapping[str, float]) -> tuple[Rule, ...]:
    made = []
    for table in tables:
        fields = {name: value for name, value in table.items() if name not in ("of", "toward", "stage", "each")}
        if "each" in table:
            if table["each"] not in values:
                raise CheckpointError(f"how many parts there are is not known; give --value {table['each']}=NUMBER")
            count = int(values[table["each"]])
            fields["parts"] = [part.replace("{each}", str(at)) for part in fields["parts"] for at in range(count)]
        fields["fused"] = _LEAD + fields["fused"]
        fields["parts"] = [_LEAD + part for part in fields["parts"]]
        made.append(fields)
    return rules_of({"rule": made}, "frameworks")
