"""``load_state_dict`` for offloaded state: checks everything before anything changes, then copies straight into homes.

torch's own version casts each tensor to the dtype of its parameter, and moves it to the parameter's device; here
tensors keep their dtype.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..fsdp.dtensor import is_dtensor, placements_of
from ..optimizers.masters import MASTER, can_rebuild
from ..policy import check_is, listed
from ..state.layout import StateLayout, ValueLayout, forms_of, in_dtypes_of
from ..state.store import UserState
from .engine import Engine

logger = logging.getLogger(__name__)


def check_loadable(engine: Engine, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, UserState]:
    """Return the saved state by parameter; raise ValueError if groups, names, shapes, dtypes or shardings do not fit.

    A parameter may have no state at all (it never had a gradient); if it has some, it must have all.
    """
    _check_form(state_dict)
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    saved_sizes, sizes = ([len(group["params"]) for group in one] for one in (saved_groups, groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"load_state_dict: the optimizer has param groups of {sizes} parameters, the state dict {saved_sizes}. "
            "Build the optimizer with the same groups as when it was saved."
        )
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    params = [(param, index) for index, group in enumerate(groups) for param in group["params"]]
    whole = engine.layouts.capabilities.moves_whole
    known = set(saved_ids)
    may_add = whole or not known.isdisjoint(state_dict["state"])  # users add entries of their own, by names
    unknown = [repr(key) for key in state_dict["state"] if key not in known and not (may_add and isinstance(key, str))]
    if unknown:
        raise ValueError(f"load_state_dict: state for {listed(unknown)}, which none of its param groups lists.")
    param_of: dict[Any, Tensor] = {}
    loaded: dict[Tensor, UserState] = {}
    for saved_id, (param, index) in zip(saved_ids, params, strict=True):
        param_of[saved_id] = param
        given = state_dict["state"].get(saved_id) or {}
        # ``None`` in place of a tensor means no state yet: SGD used to save ``momentum_buffer: None``.
        present = {name: value for name, value in given.items() if value is not None}
        absent = dict.fromkeys(given.keys() - present.keys())
        saved = engine.conventions.without_dispensable(param, present)
        name = engine.names.get(param, str(saved_id))
        if saved and whole:
            # Any layout and dtypes, but the same sharding.
            homes = engine.plan.shards[param].homes if param in engine.plan.shards else {}
            for key in homes.keys() & saved.keys():
                _check_sharding(f"{name}, {key!r}", homes[key], saved[key])
            loaded[param] = saved | absent
        elif saved:
            layout = _expected_layout(engine, optimizer, param, index, saved_groups[index])
            checked = _checked(engine, name, param, layout, saved, optimizer.state.get(param, {}))
            loaded[param] = checked | dict.fromkeys(absent.keys() - layout.values.keys())
    return {param_of[key]: loaded[param_of[key]] for key in state_dict["state"] if param_of.get(key) in loaded}


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Refuse a dict that is not an optimizer's state dict; raise KeyError where torch does."""
    says = "load_state_dict: expected what optimizer.state_dict() gives"
    inner = [
        f"[{key!r}]" for key, value in state_dict.items() if isinstance(value, Mapping) and "param_groups" in value
    ]
    line = f"optimizer.load_state_dict(state_dict{inner[0] if inner else ''})"
    by_names = (
        "fsdp_offload.checkpoint.set_optimizer_state_dict(model, optimizer, state_dict) takes names of parameters"
    )
    for key, of in (("state", Mapping), ("param_groups", list | tuple)):
        if key not in state_dict:
            has = listed(map(repr, state_dict)) or "nothing"
            raise KeyError(f"{says}, got a dict without {key!r}; it has {has}. Write {line}; {by_names}.")
        check_is(state_dict[key], of, f"{says}: its {key!r}", line)
    for group in state_dict["param_groups"]:
        check_is(group, Mapping, f"{says}: a dict for each of its groups", line)
        if "params" not in group:
            raise KeyError(f"{says}, got a group without 'params'; it has {listed(map(repr, group))}.")
    for key, values in state_dict["state"].items():
        if not isinstance(key, str):
            check_is(values, Mapping | None, f"{says}: a dict for the state of {key!r}", line)


def _expected_layout(
    engine: Engine, optimizer: Optimizer, param: Tensor, index: int, saved_group: Mapping[str, Any]
) -> StateLayout:
    """Return the layout under the hyperparameters of the state dict; state that has existed keeps its dtypes."""
    group = optimizer.param_groups[index]
    merged = {**group, **saved_group, "params": group["params"]}  # the saved group may turn on amsgrad
    optimizer.param_groups[index] = merged
    try:
        layout = engine.layouts.learn(optimizer, param, merged, engine.names.get(param, ""))
    finally:
        optimizer.param_groups[index] = group
    shard = engine.plan.shards.get(param)
    return in_dtypes_of(layout, shard.homes) if shard is not None and shard.existed else layout


def _checked(
    engine: Engine, name: str, param: Tensor, layout: StateLayout, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> UserState:
    """Check the saved state of a parameter with a known layout; return it with counters as the optimizer keeps them."""
    expected = [*layout.values, *layout.scalars, *layout.left_out]
    # Only known optimizers are sure to have all of their state from the first step on.
    needed = (
        expected if engine.layouts.capabilities.known else [n for n in layout.values if n in current or not current]
    )
    master = layout.values.get(MASTER)
    rebuilt = [MASTER] if master is not None and can_rebuild(master.leaves[0].dtype) else []
    missing = [n for n in needed if n not in saved and n not in rebuilt]
    extra = [n for n in saved if n not in expected and n not in current]
    if extra and expected and not missing and MASTER not in extra:
        # Users may add entries to a parameter's state; none of the optimizer's own entries is missing.
        logger.warning(
            "load_state_dict: the state of %s has %s, which the optimizer does not use; kept as is", name, extra
        )
    elif missing or extra:
        raise ValueError(
            f"load_state_dict: the state of {name} should have {expected}; missing {missing}, extra {extra}. Was it "
            "saved by another optimizer, or with other options?"
        )
    for key, example in layout.scalars.items():
        if key in saved:
            value = saved[key]  # old checkpoints have numbers for tensors
            is_number = isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)
            if isinstance(example, Tensor | bool | int | float) and not is_number:
                got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"load_state_dict: {name}, {key!r} should be a number or a tensor with one element, got {got}."
                )
    for key, value_layout in layout.values.items():
        if key in saved:
            _check_value(engine, f"{name}, {key!r}", param, value_layout, saved[key])
    return {
        key: value if key in layout.values else _like_example(layout.scalars.get(key), value)
        for key, value in saved.items()
    }


def _check_value(engine: Engine, place: str, param: Tensor, value: ValueLayout, saved: object) -> None:
    home = param  # its sharding is expected, or that of the state, if the optimizer sees DTensors
    if is_dtensor(param) and not engine.layouts.capabilities.elementwise:
        meta = [torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta") for leaf in value.leaves]
        home = value.build(meta)
    _check_sharding(place, home, saved)
    conventions = engine.conventions
    leaves = value.leaves if conventions.keeps_raw_state else value.leaves[:1]
    wanted = [
        (leaf.shape, leaf.dtype if conventions.keeps_raw_state else conventions.saved_dtype(leaf.dtype))
        for leaf in leaves
    ]
    if forms_of(saved) != wanted:
        raise ValueError(
            f"load_state_dict: {place} should have local tensors of {wanted}, got {forms_of(saved)}. Nothing is cast "
            "or resized on load; convert the state dict first if that is what you want."
        )


def _check_sharding(place: str, home: Tensor, saved: object) -> None:
    if not isinstance(saved, Tensor):
        return
    wanted, found = placements_of(home), placements_of(saved)
    # Refuse a plain local tensor of the right size, too: it may be another rank's shard.
    if wanted != found and (saved.shape == home.shape or found is None):
        got = f"a plain tensor of shape {tuple(saved.shape)}" if found is None else found
        raise ValueError(
            f"load_state_dict: {place} should be a DTensor with mesh and placements {wanted}, got {got}. Load "
            "sharded checkpoints with torch.distributed.checkpoint, which reshards them, or pass a full one, by "
            "names, to fsdp_offload.checkpoint.set_optimizer_state_dict, which takes this rank's part."
        )


def _like_example(example: object, saved: Any) -> Any:
    """Copy a counter to the device and dtype that the optimizer keeps; the state dict may be used again."""
    if isinstance(saved, Tensor):
        return saved.detach().to(example, copy=True) if isinstance(example, Tensor) else saved.clone()
    return saved
