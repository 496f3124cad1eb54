"""torchtitan's containers of optimizers and schedulers, and its checkpoint manager in all of its modes.

The loop is that of its trainer, which needs torch 2.14: test_command_line_torchtitan.py.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.distributed.launch import DEVICE_TYPE, spawn_cases
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
    from torchtitan.distributed import utils

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
    for step in range(SAVED_AT if load else 0, STEPS):
        container.zero_grad()
        for micro in range(MICRO_BATCHES):
            loss = net(batch(10 * step + micro, rank))
            seen.append(loss.item())
            (loss / MICRO_BATCHES).backward()
        seen.append(utils.clip_grad_norm_(list(net.parameters()), 0.5, foreach=True).item())
        manager.maybe_wait_for_staging()
        container.step()
        schedulers.step()
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


@proves("torchtitan's containers", "torchtitan", TRAINS)
def test_updates_in_the_backward(tmp_path: Path) -> None:
    same_scripts(script, tmp_path, 2, {"plain": {}, "in backward": {"policy": IN_BACKWARD}})


@proves("torchtitan's containers", "torchtitan", RESUMES, OTHER_RANKS)
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
