"""Whether plans come true: predictions of several trainings, written first, beside what they take.

::

    python -m fsdp_offload.bench plan --predict FILE     anywhere; writes one line for each configuration
    python -m fsdp_offload.bench plan --compare FILE     on the devices; runs what is in the file and prints both

On several devices: ``torchrun --standalone --nproc-per-node 2 -m fsdp_offload.bench plan --compare FILE``. How many
ranks a prediction is for is said with ``--ranks``.
"""

import dataclasses
import functools
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from .. import offload_optimizer, remove_offload
from ..plan import CHOICES, Choice, Forecast, Model, Plan, Training, model_of, plan
from ..plan.decoder import Decoder, DecoderConfig
from ..plan.training import DTYPES
from .record import print_record
from .train import GPT

_SETTLE, _SETTLE_AUTO = 4, 17
"""Iterations before anything is measured: the first creates the state; "auto" measures until the fifteenth."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how one rank trains it, and the policies to try."""

    build: Callable[[], nn.Module]
    sequences: int
    training: dict[str, Any]
    policies: tuple[str, ...]


def _decoder(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Decoder:
    return Decoder(
        DecoderConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            head_dim=hidden // heads,
            **more,
        )
    )


CASES = {
    "gpt": Case(
        lambda: GPT(24, 2048, 32_768),
        8,
        {"sequence_length": 2048},
        ("no offload", "step", "forward", "forward, keeping", "iteration"),
    ),
    "gpt-wide": Case(
        lambda: GPT(10, 4096, 50_304),
        4,
        {"sequence_length": 2048, "micro_batches": 2},
        ("no offload", "forward", "iteration", "iteration, keeping"),
    ),
    "decoder": Case(
        lambda: _decoder(2048, 8192, 16, 32, 128_256, tie_word_embeddings=True),
        4,
        {"sequence_length": 4096},
        ("no offload", "forward, keeping", "iteration", "iteration, keeping"),
    ),
    "decoder-recomputed": Case(
        lambda: _decoder(3072, 8192, 28, 24, 64_000, qk_norm=True),
        2,
        {"sequence_length": 8192, "checkpointing": "full"},
        ("no offload", "step", "iteration"),
    ),
    "decoder-bf16": Case(
        lambda: _decoder(3072, 8192, 20, 24, 64_000),
        6,
        {"sequence_length": 2048, "dtype": "bf16", "master_weights": "remainder"},
        ("step", "iteration", "iteration, keeping"),
    ),
    "experts": Case(
        lambda: _decoder(1024, 3584, 10, 16, 32_000, num_experts=8, num_experts_per_tok=2),
        16,
        {"sequence_length": 1024},
        ("no offload", "forward"),
    ),
    "tiny": Case(lambda: _decoder(64, 128, 2, 4, 256), 2, {"sequence_length": 32}, ("no offload", "step", "iteration")),
}

_ON_DEVICES = ",".join(name for name in CASES if name != "tiny")


def main(
    predict: Annotated[Path | None, typer.Option(help="Write predictions into this file.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Measure what this file predicts.")] = None,
    cases: Annotated[str, typer.Option(help="Only these, separated by commas.")] = _ON_DEVICES,
    ranks: Annotated[int, typer.Option(help="Devices to predict for.")] = 1,
    machine: Annotated[str, typer.Option(help="Profile to predict with.")] = "H200",
    iterations: Annotated[int, typer.Option(help="Timed together.")] = 4,
    seconds: Annotated[float, typer.Option(help="Begin no further configuration after so long.")] = 200.0,
) -> None:
    """Predicted memory and time beside measured ones."""
    if (predict is None) == (compare is None):
        raise typer.BadParameter("give one of --predict FILE and --compare FILE")
    if predict is not None:
        predictions = [line for name in cases.split(",") for line in _predictions(name, ranks, machine)]
        predict.write_text("".join(f"{json.dumps(line)}\n" for line in predictions), encoding="utf-8")
        return
    assert compare is not None
    until = time.monotonic() + seconds
    predicted = [json.loads(line) for line in compare.read_text(encoding="utf-8").splitlines()]
    with _process_group() as device:
        for name in dict.fromkeys(line["case"] for line in predicted):
            lines = [line for line in predicted if line["case"] == name and name in cases.split(",")]
            if lines and not _is_late(until, device):
                _compare(name, lines, device, iterations, until)


def _predictions(name: str, ranks: int, machine: str) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    made = plan(_model(case), machine=machine, **_training(case, ranks))
    best = made.best(loop="no_clipping")
    for one in made.forecasts:
        if one.name in case.policies:
            yield {"case": name, "ranks": ranks, "machine": machine, "best": best is one, **_figures(made, one)}


def _model(case: Case) -> Model:
    with torch.device("meta"):
        return model_of(case.build())


def _training(case: Case, ranks: int) -> dict[str, Any]:
    tokens = ranks * case.sequences * case.training["sequence_length"] * case.training.get("micro_batches", 1)
    return {"ranks": ranks, "tokens_per_step": tokens, **case.training}


def _figures(made: Plan, one: Forecast) -> dict[str, Any]:
    return {
        "policy": one.name,
        "parameters": made.numel,
        "peak_bytes": one.device.peak_bytes,
        "host_bytes": one.host_bytes,
        "ms": round(one.iteration_ms, 2),
        "limit": one.limit,
        "resident_bytes": one.resident_bytes,
        "parts_ms": {key: round(value, 2) for key, value in dataclasses.asdict(made.times).items()},
        "terms": dict(one.device.terms),
    }


# Measuring ----------------------------------------------------------------------------------------------------------


@contextmanager
def _process_group() -> Iterator[torch.device]:
    kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    on_cpu = kind.type == "cpu"
    if "RANK" in os.environ:
        if not on_cpu:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if on_cpu else None)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield kind if on_cpu else torch.device(kind.type, torch.accelerator.current_device_index())
    finally:
        dist.destroy_process_group()


def _compare(name: str, lines: list[dict[str, Any]], device: torch.device, iterations: int, until: float) -> None:
    case = CASES[name]
    training = Training(**_training(case, dist.get_world_size()))
    model = _sharded(case, training, device)
    for line in lines:
        found = _measure(model, training, line["policy"], device, iterations)
        if dist.get_rank() == 0:
            keys = ("peak_bytes", "host_bytes", "ms")
            print_record(
                "plan",
                case=name,
                policy=line["policy"],
                ranks=training.ranks,
                **{f"predicted_{key}": line[key] for key in keys},
                **{f"measured_{key}": found[key] for key in keys},
                **{f"{key}_ratio": line[key] / found[key] if found[key] else None for key in keys},
                resident_bytes=[line["resident_bytes"], found["resident_bytes"]],
                reserved_bytes=found["reserved_bytes"],
                stalled_ms=found["stalled_ms"],
                best=line["best"],
            )
        if _is_late(until, device):
            return


def _is_late(until: float, device: torch.device) -> bool:
    """Whether any rank says so: all have to stop together."""
    late = torch.tensor(float(time.monotonic() > until), device=device)
    dist.all_reduce(late)
    return bool(late.item())


def _sharded(case: Case, training: Training, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    gc.collect()
    dtype = DTYPES[training.dtype]
    with device:
        torch.set_default_dtype(dtype)
        try:
            module = case.build()
        finally:
            torch.set_default_dtype(torch.float32)
    known = model_of(module)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[training.compute_dtype])
    for group in known.groups:
        if training.checkpointing == "full" and group is not module:
            group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
        fully_shard(group, mesh=mesh, mp_policy=precision)
    return module


def _measure(
    model: nn.Module, training: Training, policy_name: str, device: torch.device, iterations: int
) -> dict[str, Any]:
    choice = next((choice for choice in CHOICES if choice.name == policy_name), None)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (training.sequences, training.sequence_length + 1)
    tokens = torch.randint(0, 256, shape, generator=generator, device=device)
    on_cpu = device.type == "cpu"
    gc.collect()
    if not on_cpu:
        torch.accelerator.empty_cache()
    if choice is not None:
        offload_optimizer(optimizer, model=model, policy=_policy(choice, training, params))
    clip = training.clip and (choice is None or choice.overlap != "iteration")
    iterate = functools.partial(_iterate, model, optimizer, tokens, training.micro_batches, clip=clip)
    iterate(_SETTLE_AUTO if choice is not None and choice.keeps == "auto" else _SETTLE)
    if not on_cpu:
        torch.accelerator.reset_peak_memory_stats(device)
    dist.barrier()
    iterate(1)
    ms = _timed_ms(iterate, iterations, device)
    report = optimizer.offload_report() if choice is not None else None  # type: ignore[attr-defined]
    found = {
        "ms": ms,
        "peak_bytes": 0 if on_cpu else torch.accelerator.max_memory_allocated(device),
        "reserved_bytes": 0 if on_cpu else torch.accelerator.max_memory_reserved(device),
        "host_bytes": report.host_bytes if report else 0,
        "resident_bytes": report.resident_state_bytes if report else 0,
        "stalled_ms": report.stalled_ms if report else 0.0,
    }
    if choice is not None:
        optimizer.synchronize()  # type: ignore[attr-defined]
        optimizer.state.clear()  # nothing that would have to go back to the device
        remove_offload(optimizer)
    return found


def _policy(choice: Choice, training: Training, params: list[nn.Parameter]) -> Any:
    state_bytes = sum(training.state_itemsizes()) * sum(param.numel() for param in params) // training.shards
    return dataclasses.replace(choice.policy(state_bytes), master_weights=training.master_weights)


def _iterate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    micro_batches: int,
    count: int,
    *,
    clip: bool,
) -> None:
    for _ in range(count):
        for _ in range(micro_batches):
            model(tokens).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()


def _timed_ms(iterate: Callable[[int], None], count: int, device: torch.device) -> float:
    """Of an iteration among others, from the end of a step to the end of another, as the model's stream sees it."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        iterate(count)
        return (time.perf_counter() - begin_s) / count * 1e3
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record()
    iterate(count)
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / count
