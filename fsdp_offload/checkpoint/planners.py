"""Saving and loading with DCP: silent mistakes become errors, on all ranks, before anything changes.

::

    state dict, metadata ──▶ keys: missing, extra ──▶ values: kind, dtype, destination ──▶ DCP's plan (and its shapes)
        ──▶ does it write every element once ──▶ are its files there ──▶ all ranks agree ──▶ read

Everything before the last arrow is planning. DCP gathers the plans of all ranks, with their exceptions, before any
rank reads or writes: an error on one rank becomes an error on all, before anything changes. No collective is added.
"""

import copy
import ctypes
import dataclasses
import hashlib
import io
import itertools
import math
import os
import re
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import default_planner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ..api.wrapped import offloaded
from ..fsdp.dtensor import first_rank, is_dtensor, local_shard, may_be_another_ranks, over_part, storage_reader_for
from ..optimizers.masters import MASTER, can_rebuild
from ..policy import check_choices, check_is, listed, tells
from ..state.layout import leaves_of
from .chunks import ReadPart, chunks_of, flat_range_of, overlapping, why_misread
from .names import by_bare_name, parameter_of, without_wrappers
from .plain import refuse_templates
from .shard_tensor import ShardTensor, memory_of

Allowed = bool | Sequence[str]

_GROUPS = re.compile(r"\.(?:param_groups|param_to_group_meta)\.")  # the latter of Megatron's fsdp_dtensor
_NESTED_GROUP = re.compile(r"\d+\.params")  # a group's list of FQNs; the flattened layout has none
_NUMBERED = re.compile(r"\bstate\.\d+\.[^.]+$")  # state in optimizer.state_dict()
_NO_METADATA = re.compile(r"(?:No such file or|Not a) directory: .*\.metadata\b")
_Place = tuple[str, tuple[int, ...]]  # key and offset, under which DCP keeps one chunk
_SAMPLED, _FIRST = 1024, 64  # elements in a digest
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize: a dtype to read the bits
_OS_ERRORS = (OSError, FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
_AFTER = {
    "read": "Something may have changed: load again before training.",
    "write": "What has been written is no checkpoint: save again.",
}
"""Advice, by the step of DCP that failed."""
LEFT = "_fsdp_offload_left"  # attribute of state without elements on this rank: whether the last load left it out


class Loaded(NamedTuple):
    """Outcome of a load, by flat key, with dots, as in the checkpoint."""

    filled: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Requested keys that kept their values, or were removed from the state dict."""


class Problem(Enum):
    """Kinds of mistakes, in the plural, with their remedies."""

    MISSING = (
        "requested, but not in the checkpoint: {}. Is it of another model, saved without a scheduler, or with another "
        "flatten_optimizer_state_dict? planner=LoadPlanner(allow_missing=[patterns]) leaves such keys as they are, and "
        "load() takes out those of parameters that had no state."
    )
    EXTRA = (
        "in the checkpoint, but not requested: {}. Request them too (get_optimizer_state_dict(..., for_load=True) "
        "requests state that does not exist yet), or leave them there: planner=LoadPlanner(allow_extra=[patterns])."
    )
    NUMBERED = (
        "in the checkpoint by number, as optimizer.state_dict() has state: {}. Load it into optimizer.state_dict() "
        "after a step, which makes it; then save what get_optimizer_state_dict(model, optimizer) gives, by name."
    )
    KIND = "of another kind than was saved: {}. Put a value of that kind into the state dict."
    DTYPE = "of another dtype than in the checkpoint: {}. Cast them on purpose with allow_cast=[patterns]."
    DESTINATION = "that DCP cannot load into correctly: {}. fsdp_offload.checkpoint.with_chunks says what they hold."
    OVERLAP = "stored twice in part: {}. Reading order would decide which of the two is loaded. Save again."
    HOLE = "only partly in the checkpoint: {}. What is not there would keep its old values. Save on all ranks."
    FILE = "files that this rank needs, which are not as they were saved: {}. Was it copied in part? Copy it again."


Found = tuple[Problem, str, str]  # problem, key, details


@tells("LoadPlanner(allow_missing=['model.head.*'])")
class LoadPlanner(default_planner.DefaultLoadPlanner):
    """A DCP load planner that refuses loads that would be silently wrong.

    It refuses, with the keys and before anything is read: keys that are missing or extra; another shape, dtype or kind
    of value; elements of this rank that no stored chunk has, or that two have; tensors that DCP would fill in the wrong
    places; a load of nothing. State that was saved in one dimension is loaded into tensors of their parameters' shapes
    if each rank has one range of the elements. Keys may have ``_orig_mod.`` and ``_checkpoint_wrapped_module.`` in them
    on either side. An optimizer's state is a ``state`` next to ``param_groups``, below any prefix.

    Entries of param groups that only the checkpoint has (a scheduler's ``initial_lr``) are loaded with the others.
    An extra key is refused only if it shares its first component with a requested key, and no rank requests it: the
    model alone can be loaded from a checkpoint of model and optimizer, and every pipeline stage its own part.

    :func:`load` removes from the state dict the state of a parameter that the checkpoint's groups list, but that has no
    state there; and a missing ``master_param`` of floating point, which the optimizer rebuilds. In ``dcp.load``, a
    planner removes and adds no outermost keys, and cannot read the group lists of the nested layout: it refuses missing
    state there. Other missing keys that are allowed keep their values; after a refusal, all keys do.

    Args:
        allow_missing: requested keys that may be missing: all of them, or those that match one of several ``fnmatch``
            patterns, such as ``["model.head.*"]``. Keys are flat, with dots, as in the checkpoint.
        allow_extra: the same, for keys that may stay in the checkpoint.
        allow_cast: the same, for tensors that may be cast to the dtype of what they are loaded into.

    Raises:
        TypeError: an argument is neither a bool nor a sequence of patterns.
    """

    loaded = Loaded()
    """Outcome of the last load."""

    reader: FileSystemReader | None = None  # reads the files, which are checked first
    taken_out: dict[str, str]  # removed key -> root and FQN of its parameter, without wrappers
    added: dict[str, tuple[Any, ...]]  # added key of a group, such as initial_lr -> path of another key of the group

    def __init__(
        self, *, allow_missing: Allowed = False, allow_extra: Allowed = False, allow_cast: Allowed = False
    ) -> None:
        super().__init__()
        self._may_be_missing = _matcher("allow_missing", allow_missing)
        self._may_be_extra = _matcher("allow_extra", allow_extra)
        self._may_be_cast = _matcher("allow_cast", allow_cast)

    # --- called by DCP, in this order --------------------------------------------------------------------------------

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten a copy of the dicts and lists (not of tensors): DCP would change the user's own before any check."""
        if isinstance(metadata, bool):  # is_coordinator, which save() passes to a planner without storage_meta
            raise TypeError(
                "LoadPlanner plans loads. Write dcp.save(state_dict, checkpoint_id=path, planner=SavePlanner())."
            )
        self.loaded = Loaded()
        self._users_state_dict = state_dict
        self._shaped: dict[str, Tensor] = {}  # tensors that are loaded in one dimension, in their own shape
        self.taken_out = {}
        super().set_up_planner(_copied(state_dict), metadata, is_coordinator)
        self.added = {}
        stored = {} if metadata is None else metadata.state_dict_metadata
        siblings = {  # one requested key of each group
            key.rpartition(".")[0]: key
            for key in self.state_dict
            if _group_entry(key) is not None and isinstance(self.mappings[key][-1], str)  # in a dict, not in a list
        }
        same = by_bare_name(siblings, without_wrappers)
        for saved_key, entry in stored.items():
            stem, _, name = saved_key.rpartition(".")
            stem = stem if stem in siblings else same.get(without_wrappers(stem)) or ""
            key = f"{stem}.{name}"  # with the wrappers of its siblings
            if key in self.state_dict or stem not in siblings or self._may_be_extra(saved_key):
                continue
            *path, last = self.added[key] = self.mappings[siblings[stem]]
            self.mappings[key] = (*path, str(last).removesuffix(siblings[stem].rpartition(".")[2]) + name)
            self.state_dict[key] = None
            if isinstance(entry, TensorStorageMetadata):
                self.state_dict[key] = torch.empty(entry.size, dtype=entry.properties.dtype)

    def create_local_plan(self) -> LoadPlan:
        """Return DCP's plan for the keys in the checkpoint, with extra keys for the coordinator to compare."""
        requested: dict[str, Any] = self.state_dict
        assert self.metadata is not None, "DCP has read it, or failed"
        stored = self.metadata.state_dict_metadata
        bare = {key: without_wrappers(key) for key in requested if key not in stored}
        own, others = (by_bare_name(keys if bare else (), without_wrappers) for keys in (requested, stored))
        spelled = {key: other for key, name in bare.items() if own[name] and (other := others.get(name))}
        if spelled:  # differ only in wrappers: planned under the requested keys, read under the stored ones
            names = {other: key for key, other in spelled.items()}
            stored = {names.get(key, key): entry for key, entry in stored.items()}
            self.metadata = dataclasses.replace(self.metadata, state_dict_metadata=stored)
        common = {key: value for key, value in requested.items() if key in stored}
        problems = [*self._missing(requested, stored)]
        if not common and not problems:
            raise ValueError(
                "the state dict is empty, or the checkpoint has nothing of what is requested: requested are "
                f"{listed(requested) or 'none'}; it has {listed(stored)}. Is the state dict nested as it was saved?"
            )
        problems += itertools.chain.from_iterable(self._unfit(key, common[key], stored[key]) for key in common)
        extra, plan = self._extra(stored), LoadPlan([])
        if not problems:
            self.state_dict = {key: self._as_stored(key, value, stored[key]) for key, value in common.items()}
            plan = default_planner.create_default_local_load_plan(self.state_dict, self.metadata)
            for number, item in enumerate(plan.items if spelled else ()):
                at = item.storage_index
                at = dataclasses.replace(at, fqn=spelled.get(at.fqn, at.fqn))
                plan.items[number] = dataclasses.replace(item, storage_index=at)
            problems = [*_uncovered(self.state_dict, plan.items), *self._unreadable(plan.items)]
        if problems:
            raise _refusal([*problems, *extra])
        return LoadPlan(plan.items, planner_data=tuple(key for _, key, _ in extra))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, on the coordinator, if some rank loads each extra key; else raise."""
        extra = {key for plan in global_plan for key in plan.planner_data or ()}
        if extra:
            extra -= {item.storage_index.fqn for plan in global_plan for item in plan.items}
        if extra:
            raise _refusal([(Problem.EXTRA, key, "") for key in sorted(extra)])
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Prepare the user's state dict for the values that are read next: all ranks have agreed."""
        self.original_state_dict = self._users_state_dict
        for key, sibling in self.added.items():
            container, _ = _place(self._users_state_dict, sibling)
            container[self.mappings[key][-1]] = self.state_dict[key]
        for key, path in self.mappings.items():
            container, place = _place(self._users_state_dict, path)
            value, filled = container[place], self.state_dict.get(key)
            if isinstance(value, Tensor) and ".state." in f".{key}" and not local_shard(value).numel():
                vars(value)[LEFT] = key not in self.state_dict
            if isinstance(filled, Tensor) and isinstance(value, Tensor) and value.is_meta:
                container[place] = self._shaped.get(key, filled)
        taken = set()  # paths of values of a parameter's state; such a value may be a dict itself
        for key, parameter in self.taken_out.items():
            path = self.mappings[key]
            begins = (path[:length] for length in range(1, len(path)))
            taken.add(next((begin for begin in begins if len(".".join(map(str, begin))) > len(parameter)), path))
        for path in taken:
            container, place = _place(self._users_state_dict, path)
            if len(path) > 1:  # dcp.load() needs outermost keys; load() removes them afterwards
                del container[place]
        self.loaded = Loaded((*self.state_dict,), tuple(key for key in self.mappings if key not in self.state_dict))
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an object at its place in the state dict; DCP would add a new key where a key is not a string."""
        container, place = _place(self.original_state_dict, self.mappings[read_item.dest_index.fqn])
        container[place] = torch.load(value, weights_only=False)  # as DCP does: a checkpoint may have any object

    def _missing(self, requested: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[Found]:
        missing = [key for key in requested if key not in stored]
        found: set[str] = set()  # root and FQN (``…state.{fqn}``) of the parameters that the stored param groups list
        if any(".state." in f".{key}" for key in missing):
            entries = [(key, *split) for key in stored if (split := _group_entry(key)) is not None]
            lists = {key: root for key, root, entry in entries if _NESTED_GROUP.fullmatch(entry)}
            found = {root + entry.rpartition(".")[0] for _, root, entry in entries if root not in lists.values()}
            if lists and self.reader is not None:
                values: dict[str, Any] = dict.fromkeys(lists, ())
                with warnings.catch_warnings():
                    # Every rank reads these few bytes itself, without a collective; with a copy of the reader, since a
                    # load sets up its reader anew.
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                    state_dict_loader.load(values, storage_reader=copy.copy(self.reader), no_dist=True)
                found |= {f"{root}{fqn}" for key, root in lists.items() for fqn in values[key]}
        parameters = set(map(without_wrappers, found))
        with_state = {parameter_of(without_wrappers(key), parameters) for key in stored} if parameters else set()
        for key in missing:
            parameter = parameter_of(without_wrappers(key), parameters)
            if parameter is not None and parameter not in with_state:
                self.taken_out[key] = parameter
            elif _is_spare_master(key, requested[key]):
                self.taken_out[key] = key.rpartition(".")[0]
            elif not self._may_be_missing(key):
                yield Problem.MISSING, key, ""

    def _extra(self, stored: Mapping[str, Any]) -> list[Found]:
        """List stored keys that this rank does not request, but that share a root with requested ones."""
        paths = (self.mappings[key] for key in self.state_dict)
        firsts = {(str(path[0]), len(path) > 1) for path in paths}
        # The outermost key or, of a flattened dict, the first component, with and without wrappers.
        roots = {first for first, is_key in firsts if is_key}
        roots |= {f(first).partition(".")[0] for first, is_key in firsts if not is_key for f in (str, without_wrappers)}
        states = tuple({found[0] for key in self.state_dict if (found := _group_entry(key)) is not None})
        roots |= {state.removesuffix(".") for state in states}
        parameters = {without_wrappers(key).rpartition(".")[0] for key in self.state_dict}
        return [
            (Problem.NUMBERED if key.startswith(states) and _NUMBERED.search(key) else Problem.EXTRA, key, "")
            for bare, (key, entry) in zip(map(without_wrappers, stored), stored.items(), strict=True)
            if key not in self.state_dict
            and not all(roots.isdisjoint(itertools.accumulate(one.split("."), "{}.{}".format)) for one in (key, bare))
            and not self._may_be_extra(key)
            and not (_is_spare_master(key, entry) and bare.rpartition(".")[0] in parameters)
            # Nor a tensor without elements: no rank reads it, so requests for it cannot be seen, and nothing is lost.
            and not (isinstance(entry, TensorStorageMetadata) and 0 in entry.size)
        ]

    def _as_stored(self, key: str, value: Any, entry: object) -> Any:
        """Return ``value``, or its memory in one dimension if the state was saved in one (Megatron-LM's pull 4623)."""
        if not isinstance(value, Tensor) or value.dim() == 1 or ".state." not in f".{key}":
            return value
        shape, memory = (value.numel(),), memory_of(value)
        if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != shape or not memory.is_contiguous():
            return value
        flat = memory.view(-1)
        if is_dtensor(value):
            if (flat_range := flat_range_of(chunks_of(value))) is None:  # this rank has several ranges
                return value
            flat = over_part(value, ShardTensor(flat, chunks_of(shape, flat_range)), shape)
        self._shaped[key] = value
        return flat

    def _unfit(self, key: str, value: Any, entry: object) -> Iterator[Found]:
        if isinstance(value, Tensor) and isinstance(entry, TensorStorageMetadata):
            dtype, stored = local_shard(value).dtype, entry.properties.dtype
            if dtype != stored and not self._may_be_cast(key):
                yield Problem.DTYPE, key, f"{dtype}, saved as {stored}"
            if unfit := why_misread(value):
                yield Problem.DESTINATION, key, unfit
        elif isinstance(value, Tensor):
            yield Problem.KIND, key, "a tensor, saved as an object"
        elif isinstance(entry, TensorStorageMetadata):
            yield Problem.KIND, key, "a number or object, saved as a tensor"

    def _unreadable(self, items: Iterable[ReadItem]) -> Iterator[Found]:
        """Yield missing and short files, which DCP would notice only after it has overwritten a part."""
        if self.reader is None:
            return
        metadata = self.reader.fs.concat_path(self.reader.path, ".metadata")
        if not getattr(self.reader, "use_collectives", True) and self.reader.fs.exists(metadata):
            yield Problem.FILE, str(metadata), "damaged, and what was read is of one rank, perhaps of an earlier save"
        needed_bytes: dict[str, int] = defaultdict(int)  # by file
        for item in items:
            info = self.reader.storage_data.get(item.storage_index)
            if info is None:
                yield Problem.FILE, item.storage_index.fqn, "the metadata does not say where it is"
            else:
                needed_bytes[info.relative_path] = max(info.offset + info.length, needed_bytes[info.relative_path])
        for path, needed in needed_bytes.items():
            try:
                with self.reader.fs.create_stream(self.reader.fs.concat_path(self.reader.path, path), "rb") as stream:
                    found_bytes = stream.seek(0, io.SEEK_END)
                if found_bytes < needed:
                    yield Problem.FILE, path, f"{found_bytes} bytes of at least {needed}"
            except OSError as error:
                yield Problem.FILE, path, "it is not there" if isinstance(error, FileNotFoundError) else str(error)


@tells(
    "load(state_dict, checkpoint_id=path)",
    strict="planner=LoadPlanner(allow_missing=True, allow_extra=True) loads what there is.",
    options="They are for get_optimizer_state_dict(), which has them as arguments of their own.",
)
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Loaded:
    """Load as ``torch.distributed.checkpoint.load``, whose arguments these are, with a :class:`LoadPlanner`.

    Loads in place into the tensors of ``state_dict``, and replaces its other values. With a ``FileSystemReader``, also
    one of fsspec, every file that this rank needs is checked first: it exists, and is long enough. ``checkpoint_tools``
    finds damaged bytes within a file: seal a checkpoint after the save, and verify it before the load.

    Returns:
        The keys that were filled, and those that kept their values.

    Raises:
        TypeError: ``planner`` is no :class:`LoadPlanner`, or ``state_dict`` no dict.
        ValueError: the checkpoint does not fit, with what differs; nothing has changed on any rank.
        FileNotFoundError, ...: one error on all ranks, of the type that the ranks' errors share, else a RuntimeError.
            The message says what was wrong on each rank, and whether something may have changed.
    """
    check_is(state_dict, dict, "load: expected a dict", "load(state_dict, checkpoint_id=path)")
    _check_where("load", storage_reader, StorageReader, checkpoint_id, process_group)
    check_choices("load", no_dist=no_dist)
    planner = planner or LoadPlanner()
    says = "load: planner must be a LoadPlanner (dcp.load takes any other)"
    check_is(planner, LoadPlanner, says, "load(state_dict, checkpoint_id=path, planner=LoadPlanner())")
    if storage_reader is None and checkpoint_id is not None:
        storage_reader = storage_reader_for(checkpoint_id)
    # The reader of safetensors takes metadata from the data files, which it opens as a whole.
    if isinstance(storage_reader, FileSystemReader) and not isinstance(storage_reader, HuggingFaceStorageReader):
        planner.reader = storage_reader
    where: Any = {"checkpoint_id": checkpoint_id, "storage_reader": storage_reader}
    try:
        state_dict_loader.load(state_dict, planner=planner, process_group=process_group, no_dist=no_dist, **where)
    except CheckpointException as error:
        raise _told("load", error, storage_reader) from None
    finally:
        planner.reader = None  # not for the planner's next load
    for key in planner.taken_out:
        state_dict.pop(key, None)
    for path in (planner.mappings[key] for key in planner.added):
        if len(path) == 1:  # DCP gives the planner a copy of the outermost dict
            state_dict[str(path[0])] = planner.original_state_dict[str(path[0])]
    return planner.loaded


class SavePlanner(default_planner.DefaultSavePlanner):
    """A DCP save planner that refuses saves that would be silently wrong.

    It refuses, with the keys and before anything is written: DTensors that DCP would write as other parts than they
    are; different tensors that disjoint meshes have under one key and offset, of which DCP keeps one. Compared are
    DTensors on meshes that do not span all ranks (stacked experts), and plain tensors with dimensions in the state of
    an optimizer (next to ``param_groups``). Digests (:func:`digest_of`) travel in the plans: no collective is added.
    """

    keeps_one_chunk = False  # per tensor and rank, as the writer of safetensors does
    consolidates = False  # the same writer, which then writes zeros for tensors without dimensions

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._made_by = threading.get_ident()  # an asynchronous save plans the staged dict in another thread

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Set up as DCP does; raise if this is a load."""
        if isinstance(storage_meta, Metadata):
            raise TypeError(
                "SavePlanner plans saves. Write dcp.load(state_dict, checkpoint_id=path, planner=LoadPlanner())."
            )
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return DCP's plan if all uneven DTensors and slices carry their chunks, and the writer keeps all chunks."""
        wrong = [f"{key} ({why})" for key, value in self.state_dict.items() if (why := why_misread(value))]
        if wrong:
            raise ValueError(
                f"nothing has been written: DCP would save {len(wrong)} tensors as other parts than they are: "
                f"{listed(wrong)}. get_optimizer_state_dict and with_parameter_chunks(model, state_dict) say which"
            )
        dtensors = {key: value for key, value in self.state_dict.items() if self.keeps_one_chunk and is_dtensor(value)}
        ragged = [key for key, value in dtensors.items() if len(chunks_of(value).chunks) > 1]
        if ragged:
            raise ValueError(
                "nothing has been written: HuggingFaceStorageWriter keeps one chunk per tensor and rank, and would "
                f"silently drop the others of {listed(ragged)}. Save with FileSystemWriter"
            )
        entries = self.state_dict.items() if self.consolidates else ()
        scalars = [key for key, value in entries if isinstance(value, Tensor) and not value.dim()]
        if scalars:
            raise ValueError(
                "nothing has been written: consolidated by HuggingFaceStorageWriter, tensors without dimensions are 0: "
                f"{listed(scalars)}. Leave out enable_consolidation, or save with FileSystemWriter"
            )
        if self._made_by == threading.get_ident():
            for engine in refuse_templates(self.state_dict, offloaded):
                engine.wait_all_home(may_write=False)  # later steps may have left state on the device
        plan = super().create_local_plan()
        # Mesh and digest of each chunk that ranks outside of the tensor's mesh may offer as well.
        roots = tuple({found[0] for key in self.state_dict if (found := _group_entry(key)) is not None})
        offers: dict[_Place, tuple[int, bytes]] = {}
        for item in self.plan.items:
            key, value = item.index.fqn, self.state_dict[item.index.fqn]
            is_compared = is_dtensor(value) or (isinstance(value, Tensor) and value.dim() and key.startswith(roots))
            if is_compared and may_be_another_ranks(value):
                digest = digest_of(self.lookup_object(item.index))
                offers[key, tuple(item.index.offset or ())] = first_rank(value), digest
        return dataclasses.replace(plan, planner_data=(plan.planner_data, offers))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return DCP's plan, on the coordinator, if disjoint meshes have equal tensors under equal keys and offsets."""
        if not any(plan.items or not plan.usable for plan in all_plans):  # DCP sends an unchanged plan as an empty one
            raise ValueError("nothing has been written: the state dict is empty. Write {'model': model.state_dict()}.")
        offers: dict[_Place, list[tuple[int, bytes, int]]] = defaultdict(list)  # mesh, digest, rank
        for rank, plan in enumerate(all_plans):
            for place, (mesh, digest) in plan.planner_data[1].items():
                offers[place].append((mesh, digest, rank))
        ranks: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # by key and mesh
        for (key, _), found in offers.items():
            meshes, digests, _ = map(set, zip(*found, strict=True))
            if len(meshes) > 1 and len(digests) > 1:  # replicas within one mesh are not compared
                for mesh, _, rank in found:
                    ranks[key][mesh].add(rank)
        if ranks:
            named = (f"{key} (ranks {' and '.join(str(sorted(of[mesh])) for mesh in of)})" for key, of in ranks.items())
            raise ValueError(
                f"nothing has been written: ranks have different tensors under {len(ranks)} keys, and a checkpoint "
                f"keeps one of each: {listed(named)}. Experts: put the expert-parallel rank into the keys, or save "
                "each mesh with its process_group and a checkpoint_id of its own. State of sharded parameters: let the "
                "optimizer keep a DTensor on the parameter's mesh."
            )
        return super().create_global_plan([dataclasses.replace(p, planner_data=p.planner_data[0]) for p in all_plans])


def digest_of(chunk: Tensor) -> bytes:
    """Hash the shape, the dtype and up to 1,024 elements of ``chunk``, on any device; equal bits give equal hashes.

    Larger chunks are sampled at the same places for each shape: the first 64 elements, and others spread over rows and
    columns. A difference elsewhere is missed; tensors that were initialised or trained apart differ everywhere.
    """
    found = hashlib.blake2b(repr((*chunk.shape, chunk.dtype)).encode(), digest_size=16)
    for leaf in leaves_of(chunk):
        numel = leaf.numel()
        at = torch.arange(min(numel, _SAMPLED), device=leaf.device)
        if numel > _SAMPLED:  # steps of the golden ratio, spread for any number of columns
            at = torch.where(at < _FIRST, at, at * (numel * 618_033_989 // 10**9 | 1) % numel)
        sampled = torch.take(leaf.detach().view(_BITS.get(leaf.itemsize, leaf.dtype)), at).cpu()
        found.update(ctypes.string_at(sampled.data_ptr(), sampled.nbytes))
    return found.digest()


@tells(
    "save(state_dict, checkpoint_id=path)",
    planner="The planner is SavePlanner; torch.distributed.checkpoint.save takes any other.",
    options="They are for get_optimizer_state_dict(), which has them as arguments of their own.",
)
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save as ``torch.distributed.checkpoint.save``, whose arguments these are, with :class:`SavePlanner`.

    A ``HuggingFaceStorageWriter`` keeps one chunk per tensor and rank: it is refused where it would drop others.

    Raises:
        TypeError: ``state_dict`` is no dict.
        ValueError: a refusal of the planner, with the keys; nothing has been written.
        OSError, ...: as :func:`load`; the cause is the first error of a rank.
    """
    check_is(state_dict, Mapping, "save: expected a dict", "save(state_dict, checkpoint_id=path)")
    _check_where("save", storage_writer, StorageWriter, checkpoint_id, process_group)
    check_choices("save", no_dist=no_dist)
    planner = SavePlanner()
    planner.keeps_one_chunk = isinstance(storage_writer, HuggingFaceStorageWriter)
    planner.consolidates = bool(getattr(storage_writer, "enable_consolidation", False))
    where: Any = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "process_group": process_group}
    try:
        return cast(Metadata, state_dict_saver.save(state_dict, planner=planner, no_dist=no_dist, **where))
    except CheckpointException as error:
        raise _told("save", error, storage_writer, checkpoint_id) from next(iter(error.failures.values()))[0]


def _check_where(function: str, storage: object, kind: type[Any], checkpoint_id: object, group: object) -> None:
    line, name = f"{function}(state_dict, checkpoint_id=path)", kind.__name__
    says = f"{function}: process_group must be a torch.distributed.ProcessGroup"  # an int: a group of others
    check_is(group, dist.ProcessGroup | int | None, says, "process_group=torch.distributed.new_group(backend='gloo')")
    check_is(storage, kind | None, f"{function}: storage_{name[7:].lower()} must be a {name}", line)
    if storage is None:
        check_is(checkpoint_id or None, str | os.PathLike, f"{function}: checkpoint_id must be a path", line)


def _matcher(name: str, allowed: Allowed) -> Callable[[str], bool]:
    given: Any = ("*",) if allowed is True else () if allowed in (None, False) else allowed
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{name}: expected a bool or a sequence of patterns such as ['model.head.*'], got {allowed!r}")
    return lambda key: any(fnmatchcase(key, pattern) for pattern in patterns)


def _is_spare_master(key: str, value: object) -> bool:
    """Return whether ``key`` is a master that can be rebuilt from its parameter."""
    dtype = getattr(getattr(value, "properties", value), "dtype", None)  # stored, or requested
    return key.endswith(f".{MASTER}") and isinstance(dtype, torch.dtype) and can_rebuild(dtype)


def _group_entry(key: str) -> tuple[str, str] | None:
    """Split a param-group key into the prefix of its optimizer's state and the rest; ``None`` for other keys."""
    dotted = f".{key}"
    groups = _GROUPS.search(dotted)
    return None if groups is None else (f"{dotted[: groups.start()]}.state."[1:], dotted[groups.end() :])


def _uncovered(requested: Mapping[str, Any], items: Iterable[ReadItem]) -> Iterator[Found]:
    """Yield tensors with elements that DCP's plan writes never or twice."""
    chunks: dict[str, dict[object, list[ReadPart]]] = defaultdict(lambda: defaultdict(list))  # by destination
    for item in items:
        if item.type == LoadItemType.TENSOR and 0 not in item.lengths:
            part = ReadPart(tuple(item.dest_offsets), tuple(item.lengths), tuple(item.storage_index.offset or ()))
            chunks[item.dest_index.fqn][item.dest_index.offset].append(part)
    for key, value in requested.items():
        if not isinstance(value, Tensor):
            continue
        covered = sum(math.prod(part.sizes) for parts in chunks[key].values() for part in parts)
        needed = local_shard(value).numel()
        if overlap := next(filter(None, map(overlapping, chunks[key].values())), None):
            yield Problem.OVERLAP, key, f"by the stored chunks at {overlap[0].stored_at} and {overlap[1].stored_at}"
        elif covered != needed:  # without overlaps, equal counts mean that all are covered
            yield Problem.HOLE, key, f"{covered} of the {needed} elements that this rank needs"


def _told(function: str, error: CheckpointException, storage: Any, path: Any = None) -> BaseException:
    """Return one error for the errors of all ranks, of their common type, with each error's text and the path."""
    if not all(isinstance(cause, Exception) for cause, _ in error.failures.values()):
        return error  # an interrupt stays one
    ranks: dict[str, list[int]] = defaultdict(list)
    types: set[type[Any]] = set()
    path = path or getattr(storage, "path", type(storage).__name__)
    for rank, (cause, _) in sorted(error.failures.items()):
        text, cls = str(cause) or type(cause).__name__, type(cause)
        if function == "load" and _NO_METADATA.search(text):  # torch's sentence differs between releases
            text, cls = "there is no .metadata. Give the folder that dcp.save() was given.", FileNotFoundError
            if isinstance(storage, FileSystemReader) and storage.fs.exists(f"{storage.path}/.metadata"):
                text, cls = "its .metadata is damaged. Copy it again, or load another checkpoint.", ValueError
        ranks[text].append(rank)
        types.add(cls)
    is_plain = len(types) == 1 and types < {ValueError, TypeError, MemoryError, *_OS_ERRORS}
    texts = [text if len(ranks) == 1 else f"on ranks {of}: {text}" for text, of in ranks.items()]
    told, after = f"{function}: {path}: " + "\n".join(texts), _AFTER.get(error.args[0])
    return (types.pop() if is_plain else RuntimeError)(f"{told.removesuffix('.')}. {after}" if after else told)


def _refusal(found: Iterable[Found]) -> ValueError:
    """Return one error for all problems, grouped by kind."""
    by_problem: dict[Problem, list[str]] = defaultdict(list)
    for problem, key, detail in found:
        by_problem[problem].append(f"{key} ({detail})" if detail else key)
    lines = [f"- {len(texts)} {problem.value.format(listed(texts))}" for problem, texts in by_problem.items()]
    return ValueError("\n".join(["this checkpoint is not loaded, and nothing has been changed:", *lines]))


def _copied(value: Any) -> Any:
    """Copy dicts and lists, but not the values in them."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _place(root: Any, path: Sequence[Any]) -> tuple[Any, Any]:
    """Return the container and the key of the value at ``path``; DCP has turned the keys in ``path`` into strings."""
    container = key = None
    for step in path:
        is_renamed = isinstance(root, Mapping) and step not in root
        container, key = root, next(own for own in root if str(own) == step) if is_renamed else step
        root = root[key]
    return container, key
