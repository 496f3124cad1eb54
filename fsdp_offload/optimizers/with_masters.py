"""Optimizers with masters: the classes that :func:`fsdp_offload.add_masters` gives to those of ``torch.optim``.

A step opens the master of each bf16 or fp16 parameter, lets the plain class update it with an fp32 gradient and fp32
state, and writes the parameter from it. Other parameters are updated as they are. The state of a parameter is that of
the plain class and ``master_param``, so an offloaded one is an elementwise optimizer with one more tensor of state.

The plain class sees local tensors, also of sharded parameters: it may, since every class here is elementwise.
"""

import functools
import inspect
import itertools
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..fsdp.dtensor import local_shard, over_local
from ..fsdp.optim import plain_step_of, unsupported_gradient
from ..state.layout import params_of
from .capabilities import Capabilities, Conventions
from .fused_masters import MasterRange, fits, is_exact, step_of_group, update_master
from .masters import LOW_PRECISION, MASTER, MasterKind, can_rebuild, close_master, kept_dtype, new_master, open_master

_OPEN_NUMEL = 1 << 26
"""Open so many elements together at most: an open remainder takes 8 bytes each, for the master and the gradient."""

_READ_BY_KERNEL = (MASTER, "exp_avg", "exp_avg_sq", "step")


class WithMasters(Optimizer):
    """Mixed into the class of an optimizer by :func:`class_with_masters`."""

    plain_class: type[Optimizer]  # whose arithmetic updates the masters
    master_kind: MasterKind  # what is kept of them
    is_stepping = False  # its own step has been called, and not one that somebody captured before it had masters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        widen_state(self)  # Adagrad makes it here

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update masters as the plain class updates parameters, and round the parameters from them.

        Raises:
            RuntimeError: a gradient has other placements than its parameter, or is sparse. Nothing has been changed.
            ValueError: ``"remainder"`` with an fp16 parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = [[param for param in group["params"] if param.grad is not None] for group in self.param_groups]
        for param in itertools.chain.from_iterable(with_gradient):
            if problem := unsupported_gradient(param, param.grad):
                raise RuntimeError(f"step() with masters: {problem}. Nothing has been changed.")
        with torch.no_grad():
            for group, params in zip(self.param_groups, with_gradient, strict=True):
                rest = _after_one_pass(self, group, params)
                ends = itertools.accumulate(local_shard(param).numel() for param in rest)
                opened = itertools.groupby(zip(rest, ends, strict=True), key=lambda pair: pair[1] // _OPEN_NUMEL)
                for _, some in opened:
                    _update_by_plain_class(self, group, [param for param, _ in some])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the plain class does, but keep fp32 state: torch casts state to the dtype of its parameter.

        State of an optimizer without masters is widened. fp32 masters that are missing are made from the parameters.

        Raises:
            ValueError: remainders are missing, or masters have another dtype. Nothing has changed.
        """
        loaded: dict[Tensor, Mapping[str, Any]] = {}
        nothing = torch.empty(0)  # instead of each tensor: torch would make a rounded copy of it

        def take(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            ids = (number for group in saved["param_groups"] for number in group["params"])
            state = dict(saved["state"])
            for number, param in zip(ids, params_of(self), strict=False):
                if has_master(param) and number in state:
                    loaded[param] = of_param = state[number]
                    master, wanted = of_param.get(MASTER), kept_dtype(self.master_kind, param.dtype)
                    found = master.dtype if isinstance(master, Tensor) else None
                    if of_param and found != wanted and (found is not None or not can_rebuild(wanted)):
                        raise ValueError(
                            f"load_state_dict: expected {MASTER!r} in {wanted}, as add_masters(optimizer, "
                            f"{self.master_kind!r}) keeps it, got {found}. The lower bits of a master cannot be made "
                            "from a parameter: load a state dict of the same kind."
                        )
                    state[number] = {n: nothing if _is_dense(v) else v for n, v in of_param.items()}
            return {**saved, "state": state}

        def put(_: Optimizer) -> None:
            for param, saved in loaded.items():
                values = {n: v for n, v in saved.items() if isinstance(v, Tensor) and n != "step"}  # which torch keeps
                self.state[param].update(_widened(param, values))
                _make_master(self.master_kind, param, self.state[param])

        # Behind the user's hooks, which may rewrite what is loaded, and before those that look at the result.
        last = self.register_load_state_dict_pre_hook(take)
        first = self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()

    def __reduce_ex__(self, protocol: object) -> Any:
        return _remade, (self.plain_class, self.master_kind), self.__getstate__()


_classes: dict[tuple[type[Optimizer], MasterKind], Any] = {}


def class_with_masters(cls: type[Optimizer], kind: MasterKind) -> type[WithMasters]:
    """Return ``Master<Name>``, a subclass of ``cls``; the same class every time."""
    if (cls, kind) in _classes:
        return _classes[cls, kind]  # type: ignore[no-any-return]
    own = {"__module__": __name__, "__signature__": inspect.signature(cls), "plain_class": cls, "master_kind": kind}
    made: Any = types.new_class(f"Master{cls.__name__}", (WithMasters, cls), {}, lambda body: body.update(own))
    # Compiled code would trace into attributes that are exchanged and put back. Wrapped as by torch's constructor.
    plain = torch.compiler.disable(WithMasters.step)
    hooked: Any = Optimizer.profile_hook_step(plain)

    def step(self: WithMasters, *args: Any, **kwargs: Any) -> Any:
        self.is_stepping = True
        try:
            return hooked(self, *args, **kwargs)
        finally:
            del self.is_stepping

    made.step = torch.compiler.disable(functools.wraps(hooked)(step))
    made.step.hooked, made.step.__wrapped__ = True, plain
    _classes[cls, kind] = made
    return made  # type: ignore[no-any-return]


def plain_class_of(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class without masters; ``cls`` itself unless it is exactly one of :func:`class_with_masters`."""
    plain: type[Optimizer] = vars(cls).get("plain_class", cls)
    return plain


def _remade(cls: type[Optimizer], kind: MasterKind) -> WithMasters:
    return object.__new__(class_with_masters(cls, kind))


def has_master(param: Tensor) -> bool:
    """Return whether ``param`` needs one: parameters in fp32 and fp64 are their own masters."""
    return param.dtype in LOW_PRECISION


# Existing state ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def widen_state(optimizer: WithMasters) -> None:
    """Give a master to each parameter that has state already, and widen that to fp32, which loses nothing."""
    for param in filter(has_master, params_of(optimizer)):
        state = optimizer.state.get(param) or {}
        narrow = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.dtype == param.dtype}
        state.update(_widened(param, narrow))
        _make_master(optimizer.master_kind, param, state)


def _widened(param: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.to(param.device, torch.float32 if v.is_floating_point() else v.dtype) for n, v in values.items()}


def _make_master(kind: MasterKind, param: Tensor, state: dict[str, Any]) -> None:
    if state and state.get(MASTER) is None:
        state[MASTER] = over_local(param, new_master(kind, local_shard(param).detach()))


# One step ------------------------------------------------------------------------------------------------------------


def _after_one_pass(optimizer: WithMasters, group: Mapping[str, Any], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Update by one kernel what has one with the same bits, and return the rest."""
    step = step_of_group(optimizer.plain_class, group, vars(optimizer))
    if step is None:
        return params
    steps, rest = [], []
    for param in params:
        state = optimizer.state.get(param) or {}
        values = [local_shard(state[name]) for name in _READ_BY_KERNEL if state.get(name) is not None]
        if has_master(param) and len(values) == len(_READ_BY_KERNEL):
            part = MasterRange(local_shard(param).detach(), local_shard(param.grad), *values)  # type: ignore[arg-type]
            if fits(part) and is_exact(step, optimizer.master_kind, part):
                update_master(step, optimizer.master_kind, part)
                steps.append(part.step)
                continue
        rest.append(param)
    if steps:
        torch._foreach_add_(steps, 1)
    return rest


def _update_by_plain_class(optimizer: WithMasters, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
    """Run the plain step with masters for parameters. No class of torch writes into its groups, so they are copied."""
    kind, groups, states = optimizer.master_kind, optimizer.param_groups, optimizer.state
    opened: dict[Tensor, tuple[Tensor, dict[str, Any]]] = {}  # what is updated, with its parameter and local state
    for param in params:
        state = {n: local_shard(v) if isinstance(v, Tensor) else v for n, v in (states.get(param) or {}).items()}
        updated, grad = local_shard(param).detach(), local_shard(param.grad)  # type: ignore[arg-type]
        if has_master(param):
            if state.get(MASTER) is None:
                state[MASTER] = new_master(kind, updated)
            updated = open_master(kind, updated, state[MASTER]).detach()  # an alias, which takes the gradient with it
            grad = grad.to(torch.float32)
        Conventions().hand_gradient(updated, grad)
        opened[updated] = (param, state)
    seen = {updated: {n: v for n, v in state.items() if n != MASTER} for updated, (_, state) in opened.items()}
    optimizer.param_groups = [{**group, "params": list(opened)}]
    optimizer.state = defaultdict(dict, {updated: state for updated, state in seen.items() if state})
    try:
        plain_step_of(optimizer.plain_class)(optimizer)
        after = optimizer.state
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    for updated, (param, state) in opened.items():
        made = dict(after.get(updated, {}))
        if has_master(param):
            close_master(kind, updated, local_shard(param).detach(), state[MASTER])
            made[MASTER] = state[MASTER]
        before = states.get(param) or {}
        for name, value in made.items():
            if before.get(name) is None or value is not state.get(name):
                is_like = _is_dense(value) and value.shape == updated.shape
                states[param][name] = over_local(param, value) if is_like else value


def _is_dense(value: Any) -> bool:
    """Return whether a value of state is no counter."""
    return isinstance(value, Tensor) and value.dim() > 0


# For an offload ------------------------------------------------------------------------------------------------------


def capabilities_with_masters(capabilities: Capabilities) -> Capabilities:
    """Capabilities of a class with masters: low-precision parameters are updated as fp32 ones are."""
    conventions = Conventions()
    conventions.weights_win = True
    same = {torch.float32: (torch.float32, *LOW_PRECISION), torch.float64: (torch.float64,)}
    return replace(
        capabilities,
        cuttable=frozenset(
            (how, where, one) for how, where, dtype in capabilities.cuttable for one in same.get(dtype, ())
        ),
        wrong_if_fused=capabilities.wrong_if_fused - set(LOW_PRECISION),
        conventions=conventions,
    )
