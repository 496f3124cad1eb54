"""What ``model.to()`` and ``load_state_dict(assign=True)`` may do to parameters whose memory is chosen elsewhere.

Both put another tensor in a parameter's place: torch exchanges the content of the two (``torch.utils.swap_tensors``),
and what lives on the host would be a tensor on the device from then on, which no update reaches. So a conversion that
changes nothing passes these parameters by, and any other one is refused before it has begun.

Conversions go through each module's ``_apply``, and that through ``_parameters.items()``; ``FSDPModule._apply`` then
looks at the shards of its group again.
"""

import weakref
from collections.abc import Callable, ItemsView, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_HOW = (
    "its parameters live on the host and stream through the device (OffloadPolicy(parameters=True)). Do it before "
    "offload_optimizer(), or call remove_offload() first. No parameter has been changed."
)

_KEPT_FOR = "_fsdp_offload_kept_for"
"""Attribute of a parameter that is not to be converted: a weak reference to what streams it.

That may go without a word, as an optimizer that nobody keeps; then the parameter is converted like any other.
"""


def keep_in_place(
    model: nn.Module, owners: Iterable[nn.Module], kept: Sequence[Tensor], streams: object
) -> Callable[[], None]:
    """Let conversions of ``model`` pass ``kept``: parameters of ``owners``, which are parts of it.

    Args:
        model: conversions of it, and of any part of it that has ``kept`` in it, begin with a look at all of them.
        owners: the modules that have them.
        kept: what is not to be converted.
        streams: what streams them.

    Returns:
        What ends that.
    """
    reference, holders = weakref.ref(streams), set(owners)
    for param in kept:
        vars(param)[_KEPT_FOR] = reference
    modules = [module for module in model.modules() if module is model or not holders.isdisjoint(module.modules())]
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
            if not any(map(_is_kept, module.parameters())):  # for another optimizer
                vars(module).pop("_apply", None)

    return end


def _is_kept(param: Tensor) -> bool:
    return _KEPT_FOR in vars(param) and vars(param)[_KEPT_FOR]() is not None


class _Apply:
    """``module._apply`` of one module, found there before the one of its class."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to the copy of the module, whose parameters nobody streams."""
        return _Apply, (self._module(),)

    def __call__(self, fn: Callable[[Tensor], Any], recurse: bool = True) -> nn.Module:
        """Convert buffers, and parameters that are not kept."""
        module = self._module()
        assert module is not None
        kept = filter(_is_kept, module.parameters(recurse))
        for dtype, device in dict.fromkeys((param.dtype, param.device) for param in kept):
            probe = torch.empty(0, dtype=dtype, device=device)
            with torch.no_grad():
                converted = fn(probe)
            if converted is not probe:
                before, after = (f"{one.dtype} on {one.device}" for one in (probe, converted))
                raise RuntimeError(
                    f"{type(module).__name__} cannot be converted (.to(), .half(), .cpu(), .to_empty(), ...) from "
                    f"{before} to {after if after != before else 'other tensors of that'}: {_HOW}"
                )
        own = module._parameters
        vars(module)["_parameters"] = passing = _Passing(own)
        try:
            type(module)._apply(module, fn, recurse)
        finally:
            vars(module)["_parameters"] = own
            own.update(passing)  # in torch's other way to convert, there is another parameter then
        return module


class _Passing(dict[str, nn.Parameter | None]):
    """``module._parameters``, where who goes through all of them does not see those that are kept."""

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """Those that are not kept."""
        return {name: param for name, param in super().items() if param is None or not _is_kept(param)}.items()


def _refuse_assign(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: object
) -> None:
    del state_dict, prefix, others
    if local_metadata.get("assign_to_params_buffers") and any(map(_is_kept, module.parameters())):
        raise RuntimeError(
            f"load_state_dict(assign=True) cannot put other tensors in the place of {type(module).__name__}'s: {_HOW}"
        )
