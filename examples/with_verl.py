"""verl: an FSDP engine whose optimizer state is in host memory, for ``external_lib`` of its configuration.

    python -m verl.trainer.main_ppo ... actor_rollout_ref.model.external_lib=examples.with_verl \\
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False

Between steps, state is in host memory anyway, so ``optimizer_offload`` has nothing to move. If it is on, the engine's
``to`` calls the functions below: loading the optimizer starts to load state that the next step needs first, and
offloading it sends this state back. The two functions for models are drop-ins for verl's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from verl.utils import fsdp_utils
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from fsdp_offload import (
    OffloadPolicy,
    is_offloaded,
    offload_model,
    offload_optimizer,
    offload_states,
    release_states,
    reload_model,
    reload_states,
)


def offload_fsdp_optimizer(optimizer: Optimizer) -> None:
    if not is_offloaded(optimizer):
        fsdp_utils.offload_fsdp_optimizer(optimizer)
        return
    offload_states(optimizer)
    release_states(optimizer)


def load_fsdp_optimizer(optimizer: Optimizer, device_id: Any) -> None:
    if is_offloaded(optimizer):
        reload_states(optimizer)  # loads as much as the policy keeps on the device; the step loads the rest
    else:
        fsdp_utils.load_fsdp_optimizer(optimizer, device_id)


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        fsdp_utils.offload_fsdp_model_to_cpu(model, empty_cache)
        return
    offload_model(model)
    if empty_cache and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        reload_model(model)
    else:
        fsdp_utils.load_fsdp_model_to_gpu(model)


class OffloadEngineMixin:
    """Mix-in for verl's FSDP engines: offloads the optimizer when it is built; ``to`` uses the functions above."""

    offload_policy: OffloadPolicy | None = OffloadPolicy(bucket_bytes=64 << 20, device_bytes=512 << 20)

    def _build_optimizer(self, module: nn.Module) -> Optimizer:
        return offload_optimizer(super()._build_optimizer(module), model=module, policy=self.offload_policy)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super().to(device=device, model=model, optimizer=False, grad=grad)
        if optimizer and self.optimizer is not None:
            if device == "cpu":
                offload_fsdp_optimizer(self.optimizer)
            else:
                load_fsdp_optimizer(self.optimizer, device)


# verl prefers an engine that is registered for the device's vendor to its own, which is for any vendor.
@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cuda", vendor="nvidia")
class OffloadEngine(OffloadEngineMixin, FSDPEngineWithLMHead):
    pass
