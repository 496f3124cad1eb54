"""A checkpoint of either format: that of DCP, or safetensors."""

import os

from .checkpoint import Checkpoint
from .metadata import open_dcp
from .safetensors_folder import is_safetensors, open_safetensors


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the metadata, or the headers, of what is in a local folder or at an fsspec URL.

    Safetensors have their own keys here, or those of the checkpoint of which convert has made them.
    """
    return open_safetensors(path, default_prefix="").checkpoint if is_safetensors(path) else open_dcp(path)
