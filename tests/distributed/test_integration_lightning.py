"""Lightning's Trainer with ModelParallelStrategy, automatic and manual optimization, and Fabric."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import is_offloaded, offload_optimizer, offload_report
from tests.distributed.frameworks import (
    IN_BACKWARD,
    MICRO_BATCHES,
    OVERLAPPED,
    POLICY,
    SAVED_AT,
    STEPS,
    as_torchrun,
    batch,
    record,
    same_scripts,
)
from tests.distributed.launch import DEVICE_TYPE, spawn
from tests.distributed.models import Net, decay_groups, shard_groups
from tests.parity import assert_at_home
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytest.importorskip("lightning")
pytestmark = pytest.mark.distributed


def shard(net: Net, mesh: DeviceMesh) -> Net:
    shard_groups(net, mesh=mesh["data_parallel"])
    return net


def module_of(*, manual: bool, rank: int) -> Any:
    from lightning.pytorch import LightningModule

    batches: Any = [batch(number, rank) for number in range(MICRO_BATCHES * STEPS)]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()
            self.seen: list[float] = []
            self.automatic_optimization = not manual

        def configure_model(self) -> None:
            if not any(hasattr(module, "reshard") for module in self.net.modules()):
                shard(self.net, self.device_mesh)

        def training_step(self, tokens: Tensor, number: int) -> Tensor:
            loss = self.net(tokens)
            self.seen.append(loss.item())
            if manual:
                self.manual_backward(loss / MICRO_BATCHES)
                if number % MICRO_BATCHES == 1:
                    optimizer = self.optimizers()
                    norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                    self.seen.append(norm.full_tensor().item())
                    optimizer.step()
                    optimizer.zero_grad()
                    self.lr_schedulers().step()
            return loss

        def validation_step(self, tokens: Tensor, number: int) -> None:
            del number
            self.seen.append(self.net(tokens).item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(list(decay_groups(self.net)), lr=0.01)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 20)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches[: MICRO_BATCHES * STEPS], batch_size=None)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches[:2], batch_size=None)

    return Module()


def environment(rank: int, world_size: int) -> None:
    as_torchrun(rank, world_size)
    os.environ |= {"TORCHELASTIC_RUN_ID": "test"}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def trainer_of(
    world_size: int, folder: Path, callbacks: list[Any], *, distributed_files: bool = True, **options: Any
) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=distributed_files
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    device = {"accelerator": "cpu" if DEVICE_TYPE == "cpu" else "gpu", "devices": world_size}
    return Trainer(strategy=strategy, callbacks=callbacks, **quiet, **device, **options)


def script(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    *,
    policy: dict[str, Any] | None = None,
    manual: bool = False,
    full: bool = False,
    load: Path | None = None,
    again: bool = False,
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from fsdp_offload.integrations.lightning import OffloadCallback

    environment(rank, world_size)
    saving = ModelCheckpoint(folder / name, every_n_train_steps=SAVED_AT, save_top_k=-1, filename="{step}")
    offload = [] if policy is None else [OffloadCallback(policy, log_metrics=True)]
    trainer = trainer_of(
        world_size,
        folder,
        [saving, *offload],
        distributed_files=not full,
        max_steps=STEPS,
        log_every_n_steps=2,
        **({} if manual else {"gradient_clip_val": 0.5, "accumulate_grad_batches": MICRO_BATCHES}),
        val_check_interval=4 * MICRO_BATCHES,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    module = module_of(manual=manual, rank=rank)
    trainer.fit(module, ckpt_path=None if load is None else str(load))
    if again:
        trainer.fit_loop.epoch_loop.max_steps = STEPS + 2
        trainer.fit(module)  # builds another optimizer
        assert trainer.global_step == STEPS + 2
    (optimizer,) = trainer.optimizers
    assert is_offloaded(optimizer) == (policy is not None)
    if policy is not None:
        report = offload_report(optimizer)
        assert_at_home(optimizer)
        assert ("the loop clips" in str(report)) == (policy == IN_BACKWARD)
        assert trainer.callback_metrics["offload/memory/host_bytes"] == report.memory.host_bytes
    record(folder, name, rank, module.seen, module.net, [optimizer])


@proves("Lightning's Trainer", "lightning", TRAINS, RESUMES, OTHER_RANKS)
@pytest.mark.long
@pytest.mark.parametrize("kind", ["automatic", "manual", "full"])
def test_fit(tmp_path: Path, kind: str) -> None:
    options = {"manual": kind == "manual", "full": kind == "full"}
    plain: dict[str, Any] = options
    offloaded: dict[str, Any] = {**options, "policy": POLICY}
    first = {"plain": plain, "offloaded": offloaded}
    if kind == "automatic":
        first |= {"overlapped": {**options, "policy": OVERLAPPED}, "clipped": {**options, "policy": IN_BACKWARD}}
        twice = {"plain twice": {**plain, "again": True}, "offloaded twice": {**offloaded, "again": True}}
        same_scripts(script, tmp_path, 2, twice)
    same_scripts(script, tmp_path, 2, first)
    paths = {name: tmp_path / name / f"step={SAVED_AT}.ckpt" for name in ("plain", "offloaded")}
    later = {
        "plain resumed": {**plain, "load": paths["plain"]},
        "offloaded from plain": {**offloaded, "load": paths["plain"]},
        "plain from offloaded": {**plain, "load": paths["offloaded"]},
    }
    same_scripts(script, tmp_path, 2, later)
    if kind == "full":
        alone = {f"{name} alone": later[name] for name in ("plain resumed", "offloaded from plain")}
        same_scripts(script, tmp_path, 1, alone)


def run_wrong_orders(rank: int, world_size: int, folder: Path) -> None:
    """Attached before the module is sharded, and to an optimizer that Lightning does not train with."""
    from fsdp_offload.integrations.lightning import OffloadCallback

    warnings.filterwarnings("ignore", message="offload_optimizer: ")
    environment(rank, world_size)

    def trainer(*callbacks: Any) -> Any:
        few = {"max_steps": 2, "limit_val_batches": 0, "enable_checkpointing": False}
        return trainer_of(world_size, folder, [*callbacks], **few)

    early = module_of(manual=False, rank=rank)
    optimizer = offload_optimizer(torch.optim.AdamW(early.net.parameters()), model=early.net)
    early.configure_optimizers = lambda: optimizer
    with pytest.raises(RuntimeError, match=r"no longer the model's.*fsdp_offload\.integrations"):
        trainer().fit(early)

    late = module_of(manual=False, rank=rank)
    kept = []
    late.on_fit_start = lambda: kept.append(offload_optimizer(torch.optim.AdamW(late.net.parameters()), model=late.net))
    with pytest.warns(UserWarning, match=r"NOTHING IS OFFLOADED.*fsdp_offload\.integrations"):
        trainer().fit(late)

    own = module_of(manual=False, rank=rank)
    own.configure_optimizers = lambda: offload_optimizer(torch.optim.AdamW(own.net.parameters()), model=own)
    trainer(OffloadCallback(), OffloadCallback()).fit(own)  # what is offloaded stays so
    assert is_offloaded(own.trainer.optimizers[0])
    with pytest.raises(RuntimeError, match=r"offloaded already, .*say in one place .*fsdp_offload\.integrations"):
        trainer(OffloadCallback(POLICY), OffloadCallback(OVERLAPPED)).fit(module_of(manual=False, rank=rank))


def test_wrong_orders(tmp_path: Path) -> None:
    spawn(run_wrong_orders, 2, tmp_path, tmp_path)


def fabric_script(
    rank: int, world_size: int, folder: Path, name: str, *, policy: dict[str, Any] | None, load: Path | None = None
) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from fsdp_offload.integrations.lightning import setup_optimizers

    environment(rank, world_size)
    strategy = ModelParallelStrategy(shard, data_parallel_size=world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu" if DEVICE_TYPE == "cpu" else "gpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(Net())
    optimizer: Any = torch.optim.AdamW(list(decay_groups(model)), lr=0.01)
    if policy is None:
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        optimizer = setup_optimizers(fabric, model, optimizer, policy=policy)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 20)
    state = {"model": model, "optimizer": optimizer}
    if load is not None:
        fabric.load(load, state)
    seen = []
    for step in range(0 if load is None else SAVED_AT, STEPS):
        for micro in range(MICRO_BATCHES):
            with fabric.no_backward_sync(model, enabled=micro < MICRO_BATCHES - 1):
                loss = model(batch(10 * step + micro, rank))
                seen.append(loss.item())
                fabric.backward(loss)
        seen.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).full_tensor().item())
        optimizer.step()
        if load is None:  # its state is not in the checkpoint
            scheduler.step()
        optimizer.zero_grad()
        if load is None and step == SAVED_AT - 1:
            fabric.save(folder / name, state)
    assert is_offloaded(optimizer) == (policy is not None)
    assert ("the loop clips" in str(offload_report(optimizer) if policy else "")) == (policy == IN_BACKWARD)
    record(folder, name, rank, seen, model, [optimizer.optimizer])


@proves("Fabric", "lightning", TRAINS, RESUMES, OTHER_RANKS)
def test_fabric(tmp_path: Path) -> None:
    policies = {"plain": None, "offloaded": POLICY, "clipped": IN_BACKWARD}
    same_scripts(fabric_script, tmp_path, 2, {name: {"policy": policy} for name, policy in policies.items()})
    for ranks in (2, 1):
        later: dict[str, dict[str, Any]] = {
            f"plain from plain, {ranks}": {"policy": None, "load": tmp_path / "plain"},
            f"offloaded from plain, {ranks}": {"policy": POLICY, "load": tmp_path / "plain"},
            f"plain from offloaded, {ranks}": {"policy": None, "load": tmp_path / "offloaded"},
        }
        same_scripts(fabric_script, tmp_path, ranks, later)
