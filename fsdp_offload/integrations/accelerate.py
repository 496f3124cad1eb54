"""accelerate: :func:`prepare` in place of ``accelerator.prepare``.

::

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer, loader = prepare(
        accelerator, model, optimizer, loader, policy={"device_bytes": 1 << 28}
    )

``accelerator.clip_grad_norm_`` then clips an offloaded optimizer by this package's function. Everything else stays.
"""

import functools
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from ..api.attach import is_offloaded
from ..api.checks import names_by_place
from ..api.clipping import clip_in_order
from ..api.wrapped import optimizers_in
from ..policy import OffloadPolicy, check_is, nearest_to
from ..state.layout import params_of
from ..state.store import address_of
from .plain_values import model_of, offload, policy_from


def prepare(
    accelerator: Accelerator, *objects: Any, policy: OffloadPolicy | Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Call ``accelerator.prepare(*objects, **options)``, and then offload the optimizers among them.

    May be called again with what it returned. ``FSDP_OFFLOAD_...`` variables fill in what ``policy`` does not say.

    Args:
        accelerator: yours.
        objects: as for ``accelerator.prepare``; of several models, the one that the optimizers train goes first.
        policy: a policy, or its fields as plain values.
        options: as for ``accelerator.prepare``, such as ``device_placement``.
    """
    line = "model, optimizer = prepare(accelerator, model, optimizer)"
    if not hasattr(accelerator, "prepare"):
        raise TypeError(f"prepare() takes the accelerator first, got {type(accelerator).__name__}. Write {line}.")
    is_policy = [isinstance(each, OffloadPolicy | Mapping) for each in objects]
    if any(is_policy) or any(nearest_to(name, ["policy"]) for name in options):
        raise TypeError(f"prepare() takes the policy by its name. Write {line[:-1]}, policy=policy).")
    if not any(isinstance(each, Optimizer) for each in objects):
        none = "prepare() offloads the optimizers among its objects, and there is none"
        raise TypeError(f"{none}. Write {line}; for others there is accelerator.prepare().")
    _check_together(accelerator, objects)
    policy = None if policy is None else policy_from(policy)  # raises before anything is sharded
    prepared = accelerator.prepare(*objects, **options)
    results = prepared if isinstance(prepared, tuple | list) else [prepared]
    models = [result for result in results if isinstance(result, nn.Module)]
    for optimizer in results:
        if isinstance(optimizer, Optimizer):
            offload(optimizer, model_of(optimizer, models), policy)
            clip_with(accelerator, optimizer)
    return prepared


def _check_together(accelerator: Accelerator, objects: Iterable[Any]) -> None:
    """Raise for an optimizer whose parameters accelerate would lose; otherwise warn if none of them is the model's.

    With FSDP2, accelerate exchanges the parameters of one model, and finds them in the optimizers by their memory.
    Without FSDP2, an optimizer may have any parameters, such as those of a loss.
    """
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    trained = {param for optimizer in optimizers for param in params_of(optimizer)}
    known = {param for model in models for param in model.parameters()}
    addresses, shards = set(map(address_of, known)), getattr(accelerator, "is_fsdp2", False)
    is_idle = any(
        trained.isdisjoint(model.parameters()) and any(param.requires_grad for param in model.parameters())
        for model in models
    )
    for optimizer in optimizers if shards or is_idle else ():
        name, names = type(optimizer).__name__, names_by_place(optimizer)
        foreign = [param for param in names if param not in known and address_of(param) not in addresses]
        if not (models and foreign) or not (shards or len(foreign) == len(names)):
            continue
        text = (
            f"prepare: {len(foreign)} of the {len(names)} parameters of {name} are not parameters of "
            f"{type(models[0]).__name__}; the first is {names[foreign[0]]}, of shape {tuple(foreign[0].shape)}. Write "
            f"model, optimizer = prepare(accelerator, model, {name}(model.parameters()))."
        )
        if shards:
            raise ValueError(f"{text} Parameters of a loss go into an optimizer that is not prepared.")
        warnings.warn(f"{text} As it is, nothing trains the model.", stacklevel=3)


def clip_with(accelerator: Accelerator, optimizer: Optimizer) -> None:
    """Let ``accelerator.clip_grad_norm_`` clip the parameters of ``optimizer``, all together, by our function."""
    if not hasattr(accelerator, "clip_grad_norm_"):
        got = type(accelerator).__name__
        raise TypeError(f"clip_with takes the accelerator first, got {got}. Write clip_with(accelerator, optimizer).")
    if not all(map(is_offloaded, optimizers_in(optimizer, "clip_with"))):
        raise TypeError(f"clip_with: this {type(optimizer).__name__} is not offloaded; call offload_optimizer() first.")
    theirs, known = accelerator.clip_grad_norm_, weakref.ref(optimizer)
    if getattr(theirs, "_clips", None) == known:
        return

    @functools.wraps(theirs)
    def clip(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        says = "accelerator.clip_grad_norm_ takes parameters"
        check_is(parameters, Iterable, says, "accelerator.clip_grad_norm_(model.parameters(), max_norm)")
        parameters = list(parameters)
        offloaded = known()
        if offloaded is None or not is_offloaded(offloaded):
            return theirs(parameters, max_norm, norm_type)
        own = set(params_of(offloaded))
        meshes = {getattr(param, "device_mesh", None) for param in own}
        others = own.symmetric_difference(parameters)  # frozen ones, too
        if any(one.grad is not None for one in others) or len(meshes) > 1:
            return theirs(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        return clip_in_order([offloaded], parameters, max_norm, norm_type)

    clip._clips = known  # type: ignore[attr-defined]
    accelerator.clip_grad_norm_ = clip
