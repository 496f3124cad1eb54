"""verl: its pairs of functions around phases, and a mixin for its FSDP engine that uses them.

::

    @EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cuda", vendor="nvidia")
    class Engine(OffloadEngineMixin, FSDPEngineWithLMHead): ...

The optimizer's state is at home in host memory between steps: loading it for a phase begins to load what the next step
needs, and offloading it is a wait. What is not offloaded, or not ``fully_shard``'s, goes to verl's own functions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from verl.utils import fsdp_utils

from ..api.offload import offload_optimizer
from ..api.optimizer import OffloadedOptimizer
from ..engine.engine import find_offloaded
from ..model.sleep import offload_model, reload_model
from ..policy import OffloadPolicy
from .plain_values import policy_from


def offload_fsdp_optimizer(optimizer: Optimizer) -> None:
    """Offload as verl's does: nothing of the state is on the device when this phase's stream has come here."""
    offloaded = find_offloaded(optimizer)
    if isinstance(offloaded, OffloadedOptimizer):
        offloaded.offload_states()
        offloaded.release_states()
    else:
        fsdp_utils.offload_fsdp_optimizer(optimizer)


def load_fsdp_optimizer(optimizer: Optimizer, device_id: Any) -> None:
    """Load as verl's does, as far as the policy keeps state on the device; the rest comes with the step."""
    offloaded = find_offloaded(optimizer)
    if isinstance(offloaded, OffloadedOptimizer):
        offloaded.reload_states()
    else:
        fsdp_utils.load_fsdp_optimizer(optimizer, device_id)


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Offload as verl's does, by storages into pinned memory that is kept; using the model is an error until loaded."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        fsdp_utils.offload_fsdp_model_to_cpu(model, empty_cache)
        return
    offload_model(model)
    if empty_cache and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Undo :func:`offload_fsdp_model_to_cpu`."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        reload_model(model)
    else:
        fsdp_utils.load_fsdp_model_to_gpu(model)


class OffloadEngineMixin:
    """Before an FSDP engine of verl's: its optimizer is offloaded when it is built, and ``to`` moves it in our phases.

    Attributes:
        offload_policy: a policy, or its fields as plain values; ``FSDP_OFFLOAD_...`` variables fill in the rest.
    """

    offload_policy: OffloadPolicy | Mapping[str, Any] | None = None

    def _build_optimizer(self, module: nn.Module) -> Optimizer:
        optimizer: Optimizer = super()._build_optimizer(module)  # type: ignore[misc]  # of the engine
        return offload_optimizer(optimizer, model=module, policy=policy_from(self.offload_policy))

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move as the engine's ``to`` does, with its optimizer left to us."""
        super().to(device=device, model=model, optimizer=False, grad=grad)  # type: ignore[misc]
        held: Optimizer | None = self.optimizer  # type: ignore[attr-defined]
        if optimizer and held is not None:
            offload_fsdp_optimizer(held) if device == "cpu" else load_fsdp_optimizer(held, device)
