"""The file ``.metadata``: read without running what it names, and what to say where it cannot be read."""

from ..core.errors import CheckpointError
from ..core.sizes import human_bytes, shortened
from .manifest import MANIFEST_FILE, DamagedManifestError, Manifest, parse_manifest
from .storage import Folder
from .unpickle import METADATA_NAMES, ForbiddenNameError, PickledObject, unpickle

METADATA_FILE = ".metadata"
_CLASSES = ("Metadata", "MCoreMetadata")  # torch's, and that of Megatron-Core up to 0.15
_HINTS = 3
_MAX_BYTES = 4 << 30


def read_content(folder: Folder) -> bytes:
    """Read the metadata file's bytes.

    Raises:
        CheckpointError: there is none, it cannot be read, or it is larger than any that somebody has written.
    """
    try:
        if folder.size_bytes(METADATA_FILE) > _MAX_BYTES:
            raise damage(folder, f"it has more than {human_bytes(_MAX_BYTES)}")
        with folder.open(METADATA_FILE) as stream:
            content = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(_why_none(folder)) from error
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise CheckpointError(f"{folder.path}/{METADATA_FILE} cannot be read: {error}") from error
    return content


def read_manifest(folder: Folder) -> tuple[Manifest | None, str | None]:
    """Read the manifest of checksums beside the metadata, if any, and what is wrong with either."""
    try:
        with folder.open(MANIFEST_FILE) as stream:
            content = stream.read()
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read: {error}"
    try:
        manifest = parse_manifest(content)
    except DamagedManifestError as error:
        return None, str(error)
    return manifest, manifest.why_not(read_content(folder))


def read_metadata(folder: Folder) -> PickledObject:
    """Read a folder's ``torch.distributed.checkpoint.metadata.Metadata`` as a record.

    Raises:
        CheckpointError: there is none, it cannot be read, or it asks for what no metadata need.
    """
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
    if not isinstance(metadata, PickledObject) or metadata.name not in _CLASSES:
        found = metadata.name if isinstance(metadata, PickledObject) else type(metadata).__name__
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
    inside = [name for name in names if name.endswith("/") and _has_metadata(folder, name)]
    if inside:
        return f"{folder.path} is not a checkpoint itself; it contains {', '.join(inside[:_HINTS])}: give one of these"
    return (
        f"{folder.path} has no {METADATA_FILE}. DCP writes it last: either this is no checkpoint, or its save did not "
        "end"
    )


def _has_metadata(folder: Folder, name: str) -> bool:
    try:
        return folder.size_bytes(name + METADATA_FILE) > 0
    except OSError:
        return False


def damage(folder: Folder, what: str) -> CheckpointError:
    """Make the error for a metadata file that holds no valid metadata."""
    return CheckpointError(
        f"{folder.path}/{METADATA_FILE} cannot be read as the metadata of a checkpoint ({what}). It is damaged, cut "
        "short, or not from torch.distributed.checkpoint; use another checkpoint, or fetch this file again"
    )
