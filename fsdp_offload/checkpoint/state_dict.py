"""State dicts of offloaded optimizers: the layout of ``torch.distributed.checkpoint.state_dict``, without its traps.

::

    optimizer.state ──names, masters, ragged shards──▶ nested ──▶ flattened      get_optimizer_state_dict
    any layout ──────────▶ by FQN ──▶ by parameter ──▶ load_state_dict          set_optimizer_state_dict

Every tensor in a state dict *is* a home in the arena (or a view of it): saving reads it and loading writes it where it
is, without the device and without a collective.

What torch's own functions do otherwise: a KeyError after a forward without backward; a hidden step where there is no
state; loaded tensors are cast and moved; a load that matched nothing trains from zero.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..api.wrapped import is_wrapped, optimizers_in, states_of
from ..core.engine import Engine, engine_of, find_offloaded
from ..core.loading import check_loadable
from ..fsdp.dtensor import is_dtensor, local_shard, over_local, version_of
from ..optimizers.masters import MASTER, is_duplicate
from ..state.layout import leaves_of, params_of
from ..state.mapping import LEFT_OUT, OffloadedState, forget_left_out
from ..state.store import UserState
from .chunks import chunks_of, flat_range_of, says_its_chunks
from .loading import HAD_NONE, listed
from .names import Experts, SavedByFqn, StateDict, as_fsdp_dtensor, by_fqn, flattened, fqns_of, may_be_local
from .shard_tensor import ShardTensor, memory_of, needs_chunks, part_of_full, with_chunks


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    for_load: bool = False,
    flatten_optimizer_state_dict: bool = False,
    cpu_offload: bool = False,
    fsdp_dtensor: bool = False,
    experts: Experts | None = None,
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
            of the groups, and of which parameters this rank has.
        cpu_offload: copies in ordinary host memory, counters included, which no later step changes. torch's function
            makes such copies with ``StateDictOptions(cpu_offload=True)`` only of what is on the device, and so none.
        fsdp_dtensor: Megatron-LM's ``{"state": {fqn: {name: ...}}, "param_to_group_meta": {fqn: {entry: ...}}}``
            instead, as the ``optimizer`` of its ``fsdp_dtensor`` checkpoints.
        experts: gives local experts their global numbers.

    Raises:
        ValueError: an optimizer is not offloaded, or has a parameter that the model has not; two layouts at once;
            copies were asked for to load into; experts on a mesh that is not all ranks, without ``experts`` or nested.
        RuntimeError: an exception has left the state half updated. ``for_load`` works all the same.
    """
    if for_load and cpu_offload:
        raise ValueError(
            "get_optimizer_state_dict: what is loaded into copies never arrives. Leave out cpu_offload=True with "
            "for_load=True: these tensors are in host memory as they are."
        )
    if flatten_optimizer_state_dict and fsdp_dtensor:
        raise ValueError("get_optimizer_state_dict: flatten_optimizer_state_dict and fsdp_dtensor are two layouts")
    fqns = fqns_of(model, experts)
    if not (flatten_optimizer_state_dict or fsdp_dtensor) and any(may_be_local(fqn, p) for p, fqn in fqns.items()):
        raise ValueError(
            "get_optimizer_state_dict: nested groups list the names of this rank's experts, and a checkpoint keeps the "
            "list of one rank. Give flatten_optimizer_state_dict=True: its keys are each parameter's own."
        )
    nested: StateDict = {"state": {}, "param_groups": []}
    for attached in _attached(optimizer, "get_optimizer_state_dict"):
        attached.check_names(fqns)
        states, groups = attached.for_load() if for_load else attached.saved()
        for param, state in states.items():
            nested["state"][fqns[param]] = saved = _as_saved(param, state, copies=cpu_offload)
            forget_left_out(saved)
        nested["param_groups"] += [{**group, "params": [fqns[param] for param in group["params"]]} for group in groups]
    if fsdp_dtensor:
        return as_fsdp_dtensor(nested)
    return flattened(nested) if flatten_optimizer_state_dict else nested


def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    experts: Experts | None = None,
) -> None:
    """Load what :func:`get_optimizer_state_dict` gives, in any of its layouts, by FQN. Everything is checked first.

    State that was loaded in place stays where it is; other tensors are copied into their homes. Parameters may be in
    other groups than when they were saved, as long as those of one group bring the same hyperparameters. Their names
    may have ``module.`` in front a different number of times, as those of Megatron's optimizers have. A DTensor with
    the elements of a parameter in one dimension, of which this rank has just its part, is taken for state of it; so is
    a plain tensor of the global shape of a sharded parameter, as full state dicts have: each rank copies its part.

    Args:
        model: the model whose parameters they have.
        optimizer: one offloaded optimizer, or several.
        optim_state_dict: not changed.
        strict: refuse parameters of the optimizer that the state dict does not know, and the other way round. Without
            it the former keep the state they have, and the latter are ignored.
        experts: as it was given to :func:`get_optimizer_state_dict`.

    Raises:
        ValueError: names or groups do not correspond; the load left a template of ``for_load=True`` untouched, or
            filled only a part of some parameter's state; state is missing, extra, or of another shape, dtype or
            sharding. Nothing has changed then, apart from what had been loaded in place.
    """
    fqns = fqns_of(model, experts)
    saved = by_fqn(optim_state_dict).with_names_of(fqns.values())
    known: set[str] = set()
    plans = []
    for attached in _attached(optimizer, "set_optimizer_state_dict"):
        attached.check_names(fqns)
        known.update(fqns[param] for param in attached.params)
        plans.append((attached, attached.by_parameter(fqns, saved, strict=strict)))
    extra = [fqn for fqn in (*saved.state, *saved.entries) if fqn not in known]
    if strict and extra:
        raise ValueError(
            f"set_optimizer_state_dict: the state dict has parameters that the optimizer has not: {listed(extra)}. Is "
            "it of another model? strict=False ignores them."
        )
    if len(plans) > 1:  # one alone checks before it changes anything
        for attached, state_dict in plans:
            check_loadable(attached.engine, attached.optimizer, state_dict)
    for attached, state_dict in plans:
        attached.optimizer.load_state_dict(state_dict)
        attached.states.offered = {}


# Values --------------------------------------------------------------------------------------------------------------


def _as_saved(param: Tensor, state: UserState, *, copies: bool) -> dict[str, Any]:
    """The state of one parameter as a checkpoint has it."""
    carries = is_dtensor(param) and needs_chunks(param)
    saved = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            if name == MASTER and is_duplicate(param, value.dtype):
                continue
            if copies:
                value = over_local(value, local_shard(value).to("cpu", copy=True))
            if carries and value.shape == param.shape:
                value = with_chunks(param, local_shard(value), chunks_of(param))
        saved[name] = value
    return saved


def _as_loaded(param: Tensor, value: Any) -> Any:
    """The value over plain local memory, as the optimizer has it."""
    if not isinstance(value, Tensor):
        return value
    if not is_dtensor(value):
        is_full = is_dtensor(param) and value.dim() > 0 and tuple(value.shape) == chunks_of(param).global_shape
        return part_of_full(param, value) if is_full else value
    if not is_flat_state(param, value):
        if not isinstance(local_shard(value), ShardTensor):
            return value
        own, carried = chunks_of(param), chunks_of(value)
        if own.global_shape != carried.global_shape or own.rectangles != carried.rectangles:
            raise ValueError(
                f"set_optimizer_state_dict: state of shape {carried.global_shape} has {carried.rectangles} on this "
                f"rank, and its parameter of shape {own.global_shape} has {own.rectangles}. Load the checkpoint into "
                "what get_optimizer_state_dict(for_load=True) gives: that reshards."
            )
    return over_local(param, memory_of(value).view(local_shard(param).shape))


def is_flat_state(param: Tensor, value: Tensor) -> bool:
    """Return whether ``value`` has this rank's elements of ``param`` in one dimension (Megatron-LM's pull 4623)."""
    if not (is_dtensor(value) and is_dtensor(param)) or value.shape != (param.numel(),) or param.dim() == 1:
        return False
    if local_shard(value).shape != (local_shard(param).numel(),):
        return False
    wanted = flat_range_of(chunks_of(param))
    is_nominal = says_its_chunks(param) and not says_its_chunks(value)
    return wanted is not None and (is_nominal or flat_range_of(chunks_of(value)) == wanted)


# Optimizers ----------------------------------------------------------------------------------------------------------


UNTOUCHED = "no load has written it since for_load=True gave it"


def _is_untouched_since_now(value: Tensor, leaf: Tensor) -> Callable[[], bool]:
    """Tells whether a load has come: it writes the inner tensor; ``copy_`` into a DTensor counts in that alone."""
    versions = *version_of(value), leaf._version
    return lambda: versions == (*version_of(value), leaf._version)


def _first_leaf(value: object) -> Tensor | None:
    """One tensor with memory that a load into ``value`` writes."""
    leaves = leaves_of(value) if isinstance(value, Tensor) else []
    return leaves[0] if leaves and leaves[0].numel() else None


@dataclass
class _Attached:
    """An offloaded optimizer."""

    optimizer: Optimizer
    engine: Engine
    params: list[Tensor]

    @property
    def states(self) -> OffloadedState:
        """``optimizer.state``."""
        return states_of(self.optimizer)

    def check_names(self, fqns: Mapping[Tensor, str]) -> None:
        """Refuse parameters that have no FQN."""
        foreign = [param for param in self.params if param not in fqns]
        names = [self.engine.names.get(param, "?") for param in foreign]
        if not all(isinstance(param, nn.Parameter) for param in foreign):
            raise ValueError(
                f"{len(names)} tensors of the optimizer are not the model's parameters but copies or parts of them, "
                f"as those of Megatron's DistributedOptimizer ({names[0]}): they have no names and no shapes that a "
                "checkpoint could have. Save with that optimizer's own sharded_state_dict() or "
                "save_parameter_state(), which read the state in host memory."
            )
        if foreign:
            raise ValueError(
                f"{len(names)} parameters of the optimizer are not the model's: {listed(names)}. Give the model "
                "that it was built for; fully_shard exchanges a model's parameters, so build the optimizer after it."
            )

    def saved(self) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
        """State by parameter, and the param groups, through the optimizer's own ``state_dict`` and its hooks."""
        saved = self.optimizer.state_dict()
        self.states.offered = {}  # these homes hold state, whatever had been offered to load into
        state = {self.params[number]: values for number, values in saved["state"].items()}
        return state, [{**g, "params": [self.params[number] for number in g["params"]]} for g in saved["param_groups"]]

    def for_load(self) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
        """State by parameter, in the order of the groups: what there is and, where there is none, its reserved home."""
        self.engine.lending.wait()  # what is handed out will be written
        reserved = self.engine.reserved_state(self.optimizer, self.states.unwaited)
        existing = dict(self.states.items())  # waits for the last stores
        found = {param: existing.get(param) or reserved.get(param) for param in self.params}
        offered = {
            param: self.engine.as_saved(self.optimizer, param, state, empty=param not in existing)
            for param, state in found.items()
            if state
        }
        self.states.offered = {
            leaf.data_ptr(): _is_untouched_since_now(value, leaf)
            for state in offered.values()
            for value in state.values()
            if (leaf := _first_leaf(value)) is not None
        }
        # Counters that groups get in the first step would not be asked for, and so not be loaded.
        counters = self.engine.layouts.group_counters_at_zero() if reserved else {}
        return offered, [{**counters, **group} for group in self.optimizer.param_groups]

    def by_parameter(self, fqns: Mapping[Tensor, str], saved: SavedByFqn, *, strict: bool) -> dict[str, Any]:
        """Make what ``load_state_dict`` takes, with positions for names."""
        missing = [fqns[param] for param in self.params if fqns[param] not in saved.entries]
        if strict and missing:
            raise ValueError(
                f"set_optimizer_state_dict: the state dict lacks parameters of the optimizer: {listed(missing)}. "
                "strict=False leaves them as they are."
            )
        numbers = {param: number for number, param in enumerate(self.params)}
        groups = [
            {**group, **_agreed(index, [fqns[param] for param in group["params"]], saved)}
            | {"params": [numbers[param] for param in group["params"]]}
            for index, group in enumerate(self.optimizer.param_groups)
        ]
        loaded = self._loaded_state(fqns, saved)
        return {"state": {numbers[param]: state for param, state in loaded.items()}, "param_groups": groups}

    def _loaded_state(self, fqns: Mapping[Tensor, str], saved: SavedByFqn) -> dict[Tensor, UserState]:
        current = self.states.unwaited
        loaded: dict[Tensor, UserState] = {}
        untouched: list[str] = []
        for param in self.params:
            fqn, state = fqns[param], current.get(param)
            given = saved.state.get(fqn, {})
            reasons = self._why_unfilled(given)
            why = set(reasons.values())
            if why == {HAD_NONE}:
                continue
            if fqn in saved.entries and why and None not in why:  # it keeps the state it has
                untouched += [fqn] if UNTOUCHED in why else []
            elif fqn in saved.entries:
                required = [name for name, reason in reasons.items() if reason and name != MASTER]
                if required and not state:
                    raise ValueError(
                        f"set_optimizer_state_dict: of the state of {fqn}, {required} was not loaded and "
                        f"{sorted(name for name in reasons if not reasons[name])} was. The checkpoint lacks it; load "
                        f"it, or take {fqn} out of the state dict."
                    )
                # A master that the checkpoint lacks is made anew from the parameter.
                lacks_master = reasons.get(MASTER) not in ((None, UNTOUCHED) if state else (None,))
                state = {n: _as_loaded(param, v) for n, v in given.items() if n != MASTER or not lacks_master}
            if state:
                loaded[param] = state
        if untouched and all(is_untouched() for is_untouched in self.states.offered.values()):
            raise ValueError(
                "set_optimizer_state_dict: nothing was loaded into the tensors that get_optimizer_state_dict("
                f"for_load=True) gave: the checkpoint has none of {listed(untouched)}. Are the keys those under which "
                "it was saved?"
            )
        return loaded

    def _why_unfilled(self, state: UserState) -> dict[str, str | None]:
        """Why the last load has not filled each tensor, ``None`` if it has. One without elements can only be told."""
        reasons: dict[str, str | None] = {}
        for name, value in state.items():
            leaf, reason = _first_leaf(value), getattr(value, LEFT_OUT, None)
            is_untouched = None if leaf is None else self.states.offered.get(leaf.data_ptr())
            if reason or leaf is not None:
                reasons[name] = reason or (UNTOUCHED if is_untouched is not None and is_untouched() else None)
        return reasons


def _agreed(index: int, fqns: Iterable[str], saved: SavedByFqn) -> dict[str, Any]:
    """The saved entries of a param group: those of its parameters, which have to agree."""
    first, agreed = "", None
    for fqn in filter(saved.entries.__contains__, fqns):
        # The names of a group's parameters are not hyperparameters: they are those of the group as it is now.
        entries = {name: value for name, value in saved.entries[fqn].items() if name != "param_names"}
        if agreed is None:
            first, agreed = fqn, entries
        elif agreed.keys() != entries.keys() or not all(_same(agreed[name], entries[name]) for name in agreed):
            raise ValueError(
                f"set_optimizer_state_dict: {first} and {fqn} are in one param group ({index}), but were saved with "
                f"different hyperparameters: {agreed} and {entries}. Build the optimizer with groups that do not mix "
                "them."
            )
    return agreed or {}


def _same(one: object, other: object) -> bool:
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))
    return bool((one.cpu() == other.cpu()).all())


def _attached(optimizer: Optimizer | Iterable[Optimizer], function: str) -> list[_Attached]:
    given: Any = [optimizer] if isinstance(optimizer, Optimizer) or is_wrapped(optimizer) else optimizer
    found = []
    for one in (inner for wrapped in given for inner in optimizers_in(wrapped)):
        target = find_offloaded(one)
        engine = engine_of(target)
        if target is None or engine is None:
            raise ValueError(
                f"{function}: this {type(one).__name__} is not offloaded. Attach it with offload_optimizer(), or use "
                f"torch.distributed.checkpoint.state_dict.{function}, which writes and reads the same layout."
            )
        found.append(_Attached(target, engine, params_of(target)))
    return found
