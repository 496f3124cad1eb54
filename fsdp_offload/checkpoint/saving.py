"""Saving with DCP: what would be written as something else is an error, on all ranks, before anything is written.

DCP takes the same chunk of the same key on two ranks for replicas and keeps that of one rank. That is right within a
mesh. On meshes without a common rank they are other tensors, experts for example, unless somebody replicates by hand.
Nothing is known of plain tensors, and no contents are compared.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter

from ..torch_compat.dtensor import is_dtensor, local_shard, may_be_another_ranks, ranks_of_mesh
from .loading import listed, why_misread
from .shard_tensor import ShardTensor


class _Mappings(dict[str, Any]):
    """DCP's own ``planner_data``, and the ranks of the meshes that do not span all, by key."""

    meshes: dict[str, frozenset[int]]


class SavePlanner(DefaultSavePlanner):
    """A DCP save planner that refuses DTensors which DCP would write as other parts than they are, or not at all."""

    def create_local_plan(self) -> SavePlan:
        """DCP's plan.

        Raises:
            ValueError: names the DTensors, uneven ones or slices, that do not carry their chunks.
        """
        wrong = [f"{key} ({why})" for key, value in self.state_dict.items() if (why := why_misread(value))]
        if wrong:
            raise ValueError(
                f"nothing has been written: DCP would save {len(wrong)} tensors as other parts than they are: "
                f"{listed(wrong)}. Save what carries its chunks: get_optimizer_state_dict, and for values of a model's "
                "state_dict() fsdp_offload.checkpoint.with_parameter_chunks"
            )
        plan = super().create_local_plan()
        mappings = _Mappings(plan.planner_data or {})
        mappings.meshes = {
            key: frozenset(ranks_of_mesh(value))
            for key, value in self.state_dict.items()
            if isinstance(value, Tensor) and is_dtensor(value) and may_be_another_ranks(value)
        }
        return replace(plan, planner_data=mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's plan; called on one rank.

        Raises:
            ValueError: names tensors of several meshes under one key.
        """
        lost = _of_several_meshes(all_plans)
        if lost:
            raise ValueError(
                f"nothing has been written: ranks of separate meshes save {len(lost)} tensors under the same keys "
                f"({listed(lost)}), and DCP would keep those of one mesh. If they are experts, give them global names: "
                "experts= in get_optimizer_state_dict and with_parameter_chunks. If they are replicas, save those of "
                "one mesh, or with torch.distributed.checkpoint.save"
            )
        return super().create_global_plan(all_plans)


def _of_several_meshes(plans: Sequence[SavePlan]) -> list[str]:
    """List keys of which ranks without a common mesh would write the same chunk."""
    seen: dict[object, frozenset[int]] = {}
    found: dict[str, None] = {}
    for plan in plans:
        meshes = plan.planner_data.meshes if isinstance(plan.planner_data, _Mappings) else {}
        for item in plan.items:
            ranks = meshes.get(item.index.fqn)
            if ranks is not None and not seen.setdefault((item.index.fqn, item.index.offset), ranks) & ranks:
                found[item.index.fqn] = None
    return list(found)


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
    metadata: Metadata = dcp_saver.save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=SavePlanner(),
        process_group=process_group,
        no_dist=no_dist,
    )
    return metadata


def check_storage_writer(state_dict: Mapping[str, Any], storage_writer: StorageWriter) -> None:
    """Refuse a writer that would keep only some of the chunks. Call it before ``dcp.save`` and ``dcp.async_save``.

    ``HuggingFaceStorageWriter`` keeps one tensor per name and file: of several chunks the last one.

    Raises:
        ValueError: names the tensors with several chunks on this rank.
    """
    if not isinstance(storage_writer, HuggingFaceStorageWriter):
        return
    ragged = [name for name, shard in _shard_tensors(state_dict) if len(shard.shard_chunks.chunks) > 1]
    if ragged:
        raise ValueError(
            "HuggingFaceStorageWriter keeps one chunk per tensor and rank, and would silently drop the others of "
            f"{listed(ragged)}. Save with FileSystemWriter"
        )


def _shard_tensors(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, ShardTensor]]:
    for key, value in values.items():
        local = local_shard(value) if isinstance(value, Tensor) else value
        if isinstance(local, Mapping):
            yield from _shard_tensors(local, f"{prefix}{key}.")
        elif isinstance(local, ShardTensor):
            yield f"{prefix}{key}", local
