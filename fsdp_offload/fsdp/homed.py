"""Parameters whose shard is host memory while they belong to a mesh of accelerators: whoever uses one uses the host's.

Autograd gives such a parameter its gradient on the device, so it says of itself that it is there, and torch refuses to
make a view of it: the new tensor would be on the host. So functions of the parameter are given a stand-in, a DTensor
over the same host memory, as a model under ``CPUOffloadPolicy`` has it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from .dtensor import STAND_IN, local_shard, over_local
from .guard import Guard

_WAIT = "_fsdp_offload_wait"
_USES = "_fsdp_offload_uses"
_COMMUNICATES = {"full_tensor", "redistribute"}
"""Methods of DTensor that an accelerator's backend can only do with memory of the accelerator."""


class _Homed(Guard):
    """Redirects functions to stand-ins."""

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func`` with stand-ins; what it changes in place is the parameter."""
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__delete__"):
            self.refuse(f"setting tensor.{getattr(func.__self__, '__name__', '?')}")
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func = Tensor.detach  # the same, and writes into it are counted
        stand_ins: dict[Tensor, Tensor] = {}

        def stand_in(value: Any) -> Any:
            if not self.guards(value):
                return value
            if value not in stand_ins:
                stand_ins[value] = _stand_in_for(value, func)
            return stand_ins[value]

        args, kwargs = pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "same device" in str(error):
                raise RuntimeError(f"{error} {_WHERE}") from error
            raise
        if func == Tensor.detach:
            (param,) = stand_ins
            _count_versions_with(param, result)
        if name.startswith("_foreach_") and name.endswith("_"):
            for param, other in stand_ins.items():
                if any(other is one for one in args[0]):
                    increment_version(local_shard(param))  # DTensors do not
        return next((param for param, other in stand_ins.items() if result is other), result)

    def on_method(self, tensor: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of DTensor on the stand-in."""
        other = _stand_in_for(tensor, getattr(type(tensor), name))
        if name in _COMMUNICATES:
            device = tensor.device_mesh.device_type  # type: ignore[attr-defined]
            followed = other.requires_grad
            other = over_local(tensor, local_shard(tensor).detach().to(device))
            if followed:
                other.requires_grad_().register_hook(_refuse_gradient)
        return getattr(other, name)(*args, **kwargs)

    def derive(self, cls: Any) -> type[Tensor]:
        """As for other guards; a gradient made from host memory (``zeros_like``) goes to where autograd's are.

        torch.distributed.checkpoint gives such gradients to a fresh optimizer, so its first step creates the state.
        """
        made: Any = super().derive(cls)
        grad: property = made.grad

        def put(param: Tensor, value: Any) -> None:
            if isinstance(value, Tensor) and local_shard(value).device != param.device:
                value = over_local(value, local_shard(value).to(param.device))
            grad.__set__(param, value)

        made.grad = grad.setter(put)
        return cast("type[Tensor]", made)


_WHERE = (
    "This parameter lives on the host (OffloadPolicy(parameters=True)): between its uses, functions work on its host "
    "memory. Bring the other tensors there, or take a copy on the device: param.detach().to(device)."
)
_HOMED = _Homed(
    "Homed",
    "{what} on a parameter that lives on the host: " + _WHERE,
    lets_gradients=True,
    attributes=("grad", "requires_grad", "dtype", "device", "shape", "is_leaf"),
)


def put_home(param: Tensor, local: Tensor, wait: Callable[[Tensor], None], stand_in: Tensor | None = None) -> Tensor:
    """Let functions of ``param``, a DTensor, work on ``local``, once ``wait(param)`` has returned."""
    stand_in = over_local(param, local) if stand_in is None else stand_in
    vars(param).update({_WAIT: wait, STAND_IN: stand_in})
    _HOMED.put_on([param])
    return stand_in


def is_homed(param: Tensor) -> bool:
    """Return whether :func:`put_home` has been called."""
    return STAND_IN in vars(param)


def take_from_home(param: Tensor) -> None:
    """Undo :func:`put_home`."""
    for name in (_WAIT, STAND_IN, _USES):
        vars(param).pop(name, None)
    _HOMED.take_off([param])


def uses_of(param: Tensor) -> int:
    """Count the calls of functions of ``param``: each may have written it, or has made what can write it.

    Not all writes count a version: no collective's, nor those through a NumPy array.
    """
    return int(vars(param).get(_USES, 0))


def holders_of(local: Tensor) -> int:
    """Count the tensors over the memory of ``local``: what was once taken from a parameter may still be looked at."""
    storage = local.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def _stand_in_for(param: Tensor, func: Any) -> Tensor:
    vars(param)[_WAIT](param)
    vars(param)[_USES] = vars(param).get(_USES, 0) + 1
    other: Tensor = vars(param)[STAND_IN]
    if torch.is_grad_enabled() and param.requires_grad and func not in (Tensor.detach, Tensor.detach_):
        other = other.detach().requires_grad_()
        _count_versions_with(param, other)
        other.register_hook(_refuse_gradient)
    return other


def _count_versions_with(param: Tensor, detached: Any) -> None:
    """Let writes into the local tensor of ``detached`` count as writes into that of ``param``: torch's own does not."""
    detached._local_tensor = local_shard(param).detach()


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "a loss depends on a parameter past the modules that fully_shard gathers (a penalty on the weights?), and it "
        "lives on the host (OffloadPolicy(parameters=True)), where autograd cannot follow. Compute that within the "
        "forward of the module whose parameter it is, or in the optimizer (weight_decay)."
    )
