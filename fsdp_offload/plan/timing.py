"""Milliseconds: the parts of an iteration, each alone, and what an iteration of each policy takes. Pure arithmetic.

A matrix product takes what its operations and then what its bytes take, any other kernel whichever is more, and each
of them a little for itself. With forward F, backward B, update U, all copies both ways at once T, and a share r of the
loads ahead of the step, an iteration takes, unless the host needs longer to launch it::

    "step"                     F + B + clip + max(U, (1 - r) T)
    "forward", "iteration"     F + B + clip + what the forward waits for state, and what of U is not in these waits

How long it waits, :mod:`waits` computes group by group.

Where parameters live on the host too, with all loads of the gathers G, c the contention, and in T the parameters beside
their state::

    "step"         max(F + B + c min(G, F + B), (1 + c) G) + clip + max(U, T)
    "iteration"    max(F + B + U + c min(T, F + B), (1 + c) T), with the gathers in T
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..planning.bound import Times
from .choices import Choice, Overlap
from .machine import Machine
from .memory import Sizes
from .trace import Phase, Segment, Trace
from .training import Training


class Copies(NamedTuple):
    """Milliseconds for so many bytes up and so many down: each alone, and both at once."""

    load_ms: float
    store_ms: float
    two_way_ms: float


class Turn(NamedTuple):
    """A group's turn in a forward or a backward."""

    group: int
    ms: float


@dataclass(frozen=True)
class Parts:
    """The parts of an iteration in milliseconds, each alone.

    Attributes:
        times: in the words of the bound: the first forward, and all that is left as backward; copies of all state.
        forward: of one micro-batch, turn by turn.
        backward: the same.
        state_bytes: of each group.
        parameter_bytes: of each group.
        copies_with_parameters: where parameters live on the host too: by overlap, the copies of an update, and in
            ``"iteration"`` those of all gathers.
        gathers_ms: loads of parameters for all gathers, alone.
        contention: of the machine.
        communication_ms: gathers and reductions, which run beside the computation as far as it lasts.
        launch_ms: what the host needs for all passes.
        issue_ms: what it needs beside that to issue transfers and updates.
    """

    times: Times
    forward: tuple[Turn, ...]
    backward: tuple[Turn, ...]
    state_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    copies_with_parameters: Mapping[Overlap, "Copies"]
    gathers_ms: float
    contention: float
    communication_ms: float
    launch_ms: float
    issue_ms: float

    def host_ms(self, choice: Choice | None) -> float:
        """Compute what the host needs for an iteration with a choice."""
        issues = choice is not None and choice.overlap != "step"
        return self.launch_ms + (self.issue_ms if issues else 0.0)

    def as_launched(self, choice: Choice | None) -> "Parts":
        """Stretch passes to what the host needs to launch them, and what a choice does in them, if that is longer."""
        longer = self.host_ms(choice) / (self.times.forward_ms + self.times.backward_ms)
        if longer <= 1:
            return self
        forward, backward = (
            tuple(Turn(group, longer * ms) for group, ms in turns) for turns in (self.forward, self.backward)
        )
        times = replace(
            self.times, forward_ms=longer * self.times.forward_ms, backward_ms=longer * self.times.backward_ms
        )
        return replace(self, times=times, forward=forward, backward=backward)

    def times_with_parameters(self, overlap: Overlap) -> Times:
        """The times with the copies of parameters that live on the host beside those of the state."""
        return replace(self.times, **self.copies_with_parameters[overlap]._asdict())

    @property
    def last_backward_ms(self) -> float:
        """Backward of the last micro-batch."""
        return sum(turn.ms for turn in self.backward)


class Estimate(NamedTuple):
    """Milliseconds that an iteration takes, and what decides that."""

    ms: float
    limit: str


_UNEVEN_SHARE = 0.65
"""Share of device memory's rate reached by kernels that reduce or rearrange, and by the copies of ``fully_shard``."""


def parts_of(sizes: Sizes, trace: Trace, training: Training, machine: Machine) -> Parts:
    """Compute the parts of an iteration."""
    forward, forward_link = _pass(sizes, trace, training, machine, "forward")
    backward, backward_link = _pass(sizes, trace, training, machine, "backward")
    first_forward, last_backward = (sum(turn.ms for turn in turns) for turns in (forward, backward))
    count = training.micro_batches
    params, state = sum(sizes.params), sizes.state
    by_memory = 1e3 / machine.memory_gb_per_s / 1e9
    gathers = 2 * count * params  # each forward and each backward; the last one's is also for the update
    copies = functools.partial(_copies, training=training, machine=machine)
    times = Times(
        forward_ms=first_forward,
        backward_ms=count * (first_forward + last_backward) - first_forward,
        update_ms=(3 * params + 2 * state) * by_memory,  # reads all, and writes all but the gradients
        clip_ms=3 * params * by_memory if training.clip else 0.0,  # the norm reads, scaling reads and writes
        **copies(state, state)._asdict(),
    )
    state_bytes = tuple(round(state * nbytes / params) for nbytes in sizes.params) if params else ()
    launch_ms, kernels = machine.launch_us / 1e3, sum(sum(one.work.values()) for one in trace.segments)
    turns = len(trace.segments)
    return Parts(
        times,
        forward,
        backward,
        state_bytes,
        sizes.params,
        {
            "step": copies(params + state, params + state),
            "iteration": copies(gathers + state, params + state),
        },
        copies(gathers, 0).load_ms,
        machine.contention,
        count * (forward_link + backward_link),
        launch_ms=count * (kernels * _LAUNCHES_OF_KERNEL + turns * _LAUNCHES_OF_TURN) * launch_ms,
        issue_ms=(sizes.tensors * _LAUNCHES_OF_UPDATE + count * turns * _LAUNCHES_OF_WAIT) * launch_ms,
    )


_LAUNCHES_OF_KERNEL, _LAUNCHES_OF_TURN, _LAUNCHES_OF_UPDATE, _LAUNCHES_OF_WAIT = 6, 190, 43, 60
"""The host's time in Python, in launches of a kernel in a plain loop: for one in a model with autograd; for a turn
of a ``fully_shard`` group; for moving and updating a parameter's state; for a turn that waits for state. From the two
batches of ``examples/benchmark_results/2026-11-23-h200x1-plan-auto.jsonl`` in which the device waited for the host."""


def _copies(loaded: int, stored: int, *, training: Training, machine: Machine) -> Copies:
    shared_gb_per_s = machine.host_gb_per_s / _sharing(training, machine)
    load_ms = loaded / min(machine.load_gb_per_s, shared_gb_per_s) / 1e6
    store_ms = stored / min(machine.store_gb_per_s, shared_gb_per_s) / 1e6
    both_ms = (loaded + stored) / min(machine.two_way_gb_per_s, shared_gb_per_s) / 1e6
    return Copies(load_ms, store_ms, max(load_ms, store_ms, both_ms))


def _sharing(training: Training, machine: Machine) -> int:
    """Count the ranks that copy from and to the memory of one host."""
    return min(training.ranks, machine.devices_per_host)


def _pass(
    sizes: Sizes, trace: Trace, training: Training, machine: Machine, phase: Phase
) -> tuple[tuple[Turn, ...], float]:
    """The turns of one pass of one micro-batch, which last as long as its communication, and that."""
    segments = [one for one in trace.segments if one.phase == phase]
    turns = [Turn(one.group, _turn_ms(one, sizes, training, machine)) for one in segments]
    link_ms = _communication_ms(sizes, training, machine, phase)
    compute_ms = sum(turn.ms for turn in turns)
    longer = max(1.0, link_ms / compute_ms) if compute_ms else 1.0
    return tuple(Turn(group, ms * longer) for group, ms in turns), link_ms


def _turn_ms(segment: Segment, sizes: Sizes, training: Training, machine: Machine) -> float:
    """Computation of one group's turn, and the copies that ``fully_shard`` makes for it."""
    fp32 = training.compute_dtype == "fp32"
    matmul = machine.matmul_tflops if segment.phase == "forward" else machine.matmul_backward_tflops
    tflops = {
        "matmul": machine.fp32_tflops if fp32 else matmul,
        "attention": machine.fp32_tflops if fp32 else machine.attention_tflops,
        "attention_backward": machine.fp32_tflops if fp32 else machine.attention_backward_tflops,
    }
    even, uneven = machine.memory_gb_per_s * 1e6, _UNEVEN_SHARE * machine.memory_gb_per_s * 1e6  # bytes per ms
    ms = 0.0
    for work, count in segment.work.items():
        operations_ms = work.flops / tflops.get(work.kind, 1.0) / 1e9
        bytes_ms = work.nbytes / (uneven if work.kind == "uneven" else even)
        # The tiles of a product are written when they have been computed.
        ms += count * (operations_ms + bytes_ms if work.kind == "matmul" else max(operations_ms, bytes_ms))
    ms += sum(segment.work.values()) * machine.kernel_us / 1e3
    params, gathered = sizes.params[segment.group], sizes.gathered[segment.group]
    moved = params + gathered  # cast into the buffers of the gather
    if training.shards > 1:
        moved += 2 * gathered  # and copied out of them
    if segment.phase == "backward":
        moved += 4 * gathered + params  # into the reduction, out of it, and cast
    ms += moved / uneven
    return ms * (1 + machine.gather_contention) if training.ranks > 1 else ms


def _communication_ms(sizes: Sizes, training: Training, machine: Machine, phase: Phase) -> float:
    """Gathers and reductions of one pass."""
    if training.ranks == 1:
        return 0.0
    gathered = sum(sizes.gathered)
    crosses_hosts = training.ranks > machine.devices_per_host
    rate = machine.network_gb_per_s if crosses_hosts else machine.peer_gb_per_s
    share = (training.shards - 1) / training.shards
    passes = 1 if phase == "forward" else 2  # the gather, and the reduction
    link_bytes = passes * share * gathered
    if phase == "backward" and training.replicas > 1:
        link_bytes += 2 * gathered / training.shards
    return link_bytes / rate / 1e6


_WAITS = 0.05
"""Share of an iteration spent waiting from which on the host link decides how long it takes."""


def estimate(
    choice: Choice | None, parts: Parts, *, kept: float = 0.0, staged: float = 0.0, stall_ms: float = 0.0
) -> Estimate:
    """Estimate an iteration.

    Args:
        choice: ``None`` is no offload.
        parts: of the iteration.
        kept: the share of the state that stays on the device.
        staged: the share of what moves that staging holds; it is loaded as far as the backward lasts.
        stall_ms: how long the forward waits for state.
    """
    times, host_ms = parts.times, parts.host_ms(choice)
    passes, update, clip = times.forward_ms + times.backward_ms, times.update_ms, times.clip_ms
    compute_name = "gathers" if parts.communication_ms > 0.95 * passes else "compute"
    if choice is None:
        return _as_launched(Estimate(passes + clip + update, compute_name), host_ms)
    if choice.parameters:
        return _estimate_with_parameters(choice, parts, kept, compute_name)
    two_way, load = times.two_way_ms * (1 - kept), times.load_ms * (1 - kept)
    if choice.overlap == "step":
        moving = two_way * (1 - (min(staged, times.backward_ms / load) if load else staged))
        after = clip + max(update, moving)
        name = "host link" if moving > update else compute_name
        return Estimate(max(passes, host_ms) + after, name)
    in_waits = min(1.0, stall_ms / two_way) * (1 - kept) if two_way else 0.0
    ms = passes + stall_ms + (1 - in_waits) * update
    ms = ms + clip if choice.overlap == "forward" else max(ms, two_way)
    return _as_launched(Estimate(ms, "host link" if stall_ms > _WAITS * ms else compute_name), host_ms)


def _estimate_with_parameters(choice: Choice, parts: Parts, kept: float, compute_name: str) -> Estimate:
    times, slower = parts.times_with_parameters(choice.overlap), 1 + parts.contention
    passes, two_way = times.forward_ms + times.backward_ms, times.two_way_ms * (1 - kept)
    if choice.overlap == "step":
        gathers_ms = slower * parts.gathers_ms
        passes += parts.contention * min(parts.gathers_ms, passes)
        after = times.clip_ms + max(times.update_ms, two_way)
        name = "host link" if two_way > times.update_ms or gathers_ms > passes else compute_name
        return Estimate(max(passes, gathers_ms, parts.host_ms(choice)) + after, name)
    busy = passes + times.update_ms + parts.contention * min(two_way, passes)
    link_ms = slower * two_way + _idle_link_ms(choice, parts)
    return _as_launched(
        Estimate(max(busy, link_ms), "host link" if link_ms > busy else compute_name), parts.host_ms(choice)
    )


def _idle_link_ms(choice: Choice, parts: Parts) -> float:
    """Between the last gather of a forward and the first update there is nothing to load but what staging holds.

    The root's gradients are final last, although the head's are the first.
    """
    root, first = parts.forward[0].group, 0.0
    for turn in parts.backward:
        first += turn.ms
        if turn.group != root:
            break
    state_bytes, parameter_bytes = sum(parts.state_bytes), sum(parts.parameter_bytes)
    staged = choice.staging_bytes(state_bytes, parameter_bytes) / max(1, state_bytes + parameter_bytes)
    return max(0.0, parts.forward[-1].ms + first - staged * parts.copies_with_parameters["step"].load_ms)


def _as_launched(one: Estimate, host_ms: float) -> Estimate:
    """A host that is late makes the device wait; while the device waits for state, the host goes on."""
    return Estimate(host_ms, "launches") if host_ms > one.ms else one
