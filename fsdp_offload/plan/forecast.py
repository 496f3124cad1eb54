"""Put together what each policy costs in memory and in time, and choose."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from torch import nn

from ..planning.bound import Bound, Times
from .choices import CHOICES, OVERLAPS, Choice, Loop, lines_to_write
from .machine import Machine, machine_of
from .memory import SLACK, DeviceMemory, Sizes, Window, device_memory, sizes_of
from .model import Model, model_of
from .timing import Estimate, Parts, estimate, parts_of
from .trace import Trace
from .training import DTYPES, Training
from .waits import Waits, kept_with_parameters, waits_of


@dataclass(frozen=True)
class Forecast:
    """Cost of one policy, in memory and in time.

    Attributes:
        choice: ``None`` is training without offload.
        device: the peak of a device, with its terms.
        needed_bytes: what a device has to have: the peak, what the driver takes, and what the allocator cannot use.
        spare_bytes: what it has beyond that; negative if it has less.
        host_bytes: pinned memory of one rank.
        host_bytes_per_host: of all ranks of a host.
        resident_bytes: state that stays on the device, with its parameters where they would live on the host.
        bound_ms, bound: what an iteration takes at least, and the formula.
        iteration_ms: what it is estimated to take.
        tokens_per_s: of all ranks.
        limit: what decides how long it takes: compute, gathers, the host link, or the host, which launches it all.
        why_not: what does not fit; empty if everything does.
        lines: what to write.
    """

    choice: Choice | None
    device: DeviceMemory
    needed_bytes: int
    spare_bytes: int
    host_bytes: int
    host_bytes_per_host: int
    resident_bytes: int
    bound_ms: float
    bound: str
    iteration_ms: float
    tokens_per_s: float
    limit: str
    why_not: str
    lines: str

    @property
    def name(self) -> str:
        """Name in tables."""
        return "no offload" if self.choice is None else self.choice.name

    @property
    def fits(self) -> bool:
        """Whether device and host have the memory."""
        return not self.why_not


@dataclass(frozen=True)
class Known:
    """Model, sizes, trace and parts of an iteration: the share of a plan that no device's memory changes."""

    model: Model
    sizes: Sizes
    trace: Trace
    parts: Parts


@dataclass(frozen=True)
class Plan:
    """Costs of each policy for one training on one machine.

    Attributes:
        model: its name.
        numel: its parameters.
        training: what was asked.
        machine: where.
        times: the parts of an iteration, each alone; copies are of all of the state.
        forecasts: one for each policy, training without offload first.
        known: what they were made of.
    """

    model: str
    numel: int
    training: Training
    machine: Machine
    times: Times
    forecasts: tuple[Forecast, ...]
    known: Known = field(repr=False, compare=False)

    def within(self, device_bytes: int) -> "Plan":
        """Make the plan for devices of which only so much may be used, or that have so much more.

        Raises:
            ValueError: that is no size.
        """
        if device_bytes < 1:
            raise ValueError(f"device_bytes must be positive, got {device_bytes!r}")
        machine = replace(self.machine, device_bytes=device_bytes)
        choices = [one.choice for one in self.forecasts]
        forecasts = tuple(_forecast(choice, self.known, self.training, machine) for choice in choices)
        return replace(self, machine=machine, forecasts=forecasts)

    def best(self, *, device_bytes: int | None = None, loop: Loop | None = None) -> Forecast | None:
        """Choose the fastest policy that fits; ``None`` if none does.

        Args:
            device_bytes: memory of a device; that of the machine by default.
            loop: what the training loop allows, see ``fsdp_offload.plan.OVERLAPS``. ``None``: anything, but for
                updates before a clipping that was asked for.
        """
        if device_bytes is not None:
            return self.within(device_bytes).best(loop=loop)
        fitting = [one for one in self._allowed(loop) if one.fits]
        fastest_ms = min((one.iteration_ms for one in fitting), default=0.0)
        same = [one for one in fitting if one.iteration_ms <= _SAME * fastest_ms]
        return min(same, key=_preferred, default=None)

    def what_would_fit(self, *, loop: Loop | None = None) -> str:
        """Name the policy that needs the least of a device, the memory with which it would fit, and options that do."""
        least = min(self._allowed(loop), key=lambda one: one.needed_bytes)
        device_gb, host_gb = least.needed_bytes / 1e9, least.host_bytes_per_host / _MOST_OF_HOST / 1e9
        machine = self.machine
        return (
            f"{least.name} would, with {device_gb:.1f} GB of each device ({machine.device_bytes / 1e9:.1f} GB here) "
            f"and {host_gb:.0f} GB of each host ({machine.host_bytes / 1e9:.0f} GB here). {self._remedies(loop)}"
        )

    def _remedies(self, loop: Loop | None) -> str:
        """Options with which something fits: recomputation, and more ranks with as many tokens on each."""
        found = []
        for checkpointing in dict.fromkeys((self.training.checkpointing, "full")):
            trace = self.known.trace if checkpointing == self.training.checkpointing else None
            for times in (1, *_MORE_RANKS):
                ranks, tokens = times * self.training.ranks, times * self.training.tokens_per_step
                training = replace(self.training, checkpointing=checkpointing, ranks=ranks, tokens_per_step=tokens)
                made = _plan(self.known.model, training, self.machine, [one.choice for one in self.forecasts], trace)
                trace = made.known.trace
                if best := made.best(loop=loop):
                    options = (
                        [f"--checkpointing {checkpointing}"] if checkpointing != self.training.checkpointing else []
                    )
                    options += [f"--ranks {ranks} --tokens-per-step {tokens}"] if times > 1 else []
                    found.append(f"{best.name} with {' '.join(options)}")
                    break
        if found:
            return f"What fits: {'; '.join(found)}."
        most = f"{_MORE_RANKS[-1]} times the ranks with --checkpointing full"
        return f"{most} are not enough: fewer tokens on each need less."

    def _allowed(self, loop: Loop | None) -> list[Forecast]:
        loop = loop or ("synchronizes" if self.training.clip else "no_clipping")
        if loop not in get_args(Loop):
            raise ValueError(f"loop must be one of {', '.join(get_args(Loop))}; got {loop!r}")
        return [one for one in self.forecasts if one.choice is None or one.choice.overlap in OVERLAPS[loop]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        best = self.best()
        return {
            "model": self.model,
            "parameters": self.numel,
            "training": asdict(self.training),
            "machine": asdict(self.machine),
            "parts_ms": {name.removesuffix("_ms"): ms for name, ms in asdict(self.times).items()},
            "best": None if best is None else best.name,
            "policies": [_plain(one) for one in self.forecasts],
        }


def plan(
    model: Model | nn.Module | str | Path,
    *,
    machine: Machine | str | Path = "H200",
    trace: Trace | None = None,
    choices: Sequence[Choice] = CHOICES,
    **training: Any,
) -> Plan:
    """Say what training will cost in memory and time, before it runs.

    Args:
        model: a module, a config, or a name; see :func:`model_of`.
        machine: a profile's name or path, or ``"this"``; see :func:`machine_of`.
        trace: of this model and batch, if there is one already.
        choices: policies to compare.
        training: the fields of :class:`Training`; ``tokens_per_step`` is needed.

    Raises:
        ValueError: something is unknown or impossible; the message says what to do.
    """
    if "tokens_per_step" not in training:
        raise ValueError("plan needs tokens_per_step: how many tokens all ranks together train on in one step")
    if unknown := sorted(training.keys() - Training.__dataclass_fields__.keys()):
        raise ValueError(f"plan knows no {', '.join(unknown)}; there are {', '.join(Training.__dataclass_fields__)}")
    wanted, there = Training(**training), machine_of(machine)
    return _plan(model_of(model), wanted, there, (None, *choices), trace)


def _plan(
    model: Model, training: Training, machine: Machine, choices: Sequence[Choice | None], trace: Trace | None
) -> Plan:
    if trace is None:
        dtype = DTYPES[training.compute_dtype]
        trace = model.trace(training.sequences, training.sequence_length, dtype, training.checkpointing)
    sizes = sizes_of(model.shapes(), training)
    known = Known(model, sizes, trace, parts_of(sizes, trace, training, machine))
    forecasts = tuple(_forecast(choice, known, training, machine) for choice in choices)
    return Plan(model.name, model.numel, training, machine, known.parts.times, forecasts, known)


def _forecast(choice: Choice | None, known: Known, training: Training, machine: Machine) -> Forecast:
    if choice is not None and choice.parameters:
        return _forecast_with_parameters(choice, known, training, machine)
    sizes, parts = known.sizes, known.parts
    memory = functools.partial(device_memory, sizes, known.trace, training, machine)
    staging_bytes = 0 if choice is None else choice.staging_bytes(sizes.state)
    waits = Waits(kept=1.0, stall_ms=0.0)
    if choice is not None:
        lowest = memory(resident_bytes=0, staging_bytes=min(sizes.state, staging_bytes))
        waits = waits_of(choice, parts, machine, room_bytes=_room_bytes(lowest, machine))
    resident_bytes = int(waits.kept * sizes.state)
    moving_bytes = sizes.state - resident_bytes
    staging_bytes = min(moving_bytes, staging_bytes)
    device = memory(resident_bytes=resident_bytes, staging_bytes=staging_bytes)
    staged = staging_bytes / moving_bytes if moving_bytes else 0.0
    if choice is None:
        times = parts.times
        formula, bound_ms = "F + B + clip + U", times.forward_ms + times.backward_ms + times.clip_ms + times.update_ms
    else:
        formula, bound_ms = choice.bound(parts.times, sizes.state, waits.kept, staged)
    ms, limit = estimate(choice, parts, kept=waits.kept, staged=staged, stall_ms=waits.stall_ms)
    host_bytes = 0 if choice is None else sizes.host
    if choice is not None and choice.overlap == "step":
        host_bytes -= resident_bytes  # it stays from the beginning, and has no place there
    return _put_together(
        choice,
        known,
        training,
        machine,
        device=device,
        host_bytes=host_bytes,
        resident_bytes=resident_bytes,
        bound=Bound(formula, bound_ms),
        estimate=Estimate(ms, limit),
    )


def _forecast_with_parameters(choice: Choice, known: Known, training: Training, machine: Machine) -> Forecast:
    """The model's parameters pass through the device too, in a window of its groups."""
    sizes, parts = known.sizes, known.parts
    all_bytes = sum(sizes.params) + sizes.state
    window_bytes = choice.share(all_bytes).window_bytes(sizes.params)
    frees_gradients = choice.overlap == "iteration" and not training.clip  # which may change them

    def memory(kept: float) -> DeviceMemory:
        moving_bytes = all_bytes - int(kept * all_bytes)
        return device_memory(
            sizes,
            known.trace,
            training,
            machine,
            resident_bytes=int(kept * sizes.state),
            staging_bytes=min(moving_bytes, choice.staging_bytes(sizes.state, sum(sizes.params))),
            window=Window(min(moving_bytes, window_bytes), int(kept * sum(sizes.params)), frees_gradients),
        )

    kept = kept_with_parameters(choice, parts, room_bytes=_room_bytes(memory(0.0), machine))
    resident_bytes = int(kept * all_bytes)
    unhomed_bytes = 0 if choice.share(all_bytes).staying_is_learnt else resident_bytes  # it stays from the beginning
    return _put_together(
        choice,
        known,
        training,
        machine,
        device=memory(kept),
        host_bytes=sizes.host_with_params - unhomed_bytes,
        resident_bytes=resident_bytes,
        bound=choice.bound(parts.times_with_parameters(choice.overlap), sizes.state, kept, 0.0),
        estimate=estimate(choice, parts, kept=kept),
    )


def _room_bytes(lowest: DeviceMemory, machine: Machine) -> int:
    """What "auto" may fill beside a peak without anything kept."""
    return max(0, int((1 - _RESERVE) * machine.device_bytes) - machine.context_bytes - lowest.peak_bytes)


def _put_together(
    choice: Choice | None,
    known: Known,
    training: Training,
    machine: Machine,
    *,
    device: DeviceMemory,
    host_bytes: int,
    resident_bytes: int,
    bound: Bound,
    estimate: Estimate,
) -> Forecast:
    per_host = host_bytes * min(training.ranks, machine.devices_per_host)
    needed_bytes = int(device.peak_bytes * (1 + SLACK)) + machine.context_bytes
    spare_bytes = machine.device_bytes - needed_bytes
    return Forecast(
        choice=choice,
        device=device,
        needed_bytes=needed_bytes,
        spare_bytes=spare_bytes,
        host_bytes=host_bytes,
        host_bytes_per_host=per_host,
        resident_bytes=resident_bytes,
        bound_ms=bound.ms,
        bound=bound.formula,
        iteration_ms=estimate.ms,
        tokens_per_s=training.tokens_per_step / estimate.ms * 1e3,
        limit=estimate.limit,
        why_not=_why_not(spare_bytes, per_host, machine),
        lines=lines_to_write(choice, known.sizes.state, training.master_weights),
    )


def _preferred(one: Forecast) -> tuple[bool, bool, int]:
    """Order of those that take as long: with parameters on the host, the link has more to do that may come late."""
    return one.choice is not None, one.choice is not None and one.choice.parameters, one.needed_bytes


def _why_not(spare_bytes: int, host_bytes: int, machine: Machine) -> str:
    if spare_bytes < 0:
        return f"device: {-spare_bytes / 1e9:.1f} GB too little"
    if host_bytes > _MOST_OF_HOST * machine.host_bytes:
        return f"host: {host_bytes / 1e9:.0f} GB of {machine.host_bytes / 1e9:.0f} GB would be pinned"
    return ""


_MOST_OF_HOST = 0.8
"""Share of the host's memory that may be pinned: the rest is for the processes, the data and the page cache."""

_MORE_RANKS = (2, 4, 8)
"""Times as many ranks, which are tried where nothing fits."""

_RESERVE = 0.05
"""Share of a device that "auto" leaves free: as ``fsdp_offload/device/link.py`` has it."""

_SAME = 1.01
"""Estimates do not tell closer ones apart. Then no offload is best, after it state alone, and then what needs least of
the device."""


def _plain(one: Forecast) -> dict[str, Any]:
    device: Mapping[str, Any] = {"peak_bytes": one.device.peak_bytes, "when": one.device.when, **one.device.terms}
    rest = {name: getattr(one, name) for name in one.__dataclass_fields__ if name not in ("choice", "device")}
    return {"policy": one.name, "fits": one.fits, "device": dict(device), **rest}
