"""``bench step --host-fraction``: a step with a share of the state updated on the CPU, beside all of it on either side.

One line for each way to step: streamed through the device, updated on the CPU, divided between them; torch's fused CPU
kernel alone, on all cores and on tensors that are on the host already; and ``CPUOffloadPolicy`` with that kernel, whose
gradients and parameters travel in the backward and the forward instead.
"""

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import Optimizer

from .. import OffloadedOptimizer, OffloadPolicy, offload_optimizer
from .record import median, print_record, wall_ms

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def host_fraction_of(text: str) -> float | str:
    """The option's value: a number, or ``"auto"``."""
    return text if text == "auto" else float(text)


def compare_host_fractions(
    chosen: float | str,
    make_model: Callable[[], nn.Module],
    shapes: Sequence[tuple[int, ...]],
    make_optimizer: MakeOptimizer,
    policy: OffloadPolicy,
    device: torch.device,
    *,
    repeats: int,
) -> None:
    """Print a record for each way to step.

    Args:
        chosen: the share in question; 0 and 1 are measured beside it.
        make_model: on the device, with gradients. Called once for each way, one after the other.
        shapes: of its parameters, for those ways that have them on the host.
        make_optimizer: with a fused CPU kernel.
        policy: everything but the share.
        device: of the model.
        repeats: measured steps of each.
    """
    for fraction in dict.fromkeys((0.0, 1.0, chosen)):
        _offloaded(fraction, make_model(), make_optimizer, policy, device, repeats)
        _free()
    _kernel_alone(shapes, make_optimizer, device, repeats)
    _free()
    _cpu_offload_policy(shapes, make_optimizer, device, repeats)


def _offloaded(
    fraction: float | str,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    policy: OffloadPolicy,
    device: torch.device,
    repeats: int,
) -> None:
    optimizer = make_optimizer(model.parameters())
    offload_optimizer(optimizer, model=model, policy=replace(policy, host_fraction=fraction))  # type: ignore[arg-type]
    times = wall_ms(cast(Callable[[], None], optimizer.step), device, repeats=repeats, warmup=2)
    report = cast(OffloadedOptimizer, optimizer).offload_report()
    _record(
        f"host_fraction={fraction}",
        times,
        model,
        host_share=report.host_updated_bytes / max(1, report.host_state_bytes),
        host_update_ms=report.host_update_ms,
        host_update_gb_per_s=report.host_update_gb_per_s,
        host_waited_ms=report.host_waited_ms,
        host_buffer_bytes=report.host_buffer_bytes,
        chosen="; ".join(report.tuning),
    )


def _kernel_alone(
    shapes: Sequence[tuple[int, ...]], make_optimizer: MakeOptimizer, device: torch.device, repeats: int
) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = _on_host(shapes)
    optimizer = make_optimizer(model.parameters())
    times = wall_ms(cast(Callable[[], None], optimizer.step), device, repeats=repeats, warmup=2)
    torch.set_num_threads(usual)
    _record("torch's CPU kernel alone", times, model, threads=len(os.sched_getaffinity(0)))


def _cpu_offload_policy(
    shapes: Sequence[tuple[int, ...]], make_optimizer: MakeOptimizer, device: torch.device, repeats: int
) -> None:
    usual = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = _on_host(shapes, gradients=False)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)), offload_policy=CPUOffloadPolicy())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer = make_optimizer(model.parameters())
    times = wall_ms(cast(Callable[[], None], optimizer.step), device, repeats=repeats, warmup=2)
    torch.set_num_threads(usual)
    _record("CPUOffloadPolicy, its step only", times, model, threads=len(os.sched_getaffinity(0)))


def _on_host(shapes: Sequence[tuple[int, ...]], *, gradients: bool = True) -> nn.Module:
    model = nn.Module()
    for number, shape in enumerate(shapes):
        param = nn.Parameter(torch.randn(shape, device="cpu"))
        param.grad = torch.randn_like(param) if gradients else None
        model.register_parameter(f"weight{number}", param)
    return model


def _record(way: str, times: list[float], model: nn.Module, **more: Any) -> None:
    params = sum(param.numel() for param in model.parameters())
    step_ms = median(times)
    print_record("step_host", way=way, step_ms=step_ms, gparams_per_s=params / step_ms / 1e6, **more)


def _free() -> None:
    gc.collect()
    torch.accelerator.empty_cache()
