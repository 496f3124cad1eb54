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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..fsdp.dtensor import local_shard, over_local
from ..fsdp.optim import unsupported_gradient
from ..state.layout import params_of
from .capabilities import Capabilities, Conventions
from .divided_step import DividedStep
from .masters import (
    LOW_PRECISION,
    MASTER,
    MasterKind,
    can_rebuild,
    close_master,
    has_master,
    kept_dtype,
    new_master,
    open_master,
    update_in_one_pass,
)

_OPEN_NUMEL = 1 << 26
"""Open so many elements together at most: an open remainder takes 8 bytes each, for the master and the gradient."""


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
            groups = zip(self.param_groups, with_gradient, strict=True)
            rests = [update_in_one_pass(self, self.plain_class, self.master_kind, *group) for group in groups]
            if not any(rests):
                return loss
            plain = DividedStep(self.plain_class, Capabilities(), self)
            for number, rest in enumerate(rests):
                ends = itertools.accumulate(local_shard(param).numel() for param in rest)
                opened = itertools.groupby(zip(rest, ends, strict=True), key=lambda pair: pair[1] // _OPEN_NUMEL)
                for _, some in opened:
                    _update_opened(self, plain, number, [param for param, _ in some])
            plain.commit(self)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the plain class does, but keep fp32 state: torch casts state to the dtype of its parameter.

        State of an optimizer without masters is widened. fp32 masters that are missing are made from the parameters.

        Raises:
            ValueError: remainders are missing, or masters have another dtype. Nothing has changed.
        """
        loaded: dict[Tensor, dict[str, Tensor]] = {}
        nothing = torch.empty(0)  # instead of each tensor: torch would make a rounded copy of it

        def take(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            ids = (number for group in saved["param_groups"] for number in group["params"])
            state = dict(saved["state"])
            for number, param in zip(ids, params_of(self), strict=False):
                if has_master(param) and state.get(number):
                    tensors = {n: v for n, v in state[number].items() if isinstance(v, Tensor)}
                    wanted = kept_dtype(self.master_kind, param.dtype)
                    found = tensors[MASTER].dtype if MASTER in tensors else None
                    if found != wanted and (found is not None or not can_rebuild(wanted)):
                        raise ValueError(
                            f"load_state_dict: expected {MASTER!r} in {wanted}, as add_masters(optimizer, "
                            f"{self.master_kind!r}) keeps it, got {found}. The lower bits of a master cannot be made "
                            "from a parameter: load a state dict of the same kind."
                        )
                    state[number] = state[number] | {n: nothing for n, v in tensors.items() if v.dim()}
                    loaded[param] = {n: v for n, v in tensors.items() if n != "step"}  # torch keeps that as it is
            return {**saved, "state": state}

        def put(_: Optimizer) -> None:
            for param, tensors in loaded.items():
                _take_over(self, param, tensors)

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


@functools.cache
def class_with_masters(cls: Any, kind: MasterKind) -> type[WithMasters]:
    """Return ``Master<Name>``, a subclass of ``cls``; the same class every time."""
    own = {"__module__": __name__, "__signature__": inspect.signature(cls), "plain_class": cls, "master_kind": kind}
    made: Any = types.new_class(f"Master{cls.__name__}", (WithMasters, cls), {}, lambda body: body.update(own))
    # Compiled code would trace into the shadow. Wrapped as by torch's constructor.
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
    return made  # type: ignore[no-any-return]


def plain_class_of(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class without masters; ``cls`` itself unless it is exactly one of :func:`class_with_masters`."""
    plain: type[Optimizer] = vars(cls).get("plain_class", cls)
    return plain


def _remade(cls: Any, kind: MasterKind) -> WithMasters:
    return object.__new__(class_with_masters(cls, kind))


@torch.no_grad()
def widen_state(optimizer: WithMasters) -> None:
    """Give a master to each parameter that has state already, and widen that to fp32, which loses nothing."""
    for param in filter(has_master, params_of(optimizer)):
        state = optimizer.state.get(param) or {}
        if state:
            narrow = {n: v for n, v in state.items() if isinstance(v, Tensor) and v.dtype == param.dtype}
            _take_over(optimizer, param, narrow)


def _take_over(optimizer: WithMasters, param: Tensor, values: Mapping[str, Tensor]) -> None:
    """Put ``values`` into the state of ``param``, in fp32, and make a master that is missing there."""
    state = optimizer.state[param]
    for name, value in values.items():
        state[name] = value.to(param.device, torch.float32 if value.is_floating_point() else value.dtype)
    if state and state.get(MASTER) is None:
        state[MASTER] = over_local(param, new_master(optimizer.master_kind, local_shard(param).detach()))


def _update_opened(optimizer: WithMasters, plain: DividedStep, number: int, params: Sequence[Tensor]) -> None:
    """Run the plain step on open masters in the place of the parameters of a group that need them."""
    kind, states = optimizer.master_kind, optimizer.state
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
    after = plain.run({number: list(opened)}, {updated: state for updated, state in seen.items() if state})
    for updated, (param, state) in opened.items():
        made = dict(after.get(updated, {}))
        if has_master(param):
            close_master(kind, updated, local_shard(param).detach(), state[MASTER])
            made[MASTER] = state[MASTER]
        before = states.get(param) or {}
        for name, value in made.items():
            if before.get(name) is None or value is not state.get(name):
                is_like = isinstance(value, Tensor) and value.dim() and value.shape == updated.shape
                states[param][name] = over_local(param, value) if is_like else value


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
