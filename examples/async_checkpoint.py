"""Save checkpoints while training continues, and resume however the last run ended.

    torchrun --standalone --nproc-per-node 2 examples/async_checkpoint.py --folder checkpoints
    torchrun --standalone --nproc-per-node 2 examples/async_checkpoint.py --folder checkpoints --steps 80    # goes on

Copy the class `Checkpoints` into your loop. It keeps these promises, no matter when the processes are killed:

    step-00000020/      complete: `latest` may name it
    step-00000030/      being written: no process reads it, and the next run deletes it
    latest              the name of the newest complete checkpoint; a rename replaces the old file by the new one

Runs on CUDA devices if there is one for each rank, else on the CPU.
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
        # Threads that write communicate across ranks while training does. They need a group of their own, on the CPU:
        # in training's group, the collectives of both would mix.
        self._group = dist.new_group(backend="gloo")
        self._running: tuple[str, Future[Any]] | None = None

    def save(self, step: int) -> None:
        """Start a save of the state of this moment; return as soon as training may continue."""
        self.finish()  # one save at a time: the last one had all steps since then to end
        name = f"step-{step:08d}"
        # Make the state dict here: one made before the last step may have state from before or after that step.
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
        """Publish the running save if it is done, without waiting for it; call this now and then."""
        if self._running is not None and self._running[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the running save, if any, and publish it."""
        if self._running is None:
            return
        name, future = self._running
        self._running = None
        error = future.exception()
        if error is not None:
            # A full disk costs one checkpoint, not the run; `latest` names the one before. All ranks get the error.
            log(f"checkpoint {name} failed: {error}")
            return
        # The first rank writes the metadata after all ranks have written their data. So when its own future is done,
        # the checkpoint is complete, and no barrier is needed.
        if self._is_first_rank:
            self._publish(name)
            self._delete_old(name)

    def load_latest(self) -> int:
        """Load the newest complete checkpoint into model and optimizer; return its step, 0 if there is none."""
        found = [self._newest() if self._is_first_rank else None]
        dist.broadcast_object_list(found)  # all ranks load the same one: a network disk may show them different files
        name = found[0]
        if self._is_first_rank:
            self._delete_unfinished(name)
        dist.barrier()  # no rank may write before unfinished checkpoints are deleted
        if name is None:
            return 0
        # for_load=True gives the host memory in which state will be, though the optimizer has no state yet. DCP loads
        # into this memory: nothing passes through the device, and no second copy is needed.
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
            os.fsync(file.fileno())  # else the rename may reach the disk before the content
        temporary.replace(self._folder / "latest")

    def _delete_old(self, newest: str) -> None:
        older = sorted(path for path in self._folder.glob("step-*") if path.name < newest)
        complete = [path for path in older if (path / ".metadata").exists()]  # DCP writes it last
        kept = complete[max(0, len(complete) - self._keep + 1) :]
        for path in older:
            if path not in kept:
                shutil.rmtree(path)

    def _delete_unfinished(self, newest: str | None) -> None:
        """Delete what an interrupted run has left: it would be in the way when this run comes to the same step."""
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
        # Host memory for a second copy (home) of the state: while one is being written to disk, steps store into the
        # other. This is an upper limit: 1 << 50 means all of the state. If you have less host memory, lower it, even to
        # 0: then the first step after a save waits until the file is written.
        snapshot_bytes=1 << 50,
    )
    return model, offload_optimizer(optimizer, model=model, policy=policy)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, step: int, device: torch.device) -> None:
    # Step and rank determine the batch, so a checkpoint needs no position in the data.
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
    """Return a sum over parameters and state of all ranks, which is equal for runs with the same bits."""
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
    """Join torchrun's process group, or without torchrun one of this process alone; yield this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Gloo in addition to NCCL: planning and writing a checkpoint communicate on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # free the last references to the group, and so end its threads, before the interpreter shuts down


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
