"""Folders without metadata of DCP, by the names in them: whose they are, and which subfolder or command works."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..core.text import natural_order, some_of
from .storage import TORCH_SUFFIXES, Folder, open_folder

_MOST_FOLDERS = 200  # that are looked into: behind a URL, each takes a request


class _Kind(NamedTuple):
    names: str  # a regular expression that finds them, in lines
    what: str
    works: str  # in which {} is the folder


_KINDS = (
    _Kind(
        r"^(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt$",
        "has a file for each rank, as verl writes them",
        "python -m verl.model_merger merge --backend fsdp --local_dir {} --target_dir DST writes the weights as "
        "safetensors, and not the optimizer's state, which verl alone loads",
    ),
    _Kind(
        r"^mp_rank_\d+_model_states\.pt$[\s\S]*^zero/$",
        "is DeepSpeed's universal checkpoint",
        "DeepSpeed alone loads it (load_universal in its config); zero_to_fp32.py, where it was made from, writes the "
        "weights as safetensors",
    ),
    _Kind(
        r"^zero_to_fp32\.py$",
        "is DeepSpeed's",
        "python {}/zero_to_fp32.py {} DST --safe_serialization writes the weights as safetensors, and not the "
        "optimizer's state, which DeepSpeed alone loads",
    ),
    _Kind(
        r"(^|_)(optim|model)_states\.pt$",
        "is DeepSpeed's",
        "zero_to_fp32.py, in the folder above it, writes the weights as safetensors, and not the optimizer's state, "
        "which DeepSpeed alone loads",
    ),
    _Kind(
        r"^recipe_state\.pt$",
        "has the optimizer's state as torchtune writes it",
        "checkpoint-tools convert {}/recipe_state.pt DST makes a checkpoint of it",
    ),
    _Kind(
        r"^(model|optim|optimizer)_\d+\.pt$",
        "has a file for each item and rank, as torch_checkpointing writes them",
        "its CheckpointManager alone loads it; torch.distributed.checkpoint.save then writes what this command reads",
    ),
    _Kind(r"\.safetensors$", "has safetensors", "checkpoint-tools convert {} DST makes a checkpoint of DCP of it"),
)

_STATE = re.compile(r"optimizer\.(pt|bin)|optimizer(_\d+)?/|recipe_state/|global_step\d+/")
"""Names, beside weights, of the optimizer's state that Trainer, accelerate, torchtune and DeepSpeed write."""


def state_beside(names: Iterable[str]) -> list[str]:
    """List what has an optimizer's state in a folder of weights."""
    return list(filter(_STATE.fullmatch, names))


def works_for_state(folder: Folder, name: str) -> str:
    """Say what works for a file or a subfolder that has an optimizer's state."""
    path = f"{folder.path.rstrip('/')}/{name.rstrip('/')}"
    if name.endswith("/"):
        return described(open_folder(path)) or f"{path} is a checkpoint of its own"
    return f"checkpoint-tools convert {path} DST makes a checkpoint of it"


def described(folder: Folder) -> str | None:
    """Say what a path is that is no checkpoint of DCP or safetensors, and what works; None if that is not known."""
    path = folder.path.rstrip("/")
    try:
        names = folder.files()
    except OSError:
        parent, name = os.path.split(path)
        if not name.endswith(TORCH_SUFFIXES) or not os.path.isfile(path):
            return None
        if re.search(_KINDS[0].names, name):
            return _told(parent or ".", _KINDS[0])
        return f"{path} is one file of torch.save: checkpoint-tools convert {path} DST makes a checkpoint of it"
    if own := _kind_of(names):
        return _told(path, own)
    found = sorted(_inside(folder), key=lambda each: natural_order(each[0]))
    told = [_told(f"{path}/{name}", kind) for name, kind in found if kind is not None][:1]
    if inside := [name for name, kind in found if kind is None]:
        told = [f"{path} is no checkpoint itself; give one of its subfolders: {some_of(inside, 8)}", *told]
    files = [name for name in names if name.endswith(TORCH_SUFFIXES)]
    if files and not told:
        command = f"checkpoint-tools convert {path}/{files[0]} DST"
        told = [f"{path} has files of torch.save ({some_of(files, 4)}): {command} makes a checkpoint of one"]
    return ". ".join(told) or None


def _kind_of(names: Sequence[str]) -> _Kind | None:
    return next((kind for kind in _KINDS if re.search(kind.names, "\n".join(names), re.MULTILINE)), None)


def _told(path: str, kind: _Kind) -> str:
    return f"{path} {kind.what}: {kind.works.replace('{}', path)}"


def _inside(folder: Folder) -> Iterator[tuple[str, _Kind | None]]:
    """Find subfolders, up to two levels below, that are checkpoints, and those of others."""
    level, room = [("", folder.files())], _MOST_FOLDERS
    for _ in range(2):
        below = [f"{lead}{name}" for lead, names in level for name in names if name.endswith("/")][:room]
        level, room = [], room - len(below)
        for name in below:
            try:
                names = open_folder(f"{folder.path.rstrip('/')}/{name.rstrip('/')}").files()
            except OSError:
                continue
            if ".metadata" in names or any(each.endswith(".safetensors") for each in names):
                yield name.rstrip("/"), None
            elif kind := _kind_of(names):
                yield name.rstrip("/"), kind
            else:
                level.append((name, names))
