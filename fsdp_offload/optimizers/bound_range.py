"""A range of a state shard, bound to what the optimizer sees while it is on the device."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..state.shard import StateShard
from ..torch_compat.dtensor import local_shard, over_local


@dataclass(eq=False)
class BoundRange:
    """A range of a shard, bound to what the optimizer sees while it is on the device.

    Attributes:
        param: what the optimizer sees: the parameter itself, or an alias of its local tensor, flat for a range of a
            cut shard.
        values: the state tensors in the slot, by name.
        last: no later range of the same shard follows: this one commits the parameter's scalars.
        address: of the local shard when it was bound; another one means that the storage was exchanged.
        gradient: of this range, where it is not the parameter's own that is to be used (but a copy of it on the host).
    """

    shard: StateShard
    start: int
    stop: int
    param: Tensor
    values: dict[str, Tensor]
    last: bool
    address: int
    gradient: Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether it covers all of the shard."""
        return self.start == 0 and self.last

    def still_valid(self) -> bool:
        """Return whether the local shard is still the memory it was bound to."""
        return local_shard(self.shard.param).data_ptr() == self.address

    @property
    def is_alias(self) -> bool:
        """Whether the gradient has to be handed over, since the optimizer does not see the user's own tensor."""
        return self.param is not self.shard.param


def bind_range(
    shard: StateShard, start: int, stop: int, values: dict[str, Tensor], weights: Tensor | None = None
) -> BoundRange:
    """Bind the elements ``[start, stop)`` of ``shard`` to ``values``, its state tensors on the device.

    ``weights``: the parameter's own elements there, if it does not stay on the device.
    """
    local = local_shard(shard.param)
    last = stop == shard.local_numel
    whole = start == 0 and last
    if weights is not None:
        param = weights if shard.on_locals else over_local(shard.param, weights)
        return BoundRange(shard, start, stop, param, values, last, local.data_ptr())
    own = not shard.on_locals or (whole and local is shard.param)
    param = shard.param if own else _alias(local, start, stop, whole=whole)
    return BoundRange(shard, start, stop, param, values, last, local.data_ptr())


def slot_values(shard: StateShard, start: int, stop: int, take: Callable[[int, int], Tensor]) -> dict[str, Tensor]:
    """State tensors over the slot of the elements ``[start, stop)`` of ``shard``.

    ``take(leaf, nbytes)`` is a flat ``uint8`` tensor over the first ``nbytes`` bytes of that leaf's place.
    """
    whole = start == 0 and stop == shard.local_numel
    numbers = itertools.count()
    values = {}
    for name, value in shard.layout.values.items():
        parts = []
        for layout in value.leaves:
            nbytes = layout.nbytes if whole else (stop - start) * layout.dtype.itemsize
            typed = take(next(numbers), nbytes).view(layout.dtype)
            parts.append(typed.as_strided(layout.shape, layout.stride) if whole else typed)
        values[name] = parts[0] if shard.on_locals else value.build(parts)
    return values


def _alias(local: Tensor, start: int, stop: int, *, whole: bool) -> Tensor:
    alias = local.detach()
    return alias if whole else alias.view(-1)[start:stop]


def local_range(local: Tensor, start: int, stop: int) -> Tensor:
    """The elements ``[start, stop)`` of a flattened local tensor."""
    return local.reshape(-1)[start:stop]
