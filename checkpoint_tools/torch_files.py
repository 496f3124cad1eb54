"""Between one file of ``torch.save`` and a checkpoint of DCP, whole in memory one way, mapped the other way.

::

    model.pt ──torch.load(weights_only, mmap)──▶ state dict ──dcp.save──▶ DST/
    SRC/     ──Reader──▶ tensors and objects, by path ──torch.save──▶ model.pt

Nothing that either contains is run: what consists of more than tensors and plain values is refused.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from .diff import Block, read_block
from .errors import CheckpointError
from .items import Reader
from .partial import sync_folder
from .patterns import check_excluded, is_excluded
from .reading import Checkpoint
from .sizes import human_bytes

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def is_torch_file(path: str) -> bool:
    """Whether that is the name of one file of ``torch.save``."""
    return path.endswith(SUFFIXES) and not Path(path).is_dir()


def to_dcp(source: str, destination: str) -> int:
    """Write a checkpoint with everything in a file; returns how many values there are at its top.

    Raises:
        CheckpointError: the file is no state dict of tensors and plain values, or the checkpoint cannot be written.
    """
    state = _loaded(source)
    with _partial(destination) as made:
        try:
            with warnings.catch_warnings(action="ignore"):  # that there is no process group
                save(state, storage_writer=FileSystemWriter(made, sync_files=True), no_dist=True)
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{destination} cannot be written: {reason}") from error
        sync_folder(made)
    return len(state)


@contextlib.contextmanager
def _partial(destination: str) -> Iterator[Path]:
    """Where the destination is made; it appears when it is complete, and nothing stays if it does not come to that."""
    made = Path(f"{destination}.partial")
    if os.path.lexists(made):
        raise CheckpointError(f"{made} is there; another process writes it, or has left it: remove it then")
    try:
        yield made
        made.rename(destination)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        made.unlink(missing_ok=True)
        raise


def _loaded(source: str) -> dict[str, Any]:
    try:
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} is not there") from error
    except Exception as error:  # a damaged file can raise anything
        text = str(error)
        if "weights_only" in text or "Weights only" in text:
            raise CheckpointError(
                f"{source} has more than tensors and plain values, and is not loaded: unpickling it could run anything"
            ) from error
        raise CheckpointError(f"{source} is not what torch.save writes: {text.partition(chr(10))[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{source} has a {type(state).__name__}, and no state dict with names")
    return state


def to_torch(checkpoint: Checkpoint, destination: str, excluded: tuple[str, ...], max_memory_bytes: int) -> int:
    """Write one file with everything in a checkpoint, nested as it was; returns how many keys that were.

    Raises:
        CheckpointError: it does not fit into the memory, has more than plain values, or the file cannot be written.
    """
    check_excluded(excluded, [*checkpoint.tensors, *checkpoint.objects])
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not is_excluded(key, excluded)}
    objects = {key: item for key, item in checkpoint.objects.items() if not is_excluded(key, excluded)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if nbytes > max_memory_bytes:
        raise CheckpointError(
            f"one file of torch.save is made in memory, and {human_bytes(nbytes)} do not fit into --max-memory; allow "
            "that much, or convert to safetensors"
        )
    values: dict[str, Any] = {}
    with Reader(checkpoint, max_memory_bytes) as reader:
        for key, tensor in tensors.items():
            whole = Block((0,) * len(tensor.shape), tensor.shape)
            is_empty = whole.numel == 0
            values[key] = torch.empty(tensor.shape, dtype=tensor.dtype) if is_empty else _own(reader, tensor, whole)
        values.update((key, reader.read_object(item)) for key, item in objects.items())
    with _partial(destination) as made, made.open("xb") as stream:
        torch.save(_nested(values, checkpoint.paths), stream)
        stream.flush()
        os.fsync(stream.fileno())
    return len(values)


def _own(reader: Reader, tensor: Any, whole: Block) -> Tensor:
    return read_block(reader, tensor, whole).clone()


def _nested(values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for key, value in values.items():
        at = root
        *parents, last = paths.get(key) or (key,)
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Dicts whose keys are the numbers of a list are that list: paths have numbers where lists were."""
    if type(value) is not dict:
        return value
    inside = {key: _with_lists(each) for key, each in value.items()}
    if "param_groups" in inside and type(inside.get("state")) is dict and all(map(_is_number, inside["state"])):
        # An optimizer's own state dict: its parameters are numbers, and DCP makes texts of them.
        inside["state"] = {int(key): each for key, each in inside["state"].items()}
    is_list = bool(inside) and set(inside) == set(range(len(inside))) and all(type(key) is int for key in inside)
    return [inside[number] for number in range(len(inside))] if is_list else inside


def _is_number(key: Any) -> bool:
    return str(key).isdecimal()
