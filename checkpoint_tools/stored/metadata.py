"""The file ``.metadata``, read without running what it names, and the manifest beside it.

::

    .checksums    {"format": ..., "sha256": of the next line}
                  {"metadata": {"nbytes": ..., "sha256": ...},
                   "files": {"__0_0.distcp": [[offset, length, CRC-32 of all but large contents], ...]}}

The directory of an item has the CRC-32 of all its contents, which ``torch.save`` has taken from memory. So the manifest
tells every byte of the checkpoint, and large contents need not be read once more to write it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from ..core.errors import CheckpointError
from ..core.text import human_bytes, shortened
from .storage import Folder
from .unpickle import ForbiddenNameError, PickledObject, unpickle

MANIFEST_FILE = ".checksums"
FORMAT = "fsdp_offload checksums 2"


class Item(NamedTuple):
    """An item of a file, and the CRC-32 of all of it but large contents."""

    offset_bytes: int
    length_bytes: int
    around_crc: int


class Manifest(NamedTuple):
    """A manifest's content: the length and the SHA-256 of ``.metadata``, and the items of each file by its name."""

    metadata_bytes: int
    metadata_sha256: str
    files: Mapping[str, tuple[Item, ...]]

    def why_not(self, metadata: bytes) -> str | None:
        """Why this is not the content of ``.metadata`` that the manifest was written for; ``None`` if it is."""
        if (len(metadata), hashlib.sha256(metadata).hexdigest()) == (self.metadata_bytes, self.metadata_sha256):
            return None
        return (
            f"it is not the one that {MANIFEST_FILE} was written for: it is damaged, or the checkpoint was saved "
            f"again since it was sealed (then remove {MANIFEST_FILE}, and seal it again)"
        )


def manifest_bytes(metadata: bytes, files: Mapping[str, Sequence[Item]]) -> bytes:
    """The content of the file, for a ``.metadata`` of this content."""
    found = {"nbytes": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    body = json.dumps({"metadata": found, "files": {file: sorted(items) for file, items in sorted(files.items())}})
    head = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest()})
    return f"{head}\n{body}\n".encode()


def parse_manifest(content: bytes) -> Manifest:
    """Parse the content of a manifest file."""
    head, _, body = content.partition(b"\n")
    try:
        expected = {"format": FORMAT, "sha256": hashlib.sha256(body.removesuffix(b"\n")).hexdigest()}
        if json.loads(head) != expected or not body.endswith(b"\n"):
            raise CheckpointError(f"{MANIFEST_FILE} is damaged, or of a newer version; remove it to go without")
        found = json.loads(body)
        files = {str(file): tuple(Item(*map(int, item)) for item in items) for file, items in found["files"].items()}
        return Manifest(int(found["metadata"]["nbytes"]), str(found["metadata"]["sha256"]), files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged; remove it to go without") from error


_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}

# Names that DCP of torch 2.1 to 2.13, and torch_dist of Megatron-Core 0.13 to 0.16, write into .metadata.
METADATA_NAMES: Mapping[str, Set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron-Core keeps the plans of all ranks beside the metadata, and up to 0.15 its own classes of both.
    "torch.distributed.checkpoint.planner": {
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    # TensorProperties was here before torch 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    # Enums of Python up to 3.11.3 are pickled as getattr(class, name). Here it is a PickledObject, as all others.
    "builtins": {"getattr"},
    "__builtin__": {"getattr"},
}

METADATA_FILE = ".metadata"
_CLASSES = ("Metadata", "MCoreMetadata")  # torch's, and that of Megatron-Core up to 0.15
_HINTS = 3
_MAX_BYTES = 4 << 30


def read_content(folder: Folder) -> bytes:
    """Read the metadata file's bytes."""
    try:
        if folder.size_bytes(METADATA_FILE) > _MAX_BYTES:
            raise damage(folder, f"it has more than {human_bytes(_MAX_BYTES)}")
        with folder.open(METADATA_FILE) as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(_why_none(folder)) from error
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise CheckpointError(f"{folder.path}/{METADATA_FILE} cannot be read: {error}") from error


def read_manifest(folder: Folder) -> tuple[Manifest | None, str | None]:
    """Read the manifest of checksums beside the metadata, if any, and what is wrong with either."""
    try:
        with folder.open(MANIFEST_FILE) as stream:
            manifest = parse_manifest(stream.read())
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read: {error}"
    except CheckpointError as error:
        return None, str(error)
    return manifest, manifest.why_not(read_content(folder))


def read_metadata(folder: Folder) -> PickledObject:
    """Read a folder's ``torch.distributed.checkpoint.metadata.Metadata`` as a record."""
    content = read_content(folder)
    try:
        metadata = unpickle(content, METADATA_NAMES)
    except ForbiddenNameError as error:
        raise CheckpointError(
            f"{folder.path}/{METADATA_FILE} asks for {error}, which the metadata of a checkpoint do not need; it was "
            "not run. Do not load this checkpoint with torch unless you trust who wrote it"
        ) from error
    except Exception as error:  # bytes that are no pickle can raise anything
        raise damage(folder, f"{type(error).__name__}: {shortened(str(error))}") from error
    found = metadata.name if isinstance(metadata, PickledObject) else type(metadata).__name__
    if not isinstance(metadata, PickledObject) or found not in _CLASSES:
        raise damage(folder, f"it has a {found} where Metadata are expected")
    return metadata


def _why_none(folder: Folder) -> str:
    try:
        names = folder.files()
    except (FileNotFoundError, NotADirectoryError):
        return f"{folder.path} is not a folder; give the folder that contains {METADATA_FILE}"
    except OSError as error:
        return f"{folder.path} cannot be read: {error}"
    if any(name.startswith("__") and name.endswith(METADATA_FILE) for name in names):
        return (
            f"{folder.path} has metadata of each rank alone (dcp.save with use_collectives=False), which do not say "
            "how they fit together; load it with as many ranks as wrote it, and save it again with use_collectives=True"
        )
    inside = [name for name in names if name.endswith("/") and folder.has(name + METADATA_FILE)]
    if inside:
        return f"{folder.path} is not a checkpoint itself; it contains {', '.join(inside[:_HINTS])}: give one of these"
    return (
        f"{folder.path} has no {METADATA_FILE}. DCP writes it last: either this is no checkpoint, or its save did not "
        "end"
    )


def damage(folder: Folder, what: str) -> CheckpointError:
    """Make the error for a metadata file that holds no valid metadata."""
    return CheckpointError(
        f"{folder.path}/{METADATA_FILE} cannot be read as the metadata of a checkpoint ({what}). It is damaged, cut "
        "short, or not from torch.distributed.checkpoint; use another checkpoint, or fetch this file again"
    )
