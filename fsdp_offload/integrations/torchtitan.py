"""torchtitan (>= 0.3): a config of optimizers that offload, and a checkpoint manager that saves from host memory.

::

    # In a function of the registry:
    config.optimizer = offloaded(config.optimizer, OffloadPolicy(overlap="forward"))

    # With --checkpoint.async_mode async: nothing is copied but the model.
    save_from_arena(trainer.checkpointer)

Fields of the policy are then options: ``--optimizer.offload.overlap iteration``. Without ``save_from_arena``,
``CheckpointManager`` works in all of its modes, too. Trainers clip an offloaded container by this package's function.
"""

import functools
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakSet

import torchtitan.distributed.utils as titan
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtitan.components.checkpoint import OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer

from ..api.attach import is_offloaded
from ..api.clipping import clip_in_order
from ..api.wrapped import attached
from ..checkpoint import ArenaStager, SavePlanner
from ..policy import OffloadPolicy, check_is, tells
from ..state.layout import params_of
from .plain_values import metrics_of_each, model_of, offload, policy_from


class OffloadedOptimizers(OptimizersContainer):
    """A container whose optimizers are offloaded as soon as they are built."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The container's fields, and ``offload``: the policy."""

        offload: OffloadPolicy = field(default_factory=OffloadPolicy)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        offload_container(self, config.offload)


@tells("offloaded(config.optimizer, {'overlap': 'forward'})")
def offloaded(
    config: OptimizersContainer.Config, policy: OffloadPolicy | Mapping[str, Any] | None = None
) -> OffloadedOptimizers.Config:
    """Return ``config`` for a container that offloads.

    Raises:
        TypeError: ``config`` is of a container of your own: call :func:`offload_container` at its ``__init__``'s end.
    """
    if type(config) not in (OptimizersContainer.Config, OffloadedOptimizers.Config):
        raise TypeError(
            f"offloaded() takes an OptimizersContainer.Config, got {type(config).__qualname__}: call "
            "offload_container(self, policy) at the end of that container's __init__."
        )
    given = {one.name: getattr(config, one.name) for one in fields(OptimizersContainer.Config)}
    return OffloadedOptimizers.Config(**given, offload=policy_from(policy))


def offload_container(
    container: OptimizersContainer, policy: OffloadPolicy | Mapping[str, Any] | None = None
) -> OptimizersContainer:
    """Offload the optimizers of ``container``, each with its model part. In place; may be called again.

    Args:
        container: built for model parts that are sharded and initialized.
        policy: a policy, or its fields as plain values; ``FSDP_OFFLOAD_...`` variables fill in the rest.
    """
    line = "offload_container(trainer.optimizers)"
    check_is(container, OptimizersContainer, "offload_container() takes an OptimizersContainer", line)
    for optimizer in container.optimizers:
        offload(optimizer, model_of(optimizer, container.model_parts), policy)
        if optimizer not in _clipped:
            _clipped.add(optimizer)
            attached(optimizer).undo.append(functools.partial(_clip_no_longer, weakref.ref(optimizer)))
    _containers.add(container)
    titan.clip_grad_norm_ = _clip  # trainers look the function up in this module, and have no other hook
    return container


def _clip_no_longer(optimizer: "weakref.ref[Optimizer]") -> None:
    """Restore torchtitan's function when the last optimizer of all containers is plain again."""
    _clipped.discard(optimizer())  # type: ignore[arg-type]  # alive: it is being removed
    if not _clipped:
        titan.clip_grad_norm_ = _clip_as_torchtitan


_containers: WeakSet[OptimizersContainer] = WeakSet()
_clipped: WeakSet[Optimizer] = WeakSet()
_clip_as_torchtitan = titan.clip_grad_norm_


@functools.wraps(_clip_as_torchtitan)
def _clip(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *args: Any,
    pp_mesh: Any = None,
    ep_enabled: bool = False,
    **options: Any,
) -> Any:
    """Clip offloaded containers by our function; by torchtitan's with a pipeline, or if experts have no own mesh."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    trained = {param for param in given if param.requires_grad}
    meshes = {param.device_mesh for param in trained if isinstance(param, DTensor) and param.grad is not None}
    for container in _containers if pp_mesh is None and len(meshes) == 1 + ep_enabled else ():
        if set(params_of(container)) == trained and all(map(is_offloaded, container.optimizers)):
            norm = clip_in_order(container.optimizers, given, max_norm, *args, **options)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
    theirs: Tensor = _clip_as_torchtitan(given, max_norm, *args, pp_mesh=pp_mesh, ep_enabled=ep_enabled, **options)
    return theirs


def metrics_of_container(container: OptimizersContainer) -> dict[str, float]:
    """Collect ``extra_metrics`` for ``MetricsProcessor.log``: bytes by place, times of the last step; waits for it."""
    line = "metrics_of_container(trainer.optimizers)"
    check_is(container, OptimizersContainer, "metrics_of_container() takes an OptimizersContainer", line)
    return metrics_of_each(container.optimizers, "offload/{}/")


class ArenaCheckpointManager(CheckpointManager):
    """A ``CheckpointManager`` whose asynchronous saves read the state where it is; see :class:`ArenaStager`."""

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *args: Any, **kwargs: Any
    ) -> Any:
        """Save as ``CheckpointManager`` does; an asynchronous save of either mode is written by a thread."""
        to_hf = kwargs.get("to_hf", args[1] if len(args) > 1 else False)
        if async_mode == AsyncMode.DISABLED or to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, *args, **kwargs)
        saved: Any = async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            process_group=self.pg,
            async_stager=self.stager,
            planner=SavePlanner(),
        )
        if async_mode == AsyncMode.ASYNC:
            return saved
        staged: Future[None] = Future()
        staged.set_result(None)  # staging ended when async_save returned
        return AsyncSaveResponse(staging_completion=staged, upload_completion=saved)


def save_from_arena(checkpointer: CheckpointManager) -> CheckpointManager:
    """Make ``checkpointer`` an :class:`ArenaCheckpointManager`, if it saves at all. In place; before its first save."""
    line = "save_from_arena(trainer.checkpointer)"
    check_is(checkpointer, CheckpointManager, "save_from_arena() takes a CheckpointManager", line)
    if checkpointer.enable:
        checkpointer.stager = ArenaStager(*filter(is_offloaded, checkpointer.states[OPTIMIZER].optimizers))
        checkpointer.__class__ = ArenaCheckpointManager
    return checkpointer
