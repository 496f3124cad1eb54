"""Transformer Engine's ``FusedAdam``: differences from ``torch.optim``, as read in version 2.20.2.

==============================================  =====================================================================
FusedAdam                                       here
==============================================  =====================================================================
tensors in fp16 or fp8 have one scale each      whole parameters only: a range would get a scale of its own
scales are in ``_scales``, not in ``state``     stay on the device, and are handed to each bucket's step
``state_dict()`` unscales everything to fp32    the same content, computed on the host from the homes
``load_state_dict()`` scales it again           FusedAdam's own scaling, one parameter at a time on the device
a first step makes all state, without gradient  the same
fp32 parameters get a ``master_param``          not kept, as no kernel reads it, unless Megatron saves it
``capturable`` counts on the device, by the     counted once for the whole step; each bucket starts from that
overflow flag of the last group
==============================================  =====================================================================
"""

import re
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..fsdp.dtensor import has_inner_tensors, local_shard, over_local
from ..state.layout import params_of
from ..state.store import UserState
from .capabilities import Capabilities, Conventions, LogicalStep
from .masters import LOW_PRECISION, MASTER

OLDEST = (2, 18)  # before it, empty local shards, as fully_shard makes, were updated out of bounds or not at all
_with_unread_masters: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def keep_unread_masters(optimizer: Optimizer) -> None:
    """Keep masters of fp32 parameters as well when ``optimizer`` is attached: Megatron saves them."""
    _with_unread_masters.add(optimizer)


def is_fused_adam(cls: type[Optimizer]) -> bool:
    """Return whether ``cls`` is exactly Transformer Engine's class, without importing Transformer Engine."""
    return cls.__name__ == "FusedAdam" and cls.__module__.partition(".")[0] == "transformer_engine"


def capabilities_of_fused_adam(optimizer: Any) -> Capabilities:
    """Return how this FusedAdam may be run, which depends on the dtypes that it was made with."""
    refusal, version = "", getattr(sys.modules.get("transformer_engine"), "__version__", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < OLDEST:
        refusal = (
            f"FusedAdam of Transformer Engine {version} writes out of bounds, or skips updates, where a rank's shard "
            f"of a parameter is empty. Use {'.'.join(map(str, OLDEST))} or newer."
        )
    quantized = any(map(has_inner_tensors, params_of(optimizer)))
    if optimizer.store_param_remainders and quantized:
        refusal = (
            "FusedAdam with store_param_remainders=True and quantized parameters gives int16 remainders to a kernel "
            "that reads fp32 masters. Use store_param_remainders=False."
        )
    kept = {optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype}
    if optimizer.master_weights:
        kept.add(optimizer.master_weight_dtype)
    # State of other dtypes has a scale that depends on all elements.
    elementwise = kept <= {torch.float32, torch.bfloat16} and not quantized
    devices = ("cuda", "cpu") if elementwise else ()  # only tests have a FusedAdam for the CPU
    return Capabilities(
        elementwise=elementwise,
        state_like_param=elementwise,
        cuttable=frozenset(("for-loop", one, dtype) for one in devices for dtype in (torch.float32, *LOW_PRECISION)),
        refusal=refusal,
        conventions=FusedAdamConventions(optimizer, elementwise=elementwise),
    )


class FusedAdamConventions(Conventions):
    """The conventions of one FusedAdam."""

    keeps_raw_state = False
    state_without_gradient = True
    attributes_by_param = frozenset({"_scales"})
    instead_of_host_fraction = (
        ": its kernels are the device's, and nothing else has their rounding. torch.optim.AdamW(fused=True) with "
        "add_masters(optimizer, 'fp32') updates bf16 parameters on the CPU"
    )

    def __init__(self, optimizer: Any, *, elementwise: bool) -> None:
        self._elementwise = elementwise
        self._keeps_unread_masters = optimizer in _with_unread_masters
        self._decoupled = bool(optimizer.use_decoupled_grad)
        self._capturable = bool(optimizer.capturable)
        self._dtypes: dict[str, torch.dtype] = dict(optimizer.name_to_dtype_map)
        self.group_by_group = self._capturable
        self.reads_param_grad = not self._decoupled
        self.clears_gradients = getattr(optimizer, "set_grad_none", None) is not False
        self.group_counters = {"step": torch.zeros(1, dtype=torch.int) if self._capturable else 0}

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return ``decoupled_grad`` if the optimizer uses it; its dtype need not be the parameter's."""
        return getattr(param, "decoupled_grad", None) if self._decoupled else param.grad

    def hand_gradient(self, param: Any, grad: Tensor | None) -> None:
        if self._decoupled:
            param.decoupled_grad = grad
        else:
            super().hand_gradient(param, grad)

    def without_dispensable(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` without the master of an fp32 parameter: the kernels read the parameter itself."""
        is_unread = MASTER in state and param.dtype is torch.float32 and not has_inner_tensors(param)
        if self._keeps_unread_masters or not is_unread:
            return state
        return {name: value for name, value in state.items() if name != MASTER}

    def initial_state(self, optimizer: Any, param: Tensor) -> dict[str, Any] | None:
        """Make the state as the first step does, also for quantized parameters, whose scale needs all elements."""
        if self._elementwise:
            return None
        bare = _bare(optimizer, _scales={})
        bare.initialize_state(param, optimizer.store_param_remainders and param.dtype is torch.bfloat16)
        return dict(bare.state[param])

    # Counting on the device ---------------------------------------------------------------------------------------

    def begin(self, optimizer: Any, kwargs: Mapping[str, Any]) -> LogicalStep:
        """Count the step as FusedAdam does, and look for infinite gradients, once for all buckets."""
        if not self._capturable:
            return super().begin(optimizer, kwargs)
        flag = optimizer._dummy_overflow_buf
        device = flag.device
        scaler, found_inf = kwargs.get("grad_scaler"), torch.zeros(1, device=device)
        if scaler is not None:  # check all gradients now: the step of a bucket would check only its own
            found_inf = scaler._check_inf_per_device(optimizer).get(device, found_inf)
            checked = types.SimpleNamespace(
                _check_inf_per_device=lambda _: {device: found_inf}, _get_scale_async=scaler._get_scale_async
            )
            kwargs = {**kwargs, "grad_scaler": checked}
        now = flag.clone()
        ends = []
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(device)  # a checkpoint may have brought it to the host
            # Whether a group's step counts depends on the overflow flag that the previous group has left.
            is_first = "step" not in group
            ends.append(torch.ones_like(now) if is_first else group["step"].to(device) + (now != 1).to(torch.int))
            if group["params"]:
                now.copy_(found_inf)

        def finish() -> None:
            for group, end in zip(optimizer.param_groups, ends, strict=True):
                if isinstance(group.get("step"), Tensor) and group["step"].device == device:
                    group["step"].copy_(end)
                else:
                    group["step"] = end
            flag.copy_(now)

        pinned: list[dict[str, Any]] = [{"step": end - 1} for end in ends]
        return LogicalStep(kwargs, pinned, lambda: {"_dummy_overflow_buf": torch.zeros_like(flag)}, finish)

    # State dicts --------------------------------------------------------------------------------------------------

    def saved_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for everything but the remainders of masters."""
        return dtype if dtype is torch.int16 else torch.float32

    def as_saved(
        self, optimizer: Any, param: Tensor, state: UserState, homes: Mapping[str, Tensor], *, empty: bool
    ) -> UserState:
        """Unscale on the host as ``FusedAdam.get_unscaled_state`` does on the device."""
        found = dict(state)
        for name in homes.keys() & state.keys():
            local: Any = local_shard(state[name])
            if local.dtype is self.saved_dtype(local.dtype) and not has_inner_tensors(local):
                continue
            if empty:
                saved = torch.empty(local.shape, dtype=torch.float32, device="cpu")
            elif self._dtypes.get(name) is torch.uint8:
                saved = local.dequantize(dtype=torch.float32)
            else:
                saved = local.float()
                if local.dtype is torch.float16:
                    saved.mul_(optimizer._scales[param][name].to(local.device))
            found[name] = over_local(param, saved)
        return found

    def as_kept(self, optimizer: Any, param: Tensor, saved: UserState, homes: Mapping[str, Tensor]) -> UserState:
        """Scale as ``FusedAdam.set_scaled_state``, by a call of it if a scale has to be found; set ``_scales``."""
        found = dict(saved)
        for name in homes.keys() & saved.keys():
            local, dtype = local_shard(saved[name]).detach(), self._dtypes.get(name, torch.float32)
            is_scaled = local.dtype is not torch.int16 and dtype is not torch.float32
            if is_scaled and dtype is torch.bfloat16:
                scale = torch.ones([1], dtype=torch.float32, device=param.device)
                optimizer._scales.setdefault(param, {}).setdefault(name, scale)
                local = local.bfloat16()
            elif is_scaled:
                bare = _bare(optimizer)
                # A copy: fp16 is scaled in place.
                bare.set_scaled_state(param, name, local.to(param.device, torch.float32, copy=True))
                local = local_shard(bare.state[param][name])
            found[name] = over_local(homes[name], local)
        return found


def _bare(optimizer: Any, **attributes: Any) -> Any:
    """Return a FusedAdam with the optimizer's attributes and no state, to call methods of the class."""
    bare: Any = object.__new__(next(cls for cls in type(optimizer).__mro__ if is_fused_adam(cls)))
    bare.__dict__.update(optimizer.__dict__, state=defaultdict(dict), **attributes)
    return bare
