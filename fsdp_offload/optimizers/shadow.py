"""An optimizer of the user's class that the user never sees: it is given one bucket's parameters and state."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..state.store import UserState
from ..torch_compat.optim import no_global_step_hooks, plain_step_of
from .shared_values import SharedValues, instance_attributes


def fill_bare(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    """Make an object of an optimizer's class, made without its constructor, into an optimizer with ``attributes``."""
    defaults = attributes.get("defaults")
    known = set(defaults) if isinstance(defaults, dict) else set()
    # As if unpickled: creates the (empty) hook tables that step() may look at.
    Optimizer.__setstate__(optimizer, attributes)
    if isinstance(defaults, dict):
        for name in defaults.keys() - known:  # what torch adds to old pickles; this dict is the real optimizer's
            del defaults[name]


class Shadow:
    """The optimizer's own class, run on what it is given."""

    def __init__(self, cls: type[Optimizer], *, without_hooks: Callable[[], Any] = no_global_step_hooks) -> None:
        """Take the class; ``without_hooks`` makes the context in which hooks for all optimizers do not fire."""
        self.cls = cls
        self._without_hooks = without_hooks
        # torch wraps step() to fire hooks; for a bucket they must not fire, since the logical step fires them once.
        self._step = plain_step_of(cls)
        self._object: Optimizer = object.__new__(cls)

    def run(
        self,
        shared: SharedValues,
        params: Sequence[list[Tensor]],
        state: Mapping[Tensor, UserState],
        kwargs: Mapping[str, Any],
        by_param: Mapping[str, dict[Tensor, Any]] | None = None,
        counting: Collection[int] | None = None,
    ) -> dict[Tensor, UserState]:
        """One step on ``params`` (a list for each group). Returns the state after it, by parameter.

        ``by_param`` overrides attributes that are dicts with parameters as keys; what the step adds is found there.
        ``counting`` is as for :meth:`SharedValues.groups_for`.
        """
        shadow = self._object
        groups = shared.groups_for(params, counting)
        shadow.__dict__.clear()
        filled: defaultdict[Tensor, UserState] = defaultdict(dict, state)
        fill_bare(shadow, {**shared.attributes, **(by_param or {}), "param_groups": groups, "state": filled})
        try:
            with self._without_hooks():  # a subclass's step may call a hooked one of its parent
                self._step(shadow, **kwargs)
            keys: list[object] = list(shadow.state)
            foreign = [key for key in keys if not isinstance(key, Tensor)]
            if foreign:
                raise RuntimeError(
                    "the optimizer keeps state of its own beside that of parameters "
                    f"(optimizer.state[{foreign[0]!r}]); it cannot be divided among buckets"
                )
            shared.collect(shadow.param_groups, instance_attributes(shadow))
            return filled if shadow.state is filled else dict(shadow.state)
        finally:
            shadow.__dict__.clear()  # holds no gradient, no slot and no attribute beyond the step
