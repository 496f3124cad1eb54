"""Saving with DCP: what would be written as something else is an error, on all ranks, before anything is written.

Not seen: what *other* ranks save under the same key. DCP takes the same chunk of the same key for replicas and keeps
that of one rank. Experts get names of their own instead (``names.py``).
"""

import os
from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter

from ..fsdp.dtensor import local_shard
from .chunks import why_misread
from .loading import listed
from .shard_tensor import ShardTensor


class SavePlanner(DefaultSavePlanner):
    """A DCP save planner that refuses DTensors which DCP would write as other parts than they are."""

    def create_local_plan(self) -> SavePlan:
        """DCP's plan, if all DTensors, uneven ones and slices, carry their chunks."""
        wrong = [f"{key} ({why})" for key, value in self.state_dict.items() if (why := why_misread(value))]
        if wrong:
            raise ValueError(
                f"nothing has been written: DCP would save {len(wrong)} tensors as other parts than they are: "
                f"{listed(wrong)}. Save what carries its chunks: get_optimizer_state_dict, and for values of a model's "
                "state_dict() fsdp_offload.checkpoint.with_parameter_chunks"
            )
        return super().create_local_plan()


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save as ``torch.distributed.checkpoint.save``, with :class:`SavePlanner`.

    Args:
        state_dict: what to save.
        checkpoint_id: where, as DCP takes it.
        storage_writer: as DCP takes it; one that would drop chunks is refused.
        process_group: the ranks that save together; by default all.
        no_dist: save in this process alone.

    Raises:
        CheckpointException: DCP's own, on all ranks, with the errors of each. If its step is ``plan``, nothing has been
            written.
        ValueError: ``storage_writer`` would keep only some of the chunks.
    """
    if storage_writer is not None:
        check_storage_writer(state_dict, storage_writer)
    where: Any = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer}
    saved = dcp_saver.save(state_dict, planner=SavePlanner(), process_group=process_group, no_dist=no_dist, **where)
    return cast(Metadata, saved)


def check_storage_writer(state_dict: Mapping[str, Any], storage_writer: StorageWriter) -> None:
    """Refuse a writer that would keep only some of the chunks. Call it before ``dcp.save`` and ``dcp.async_save``.

    ``HuggingFaceStorageWriter`` keeps one tensor per name and file: of several chunks the last one.

    Raises:
        ValueError: names the tensors with several chunks on this rank.
    """
    if not isinstance(storage_writer, HuggingFaceStorageWriter):
        return
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state_dict))  # makes keys flat
    locals_ = {key: local_shard(value) for key, value in planner.state_dict.items() if isinstance(value, Tensor)}
    ragged = [
        key for key, local in locals_.items() if isinstance(local, ShardTensor) and len(local.shard_chunks.chunks) > 1
    ]
    if ragged:
        raise ValueError(
            "HuggingFaceStorageWriter keeps one chunk per tensor and rank, and would silently drop the others of "
            f"{listed(ragged)}. Save with FileSystemWriter"
        )
