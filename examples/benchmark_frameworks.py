"""Compare plain and offloaded training by Trainer and accelerate, with a Llama's shapes: memory, speed, and bits.

    torchrun --standalone --nproc-per-node 2 examples/benchmark_frameworks.py trainer accelerate
    torchrun --standalone --nproc-per-node 2 examples/benchmark_frameworks.py trainer --size small --part save
    torchrun --standalone --nproc-per-node 2 examples/benchmark_frameworks.py trainer --size small --part resume
    python examples/benchmark_frameworks.py table --records runs/frameworks.jsonl

FSDP2 with bf16 compute over fp32 parameters, random weights and tokens, fused AdamW, clipping, a schedule, accumulation
of two and evaluations in between. ``measure`` trains plainly and with each policy in one process, and compares losses,
norms, parameters and state bit by bit. ``save`` trains plainly and with one policy, saves half way, and compares; for
Trainer, it also calls ``train()`` twice. ``resume`` continues from both checkpoints in a fresh process.
On the CPU (``--size tiny``) accelerate has to be told that FSDP is allowed; nothing else differs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_offload import is_offloaded, offload_report, synchronize

ACCUMULATION = 2
LEARNING_RATE = 3e-4
CLIP_AT = 1.0


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama, and of a micro-batch of each rank."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    sequences: int


SIZES = {
    "tiny": Size(64, 128, 2, 4, 256, 16, 2),
    "small": Size(768, 2048, 8, 12, 16_000, 256, 4),
    "1b": Size(2048, 5632, 18, 16, 32_000, 2048, 6),
}
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    # The most overlap for a loop that clips. It measures until step 14, then keeps state that no forward can hide.
    "overlapped": {"overlap": "forward"},
}


@dataclass
class Run:
    """Settings of one training, and what was measured in it."""

    size: Size
    steps: int
    policy: dict[str, Any] | None
    device: torch.device
    folder: Path
    save_at: int = 0
    resume_at: int = 0
    again: bool = False
    held_bytes: int = 0
    held_reserved_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    _pending: list[Tensor] = field(default_factory=list)
    _since: float = 0.0
    _steps: int = 0
    _disturbed: bool = True

    @property
    def evaluate_every(self) -> int:
        """Return after how many steps to evaluate; this disturbs neither measurements of "auto" nor the last step."""
        return max(2, self.steps * 9 // 20)

    def begin(self) -> None:
        """Begin to measure; call it when model and optimizer are made, so that their making does not count."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._since = time.perf_counter()

    def micro_batch(self, loss: Tensor) -> None:
        self._pending.append(loss.detach())

    def step_over(self) -> None:
        """Read the losses, as a loop that logs does, and record the time since the last step."""
        self.losses += [loss.item() for loss in self._pending]
        self._pending.clear()
        now = time.perf_counter()
        self._steps += 1
        if not self._disturbed and self.resume_at + self._steps > self.steps * 3 // 4:
            self.step_ms.append((now - self._since) * 1e3)
        self._since, self._disturbed = now, False

    def disturbed(self) -> None:
        """Leave out the time of the next step, which has an evaluation or a save in it."""
        self._disturbed = True

    def tokens(self, number: int) -> Tensor:
        """Return the tokens of one micro-batch, which differ from rank to rank."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        shape = (self.size.sequences, self.size.length)
        return torch.randint(0, self.size.vocabulary, shape, generator=generator).to(self.device)


def allow_fsdp_on_the_cpu(state: Any, plugin: Any) -> None:
    """Switch on accelerate's FSDP, which it allows on accelerators only; its further code also works on the CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    plugin.set_mixed_precision("bf16")
    state.fsdp_plugin = plugin


def transformers_llama(size: Size, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    with device:
        return LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens for the Trainer, which shuffles and batches by itself."""

    def __init__(self, size: Size, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, size.vocabulary, (number, size.length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train_with_trainer(run: Run) -> list[torch.optim.Optimizer]:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from fsdp_offload.integrations.transformers import OffloadTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            run.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.step_over()

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            run.disturbed()

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            run.disturbed()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            run.others.extend(logs[name] for name in ("grad_norm", "learning_rate", "eval_loss") if name in logs)

    class Watched(Trainer if run.policy is None else OffloadTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            run.micro_batch(loss)
            return loss

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if run.device.type == "cpu":
                from accelerate import FullyShardedDataParallelPlugin

                allow_fsdp_on_the_cpu(
                    self.accelerator.state, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
                )
                self.is_fsdp_enabled = True

    size = run.size
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT",
        "reshard_after_forward": True,
    }
    arguments = TrainingArguments(
        output_dir=str(run.folder),
        use_cpu=run.device.type == "cpu",
        fsdp=True,
        fsdp_config=fsdp,
        bf16=True,
        max_steps=run.steps,
        per_device_train_batch_size=size.sequences,
        per_device_eval_batch_size=size.sequences,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=CLIP_AT,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        optim="adamw_torch_fused",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=run.evaluate_every,
        prediction_loss_only=True,
        save_strategy="steps" if run.save_at else "no",
        save_steps=run.save_at or run.steps,
        report_to=[],
        disable_tqdm=True,
    )
    ranks = dist.get_world_size()
    trainer = Watched(
        transformers_llama(size, run.device),
        arguments,
        train_dataset=Tokens(size, run.steps * ACCUMULATION * size.sequences * ranks),
        eval_dataset=Tokens(size, size.sequences * ranks),
        callbacks=[Watch()],
        **({} if run.policy is None else {"offload_policy": run.policy}),
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = str(run.folder / f"checkpoint-{run.resume_at}") if run.resume_at else None
    trainer.train(resume_from_checkpoint=checkpoint)
    if run.again:
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the last evaluation left the root gathered, and accelerate would fail
        arguments.max_steps = 3
        trainer.train()
    return [trainer.optimizer]


def train_with_accelerate(run: Run) -> list[torch.optim.Optimizer]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from fsdp_offload.integrations.accelerate import prepare

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(
        cpu=run.device.type == "cpu",
        mixed_precision="bf16",
        fsdp_plugin=plugin,
        gradient_accumulation_steps=ACCUMULATION,
        step_scheduler_with_optimizer=False,
    )
    if run.device.type == "cpu":
        allow_fsdp_on_the_cpu(accelerator.state, plugin)
    model = transformers_llama(run.size, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    if run.policy is None:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler, policy=run.policy)
    if run.resume_at:
        accelerator.load_state(run.folder / "checkpoint")
    run.begin()
    for step in range(run.resume_at, run.steps):
        for micro in range(ACCUMULATION):
            with accelerator.accumulate(model):
                tokens = run.tokens(ACCUMULATION * step + micro)
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                run.micro_batch(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_AT)
                    run.others.append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        run.step_over()
        if (step + 1) % run.evaluate_every == 0:
            model.eval()
            with torch.no_grad():
                tokens = run.tokens(1 << 20)
                run.others.append(model(input_ids=tokens, labels=tokens).loss.item())
            model.train()
            run.disturbed()
        if step + 1 == run.save_at:
            accelerator.save_state(run.folder / "checkpoint")
            run.disturbed()
    return [optimizer]


FRAMEWORKS: dict[str, tuple[Callable[[Run], list[torch.optim.Optimizer]], list[str]]] = {
    "trainer": (train_with_trainer, ["transformers", "accelerate"]),
    "accelerate": (train_with_accelerate, ["accelerate", "transformers"]),
}


def what_is_left(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    """Return this rank's parameters, state and counters, on the devices where they are."""
    left = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                left += [param.detach(), *(torch.as_tensor(state[name]) for name in sorted(state))]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in left]


def same_everywhere(same: bool, device: torch.device) -> bool:
    """Tell whether ``same`` is true on all ranks."""
    answer = torch.tensor(int(same), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer.item())


class Records:
    """JSON lines of rank 0, printed and appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, what: str, **figures: Any) -> None:
        if dist.get_rank() == 0:
            line = json.dumps({"bench": what, **figures})
            print(line, flush=True)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line + "\n")


def train(args: argparse.Namespace, device: torch.device, name: str, **how: Any) -> tuple[Run, list[Any]]:
    """Train once in the framework, from scratch or from a checkpoint; return the run and its optimizers."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # forget the run before in this process
    GradientState._reset_state()
    policy = None if name.startswith("plain") else {**POLICIES[name], **args.policy}
    how.setdefault("folder", args.folder / args.framework / name)
    run = Run(SIZES[args.size], args.steps, policy, device, **how)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        run.held_bytes, run.held_reserved_bytes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    optimizers = FRAMEWORKS[args.framework][0](run)
    for optimizer in optimizers:
        if is_offloaded(optimizer) == (policy is None):
            raise RuntimeError(f"{name}: an optimizer is{' not' if policy is not None else ''} offloaded")
        if policy is not None:
            synchronize(optimizer)
    return run, optimizers


def figures_of(run: Run, optimizers: list[torch.optim.Optimizer], device: torch.device) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated() - run.held_bytes  # held: the plain run's results
        reserved_bytes = torch.cuda.max_memory_reserved() - run.held_reserved_bytes
        peaks = torch.tensor([peak_bytes, reserved_bytes, run.held_bytes], device=device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        figures["peak_bytes"], figures["reserved_bytes"], figures["held_bytes"] = peaks.tolist()
    step_ms = statistics.median(run.step_ms)
    tokens = run.size.sequences * run.size.length * ACCUMULATION * dist.get_world_size()
    figures |= {"step_ms": round(step_ms, 2), "tokens_per_s": round(tokens / step_ms * 1e3), "steps": len(run.step_ms)}
    figures["shortest_step_ms"], figures["longest_step_ms"] = round(min(run.step_ms), 2), round(max(run.step_ms), 2)
    if is_offloaded(optimizers[0]):
        report = offload_report(optimizers[0])
        figures |= {"host_bytes": report.memory.host_bytes, "ring_bytes": report.memory.device_bytes}
        figures["resident_bytes"] = report.memory.kept_state_bytes
        figures["stalled_ms"] = None if report.iteration is None else round(report.iteration.stalled_ms, 2)
    figures["first_loss"], figures["last_loss"] = run.losses[0], run.losses[-1]
    return figures


def measure(args: argparse.Namespace, device: torch.device, records: Records) -> bool:
    """Train plainly and with each policy; record figures, and whether losses, parameters and state are the same."""
    plain: Run | None = None
    left: list[Tensor] = []
    all_same = True
    for name in ("plain", *POLICIES, "plain again"):
        if name == "plain again" and all_same:
            break  # after a difference, a second plain run shows whether plain training repeats itself
        began = time.perf_counter()
        run, optimizers = train(args, device, name)
        figures = figures_of(run, optimizers, device)
        now = what_is_left(optimizers)
        if plain is None:
            plain, left = run, now
            same = {}
            params = sum(param.numel() for group in optimizers[0].param_groups for param in group["params"])
            figures["params"] = params
        else:
            bits = len(now) == len(left) and all(
                one.dtype == other.dtype and torch.equal(one, other.to(one.device))
                for one, other in zip(left, now, strict=True)
            )
            seen = run.losses == plain.losses and run.others == plain.others
            same = {"same_losses": same_everywhere(seen, device), "same_bits": same_everywhere(bits, device)}
            all_same = all_same and all(same.values())
        figures["seconds"] = round(time.perf_counter() - began, 1)
        records.write("framework", framework=args.framework, policy=name, **figures, **same)
        del now, optimizers
        gc.collect()
    return all_same


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


def note_of(args: argparse.Namespace, name: str) -> Path:
    return Path(args.folder / args.framework / f"{name}-{dist.get_rank()}.json")


def save(args: argparse.Namespace, device: torch.device, records: Records) -> bool:
    """Train plainly and offloaded, save half way, and write notes for ``resume``; for Trainer, call train() twice."""
    notes = []
    half = args.steps // 2
    for name in ("plain", "overlapped"):
        run, optimizers = train(args, device, name, save_at=half)
        notes.append({"losses": run.losses, "others": run.others, "digest": digest(what_is_left(optimizers))})
        note_of(args, name).write_text(json.dumps(notes[-1]))
        del optimizers
        gc.collect()
    same = {"same": same_everywhere(notes[0] == notes[1], device)}
    if args.framework == "trainer":
        twice = []
        for name in ("plain", "overlapped"):
            run, optimizers = train(args, device, name, again=True, folder=args.folder / "again" / name)
            twice.append((run.losses, run.others, digest(what_is_left(optimizers))))
            del optimizers
            gc.collect()
        same["same_second_train"] = same_everywhere(twice[0] == twice[1], device)
    records.write("framework-save", framework=args.framework, saved_at=half, **same)
    return all(same.values())


def resume(args: argparse.Namespace, device: torch.device, records: Records) -> bool:
    """Continue in a fresh process: offloaded from both checkpoints, plain from the offloaded run's."""
    half = args.steps // 2
    whole = json.loads(note_of(args, "plain").read_text())
    all_same = True
    for name, source in (("overlapped", "plain"), ("overlapped", "overlapped"), ("plain", "overlapped")):
        run, optimizers = train(args, device, name, resume_at=half, folder=args.folder / args.framework / source)
        same = whole["losses"][-len(run.losses) :] == run.losses and whole["others"][-len(run.others) :] == run.others
        same = same and digest(what_is_left(optimizers)) == whole["digest"]
        same = same_everywhere(same and len(run.losses) == ACCUMULATION * (args.steps - half), device)
        all_same = all_same and same
        records.write("framework-resume", framework=args.framework, policy=name, checkpoint_of=source, same=same)
        del optimizers
        gc.collect()
    return all_same


def print_table(path: Path) -> None:
    """Print the records as a table in Markdown."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    print("| devices | framework | | peak GiB | reserved GiB | tokens/s | step ms | same losses, bits |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    devices = 0
    for line in lines:
        if line["bench"] == "machine":
            devices = line["devices"]
        if line["bench"] == "framework":
            peaks = (f"{line.get(name, 0) / 2**30:.1f}" for name in ("peak_bytes", "reserved_bytes"))
            same = "" if line["policy"] == "plain" else f"{line['same_losses']}, {line['same_bits']}"
            cells = (devices, line["framework"], line["policy"], *peaks, line["tokens_per_s"], line["step_ms"], same)
            print("| " + " | ".join(map(str, cells)) + " |")
    for line in lines:
        if line["bench"] in ("framework-save", "framework-resume", "framework-failed"):
            print(json.dumps(line))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="+", choices=[*FRAMEWORKS, "table"])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--part", choices=["measure", "save", "resume"], default="measure")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--policy", type=json.loads, default={}, help="fields of OffloadPolicy as JSON, for all of them"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/frameworks"), help="for checkpoints")
    parser.add_argument("--records", type=Path, default=Path("runs/frameworks.jsonl"), help="JSON lines are appended")
    args = parser.parse_args(argv)
    if args.frameworks == ["table"]:
        print_table(args.records)
        return 0

    warnings.filterwarnings("ignore", message="offload_optimizer: ")
    on_device = torch.accelerator.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_device else torch.device("cpu")
    if on_device:
        torch.accelerator.set_device_index(device.index)
        # Otherwise, and even with warn_only=True, the backward of flash attention adds in any order.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_device else "gloo", device_id=device if on_device else None)
    records = Records(args.records)
    same = True
    for framework in args.frameworks:
        args.framework = framework
        records.write(
            "machine",
            device=torch.cuda.get_device_name() if on_device else "cpu",
            devices=dist.get_world_size(),
            size=args.size,
            torch=torch.__version__,
            python=platform.python_version(),
            **{name: importlib.metadata.version(name) for name in FRAMEWORKS[args.framework][1]},
            date=datetime.date.today().isoformat(),
            command=shlex.join(["torchrun", "--nproc-per-node", str(dist.get_world_size()), *sys.argv]),
        )
        try:
            part = {"measure": measure, "save": save, "resume": resume}[args.part]
            same = part(args, device, records) and same
        except Exception:  # noqa: BLE001  record the failure, and still run the other frameworks
            traceback.print_exc()
            error = traceback.format_exc()[-1500:]
            records.write("framework-failed", framework=args.framework, part=args.part, error=error)
            same = False
        gc.collect()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
