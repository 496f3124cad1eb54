"""Recognize folders without DCP metadata by their file names: say who wrote them, and which path or command to use."""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from ..core.text import natural_order, some_of
from .storage import TORCH_SUFFIXES, Folder, open_folder

_MOST_FOLDERS = 200  # limit of folders to list: behind a URL, each takes a request


_TABLES = tomllib.loads(resources.files(__package__).joinpath("kinds.toml").read_text())
_KINDS: list[dict[str, str]] = _TABLES["kind"]

DATA = re.compile(_TABLES["data"], re.VERBOSE)
"""Names of files with data, and of files that fit certain data only (indices, locks); they are never copied along."""

_STATE = re.compile(r"optimizer\.(pt|bin)|optimizer(_\d+)?/|recipe_state/|global_step\d+/")
"""Names of the optimizer's state that Trainer, accelerate, torchtune and DeepSpeed write next to weights."""


def state_files(names: Iterable[str]) -> list[str]:
    """List those names in a folder of weights that are files or subfolders with an optimizer's state."""
    return list(filter(_STATE.fullmatch, names))


def works_for_state(folder: Folder, name: str) -> str:
    """Return a sentence on how to convert the optimizer's state in the file or subfolder ``name``."""
    path = f"{folder.path.rstrip('/')}/{name.rstrip('/')}"
    if name.endswith("/"):
        return described(open_folder(path)) or f"{path} is a checkpoint of its own"
    works = f"checkpoint-tools convert {path} DST makes a checkpoint of it"
    return f"{works}, and --names FILE one of both, with the state by name"


def described(folder: Folder) -> str | None:
    """Say what a path without DCP or safetensors is, and which command works for it; None if the kind is unknown."""
    path = folder.path.rstrip("/")
    try:
        names = folder.files()
    except OSError:
        parent, name = os.path.split(path)
        if not name.endswith(TORCH_SUFFIXES) or not os.path.isfile(path):
            return None
        if re.search(_KINDS[0]["names"], name):
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


def _kind_of(names: Sequence[str]) -> dict[str, str] | None:
    return next((kind for kind in _KINDS if re.search(kind["names"], "\n".join(names), re.MULTILINE)), None)


def _told(path: str, kind: dict[str, str]) -> str:
    return f"{path} {kind['what']}: {kind['works'].replace('{}', path)}"


def _inside(folder: Folder) -> Iterator[tuple[str, dict[str, str] | None]]:
    """Yield subfolders, up to two levels deep: (name, None) of checkpoints, (name, kind) of known other formats."""
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
