"""Optimizer state from ``torch.optim.AdamW`` to Transformer Engine's ``FusedAdam`` and back, on purpose.

================  ===========================================  ========================================================
                  AdamW                                        FusedAdam (2.20)
================  ===========================================  ========================================================
counter           ``state[p]["step"]``, an fp32 tensor         ``group["step"]``, an int; a tensor if ``capturable``
moments           in the parameter's dtype                     in fp32, whatever the optimizer keeps them in
masters           none                                         ``state[p]["master_param"]``
group             ``amsgrad``, ``maximize``, ``foreach``, ...  ``bias_correction``
================  ===========================================  ========================================================

Neither loads the other's by itself: the counters would be missing, and training would go on from a wrong one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..optimizers.masters import MASTER
from ..torch_compat.dtensor import local_shard, over_local
from .layouts import StateDict, as_fsdp_dtensor, by_fqn, flattened, is_fsdp_dtensor

_ConvertGroup = Callable[[dict[str, Any], Mapping[Any, Mapping[str, Any]]], dict[str, Any]]
_ConvertState = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARED_ENTRIES = ("lr", "betas", "eps", "weight_decay", "param_names")
_ADAMW_ENTRIES = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def adamw_to_fused_adam(state_dict: Mapping[str, Any]) -> StateDict:
    """Convert the state of an AdamW (or Adam) to what a FusedAdam would have saved.

    Moments in fp32 are handed on, not copied; others are cast. There are no masters: an offloaded FusedAdam makes them
    from the parameters when it loads this, so load the weights first.

    Args:
        state_dict: of ``get_optimizer_state_dict``, nested or flattened, or of ``AdamW.state_dict()``. Not changed.

    Raises:
        ValueError: parameters of one group have taken different numbers of steps, for which FusedAdam has no place; or
            the state is not that of an AdamW without ``amsgrad`` and ``maximize``.
    """

    def convert(group: dict[str, Any], states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
        if group.get("amsgrad") or group.get("maximize"):
            raise ValueError("FusedAdam has neither amsgrad nor maximize; the state cannot go on there.")
        steps = {key: _number(state["step"]) for key, state in states.items()}
        if len(set(steps.values())) > 1:
            raise ValueError(f"FusedAdam counts the steps of a whole group, and its parameters have taken {steps}.")
        counted = {"step": next(iter(steps.values()))} if steps else {}
        return {**_shared(group), "bias_correction": True, **counted}

    return _converted(state_dict, {*_MOMENTS, "step"}, set(), convert, lambda group, state: _moments(state))


def fused_adam_to_adamw(state_dict: Mapping[str, Any]) -> StateDict:
    """Undo :func:`adamw_to_fused_adam`. Moments are fp32, so the parameters have to be, too.

    Masters are dropped: write them into the fp32 parameters yourself, from ``state_dict``, or training goes on from the
    rounded weights.

    Raises:
        ValueError: the state is not that of a FusedAdam, or has masters of which only the lower 16 bits are there.
    """

    def convert(group: dict[str, Any], states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
        if not group.get("bias_correction", True):
            raise ValueError("AdamW always corrects the bias, and this FusedAdam has bias_correction=False.")
        if states and "step" not in group:
            raise ValueError("the state of a FusedAdam has 'step' in its param groups, and here there is none.")
        for key, state in states.items():
            if MASTER in state and state[MASTER].dtype is torch.int16:
                raise ValueError(
                    f"the master of {key} is kept as the lower 16 bits, which say nothing without the bf16 parameter. "
                    "Load this into a FusedAdam, and save the masters from there."
                )
        return {**_shared(group), **_ADAMW_ENTRIES}

    def with_step(group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(float(_number(group["step"])), device="cpu"), **_moments(state)}

    return _converted(state_dict, {*_MOMENTS}, {MASTER}, convert, with_step)


def _converted(
    state_dict: Mapping[str, Any],
    required: set[str],
    allowed: set[str],
    convert: _ConvertGroup,
    of_param: _ConvertState,
) -> StateDict:
    is_nested = isinstance(state_dict.get("param_groups"), Sequence)
    saved = by_fqn(state_dict)
    groups = (
        [dict(group) for group in state_dict["param_groups"]]
        if is_nested
        else [{**entries, "params": [fqn]} for fqn, entries in saved.entries.items()]
    )
    result: StateDict = {"state": {}, "param_groups": []}
    for group in groups:
        states = {key: saved.state[key] for key in group["params"] if saved.state.get(key)}
        for key, state in states.items():
            if not required <= state.keys() <= required | allowed:
                raise ValueError(f"the state of {key} has {sorted(state)}, expected {sorted(required)}.")
        result["param_groups"].append({**convert(group, states), "params": group["params"]})
        result["state"].update((key, of_param(group, state)) for key, state in states.items())
    if is_fsdp_dtensor(state_dict):
        return as_fsdp_dtensor(result)
    return result if is_nested else flattened(result)


def _shared(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _SHARED_ENTRIES if name in group}


def _moments(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: over_local(state[name], local_shard(state[name]).float()) for name in _MOMENTS}


def _number(step: Any) -> int:
    return int(step.item() if isinstance(step, Tensor) else step)
