"""Measures how long a model and its optimizer take to leave the device (sleep, in RL), and to return (wake)."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

from fsdp_offload import OffloadPolicy, offload_model, offload_optimizer, reload_model

from .link import Link
from .record import bench_device, median, print_record, run, wall_ms
from .step import plain_model, sharded_model, varied_sizes

_BYTES_PER_PARAM = 12  # fp32 parameters and AdamW's two moments
_LINK_CHUNKS = 64


def measure(
    gigabytes: Annotated[float, typer.Option(help="10**9 bytes of parameters and state.")] = 20.0,
    tensors: Annotated[int, typer.Option(help="Number of parameter tensors.")] = 200,
    sharded: Annotated[bool, typer.Option(help="DTensors of a one-rank mesh, as fully_shard makes them.")] = True,
    repeats: Annotated[int, typer.Option(help="Sleeps and wakes; medians are printed.")] = 9,
) -> None:
    """Measure sleep and wake of parameters with state on the device, and with state that is on the host already.

    ``resident``: all state is on the device between steps, and moves with the parameters. ``home``: state is in host
    memory between steps, as with the default policy. Times are from an idle device to an idle device; the same run
    measures the link's one-way rates.
    """
    device = bench_device()
    params = int(gigabytes * 1e9) // _BYTES_PER_PARAM
    sizes = varied_sizes(params, tensors)
    model = sharded_model(sizes, device) if sharded else plain_model(sizes, device)
    link = Link(device)
    more_than_all_bytes = 2 * _BYTES_PER_PARAM * params + (1 << 30)
    policies = {"resident": OffloadPolicy(device_bytes=more_than_all_bytes), "home": OffloadPolicy()}
    for name, policy in policies.items():
        optimizer = _stepped_optimizer(model, policy)
        print_record(
            "sleep",
            state=name,
            params=params,
            tensors=tensors,
            sharded=sharded,
            **_figures(model, optimizer, link, device, repeats=repeats),
        )
        del optimizer
    if dist.is_initialized():
        dist.destroy_process_group()


def _stepped_optimizer(model: nn.Module, policy: OffloadPolicy) -> Any:
    """Return an offloaded optimizer that has state; parameters have no gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    offload_optimizer(optimizer, model=model, policy=policy)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _figures(model: nn.Module, optimizer: Any, link: Link, device: torch.device, *, repeats: int) -> dict[str, Any]:
    def sleep_optimizer() -> None:
        optimizer.offload_states()
        optimizer.release_states()

    def sleep() -> None:
        sleep_optimizer()
        offload_model(model)

    def wake() -> None:
        reload_model(model)
        optimizer.reload_states()

    resident_bytes = optimizer.offload_report().memory.kept_state_bytes
    first_ms = _ms(sleep, device)  # the first sleep also allocates and pins host memory
    wake()
    moved_bytes = resident_bytes + offload_model(model)
    reload_model(model)
    times: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {"store": [], "load": []}
    freed_bytes = 0
    for _ in range(repeats):  # interleave, as the link's rate drifts
        for direction, found in rates.items():
            found.append(link.gb_per_s(_LINK_CHUNKS, **{direction: True}))
        for emptied in ("", "_with_empty_cache"):
            before_bytes = torch.accelerator.memory_allocated(device)
            times.setdefault(f"sleep{emptied}", []).append(_ms(_emptying(sleep) if emptied else sleep, device))
            freed_bytes = before_bytes - torch.accelerator.memory_allocated(device)
            times.setdefault("already_home", []).append(_ms(sleep, device))
            times.setdefault(f"wake{emptied}", []).append(_ms(wake, device))
    # While the model is awake, time the optimizer's calls when no state has to move.
    sleep_optimizer()
    times["optimizer_already_home"] = [_ms(sleep_optimizer, device) for _ in range(repeats)]
    optimizer.reload_states()
    reload_model(model, free_host_memory=True)
    shares = {
        f"{name}_share_of_one_way": moved_bytes / median(times[name]) / 1e6 / median(rates[direction])
        for name, direction in (("sleep", "store"), ("wake", "load"))
    }
    return {
        "moved_bytes": moved_bytes,
        "freed_bytes": freed_bytes,  # staging included
        "store_gb_per_s": median(rates["store"]),
        "load_gb_per_s": median(rates["load"]),
        "first_sleep_ms": first_ms,
        **{f"{name}_ms": median(values) for name, values in times.items()},
        **shares,
    }


def _emptying(sleep: Callable[[], None]) -> Callable[[], None]:
    """Return a ``sleep`` that also returns free memory to the driver, which the next wake has to allocate again."""

    def sleep_and_empty() -> None:
        sleep()
        torch.accelerator.empty_cache()

    return sleep_and_empty


def _ms(work: Callable[[], None], device: torch.device) -> float:
    (ms,) = wall_ms(work, device, repeats=1, warmup=0)
    return ms


def main(argv: Sequence[str]) -> None:
    """Measure with the options of ``argv``."""
    run(measure, argv)
