"""Put together what each policy costs in memory and in time, and choose."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from torch import nn

from ..core.buckets import JOINED_BYTES, LARGEST_BYTES
from ..core.items import PASSING
from ..policy import MIB, OffloadPolicy, OverlapKind, as_policy, check_is
from .blocks import Blocks
from .machine import CONTEXT_BYTES, WORKSPACE_BYTES, Machine, machine_of
from .memory import Curve, DeviceMemory, Sizes, curve_of
from .model import Model, model_of
from .timing import Parts, estimate, parts_of
from .trace import Segment, Trace
from .training import DTYPES, Masters, Training

# Share of the peak that an allocator cannot use when nearly full. With room to spare it reserves more, and needs less:
# records of an H200 have 5 % with 78 % of the device in use, and up to 15 % with a third in use.
SLACK = 0.05
RESERVE = 0.05  # share of a device that "auto" leaves free: as fsdp_offload/device/lanes.py has it
MOST_OF_HOST = 0.8  # may be pinned: the rest is for the processes, the data and the page cache
SAME = 1.01  # estimates do not tell closer ones apart
MORE_RANKS = (1, 2, 4, 8)  # times as many, which are tried if nothing fits


@dataclass(frozen=True)
class Forecast:
    """Cost of one policy, in memory and in time."""

    policy: OffloadPolicy | None  # None is training without offload
    device: DeviceMemory
    needed_bytes: int  # what a device has to have: the peak, the driver's share, and what the allocator cannot use
    host_bytes: int  # pinned memory of one rank
    host_bytes_per_host: int
    resident_bytes: int  # state that stays on the device, with its parameters if they would live on the host
    iteration_ms: float
    tokens_per_s: float  # of all ranks
    limit: str  # what decides how long it takes: compute, gathers, the link, or launches of the host
    why_not: str  # what does not fit: "device: ..." or "host: ..."; empty if everything does
    lines: str  # what to write

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.policy is None:
            return "no offload"
        size = [] if self.policy.device_bytes == "auto" else [f"{self.policy.device_bytes // MIB} MiB"]
        return ", ".join([self.policy.overlap, *["parameters"] * self.policy.parameters, *size])

    @property
    def fits(self) -> bool:
        """Whether device and host have the memory."""
        return not self.why_not


@dataclass(frozen=True)
class Plan:
    """Costs of each policy for one training on one machine."""

    model: Model
    training: Training
    machine: Machine
    parts: Parts  # of an iteration
    forecasts: tuple[Forecast, ...]  # one for each policy, training without offload first
    trace: Trace = field(repr=False)

    def best(self, overlap: OverlapKind | None = None) -> Forecast | None:
        """Choose the fastest policy that fits; ``None`` if none does.

        Args:
            overlap: the most that the loop allows; else "forward" if gradients are clipped, as updates in the backward
                need a loop that clips by ``fsdp_offload.clip_grad_norm_``, and "iteration" if they are not.
        """
        fitting = [one for one in self._allowed(overlap) if one.fits]
        fastest_ms = min((one.iteration_ms for one in fitting), default=0.0)
        close = [one for one in fitting if one.iteration_ms <= SAME * fastest_ms]
        # With parameters on the host, the link has more to do that may come late.
        return min(
            close,
            key=lambda one: (one.policy is not None and 1 + one.policy.parameters, one.needed_bytes),
            default=None,
        )

    def passed_over(self, one: Forecast, overlap: OverlapKind | None = None) -> str:
        """Say why a row that is faster than the best, or does not fit, is not the best; empty if it is neither."""
        line = "[plan.passed_over(one, overlap) for one in plan.forecasts]"
        check_is(one, Forecast, "passed_over: expected one of the plan's forecasts first", line)
        best = self.best(overlap)
        if not one.fits:
            return one.why_not
        if best is not None and one.iteration_ms >= best.iteration_ms:
            return ""
        if one in self._allowed(overlap):
            return "close: the best is as fast within 1 %, and simpler or in less memory"
        if overlap is None:
            return "clip: the loop has to clip by fsdp_offload.clip_grad_norm_; then --overlap iteration allows it"
        return f"loop: --overlap {overlap} does not allow it"

    def what_would_fit(self, overlap: OverlapKind | None = None) -> str:
        """Name the policy that needs least and the memory that it needs, and options with which something fits."""
        least = min(self._allowed(overlap), key=lambda one: one.needed_bytes)
        asked, machine, host_gb = self.training, self.machine, least.host_bytes_per_host / MOST_OF_HOST / 1e9
        found = []
        for checkpointing in dict.fromkeys((asked.checkpointing, "full")):
            trace = self.trace if checkpointing == asked.checkpointing else None
            for times in MORE_RANKS:
                ranks, tokens = times * asked.ranks, times * asked.tokens_per_step
                changes = asdict(asked) | {"checkpointing": checkpointing, "ranks": ranks, "tokens_per_step": tokens}
                made = plan(self.model, machine=machine, trace=trace, **changes)
                trace = made.trace  # of one rank, which has as much to do beside more of them
                if best := made.best(overlap):
                    options = [f"--checkpointing {checkpointing}"] * (checkpointing != asked.checkpointing)
                    options += [f"--ranks {ranks} --tokens-per-step {tokens}"] * (times > 1)
                    found.append(f"{best.name} with {' '.join(options)}")
                    break
        most = f"{MORE_RANKS[-1]} times the ranks with --checkpointing full"
        fits = f"What fits: {'; '.join(found)}." if found else f"{most} are not enough: fewer tokens or more ranks are."
        return (
            f"{least.name} would, with {least.needed_bytes / 1e9:.1f} GB of each device ({machine.memory_gb:.1f} GB "
            f"here) and {host_gb:.0f} GB of each host ({machine.host_gb:.0f} GB here). {fits}"
        )

    def _allowed(self, overlap: OverlapKind | None) -> list[Forecast]:
        order = get_args(OverlapKind)
        if overlap is not None and overlap not in order:
            raise ValueError(f"overlap must be one of {', '.join(map(repr, order))}, got {overlap!r:.60}")
        allowed = order[: 1 + order.index(overlap or ("forward" if self.training.clip else "iteration"))]
        return [one for one in self.forecasts if one.policy is None or one.policy.overlap in allowed]

    def as_dict(self, overlap: OverlapKind | None = None) -> dict[str, Any]:
        """Plain values, for JSON."""
        best = self.best(overlap)
        names = {"model": self.model.name, "parameters": self.model.numel, "best": best and best.name}
        settings = {name: asdict(getattr(self, name)) for name in ("training", "machine", "parts")}
        policies = [
            {"name": one.name, "peak_bytes": one.device.peak_bytes, "passed_over": self.passed_over(one, overlap)}
            | asdict(one)
            for one in self.forecasts
        ]
        return {**names, **settings, "policies": policies}


def plan(
    model: Model | nn.Module | str | Path,
    *,
    tokens_per_step: int,
    machine: Machine | str | Path = "H200",
    device_gb: float | None = None,
    link_gb_per_s: float | None = None,
    trace: Trace | None = None,
    policies: Sequence[OffloadPolicy] | None = None,
    **training: Any,
) -> Plan:
    """Say what training will cost in memory and time, before it runs.

    Args:
        model: a module, a config, or a name; see :func:`model_of`.
        tokens_per_step: of all ranks together.
        machine: a built-in name or a TOML file; see :func:`machine_of`.
        device_gb: of a device that may be used, if not all of it.
        link_gb_per_s: what pinned copies reach one way on your host, if it is not what the machine says.
        trace: of this model and batch, if there is one already.
        policies: to compare with no offload; ``None``: :func:`candidates`.
        training: the other fields of :class:`Training`.
    """
    line = "plan(model, tokens_per_step=..., policies=[OffloadPolicy()])"
    for one in trace if isinstance(trace, list | tuple) else (trace,):
        check_is(one, Segment | None, "plan: trace must be one of Model.trace()", line)
    check_is(policies, list | tuple | None, "plan: policies must be a list of OffloadPolicy", line)
    policies = None if policies is None else [as_policy(one) for one in policies]
    changes: dict[str, Any] = {"memory_gb": device_gb, "link_gb_per_s": link_gb_per_s}
    numbers = [one for one in changes.values() if one is not None]
    if not all(isinstance(one, int | float) and one is not True and 0 < one < math.inf for one in numbers):
        raise ValueError(
            f"device_gb and link_gb_per_s must be positive and finite, got {device_gb!r} and {link_gb_per_s!r}"
        )
    there = replace(machine_of(machine), **{name: value for name, value in changes.items() if value is not None})
    wanted, of = Training(tokens_per_step=tokens_per_step, **training), model_of(model)
    if trace is None:
        dtype = DTYPES[wanted.compute_dtype]
        trace = of.trace(wanted.sequences, wanted.sequence_length, dtype, wanted.checkpointing)
    sizes = Sizes.of(of.shapes(), wanted)
    parts = parts_of(sizes, trace, wanted, there)
    if policies is None:
        policies = candidates(sizes.state, sorted(sizes.params)[len(sizes.params) // 2])
    forecasts = tuple(_forecast(policy, sizes, trace, parts, wanted, there) for policy in (None, *policies))
    return Plan(of, wanted, there, parts, forecasts, trace)


def _forecast(
    policy: OffloadPolicy | None, sizes: Sizes, trace: Trace, parts: Parts, training: Training, machine: Machine
) -> Forecast:
    curve, constant = curve_of(sizes, trace, training), {"workspace": WORKSPACE_BYTES}
    constant |= {"other": training.other_device_bytes, "parameters": sum(sizes.params)}
    if policy is None:
        blocks, found = None, estimate(None, parts, curve)
        device = curve.with_blocks({**constant, "optimizer state": sizes.state})
    else:
        blocks, room_bytes = Blocks(policy, sizes), int((1 - RESERVE) * machine.device_bytes) - CONTEXT_BYTES
        constant["parameters"] *= not policy.parameters

        def memory(curve: Curve) -> DeviceMemory:
            return curve.with_blocks({**constant, "blocks": blocks.nbytes - blocks.leaving_bytes}, blocks.leaving_bytes)

        # In the first steps, in which no update runs in the backward, all gradients are there, unless they do not fit.
        # Clipping may change gradients, and those of all but one micro-batch are alive until the last backward.
        first, frees = memory(curve), policy.parameters and policy.updates_in_backward
        if frees and not training.clip and training.micro_batches == 1:
            curve = curve_of(sizes, trace, training, frees=True)
        blocks.learn(lambda: estimate(blocks, parts, curve).reading, lambda: room_bytes - memory(curve).peak_bytes)
        device, found = memory(curve), estimate(blocks, parts, curve)
        device = first if device.peak_bytes < first.peak_bytes <= room_bytes else device
    host_bytes = 0 if blocks is None else blocks.host_bytes
    if policy is not None and policy.updates_in_backward and training.clip:
        host_bytes += sizes.state + sum(sizes.params)  # of before the updates, which the norm may take back
    per_host = host_bytes * min(training.ranks, machine.devices_per_host)
    needed_bytes, why_not = int(device.peak_bytes * (1 + SLACK)) + CONTEXT_BYTES, ""
    if needed_bytes > machine.device_bytes:
        why_not = f"device: {(needed_bytes - machine.device_bytes) / 1e9:.1f} GB too little"
    elif per_host > MOST_OF_HOST * machine.host_gb * 1e9:
        why_not = f"host: {per_host / 1e9:.0f} GB of {machine.host_gb:.0f} GB would be pinned"
    return Forecast(
        policy=policy,
        device=device,
        needed_bytes=needed_bytes,
        host_bytes=host_bytes,
        host_bytes_per_host=per_host,
        resident_bytes=sizes.state if blocks is None else blocks.kept_state + blocks.kept_params,
        iteration_ms=found.reading.iteration_ms,
        tokens_per_s=training.tokens_per_step / found.reading.iteration_ms * 1e3,
        limit=found.limit,
        why_not=why_not,
        lines=lines_to_write(policy, training.masters),
    )


def candidates(state_bytes: int, group_bytes: int = 0) -> tuple[OffloadPolicy, ...]:
    """List the policies to compare for so much state, and for so many bytes of parameters in a usual group.

    Each with the least ``device_bytes`` that moves state in few operations, and with "auto".
    """
    for name, value in dict[str, Any](state_bytes=state_bytes, group_bytes=group_bytes).items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"candidates: {name} must be 0 or more bytes, got {value!r}")
    bucket_bytes = min(LARGEST_BYTES, max(JOINED_BYTES, state_bytes // 64 // MIB * MIB))
    state, both = ((PASSING + 1) * nbytes for nbytes in (bucket_bytes, bucket_bytes + -(-group_bytes // MIB) * MIB))
    return (
        OffloadPolicy(),
        OffloadPolicy(overlap="forward", device_bytes=state),
        OffloadPolicy(overlap="forward"),
        OffloadPolicy(overlap="iteration", device_bytes=state),
        OffloadPolicy(overlap="iteration"),
        OffloadPolicy(parameters=True, device_bytes=both),
        OffloadPolicy(parameters=True),
        OffloadPolicy(parameters=True, overlap="iteration", device_bytes=both),
        OffloadPolicy(parameters=True, overlap="iteration"),
    )


def lines_to_write(policy: OffloadPolicy | None, masters: Masters = "none") -> str:
    """The code of a policy; no offload needs none, unless masters are wanted."""
    lines = [] if masters == "none" else [f'add_masters(optimizer, "{masters}")']
    if policy is not None:
        texts = []
        for name, value in ((one.name, getattr(policy, one.name)) for one in fields(policy)):
            in_mib = name.endswith("bytes") and isinstance(value, int) and value % MIB == 0
            text = f"{value // MIB} << 20" if in_mib else json.dumps(value) if isinstance(value, str) else str(value)
            if value != getattr(OffloadPolicy, name):
                texts.append(f"{name}={text}")
        said = f", policy=OffloadPolicy({', '.join(texts)})" if texts else ""
        lines.append(f"offload_optimizer(optimizer, model=model{said})")
    return "\n".join(lines)
