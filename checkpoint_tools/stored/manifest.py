"""A manifest beside a checkpoint: which bytes belong to it.

::

    .checksums    {"format": ..., "sha256": of the next line}
                  {"metadata": {"nbytes": ..., "sha256": ...},
                   "files": {"__0_0.distcp": [[offset, length, CRC-32 of all but large contents], ...]}}

The directory of an item has the CRC-32 of all its contents, which ``torch.save`` has taken from memory. So the manifest
tells every byte of the checkpoint, and nobody has to read large contents once more to write it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MANIFEST_FILE = ".checksums"
FORMAT = "fsdp_offload checksums 2"


class Item(NamedTuple):
    """An item of a file, and the CRC-32 of all of it but large contents."""

    offset_bytes: int
    length_bytes: int
    around_crc: int


class Manifest(NamedTuple):
    """A manifest's content.

    Attributes:
        metadata_bytes: the length of the file ``.metadata``.
        metadata_sha256: of it, hexadecimal.
        files: name → items.
    """

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


class DamagedManifestError(Exception):
    """Not a whole manifest."""


def manifest_bytes(metadata: bytes, files: Mapping[str, Sequence[Item]]) -> bytes:
    """The content of the file, for a ``.metadata`` of this content."""
    found = {"nbytes": len(metadata), "sha256": hashlib.sha256(metadata).hexdigest()}
    body = json.dumps({"metadata": found, "files": {file: sorted(items) for file, items in sorted(files.items())}})
    head = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest()})
    return f"{head}\n{body}\n".encode()


def parse_manifest(content: bytes) -> Manifest:
    """Parse the content of a manifest file.

    Raises:
        DamagedManifestError: it is damaged, or of a newer version.
    """
    head, _, body = content.partition(b"\n")
    try:
        expected = {"format": FORMAT, "sha256": hashlib.sha256(body.removesuffix(b"\n")).hexdigest()}
        if json.loads(head) != expected or not body.endswith(b"\n"):
            raise DamagedManifestError(f"{MANIFEST_FILE} is damaged, or of a newer version; remove it to go without")
        found = json.loads(body)
        files = {str(file): tuple(map(_item, items)) for file, items in found["files"].items()}
        return Manifest(int(found["metadata"]["nbytes"]), str(found["metadata"]["sha256"]), files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedManifestError(f"{MANIFEST_FILE} is damaged; remove it to go without") from error


def _item(found: Any) -> Item:
    offset_bytes, length_bytes, around_crc = map(int, found)
    return Item(offset_bytes, length_bytes, around_crc)
