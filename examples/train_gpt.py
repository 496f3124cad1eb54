"""Train a small GPT with `fully_shard` (FSDP2), its AdamW state in pinned host memory.

    python examples/train_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --save-dir checkpoints --save-every 25
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --save-dir checkpoints --resume

Runs on CUDA devices if there are any, else on the CPU. Only `build_optimizer` offloads; the rest is an ordinary
training loop. `--no-offload` runs it with the plain optimizer: the losses that `--metrics FILE` records are then the
same to the last bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

MIB = 2**20
VOCAB_SIZE = 256  # the tokens are bytes
BATCHES_PER_EVALUATION = 4


class UserError(Exception):
    """Raised for mistakes that the user can correct; shown as one line, without a traceback."""


# ---------------------------------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    def log(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def join_world(device_type: str) -> Iterator[World]:
    """Join torchrun's process group, or without torchrun one of this process alone."""
    device = choose_device(device_type)
    # Gloo in addition to NCCL: checkpoint planning sends Python objects, which need not pass through the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    except UserError:
        dist.destroy_process_group()  # a UserError occurs on every rank
        raise
    # After any other exception the group is not destroyed: NCCL would wait for ranks that wait for this one.
    # Gloo's threads need Python to drop the tensors of the last collective. Without this barrier they may do so while
    # the interpreter shuts down, and the process aborts ("terminate called without an active exception").
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # free model and meshes, a cycle that refers to the group, and so end the group's threads before exit


def choose_device(device_type: str) -> torch.device:
    if device_type == "cpu" or (device_type == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    needed, visible = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if needed > visible:
        raise UserError(
            f"expected a CUDA device for each rank, got {needed} rank(s) and {visible} device(s) on this machine: "
            f"start fewer ranks, or use --device cpu"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def make_deterministic(seed: int) -> None:
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs a fixed workspace
    torch.use_deterministic_algorithms(True)
    # Deterministic algorithms also fill new buffers with NaN, FSDP's too; no code here reads one before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


def text_files(data: Path | None) -> list[Path]:
    """List the files to train on, sorted, so that all ranks agree: of `data`, or Python's standard library."""
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        installed = {"site-packages", "dist-packages"}  # not part of the standard library
        return sorted(path for path in root.rglob("*.py") if installed.isdisjoint(path.relative_to(root).parts))
    if not data.exists():
        raise UserError(f"--data {data}: no such file or folder")
    return [data] if data.is_file() else sorted(path for path in data.rglob("*") if path.is_file())


def read_tokens(data: Path | None, max_bytes: int) -> Tensor:
    """Return the first `max_bytes` bytes of the text, as uint8."""
    text = bytearray()
    for path in text_files(data):
        try:
            text += path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if len(text) >= max_bytes:
            break
    if not text:
        raise UserError(f"no text in {data or sysconfig.get_paths()['stdlib']}: name a file or folder with --data")
    return torch.frombuffer(text, dtype=torch.uint8)[:max_bytes]


@dataclass(frozen=True)
class Sampler:
    """Draws sequences at random. A batch depends on seed and step only. So a checkpoint needs no position in the data
    but the step, and any number of ranks draws the same sequences in the same order."""

    tokens: Tensor
    seed: int
    batch_size: int  # sequences in a step, over all ranks
    seq_len: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.seq_len:
            raise UserError(
                f"the text is too short: training and validation need more than --seq-len {self.seq_len} bytes each, "
                f"and one of them has {len(self.tokens)}"
            )

    def micro_batches(self, step: int, count: int, world: World) -> list[Tensor]:
        """Return this rank's part of step `step`: `count` tensors, each (batch_size / count / ranks, seq_len + 1)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - self.seq_len, (self.batch_size,), generator=generator)
        mine = starts.view(count, world.size, -1)[:, world.rank]
        positions = mine.unsqueeze(-1) + torch.arange(self.seq_len + 1)
        return list(self.tokens[positions].long().to(world.device))


def split_text(tokens: Tensor, args: argparse.Namespace) -> tuple[Sampler, Sampler]:
    """Return samplers of the training text and of the validation text, which is the last twentieth."""
    cut = len(tokens) - len(tokens) // 20
    training = Sampler(tokens[:cut], args.seed, args.batch_size, args.seq_len)
    validation = Sampler(tokens[cut:], args.seed, args.batch_size, args.seq_len)
    return training, validation


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, head, length, width / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq_len: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB_SIZE, width)
        self.position_embedding = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Start projections into the residual stream smaller, so that the stream does not grow with depth.
                scale = math.sqrt(2 * len(self.blocks)) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(args: argparse.Namespace, world: World) -> GPT:
    """Every rank draws the same weights on the CPU. `fully_shard` moves each rank's shards to its device, block by
    block, so that no device has the whole model. (Build a model too big for the host on the meta device.)"""
    model = GPT(args.layers, args.width, args.heads, args.seq_len)
    mesh = dist.init_device_mesh(world.device.type, (world.size,))
    policy = precision_policy(args.precision, world.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def precision_policy(precision: str | None, device: torch.device) -> MixedPrecisionPolicy:
    """Compute in `precision` (by default bf16 on CUDA, fp32 on the CPU); parameters are fp32 in any case."""
    if (precision or ("bf16" if device.type == "cuda" else "fp32")) == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer
# ---------------------------------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    if args.offload:
        # Import it here, so that --no-offload runs with plain torch.
        from fsdp_offload import OffloadPolicy, offload_optimizer

        policy = OffloadPolicy(device_bytes=args.device_mib * MIB, bucket_bytes=args.bucket_mib * MIB)
        offload_optimizer(optimizer, model=model, policy=policy)
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> LambdaLR:
    def factor(step: int) -> float:
        """Return the factor of the learning rate: a linear warmup to 1, then half a cosine down to 0.1."""
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        progress = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """All that a checkpoint stores."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    identity: dict[str, int]  # settings that a resumed run must share with the interrupted one


def run_identity(args: argparse.Namespace, sampler: Sampler) -> dict[str, int]:
    names = ("layers", "width", "heads", "seq_len", "batch_size", "seed")
    return {name: getattr(args, name) for name in names} | {"text_crc32": zlib.crc32(sampler.tokens.numpy())}


def checkpoint_path(save_dir: Path, step: int) -> Path:
    return save_dir / f"step-{step:08d}"


def latest_checkpoint(save_dir: Path) -> Path | None:
    """Return the complete checkpoint with the highest step. (An interrupted save leaves no final name.)"""
    finished = [path for path in save_dir.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def agreed_latest_checkpoint(save_dir: Path, world: World) -> Path | None:
    """Return rank 0's latest checkpoint on all ranks: a network disk may briefly show them different folders."""
    found = [latest_checkpoint(save_dir) if world.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def tensors_and_schedule(training: Training) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(training.model),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
        "scheduler": training.scheduler.state_dict(),
    }


def save_checkpoint(save_dir: Path, training: Training, step: int, world: World) -> None:
    """Save under a temporary name, and rename when every rank is done: only complete checkpoints have a final name."""
    final = checkpoint_path(save_dir, step)
    unfinished = final.with_name(final.name + ".unfinished")
    if world.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted save
        unfinished.mkdir(parents=True)
    dist.barrier()
    # The step is also the sampler's position.
    run = {"step": step, "identity": training.identity}
    dcp.save({"run": run, **tensors_and_schedule(training)}, checkpoint_id=unfinished)
    dist.barrier()
    if world.rank == 0:
        unfinished.rename(final)
    dist.barrier()


def load_checkpoint(path: Path, training: Training) -> int:
    """Load a checkpoint into `training`; return its step."""
    run: dict[str, Any] = {"step": 0, "identity": dict(training.identity)}
    dcp.load({"run": run}, checkpoint_id=path)
    refuse_other_run(path, run["identity"], training.identity)
    # DCP loads in place. The optimizer has no state yet; torch creates it here by a step with a learning rate of 0.
    state = tensors_and_schedule(training)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(training.model, state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    return run["step"]


def refuse_other_run(path: Path, saved: dict[str, int], ours: dict[str, int]) -> None:
    for name, value in ours.items():
        if saved[name] == value:
            continue
        if name == "text_crc32":
            raise UserError(f"{path} was made with another text: resume with the same --data and --data-mib")
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{path} was made with {flag} {saved[name]}, this run has {flag} {value}: use the same")


def start_or_resume(training: Training, args: argparse.Namespace, world: World) -> int:
    """Load the latest checkpoint if --resume is given; return the number of steps that are done."""
    if args.save_dir is None:
        return 0
    latest = agreed_latest_checkpoint(args.save_dir, world)
    if not args.resume:
        if latest is not None:
            raise UserError(f"{latest} is from an earlier run: add --resume to continue it, or use another --save-dir")
        return 0
    if latest is None:
        raise UserError(f"--resume: no checkpoint in {args.save_dir}")
    step = load_checkpoint(latest, training)
    if step >= last_step(args):
        raise UserError(f"{latest} is already at step {step}: ask for more with --steps or --stop-at")
    world.log(f"resumed from {latest}")
    return step


# ---------------------------------------------------------------------------------------------------------------------
# Progress
# ---------------------------------------------------------------------------------------------------------------------


def open_metrics(path: Path, start_step: int) -> IO[str]:
    """Open the file to append after `start_step`. A resumed run repeats the steps after its checkpoint, so the lines
    that the interrupted run wrote for these steps are deleted."""
    lines = path.read_text().splitlines(keepends=True) if start_step and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    file.writelines(line for line in lines if json.loads(line)["step"] <= start_step)
    return file


class Progress:
    """Keeps the numbers of each step on the device, and reads them every few steps: each read waits for the device."""

    def __init__(self, world: World, optimizer: torch.optim.Optimizer, metrics: IO[str], step: int) -> None:
        self._world = world
        self._optimizer = optimizer
        self._metrics = metrics
        self.step = step  # last reported step
        self._losses: list[Tensor] = []
        self._grad_norms: list[Tensor] = []
        self._lrs: list[float] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        self._started_s = time.perf_counter()

    def add(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._lrs.append(lr)

    def report(self, tokens_per_step: int) -> None:
        losses = mean_over_ranks(torch.stack(self._losses), self._world)
        grad_norms = torch.stack(self._grad_norms).tolist()
        tokens_per_s = len(losses) * tokens_per_step / (time.perf_counter() - self._started_s)
        for loss, grad_norm, lr in zip(losses, grad_norms, self._lrs, strict=True):
            self.step += 1
            self.record(loss=loss, grad_norm=grad_norm, lr=lr)
        self._world.log(
            f"step {self.step:6d}  loss {losses[-1]:.4f}  lr {self._lrs[-1]:.2e}  {tokens_per_s:10,.0f} tokens/s  "
            f"{memory_by_place(self._optimizer, self._world.device)}"
        )
        for pending in (self._losses, self._grad_norms, self._lrs):
            pending.clear()
        self.restart_clock()

    def record(self, **values: float) -> None:
        """Write a line of JSON: each value as a decimal, to be read, and by `float.hex`, to be compared exactly."""
        exact = {f"{name}_hex": value.hex() for name, value in values.items()}
        print(json.dumps({"step": self.step, **values, **exact}), file=self._metrics, flush=True)


def mean_over_ranks(values: Tensor, world: World) -> list[float]:
    values = values.double()  # exact enough to add fp32 numbers of a few ranks without rounding
    dist.all_reduce(values)
    return (values / world.size).tolist()


def memory_by_place(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Format this rank's optimizer state by place, and on CUDA the memory allocated on its device."""
    state_bytes = {"device": 0, "host": 0}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                state_bytes["host" if local.device.type == "cpu" else "device"] += local.nbytes
    text = f"state {state_bytes['device'] / 1e6:,.2f} MB on device, {state_bytes['host'] / 1e6:,.2f} MB on host"
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)  # each line has the peak since the line before
        text += f"  device {allocated / 1e6:,.1f} MB, peak {peak / 1e6:,.1f} MB"
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def token_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


def train_step(training: Training, micro_batches: Sequence[Tensor], clip: float) -> tuple[Tensor, Tensor]:
    """Train one optimizer step; return this rank's loss and the global gradient norm, both on the device."""
    losses = []
    for index, sequences in enumerate(micro_batches):
        # Gradients of all but the last micro-batch are added up locally and reduced once.
        training.model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        loss = token_loss(training.model, sequences) / len(micro_batches)
        loss.backward()
        losses.append(loss.detach())
    grad_norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), clip or math.inf)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    return torch.stack(losses).sum(), full(grad_norm)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def evaluate(model: GPT, sampler: Sampler, world: World) -> float:
    """Return the mean loss over batches that are the same in every call."""
    losses = []
    for step in range(BATCHES_PER_EVALUATION):
        losses += [token_loss(model, sequences) for sequences in sampler.micro_batches(step, 1, world)]
    # After a forward without a backward, the root's parameters stay gathered, but a state dict needs shards.
    model.reshard()
    return math.fsum(mean_over_ranks(torch.stack(losses), world)) / len(losses)


def last_step(args: argparse.Namespace) -> int:
    return min(args.steps, args.stop_at or args.steps)


def train(training: Training, sampler: Sampler, args: argparse.Namespace, progress: Progress, world: World) -> None:
    """Train from the step after `progress.step` to the last one."""
    last = last_step(args)
    for step in range(progress.step + 1, last + 1):
        lr = training.scheduler.get_last_lr()[0]
        micro_batches = sampler.micro_batches(step, args.accumulate, world)
        loss, grad_norm = train_step(training, micro_batches, args.clip)
        progress.add(loss, grad_norm, lr)
        save_now = args.save_dir is not None and (step == last or step % args.save_every == 0)
        # Report before saving: so the metrics of all steps that a checkpoint covers are on disk before it is.
        if save_now or step == last or step % args.log_every == 0:
            progress.report(args.batch_size * args.seq_len)
        if save_now:
            save_checkpoint(args.save_dir, training, step, world)
            progress.restart_clock()  # saving is not training


def run(args: argparse.Namespace, tokens: Tensor, world: World) -> None:
    if args.batch_size % (args.accumulate * world.size):
        raise UserError(
            f"--batch-size {args.batch_size} does not divide by --accumulate {args.accumulate} x {world.size} ranks"
        )
    make_deterministic(args.seed)
    sampler, validation_sampler = split_text(tokens, args)
    model = build_model(args, world)
    optimizer = build_optimizer(model, args)
    training = Training(model, optimizer, build_scheduler(optimizer, args), run_identity(args, sampler))
    numel = sum(parameter.numel() for parameter in model.parameters())
    world.log(f"{numel:,} parameters on {world.size} x {world.device.type}, {len(tokens):,} bytes of text")

    start_step = start_or_resume(training, args, world)
    metrics_path = args.metrics if args.metrics and world.rank == 0 else Path(os.devnull)
    with open_metrics(metrics_path, start_step) as metrics:
        progress = Progress(world, optimizer, metrics, start_step)
        train(training, sampler, args, progress, world)
        if progress.step < args.steps:
            world.log(f"stopped at step {progress.step} of {args.steps}")
        else:
            validation_loss = evaluate(model, validation_sampler, world)
            progress.record(validation_loss=validation_loss)
            world.log(f"validation loss {validation_loss:.4f}")
    if args.offload:
        world.log(str(optimizer.offload_report()))


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT with fully_shard, its optimizer state in pinned host memory."
    )
    add_training_flags(parser)
    add_model_flags(parser)
    add_offload_flags(parser)
    add_output_flags(parser)
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} does not divide by --heads {args.heads}")
    if args.resume and args.save_dir is None:
        parser.error("--resume needs --save-dir, the folder with the checkpoints")
    return args


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--data", type=Path, help="a file or folder of text (default: the sources of Python's library)")
    group.add_argument("--data-mib", type=positive, default=4, help="read at most this much of it (%(default)s)")
    group.add_argument("--steps", type=positive, default=100, help="length of the run and its schedule (%(default)s)")
    group.add_argument("--stop-at", type=positive, help="stop after this step, as if interrupted")
    group.add_argument("--batch-size", type=positive, default=16, help="sequences, over all ranks (%(default)s)")
    group.add_argument("--accumulate", type=positive, default=1, help="micro-batches in a step (%(default)s)")
    group.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    group.add_argument("--warmup-steps", type=int, default=10, help="steps until it is reached (%(default)s)")
    group.add_argument("--weight-decay", type=float, default=0.1, help="for matrices only (%(default)s)")
    group.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: any (%(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if there is any")
    group.add_argument("--precision", choices=("fp32", "bf16"), help="of the forward (bf16 on CUDA, fp32 on CPU)")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--layers", type=positive, default=4, help="blocks (%(default)s)")
    group.add_argument("--width", type=positive, default=128, help="of the residual stream (%(default)s)")
    group.add_argument("--heads", type=positive, default=4, help="of attention (%(default)s)")
    group.add_argument("--seq-len", type=positive, default=128, help="bytes in a sequence (%(default)s)")


def add_offload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("offload")
    group.add_argument(
        "--offload", action=argparse.BooleanOptionalAction, default=True, help="keep optimizer state in host memory"
    )
    group.add_argument("--device-mib", type=positive, default=256, help="device memory for it (%(default)s)")
    group.add_argument("--bucket-mib", type=positive, default=64, help="how much moves at once (%(default)s)")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--log-every", type=positive, default=10, help="steps between two lines (%(default)s)")
    group.add_argument("--metrics", type=Path, help="write every step's numbers to this file, as JSON lines")
    group.add_argument("--save-dir", type=Path, help="folder for checkpoints; one is saved after the last step")
    group.add_argument("--save-every", type=positive, default=50, help="steps between two of them (%(default)s)")
    group.add_argument("--resume", action="store_true", help="continue from the latest of them")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        tokens = read_tokens(args.data, args.data_mib * MIB)
        with join_world(args.device) as world:
            run(args, tokens, world)
    except UserError as error:
        sys.exit(f"train_gpt.py: error: {error}")


if __name__ == "__main__":
    main()
