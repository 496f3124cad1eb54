"""Facts needed to run an optimizer class bucket by bucket; ``table.toml`` lists known classes."""

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
    """Arguments for the steps of the buckets of one logical step, made by :meth:`Conventions.begin`."""

    kwargs: Mapping[str, Any]  # for the optimizer's ``step``
    pinned: list[dict[str, Any]]  # per group: entries that replace the group's in each bucket; changes are dropped
    attributes: Callable[[], dict[str, Any]] = dict  # likewise, made for each bucket
    finish: Callable[[], None] = lambda: None  # commits other changes of the step, once


class Conventions:
    """Conventions of ``torch.optim``; subclasses override them for other optimizers."""

    # ``state_dict()`` returns and ``load_state_dict()`` takes ``state`` as it is. If False, the class converts state in
    # methods of its own, which need all of it on the device: :meth:`as_saved` and :meth:`as_kept` replace them.
    keeps_raw_state = True
    state_without_gradient = False  # the first step also creates the state of parameters that have no gradient
    group_by_group = False  # a step may have parameters of one group only
    reads_param_grad = True  # gradients are in ``param.grad``, where autograd puts them
    weights_win = False  # its own step copies weights that the user has written into the masters
    attributes_by_param: frozenset[str] = frozenset()  # names of attributes that are dicts with parameters as keys
    group_counters: Mapping[str, object] = {}  # initial values of entries that the first step adds to param groups
    clears_gradients: bool | None = None  # whether zero_grad() sets gradients to None; None: see its signature
    instead_of_host_fraction = ""  # advice if host_fraction is set, which this optimizer cannot use

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return the gradient that the optimizer updates ``param`` with."""
        return param.grad

    def hand_gradient(self, param: Tensor, grad: Tensor | None) -> None:
        """Set or clear the gradient of a local tensor that stands for a parameter."""
        if grad is not None and grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = grad

    def initial_state(self, optimizer: Optimizer, param: Tensor) -> dict[str, Any] | None:
        """Return the state that a first step would create for ``param``; ``None`` if only a step can tell."""
        return None

    def begin(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> LogicalStep:
        return LogicalStep(kwargs, [{} for _ in optimizer.param_groups])

    def without_dispensable(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` without values that are never read; ``state`` itself if there are none."""
        return state

    def saved_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that state kept in ``dtype`` has in a state dict."""
        return dtype

    def as_saved(
        self, optimizer: Optimizer, param: Tensor, state: UserState, homes: Mapping[str, Tensor], *, empty: bool
    ) -> UserState:
        """Return the state of one parameter for a state dict: homes, or tensors in host memory made from them.

        ``empty``: ``state`` holds no values yet, and is to be loaded into.
        """
        return state

    def as_kept(self, optimizer: Optimizer, param: Tensor, saved: UserState, homes: Mapping[str, Tensor]) -> UserState:
        """Invert :meth:`as_saved`, on the device if that takes the optimizer's own arithmetic."""
        return saved


@dataclass(frozen=True)
class Capabilities:
    """Ways in which an optimizer may be run bucket by bucket."""

    elementwise: bool = False  # every element's update depends on that element alone: it may run on local shards
    # Implementation ("for-loop", "foreach" or "fused"), device type and parameter dtype for which flat ranges give the
    # same bits as the whole.
    cuttable: frozenset[tuple[str, str, torch.dtype]] = frozenset()
    # Its updates may run collectives on DTensors: all ranks have to run them in one order.
    communicates: bool = False
    state_like_param: bool = False  # every state tensor has the parameter's shape: a small scratch tensor shows it
    # An elementwise class of torch.optim: it may also update fp32 masters of low-precision parameters, as add_masters
    # asks for, and a share of the parameters on the CPU (``host_fraction``).
    takes_masters: bool = False
    wrong_if_fused: frozenset[torch.dtype] = frozenset()  # dtypes of parameters that its fused CPU kernel miscomputes
    refusal: str = ""  # why this class cannot be offloaded at all
    refuses_dtensor: str = ""  # why it cannot be offloaded with sharded parameters
    known: bool = True  # the class has a tested row in the table
    moves_whole: bool = False  # not known to be divisible: all state is loaded, stepped plainly, and stored
    conventions: Conventions = field(default_factory=Conventions)

    @property
    def joins(self) -> bool:
        """Return whether one update may take several buckets. Classes without a row are checked bucket by bucket."""
        return self.elementwise and self.known and not self.conventions.attributes_by_param

    def host_options(self, group: Mapping[str, Any], dtypes: Set[torch.dtype]) -> dict[str, Any]:
        """Return entries that replace a param group's for updates on the host: the fused kernel if there is one.

        ``dtypes``: of the parameters updated there. No fused kernel takes complex ones.
        """
        options: dict[str, Any] = {}
        if any(dtype.is_complex for dtype in dtypes) or not dtypes.isdisjoint(self.wrong_if_fused):
            options = {"fused": False} if group.get("fused") else {}
        elif ("fused", "cpu", torch.float32) in self.cuttable and "fused" in group:
            options = {"fused": True, "foreach": False}
        if "capturable" in group:
            options["capturable"] = False  # has no meaning without a device
        return options


# The table ------------------------------------------------------------------------------------------------------------

# On the CPU, bf16 and fp16 are not cut: scalar and vector loops round them differently, and which loop gets an element
# depends on how a tensor's size divides among threads.
_FLOATS = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Return the rows by ``module:Class``, with the ``library`` that defines it and the ``versions`` seen."""
    table = tomllib.loads((resources.files(__package__) / "table.toml").read_text(encoding="utf-8"))
    return {
        name: {"library": library, "versions": part["versions"]}
        | ({"verdict": entry} if isinstance(entry, str) else entry)
        for library, part in table.items()
        for name, entry in part["classes"].items()
    }


def row_of(cls: type[Optimizer]) -> dict[str, Any]:
    """Return the row of exactly this class, as its module exports it; empty if there is none."""
    for place, row in rows().items():
        module, _, name = place.partition(":")
        if name == cls.__qualname__ and getattr(sys.modules.get(module), name, None) is cls:
            return row
    return {}


def capabilities_of(cls: type[Optimizer], *, trust: bool = False) -> Capabilities:
    """Return the capabilities of exactly this class; a subclass, which may do anything in ``step``, inherits none.

    ``trust``: divide a class outside of ``torch.optim`` as its row says or, without a row, by element.

    Raises:
        ValueError: ``trust`` is set, and the row of the class says that its step mixes parameters.
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
        return Capabilities(known=False, elementwise=of_elements, cuttable=cuttable, communicates=not of_elements)
    elementwise = verdict == "elementwise"
    return Capabilities(
        elementwise=elementwise,
        communicates=not elementwise,
        state_like_param=row.get("state-like-param", elementwise),
        takes_masters=elementwise,
        cuttable=_cuttable(row.get("fused", ())) if elementwise else frozenset(),
        wrong_if_fused=frozenset(getattr(torch, dtype) for dtype in row.get("wrong-if-fused", ())),
        refusal=row.get("reason", ""),
        refuses_dtensor=row.get("refuses-dtensor", ""),
    )


def _cuttable(fused_on: tuple[str, ...]) -> frozenset[tuple[str, str, torch.dtype]]:
    """Return cases in which ``tests/cpu/test_cut_table.py`` finds cut and whole ``torch.equal`` after several steps."""
    return frozenset(
        (how, device, dtype)
        for device, dtypes in _FLOATS.items()
        for how in ("for-loop", "foreach", *(["fused"] if device in fused_on else []))
        for dtype in dtypes
    )
