"""State dicts of offloaded optimizers: the layout of ``torch.distributed.checkpoint.state_dict``, without its traps.

::

    optimizer.state ──names, masters, ragged shards──▶ nested ──▶ flattened      get_optimizer_state_dict
    any layout ──────────▶ by FQN ──▶ by parameter ──▶ load_state_dict          set_optimizer_state_dict

Every tensor in a state dict *is* a home in the arena (or a view of it): saving reads it and loading writes it where it
is, without the device and without a collective.

============================================  =========================================================================
torch's function                              this one
============================================  =========================================================================
KeyError after a forward without backward     finds the sharded parameters
runs a hidden step where there is no state    nothing is made up; ``for_load=True`` gives reserved homes to load into
casts and moves what is loaded                keeps dtypes; loaded bytes are where they belong already
a load that matched nothing trains from zero  is an error, as is one that filled a parameter's state only in part
``NotImplementedError`` when flattening       passes any value through
saves stale fp32 ``master_param``             leaves them out, and needs none in what it loads
============================================  =========================================================================
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..api.wrapped import is_wrapped, optimizers_in
from ..core.attached import Engine, engine_of, find_offloaded
from ..core.loading import check_loadable
from ..optimizers.masters import MASTER, is_duplicate
from ..state.layout import leaves_of
from ..state.mapping import OffloadedState
from ..state.store import UserState
from ..torch_compat.dtensor import is_dtensor, local_shard, over_local, version_of
from ..torch_compat.fully_shard import parameter_names
from .chunks import chunks_of, flat_range_of, says_its_chunks
from .layouts import LEFT_OUT, LeftOut, SavedByFqn, StateDict, as_fsdp_dtensor, by_fqn, flattened, with_names_of
from .rectangles import Shape, ShardChunks
from .shard_tensor import ShardTensor, needs_chunks, with_chunks
from .torch_private import canonical_fqn


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    for_load: bool = False,
    flatten_optimizer_state_dict: bool = False,
    cpu_offload: bool = False,
    fsdp_dtensor: bool = False,
) -> StateDict:
    """Return the state of offloaded optimizers by FQN, as ``torch.distributed.checkpoint.state_dict`` lays it out.

    Tensors are DTensors over host memory with the mesh and placements of their parameter: the homes themselves, valid
    until the next step. Waits for the last stores. Allocates no device memory and issues no collective. The keys are
    the same on every rank of a shard mesh, also where this rank's shard is empty.

    Args:
        model: the model whose parameters they have.
        optimizer: one offloaded optimizer, or several that share the model's parameters among them.
        for_load: also for state that does not exist yet, its reserved home (the content means nothing): what a fresh
            process gives to ``dcp.load`` and then to :func:`set_optimizer_state_dict`. Never save such a dict.
        flatten_optimizer_state_dict: ``{"state.{fqn}.{name}": ..., "param_groups.{fqn}.{entry}": ...}`` instead of
            ``{"state": {fqn: {name: ...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. Independent of the order
            of the groups.
        cpu_offload: copies in ordinary host memory, counters included, which no later step changes. torch's function
            makes such copies with ``StateDictOptions(cpu_offload=True)`` only of what is on the device, and so none.
        fsdp_dtensor: Megatron-LM's ``{"state": {fqn: {name: ...}}, "param_to_group_meta": {fqn: {entry: ...}}}``
            instead, as the ``optimizer`` of its ``fsdp_dtensor`` checkpoints.

    Raises:
        ValueError: an optimizer is not offloaded, or has a parameter that the model has not; two layouts at once; or
            copies were asked for to load into.
        RuntimeError: an exception has left the state half updated. ``for_load`` works all the same.
    """
    if for_load and cpu_offload:
        raise ValueError(
            "get_optimizer_state_dict: what is loaded into copies never arrives. Leave out cpu_offload=True with "
            "for_load=True: these tensors are in host memory as they are."
        )
    if flatten_optimizer_state_dict and fsdp_dtensor:
        raise ValueError("get_optimizer_state_dict: flatten_optimizer_state_dict and fsdp_dtensor are two layouts")
    fqns = _fqns_of(model)
    nested: StateDict = {"state": {}, "param_groups": []}
    for attached in _attached(optimizer, "get_optimizer_state_dict"):
        attached.check_names(fqns)
        states, groups = attached.for_load() if for_load else attached.saved()
        for param, state in states.items():
            nested["state"][fqns[param]] = _as_saved(param, _copied(state) if cpu_offload else state)
            for value in nested["state"][fqns[param]].values():
                if isinstance(value, Tensor):
                    LEFT_OUT.pop(value, None)  # what an earlier load did not find says nothing about the next one
        for group in groups:
            nested["param_groups"].append({**group, "params": [fqns[param] for param in group["params"]]})
    if fsdp_dtensor:
        return as_fsdp_dtensor(nested)
    return flattened(nested) if flatten_optimizer_state_dict else nested


def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
) -> None:
    """Load what :func:`get_optimizer_state_dict` gives, in any of its layouts, by FQN. Everything is checked first.

    State that was loaded in place stays where it is; other tensors are copied into their homes. Parameters may be in
    other groups than when they were saved, as long as those of one group bring the same hyperparameters. Their names
    may have ``module.`` in front a different number of times, as those of Megatron's optimizers have. A DTensor with
    the elements of a parameter in one dimension, of which this rank has just its part, is taken for state of it.

    Args:
        model: the model whose parameters they have.
        optimizer: one offloaded optimizer, or several.
        optim_state_dict: not changed.
        strict: refuse parameters of the optimizer that the state dict does not know, and the other way round. Without
            it the former keep the state they have, and the latter are ignored.

    Raises:
        ValueError: names or groups do not correspond; the load left a template of ``for_load=True`` untouched, or
            filled only a part of some parameter's state; state is missing, extra, or of another shape, dtype or
            sharding. Nothing has changed then, apart from what had been loaded in place.
    """
    fqns = _fqns_of(model)
    saved = with_names_of(by_fqn(optim_state_dict), fqns.values())
    known: set[str] = set()
    plans = []
    for attached in _attached(optimizer, "set_optimizer_state_dict"):
        attached.check_names(fqns)
        known.update(fqns[param] for param in attached.params)
        plans.append((attached, attached.by_parameter(fqns, saved, strict=strict)))
    extra = [fqn for fqn in (*saved.state, *saved.entries) if fqn not in known]
    if strict and extra:
        raise ValueError(
            f"set_optimizer_state_dict: the state dict has parameters that the optimizer has not: {_some(extra)}. Is "
            "it of another model? strict=False ignores them."
        )
    if len(plans) > 1:  # one alone checks before it changes anything
        for attached, state_dict in plans:
            check_loadable(attached.engine, attached.optimizer, state_dict)
    for attached, state_dict in plans:
        attached.optimizer.load_state_dict(state_dict)
        _offers.pop(attached.engine, None)


# Values --------------------------------------------------------------------------------------------------------------


def _as_saved(param: Tensor, state: UserState) -> dict[str, Any]:
    """The state of one parameter as a checkpoint has it."""
    carries = is_dtensor(param) and needs_chunks(param)
    saved = {}
    for name, value in state.items():
        if name == MASTER and isinstance(value, Tensor) and is_duplicate(param, value.dtype):
            continue
        if carries and isinstance(value, Tensor) and value.shape == param.shape:
            value = with_chunks(param, local_shard(value), chunks_of(param))
        saved[name] = value
    return saved


def _copied(state: UserState) -> UserState:
    return {
        name: over_local(value, local_shard(value).to("cpu", copy=True)) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _as_loaded(param: Tensor, value: Any) -> Any:
    """The value over plain local memory, as the optimizer has it."""
    local = local_shard(value) if isinstance(value, Tensor) else None
    if local is None or value is local:
        return value
    memory = local.local if isinstance(local, ShardTensor) else local
    if is_flat_state(param, value):
        return over_local(param, memory.view(local_shard(param).shape))
    if not isinstance(local, ShardTensor):
        return value
    own, carried = chunks_of(param), local.shard_chunks
    if own.global_shape != carried.global_shape or _rectangles(own) != _rectangles(carried):
        raise ValueError(
            f"set_optimizer_state_dict: state of shape {carried.global_shape} has {_rectangles(carried)} on this rank, "
            f"and its parameter of shape {own.global_shape} has {_rectangles(own)}. Load the checkpoint into what "
            "get_optimizer_state_dict(for_load=True) gives: that reshards."
        )
    return over_local(param, memory.view(local_shard(param).shape))


def _rectangles(part: ShardChunks) -> list[tuple[Shape, Shape]]:
    return [(chunk.offsets, chunk.sizes) for chunk in part.chunks if chunk.numel]


def is_flat_state(param: Tensor, value: Tensor) -> bool:
    """Return whether ``value`` has just this rank's elements of ``param``, in one dimension.

    So Megatron-LM's pull request 4623 keeps state on the host.
    """
    flat = local_shard(value)
    if not is_dtensor(value) or not is_dtensor(param) or value.shape != (param.numel(),) or param.dim() == 1:
        return False
    if flat.dim() != 1 or flat.numel() != local_shard(param).numel():
        return False
    wanted = flat_range_of(chunks_of(param))
    is_nominal = says_its_chunks(param) and not says_its_chunks(value)
    return wanted is not None and (is_nominal or flat_range_of(chunks_of(value)) == wanted)


# Optimizers ----------------------------------------------------------------------------------------------------------


class _Offer(NamedTuple):
    """A tensor handed out to load into, one with memory inside it, and the versions of both at that time.

    A load writes the inner one; ``copy_`` into a DTensor counts in the DTensor alone.
    """

    value: Tensor
    leaf: Tensor
    versions: tuple[int, ...]

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been written into it."""
        return self.versions == _versions(self.value, self.leaf)


_offers: "weakref.WeakKeyDictionary[Engine, dict[Tensor, dict[str, _Offer]]]" = weakref.WeakKeyDictionary()
"""Values that the last ``for_load=True`` of each engine handed out."""


@dataclass
class _Attached:
    """An offloaded optimizer."""

    optimizer: Optimizer
    engine: Engine
    params: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.params = [param for group in self.optimizer.param_groups for param in group["params"]]

    def check_names(self, fqns: Mapping[Tensor, str]) -> None:
        """Refuse parameters that have no FQN."""
        foreign = [self.engine.names.get(param, "?") for param in self.params if param not in fqns]
        if not all(isinstance(param, nn.Parameter) for param in self.params if param not in fqns):
            raise ValueError(
                f"{len(foreign)} tensors of the optimizer are not the model's parameters but copies or parts of them, "
                f"as those of Megatron's DistributedOptimizer ({foreign[0]}): they have no names and no shapes that a "
                "checkpoint could have. Save with that optimizer's own sharded_state_dict() or "
                "save_parameter_state(), which read the state in host memory."
            )
        if foreign:
            raise ValueError(
                f"{len(foreign)} parameters of the optimizer are not the model's: {_some(foreign)}. Give the model "
                "that it was built for; fully_shard exchanges a model's parameters, so build the optimizer after it."
            )

    def saved(self) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
        """State by parameter, and the param groups, through the optimizer's own ``state_dict`` and its hooks."""
        _offers.pop(self.engine, None)  # these homes hold state, whatever had been offered to load into
        saved = self.optimizer.state_dict()
        state = {self.params[number]: values for number, values in saved["state"].items()}
        return state, [{**g, "params": [self.params[number] for number in g["params"]]} for g in saved["param_groups"]]

    def for_load(self) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
        """State by parameter, in the order of the groups: what there is and, where there is none, its reserved home."""
        states = self._states()
        self.engine.lending.wait()  # what is handed out will be written
        reserved = self.engine.reserved_state(self.optimizer, states.unwaited)
        existing = dict(states.items())  # waits for the last stores
        found = {param: existing.get(param) or reserved.get(param) for param in self.params}
        offered = {
            param: self.engine.as_saved(self.optimizer, param, state, empty=param not in existing)
            for param, state in found.items()
            if state
        }
        _offers[self.engine] = {
            param: {
                name: _Offer(state[name], leaf, _versions(state[name], leaf)) for name, leaf in _first_leaves(state)
            }
            for param, state in offered.items()
        }
        # Counters that groups get in the first step would not be asked for, and so not be loaded.
        counters = self.engine.layouts.group_counters_at_zero() if reserved else {}
        return offered, [{**counters, **group} for group in self.optimizer.param_groups]

    def by_parameter(self, fqns: Mapping[Tensor, str], saved: SavedByFqn, *, strict: bool) -> dict[str, Any]:
        """Make what ``load_state_dict`` takes, with positions for names."""
        missing = [fqns[param] for param in self.params if fqns[param] not in saved.entries]
        if strict and missing:
            raise ValueError(
                f"set_optimizer_state_dict: the state dict lacks parameters of the optimizer: {_some(missing)}. "
                "strict=False leaves them as they are."
            )
        numbers = {param: number for number, param in enumerate(self.params)}
        groups = [self._merged_group(index, fqns, saved) for index in range(len(self.optimizer.param_groups))]
        for group in groups:
            group["params"] = [numbers[param] for param in group["params"]]
        loaded = self._loaded_state(fqns, saved)
        return {"state": {numbers[param]: state for param, state in loaded.items()}, "param_groups": groups}

    def _merged_group(self, index: int, fqns: Mapping[Tensor, str], saved: SavedByFqn) -> dict[str, Any]:
        """A param group with the saved entries of its parameters, which have to agree."""
        first: str | None = None
        merged: dict[str, Any] = {}
        for fqn in (fqns[param] for param in self.optimizer.param_groups[index]["params"]):
            if fqn not in saved.entries:
                continue
            # The names of a group's parameters are not hyperparameters: they are those of the group as it is now.
            entries = {name: value for name, value in saved.entries[fqn].items() if name != "param_names"}
            if first is not None and not _same_entries(merged, entries):
                raise ValueError(
                    f"set_optimizer_state_dict: {first} and {fqn} are in one param group ({index}), but were saved "
                    f"with different hyperparameters: {merged} and {entries}. Build the optimizer with groups that do "
                    "not mix them."
                )
            if first is None:
                first, merged = fqn, entries
        return {**self.optimizer.param_groups[index], **merged}

    def _loaded_state(self, fqns: Mapping[Tensor, str], saved: SavedByFqn) -> dict[Tensor, UserState]:
        current = self._states().unwaited
        loaded: dict[Tensor, UserState] = {}
        untouched: list[str] = []
        for param in self.params:
            fqn = fqns[param]
            given = saved.state.get(fqn, {})
            # A master that the checkpoint is known to lack is made anew from the parameter.
            lacks_master = given.get(MASTER) in LEFT_OUT if isinstance(given.get(MASTER), Tensor) else False
            state = {n: _as_loaded(param, value) for n, value in given.items() if n != MASTER or not lacks_master}
            left_out = _left_out(given)
            if left_out == {LeftOut.HAD_NONE}:
                state = {}
            elif fqn not in saved.entries or left_out:
                state = current.get(param)
            elif self._nothing_came(param, fqn, state, existed=bool(current.get(param))):
                untouched.append(fqn)
                state = current.get(param)
            if state:
                loaded[param] = state
        if untouched and len(untouched) == sum(bool(offers) for offers in _offers.get(self.engine, {}).values()):
            raise ValueError(
                "set_optimizer_state_dict: nothing was loaded into the tensors that get_optimizer_state_dict("
                f"for_load=True) gave: the checkpoint has none of {_some(untouched)}. Are the keys those under which "
                "it was saved?"
            )
        return loaded

    def _nothing_came(self, param: Tensor, fqn: str, state: UserState, *, existed: bool) -> bool:
        """Return whether ``state`` is what ``for_load=True`` gave, and no load has written it."""
        offers = _offers.get(self.engine, {}).get(param, {})
        given = dict(_first_leaves(state))
        same = {name: offer for name, offer in offers.items() if name in given and _is_same(given[name], offer.leaf)}
        untouched = [name for name, offer in same.items() if offer.is_untouched]
        if not untouched or len(untouched) == len(given):
            return bool(untouched)
        required = [name for name in untouched if name != MASTER]
        if required and not existed:
            raise ValueError(
                f"set_optimizer_state_dict: of the state of {fqn}, {required} was not loaded and "
                f"{sorted(given.keys() - set(untouched))} was. The checkpoint lacks it; load it, or take {fqn} out of "
                "the state dict."
            )
        for name in set(untouched) - set(required) if not existed else ():
            del state[name]  # a master that the checkpoint lacks: made anew from the parameter
        return False

    def _states(self) -> OffloadedState:
        states: Any = self.optimizer.state
        if not isinstance(states, OffloadedState):
            raise RuntimeError(
                "optimizer.state has been replaced by another mapping since the last step; call step() or "
                "load_state_dict() first, or assign to optimizer.state[param] instead."
            )
        return states


def _left_out(given: Mapping[str, Any]) -> set[LeftOut]:
    """Why a checked load has loaded nothing of this; empty if it has. The same on every rank, empty shards included."""
    reasons = [LEFT_OUT.get(value) for value in given.values() if isinstance(value, Tensor)]
    return set() if None in reasons else set(reasons)


def _first_leaves(state: UserState) -> Iterator[tuple[str, Tensor]]:
    """One tensor with memory for each state tensor: what a load into it writes."""
    for name, value in state.items():
        leaves = leaves_of(value) if isinstance(value, Tensor) else []
        if leaves and leaves[0].numel():
            yield name, leaves[0]


def _versions(value: Tensor, leaf: Tensor) -> tuple[int, ...]:
    return *version_of(value), leaf._version


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _same_entries(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one is other:
        return True
    if one.keys() != other.keys():
        return False
    return all(_same(one[name], other[name]) for name in one)


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or (
            isinstance(one, Tensor) and isinstance(other, Tensor) and bool((one.cpu() == other.cpu()).all())
        )
    return bool(one == other)


def _attached(optimizer: Optimizer | Iterable[Optimizer], function: str) -> list[_Attached]:
    given: Any = [optimizer] if isinstance(optimizer, Optimizer) or is_wrapped(optimizer) else optimizer
    optimizers = [inner for one in given for inner in optimizers_in(one)]
    found = []
    for one in optimizers:
        target = find_offloaded(one)
        engine = engine_of(target)
        if target is None or engine is None:
            raise ValueError(
                f"{function}: this {type(one).__name__} is not offloaded. Attach it with offload_optimizer(), or use "
                f"torch.distributed.checkpoint.state_dict.{function}, which writes and reads the same layout."
            )
        found.append(_Attached(target, engine))
    return found


def _fqns_of(model: nn.Module) -> dict[Tensor, str]:
    """Names as checkpoints have them. A tied parameter has its first one."""
    return {param: canonical_fqn(model, name) for param, name in parameter_names(model).items()}


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:5]))
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
