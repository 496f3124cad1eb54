"""Translate one framework's names and fused weights to another's, in the steps that a family's data file defines.

Each step but the last writes a checkpoint into a temporary folder, which the next step reads and then removes.
"""

import contextlib
import io
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import rewrite
from ..core.text import CheckpointError, is_excluded, some_of
from ..fuse.files import COMMON_FILE, FORMAT_FILE, RECORD_FILE, Request, read_groups, with_told
from ..fuse.names import sorted_out
from ..fuse.plan import Exchange, listed
from ..fuse.rules import MAX_KEY, Rule, Way, rules_of, tables_in, template_filled, template_pattern
from ..look.verify import Progress
from ..stored.checkpoint import Checkpoint

HUB = "hf"
_FRAMEWORKS = resources.files(__package__) / "frameworks"
_TORCH_DIST = resources.files(__package__) / "torch_dist.json"

_LEAD = r"{lead:(?:.*\.)?}"  # placeholder for prefixes of keys, such as ``model.``


class Rename(NamedTuple):
    """A step that renames keys by pairs of templates, and drops ``ignored`` keys, which the target lacks."""

    pairs: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    def renamed(self, key: str) -> str | None:
        """Return the new name of a key; None if no template matches."""
        for old, new in self.pairs:
            found = template_pattern(old).fullmatch(key) if len(key) <= MAX_KEY else None
            if found is not None:
                return template_filled(new, found.groupdict())
        return None


class Fuse(NamedTuple):
    """A step that splits by rules, or merges by them."""

    way: Way
    rules: tuple[Rule, ...]


def _family(name: str) -> Mapping[str, Any]:
    """Read the data file of a family: one of this package, or the user's own TOML file."""
    if not name.endswith(".toml"):
        files = {file.name.removesuffix(".toml"): file for file in _FRAMEWORKS.iterdir()}
        if name not in files:
            raise CheckpointError(
                f"no family {name!r}; there are {', '.join(sorted(files))}, or a TOML file of your own"
            )
        return tomllib.loads(files[name].read_text())
    return {"rule": [], **tables_in(name)}


def steps(family: str, source: str, target: str) -> list[Rename | Fuse]:
    """List the steps from one framework's names to the other's."""
    found = _family(family)
    for name in (source, target):
        if name not in found["source"]:
            known = ", ".join(found["source"])
            raise CheckpointError(f"no framework {name!r} in the family {family}; there are {known}")
    if source == target:
        raise CheckpointError(f"--from and --to are both {source}")
    if HUB not in (source, target):
        return [*steps(family, source, HUB), *steps(family, HUB, target)]
    other = target if source == HUB else source

    def fusions(of: str, toward: str | None) -> list[tuple[Rule, ...]]:
        tables = [table for table in found["rule"] if table["of"] == of and table.get("toward") == toward]
        stages = sorted({table.get("stage", 1) for table in tables})
        return [_rules([table for table in tables if table.get("stage", 1) == stage]) for stage in stages]

    # Rules by stage, in the order of merging; splits run the stages backwards.
    split, merged = fusions(other, None), fusions(HUB, other)
    if source == HUB:
        split, merged = merged, split
    pairs = tuple((name[source], name[target]) for name in found["name"] if other in name)
    for old, new in pairs:
        template_filled(new, dict.fromkeys(template_pattern(old).groupindex, ""))
    middle = Rename(pairs, tuple(map(str, found.get("ignore", {}).get(source, ()))))
    return [*(Fuse("split", rules) for rules in split[::-1]), middle, *(Fuse("merge", rules) for rules in merged)]


def _rules(tables: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    made = []
    for table in tables:
        fields = {name: value for name, value in table.items() if name not in ("of", "toward", "stage")}
        fields["fused"] = _LEAD + fields["fused"]
        fields["parts"] = [_LEAD + part for part in fields["parts"]]
        made.append(fields)
    return rules_of({"rule": made}, "frameworks") if made else ()


def rename_exchange(checkpoint: Checkpoint, rename: Rename, excluded: Sequence[str]) -> Exchange:
    """Plan the renaming of all keys; templates match keys without the model's prefix (such as ``model.``)."""
    names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
    # The model's prefix is the shortest prefix of the first key without which some key has a known name.
    keys = [key for key in names.others if key in checkpoint.tensors]
    starts = [0, *(found.end() for found in re.finditer(r"\.", keys[0]))] if keys else []
    prefixes = (keys[0][:start] for start in starts)
    prefix = next((each for each in prefixes if any(rename.renamed(key[len(each) :]) is not None for key in keys)), "")
    found = Exchange()
    unknown: list[str] = []

    def new_names(name: str) -> list[str]:
        own = name.removeprefix(prefix)
        new = rename.renamed(own) or rename.renamed(name)
        if new is None and not is_excluded(own, rename.ignored):
            unknown.append(name)
        return [new] if new else []

    for key in names.others:
        is_left_out = is_excluded(key, excluded) or is_excluded(key.removeprefix(prefix), rename.ignored)
        if key in checkpoint.tensors or is_left_out:
            found.copies[key] = () if is_left_out else tuple(new_names(key))
            found.paths.update((new, (new,)) for new in found.copies[key] if new != key)
    for state in names.states:
        found.copy(state, [] if is_excluded(state.key, excluded) else new_names(state.fqn))
    for name, content in read_groups(checkpoint, names.groups).items():
        found.relist(name, content, {fqn: new_names(fqn) for fqn in listed(content, name)})
    if unknown:
        raise CheckpointError(
            f"no name is known for {some_of(unknown, 3)}. Is it this family, and this "
            "framework? What is to be left out can be named with --exclude"
        )
    found.check_new_keys({*checkpoint.tensors, *checkpoint.objects})
    return found


def translate(
    source: str,
    destination: str,
    family: str,
    frameworks: tuple[str, str],
    given: Mapping[str, float],
    excluded: Sequence[str],
    threads: int,
    max_memory_bytes: int,
    progress: Progress,
) -> tuple[int, list[str]]:
    """Write a checkpoint with another framework's names; return the number of keys, and notes."""
    old = rewrite.open_whole(source, threads)
    try:
        tables = _family(family)["rule"]
        names = {name for rule in _rules(tables) for name in rule.value_names}
        values, notes = with_told(old, names, given)
        work = steps(family, *frameworks)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{family} is not as docs/checkpoints.md describes it ({type(error).__name__}: {error})"
        ) from error
    notes += old.notes
    # Check now, not in a later step. Optional rules are left out: if they match nothing, they need no values.
    rules = [rule for step in work if isinstance(step, Fuse) for rule in step.rules if not rule.optional]
    missing = sorted({name for rule in rules for name in rule.value_names} - values.keys())
    if missing:
        options = " ".join(f"--value {name}=NUMBER" for name in missing)
        raise CheckpointError(f"the config of the model is needed for weights that are fused; give {options}")
    for rule in rules:
        rule.expanded(values)
    first_rename = next(number for number, step in enumerate(work) if isinstance(step, Rename))
    keys = 0
    with _room_for(destination) as room:
        for number, step in enumerate(work):
            if number:
                old = rewrite.open_whole(f"{room}/{number - 1}", threads)
            left_out = excluded if number <= first_rename else ()
            if isinstance(step, Rename):
                new = rewrite.plan_rewrite(old, rename_exchange(old, step, left_out))
            else:
                known = {name: v for name, v in values.items() if any(name in rule.value_names for rule in step.rules)}
                request = Request(step.rules, known, left_out, is_sure=True)
                new = rewrite.plan(old, step.way, request)
            is_last = number + 1 == len(work)
            kept = [file for file in old.sidecars if file != RECORD_FILE]  # no record of splits: its names are gone
            sidecars: dict[str, bytes | None] = dict.fromkeys(kept)
            if is_last and frameworks[1] == "megatron":  # files that Megatron-Core expects with torch_dist
                torch.save({}, buffer := io.BytesIO())
                sidecars = {COMMON_FILE: buffer.getvalue(), FORMAT_FILE: _TORCH_DIST.read_bytes(), **sidecars}
            new = new._replace(sidecars=sidecars)
            with progress(f"rename, {number + 1} of {len(work)}", new.nbytes) as advance:
                rewrite.write(new, destination if is_last else f"{room}/{number}", threads, max_memory_bytes, advance)
            shutil.rmtree(room / f"{number - 1}", ignore_errors=True)
            keys = new.keys
    return keys, notes


@contextlib.contextmanager
def _room_for(destination: str) -> Iterator[Path]:
    """Yield a folder for the results of steps: ``DST.steps``, or a temporary one if the destination is a URL."""
    if "://" in destination:
        with tempfile.TemporaryDirectory(prefix="checkpoint-tools-") as folder:
            yield Path(folder)
        return
    with rewrite.held(Path(f"{destination}.steps")) as mark:
        try:
            yield mark.parent
        finally:
            shutil.rmtree(mark.parent)
