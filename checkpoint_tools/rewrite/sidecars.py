"""Files beside the data of a checkpoint that belong to it all the same, and are copied with it.

Tokenizer, ``config.json``, Megatron's ``common.pt`` and ``metadata.json``, the state of schedulers, of random numbers
and of trainers: everything that is no tensor data. Data that are not the checkpoint's own (files of another one saved
here before, other formats of the same weights) stay behind, and are named.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..core.errors import CheckpointError
from ..stored.items import Archive, DamagedError
from ..stored.reading import Checkpoint
from ..stored.storage import TORCH_SUFFIXES, Folder, open_folder, read_small

MAX_BYTES = 256 << 20
"""Total size up to which files beside the data are copied."""

_END_BYTES = 22  # of a zip file's last record
_MAX_FILES = 1000
_MAX_DEPTH = 3

# Data, and what only fits them: of this checkpoint, or of another one.
_DATA = re.compile(
    r"""
    \..*                                                    # hidden, .metadata too
    | .*\.(distcp|safetensors|safetensors\.index\.json|bin\.index\.json|gguf|onnx|h5|msgpack|npz|partial|lock|tmp)
    | (pytorch_model|tf_model|flax_model|model|optimizer|consolidated)[^/]*\.(bin|pth?|ckpt)
    | (mp_rank|zero_pp_rank|bf16_zero)_.*
    | optimizer\.json                                       # what convert itself writes
    """,
    re.VERBOSE,
)


class Sidecars(NamedTuple):
    """Files beside the data, by their names in the folder: those that are copied, and those that are left."""

    files: tuple[str, ...]
    left: tuple[str, ...]


def sidecars_of(checkpoint: Checkpoint, own: Iterable[str]) -> Sidecars:
    """List the files beside the data; ``own`` are the checkpoint's other files."""
    folder, known = checkpoint.folder, {*own, *checkpoint.items_by_file()}
    files: list[str] = []
    left: list[str] = []
    room_bytes: float = MAX_BYTES
    for name in folder.files():
        if name in known or (name.endswith("/") and any(file.startswith(name) for file in known)):
            continue
        is_data = _DATA.fullmatch(name.removesuffix("/"))
        inside = [] if is_data else list(itertools.islice(_files_in(folder, name, _MAX_DEPTH), _MAX_FILES + 1))
        if any(_DATA.fullmatch(file.rpartition("/")[2]) for file in inside):
            inside = []  # a folder goes as a whole, or not at all
        try:
            nbytes: float = sum(map(folder.size_bytes, inside))
        except OSError:
            nbytes = math.inf
        if inside and nbytes <= room_bytes and len(files) + len(inside) <= _MAX_FILES:
            files += inside
            room_bytes -= nbytes
        else:
            left.append(name)
    return Sidecars(tuple(files), tuple(left))


def _files_in(folder: Folder, name: str, depth: int) -> Iterator[str]:
    """List the file itself, or all files in a folder that has no data files."""
    if not name.endswith("/"):
        yield name
    elif depth == 0:
        yield f"{name}.deep"  # no name of a sidecar: the folder is left
    else:
        inside = open_folder(f"{folder.path.rstrip('/')}/{name.rstrip('/')}")
        for each in inside.files():
            yield from _files_in(folder, f"{name}{each}", depth - 1)


def read_sidecar(folder: Folder, file: str) -> bytes:
    """Its content."""
    try:
        content = read_small(folder, file, MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{folder.path}/{file} cannot be read: {error.strerror or error}") from error
    # One damaged bit cannot hide both ends of a zip file. Files of torch.save before 1.6 are none.
    is_zip = content.startswith(b"PK\3\4") or content[-_END_BYTES:].startswith(b"PK\5\6")
    if not is_zip or not file.endswith(TORCH_SUFFIXES):
        return content
    try:
        archive = Archive(memoryview(content))
        for record in archive.records.values():
            archive.read(record)
    except DamagedError as error:
        raise CheckpointError(
            f"{folder.path}/{file} is not what torch.save writes ({error}), and would be copied as it is; fetch it "
            "again, or move it away"
        ) from error
    return content
