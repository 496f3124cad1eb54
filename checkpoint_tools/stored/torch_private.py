"""Private PyTorch names that writing checkpoints needs; nowhere else in this package.

==============================================  ============  ==========================================================
private name                                    seen in       without it
==============================================  ============  ==========================================================
``checkpoint.filesystem._StorageInfo``          2.1 to 2.13   required: an error when a checkpoint is written
``torch._utils._rebuild_tensor_v2``, ``_v3``    2.1 to 2.13   required: an error when a checkpoint is written
==============================================  ============  ==========================================================

They are names that the files of every checkpoint contain, so torch cannot do without them soon.
"""

from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as _filesystem

from ..core.errors import CheckpointError


def storage_info(file: str, offset_bytes: int, length_bytes: int, transforms: tuple[str, ...]) -> Any:
    """Make an item's entry in ``Metadata.storage_data``.

    Raises:
        CheckpointError: torch has no such class any more.
    """
    info = getattr(_filesystem, "_StorageInfo", None)
    if info is None:
        raise _unknown_torch("torch.distributed.checkpoint.filesystem._StorageInfo")
    # No third argument where there is none, as DCP does: torch before 2.6 does not know it.
    return info(file, offset_bytes, length_bytes, *([list(transforms)] if transforms else ()))


def rebuild_function(name: str) -> Any:
    """Return the function that rebuilds a pickled tensor.

    Raises:
        CheckpointError: torch has no such function any more.
    """
    function = getattr(getattr(torch, "_utils", None), name, None)
    if function is None:
        raise _unknown_torch(f"torch._utils.{name}")
    return function


def _unknown_torch(name: str) -> CheckpointError:
    return CheckpointError(
        f"torch {torch.__version__} has no {name}, with which checkpoints are written; use torch 2.11 to 2.13, or "
        "newer tools"
    )
