"""Read the FQNs that param groups list, and write the same groups with other FQNs.

Read from a checkpoint, the content of a :class:`~checkpoint_tools.fused.keys.GroupName` is one group, several, or,
where the entries of a group are under keys of their own, the list alone.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..fused.keys import GroupName
from ..stored.items import ItemReader
from ..stored.reading import Checkpoint

Groups = Mapping[GroupName, Any]
"""Name → content, as it was read."""


def read_groups(checkpoint: Checkpoint, names: Iterable[GroupName]) -> Groups:
    """Read the param groups that are stored as objects.

    Raises:
        CheckpointError: one cannot be read.
    """
    reader = ItemReader(checkpoint)
    return {name: reader.read_object(checkpoint.objects[name.key]) for name in names if name.key in checkpoint.objects}


def listed(content: Any, name: GroupName) -> list[Any]:
    """List the FQNs in a param group, in several, or in the list of one."""
    return [fqn for group in groups_in(content, name) for fqn in group.get("params", ())]


def groups_in(content: Any, name: GroupName) -> list[dict[str, Any]]:
    """Yield each param group; a bare list of names counts as a group without options."""
    if name.is_list:
        return [{"params": list(content)}] if isinstance(content, list | tuple) else []
    groups = content if isinstance(content, list | tuple) else [content]
    return [group for group in groups if isinstance(group, dict)]


def relisted(content: Any, name: GroupName, listed_as: Callable[[Any], Sequence[Any]]) -> bytes:
    """Pickle the content with other FQNs, as ``torch.save`` does; ``listed_as`` maps one to its new ones."""
    buffer = io.BytesIO()
    torch.save(_relisted(content, name, listed_as), buffer)
    return buffer.getvalue()


def _relisted(content: Any, name: GroupName, listed_as: Callable[[Any], Sequence[Any]]) -> Any:
    if name.is_list:
        return [new for fqn in content for new in listed_as(fqn)]
    if isinstance(content, dict):
        return {**content, "params": [new for fqn in content.get("params", ()) for new in listed_as(fqn)]}
    return [_relisted(group, name, listed_as) if isinstance(group, dict) else group for group in content]
