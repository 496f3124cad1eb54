"""Capabilities and conventions of a class of optimizers: what the library has to know to run it bucket by bucket."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class LogicalStep:
    """Values of one step of the user's that the steps of its buckets share.

    Attributes:
        kwargs: for the optimizer's ``step``.
        pinned: for each param group, entries that every bucket starts from instead of the group's own, and whose
            changes nobody looks at. Tensors are copied for each bucket.
        attributes: makes attributes that every bucket starts from, likewise.
        finish: commits, once, what the step has changed in groups and attributes beyond that.
    """

    kwargs: Mapping[str, Any]
    pinned: list[dict[str, Any]]
    attributes: Callable[[], dict[str, Any]] = dict
    finish: Callable[[], None] = lambda: None


class Conventions:
    """Conventions of ``torch.optim``; an optimizer with others overrides what it does differently.

    Attributes:
        keeps_raw_state: ``state_dict()`` gives and ``load_state_dict()`` takes what is in ``state``. If not, the class
            has methods of its own for that, which want everything on the device, and :meth:`saved` and :meth:`kept`
            take their place.
        state_without_gradient: the first step also creates the state of parameters that have no gradient.
        group_by_group: a step may have parameters of one group only.
        attributes_by_param: names of attributes that are dicts with parameters as keys.
        reads_param_grad: gradients are in ``param.grad``, where autograd puts them.
        group_counters: what param groups get in the first step, as it is before that.
        weights_win: its step itself lets weights that somebody wrote win over its masters.
        instead_of_host_fraction: what to use where the CPU is to update a share, for the message that this cannot.
    """

    instead_of_host_fraction = ""
    weights_win = False
    keeps_raw_state = True
    state_without_gradient = False
    group_by_group = False
    reads_param_grad = True
    attributes_by_param: frozenset[str] = frozenset()
    group_counters: Mapping[str, object] = {}  # nobody writes it

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient that the optimizer updates ``param`` with."""
        return param.grad

    def hand_gradient(self, param: Tensor, grad: Tensor | None) -> None:
        """Give a local tensor that stands for a parameter its gradient, or take it away."""
        if grad is not None and grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = grad

    def initial_state(self, optimizer: Optimizer, param: Tensor) -> dict[str, Any] | None:
        """Return the state that a first step would create for ``param``; ``None`` where only a step can tell."""
        return None

    def begin(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> LogicalStep:
        """Prepare one logical step."""
        return LogicalStep(kwargs, [{} for _ in optimizer.param_groups])

    def without_dispensable(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` without what nobody ever reads; not a copy if it is all needed."""
        return state

    def saved_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the state ``name`` in a state dict, where it is kept in ``dtype``."""
        return dtype

    def saved(self, optimizer: Optimizer, param: Tensor, name: str, local: Tensor) -> Tensor:
        """Return the state ``name`` as a state dict has it, from the local tensor on the host."""
        return local

    def kept(self, optimizer: Optimizer, param: Tensor, name: str, saved: Tensor) -> Tensor:
        """Undo :meth:`saved`: return what ``state[param]`` is to hold for a local tensor of a state dict."""
        return saved


@dataclass(frozen=True)
class Capabilities:
    """Ways in which an optimizer may be run bucket by bucket.

    Attributes:
        elementwise: every element's update depends on that element alone, so it may run on local shards.
        cuttable: (implementation, device type, parameter dtype) for which flat ranges give the same bits as the whole.
            The implementation is ``"for-loop"``, ``"foreach"`` or ``"fused"``.
        state_like_param: every state tensor has the parameter's shape, so a small scratch tensor shows the layout.
        takes_masters: an elementwise class of ``torch.optim``: it may also update fp32 masters of low-precision
            parameters (``add_masters``), and a share of the parameters on the CPU (``host_fraction``).
        wrong_if_fused: parameter dtypes with which its fused CPU kernel computes something else.
        refusal: why this class cannot be offloaded at all; empty if it can.
        refuses_dtensor: why it cannot be offloaded with sharded parameters; empty if it can.
        known: a table that was tested says how the class may be divided.
        trusted: the user says so, of a class that no table knows.
        conventions: in which way it differs from ``torch.optim``.
    """

    elementwise: bool = False
    cuttable: frozenset[tuple[str, str, torch.dtype]] = frozenset()
    state_like_param: bool = False
    takes_masters: bool = False
    wrong_if_fused: frozenset[torch.dtype] = frozenset()
    refusal: str = ""
    refuses_dtensor: str = ""
    known: bool = True
    trusted: bool = False
    conventions: Conventions = field(default_factory=Conventions)

    @property
    def moves_whole(self) -> bool:
        """Whether nobody has said how its step may be divided: all state is loaded, stepped plainly, and stored."""
        return not (self.known or self.trusted)

    def host_options(self, group: Mapping[str, Any], dtypes: Set[torch.dtype]) -> dict[str, Any]:
        """Entries that a param group has instead of its own where the host updates: the fused kernel if there is one.

        ``dtypes``: of what it updates there. No fused kernel takes complex ones.
        """
        options: dict[str, Any] = {}
        if any(dtype.is_complex for dtype in dtypes) or not dtypes.isdisjoint(self.wrong_if_fused):
            options = {"fused": False} if group.get("fused") else {}
        elif ("fused", "cpu", torch.float32) in self.cuttable and "fused" in group:
            options = {"fused": True, "foreach": False}
        if "capturable" in group:
            options["capturable"] = False  # means nothing without a device
        return options
