"""``bench step --host-fraction``: a step with a share of the state updated on the CPU, beside all of it on either side.

One line for each way to step: streamed through the device, updated on the CPU, divided between them; torch's fused CPU
kernel alone, on all cores and on tensors that are on the host already; the same while as many bytes as gradients have
come down and as many as parameters have go up, which share the host's memory with it; and ``CPUOffloadPolicy`` with
that kernel, whose gradients and parameters travel in the backward and the forward instead. All of them are there at
once and take turns, as the CPU's rate drifts; the last lines compare them round by round. On the host that takes about
65 bytes a parameter, and about 10 for each share beyond the first.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import Optimizer

from .. import OffloadedOptimizer, OffloadPolicy, offload_optimizer
from ..device.arena import Region
from ..device.link import DeviceLink, device_link
from .record import median, print_record, wall_ms

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_WARMUP = 2
_CHUNK_BYTES = 32 << 20
_COPIES = 16


@dataclass(eq=False)
class _Way:
    """One way to step.

    Attributes:
        params: how many its model has.
        figures: of the last step, which are printed as medians.
        more: what else its record has, once all rounds are over.
        times: milliseconds of each round.
    """

    name: str
    params: int
    step: Callable[[], None]
    figures: Callable[[], dict[str, float]] = dict
    more: Callable[[], dict[str, Any]] = dict
    times: list[float] = field(default_factory=list)
    seen: list[dict[str, float]] = field(default_factory=list)

    def measure(self, device: torch.device) -> None:
        """One step."""
        self.times += wall_ms(self.step, device, repeats=1, warmup=0)
        self.seen.append(self.figures())

    def print(self) -> None:
        """Its record."""
        figures = {name: median([seen[name] for seen in self.seen]) for name in self.seen[0]}
        step_ms = median(self.times)
        rate = self.params / step_ms / 1e6
        print_record("step_host", way=self.name, step_ms=step_ms, gparams_per_s=rate, **figures, **self.more())


def compare_host_fractions(
    chosen: Sequence[float],
    make_model: Callable[[], nn.Module],
    shapes: Sequence[tuple[int, ...]],
    make_optimizer: MakeOptimizer,
    policy: OffloadPolicy,
    device: torch.device,
    *,
    repeats: int,
) -> None:
    """Print a record for each way to step, and some that compare them.

    Args:
        chosen: the shares in question; 0 and 1 are measured beside them.
        make_model: on the device, with gradients. Called for each share.
        shapes: of its parameters, for those ways that have them on the host.
        make_optimizer: with a fused CPU kernel.
        policy: everything but the share.
        device: of the model.
        repeats: rounds; each has one measured step of every way.
    """
    shares = {
        share: _offloaded(share, make_model(), make_optimizer, policy) for share in dict.fromkeys((0.0, 1.0, *chosen))
    }
    alone, beside = _kernel_alone(shapes, make_optimizer, device)
    ways = [*shares.values(), alone, beside, _cpu_offload_policy(shapes, make_optimizer, device)]
    for way in ways:
        wall_ms(way.step, device, repeats=0, warmup=_WARMUP)
    for _ in range(repeats):
        for way in ways:
            way.measure(device)
    for way in ways:
        way.print()
    print_record(
        "step_host_ratios",
        kernel_alone_over_host=_ratio(alone.times, shares[1.0].times),
        kernel_beside_copies_over_host=_ratio(beside.times, shares[1.0].times),
        kernel_alone_over_beside_copies=_ratio(alone.times, beside.times),
    )
    best = [min(pair) for pair in zip(shares[0.0].times, shares[1.0].times, strict=True)]
    for share in chosen:
        print_record(
            "step_host_share",
            host_fraction=share,
            best_of_both_over_share=_ratio(best, shares[share].times),
            device_over_share=_ratio(shares[0.0].times, shares[share].times),
            host_over_share=_ratio(shares[1.0].times, shares[share].times),
        )


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median over the rounds."""
    return median([one / other for one, other in zip(of, to, strict=True)])


def _offloaded(share: float, model: nn.Module, make_optimizer: MakeOptimizer, policy: OffloadPolicy) -> _Way:
    optimizer = make_optimizer(model.parameters())
    offload_optimizer(optimizer, model=model, policy=replace(policy, host_fraction=share))
    offloaded = cast(OffloadedOptimizer, optimizer)

    def figures() -> dict[str, float]:
        report = offloaded.offload_report()
        return {
            "host_update_ms": report.host_update_ms,
            "host_update_gb_per_s": report.host_update_gb_per_s,
            "host_waited_ms": report.host_waited_ms,
            "host_arrival_ms": report.host_arrival_ms,
            "host_span_ms": report.host_span_ms,
            "device_step_ms": report.step_ms,
            "device_update_ms": report.update_ms,
            "device_exposed_ms": report.exposed_ms,
        }

    def more() -> dict[str, Any]:
        report = offloaded.offload_report()
        return {
            "host_share": report.host_updated_bytes / max(1, report.host_state_bytes),
            "host_weights_down_bytes": report.host_weights_down_bytes,
            "host_buffer_bytes": report.host_buffer_bytes,
            "host_bytes": report.host_bytes,
            "chosen": "; ".join(report.tuning),
        }

    return _Way(f"host_fraction={share}", _numel(model), cast(Callable[[], None], optimizer.step), figures, more)


class _Copies:
    """Chunks on the host, more than the caches keep, and one for each direction on the device."""

    def __init__(self, link: DeviceLink, *, pin: bool) -> None:
        self._lanes = link.host_lanes(serial=False)
        nbytes = _COPIES * _CHUNK_BYTES
        self._on_host = [Region(nbytes, device=link.device, pin=pin).bytes.split(_CHUNK_BYTES) for _ in range(2)]
        self._on_device = [torch.zeros(_CHUNK_BYTES, dtype=torch.uint8, device=link.device) for _ in range(2)]

    def issue(self, nbytes: int) -> None:
        """About ``nbytes`` each way, in whole chunks; nobody waits for them."""
        for number in range(-(-nbytes // _CHUNK_BYTES)):
            self._lanes[0].copy(self._on_host[0][number % _COPIES], self._on_device[0])
            self._lanes[1].copy(self._on_device[1], self._on_host[1][number % _COPIES])


def _kernel_alone(
    shapes: Sequence[tuple[int, ...]], make_optimizer: MakeOptimizer, device: torch.device
) -> tuple[_Way, _Way]:
    """And beside the copies that an update on the host needs."""
    model = _on_host(shapes)
    alone = _on_all_cores("torch's CPU kernel alone", model, make_optimizer(model.parameters()))
    copies, nbytes = _Copies(device_link(device), pin=device.type != "cpu"), sum(p.nbytes for p in model.parameters())

    def step() -> None:
        copies.issue(nbytes)  # gradients and parameters
        alone.step()

    return alone, replace(alone, name="torch's CPU kernel beside the same copies", step=step, times=[], seen=[])


def _cpu_offload_policy(shapes: Sequence[tuple[int, ...]], make_optimizer: MakeOptimizer, device: torch.device) -> _Way:
    model = _on_host(shapes, gradients=False)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)), offload_policy=CPUOffloadPolicy())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return _on_all_cores("CPUOffloadPolicy, its step only", model, make_optimizer(model.parameters()))


def _on_all_cores(name: str, model: nn.Module, optimizer: Optimizer) -> _Way:
    threads = len(os.sched_getaffinity(0))

    def step() -> None:
        with _threads(threads):
            optimizer.step()

    return _Way(name, _numel(model), step, more=lambda: {"threads": threads})


@contextmanager
def _threads(count: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(usual)


def _on_host(shapes: Sequence[tuple[int, ...]], *, gradients: bool = True) -> nn.Module:
    model = nn.Module()
    for number, shape in enumerate(shapes):
        param = nn.Parameter(torch.randn(shape, device="cpu"))
        param.grad = torch.randn_like(param) if gradients else None
        model.register_parameter(f"weight{number}", param)
    return model


def _numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())
