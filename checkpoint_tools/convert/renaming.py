"""Other names for all of a checkpoint: the model's tensors, their optimizer state, and what param groups list."""

from collections.abc import Sequence
from typing import Any

from ..core.errors import CheckpointError
from ..core.patterns import is_excluded
from ..exchange.draft import Draft
from ..exchange.param_groups import listed, read_groups, relisted
from ..fused.fusions import Exchange
from ..fused.keys import sorted_out
from ..stored.reading import Checkpoint
from .families import Rename

_NAMES_IN_ERRORS = 3


def rename_exchange(checkpoint: Checkpoint, rename: Rename, excluded: Sequence[str]) -> Exchange:
    """Exchange every key for that with the new name. What keys have in front (``model.``) is left out.

    Raises:
        CheckpointError: a key has no new name, or two have the same.
    """
    names = sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths)
    prefix = _prefix_of([key for key in names.others if key in checkpoint.tensors], rename)
    draft = Draft(checkpoint)
    unknown: list[str] = []

    def new_name(name: str) -> str | None:
        own = name.removeprefix(prefix)
        found = rename.renamed(own) or rename.renamed(name)
        if found is None and not is_excluded(own, rename.ignored):
            unknown.append(name)
        return found

    for key in names.others:
        is_left_out = is_excluded(key, excluded) or is_excluded(key.removeprefix(prefix), rename.ignored)
        if key in checkpoint.tensors or is_left_out:
            new = None if is_left_out else new_name(key)
            draft.drop(key)
            if new is not None:
                draft.copies[key] = (new,)
                draft.paths[new] = (new,)
    for state in names.states:
        new = None if is_excluded(state.key, excluded) else new_name(state.fqn)
        if new is None:
            draft.drop(state.key)
        else:
            draft.copy(state, [new])
    groups = read_groups(checkpoint, names.groups)
    for name, content in groups.items():
        if listed(content, name):
            draft.objects[name.key] = relisted(content, name, lambda fqn: _as_list(fqn, new_name))
    if unknown:
        more = f" and {len(unknown) - _NAMES_IN_ERRORS:,} more" if len(unknown) > _NAMES_IN_ERRORS else ""
        raise CheckpointError(
            f"no name is known for {', '.join(unknown[:_NAMES_IN_ERRORS])}{more}. Is it this family, and this "
            "framework? What is to be left out can be named with --exclude"
        )
    draft.check_new_keys()
    return draft.exchange(len(draft.copies), ())


def _as_list(fqn: Any, new_name: Any) -> Sequence[Any]:
    found = new_name(str(fqn))
    return () if found is None else (found,)


def _prefix_of(keys: Sequence[str], rename: Rename) -> str:
    """Find the prefix that the model's keys have in front of the framework's names."""
    if any(rename.renamed(key) is not None for key in keys) or not keys:
        return ""
    sample = keys[0]
    for at, letter in enumerate(sample):
        if letter == "." and any(rename.renamed(key[at + 1 :]) is not None for key in keys):
            return sample[: at + 1]
    return ""
