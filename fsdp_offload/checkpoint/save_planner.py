"""Saving with DCP, so that what would be lost silently is an error before anything is written.

::

    this rank's values ──▶ do their sizes fit their chunks ──▶ DCP's plan, with a hash of what may be saved twice
        ──(DCP's own gather)──▶ one key, one chunk, different content? ──▶ an error on all ranks, or DCP's plan

DCP takes the same chunk of the same key on several ranks for replicas and keeps that of one. They are replicas where
the mesh of the tensor says so: within a mesh over all ranks, the same chunk is the same elements. Where a mesh covers
only some of the ranks (experts, tensor-parallel ranks with copies of a norm, pipeline stages with tied embeddings) and
for plain tensors nothing says it, and the content does: each such tensor is hashed where it is, on the device or on
the host (there about 1 GB/s for each core). The hashes travel with the plans that DCP gathers anyway; no collective is
added.
"""

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter

from ..cpu_update.fingerprint import Fingerprint, Hasher
from ..state.layout import leaves_of
from ..torch_compat.dtensor import is_dtensor, local_shard, may_be_another_ranks
from .experts import is_numbered
from .load_checks import listed, why_unfit
from .load_rules import Allowed, is_params_list, matcher
from .shard_tensor import check_storage_writer

_SEED = 0x5EED
"""The seed of the hashes: the same on every rank, as they are compared."""

_SMALL_BYTES = 4096
"""Up to this, the bytes themselves are fetched."""


class SavePlanner(DefaultSavePlanner):
    """A DCP save planner that refuses what would be lost silently.

    Refused, with the keys, before anything is written: tensors that two ranks would save under one key with different
    content (local experts without :class:`~fsdp_offload.checkpoint.Experts`), or as chunks of different sizes at one
    place; the same of lists of names (``params`` of nested param groups, where ranks have different parameters); uneven
    parts that DCP would take for even ones. Other objects are not compared: as always, one rank's are saved.

    Args:
        allow_different: keys that may differ between ranks, of which one rank's is saved: all, or those that match one
            of these ``fnmatch`` patterns, such as ``["rng_state.*"]``. Keys are flat, with dots, as in the checkpoint.

    Raises:
        TypeError: ``allow_different`` is neither a bool nor a sequence of patterns.
    """

    def __init__(self, *, allow_different: Allowed = False) -> None:
        super().__init__()
        self._may_differ = matcher("allow_different", allow_different)

    def create_local_plan(self) -> SavePlan:
        """DCP's plan, with a hash of each tensor that other ranks may save too.

        Raises:
            ValueError: DCP would not write what a local tensor has, or would write it as other rows. Names all of them.
        """
        plan = super().create_local_plan()
        _check_written(self.state_dict, plan.items)
        hashes = {key: _hash_of(value) for key, value in self._in_question()}
        # Without what a ContentIndex has: all of the content is compared here, and on purpose it may differ.
        items = [dataclasses.replace(item, index=dataclasses.replace(item.index)) for item in plan.items]
        return dataclasses.replace(plan, items=items, planner_data=_Planned(plan.planner_data, hashes))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's global plan of what all ranks want to save.

        Raises:
            ValueError: ranks would save different tensors under one key. Names them.
        """
        _check_same([(plan.items, plan.planner_data.hashes) for plan in all_plans])
        bare = [dataclasses.replace(plan, planner_data=plan.planner_data.mappings) for plan in all_plans]
        return super().create_global_plan(bare)

    def _in_question(self) -> Iterator[tuple[str, Any]]:
        """Values of which the mesh does not say that other ranks with the same chunk have the same."""
        for key, value in self.state_dict.items():
            if self._may_differ(key):
                continue
            if _is_names(value) or (isinstance(value, Tensor) and may_be_another_ranks(value)):
                yield key, value


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: DefaultSavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save as ``torch.distributed.checkpoint.save``: :class:`SavePlanner` refuses what would be lost, before the write.

    Args:
        state_dict: what to save.
        checkpoint_id: where, as DCP takes it.
        storage_writer: as DCP takes it; one that would drop chunks is refused.
        planner: by default ``SavePlanner()``.
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
        planner=SavePlanner() if planner is None else planner,
        process_group=process_group,
        no_dist=no_dist,
    )
    return metadata


# Sizes ---------------------------------------------------------------------------------------------------------------


def _check_written(values: Mapping[str, Any], items: Sequence[WriteItem]) -> None:
    """Refuse DTensors of which DCP would write something else than they have."""
    planned_numel: dict[str, int] = {}
    for item in items:
        if item.tensor_data is not None:
            numel = math.prod(item.tensor_data.chunk.sizes)
            planned_numel[item.index.fqn] = planned_numel.get(item.index.fqn, 0) + numel
    wrong = []
    for key, value in values.items():
        if isinstance(value, Tensor) and is_dtensor(value):
            why = _why_misread(value, planned_numel.get(key, 0))
            wrong += [] if why is None else [f"{key} ({why})"]
    if wrong:
        raise ValueError(
            f"nothing has been written: DCP would save {len(wrong)} tensors as other parts than they are: "
            f"{listed(wrong)}. Save what carries its chunks: get_optimizer_state_dict, and for values of a model's "
            "state_dict() fsdp_offload.checkpoint.with_parameter_chunks"
        )


def _why_misread(value: Tensor, planned_numel: int) -> str | None:
    local = local_shard(value)
    if local.numel() != planned_numel:
        return f"{planned_numel} elements planned for a local tensor of shape {tuple(local.shape)}"
    return why_unfit(value)


# Content -------------------------------------------------------------------------------------------------------------


class _Planned(NamedTuple):
    """Data that travels with a plan: DCP's own mappings, and the hashes by key."""

    mappings: Any
    hashes: dict[str, bytes]


def _is_names(value: object) -> bool:
    """Return whether it may be the list of FQNs of a param group, which is one object for all ranks."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(name, str) for name in value)


def _hash_of(value: Any) -> bytes:
    """Hash this rank's elements, bit by bit, wherever they are."""
    whole = hashlib.blake2b(digest_size=16)
    if not isinstance(value, Tensor):
        whole.update(repr(list(value)).encode())
        return whole.digest()
    for leaf in leaves_of(local_shard(value)):
        flat = leaf.detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() > _SMALL_BYTES:
            # Words are read as wide as they are aligned, which is not to matter.
            flat = flat.clone() if flat.storage_offset() % 4 else flat
            fingerprint = Fingerprint([flat])
            rows = torch.empty(fingerprint.rows, dtype=torch.int64, device=flat.device)
            fingerprint.write(rows, _hasher(flat.device))
            flat = rows.view(torch.uint8)
        whole.update(flat.cpu().numpy().tobytes())
    return whole.digest()


@functools.lru_cache(maxsize=1)
def _hasher(device: torch.device) -> Hasher:
    return Hasher(device, seed=_SEED)


def _check_same(planned: Sequence[tuple[Sequence[WriteItem], Mapping[str, bytes]]]) -> None:
    """Refuse different content at one place of one key."""
    first: dict[MetadataIndex, tuple[int, WriteItem, bytes | None]] = {}
    different: dict[str, str] = {}
    for rank, (items, hashes) in enumerate(planned):
        for item in items:
            content = hashes.get(item.index.fqn)
            other, before, content_before = first.setdefault(item.index, (rank, item, content))
            sizes, sizes_before = _sizes_of(item), _sizes_of(before)
            if sizes != sizes_before:
                why = f"ranks {other} and {rank} have chunks of {sizes_before} and {sizes} at {item.index.offset}"
            elif content != content_before:
                at = f" at {item.index.offset}" if item.tensor_data is not None else ""
                why = f"ranks {other} and {rank} have different values{at}"
            else:
                continue
            different.setdefault(item.index.fqn, why)
    if different:
        raise ValueError(_refusal(different))


def _sizes_of(item: WriteItem) -> tuple[int, ...]:
    return () if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes)


def _refusal(different: Mapping[str, str]) -> str:
    shown = listed([f"{key} ({why})" for key, why in different.items()])
    hint = "Give them names of their own on each rank; allow_different=[patterns] saves one rank's on purpose."
    if any(map(is_numbered, different)):
        hint = f"Experts have local numbers: renumber them with fsdp_offload.checkpoint.Experts. {hint}"
    if any(is_params_list(key) for key in different):
        hint = f"Save optimizer state with flatten_optimizer_state_dict=True: its keys are each parameter's own. {hint}"
    return (
        f"nothing has been written: ranks would save different things under {len(different)} of the keys, and only "
        f"those of one rank would be kept: {shown}. {hint}"
    )
