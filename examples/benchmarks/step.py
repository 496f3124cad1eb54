"""Measures how close a step, which streams Adam's state through the device, comes to the link's rate; no forward."""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadedOptimizer, OffloadPolicy, add_masters, offload_optimizer

from .link import Link
from .record import bench_device, cpu_ms, device_bytes_of, median, print_record, run, wall_ms

_MIB = 1 << 20


class Implementation(StrEnum):
    """Implementation of torch's AdamW."""

    FUSED = "fused"
    FOREACH = "foreach"


Masters = Literal["none", "fp32", "remainder"]
"""Kinds of ``add_masters``."""


class AdamKind(StrEnum):
    """Implementations of Adam: torch's AdamW, or Transformer Engine's ``FusedAdam``."""

    ADAMW = "adamw"
    TE = "te"


def measure(
    params: Annotated[int, typer.Option(help="Parameters in all.")] = 1_050_000_000,
    tensors: Annotated[int, typer.Option(help="Number of parameter tensors.")] = 200,
    equal: Annotated[bool, typer.Option(help="All tensors of one size, instead of a wide mix.")] = False,
    device_mib: Annotated[int | None, typer.Option(help="OffloadPolicy.device_bytes, in MiB, or auto.")] = None,
    bucket_mib: Annotated[int, typer.Option(help="OffloadPolicy.bucket_bytes, in MiB.")] = 64,
    implementation: Annotated[Implementation, typer.Option(help="AdamW's implementation.")] = Implementation.FUSED,
    masters: Annotated[
        Masters, typer.Option(help="Masters that are added; parameters and gradients are in bf16 then.")
    ] = "none",
    optimizer_kind: Annotated[
        AdamKind,
        typer.Option("--optimizer", help="torch's AdamW, or Transformer Engine's FusedAdam with masters of its own."),
    ] = AdamKind.ADAMW,
    sharded: Annotated[bool, typer.Option(help="DTensors of a one-rank mesh, as fully_shard makes them.")] = True,
    repeats: Annotated[int, typer.Option(help="Measured steps; medians are printed.")] = 9,
) -> None:
    """Measure the time of a step of Adam with fp32 moments and, interleaved with it, the two-way bandwidth."""
    make_optimizer = optimizer_maker(optimizer_kind, implementation, masters)
    device = bench_device()
    sizes = [(params // tensors,)] * tensors if equal else varied_sizes(params, tensors)
    own_masters = optimizer_kind is AdamKind.TE
    dtype = torch.bfloat16 if own_masters or masters != "none" else torch.float32
    make_model = partial(sharded_model if sharded else plain_model, sizes, device, dtype)
    policy = OffloadPolicy(device_bytes=device_bytes_of(device_mib), bucket_bytes=bucket_mib * _MIB)
    model = make_model()
    plain_ms = _plain_step_ms(make_optimizer(model.parameters()), device, repeats=repeats)
    torch.accelerator.reset_peak_memory_stats(device)
    before_bytes = torch.accelerator.memory_allocated(device)
    optimizer = make_optimizer(model.parameters())
    attach_ms = wall_ms(lambda: _attach(optimizer, model, policy), device, repeats=1, warmup=0)[0]
    first_ms = wall_ms(optimizer.step, device, repeats=1, warmup=0)[0]
    peak_bytes = torch.accelerator.max_memory_allocated(device) - before_bytes
    offloaded = cast(OffloadedOptimizer, optimizer)
    link = Link(device)
    single, queued, two_way = [], [], []
    for _ in range(repeats):  # interleave, as the link's rate drifts
        two_way.append(link.gb_per_s(64, load=True, store=True))
        single += wall_ms(optimizer.step, device, repeats=1)
        queued += [ms / 3 for ms in wall_ms(partial(_steps, optimizer, 3), device, repeats=1, warmup=0)]
    report = offloaded.offload_report()
    assert report.step is not None, "steps have been measured"
    moved = report.step.loaded_bytes + report.step.stored_bytes
    rate = median(two_way)
    print_record(
        "step",
        params=params,
        tensors=tensors,
        optimizer=optimizer_kind.value,
        implementation=implementation.value if optimizer_kind is AdamKind.ADAMW else None,
        dtype=str(dtype).removeprefix("torch."),
        masters="its own" if own_masters else masters,
        sharded=sharded,
        state_bytes=report.memory.host_state_bytes,
        state_bytes_per_param=report.memory.host_state_bytes / sum(torch.Size(size).numel() for size in sizes),
        host_bytes=report.memory.host_bytes,
        buckets=report.kept.moving_buckets,
        ring_bytes=report.memory.device_bytes,
        two_way_gb_per_s=rate,
        copy_ms=moved / rate / 1e6,
        step_ms=median(single),
        share_of_two_way=moved / median(single) / 1e6 / rate,
        host_ms=cpu_ms(optimizer.step, device, repeats=repeats),
        queued_step_ms=median(queued),
        queued_share_of_two_way=moved / median(queued) / 1e6 / rate,
        over_copy_ms=median(single) - moved / rate / 1e6,
        stalled_ms=None if report.iteration is None else report.iteration.stalled_ms,
        load_gb_per_s=report.step.load_gb_per_s,
        store_gb_per_s=report.step.store_gb_per_s,
        plain_step_ms=plain_ms,
        attach_ms=attach_ms,
        first_step_ms=first_ms,
        peak_over_model_bytes=peak_bytes,
    )
    _end()


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.step()


def _attach(optimizer: torch.optim.Optimizer, model: nn.Module, policy: OffloadPolicy) -> None:
    offload_optimizer(optimizer, model=model, policy=policy)


def optimizer_maker(
    kind: AdamKind, implementation: Implementation, masters: Masters
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes the optimizer.

    Raises:
        SystemExit: the options contradict each other, or Transformer Engine is not installed.
    """
    fused = implementation is Implementation.FUSED
    if kind is AdamKind.ADAMW:
        make = partial(torch.optim.AdamW, lr=1e-4, fused=fused, foreach=not fused)
        return make if masters == "none" else lambda params: add_masters(make(params), masters)
    if masters != "none":
        sys.exit("--optimizer te keeps masters of its own: leave out --masters.")
    return partial(_fused_adam(), lr=1e-4, master_weights=True)


def _fused_adam() -> Any:
    """Import ``FusedAdam``; torch, whose libraries it needs, is imported already."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except (ImportError, OSError) as error:
        sys.exit(f"--optimizer te needs Transformer Engine (pip install 'transformer-engine[pytorch]>=2.18'): {error}")
    return FusedAdam


def _plain_step_ms(optimizer: torch.optim.Optimizer, device: torch.device, *, repeats: int) -> float:
    """Measure the step of an optimizer without offload, whose state has to fit on the device."""
    return median(wall_ms(optimizer.step, device, repeats=repeats))


def varied_sizes(params: int, tensors: int) -> list[tuple[int, ...]]:
    """Return shapes with about ``params`` elements in all, as mixed as a transformer's, from norms to embeddings."""
    chooser = random.Random(0)
    weights = [chooser.choice((1, 2, 4, 8, 16, 64, 256, 512)) * chooser.uniform(0.7, 1.3) for _ in range(tensors)]
    scale = params / sum(weights)
    columns = 1024 if scale * min(weights) >= 1024 else 8
    return [(max(1, round(weight * scale / columns)), columns) for weight in weights]


def plain_model(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Make a model with parameters and gradients of the given shapes."""
    return _with_gradients(_of_parameters(shapes, device, dtype))


def sharded_model(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Make a model like :func:`plain_model`, but of DTensors on a mesh of one rank; start a process group if needed."""
    if not dist.is_initialized():
        _init_process_group(device)
    model = _of_parameters(shapes, device, dtype)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    return _with_gradients(model)


def _init_process_group(device: torch.device) -> None:
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device.type)}
    backend = ",".join(f"{kind}:{name}" for kind, name in backends.items())  # checkpoints communicate on the CPU
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _of_parameters(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    for number, shape in enumerate(shapes):
        model.register_parameter(f"weight{number}", nn.Parameter(torch.randn(shape, device=device, dtype=dtype)))
    return model


def _with_gradients(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def main(argv: Sequence[str]) -> None:
    """Measure with the options of ``argv``."""
    run(measure, argv)
