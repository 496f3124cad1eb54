"""Plan the exchange of fused tensors and parts in a checkpoint in files."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.regions import Shape, whole_of
from ..core.text import CheckpointError, is_excluded
from ..stored.checkpoint import Checkpoint
from ..stored.items import ItemReader
from .names import GroupName, sorted_out
from .plan import Exchange, Source, listed, plan_exchange
from .request import Request
from .rules import MissingValueError, Way


def find_exchange(way: Way, checkpoint: Checkpoint, asked: Request) -> Exchange:
    """Plan a split or merge of a checkpoint; see :func:`checkpoint_tools.fuse.plan.plan_exchange`."""
    known = {name for rule in asked.rules for name in rule.value_names}
    idle = [name for name in asked.values if name not in known]
    if idle:  # typing errors
        raise CheckpointError(
            f"--value that no rule uses: {', '.join(idle)}. The rules name {', '.join(sorted(known)) or 'none'}"
        )
    source = _Files(checkpoint, asked.values)
    try:
        found = plan_exchange(way, source, asked.rules, asked.excluded, asked.wanted)
    except MissingValueError as error:
        raise CheckpointError(error.told(f"--value {error.name}=NUMBER", asked.values)) from error
    except (ValueError, KeyError) as error:  # the rules' own errors
        raise CheckpointError(str(error)) from error
    _check_left(source, found, asked.excluded)
    for name, content in source.groups.items():
        if any((name.optimizer, str(fqn)) in found.listed for fqn in listed(content, name)):
            new = {fqn: new for (optimizer, fqn), new in found.listed.items() if optimizer == name.optimizer}
            found.objects[name.key] = relisted(content, name, new)
    return found


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
    """Read the contents of the param groups that are stored as objects."""
    reader = ItemReader(checkpoint)
    return {name: reader.read_object(checkpoint.objects[name.key]) for name in names if name.key in checkpoint.objects}


def relisted(content: Any, name: GroupName, new: Mapping[str, Sequence[str]]) -> bytes:
    """Pickle the content with other FQNs, as ``torch.save`` does; ``new`` has those in the place of each."""

    def in_place_of(found: Iterable[Any]) -> list[Any]:
        return [fqn for old in found for fqn in new.get(str(old), (old,))]

    if name.is_list:
        content = in_place_of(content)
    else:
        groups = [content] if isinstance(content, dict) else content
        groups = [
            {**group, "params": in_place_of(group.get("params", ()))} if isinstance(group, dict) else group
            for group in groups
        ]
        content = groups[0] if isinstance(content, dict) else groups
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _check_left(source: Source, found: Exchange, excluded: Sequence[str]) -> None:
    """Refuse a key that seems to belong to an exchanged tensor, and would silently stay as it was."""
    old = {key for fusion in found.fusions for key in (fusion.fused, *fusion.parts) if key in source.tensors}
    others = source.names.others
    known = old.intersection(others)
    known |= {key.partition(".")[2] for key in known if "." in key}
    for key in others:
        if key in old or key not in source.tensors or is_excluded(key, excluded):
            continue
        words = key.split(".")
        ends = ((start, stop) for start in range(len(words)) for stop in range(start + 1, len(words)))
        inside = next((name for start, stop in ends if (name := ".".join(words[start:stop])) in known), None)
        if inside is not None:
            raise CheckpointError(
                f"{key} looks as if it belongs to {inside}, and it is not known how; --exclude the one to leave it as "
                "it is, or the other"
            )
