"""Parameters whose shard is in host memory while their mesh is one of accelerators.

Functions of such a parameter work on host memory. Autograd puts its gradient on the device, so the parameter reports
the device as its own; but its views would be on the host, and torch refuses to make them. Functions therefore get a
stand-in: a DTensor over the same host memory, as a model under ``CPUOffloadPolicy`` has.

``fully_shard`` gathers ``FSDPParam._sharded_param_data``, the shard as a flat tensor, padded to the size of the largest
one (:class:`ShardedParameter`). Others read ``param._local_tensor``: an alias of the home, once that is up to date.

``model.to()`` and ``load_state_dict(assign=True)`` replace a parameter by another tensor on the device, which no update
reaches. A conversion that changes nothing skips such parameters; any other is refused before it begins
(:func:`keep_in_place`).
"""

import functools
import weakref
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .dtensor import LOCAL, STAND_IN, alias_of, call_counted, is_unreduced, local_shard, over_local
from .guard import Guard

_LOOK = "_fsdp_offload_look"
_USES = "_fsdp_offload_uses"
_COMMUNICATES = {"full_tensor", "redistribute"}  # an accelerator's backend needs device memory for them


class _Homed(Guard):
    """Runs functions of a parameter on its stand-in."""

    def on_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call ``func`` with stand-ins; return the parameter if it is the result of a function in place."""
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__delete__"):
            self.refuse(f"setting tensor.{getattr(func.__self__, '__name__', '?')}")
        stand_ins: dict[Tensor, Tensor] = {}

        def stand_in(value: Any) -> Any:
            if not self.guards(value):
                return value
            if value not in stand_ins:
                stand_ins[value] = _stand_in_for(value, func)
            return stand_ins[value]

        args, kwargs = pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
        result = call_counted(func, args, kwargs)
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
        """Return a class as other guards do that also moves gradients on the host, such as DCP's zeros, to the device.

        Its ``_local_tensor``, which Megatron, Transformer Engine and torchao read, is a property over the home.
        """
        made: Any = super().derive(cls)
        grad: property = made.grad

        def put(param: Tensor, value: Any) -> None:
            if isinstance(value, Tensor) and not is_unreduced(value) and local_shard(value).device != param.device:
                value = over_local(value, local_shard(value).to(param.device))
            grad.__set__(param, value)

        made.grad = grad.setter(put)

        def alias(param: Tensor) -> Tensor:
            return local_shard(_stand_in_for(param, Tensor.detach))

        made._local_tensor = property(alias, LOCAL.__set__)
        return cast("type[Tensor]", made)


_HOMED = _Homed(
    "Homed",
    "{what} on a parameter that lives on the host (OffloadPolicy(parameters=True)): functions work on its host memory "
    "between its uses. Take a copy on the device: param.detach().to(device).",
    lets_gradients=True,
    attributes=("grad", "requires_grad", "dtype", "device", "shape", "is_leaf"),
)


Look = Callable[[Tensor], AbstractContextManager[object]]
"""Returns a context in which a parameter's home is up to date, and no other thread trains."""


def put_home(param: Tensor, local: Tensor, look: Look, stand_in: Tensor | None = None) -> Tensor:
    """Make functions of ``param``, a DTensor, work on ``local``, inside ``look(param)``; return its stand-in."""
    stand_in = over_local(param, local) if stand_in is None else stand_in
    vars(param).update({_LOOK: look, STAND_IN: stand_in})
    _HOMED.put_on([param])
    return stand_in


def is_homed(param: Tensor) -> bool:
    """Return whether :func:`put_home` was called for ``param``."""
    return STAND_IN in vars(param)


def take_from_home(param: Tensor) -> None:
    """Undo :func:`put_home`."""
    for name in (_LOOK, STAND_IN, _USES):
        vars(param).pop(name, None)
    _HOMED.take_off([param])


def uses_of(param: Tensor) -> int:
    """Return how often functions of ``param`` were called: each may write it, also without counting a version."""
    return int(vars(param).get(_USES, 0))


def _stand_in_for(param: Tensor, func: Any) -> Tensor:
    with vars(param)[_LOOK](param):  # until ``other`` exists, which counts as a holder of the home
        vars(param)[_USES] = vars(param).get(_USES, 0) + 1
        other = alias_of(vars(param)[STAND_IN])
    if torch.is_grad_enabled() and param.requires_grad and func not in (Tensor.detach, Tensor.detach_):
        other.requires_grad_().register_hook(_refuse_gradient)
    return other


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "a loss depends on a parameter that lives on the host (OffloadPolicy(parameters=True)), where autograd cannot "
        "follow: a penalty on the weights? Compute it in the forward of its module, or in the optimizer (weight_decay)."
    )


# Records of fully_shard -----------------------------------------------------------------------------------------------


class ShardedParameter:
    """One parameter of a group of ``fully_shard``."""

    def __init__(self, fsdp_param: Any) -> None:
        """Take FSDP's record of the parameter; raise NotImplementedError on an unsupported torch."""
        missing = [name for name in _READ if not hasattr(fsdp_param, name)]
        if missing:
            raise NotImplementedError(
                f"fully_shard of torch {torch.__version__} has no {missing}, through which it gathers parameters that "
                "live on the host; leave out OffloadPolicy(parameters=True)"
            )
        self._fsdp_param = fsdp_param
        self.look: Look = nullcontext  # entered for each use of the shard on the host
        self.device: torch.device = fsdp_param.device  # on which it is gathered
        self.padded_numel: int = fsdp_param.padded_sharded_param_size.numel()  # that a gather reads on this rank

    @property
    def param(self) -> Tensor:
        """Return the sharded parameter, a DTensor, as an optimizer has it."""
        return cast(Tensor, self._fsdp_param.sharded_param)

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the modules that have the parameter, with its name in each; several if it is tied."""
        info = self._fsdp_param._module_info
        yield info.module, info.param_name
        yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    def follow_module(self) -> None:
        """Adopt the parameter that its module has now, with its own memory, in all modules that share it."""
        for module, name in self.places():
            param = getattr(module, name)
            if not param.is_meta:
                setattr(self._fsdp_param._module_info.module, self._fsdp_param._module_info.param_name, param)
        self._fsdp_param.reset_sharded_param()
        for module, name in self.places():
            setattr(module, name, self._fsdp_param.sharded_param)

    @property
    def is_plain(self) -> bool:
        """Return whether the shard is a plain dense tensor; other types define how they are gathered."""
        return type(local_shard(self.param)) is Tensor

    def undoing(self) -> Callable[[], None]:
        """Return a function that undoes :meth:`live_at`: it moves the shard back to where it is now."""
        local, data = local_shard(self.param), self._fsdp_param._sharded_param_data

        def undo() -> None:
            take_from_home(self.param)
            self._fsdp_param.sharded_param._local_tensor = local
            self.lend(data)

        return undo

    def live_at(self, local: Tensor, stand_in: Tensor | None = None) -> Tensor:
        """Make ``local``, in host memory, the shard; return its stand-in, to be passed with ``local`` the next time."""
        stand_in = put_home(self.param, local, self.look, stand_in)
        self._fsdp_param.__class__ = _reading_the_slot(type(self._fsdp_param))  # type: ignore[arg-type]  # has a hash
        self._point_at(local)
        return stand_in

    def _point_at(self, local: Tensor) -> None:
        self._fsdp_param.sharded_param._local_tensor = local
        # The same memory, though not padded: fully_shard makes a padded copy if this is other memory.
        self.lend(local.view(-1))

    def live_on(self, device: torch.device) -> None:
        """Move the shard to ``device``, into padded memory as ``fully_shard`` makes it."""
        local, size = local_shard(self.param), self._fsdp_param.padded_sharded_param_size
        padded = torch.zeros(size, dtype=local.dtype, device=device)
        dim = self._fsdp_param.fsdp_placement.dim
        own = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0)
        take_from_home(self.param)
        self._point_at(own.copy_(local))
        self.lend(padded.view(-1))

    def lend(self, data: Tensor) -> None:
        """Make the next gather read ``data``: flat, of ``padded_numel`` elements, on the device."""
        self._fsdp_param._sharded_param_data = data

    def take_back(self) -> None:
        """Make gathers read the shard itself again."""
        self.lend(local_shard(self.param).view(-1))


class _ReadsTheSlot:
    """Mixin for ``FSDPParam``: a gather that only looks for methods of the local tensor does not wait for the home.

    It is right for every parameter, so it stays when a parameter moves back to the device.
    """

    sharded_param: Tensor

    @property
    def _sharded_local_tensor(self) -> Tensor:
        return local_shard(self.sharded_param)


@functools.cache
def _reading_the_slot(cls: type) -> type:
    return cls if issubclass(cls, _ReadsTheSlot) else type(cls.__name__, (_ReadsTheSlot, cls), {})


_READ = (
    *("sharded_param", "_sharded_param_data", "padded_sharded_param_size", "fsdp_placement"),
    *("device", "reset_sharded_param", "_module_info"),
)


# Conversions ----------------------------------------------------------------------------------------------------------

_HOW = (
    "its parameters live on the host and stream through the device (OffloadPolicy(parameters=True)). Do it before "
    "offload_optimizer(), or call remove_offload() first. No parameter has been changed."
)
_KEPT_FOR = "_fsdp_offload_kept_for"  # attribute of a parameter: the engine that streams it


def keep_in_place(model: nn.Module, kept: Sequence[Tensor], engine: object) -> Callable[[], None]:
    """Make conversions of ``model`` and its parts skip ``kept``, which ``engine`` streams; return how to end this."""
    reference = weakref.ref(engine)
    for param in kept:
        vars(param)[_KEPT_FOR] = reference
    modules = [one for one in model.modules() if one is model or any(map(_is_kept, one.parameters()))]
    for module in modules:
        vars(module)["_apply"] = _Apply(module)
    hooks = [module.register_load_state_dict_pre_hook(_refuse_assign) for module in modules]
    weakly = [weakref.ref(module) for module in modules]

    def end() -> None:
        for hook in hooks:
            hook.remove()
        for param in kept:
            vars(param).pop(_KEPT_FOR, None)
        for module in filter(None, (one() for one in weakly)):
            if not any(map(_is_kept, module.parameters())):  # none is kept for another optimizer
                vars(module).pop("_apply", None)

    return end


def _is_kept(param: Tensor) -> bool:
    return _KEPT_FOR in vars(param) and vars(param)[_KEPT_FOR]() is not None


class _Apply:
    """Replaces ``module._apply`` of one module, as an attribute of the instance."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy for a copied module, whose parameters are not streamed."""
        return _Apply, (self._module(),)

    def __call__(self, fn: Callable[[Tensor], Any], recurse: bool = True) -> nn.Module:
        """Convert buffers and parameters that are not kept; ``FSDPModule._apply`` then refreshes its shards."""
        module = self._module()
        assert module is not None
        kept = filter(_is_kept, module.parameters(recurse))
        for dtype, device in dict.fromkeys((param.dtype, param.device) for param in kept):
            probe = torch.empty(0, dtype=dtype, device=device)
            with torch.no_grad():
                converted = fn(probe)
            if converted is not probe:
                raise RuntimeError(
                    f"{type(module).__name__} cannot be converted (.to(), .half(), .cpu(), .to_empty(), ...) from "
                    f"{dtype} on {device} to {converted.dtype} on {converted.device}: {_HOW}"
                )
        own = module._parameters
        vars(module)["_parameters"] = passing = _Passing(own)
        try:
            type(module)._apply(module, fn, recurse)
        finally:
            vars(module)["_parameters"] = own
            own.update(passing)  # torch may convert by replacing parameters
        return module


class _Passing(dict[str, nn.Parameter | None]):
    """``module._parameters`` whose ``items()``, which torch's conversions use, leaves out kept parameters."""

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """Return the parameters that are not kept."""
        return {name: param for name, param in super().items() if param is None or not _is_kept(param)}.items()


def _refuse_assign(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: object
) -> None:
    if local_metadata.get("assign_to_params_buffers") and any(map(_is_kept, module.parameters())):
        raise RuntimeError(f"load_state_dict(assign=True) cannot exchange tensors of a {type(module).__name__}: {_HOW}")
