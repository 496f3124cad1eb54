"""torchtitan's containers of optimizers and schedulers, and its checkpoint manager in all of its modes."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import OffloadPolicy, is_offloaded, offload_report
from fsdp_offload.checkpoint import ArenaStager
from tests.distributed.frameworks import (
    IN_BACKWARD,
    MICRO_BATCHES,
    OVERLAPPED,
    POLICY,
    SAVED_AT,
    STEPS,
    batch,
    record,
    same_scripts,
)
from tests.distributed.launch import DEVICE_TYPE, spawn_cases, this_device
from tests.distributed.models import Net, build, shard_even
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytest.importorskip("torchtitan.components.optimizer")
pytestmark = pytest.mark.distributed

# torchtitan's own stager for the third mode refuses the CPU.
MODES = ("disabled", "async", *(() if DEVICE_TYPE == "cpu" else ("async_with_pinned_mem",)))


def container_of(parts: list[Net], policy: dict[str, Any] | None) -> Any:
    """Two groups of AdamW, by name: biases decay by themselves."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from fsdp_offload.integrations.torchtitan import offloaded

    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": decay})
        for pattern, decay in ((r"bias$", 0.0), (r".*", 0.1))
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="foreach")
    return (config if policy is None else offloaded(config, policy)).build(model_parts=parts)


def trainer_of(net: Net, container: Any, schedulers: Any, manager: Any, seen: list[float]) -> Any:
    """torchtitan's trainer around a small model: what its step needs. Its ``__init__`` wants a GPU and a tokenizer."""
    from torchtitan.trainer import Trainer

    def loss_of(loss: Tensor, *_: object) -> tuple[Tensor, None]:
        seen.append(loss.item())
        return loss / MICRO_BATCHES, None

    trainer: Any = object.__new__(Trainer)
    trainer.config = SimpleNamespace(
        training=SimpleNamespace(max_norm=0.5, disable_cuda_graphs=True),
        parallelism=SimpleNamespace(spmd_backend="partial_dtensor"),
    )
    alone = {f"{axis}_enabled": False for axis in ("dp", "pp", "cp", "ep", "dp_cp")}
    trainer.parallel_dims = SimpleNamespace(**alone, get_optional_mesh=lambda _: None)
    trainer.metrics_processor = SimpleNamespace(
        should_log=lambda _: True, log=lambda _, __, ___, norm, **____: seen.append(norm)
    )
    trainer.device, trainer.model_parts, trainer.model_config = this_device(), [net], None
    trainer.optimizers, trainer.lr_schedulers, trainer.checkpointer = container, schedulers, manager
    trainer.gradient_accumulation_steps, trainer.num_pipeline_parallel_microbatches = MICRO_BATCHES, 1
    trainer.step = trainer.ntokens_seen = 0
    trainer.loss_fn, trainer.train_context, trainer.fwd_bwd_fn = loss_of, nullcontext, trainer._forward_backward_body
    return trainer


def script(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    *,
    policy: dict[str, Any] | None = None,
    load: str = "",
    mode: str = "disabled",
    from_arena: bool = False,
) -> None:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer

    from fsdp_offload.integrations.torchtitan import metrics_of_container, offload_container, save_from_arena

    logging.getLogger().setLevel(logging.ERROR)
    net = build(shard_even)
    container = container_of([net], policy)
    warm_up = LRSchedulersContainer.Config(warmup_steps=4, decay_type="cosine")
    schedulers = warm_up.build(optimizers=container, training_steps=STEPS)
    config = CheckpointManager.Config(
        enable=True, folder=load or name, interval=SAVED_AT, async_mode=mode, keep_latest_k=0
    )
    manager = config.build(
        dataloader=None,
        model_parts=[net],
        optimizers=container,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )
    if from_arena:
        save_from_arena(manager)
        assert isinstance(manager.stager, ArenaStager)
    if policy is not None:
        assert offload_container(container, policy) is offload_container(container) is container  # again
    if load:
        assert manager.load(step=SAVED_AT)
    seen: list[float] = []
    trainer = trainer_of(net, container, schedulers, manager, seen)
    for step in range(SAVED_AT if load else 0, STEPS):
        tokens = [batch(10 * step + micro, rank) for micro in range(MICRO_BATCHES)]
        trainer.train_step(iter([({"input": one}, one) for one in tokens]))
        if not load:
            manager.save(step + 1)
        if step % 4 == 1:
            with torch.no_grad():
                net(batch(999, rank))
    manager.maybe_wait_for_saving()
    manager.close()
    (optimizer,) = container.optimizers
    assert is_offloaded(optimizer) == (policy is not None)
    if policy is not None:
        report = offload_report(optimizer)
        assert metrics_of_container(container)["offload/memory/host_bytes"] == report.memory.host_bytes > 0
        assert ("the loop clips" in str(report)) == (policy == IN_BACKWARD)
        optimizer.synchronize()
    record(folder, name, rank, seen, net, [optimizer])


@proves("torchtitan's trainer", "torchtitan", TRAINS)
def test_the_trainers_step_updates_in_the_backward(tmp_path: Path) -> None:
    same_scripts(script, tmp_path, 2, {"plain": {}, "in backward": {"policy": IN_BACKWARD}})


@proves("torchtitan's trainer", "torchtitan", RESUMES, OTHER_RANKS)
@pytest.mark.long
def test_training_saving_and_resuming(tmp_path: Path) -> None:
    names = {mode: f"offloaded, {mode}" for mode in MODES}
    first: dict[str, dict[str, Any]] = {
        "plain": {},
        **{name: {"policy": POLICY, "mode": mode} for mode, name in names.items()},
        "from arena": {"policy": POLICY, "mode": "async", "from_arena": True},
        "from arena, pinned": {"policy": OVERLAPPED, "mode": "async_with_pinned_mem", "from_arena": True},
    }
    same_scripts(script, tmp_path, 2, first)
    later: dict[str, dict[str, Any]] = {
        "offloaded from plain": {"load": "plain", "policy": POLICY},
        **{f"plain from {name}": {"load": name} for name in first if name != "plain"},
    }
    same_scripts(script, tmp_path, 2, later, like="plain", seen_since=SAVED_AT * (MICRO_BATCHES + 1))
    alone = {"plain alone": {"load": "plain"}, "offloaded alone": {"load": "plain", "policy": POLICY}}
    same_scripts(script, tmp_path, 1, alone)


def refused() -> list[str]:
    from torchtitan.components.optimizer import OptimizersContainer

    from fsdp_offload.integrations.torchtitan import offloaded

    class Own(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            pass

    with pytest.raises(TypeError, match=r"offload_container\(self, policy\) at the end"):
        offloaded(Own.Config())
    return []


def options() -> list[str]:
    """The policy's fields are options of torchtitan's command line."""
    import tyro
    from torchtitan.components.optimizer import default_adamw

    from fsdp_offload.integrations.torchtitan import OffloadedOptimizers, offloaded

    given = ["--offload.overlap", "iteration", "--offload.device-bytes", "1000000000"]
    config = tyro.cli(OffloadedOptimizers.Config, args=given, default=offloaded(default_adamw()))
    wanted = OffloadPolicy(overlap="iteration", device_bytes=1_000_000_000)
    return [] if config.offload == wanted else [str(config.offload)]


def test_containers_and_configs(tmp_path: Path) -> None:
    spawn_cases({"own containers": refused, "options": options}, 2, tmp_path)
