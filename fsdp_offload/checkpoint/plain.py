"""Access of the state-dict functions to optimizers that are not offloaded, without a hidden step."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..api.checks import names_by_place
from ..api.wrapped import attached, attachment_of
from ..engine.engine import Engine, states_of
from ..engine.loading import check_loadable
from ..fsdp.dtensor import compute_device, local_shard, over_local
from ..optimizers import capabilities_for
from ..optimizers.kept_state import Layouts, zero_like
from ..policy import listed
from ..state.layout import is_size, is_trained, leaves_of, params_of
from ..state.shard import StateShard
from ..state.store import OffloadedState, StateStore, UserState, address_of


class Seen(NamedTuple):
    """An optimizer, offloaded or not."""

    engine: Any  # an Engine, or an Unmoved
    offered: OffloadedState  # remembers values that were handed out to load into
    entries: StateStore


class Unmoved:
    """Stands for the engine of an optimizer that is not offloaded: layouts and names, without homes."""

    def __init__(self, optimizer: Optimizer) -> None:
        capabilities = capabilities_for(optimizer)
        if capabilities.refusal:
            capabilities = replace(capabilities, moves_whole=True)  # its state is unknown before the first step
        self.layouts, self.conventions = Layouts(type(optimizer), capabilities), capabilities.conventions
        self.names, self.plan = names_by_place(optimizer), SimpleNamespace(shards={})


_offered: "weakref.WeakKeyDictionary[Optimizer, OffloadedState]" = weakref.WeakKeyDictionary()


def seen(optimizer: Optimizer) -> Seen:
    """Return the view of an optimizer for the state-dict functions, offloaded or not."""
    if (attachment := attachment_of(optimizer)) is not None:
        states = states_of(optimizer)
        return Seen(attachment.engine, states, states.unwaited)
    if optimizer not in _offered:
        _offered[optimizer] = OffloadedState(SimpleNamespace(lending=SimpleNamespace()), {})  # remembers offers
    return Seen(Unmoved(optimizer), _offered[optimizer], StateStore(optimizer.state))


def refuse_templates(values: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> list[Engine]:
    """Raise if ``values`` has memory of ``for_load`` that no load has filled; return the engines whose homes it has.

    Args:
        values: the state dict's, by key.
        optimizers: offloaded ones.

    Raises:
        ValueError: ``values`` has memory that no load has filled.
    """
    leaves = [leaf for value in values.values() for leaf in leaves_of(value)]
    empty: list[str] = []
    found: list[Engine] = []
    for optimizer, states in _offered.items():  # plain ones, whose memory is a template until a load fills it
        own = {address_of(one) for state in optimizer.state.values() for one in state.values()}
        empty += [key for key, v in values.items() if states.is_untouched(v) and address_of(v) not in own]
    for one in list(optimizers):
        engine, states = attached(one).engine, states_of(one)
        homes = set(engine.plan.homes_under(leaves, "nothing has been written").values())
        empty += [
            shard.name
            for param, shard in engine.plan.shards.items()
            if shard.home in homes and param not in states and all(map(states.is_untouched, shard.homes.values()))
        ]
        found += [engine] if homes else []
    if empty:
        raise ValueError(
            f"nothing has been written: for_load=True made this state dict, to load into; {listed(empty)} have no "
            "state yet. Save what get_optimizer_state_dict() gives without for_load."
        )
    return found


def keeps_state(optimizer: Optimizer) -> bool:
    """Return whether a step would make state, as far as that is known."""
    engine = seen(optimizer).engine
    if attachment_of(optimizer) is not None:
        return any(shard.homes for shard in engine.plan.shards.values())
    groups = [(param, group) for group in optimizer.param_groups for param in group["params"] if is_trained(param)]
    return any(engine.layouts.learn(optimizer, *pair, "").values for pair in groups)


def to_load_into(optimizer: Optimizer, engine: Unmoved) -> tuple[dict[Tensor, UserState], list[dict[str, Any]]]:
    """Return state by parameter, and the param groups: existing state itself, and memory for missing state."""
    if engine.layouts.capabilities.moves_whole and not any(optimizer.state.values()):
        raise ValueError(
            f"for_load=True: {type(optimizer).__name__} has no state yet, and which it keeps is not known before its "
            "first step, so there is nothing to load into. Load with load_state_dict(), or after a step."
        )
    found: dict[Tensor, UserState] = {}
    is_new = False
    for group in optimizer.param_groups:
        for param in group["params"]:
            if state := optimizer.state.get(param):
                values = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
                found[param] = engine.conventions.as_saved(optimizer, param, state, values, empty=False)
            elif is_trained(param) or engine.conventions.state_without_gradient:
                # Memory for the state that a first step would create; counters are zero.
                layout = engine.layouts.learn(optimizer, param, group, engine.names[param])
                on_locals, device = engine.layouts.capabilities.elementwise, compute_device(param)
                shard = StateShard(param, engine.names[param], on_locals, cuttable=False, layout=layout, group=0)
                forms = [(leaf.shape, leaf.stride, leaf.dtype) for leaf in shard.leaf_layouts]
                leaves = [torch.empty_strided(*form[:2], dtype=form[2], device=device) for form in forms]
                values = shard.home_over(leaves).values
                counters = {name: zero_like(example) for name, example in layout.scalars.items()}
                found[param] = engine.conventions.as_saved(optimizer, param, counters | values, values, empty=True)
                is_new = True
    counters = engine.layouts.group_counters_at_zero() if is_new else {}
    return {param: state for param, state in found.items() if state}, [
        {**counters, **group} for group in optimizer.param_groups
    ]


def on_device(value: Tensor, *, device: torch.device, copy: bool = False) -> Tensor:
    """Move the local part of ``value`` to ``device``; with ``copy``, copy it even if it is on ``device`` already."""
    return over_local(value, local_shard(value).to(device, copy=copy))


def load_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load as ``load_state_dict``, with the checks of an offloaded load and without casts; copy the given tensors."""
    engine, offered, _ = seen(optimizer)
    if not engine.conventions.keeps_raw_state:  # its kernels scale tensors on the device
        device = compute_device(params_of(optimizer)[0])
        moved = partial(on_device, device=device)
        state_dict = {**state_dict, "state": tree_map_only(Tensor, moved, state_dict["state"], is_leaf=is_size)}
    loaded: dict[Tensor, UserState] = {}
    knows, given = not engine.layouts.capabilities.moves_whole, set[int]()

    def check(_: Optimizer, saved: dict[str, Any]) -> None:
        loaded.update(check_loadable(engine, optimizer, saved))
        leaves = tree_leaves(saved["state"], is_leaf=is_size)
        given.update(address_of(one) for one in leaves if isinstance(one, Tensor) and not offered.was_offered(one))

    def uncast(value: Any, current: Any) -> Any:
        if not isinstance(value, Tensor) or (knows and not value.dim()):
            return value
        return on_device(value, device=local_shard(current).device)

    def keep(_: Optimizer) -> None:
        for param, saved in loaded.items() if is_torchs else ():
            state = optimizer.state[param]
            state.update({n: tree_map(uncast, value, state.get(n), is_leaf=is_size) for n, value in saved.items()})
        # torch, and classes with masters, keep the given tensors themselves if they need no cast.
        own = tree_map_only(Tensor, lambda one: one.clone() if address_of(one) in given else one, dict(optimizer.state))
        optimizer.state.update(own)

    if is_torchs := type(optimizer).load_state_dict is Optimizer.load_state_dict:
        with (
            optimizer.register_load_state_dict_pre_hook(check),  # behind the user's, which may rewrite what is loaded
            optimizer.register_load_state_dict_post_hook(keep, prepend=True),  # before those that look at the result
        ):
            optimizer.load_state_dict(state_dict)
    else:  # the class has its own loading, perhaps without hooks
        check(optimizer, state_dict)
        optimizer.load_state_dict(state_dict)
        keep(optimizer)
