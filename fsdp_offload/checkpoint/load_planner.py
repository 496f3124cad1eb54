"""Loading with DCP, so that what would be silently wrong is an error before anything changes.

::

    state dict, metadata ──▶ flat keys ──▶ which are left out (load_rules) ──▶ do the others fit (load_checks)
        ──▶ DCP's plan ──▶ does it write every element once (load_checks) ──▶ are its files there (load_files)
        ──▶ all ranks agree ──▶ read

Everything before the last arrow is planning. DCP gathers the plans of all ranks, with their exceptions, before any rank
reads: an error on one rank is one on all, and then nothing has changed on any. No collective is added.
"""

import io
import logging
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint import state_dict_loader as dcp_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from ..optimizers.masters import can_rebuild
from .layouts import LEFT_OUT, LeftOut
from .load_checks import Kind, Problem, check_coverage, check_entry, checked_metadata, dtype_of, listed, refusal
from .load_files import CheckedReader
from .load_rules import (
    Allowed,
    extra_keys,
    is_master,
    is_state,
    matcher,
    nested_group_keys,
    nested_state_roots,
    superfluous_masters,
    without_saved_state,
)
from .shard_tensor import in_one_dimension
from .torch_private import storage_reader_for

logger = logging.getLogger(__name__)


class LoadPlanner(DefaultLoadPlanner):
    """A DCP load planner that refuses what would be silently wrong.

    Refused, with the keys, while planning: keys that are missing or extra; another shape, dtype or kind of value;
    elements of this rank that no stored chunk has, or that two have; tensors that DCP would fill in the wrong places;
    a load of nothing.

    State that was saved in one dimension is loaded into tensors of their parameters' shapes, where each rank has one
    range of the elements.

    Extra keys count if they share their first component with something requested, and if no rank requests them: the
    model alone can be loaded from a checkpoint of model and optimizer, and every pipeline stage its own part. Some
    optimizer state may be left out without asking: see ``load_rules.py``.

    What is left out stays as it was in the state dict. So does everything, meta tensors included, after a refusal.

    Checkpoints of PyTorch before 2.4, which kept dicts without tensors as one object, are refused where that matters.

    Args:
        allow_missing: requested keys that may be missing: all of them, or those that match one of these ``fnmatch``
            patterns, such as ``["model.head.*"]``. Keys are flat, with dots, as in the checkpoint.
        allow_extra: the same, for keys that may stay in the checkpoint.
        allow_cast: the same, for tensors that may be cast to the dtype of what they are loaded into.

    Raises:
        TypeError: an argument is neither a bool nor a sequence of patterns.
    """

    missing_keys: tuple[str, ...]
    """After a load, the requested flat keys that were left as they were."""

    def __init__(
        self,
        *,
        allow_missing: Allowed = False,
        allow_extra: Allowed = False,
        allow_cast: Allowed = False,
    ) -> None:
        super().__init__()
        self._may_be_missing = matcher("allow_missing", allow_missing)
        self._may_be_extra = matcher("allow_extra", allow_extra)
        self._may_be_cast = matcher("allow_cast", allow_cast)
        self.missing_keys = ()
        self.listed_parameters: dict[str, Collection[str]] = {}  # of nested param groups, if somebody has read them

    # --- called by DCP, in this order --------------------------------------------------------------------------------

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten a copy of the dicts and lists (not of tensors): DCP would change the user's own before any check."""
        self.missing_keys = ()
        self._users_state_dict = state_dict
        self._shaped: dict[str, Tensor] = {}  # what is loaded in one dimension, as it is requested
        super().set_up_planner(_copied(state_dict), metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """DCP's plan for the keys that are there. Extra keys travel with it, for all ranks to look at together.

        Raises:
            ValueError: names all that is wrong on this rank.
        """
        requested: dict[str, Any] = self.state_dict
        metadata = checked_metadata(self.metadata)
        stored = metadata.state_dict_metadata
        if not requested:
            raise ValueError("expected a state dict with tensors or other values to load into, got an empty one")
        common = {key: self._as_stored(key, value, stored[key]) for key, value in requested.items() if key in stored}
        problems = [*self._missing(requested, stored)]
        if not common and not problems:
            raise _nothing_in_common(list(requested), list(stored))
        for key, value in common.items():
            problems += check_entry(key, value, stored[key], self._may_be_cast)
        unsound = {problem.key for problem in problems}
        sound = {key: value for key, value in common.items() if key not in unsound}
        plan: LoadPlan = create_default_local_load_plan(sound, metadata)
        problems += check_coverage(sound, plan.items)
        extra = self._extra(stored)
        if problems:
            raise refusal([*problems, *extra])
        self.missing_keys = tuple(key for key in requested if key not in common)
        self.state_dict = common
        return LoadPlan(plan.items, planner_data=tuple(problem.key for problem in extra))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: the plans as they are.

        Raises:
            ValueError: extra keys that no rank loads.
        """
        extra = {key for plan in global_plan for key in plan.planner_data or ()}
        if extra:
            extra -= {item.dest_index.fqn for plan in global_plan for item in plan.items}
        if extra:
            raise refusal(Problem(Kind.EXTRA, key) for key in sorted(extra))
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """All ranks agree: from now on, the user's state dict is written to."""
        for key, value in self.state_dict.items():
            container, place = _place(self._users_state_dict, self.mappings[key])
            if isinstance(value, Tensor) and getattr(container[place], "device", None) == torch.device("meta"):
                container[place] = self._shaped.get(key, value)
        self.original_state_dict = self._users_state_dict
        had_no_state = without_saved_state(
            self.missing_keys, checked_metadata(self.metadata).state_dict_metadata, self.listed_parameters
        )
        for key in self.mappings:
            container, place = _place(self._users_state_dict, self.mappings[key])
            if isinstance(container[place], Tensor):
                LEFT_OUT.pop(container[place], None)
                if key not in self.state_dict:
                    LEFT_OUT[container[place]] = LeftOut.HAD_NONE if key in had_no_state else LeftOut.ALLOWED
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object where it is in the state dict; DCP would put it beside, where a key above is no string."""
        container, place = _place(self.original_state_dict, self.mappings[read_item.dest_index.fqn])
        container[place] = torch.load(value, weights_only=False)  # as DCP does: checkpoints have any object

    # --- which keys --------------------------------------------------------------------------------------------------

    def _as_stored(self, key: str, value: Any, entry: object) -> Any:
        """``value``, or the same memory in one dimension where state was saved so (Megatron-LM's pull request 4623)."""
        is_flat = isinstance(entry, TensorStorageMetadata) and isinstance(value, Tensor) and is_state(key)
        if not is_flat or value.dim() == 1 or tuple(entry.size) != (value.numel(),):  # type: ignore[attr-defined]
            return value
        try:
            flat = in_one_dimension(value)
        except (TypeError, ValueError):  # what is wrong with it is told below
            return value
        if flat is None:
            return value
        self._shaped[key] = value
        return flat

    def _missing(self, requested: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Problem]:
        missing = [key for key in requested if key not in stored and not self._may_be_missing(key)]
        if not missing:
            return []
        had_no_state = without_saved_state(missing, stored, self.listed_parameters)
        roots = tuple(nested_state_roots(stored))
        return [
            Problem(Kind.MISSING_STATE if key.startswith(roots) else Kind.MISSING, key)
            for key in missing
            if key not in had_no_state and not (is_master(key) and _is_floating(requested[key]))
        ]

    def _extra(self, stored: Mapping[str, Any]) -> list[Problem]:
        requested = {key: self.mappings[key] for key in self.state_dict}
        extra = [key for key in extra_keys(requested, stored) if not self._may_be_extra(key)]
        spare = {key for key in superfluous_masters(extra, requested) if _is_floating(stored[key])}
        # A tensor without elements is read by nobody, so nobody could be seen to request it; and nothing is lost.
        return [Problem(Kind.EXTRA, key) for key in extra if key not in spare and not _is_empty(stored[key])]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: dcp_planner.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load as ``torch.distributed.checkpoint.load``: what would be silently wrong is an error before anything changes.

    Loads in place into the tensors of ``state_dict``, and replaces its other values. With a ``FileSystemReader``, also
    one of fsspec, every file that this rank needs is looked at first: it is there, and long enough. Bytes that are
    damaged within a file are found by ``checkpoint_tools``: seal a checkpoint when it is saved, verify it before.

    Args:
        state_dict: what to load, and into what.
        checkpoint_id: a path, or a URL of fsspec.
        storage_reader: a reader of another kind than ``FileSystemReader`` is used as it is.
        planner: by default ``LoadPlanner()``.
        process_group: the ranks that load together; by default all.
        no_dist: load in this process alone.

    Raises:
        CheckpointException: DCP's own, on all ranks, with the errors of each: a ``ValueError`` of the planner, a
            ``RuntimeError`` about files. If its step is ``plan``, nothing has changed on any rank; if it is ``read``,
            something may have.
    """
    if storage_reader is None and checkpoint_id is not None:
        storage_reader = storage_reader_for(checkpoint_id)
    # The latter has its metadata in the very files, and opens them as a whole.
    if isinstance(storage_reader, FileSystemReader) and not isinstance(storage_reader, HuggingFaceStorageReader):
        storage_reader = CheckedReader(storage_reader)
    planner = LoadPlanner() if planner is None else planner
    if isinstance(planner, LoadPlanner) and isinstance(storage_reader, CheckedReader):
        planner.listed_parameters = _listed_parameters(storage_reader)
    dcp_loader.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _listed_parameters(reader: CheckedReader) -> dict[str, Collection[str]]:
    """The FQNs of each nested param group. Every rank reads these few bytes by itself."""
    try:
        groups: dict[str, Any] = dict.fromkeys(nested_group_keys(reader.read_metadata().state_dict_metadata), ())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose: no collective
            if groups:
                dcp_loader.load(groups, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException):
        # A rank that raised here would leave the others waiting. What is wrong is found again, and told, by the load.
        logger.debug("param groups could not be read", exc_info=True)
        return {}
    return {key: fqns for key, fqns in groups.items() if isinstance(fqns, list | tuple)}


def _nothing_in_common(requested: list[str], stored: list[str]) -> ValueError:
    return ValueError(
        f"this checkpoint has nothing of what is requested: requested are {listed(requested)}; it has "
        f"{listed(stored) or 'no keys'}. Is it the right checkpoint, and is the state dict nested as it was saved?"
    )


def _is_floating(value: object) -> bool:
    dtype = dtype_of(value)
    return dtype is not None and can_rebuild(dtype)


def _is_empty(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata) and 0 in entry.size


def _copied(value: Any) -> Any:
    """Dicts and lists anew, what is in them as it is."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _place(root: Any, path: Sequence[Any]) -> tuple[Any, Any]:
    """The container of what lies at ``path``, and its key there."""
    for step in path[:-1]:
        root = root[_key(root, step)]
    return root, _key(root, path[-1])


def _key(container: Any, step: Any) -> Any:
    """DCP turns all keys of dicts into strings."""
    if isinstance(container, Mapping) and step not in container:
        return next(key for key in container if str(key) == step)
    return step
