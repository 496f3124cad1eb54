"""Read files of verl and SkyRL, one ``torch.save`` file per rank of FSDP, as one checkpoint.

::

    model_world_size_2_rank_{0,1}.pt ──unpickle──▶ DTensor, ShardedTensor: rectangles of each rank ───┐
    optim_world_size_2_rank_{0,1}.pt ──unpickle──▶ the same by number ──names──▶ by FQN ──────────────┴▶ Checkpoint

Nothing that a pickle names is run. Placements and mesh give each rank's rectangles. Shapes and dtypes of all ranks must
be equal, and copies of a value are compared bit by bit. Until ranks are joined, a *placeholder* on the meta device
stands for a rank's tensor: ``chunks`` are ranges of the rank's file; ``position`` is the shard's number, or None.
"""

import contextlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_offload.checkpoint import chunks_of
from fsdp_offload.checkpoint.chunks import contiguous_strides

from ..core.regions import Shape, replaced
from ..core.text import CheckpointError, is_count, natural_order, shortened, some_of
from ..core.values import MAX_VALUES, flattened, has_more_values, same_values
from .checkpoint import Checkpoint, StoredChunk, StoredObject, StoredTensor
from .items import TENSOR_NAMES, Archive, DamagedError, crc32, layout_of, tensor_of
from .storage import Folder, files_without_metadata, open_folder
from .unpickle import ForbiddenNameError, PickledObject, allowed, unpickle

_FILE = re.compile(r"(model|optim)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_SHARDED = allowed("sharded")


def is_rank_files(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder has files of FSDP ranks, and no metadata of DCP."""
    return any(map(_FILE.fullmatch, files_without_metadata(path)))


def open_rank_files(path: str | os.PathLike[str], names: Sequence[Any] | None = None) -> Checkpoint:
    """Read the files of all ranks. ``names``: of ``--names``, the parameters that the optimizer numbers."""
    folder = open_folder(path)
    there = {match[0]: match for name in folder.files() if (match := _FILE.fullmatch(name))}
    if len(worlds := {int(match[2]) for match in there.values()}) != 1:
        raise CheckpointError(f"{folder.path} has files of {sorted(worlds)} ranks; keep those of one save")
    kinds, (world,) = ["model", *["optim"] * any(match[1] == "optim" for match in there.values())], worlds
    files = [[f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in range(world)] for kind in kinds]
    copied, present = [name.replace("model", "extra_state") for name in files[0]], {*folder.files()}
    needed = itertools.chain(*files, copied if present & {*copied} else ())
    if missing := [name for name in needed if name not in present]:
        raise CheckpointError(f"{folder.path} has no {some_of(missing, 3)}; every rank's file is needed, fetch them")
    model, *optim = ([_read(folder, rank, name) for rank, name in enumerate(each)] for each in files)
    trees, empty = [{"model": state} for state in model], Checkpoint(folder.path, folder, {}, {}, {}, (), ())
    if not optim:
        empty = replace(empty, notes=("there are no files of an optimizer's state",))
    with told(f"the state in {folder.path}"):
        if optim and any(optim[0]):  # without an optimizer, SkyRL writes empty state dicts
            by_fqn = _Optimizer(folder, model, optim[0]).by_fqn(names)
            trees = [{**tree, "optimizer": state} for tree, state in zip(trees, by_fqn, strict=True)]
        return _with(replace(empty, key_prefix="model."), trees, [*itertools.chain(*files)])


def with_optimizer(checkpoint: Checkpoint, file: str, names: Sequence[Any]) -> Checkpoint:
    """Add Trainer's optimizer state, a ``torch.save`` file by parameter number, to a checkpoint of safetensors."""
    prefix, keys = checkpoint.key_prefix, [key for key in checkpoint.tensors if key in checkpoint.model_keys]
    weights = {key.removeprefix(prefix): _placeholder(checkpoint.tensors[key].shape, None, ()) for key in keys}
    where, state = f"{checkpoint.path}/{file}", _read(checkpoint.folder, 0, file)
    with told(where):
        (named,) = _Optimizer(checkpoint.folder, [weights], [state], where).by_fqn(names)
        return _with(checkpoint, [{"optimizer": named}], [file])


def _with(checkpoint: Checkpoint, trees: Sequence[dict[str, Any]], files: Sequence[str]) -> Checkpoint:
    """Return the checkpoint with the joined state dicts of all ranks added to it."""
    by_path = [dict(flattened(tree)) for tree in trees]
    at = {".".join(map(str, path)): path for each in by_path for path in each}
    if len(at) < len({path for each in by_path for path in each}):
        raise DamagedError("two values have one name")
    if taken := at.keys() & {*checkpoint.tensors, *checkpoint.objects}:
        raise CheckpointError(f"{checkpoint.path} has {min(taken)} already, next to {files[0]}; move that away")
    found = {
        key: _joined(
            checkpoint.folder, key, {rank: own[at[key]] for rank, own in enumerate(by_path) if at[key] in own}, files[0]
        )
        for key in sorted(at, key=natural_order)
    }
    tensors = {key: value for key, value in found.items() if isinstance(value, StoredTensor)}
    objects = {key: value for key, value in found.items() if isinstance(value, StoredObject)}
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **tensors},
        objects={**checkpoint.objects, **objects},
        paths={**checkpoint.paths, **at},
        own_files=(*(checkpoint.own_files or ()), *files),
        model_keys=checkpoint.model_keys.union(key for key in tensors if at[key][0] == "model"),
        archives=frozenset(files),
    )


def _joined(folder: Folder, key: str, of_ranks: Mapping[int, Any], file: str) -> StoredTensor | StoredObject:
    """Join the parts that all ranks have of a value. ``check_coverage`` checks later that they cover the tensor."""
    (first_rank, first), *others = of_ranks.items()
    known = {chunk[:2]: (first_rank, chunk) for chunk in getattr(first, "chunks", ())}
    for rank, own in others:
        is_tensor, other = isinstance(first, Tensor) and isinstance(own, Tensor), first_rank
        is_same = (own.shape, own.dtype) == (first.shape, first.dtype) if is_tensor else same_values(first, own)
        for chunk in own.chunks if is_tensor and is_same else ():
            other, one = known.setdefault(chunk[:2], (rank, chunk))
            is_same = is_same and (one is chunk or folder.view(*one.place) == folder.view(*chunk.place))
        if not is_same:
            raise CheckpointError(f"{folder.path}: {key} differs between ranks {other} and {rank}: files of two saves?")
    if not isinstance(first, Tensor):
        torch.save(first, buffer := io.BytesIO())
        return StoredObject(file, 0, 0, buffer.getvalue())
    chunks = sorted(chunk for _, chunk in known.values())
    kept = tuple(chunk for chunk in chunks if chunk.numel) or (*chunks[:1],)
    return StoredTensor(key, tuple(first.shape), first.dtype, kept)


@contextlib.contextmanager
def told(where: str) -> Iterator[None]:
    """Turn any exception that unexpected bytes cause into a CheckpointError about ``where``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) and not isinstance(error, ForbiddenNameError):
            raise
        what = f"it asks for {error}, which was not run" if isinstance(error, ForbiddenNameError) else str(error)
        what = what if isinstance(error, DamagedError | CheckpointError) else f"{type(error).__name__}: {what}"
        raise CheckpointError(f"{where} cannot be understood ({shortened(what)}); use another checkpoint") from error


def _read(folder: Folder, rank: int, name: str) -> dict[str, Any]:
    with told(f"{folder.path}/{name}"):
        reading = Reading(folder, name, _SHARDED, rank)
        return dict(reading.plain(reading.pickled))


class Reading:
    """Reads one file of a state dict, whose pickle may name nothing but tensors and ``names``."""

    def __init__(self, folder: Folder, file: str, names: Mapping[str, Set[str]], rank: int = 0) -> None:
        self.file, self.rank, self.archive = file, rank, Archive(folder.view(file, 0, folder.size_bytes(file)))
        self.archive.read_all()
        both = {
            name: names.get(name, frozenset()) | TENSOR_NAMES.get(name, frozenset()) for name in (*names, *TENSOR_NAMES)
        }
        self.pickled: Any = unpickle(self.archive.pickled(), both)
        if not isinstance(self.pickled, dict) or has_more_values(self.pickled, MAX_VALUES):
            raise DamagedError(f"it is no state dict, or has more than {MAX_VALUES:,} values")

    def plain(self, value: Any) -> Any:
        """Return ``value`` with a placeholder for each tensor; raise if it has more than tensors and plain values."""
        if isinstance(value, dict):
            return {key: self.plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.plain, value))
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return value
        if isinstance(value, PickledObject) and value.name == "_rebuild_from_type_v2":
            _, kind, _, state = value.arguments
            if kind.name in ("DTensor", "ShardedTensor"):
                return self._of_dtensor(_slots(state)) if kind.name == "DTensor" else self._of_shards(*state[:3])
        chunk = self._local(value)
        return _placeholder(chunk.sizes, chunk.bare_dtype, (chunk,))

    def _local(self, value: Any) -> StoredChunk:
        """Return a tensor's range in this file as a chunk, at offsets 0."""
        if (tensor := tensor_of(value)) is None:
            raise DamagedError(f"a {getattr(value, 'name', type(value).__name__)} where a tensor is expected")
        start = layout_of(self.archive, tensor).start_bytes
        if start is None:
            raise DamagedError("the elements of a tensor are not row by row, or of another byte order")
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        return StoredChunk((0,) * len(tensor.shape), tensor.shape, self.file, start, nbytes, tensor.dtype)

    def _part(self, local: Any, offsets: Any, sizes: Any, dtype: torch.dtype) -> StoredChunk:
        chunk = self._local(local)
        if chunk.sizes != _counts(sizes) or chunk.bare_dtype != dtype:
            raise DamagedError(
                f"a part is {chunk.bare_dtype} of {chunk.sizes}, and {dtype} of {tuple(sizes)} is expected"
            )
        return chunk._replace(offsets=_counts(offsets))

    def _of_dtensor(self, slots: Mapping[str, Any]) -> Any:
        spec = slots["_spec"].state
        shape, _, dtype = spec["tensor_meta"].arguments
        offsets, sizes, position = [0] * len(_counts(shape)), [*shape], None
        for (at, ranks), placement in zip(self._coordinates(spec["mesh"].state), spec["placements"], strict=True):
            if placement.name == "Shard":  # the cuts of torch.chunk
                dim, position = placement.state["dim"], (position or 0) * ranks + at
                rows = -(-sizes[dim] // ranks)
                start = min(at * rows, sizes[dim])
                offsets[dim], sizes[dim] = offsets[dim] + start, min(rows, sizes[dim] - start)
            elif placement.name != "Replicate":
                raise DamagedError(f"a tensor is placed as {placement.name}, and only Shard and Replicate are known")
        if any([*each.arguments[1]] != sorted(each.arguments[1]) for each in spec.get("shard_order") or ()):
            raise DamagedError("a tensor is sharded by the dimensions of its mesh in another order")
        return _placeholder(shape, dtype, (self._part(slots["_local_tensor"], offsets, sizes, dtype),), position)

    def _coordinates(self, mesh: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return this rank's index along each dimension of a mesh, and the dimension's size."""
        at, found = _counts(mesh["_coordinate_on_dim"]), tensor_of(mesh.get("mesh"))
        if found is not None:  # torch before 2.9
            axes, ranks = [*zip(found.shape, contiguous_strides(found.shape), strict=True)], mesh["_flatten_mesh_list"]
        else:
            layout, ranks = mesh["_layout"].state, mesh["_flatten_rank_map"]
            pairs = [each.state for each in layout["axes"]] if "axes" in layout else [layout]
            axes = [
                axis for each in pairs for axis in zip(_counts(each["shape"]), _counts(each["stride"]), strict=True)
            ]
        place = sum(index * stride for index, (_, stride) in zip(at, axes, strict=True))
        if any(index >= size for index, (size, _) in zip(at, axes, strict=True)) or ranks[place] != self.rank:
            raise DamagedError(f"its mesh does not have rank {self.rank} at {at}")
        return [(index, size) for index, (size, _) in zip(at, axes, strict=True)]

    def _of_shards(self, shards: Sequence[Any], metadata: Any, group: Any) -> Any:
        """Return the placeholder of a ShardedTensor, of which this rank may have no shard."""
        shape, dtype = metadata.state["size"], metadata.state["tensor_properties"].state[0]
        if group.state["global_rank"] != self.rank:
            raise DamagedError(f"it is of rank {group.state['global_rank']}, and not of {self.rank}")
        chunks = []
        for slots in (_slots(shard.state) for shard in shards):
            own = _slots(slots["metadata"].state)
            chunks.append(self._part(slots["tensor"], own["shard_offsets"], own["shard_sizes"], dtype))
        return _placeholder(shape, dtype, tuple(chunks), *_counts(group.state["local_rank"]))


def _placeholder(shape: Any, dtype: Any, chunks: tuple[StoredChunk, ...], position: int | None = None) -> Any:
    made: Any = torch.empty(_counts(shape), dtype=dtype, device="meta")
    made.chunks, made.position = chunks, position
    return made


def _slots(state: Any) -> dict[str, Any]:
    """Return the attributes in a pickled object's state, which is a tuple of dicts if its class has slots."""
    return {name: v for each in (state if isinstance(state, tuple) else (state,)) for name, v in (each or {}).items()}


def _counts(values: Any) -> Shape:
    """Return sizes, offsets or places in a mesh (one number, or several) as a tuple."""
    counts = tuple(values) if isinstance(values, tuple | list) else (values,)
    if not all(map(is_count, counts)):
        raise DamagedError("a size, an offset or a place in a mesh is no number")
    return counts


# The optimizer's numbers ----------------------------------------------------------------------------------------------

# Each param group lists some of model.named_parameters(), in order. So numbers can be named if there is only one way to
# deal out the names to the groups, in order and with fitting shapes. Names that are left are of frozen or tied weights.

Need = frozenset[Shape] | int | None  # shapes, or number of elements, that a parameter's state has; None: no state
_MOST_WAYS = 20_000  # limit of partial ways that are followed at the same time

_HOW = (
    "give --names FILE, a JSON list of the names of the optimizer's parameters in its order, which has no frozen ones "
    "(of model.named_parameters(), as a rule), or such a list for each group"
)


def read_names(file: Path | None) -> list[Any] | None:
    """Read the file of ``--names``: a list of names, or of lists of names; None without a file."""
    try:
        found = json.loads(file.read_text()) if file else None
        flat = [name for each in found or () for name in (each if isinstance(each, list) else [each])]
        if found is not None and not (flat and isinstance(found, list) and len({*map(str, flat)}) == len(flat)):
            raise ValueError("no list, or a name twice")
        return found
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} does not name parameters ({error}); {_HOW}") from error


def _ways(groups: Sequence[Sequence[Need]], shapes: Mapping[str, Shape]) -> tuple[int, list[list[str]]]:
    """Deal out the names to the groups in order; return the number of ways, two for more, and one of the ways."""
    spare, ends = len(shapes) - sum(map(len, groups)), tuple(map(len, groups))
    live: dict[Shape, tuple[int, Any]] = {(0,) * len(groups): (1, None)}  # names per group → ways, one of them
    for done, (name, shape) in enumerate(shapes.items()):
        following: dict[Shape, tuple[int, Any]] = {}
        for at, (count, chosen) in live.items():
            steps: list[tuple[Shape, Any]] = [(at, chosen)] if done - sum(at) < spare else []
            for number, needs in enumerate(groups):
                need = needs[at[number]] if at[number] < ends[number] else -1
                if need is None or (need == math.prod(shape) if isinstance(need, int) else shape in need):
                    steps.append((replaced(at, number, at[number] + 1), (chosen, number, name)))
            for now, how in steps:
                following[now] = (min(following.get(now, (0, None))[0] + count, 2), how)
        live = following
        if len(live) > _MOST_WAYS:
            return 2, []
    ways, chosen = live.get(ends, (0, None))
    found: list[list[str]] = [[] for _ in groups]
    while chosen:
        chosen, number, name = chosen
        found[number].insert(0, name)
    return ways, found


class _Optimizer:
    """Gives names to the numbered optimizer state of all ranks."""

    def __init__(self, folder: Folder, model: Sequence[Any], states: Sequence[Any], where: str = "") -> None:
        self.folder, self.where, self.states = folder, where or folder.path, states
        self.groups = [[*group["params"]] for group in states[0]["param_groups"]]
        self.numbers = [number for group in self.groups for number in group]
        known = {number for each in states for number in each["state"]}
        if not known <= {*self.numbers} or len({*self.numbers}) < len(self.numbers):
            raise DamagedError("a parameter with state is in no param group, or one is in two")
        weights = _tensors(model[0])
        self.sharded = {name: value for name, value in weights.items() if value.position is not None}
        self.shapes = {name: tuple(value.shape) for name, value in (self.sharded or weights).items()}
        self.held = {n: [_tensors(each["state"].get(n, {})).values() for each in states] for n in self.numbers}
        found = [value for by_rank in self.held.values() for own in by_rank for value in own if value.shape]
        self.is_flat = bool(self.sharded and found) and all(v.position is None and v.dim() == 1 for v in found)
        self.positions = [max((v.position or 0 for v in _tensors(each).values()), default=0) for each in model]
        self.begins = dict.fromkeys(self.shapes, 0)  # name → where the parameter begins in its flat parameter

    def by_fqn(self, names: Sequence[Any] | None) -> list[Any]:
        """Return the state dict of each rank, with FQNs in place of numbers."""
        shapes = {n: frozenset(tuple(v.shape) for own in held for v in own) or None for n, held in self.held.items()}
        units = self._flat_units(names) if self.is_flat else self._units(names, shapes)
        renamed = []
        for rank, each in enumerate(self.states):
            state: dict[str, Any] = {}
            for n, entries in each["state"].items():
                state.update(self._cut(rank, n, units[n], entries) if self.is_flat else {units[n][0]: entries})
            groups = [{**g, "params": [name for n in g["params"] for name in units[n]]} for g in each["param_groups"]]
            renamed.append({**each, "state": state, "param_groups": groups})
        return renamed

    def _units(self, names: Sequence[Any] | None, needs: Mapping[Any, Need]) -> dict[Any, list[str]]:
        """Map each number to its one name, by ``_ways``; ``names``: the user's, as one list or as a list per group."""
        groups = [[needs[n] for n in group] for group in self.groups]
        lists = [each if isinstance(each, list) else [each] for each in names or ()]
        flat = [name for each in lists for name in each]
        if unknown := [name for name in flat if name not in self.shapes]:
            raise CheckpointError(
                f"--names has {some_of(unknown, 3)}, and {self.where} has no such weights; name its weights"
            )
        if names and isinstance(names[0], list):
            pairs = zip(groups, lists, strict=False)
            dealt = [_ways([own], {name: self.shapes[name] for name in given}) for own, given in pairs]
            fits = [*map(len, groups)] == [*map(len, lists)] and all(ways for ways, _ in dealt)
            ways, found = int(fits), lists
        else:
            ways, found = _ways(groups, {name: self.shapes[name] for name in flat} if names else self.shapes)
        if ways != 1:
            why = "several ways to name them fit" if ways else "the model's names and shapes do not fit"
            numbers = f"{sum(map(len, groups))} of them in groups of {[*map(len, groups)]}"
            why += f" ({len(flat)} names were given)" if names else ""
            raise CheckpointError(f"{self.where}: the optimizer has parameters by number, {numbers}, and {why}; {_HOW}")
        return dict(zip(self.numbers, ([name] for each in found for name in each), strict=True))

    def _flat_units(self, names: Sequence[Any] | None) -> dict[Any, list[str]]:
        """Map each number of FSDP1 to names: one parameter (use_orig_params), or a module's parameters in order."""
        self.numels = {number: [0] * (max(self.positions) + 1) for number in self.numbers}
        for number, held in self.held.items():
            for position, own in zip(self.positions, held, strict=True):
                self.numels[number][position] = max((value.numel() for value in own if value.shape), default=0)
        if any(len({*numels}) > 1 for numels in self.numels.values()):  # use_orig_params
            return self._units(names, {number: sum(numels) for number, numels in self.numels.items()})
        sizes, ranks = [each[0] for each in self.numels.values()], max(self.positions) + 1
        ways = [self._modules(order) for order in ([names] if names else [[*self.shapes], self._without_tied()])]
        totals = [[sum(math.prod(self.shapes.get(name, (0,))) for name in each) for each in way] for way in ways]
        fitting = [way for way, own in zip(ways, totals, strict=True) if [-(-total // ranks) for total in own] == sizes]
        if not fitting:
            raise CheckpointError(
                f"{self.where}: {len(sizes)} flat parameters of FSDP1 do not have the sizes of {len(ways[0])} modules; "
                "give --names FILE, a JSON list with a list of the names in each of them"
            )
        for each in fitting[0]:
            ends = itertools.accumulate(math.prod(self.shapes[name]) for name in each)
            self.begins.update(zip(each[1:], ends, strict=False))
        return dict(zip(self.numbers, fitting[0], strict=True))

    def _modules(self, order: Sequence[Any]) -> list[list[str]]:
        """Group names by layer, names outside of layers first; return lists of names as they are."""
        modules: dict[str, list[str]] = {"": []}
        for name in order if isinstance(order[0], str) else ():
            modules.setdefault((*re.findall(r"^(?:[^.\d][^.]*\.)+\d+\.", name), "")[0], []).append(name)
        return [each for each in modules.values() if each] or [*order]

    def _without_tied(self) -> list[str]:
        """List the weights; leave out tied matrices: those with shape and CRC-32 of an earlier one."""
        known: dict[Any, str] = {}
        for name, value in self.sharded.items():
            crcs = [crc32(self.folder.view(*chunk.place)) for chunk in value.chunks]
            known.setdefault((value.shape, *crcs) if value.dim() > 1 else name, name)
        return [*known.values()]

    def _cut(self, rank: int, number: Any, names: Sequence[str], entries: Mapping[str, Any]) -> dict[str, Any]:
        """Cut a rank's flat state of ``number`` into rectangles of its parameters ``names``; return state by name."""
        position, found = self.positions[rank], {name: {**entries} for name in names}
        first, numel = sum(self.numels[number][:position]), self.numels[number][position]
        for name, (entry, value) in itertools.product(names, _tensors(entries).items()):
            if not value.shape:
                continue
            (flat,), shape, begin = value.chunks, self.shapes[name], self.begins[name]
            if flat.numel != numel:
                raise DamagedError(f"{entry} of {number} has {flat.numel} elements, and other state {numel}")
            low, high = max(first, begin), min(first + numel, begin + math.prod(shape))
            size, chunks = value.dtype.itemsize, []
            for each in chunks_of(shape, (low - begin, high - begin)).chunks if low < high else ():
                start = flat.offset_bytes + (low - first + each.local_start) * size
                place = flat.file, start, math.prod(each.sizes) * size
                chunks.append(StoredChunk(each.offsets, each.sizes, *place, flat.bare_dtype))
            found[name][entry] = _placeholder(shape, value.dtype, tuple(chunks), position)
        return found


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
