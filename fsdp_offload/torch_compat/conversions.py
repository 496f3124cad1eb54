"""What ``model.to()`` and ``load_state_dict(assign=True)`` may do to parameters whose memory is chosen elsewhere.

Both put another tensor in a parameter's place: torch exchanges the content of the two (``torch.utils.swap_tensors``),
and what lives on the host would be a tensor on the device from then on, which no update reaches. So a conversion that
changes nothing passes these parameters by, and any other one is refused before it has begun.

Seen in torch 2.11 to 2.13: conversions go through each module's ``_apply``, and that through ``_parameters.items()``;
``FSDPModule._apply`` then looks at the shards of its group again.
"""

import weakref
from collections.abc import Callable, ItemsView, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_HOW = (
    "its parameters live on the host and stream through the device (OffloadPolicy(parameters=True)). Do it before "
    "offload_optimizer(), or call remove_offload() first. No parameter has been changed."
)

_Keeps = Callable[[Tensor], bool]


def keep_in_place(
    model: nn.Module, owners: Iterable[nn.Module], kept: Iterable[Tensor], streams: object
) -> Callable[[], None]:
    """Let conversions of ``model`` pass ``kept``: parameters of ``owners``, which are parts of it.

    Args:
        model: conversions of it, and of any part of it that has ``kept`` in it, begin with a look at all of them.
        owners: the modules that have them.
        kept: what is not to be converted.
        streams: what streams them. It may go without a word, as an optimizer that nobody keeps; then nothing is kept.

    Returns:
        What ends that.
    """
    references = {id(param): weakref.ref(param) for param in kept}
    weakref.finalize(streams, references.clear)  # torch converts no tensor that has a weak reference, either

    def keeps(param: Tensor) -> bool:
        return id(param) in references and references[id(param)]() is param

    holders = set(owners)
    modules = [module for module in model.modules() if module is model or not holders.isdisjoint(module.modules())]
    undo: list[Callable[[], None]] = []
    for module in modules:
        apply = vars(module).setdefault("_apply", _Apply(module))
        apply.keepers.append(keeps)
        undo.append(apply.leave(keeps))
        undo.append(module.register_load_state_dict_pre_hook(_refuse_assign).remove)

    def end() -> None:
        for each in undo:
            each()

    return end


class _Apply:
    """``module._apply`` of one module, found there before the one of its class.

    Attributes:
        keepers: each says which parameters are passed by; one for each offloaded optimizer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.keepers: list[_Keeps] = []

    def __call__(self, fn: Callable[[Tensor], Any], recurse: bool = True) -> nn.Module:
        """Convert buffers, and parameters that are not kept."""
        module = self._module()
        assert module is not None
        params = list(module.parameters(recurse))
        kept = [param for param in params if self._keeps(param)]
        self._check(module, fn, kept)
        with_fsdp = isinstance(module, FSDPModule) and len(kept) < len(params)
        convert = type(module)._apply if with_fsdp or not isinstance(module, FSDPModule) else _past_fsdp(module)
        own = module._parameters
        vars(module)["_parameters"] = passing = _Passing(own, self._keeps)
        try:
            convert(module, fn, recurse)
        finally:
            vars(module)["_parameters"] = own
            own.update(passing)  # in torch's other way to convert, there is another parameter then
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to the copy of the module, whose parameters nobody streams."""
        return _Apply, (self._module(),)

    def leave(self, keeps: _Keeps) -> Callable[[], None]:
        """Return what forgets ``keeps``, and goes with the last of them."""

        def end() -> None:
            module = self._module()
            self.keepers.remove(keeps)
            if module is not None and not self.keepers:
                vars(module).pop("_apply", None)

        return end

    @property
    def keeps_any(self) -> bool:
        """Whether any parameter of the module, or of a part of it, is passed by."""
        module = self._module()
        return module is not None and any(map(self._keeps, module.parameters()))

    def _keeps(self, param: Tensor) -> bool:
        return any(keeps(param) for keeps in self.keepers)

    def _check(self, module: nn.Module, fn: Callable[[Tensor], Any], kept: Iterable[Tensor]) -> None:
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


class _Passing(dict[str, nn.Parameter | None]):
    """``module._parameters``, where who goes through all of them does not see those that are kept."""

    def __init__(self, params: dict[str, nn.Parameter | None], keeps: _Keeps) -> None:
        super().__init__(params)
        self._keeps = keeps

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """Those that are not kept."""
        return {name: param for name, param in super().items() if param is None or not self._keeps(param)}.items()


def _past_fsdp(module: nn.Module) -> Callable[..., nn.Module]:
    """The ``_apply`` of the class that ``module`` had before ``fully_shard``."""
    after = type(module).__mro__[type(module).__mro__.index(FSDPModule) + 1 :]
    return next(cls._apply for cls in after if "_apply" in vars(cls))  # type: ignore[attr-defined, no-any-return]


def _refuse_assign(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *others: object
) -> None:
    del state_dict, prefix, others
    apply = vars(module).get("_apply")  # without keepers in a copy of the module, which has this hook, too
    if local_metadata.get("assign_to_params_buffers") and isinstance(apply, _Apply) and apply.keeps_any:
        raise RuntimeError(
            f"load_state_dict(assign=True) cannot put other tensors in the place of {type(module).__name__}'s: {_HOW}"
        )
