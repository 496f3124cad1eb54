"""Lightning: :class:`OffloadCallback` for its ``Trainer``, :func:`setup_optimizers` for Fabric.

::

    trainer = Trainer(
        strategy=ModelParallelStrategy(),
        callbacks=[OffloadCallback({"overlap": "forward"})],
    )

    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = setup_optimizers(fabric, model, optimizer)

``gradient_clip_val`` and ``fabric.clip_gradients(max_norm=...)`` then clip an offloaded optimizer by this package's
function. Everything else stays.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from ..api.attach import is_offloaded
from ..api.clipping import clip_in_order
from ..policy import OffloadPolicy, check_choices, tells
from ..state.layout import params_of
from .plain_values import metrics_of_each, offload, policy_from


@tells("OffloadCallback({'overlap': 'forward'})")
class OffloadCallback(Callback):
    """Offloads the optimizers of each ``fit``: when they are built, and before a checkpoint is loaded.

    Args:
        policy: a policy, or its fields as plain values; ``FSDP_OFFLOAD_...`` variables fill in the rest.
        log_metrics: whenever ``Trainer`` logs, wait for the last step, and log bytes by place and times of that step.
    """

    def __init__(self, policy: OffloadPolicy | Mapping[str, Any] | None = None, *, log_metrics: bool = False) -> None:
        self._policy = None if policy is None else policy_from(policy)
        check_choices("OffloadCallback", log_metrics=log_metrics)
        self._log_metrics = log_metrics

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Offload; called by ``Trainer`` after ``configure_optimizers``."""
        for optimizer in trainer.optimizers:
            offload(optimizer, pl_module, self._policy)
        _clip_in_place_of(trainer.precision_plugin, "clip_grad_by_norm", _clip)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log metrics; called by ``Trainer``."""
        if self._log_metrics and trainer.global_step % trainer.log_every_n_steps == 0:
            self.log_dict(metrics_of_each(trainer.optimizers, "offload-{}/"))


@tells("optimizer = setup_optimizers(fabric, model, optimizer, policy=...)")
def setup_optimizers(
    fabric: Fabric, model: nn.Module, *optimizers: Optimizer, policy: OffloadPolicy | Mapping[str, Any] | None = None
) -> Any:
    """Call ``fabric.setup_optimizers(*optimizers)``, and offload; ``model`` is what ``fabric.setup`` has returned."""
    others: Any = nn.Module | OffloadPolicy | Mapping | list | tuple
    if any(isinstance(one, others) for one in optimizers) or not optimizers or not hasattr(fabric, "setup_optimizers"):
        raise TypeError(
            "setup_optimizers() takes the Fabric, the model and its optimizers, got "
            f"{', '.join(type(one).__name__ for one in (fabric, model, *optimizers))}. Write "
            "optimizer = setup_optimizers(fabric, model, optimizer); a policy comes by its name."
        )
    module = getattr(model, "module", model)
    for optimizer in optimizers:
        offload(optimizer, module, policy)

    def clip(optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True) -> Any:
        fabric.strategy.precision.unscale_gradients(optimizer)
        return _clip(optimizer, max_norm, norm_type, error_if_nonfinite)

    _clip_in_place_of(fabric.strategy, "clip_gradients_norm", clip)
    return fabric.setup_optimizers(*optimizers)


def _clip(optimizer: Optimizer, clip_val: float, *options: Any) -> Any:
    """Clip in the order of the param groups, as Lightning does: the last bit of a norm depends on it."""
    return clip_in_order([optimizer], params_of(optimizer), clip_val, *options)


def _clip_in_place_of(owner: Any, name: str, clip: Callable[..., Any]) -> None:
    """Let a method of Lightning clip offloaded optimizers by ``clip``; the optimizer is first, or behind a module."""
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def clipping(*args: Any, **options: Any) -> Any:
        given = args[1:] if isinstance(args[0], nn.Module) else args
        return clip(*given, **options) if is_offloaded(given[0]) else theirs(*args, **options)

    if not hasattr(theirs, "__wrapped__"):  # once for each owner
        setattr(owner, name, clipping)
