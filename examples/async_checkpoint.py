"""Save checkpoints while training goes on, and start again after whatever stopped the last run.

    torchrun --standalone --nproc-per-node 2 examples/async_checkpoint.py --folder checkpoints
    torchrun --standalone --nproc-per-node 2 examples/async_checkpoint.py --folder checkpoints --steps 80    # goes on

A loop to copy from: `Checkpoints` is all of it. What it promises, whenever the processes are killed:

    step-00000020/      complete: `latest` may name it
    step-00000030/      being written: nobody reads it, and the next run deletes it
    latest              the name of the newest complete checkpoint; renamed into place, so it is the old or the new one

It runs on CUDA devices where there are any, else on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import ArenaStager, SavePlanner, get_optimizer_state_dict, load, set_optimizer_state_dict

MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


class Checkpoints:
    """Asynchronous saves into `folder`, one at a time; the newest `keep` complete ones stay."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> None:
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._is_first_rank = dist.get_rank() == 0
        # One stager for all saves: it keeps the host memory into which it copies the model.
        self._stager = ArenaStager(optimizer)
        # The writing threads talk to each other while training does: in a group of their own, on the CPU. In the same
        # one as training, collectives of both would mix.
        self._group = dist.new_group(backend="gloo")
        self._running: tuple[str, Future[Any]] | None = None

    def save(self, step: int) -> None:
        """Returns as soon as training may go on; the file gets the state of this moment."""
        self.finish()  # one at a time. It has had all the steps since to be written
        name = f"step-{step:08d}"
        # Make the state dict right here. One from before the last step may show state from before it or after it.
        state = {
            "model": get_model_state_dict(self._model),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
            "step": step,
        }
        future = dcp.async_save(
            state,
            checkpoint_id=self._folder / name,
            async_stager=self._stager,
            process_group=self._group,
            planner=SavePlanner(),
        )
        self._running = name, future

    def poll(self) -> None:
        """Call it now and then: makes a save that is done the latest, without waiting for one that is not."""
        if self._running is not None and self._running[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is running, if any."""
        if self._running is None:
            return
        name, future = self._running
        self._running = None
        error = future.exception()
        if error is not None:
            # A full disk costs one checkpoint, not the run; `latest` names the one before. Every rank comes here.
            log(f"checkpoint {name} failed: {error}")
            return
        # The metadata is written by the first rank when all ranks have written their data, so with its future alone
        # the checkpoint is known to be complete: no barrier.
        if self._is_first_rank:
            self._publish(name)
            self._delete_old(name)

    def load_latest(self) -> int:
        """Brings model and optimizer to the newest complete checkpoint. Returns its step; 0 without any."""
        found = [self._newest() if self._is_first_rank else None]
        dist.broadcast_object_list(found)  # all ranks the same, whatever a network disk shows them
        name = found[0]
        if self._is_first_rank:
            self._delete_unfinished(name)
        dist.barrier()  # nobody writes before that
        if name is None:
            return 0
        # for_load=True gives the host memory in which state will live, though there is none yet. What is loaded is
        # where it belongs: nothing passes through the device, and no memory is taken for a second copy.
        state = {
            "model": get_model_state_dict(self._model),
            "optimizer": get_optimizer_state_dict(self._model, self._optimizer, for_load=True),
            "step": 0,
        }
        load(state, checkpoint_id=self._folder / name)
        set_model_state_dict(self._model, state["model"])
        set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
        return state["step"]

    def _newest(self) -> str | None:
        latest = self._folder / "latest"
        return latest.read_text().strip() if latest.exists() else None

    def _publish(self, name: str) -> None:
        temporary = self._folder / "latest.new"
        with temporary.open("w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before what was written
        temporary.replace(self._folder / "latest")

    def _delete_old(self, newest: str) -> None:
        older = sorted(path for path in self._folder.glob("step-*") if path.name < newest)
        complete = [path for path in older if (path / ".metadata").exists()]  # DCP writes it last
        kept = complete[max(0, len(complete) - self._keep + 1) :]
        for path in older:
            if path not in kept:
                shutil.rmtree(path)

    def _delete_unfinished(self, newest: str | None) -> None:
        """What an interrupted run has left: it would be in the way when this run comes to the same step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("step-*"):
            if newest is None or path.name > newest:
                shutil.rmtree(path)


# ---------------------------------------------------------------------------------------------------------------------
# Something to train
# ---------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(width: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(*(Block(width) for _ in range(3)), nn.Linear(width, width))
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    policy = OffloadPolicy(
        bucket_bytes=4 * MIB,
        # Second homes for the state: while one home is being written to disk, steps store into the other. This is an
        # upper limit, so it means all of the state. Host memory too short for that? With less, or 0, the first step
        # after a save waits until the file is written, and nothing else changes.
        snapshot_bytes=1 << 50,
    )
    return model, offload_optimizer(optimizer, model=model, policy=policy)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, step: int, device: torch.device) -> None:
    # The batch follows from step and rank, so a checkpoint needs no position in the data.
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    x = torch.randn(8, width, generator=generator).to(device)
    (model(x) - x.sin()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(args: argparse.Namespace, device: torch.device) -> None:
    model, optimizer = build(args.width, device)
    checkpoints = Checkpoints(args.folder, model, optimizer, args.keep)
    done = checkpoints.load_latest()
    log(f"resumed after step {done}" if done else "starting from nothing")
    for step in range(done + 1, args.steps + 1):
        train_step(model, optimizer, args.width, step, device)
        checkpoints.poll()
        if step % args.save_every == 0 or step == args.steps:
            checkpoints.save(step)
    checkpoints.finish()
    log(f"step {max(done, args.steps)}, checksum {checksum(model, optimizer):.17g}")


def checksum(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Of parameters and state, over all ranks: the same for two runs whose bits are the same."""
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    local = [getattr(tensor, "_local_tensor", tensor).detach().cpu().double().abs().sum() for tensor in tensors]
    total = torch.stack(local).sum()
    dist.all_reduce(total)
    return total.item()


# ---------------------------------------------------------------------------------------------------------------------
# Ranks and command line
# ---------------------------------------------------------------------------------------------------------------------


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def join_world() -> Iterator[torch.device]:
    """The process group that torchrun describes in the environment; without torchrun, a group of this process alone."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Gloo beside NCCL: checkpoints are planned, and written, from the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # what refers to the group goes with its threads: now, not while the interpreter shuts down


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; resumes from what is there")
    parser.add_argument("--steps", type=positive, default=40, help="at which training ends (%(default)s)")
    parser.add_argument("--save-every", type=positive, default=10, help="steps between two checkpoints (%(default)s)")
    parser.add_argument("--keep", type=positive, default=2, help="complete checkpoints that stay (%(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="of the model (%(default)s)")
    args = parser.parse_args(argv)
    with join_world() as device:
        run(args, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
