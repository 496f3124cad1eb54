"""Seal a finished checkpoint: a manifest beside it that tells each of its bytes, for ``verify`` to compare with.

::

    dcp.save ──▶ checkpoint ──check_whole──▶ each item, with the CRC-32 of its contents ──▶ .checksums

``torch.save`` has taken the CRC-32 of all contents from memory. So large contents are not read here, and those that
were damaged between the save and the seal are found as well.
"""

import os
from pathlib import Path

from ..core.text import CheckpointError
from ..look.verify import check_whole, notes_on_checksums
from ..stored.checkpoint import Item
from ..stored.metadata import MANIFEST_FILE, manifest_bytes, read_content
from ..stored.safetensors_folder import is_safetensors, open_checkpoint
from ..stored.storage import RemoteFolder, open_folder, write_file


def seal(path: str | os.PathLike[str], *, threads: int = 4) -> list[str]:
    """Write the checksums of a finished checkpoint of DCP beside it, in the file ``.checksums``.

    ``verify`` with its data then finds every bit that has changed, also in ``.metadata``, and files of another
    checkpoint that look the same. For one process, when the save has ended on all ranks::

        dcp.save(state, checkpoint_id=path)
        if dist.get_rank() == 0:
            seal(path)

    Args:
        path: its folder, or its fsspec URL.
        threads: how many files are read at the same time.

    Returns:
        Which data have no checksum to be compared with, and why; mostly nothing.

    Raises:
        CheckpointError: no whole checkpoint of DCP, one that is sealed, changes meanwhile, or cannot be written to.
    """
    if is_safetensors(path):
        raise CheckpointError(
            f"{os.fspath(path)} has safetensors, which have no checksums; list those of the files, with sha256sum"
        )
    content = read_content(open_folder(path))
    checkpoint = open_checkpoint(path)
    if MANIFEST_FILE in checkpoint.folder.files():
        raise CheckpointError(
            f"{checkpoint.path} is sealed: verify compares it with {MANIFEST_FILE}. If another save has written there "
            f"since, remove {MANIFEST_FILE} and seal it again"
        )
    check_whole(checkpoint, threads)
    files: dict[str, set[Item]] = {}
    for _key, item in checkpoint.items():  # noqa: PERF102  # no dict: a key has many items
        around_crc = checkpoint.opened[item.place].around_crc
        files.setdefault(item.file, set()).add(Item(item.offset_bytes, item.length_bytes, around_crc))
    if read_content(checkpoint.folder) != content:
        raise CheckpointError(f"{checkpoint.path} was changed while it was read; seal it when nobody writes it")
    made, where = manifest_bytes(content, {file: list(items) for file, items in files.items()}), checkpoint.path
    try:  # there as a whole, or not at all
        if isinstance(checkpoint.folder, RemoteFolder):
            remote = checkpoint.folder
            remote.fs.pipe_file(f"{remote.root.rstrip('/')}/{MANIFEST_FILE}", made)
        else:
            unfinished = Path(where) / f"{MANIFEST_FILE}.unfinished-{os.getpid()}"
            write_file(unfinished, made)
            unfinished.rename(Path(where) / MANIFEST_FILE)
    except OSError as error:
        raise CheckpointError(f"{where}/{MANIFEST_FILE} cannot be written: {error}") from error
    return notes_on_checksums(checkpoint)
