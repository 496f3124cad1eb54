"""State dicts of optimizers: the layout of ``torch.distributed.checkpoint.state_dict``, without its traps.

::

    optimizer.state ──names, masters, ragged shards──▶ nested ──▶ flattened      get_optimizer_state_dict
    any layout ──────────▶ by FQN ──▶ by parameter ──▶ load_state_dict          set_optimizer_state_dict

Every tensor in a state dict *is* a home in the arena (or a view of it), or the state of a plain optimizer itself:
saving reads that memory, and loading writes it. The traps of torch's functions: a hidden step if there is no state,
casts and moves of loaded values, and training from zero after a load that matched nothing.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

from ..api.wrapped import attached, attachment_of, holders_in, optimizers_in
from ..engine.engine import states_of
from ..engine.loading import check_loadable
from ..fsdp.dtensor import is_dtensor, local_shard, over_local
from ..optimizers.masters import MASTER
from ..policy import check_choices, listed, tells
from ..state.layout import is_size, params_of, tensors_in
from ..state.store import STALE, OffloadedState, UserState, address_of
from .chunks import chunks_of, flat_range_of, says_its_chunks
from .names import (
    GROUP_META,
    Experts,
    SavedByFqn,
    StateDict,
    by_fqn,
    check_model,
    flattened,
    fqns_of,
    may_be_local,
)
from .plain import keeps_state, load_plain, on_device, seen, to_load_into
from .planners import LEFT
from .shard_tensor import ShardTensor, memory_of, needs_chunks, with_chunks

_OPTIONS = "Of StateDictOptions, {} are arguments of their own; for the others call torch's function."


@tells(
    "get_optimizer_state_dict(model, optimizer)",
    options=_OPTIONS.format("cpu_offload and flatten_optimizer_state_dict"),
    full_state_dict="torch's function gathers full ones, by options=StateDictOptions(full_state_dict=True).",
)
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
    """Return the state of optimizers by FQN, as ``torch.distributed.checkpoint.state_dict`` lays it out.

    Tensors are DTensors over host memory with the mesh and placements of their parameter: the homes themselves, valid
    until the next step. Waits for the last stores. Allocates no device memory and issues no collective. The keys are
    the same on every rank of a shard mesh, also if this rank's shard is empty. An optimizer that is not offloaded gives
    its own tensors; ``for_load`` allocates those that its first step would create.

    Args:
        model: the model that has the optimizers' parameters.
        optimizer: one optimizer, or several with different parameters of the model.
        for_load: include the reserved homes of state that does not exist yet (without meaningful content). A fresh
            process passes the result to ``dcp.load``, then to :func:`set_optimizer_state_dict`. Never save it.
        flatten_optimizer_state_dict: ``{"state.{fqn}.{name}": ..., "param_groups.{fqn}.{entry}": ...}`` instead of
            ``{"state": {fqn: {name: ...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. The flattened form does
            not depend on the order of the groups, nor on which parameters this rank has.
        cpu_offload: copy everything, counters included, to ordinary host memory that no later step changes. torch's
            ``StateDictOptions(cpu_offload=True)`` copies only tensors on the device: homes are not copied.
        fsdp_dtensor: Megatron-LM's ``{"state": {fqn: {name: ...}}, "param_to_group_meta": {fqn: {entry: ...}}}``
            instead, as the ``optimizer`` of its ``fsdp_dtensor`` checkpoints.
        experts: gives local experts their global numbers.

    Raises:
        ValueError: an optimizer has a parameter that the model does not have; two layouts, or ``cpu_offload`` with
            ``for_load``; experts on a mesh that does not span all ranks, without ``experts`` or in the nested layout;
            plain state of sharded parameters that has the sizes of this rank's parts.
        RuntimeError: an exception has left the state half updated. ``for_load`` works all the same.
    """
    choices = {"for_load": for_load, "cpu_offload": cpu_offload, "fsdp_dtensor": fsdp_dtensor}
    choices["flatten_optimizer_state_dict"] = flatten_optimizer_state_dict
    check_choices("get_optimizer_state_dict", **choices)
    if for_load and cpu_offload:
        raise ValueError("get_optimizer_state_dict: leave out cpu_offload with for_load=True: copies never arrive")
    if flatten_optimizer_state_dict and fsdp_dtensor:
        two = "flatten_optimizer_state_dict and fsdp_dtensor are two layouts"
        raise ValueError(f"get_optimizer_state_dict: {two}. Leave out one of them.")
    check_model(model, "get_optimizer_state_dict(model, optimizer)")
    fqns = fqns_of(model, experts)
    if not (flatten_optimizer_state_dict or fsdp_dtensor) and any(may_be_local(fqn, p) for p, fqn in fqns.items()):
        raise ValueError(
            "get_optimizer_state_dict: nested groups list the names of this rank's experts, and a checkpoint keeps the "
            "list of one rank. Give flatten_optimizer_state_dict=True: its keys are each parameter's own."
        )
    nested: StateDict = {"state": {}, "param_groups": []}
    for one in _given(optimizer, fqns, "get_optimizer_state_dict"):
        states, groups = _to_load_into(one) if for_load else _to_save(one)
        _check_whole(states, fqns)
        for param, state in states.items():
            nested["state"][fqns[param]] = _as_saved(param, state, copies=cpu_offload)
        if for_load and attachment_of(one) is None:
            values = [value for param in states for value in nested["state"][fqns[param]].values()]
            seen(one).offered.offer(values, {id(value) for value in values}, set(filter(one.state.get, states)))
        groups = [{**group, "params": [fqns[param] for param in group["params"]]} for group in groups]
        nested["param_groups"] += _copied(groups) if cpu_offload else groups
    if fsdp_dtensor:
        return {"state": nested["state"], GROUP_META: by_fqn(nested).entries}
    return flattened(nested) if flatten_optimizer_state_dict else nested


@tells("set_optimizer_state_dict(model, optimizer, state_dict)", options=_OPTIONS.format("strict"))
def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    experts: Experts | None = None,
) -> None:
    """Load a result of :func:`get_optimizer_state_dict`, in any of its layouts, by FQN. Everything is checked first.

    State that was loaded in place stays where it is; other tensors are copied into their homes. Parameters may be in
    other groups than when they were saved, if the saved hyperparameters agree within each group. Saved names may begin
    with ``module.`` a different number of times, as those of Megatron's optimizers do, and have ``_orig_mod.`` or
    ``_checkpoint_wrapped_module.`` anywhere. State may also be a DTensor of one dimension, with just this rank's
    elements of the parameter, or a plain tensor of a sharded parameter's global shape, as in full state dicts: each
    rank copies its part.

    Args:
        model: the model that has the optimizers' parameters.
        optimizer: one optimizer, or several.
        optim_state_dict: not changed.
        strict: refuse parameters that only the optimizer or only the state dict has. Without ``strict``, parameters
            that the state dict lacks keep their state, and extra ones in the state dict are ignored.
        experts: as it was given to :func:`get_optimizer_state_dict`.

    Raises:
        ValueError: names or groups do not correspond; the load left a template of ``for_load=True`` untouched, or
            filled only a part of some parameter's state; state is missing, extra, or of another shape, dtype or
            sharding. Nothing has changed then, apart from what had been loaded in place.
        RuntimeError: there was a step after ``get_optimizer_state_dict(for_load=True)``: a part of the load is lost.
    """
    check_choices("set_optimizer_state_dict", strict=strict)
    check_model(model, "set_optimizer_state_dict(model, optimizer, state_dict)")
    fqns = fqns_of(model, experts)
    saved = by_fqn(optim_state_dict).with_names_of(fqns.values())
    optimizers = _given(optimizer, fqns, "set_optimizer_state_dict")
    for one in optimizers:
        _check_offered(one, saved)
    plans = [(one, _by_number(one, fqns, saved, strict=strict)) for one in optimizers]
    known = {fqns[param] for one in optimizers for param in params_of(one)}
    extra = [fqn for fqn in (*saved.state, *saved.entries) if fqn not in known]
    if strict and extra:
        raise ValueError(
            f"set_optimizer_state_dict: the state dict has parameters that the optimizer has not: {listed(extra)}. Is "
            "it of another model? strict=False ignores them."
        )
    if len(plans) > 1:  # a single optimizer's load checks before it changes anything
        for one, state_dict in plans:
            check_loadable(seen(one).engine, one, state_dict)
    brings_none = not (saved.state or any(seen(one).offered.has_offered for one in optimizers))
    if brings_none and any(map(keeps_state, optimizers)):
        warnings.warn(
            "set_optimizer_state_dict: this state dict has no state, and training continues without any. A checkpoint "
            "is loaded into what get_optimizer_state_dict(for_load=True) returns.",
            stacklevel=3,
        )
    for one, state_dict in plans:
        (one.load_state_dict if attachment_of(one) else partial(load_plain, one))(state_dict)
        seen(one).offered.withdraw((v for state in saved.state.values() for v in state.values()), is_load=True)


def _given(optimizer: Optimizer | Iterable[Optimizer], fqns: Mapping[Tensor, str], function: str) -> list[Optimizer]:
    """List the optimizers in the argument of ``function``; raise if a parameter has no name."""
    given: Any = [optimizer] if isinstance(optimizer, Optimizer) or holders_in(optimizer) else optimizer
    found = []
    for one in optimizers_in(list(given) if isinstance(given, Iterable) else given, function):
        foreign = [param for param in params_of(one) if param not in fqns]
        names = [seen(one).engine.names.get(param, "?") for param in foreign]
        if foreign:
            raise ValueError(
                f"{len(names)} parameters of the optimizer are not the model's: {listed(names)}. Give the model "
                "that it was built for; fully_shard exchanges a model's parameters, so build the optimizer after it. "
                "Megatron's DistributedOptimizer has copies, and is saved with its own sharded_state_dict()."
            )
        keys: Iterable[Any] = one.state
        if strange := [repr(key) for key in keys if not isinstance(key, Tensor)]:
            raise ValueError(
                f"{function}: optimizer.state has {listed(strange)}, which is no parameter, and a checkpoint keeps "
                "state by the names of parameters. Keep it in an attribute of the optimizer."
            )
        found.append(one)
    return found


# Values --------------------------------------------------------------------------------------------------------------


def _as_saved(param: Tensor, state: UserState, *, copies: bool) -> dict[str, Any]:
    """Return the state of one parameter in the form for a checkpoint."""
    carries = is_dtensor(param) and needs_chunks(param)
    saved = {}
    for name, value in state.items():
        if name == MASTER and isinstance(value, Tensor) and value.dtype == param.dtype:
            continue
        if copies:
            value = _copied(value)
        if carries and isinstance(value, Tensor) and value.shape == param.shape:
            value = with_chunks(param, local_shard(value), chunks_of(param))
        saved[name] = value
    return saved


def _check_whole(states: Mapping[Tensor, UserState], fqns: Mapping[Tensor, str]) -> None:
    """Raise for plain state with the sizes of this rank's parts: a checkpoint would keep one rank's state only.

    A table with such a size by chance passes: it has another size for other parameters, or the same content. State that
    depends on the part in another way (a scale per 2,048 elements) is found by ``save``, which compares the ranks.
    """
    plain: dict[Any, list[tuple[str, Tensor, bool]]] = defaultdict(list)
    for param, state in states.items():
        local = local_shard(param)
        # Not strict: flat parts have fewer dimensions.
        cut = {size for size, whole in zip(local.shape, param.shape, strict=False) if size != whole}
        for name, value in state.items() if cut else ():
            for number, leaf in enumerate(tensors_in(value)):
                if leaf.dim() and not is_dtensor(leaf):
                    plain[name, number].append((fqns[param], leaf, not {*cut, local.numel()}.isdisjoint(leaf.shape)))
    for (name, _), found in plain.items():
        _, first, _ = found[0]
        if not all(follows for *_, follows in found):
            continue
        if len(found) == 1 or not first.numel() or not all(torch.equal(first, leaf) for _, leaf, _ in found):
            raise ValueError(
                f"get_optimizer_state_dict: {name!r} of {listed(fqn for fqn, *_ in found)} has the size of this rank's "
                "part of the parameter and is a plain tensor, and a checkpoint would keep that of one rank. Let the "
                "optimizer keep a DTensor on the mesh of the parameter (DTensor.from_local), or write "
                "optimizer.state_dict() to a file for each rank."
            )


def _copied(value: Any) -> Any:
    """Copy all tensors and containers in ``value``, to ordinary host memory."""
    return tree_map_only(Tensor, partial(on_device, device=torch.device("cpu"), copy=True), value, is_leaf=is_size)


def _as_loaded(param: Tensor, value: Tensor, kept: object, *, is_full: bool) -> Tensor:
    """Return ``value`` over plain local memory, as the optimizer keeps it. ``is_full``: it may have all elements."""
    if not is_dtensor(value):
        if isinstance(kept, Tensor):  # existing state decides: if it is plain, this rank keeps all elements
            is_full = is_dtensor(kept)
        if not (is_full and is_dtensor(param) and value.dim() > 0):
            return value
        if value.shape != (part := chunks_of(param)).global_shape:
            return value
        local = value.new_empty(part.local_shape)  # this rank's part of ``value``
        for chunk in part.chunks:
            chunk.in_local(local).copy_(chunk.in_global(value))
        return over_local(param, local.view(local_shard(param).shape))
    if not is_flat_state(param, value):
        if not isinstance(local_shard(value), ShardTensor):
            return value
        own, carried = chunks_of(param), chunks_of(value)
        if (own.global_shape, own.rectangles) != (carried.global_shape, carried.rectangles):
            raise ValueError(
                f"set_optimizer_state_dict: state has {carried.rectangles} of {carried.global_shape} on this rank, and "
                f"its parameter {own.rectangles} of {own.global_shape}. To reshard, load into what "
                "get_optimizer_state_dict(for_load=True) gives."
            )
    return over_local(param, memory_of(value).view(local_shard(param).shape))


def is_flat_state(param: Tensor, value: Tensor) -> bool:
    """Return whether ``value`` has this rank's elements of ``param`` in one dimension (Megatron-LM's pull 4623)."""
    if not (is_dtensor(value) and is_dtensor(param)) or value.shape != (param.numel(),) or param.dim() == 1:
        return False
    wanted, is_nominal = flat_range_of(chunks_of(param)), says_its_chunks(param) and not says_its_chunks(value)
    is_local = local_shard(value).shape == (local_shard(param).numel(),)
    return is_local and wanted is not None and (is_nominal or flat_range_of(chunks_of(value)) == wanted)


# One optimizer -------------------------------------------------------------------------------------------------------


def _to_save(optimizer: Optimizer) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
    """Return state by parameter, and the param groups, from the optimizer's own ``state_dict`` with its hooks."""
    saved, params = optimizer.state_dict(), params_of(optimizer)
    seen(optimizer).offered.withdraw(value for state in saved["state"].values() for value in state.values())
    states = {params[number]: values for number, values in saved["state"].items()}
    return states, [{**group, "params": [params[n] for n in group["params"]]} for group in saved["param_groups"]]


def _to_load_into(optimizer: Optimizer) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
    """Return existing state or, if there is none, its reserved home, by parameter, and the param groups."""
    if attachment_of(optimizer) is None:
        return to_load_into(optimizer, seen(optimizer).engine)
    engine, states = attached(optimizer).engine, states_of(optimizer)
    engine.lending.wait()  # the homes will be written
    reserved = engine.reserved_state(optimizer, states.unwaited)
    existing = dict(states.items())  # waits for the last stores
    offered = {
        param: engine.plan.as_saved(optimizer, param, state, empty=param not in existing)
        for param in params_of(optimizer)
        if (state := existing.get(param) or reserved.get(param))
    }
    homes = {id(home) for shard in engine.plan.shards.values() for home in shard.homes.values()}
    states.offer([v for state in offered.values() for v in state.values()], homes, engine.core.last_moved)
    offered = {param: engine.plan.handed_out(param, state) for param, state in offered.items()}
    # Request the counters that a first step adds to groups, or they would not be loaded.
    counters = engine.layouts.group_counters_at_zero() if reserved else {}
    return offered, [{**counters, **group} for group in optimizer.param_groups]


def _check_offered(optimizer: Optimizer, saved: SavedByFqn) -> None:
    """Raise if a step has written homes since they were offered: state kept on the device is newer than the load."""
    if attachment_of(optimizer) is None:
        return
    engine, states = attached(optimizer).engine, states_of(optimizer)
    values = (value for state in saved.state.values() for value in state.values() if states.was_offered(value))
    written = (states.offered_after(value) for value in values if not states.is_untouched(value))
    if any(after is not engine.core.last_moved and after is not STALE for after in written):
        engine.failure = "a checkpoint was loaded into a state dict that was made before the last step"
        raise RuntimeError(
            f"set_optimizer_state_dict: {engine.failure}, so that a part of it is lost. Call "
            "get_optimizer_state_dict(for_load=True) again, load into that, and set it."
        )


def _by_number(optimizer: Optimizer, fqns: Mapping[Tensor, str], saved: SavedByFqn, *, strict: bool) -> dict[str, Any]:
    """Make a state dict for ``load_state_dict``, with positions instead of names."""
    numbers = {param: number for number, param in enumerate(params_of(optimizer))}
    missing = [fqns[param] for param in numbers if fqns[param] not in saved.entries]
    if strict and missing:
        raise ValueError(
            f"set_optimizer_state_dict: the state dict lacks parameters of the optimizer: {listed(missing)}. "
            "strict=False leaves them as they are."
        )
    groups = [
        {**group, **_agreed(index, [fqns[param] for param in group["params"]], saved)}
        | {"params": [numbers[param] for param in group["params"]]}
        for index, group in enumerate(optimizer.param_groups)
    ]
    states = {numbers[param]: state for param, state in _loaded(optimizer, fqns, saved).items()}
    return {"state": states, "param_groups": groups}


def _loaded(optimizer: Optimizer, fqns: Mapping[Tensor, str], saved: SavedByFqn) -> dict[Tensor, UserState]:
    """Return the new state of each parameter: from the state dict or, if nothing was loaded, its existing state."""
    engine, states, entries = seen(optimizer)
    shards = engine.plan.shards
    has_dtensors = any(is_dtensor(value) for given in saved.state.values() for value in given.values())
    loaded: dict[Tensor, UserState] = {}
    untouched: list[str] = []
    for param in params_of(optimizer):
        fqn, state = fqns[param], entries.get(param)
        given = saved.state.get(fqn, {})
        # A write does not show in values without elements on this rank: LoadPlanner marks whether it left them out.
        filled = {name: not states.is_untouched(value) for name, value in given.items() if address_of(value)}
        filled |= {n: not vars(v).pop(LEFT) for n, v in given.items() if isinstance(v, Tensor) and LEFT in vars(v)}
        is_given = fqn in saved.entries or fqn in saved.state  # without strict, groups may be left out
        if is_given and filled and not any(filled.values()):
            untouched.append(fqn)
        elif is_given:
            lacking = [
                n for n in filled if not (filled[n] or (state and _is_state(given[n], param, optimizer, states)))
            ]
            required = [name for name in lacking if name != MASTER]
            if required:
                raise ValueError(
                    f"set_optimizer_state_dict: of the state of {fqn}, {required} was not loaded and "
                    f"{sorted(filter(filled.get, filled))} was. Load all of it, or take {fqn} out of the state dict."
                )
            # A master that the checkpoint lacks is rebuilt from the parameter.
            kept = {**(shards[param].homes if param in shards else {}), **(state or {})}
            found: dict[Any, Any] = dict(tree_flatten_with_path(kept, is_leaf=is_size)[0])
            present = {name: value for name, value in given.items() if name not in lacking}
            values, form = tree_flatten_with_path(present, is_leaf=is_size)
            as_kept = [
                _as_loaded(param, one, found.get(at), is_full=not has_dtensors) if isinstance(one, Tensor) else one
                for at, one in values
            ]
            state = tree_unflatten(as_kept, form)
        if state:
            loaded[param] = state
    if untouched and states.is_all_untouched(value for state in saved.state.values() for value in state.values()):
        raise ValueError(
            "set_optimizer_state_dict: nothing was loaded into what get_optimizer_state_dict(for_load=True) gave: the "
            f"checkpoint has none of {listed(untouched)}. Are the keys those under which it was saved?"
        )
    return loaded


def _is_state(value: Any, param: Tensor, optimizer: Optimizer, states: OffloadedState) -> bool:
    """Return whether an unwritten value is existing state, and not memory allocated to load into."""
    after = states.offered_after(value)
    # A plain optimizer may have made state after memory was allocated for it.
    return after is not STALE if attachment_of(optimizer) else not address_of(value) or param in (after or ())


def _agreed(index: int, fqns: Iterable[str], saved: SavedByFqn) -> dict[str, Any]:
    """Return the saved entries of a param group: those of its parameters, which must agree."""

    def same(one: Any, other: Any) -> bool:
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return one is other or bool((one.cpu() == other.cpu()).all() if both else one == other)

    first, agreed = "", None
    for fqn in filter(saved.entries.__contains__, fqns):
        # ``param_names`` is no hyperparameter: it stays that of the current group.
        entries = {name: value for name, value in saved.entries[fqn].items() if name != "param_names"}
        if agreed is None:
            first, agreed = fqn, entries
        elif agreed.keys() != entries.keys() or not all(same(agreed[name], entries[name]) for name in agreed):
            raise ValueError(
                f"set_optimizer_state_dict: {first} and {fqn} are in one param group ({index}), but were saved with "
                f"different hyperparameters: {agreed} and {entries}. Build groups that do not mix them."
            )
    return agreed or {}
