"""Forecast the memory and time of each policy, and choose one."""

import functools
import json
import math
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from ..core.buckets import JOINED_BYTES, LARGEST_BYTES
from ..core.items import PASSING
from ..policy import MIB, OffloadPolicy, OverlapKind, as_policy, check_is
from .blocks import Blocks
from .machine import CONTEXT_BYTES, WORKSPACE_BYTES, Machine, machine_of
from .memory import Curve, DeviceMemory, Sizes, curve_of
from .model import Model, model_of
from .timing import Parts, estimate, parts_of
from .trace import Trace, blocks_of, joined
from .training import DTYPES, Masters, Training

# Share of the peak that an allocator cannot use. On 150 GB, a Llama with a peak of 131.1 GB ran as fast as its kernels,
# and reserved 147.7 GB; one with 137.3 GB took 9 % longer, as its allocator freed memory and allocated it again.
SLACK = 0.12
RESERVE = 0.05  # share of a device that "auto" leaves free, as in fsdp_offload/device/lanes.py
MOST_OF_HOST = 0.8  # share that may be pinned: the rest is for processes, data and the page cache
SAME = 1.01  # ratio of times below which estimates cannot tell two policies apart
MORE_RANKS = (2, 4, 8)  # multiples of the ranks to try if nothing fits
RECOMPUTING = Path(__file__).with_name("recomputing.txt").read_text(encoding="utf-8")

Recomputed = Literal["auto", "none", "full"] | int


@dataclass(frozen=True)
class Forecast:
    """Cost of one policy, in memory and in time."""

    policy: OffloadPolicy | None  # None is training without offload
    micro_batches: int
    recomputed: int  # number of blocks, the first ones of the model
    device: DeviceMemory
    needed_bytes: int  # of a device: the peak, the driver's share, and what the allocator cannot use
    host_bytes: int  # pinned memory of one rank
    host_bytes_per_host: int
    resident_bytes: int  # state that stays on the device, and parameters that stay there though they have homes
    iteration_ms: float
    tokens_per_s: float  # of all ranks
    hiding_tokens: tuple[int, int]  # of one rank's micro-batch, to hide copies of all state; of parameters as well
    limit: str  # the bottleneck: compute, gathers, the link, or launches of the host
    why_not: str  # the memory that is too small: "device: ..." or "host: ..."; empty if the policy fits
    lines: str  # the code to write for the policy

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.policy is None:
            return "no offload"
        size = [] if self.policy.device_bytes == "auto" else [f"{self.policy.device_bytes // MIB} MiB"]
        return ", ".join([self.policy.overlap, *["parameters"] * self.policy.parameters, *size])

    @property
    def fits(self) -> bool:
        """Tell whether device and host have the memory."""
        return not self.why_not

    @property
    def fits_device(self) -> bool:
        """Tell whether the device has the memory."""
        return not self.why_not.startswith("device")


@dataclass(frozen=True)
class Plan:
    """Costs of each policy for one training on one machine."""

    model: Model
    training: Training  # with the smallest number of micro-batches that was tried
    machine: Machine
    blocks: int  # that may be recomputed
    parts: Parts  # of an iteration without offload
    ideal_ms: float  # of an iteration without offload or recomputation, even if it does not fit
    forecasts: tuple[Forecast, ...]  # one for each policy, training without offload first
    asked: dict[str, Any] = field(repr=False)  # arguments of :func:`plan`

    def best(self, overlap: OverlapKind | None = None) -> Forecast | None:
        """Choose the fastest policy that fits, with at most the ``overlap`` that the loop allows.

        ``None`` allows "forward" if gradients are clipped, since updates in the backward need a loop that clips by
        ``fsdp_offload.clip_grad_norm_``, and otherwise "iteration".
        """
        fitting = [one for one in self._allowed(overlap) if one.fits]
        fastest_ms = min((one.iteration_ms for one in fitting), default=0.0)
        close = [one for one in fitting if one.iteration_ms <= SAME * fastest_ms]
        # Of close ones the simplest: parameters on the host add transfers, which may be late; "auto" needs no number.

        def simplicity(one: Forecast) -> tuple[int, bool, int]:
            policy = one.policy or OffloadPolicy()
            return (one.policy is not None) + policy.parameters, policy.device_bytes != "auto", one.needed_bytes

        return min(close, key=simplicity, default=None)

    def passed_over(self, one: Forecast, overlap: OverlapKind | None = None) -> str:
        """Say why a row is not the best although it is faster, or why it does not fit; empty for other rows."""
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

    def offload(self, overlap: OverlapKind | None = None) -> Forecast | None:
        """Choose the best policy with offload that fits; if training without offload is best, the fastest."""
        best, others = self.best(overlap), [one for one in self._allowed(overlap) if one.policy and one.fits]
        return best if best and best.policy else min(others, key=lambda one: one.iteration_ms, default=None)

    def verdict(self, overlap: OverlapKind | None = None) -> str:
        """Compare the best run with offload with the best one without."""
        plain, offload = self.forecasts[0], self.offload(overlap)
        if offload is None:
            return "Plain training is best: no offload fits." if plain.fits else "Nothing fits."
        if not plain.fits:
            return f"Plain training does not fit, with {self.changes(plain)}: {plain.why_not.partition(': ')[2]}."
        ratio = plain.iteration_ms / offload.iteration_ms
        given = {"--micro-batches": self.asked["micro_batches"], "--checkpointing": self.asked["checkpointing"]}
        words = " and ".join(f"{name} {value}" for name, value in given.items() if value not in (None, "auto"))
        words = words and f" (both with {words})"
        if ratio > SAME:
            return f"Offload is {100 * (ratio - 1):.0f} % faster than the best plain run{words}."
        if ratio * SAME < 1:
            return f"Plain training is best: offload takes {100 * (1 / ratio - 1):.0f} % more{words}."
        return f"Plain training and offload are level, within 1 %{words}."

    def changes(self, one: Forecast) -> str:
        """Describe the recomputed blocks and micro-batches of a row."""
        blocks = {0: "nothing", self.blocks: f"all {self.blocks} blocks"}
        recomputed = blocks.get(one.recomputed, f"{one.recomputed} of {self.blocks} blocks")
        return f"{recomputed} recomputed and {one.micro_batches} micro-batch{'es' * (one.micro_batches > 1)}"

    def lines_to_recompute(self, overlap: OverlapKind | None = None) -> str:
        """Write the code that recomputes blocks in the rows that are shown; empty if none does."""
        rows = [one for one in (self.best(overlap), self.forecasts[0], self.offload(overlap)) if one and one.fits]
        others = [f"  # {one.recomputed} with {one.name}" for one in rows if one.recomputed != rows[0].recomputed]
        is_any = any(one.recomputed for one in rows)
        return f"recomputed = {rows[0].recomputed}{''.join(others)}\n{RECOMPUTING.rstrip()}" if is_any else ""

    def what_would_fit(self, overlap: OverlapKind | None = None) -> str:
        """Name the memory that would be enough, and the cheapest change of the training that makes a policy fit."""
        least = min(self._allowed(overlap), key=lambda one: one.needed_bytes)
        host_gb = least.host_bytes_per_host / MOST_OF_HOST / 1e9
        device_gb, here = least.needed_bytes / 1e9, self.machine
        found = f"{least.name} would, with {device_gb:.1f} GB of each device ({here.memory_gb:.1f} GB here) and "
        found += f"{host_gb:.0f} GB of each host ({here.host_gb:.0f} GB here). "
        # Changes of the arguments, the cheapest first: each alone, then together, then more ranks.
        alone: list[dict[str, Any]] = [{"micro_batches": None}] * (self.asked["micro_batches"] is not None)
        alone += [{"clip": False}] * self.training.clip
        alone += [{"checkpointing": "auto"}] * (self.asked["checkpointing"] not in ("auto", "full"))
        together = [dict(ChainMap(*alone[:count])) for count in range(2, 1 + len(alone))]
        ranks, tokens, both = self.training.ranks, self.training.tokens_per_step, ([], alone)[: 1 + bool(alone)]
        more = [{"ranks": times * ranks, "tokens_per_step": times * tokens} for times in MORE_RANKS]
        several = [dict(ChainMap(one, *also)) for one in more for also in both]
        same, others = ([one for one in alone if ("clip" in one) == clips] for clips in (False, True))
        for tier in (same, *([one] for one in (*others, *together, *several))):  # all of ``same`` train the same
            plans = [(plan(self.model, **{**self.asked, "machine": self.machine, **one}), one) for one in tier]
            fitting = [(best, made, one) for made, one in plans if (best := made.best(overlap))]
            if fitting:
                best, made, changes = min(fitting, key=lambda each: each[0].iteration_ms)
                words = {"micro_batches": f"micro-batches {best.micro_batches}", "clip": "no-clip"}
                words |= {"checkpointing": f"checkpointing {best.recomputed}", "ranks": f"ranks {made.training.ranks}"}
                words["tokens_per_step"] = f"tokens-per-step {made.training.tokens_per_step}"
                options = " ".join(f"--{text}" for name, text in words.items() if name in changes)
                excess = f"{best.iteration_ms:,.0f} ms, {100 * (best.iteration_ms / self.ideal_ms - 1):.0f} % more than"
                price = f"{best.name}, {made.changes(best)}: {excess} plain training with memory for all"
                return f"{found}What fits: {options} ({price})."
        return f"{found}{MORE_RANKS[-1]} times the ranks are not enough: try shorter sequences (--sequence-length)."

    def _allowed(self, overlap: OverlapKind | None) -> list[Forecast]:
        order = get_args(OverlapKind)
        if overlap is not None and overlap not in order:
            raise ValueError(f"overlap must be one of {', '.join(map(repr, order))}, got {overlap!r:.60}")
        allowed = order[: 1 + order.index(overlap or ("forward" if self.training.clip else "iteration"))]
        return [one for one in self.forecasts if one.policy is None or one.policy.overlap in allowed]

    def as_dict(self, overlap: OverlapKind | None = None) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        best, policies = self.best(overlap), []
        names = {"model": self.model.name, "parameters": self.model.numel, "best": best and best.name}
        names |= {"verdict": self.verdict(overlap), "blocks": self.blocks, "ideal_ms": self.ideal_ms}
        names["what_would_fit"] = "" if best else self.what_would_fit(overlap)
        for one in self.forecasts:
            names_of = {"name": one.name, "passed_over": self.passed_over(one, overlap)}
            policies.append(names_of | {"peak_bytes": one.device.peak_bytes} | asdict(one))
        settings = {name: asdict(getattr(self, name)) for name in ("training", "machine", "parts")}
        return {**names, **settings, "policies": policies}


def plan(
    model: Model | nn.Module | str | Path,
    *,
    tokens_per_step: int,
    machine: Machine | str | Path | None = None,
    device_gb: float | None = None,
    link_gb_per_s: float | None = None,
    micro_batches: int | None = None,
    checkpointing: Recomputed = "auto",
    policies: Sequence[OffloadPolicy] | None = None,
    **training: Any,
) -> Plan:
    """Predict the memory and time of a training under each policy.

    Args:
        model: see :func:`model_of`.
        tokens_per_step: of all ranks together.
        machine: see :func:`machine_of`.
        device_gb: memory of a device that may be used, if not all of it.
        link_gb_per_s: rate of pinned copies, one way, on your host, if it differs from the machine's.
        micro_batches: backwards before one step; ``None``: the fastest number.
        checkpointing: number of recomputed blocks, the first ones, or ``"none"`` or ``"full"``; ``"auto"``: the best.
        policies: policies to compare with no offload; ``None``: :func:`candidates`.
        training: the other fields of :class:`Training`.
    """
    line = "plan(model, tokens_per_step=..., policies=[OffloadPolicy()])"
    check_is(policies, list | tuple | None, "plan: policies must be a list of OffloadPolicy", line)
    policies = None if policies is None else [as_policy(one) for one in policies]
    changes: dict[str, Any] = {"memory_gb": device_gb, "link_gb_per_s": link_gb_per_s}
    for name, value in dict[str, Any](device_gb=device_gb, link_gb_per_s=link_gb_per_s).items():
        if not (value is None or (isinstance(value, int | float) and value is not True and 0 < value < math.inf)):
            raise ValueError(f"{name} must be positive and finite, got {value!r:.60}")
    is_count = isinstance(checkpointing, int) and not isinstance(checkpointing, bool) and checkpointing >= 0
    if not is_count and checkpointing not in ("auto", "none", "full"):
        raise ValueError(f"checkpointing must be auto, none, full or a number of blocks; got {checkpointing!r:.60}")
    asked = training | dict[str, Any](
        policies=policies, tokens_per_step=tokens_per_step, micro_batches=micro_batches, checkpointing=checkpointing
    )
    count = 1 if micro_batches is None else micro_batches
    wanted, of = Training(tokens_per_step=tokens_per_step, micro_batches=count, **training), model_of(model)
    there = replace(machine_of(machine), **{name: value for name, value in changes.items() if value is not None})
    cases = list[_Case]()
    for number in range(1, 1 + (wanted.sequences if micro_batches is None else 1)):
        if wanted.sequences % number == 0:
            cases.append(_Case(of, replace(wanted, micro_batches=number * count), there, checkpointing))
            if cases[-1].forecast(None, cases[-1].counts[0]).fits:
                break  # more micro-batches would gain nothing
    state, params = cases[0].sizes.state, sorted(cases[0].sizes.params)
    tried = candidates(state, params[len(params) // 2]) if policies is None else policies

    def preference(one: Forecast) -> tuple[bool, bool, float]:
        return not one.fits_device, not one.fits, one.iteration_ms if one.fits_device else one.needed_bytes

    rows = [min((case.fastest(policy) for case in cases), key=preference) for policy in (None, *tried)]
    (first,) = [one for one in cases if one.training.micro_batches == rows[0].micro_batches]
    parts, ideal_ms = first.of(rows[0].recomputed)[1], cases[0].forecast(None, 0).iteration_ms
    return Plan(of, cases[0].training, there, len(first.blocks), parts, ideal_ms, tuple(rows), asked)


class _Case:
    """A training with one number of micro-batches; ``counts``: numbers of ``blocks`` to recompute, the first ones."""

    def __init__(self, model: Model, training: Training, machine: Machine, checkpointing: Recomputed) -> None:
        self.training, self._machine, self.sizes = training, machine, Sizes.of(model.shapes(), training)
        shape = (training.sequences, training.sequence_length, DTYPES[training.compute_dtype])
        self._traces = [model.trace(*shape, recomputes, training.expert_parallel) for recomputes in (False, True)]
        self.blocks = blocks_of(*self._traces)
        most = len(self.blocks)
        number = {"auto": -1, "none": 0, "full": most}.get(str(checkpointing), checkpointing)
        if not isinstance(number, int) or number > most:
            raise ValueError(f"checkpointing={number}: the model has {most} blocks that can be recomputed")
        self.counts = range(1 + most) if number < 0 else range(number, 1 + number)
        self._known: dict[int, tuple[Trace, Parts]] = {}

    def of(self, recomputed: int) -> tuple[Trace, Parts]:
        """Return the trace with ``recomputed`` blocks recomputed, and the parts of its iteration."""
        if recomputed not in self._known:
            trace = joined(self._traces[0], self._traces[1], self.blocks[:recomputed])
            self._known[recomputed] = trace, parts_of(self.sizes, trace, self.training, self._machine)
        return self._known[recomputed]

    def forecast(self, policy: OffloadPolicy | None, recomputed: int) -> Forecast:
        """Forecast a policy with ``recomputed`` blocks recomputed."""
        sizes, training, machine, (trace, parts) = self.sizes, self.training, self._machine, self.of(recomputed)
        curve, constant = curve_of(sizes, trace, training), {"workspace": WORKSPACE_BYTES}
        constant |= {"other": training.other_device_bytes, "parameters": sum(sizes.params)}
        if policy is None:
            blocks, found = None, estimate(None, parts, curve)
            device = curve.with_blocks({**constant, "optimizer state": sizes.state})
        else:
            room_bytes = int(min(1 - RESERVE, 1 / (1 + SLACK)) * (machine.device_bytes - CONTEXT_BYTES))
            blocks = Blocks(policy, sizes)
            constant["parameters"] *= not policy.parameters

            def memory(curve: Curve) -> DeviceMemory:
                lasting = {"blocks": blocks.nbytes - blocks.leaving_bytes}
                return curve.with_blocks(constant | lasting, blocks.leaving_bytes)

            # The first steps do not update in the backward, and keep all gradients, unless these do not fit. Gradients
            # that clipping may change stay until step(), and those of several micro-batches until the last backward.
            first, frees = memory(curve), policy.parameters and policy.updates_in_backward
            if frees and not training.clip and training.micro_batches == 1:
                curve = curve_of(sizes, trace, training, frees=True)
            blocks.learn(lambda: estimate(blocks, parts, curve).reading, lambda: room_bytes - memory(curve).peak_bytes)
            device, found = memory(curve), estimate(blocks, parts, curve)
            device = first if device.peak_bytes < first.peak_bytes <= room_bytes else device
        host_bytes, state, params = 0 if blocks is None else blocks.host_bytes, sizes.state, sum(sizes.params)
        rolls_back = policy is not None and policy.updates_in_backward and training.clip
        host_bytes += (state + params) * rolls_back  # copies from before the updates
        hiding = (parts.copy_ms(state, state + params * rolls_back), parts.copy_ms(state + 2 * params, state + params))
        tokens = training.sequences * training.sequence_length / (parts.forward_ms + parts.backward_ms)
        per_host = host_bytes * min(training.ranks, machine.devices_per_host)
        needed_bytes, why_not = int(device.peak_bytes * (1 + SLACK)) + CONTEXT_BYTES, ""
        if needed_bytes > machine.device_bytes:
            why_not = f"device: {(needed_bytes - machine.device_bytes) / 1e9:.1f} GB too little"
        elif per_host > MOST_OF_HOST * machine.host_gb * 1e9:
            why_not = f"host: {per_host / 1e9:.0f} GB of {machine.host_gb:.0f} GB would be pinned"
        return Forecast(
            policy=policy,
            micro_batches=training.micro_batches,
            recomputed=recomputed,
            device=device,
            needed_bytes=needed_bytes,
            host_bytes=host_bytes,
            host_bytes_per_host=per_host,
            resident_bytes=sizes.state if blocks is None else blocks.kept_state + blocks.kept_params,
            iteration_ms=found.reading.iteration_ms,
            tokens_per_s=training.tokens_per_step / found.reading.iteration_ms * 1e3,
            hiding_tokens=(int(tokens * hiding[0]), int(tokens * hiding[1])),
            limit=found.limit,
            why_not=why_not,
            lines=lines_to_write(policy, training.masters),
        )

    def fastest(self, policy: OffloadPolicy | None) -> Forecast:
        """Find the number of recomputed blocks with which a policy fits and is fastest, or else needs least.

        Fewer recomputed blocks are faster unless the link limits: then more of them give the link room and time.
        """
        forecast = functools.cache(functools.partial(self.forecast, policy))
        least = bisect_left(self.counts, True, key=lambda count: forecast(count).fits_device)
        if least == len(self.counts):
            return forecast(self.counts[-1])

        def preference(one: Forecast) -> tuple[bool, float, int]:  # within 0.1 %, the fewest blocks
            return not one.fits_device, round(math.log(one.iteration_ms), 3), one.recomputed

        left, best = len(self.counts) - 1 - least, forecast(self.counts[least])
        tried = {self.counts[least + -(-left // part)] for part in (left or 1, 8, 4, 2, 1)}
        while tried:  # some numbers, and then the neighbours of the best
            before, best = best, min((best, *map(forecast, tried)), key=preference)
            tried = set() if best is before else {best.recomputed - 1, best.recomputed + 1} & {*self.counts}
        return best


def candidates(state_bytes: int, group_bytes: int = 0) -> tuple[OffloadPolicy, ...]:
    """List the policies to compare for ``state_bytes`` of state and ``group_bytes`` of parameters in a usual group.

    Each policy but the default: with the least ``device_bytes`` that moves state in few operations, and with "auto".
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
    """Return the code for a policy and masters; empty without both."""
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
