"""Convert one file of ``torch.save`` to a checkpoint of DCP (the file is mapped), or back (all data are in memory).

::

    model.pt ──torch.load(weights_only, mmap)──▶ state dict ──dcp.save──▶ DST/
    SRC/     ──ItemReader──▶ tensors and objects, by path ──torch.save──▶ model.pt

No code in either format is run: files that hold anything but tensors and plain values are refused.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ..core.regions import whole_of
from ..core.text import CheckpointError, counted, human_bytes, shortened, some_of
from ..core.values import values_in
from ..look.verify import WITHOUT_CHECKSUMS, check_whole, notes_on_checksums, seal
from ..rewrite import appearing, written
from ..stored.checkpoint import Checkpoint
from ..stored.foreign import described
from ..stored.items import Archive, DamagedError, ItemReader, plain_load
from ..stored.safetensors_folder import open_checkpoint
from ..stored.storage import Folder
from .convert import wanted_keys

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # of a parameter


def to_dcp(source: str, destination: str, max_memory_bytes: int) -> tuple[str, list[str]]:
    """Write all values of a file to a checkpoint of DCP; return a line that counts its outermost keys, and notes."""
    folder, name = Folder(os.path.dirname(source) or "."), os.path.basename(source)
    try:
        archive = Archive(folder.view(name, 0, folder.size_bytes(name)))
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols unknown to torch: these fail later
            state = plain_load(archive, source, source, max_memory_bytes, mmap=True)
    except DamagedError as error:
        raise CheckpointError(f"{source} is not what torch.save writes: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{source} has a {type(state).__name__}, and no state dict with names")
    for key, value in state.items():
        if any(isinstance(each, DTensor) and each.to_local().numel() != each.numel() for each in values_in(value)):
            whose = described(folder) or "save it with DCP, which puts the parts of all ranks together"
            raise CheckpointError(f"{source} has a part of {key}, as one rank of several has it. {whose}")
    with appearing(destination) as made:
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that there is no process group
                save(state, storage_writer=FileSystemWriter(made, sync_files=True), no_dist=True)
        except CheckpointException as error:
            raise written(next(iter(error.failures.values()))[0]) from error
        seal(made)
    notes = [] if archive.has_crcs else [f"the data of {source} cannot be compared with checksums: {WITHOUT_CHECKSUMS}"]
    lost = list(_empty_dicts(state))
    notes += [f"left out, as DCP keeps no dict without values: {some_of(lost, 8)}"] * bool(lost)
    return f"{counted(len(state), 'value')} as a checkpoint of DCP", notes


def _empty_dicts(state: Mapping[Any, Any], lead: str = "") -> Iterator[str]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _empty_dicts(value, f"{lead}{key}.") if value else (f"{lead}{key}",)


def to_torch(source: str, destination: str, excluded: tuple[str, ...], max_memory_bytes: int) -> tuple[str, list[str]]:
    """Write all values of a checkpoint to one file, nested as they were; return a line that counts them, and notes."""
    checkpoint = open_checkpoint(source)
    check_whole(checkpoint, 1)
    keys = wanted_keys(checkpoint, excluded)
    tensors = {key: checkpoint.tensors[key] for key in keys if key in checkpoint.tensors}
    objects = {key: checkpoint.objects[key] for key in keys if key in checkpoint.objects}
    nbytes = sum(tensor.nbytes for tensor in tensors.values()) + sum(item.length_bytes for item in objects.values())
    if nbytes > max_memory_bytes:
        raise CheckpointError(
            f"one file of torch.save is made in memory, and {human_bytes(nbytes)} do not fit into --max-memory; allow "
            "that much, or convert to safetensors"
        )
    values: dict[str, Any] = {}
    reader = ItemReader(checkpoint, max_memory_bytes)
    for key, tensor in tensors.items():
        values[key] = reader.read_region(tensor, whole_of(tensor.shape))
    for key, item in objects.items():
        try:
            values[key] = reader.read_object(item)
        except CheckpointError as error:
            raise CheckpointError(f"{key}: {error}; leave it out with --exclude") from error
    nested = _nested(checkpoint, values)
    with appearing(destination, is_file=True) as made, made.open("wb") as stream:
        try:
            torch.save(nested, stream)
        except RecursionError as error:
            raise CheckpointError(f"{checkpoint.path} has an object that is nested too deeply to be saved") from error
        stream.flush()
        os.fsync(stream.fileno())
    notes = [*checkpoint.notes, *notes_on_checksums(checkpoint)]
    return f"{counted(len(values), 'key')} in one file of torch.save", notes


class _Nest(dict[Any, Any]):
    """A dict made by :func:`_nested`, in contrast to a dict that is a stored value."""


def _nested(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[Any, Any]:
    root = _Nest()
    for key, value in values.items():
        at: Any = root
        *parents, last = checkpoint.paths.get(key) or (key,)
        for part in parents:
            at = at.setdefault(part, _Nest())
            if not isinstance(at, _Nest):
                break
        if not isinstance(at, _Nest) or last in at:
            raise CheckpointError(
                f"{checkpoint.path} has two values in the place of {shortened(key)}, and a state dict can only have "
                "one; leave one out with --exclude"
            )
        at[last] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Turn each :class:`_Nest` with the int keys 0, 1, ... into a list: in paths, ints are indices of lists."""
    if not isinstance(value, _Nest):
        return value
    inside = {key: _with_lists(each) for key, each in value.items()}
    state = inside.get("state")
    if "param_groups" in inside and type(state) is dict and all(_NUMBER.fullmatch(str(key)) for key in state):
        # ``optimizer.state_dict()`` has int keys in ``state``, which DCP has turned into strings.
        inside["state"] = {int(key): each for key, each in state.items()}
    is_list = bool(inside) and set(inside) == set(range(len(inside))) and all(type(key) is int for key in inside)
    return [inside[number] for number in range(len(inside))] if is_list else inside
