"""What there is to know of a class of optimizers for running it bucket by bucket; ``table.toml`` says it of many."""

import sys
import tomllib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..state.store import UserState


@dataclass
class LogicalStep:
    """What conventions make of one step of the user's, for the steps of its buckets."""

    kwargs: Mapping[str, Any]  # for the optimizer's ``step``
    pinned: list[dict[str, Any]]  # for each group: entries that buckets start from instead, and whose changes are lost
    attributes: Callable[[], dict[str, Any]] = dict  # makes attributes that buckets start from, likewise
    finish: Callable[[], None] = lambda: None  # commits, once, what the step has changed beyond that


class Conventions:
    """Conventions of ``torch.optim``; an optimizer with others overrides what it does differently."""

    # ``state_dict()`` gives and ``load_state_dict()`` takes what is in ``state``. If not, the class has methods of its
    # own for that, which want everything on the device, and :meth:`as_saved` and :meth:`as_kept` take their place.
    keeps_raw_state = True
    state_without_gradient = False  # the first step also creates the state of parameters that have no gradient
    group_by_group = False  # a step may have parameters of one group only
    reads_param_grad = True  # gradients are in ``param.grad``, where autograd puts them
    weights_win = False  # its step itself lets weights that somebody wrote win over its masters
    attributes_by_param: frozenset[str] = frozenset()  # names of attributes that are dicts with parameters as keys
    group_counters: Mapping[str, object] = {}  # what param groups get in the first step, as it is before that
    clears_gradients: bool | None = None  # what zero_grad() does, where its signature does not say: set them to None?
    instead_of_host_fraction = ""  # what to use where the CPU is to update a share, as this cannot

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
        return LogicalStep(kwargs, [{} for _ in optimizer.param_groups])

    def without_dispensable(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` without what nobody ever reads; not a copy if it is all needed."""
        return state

    def saved_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in a state dict of state that is kept in ``dtype``."""
        return dtype

    def as_saved(
        self, optimizer: Optimizer, param: Tensor, state: UserState, homes: Mapping[str, Tensor], *, empty: bool
    ) -> UserState:
        """The state of one parameter as a state dict has it: homes, or tensors in host memory made from them.

        ``empty``: what ``state`` holds means nothing; it is to be loaded into.
        """
        return state

    def as_kept(self, optimizer: Optimizer, param: Tensor, saved: UserState, homes: Mapping[str, Tensor]) -> UserState:
        """The inverse of :meth:`as_saved`, on the device where it takes the optimizer's own arithmetic."""
        return saved


@dataclass(frozen=True)
class Capabilities:
    """Ways in which an optimizer may be run bucket by bucket."""

    elementwise: bool = False  # every element's update depends on that element alone: it may run on local shards
    # Implementation ("for-loop", "foreach" or "fused"), device type and parameter dtype for which flat ranges give the
    # same bits as the whole.
    cuttable: frozenset[tuple[str, str, torch.dtype]] = frozenset()
    state_like_param: bool = False  # every state tensor has the parameter's shape: a small scratch tensor shows it
    # An elementwise class of torch.optim: it may also update fp32 masters of low-precision parameters, as add_masters
    # asks for, and a share of the parameters on the CPU (``host_fraction``).
    takes_masters: bool = False
    wrong_if_fused: frozenset[torch.dtype] = frozenset()  # of parameters: its fused CPU kernel miscomputes with these
    refusal: str = ""  # why this class cannot be offloaded at all
    refuses_dtensor: str = ""  # why it cannot be offloaded with sharded parameters
    known: bool = True  # a table that was tested says how the class may be divided
    moves_whole: bool = False  # nobody has said so: all state is loaded, stepped plainly, and stored
    conventions: Conventions = field(default_factory=Conventions)

    @property
    def joins(self) -> bool:
        """Return whether one update may take several buckets. What is in no table is checked bucket by bucket."""
        return self.elementwise and self.known and not self.conventions.attributes_by_param

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


# The table ------------------------------------------------------------------------------------------------------------

# On the CPU reduced precision is left whole: scalar and vector loops round it differently, and where the one takes over
# from the other depends on how a tensor's size divides among threads.
_FLOATS = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}


@cache
def rows() -> dict[str, dict[str, Any]]:
    """The rows by ``module:Class``, with the ``library`` that defines it and the ``versions`` that were seen."""
    table = tomllib.loads((resources.files(__package__) / "table.toml").read_text(encoding="utf-8"))
    return {
        name: {"library": library, "versions": part["versions"]}
        | ({"verdict": entry} if isinstance(entry, str) else entry)
        for library, part in table.items()
        for name, entry in part["classes"].items()
    }


def row_of(cls: type[Optimizer]) -> dict[str, Any]:
    """The row of exactly this class: the one that its module has under that name; empty if there is none."""
    for place, row in rows().items():
        module, _, name = place.partition(":")
        if name == cls.__qualname__ and getattr(sys.modules.get(module), name, None) is cls:
            return row
    return {}


def capabilities_of(cls: type[Optimizer], *, trust: bool = False) -> Capabilities:
    """Return the capabilities of exactly this class: a subclass may do anything in its ``step`` and inherits none.

    ``trust``: the user says that a class whose rows no test has proved here may be divided: as its row says, or each
    element for itself if it has none.

    Raises:
        ValueError: the row of a class that is trusted says that it mixes parameters.
    """
    row = row_of(cls)
    verdict = row.get("verdict")
    if row.get("library") != "torch" or verdict == "mixed":
        if not trust:
            return Capabilities(known=False, moves_whole=True)
        if verdict == "mixed":
            raise ValueError(
                f"trust_separable=True: what the step of {cls.__name__} writes to a parameter depends on others, says "
                f"optimizers/table.toml of {row['library']} {row['versions']}. So it cannot be divided. Leave it out."
            )
        of_elements = verdict in (None, "elementwise")
        cuttable = _cuttable(()) if of_elements else frozenset()
        return Capabilities(known=False, elementwise=of_elements, cuttable=cuttable)
    elementwise = verdict == "elementwise"
    return Capabilities(
        elementwise=elementwise,
        state_like_param=row.get("state-like-param", elementwise),
        takes_masters=elementwise,
        cuttable=_cuttable(row.get("fused", ())) if elementwise else frozenset(),
        wrong_if_fused=frozenset(getattr(torch, dtype) for dtype in row.get("wrong-if-fused", ())),
        refusal=row.get("reason", ""),
        refuses_dtensor=row.get("refuses-dtensor", ""),
    )


def _cuttable(fused_on: tuple[str, ...]) -> frozenset[tuple[str, str, torch.dtype]]:
    """What ``tests/cpu/test_cut_table.py`` proves: whole against cut, several steps, ``torch.equal``."""
    return frozenset(
        (how, device, dtype)
        for device, dtypes in _FLOATS.items()
        for how in ("for-loop", "foreach", *(["fused"] if device in fused_on else []))
        for dtype in dtypes
    )
