"""Milliseconds: the parts of an iteration, each alone, and what an iteration of each policy takes. Pure arithmetic.

With forward F, backward B, update U, all copies both ways at once T, and a share r of the loads ahead of the step, an
iteration takes, unless the host needs longer to launch it::

    no offload                 F + B + clip + U
    "step"                     F + B + clip + max(U, (1 - r) T)
    "forward", "iteration"     F + B + clip + late + the share of U that is not in the wait for late state

and with parameters on the host too, with all loads of the gathers G, c the contention, and the parameters in T::

    "step"         max(F + B + c min(G, F + B), (1 + c) G) + clip + max(U, T)
    "iteration"    max(F + B + U + c min(T, F + B), (1 + c) T + idle), with the gathers in T

The first two are the bounds of ``planning/bound.py``; the others take longer than theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import machine as reached
from .bound import Bound, Times, bound, staged_share
from .choices import Choice, Overlap
from .machine import Machine
from .memory import Sizes
from .trace import Phase, Segment, Trace
from .training import Training


class Group(NamedTuple):
    """What a policy may offload of a ``fully_shard`` group, and how much time the link has for it."""

    state_bytes: int
    parameter_bytes: int
    wanted_ms: float  # from the beginning of a forward until it needs the group
    early_ms: float  # from when the group's gradients are final until the backward ends


@dataclass(frozen=True)
class Parts:
    """The parts of an iteration in milliseconds, each alone."""

    times: Times  # in the words of the bound: the first forward, and all else as backward; copies of all state
    with_parameters: Mapping[Overlap, Times]  # with those of parameters, and for "iteration" those of all gathers
    groups: tuple[Group, ...]  # in the order of the forward, the root first
    backward_ms: float  # of one micro-batch
    idle_ms: float  # from the last gather of a forward until the first gradients are final
    gathers_ms: float  # loads of parameters for all gathers
    limit: str  # of the passes: compute, or gathers and reductions, which run beside it as far as it lasts
    launch_ms: float  # what the host needs for all passes, and beside that to issue transfers and updates
    issue_ms: float
    contention: float  # of the machine

    @property
    def passes_ms(self) -> float:
        """All forwards and backwards."""
        return self.times.forward_ms + self.times.backward_ms

    @property
    def state_bytes(self) -> int:
        """All of the optimizer's state."""
        return sum(group.state_bytes for group in self.groups)

    def host_ms(self, choice: Choice | None) -> float:
        """What the host needs for an iteration."""
        return self.launch_ms + (self.issue_ms if choice is not None and choice.overlap != "step" else 0.0)

    def bound(self, choice: Choice | None, kept: float) -> Bound:
        """What an iteration takes at least, if that share of what is offloaded stays on the device."""
        if choice is None:
            return bound(None, self.times)
        state = self.state_bytes
        times, staged = self.times, staged_share(choice.staging_bytes(state), int((1 - kept) * state))
        if choice.parameters:
            times, staged = self.with_parameters[choice.overlap], 0.0
        return bound(choice.policy(state), times, offloaded=1 - kept, staged=staged)

    def slower(self, factor: float) -> "Parts":
        """Stretch the passes."""
        times = {name: factor * getattr(self.times, name) for name in ("forward_ms", "backward_ms")}
        groups = (one._replace(wanted_ms=factor * one.wanted_ms, early_ms=factor * one.early_ms) for one in self.groups)
        passes = {name: factor * getattr(self, name) for name in ("backward_ms", "idle_ms")}
        return replace(self, times=replace(self.times, **times), groups=tuple(groups), **passes)

    def late_ms(self, choice: Choice, kept: float) -> float:
        """How long a forward waits for state, if that share of it stays on the device: that of the first groups.

        The link moves the groups in the order of the forward, from when their gradients are final: after the backward,
        or in it. The forward waits for the group that is late by most.
        """
        state, in_backward = self.state_bytes, choice.overlap == "iteration"
        ms_per_byte = (1 + self.contention) * self.times.two_way_ms / max(1, state)
        ahead_bytes = choice.ring_bytes(state)
        if not in_backward and choice.share(state).passing_is_learnt:
            ahead_bytes += max(group.state_bytes for group in self.groups)  # in the room that activations have left
        ahead_ms = min(ahead_bytes * ms_per_byte, self.backward_ms)
        late, moved = 0.0, -kept * state
        for group in self.groups:
            moved += group.state_bytes
            if moved > 1:  # byte: kept is a rounded share
                hidden_ms = ahead_ms + group.wanted_ms + (group.early_ms if in_backward else 0.0)
                late = max(late, moved * ms_per_byte - hidden_ms)
        return late


def estimate(choice: Choice | None, parts: Parts, kept: float) -> tuple[float, str]:
    """Milliseconds of an iteration in which that share of what is offloaded stays on the device, and what decides it.

    That is compute, gathers, link, or launches of the host.
    """
    if choice is not None and choice.parameters:
        return _estimate_with_parameters(choice, parts, kept)
    times, passes, host_ms = parts.times, parts.passes_ms, parts.host_ms(choice)
    least_ms, plain_ms = parts.bound(choice, kept).ms, passes + times.clip_ms + times.update_ms
    if choice is None:
        return _launched(plain_ms, parts.limit, host_ms)
    if choice.overlap == "step":
        limit = "link" if least_ms > 1.0001 * plain_ms else parts.limit
        return least_ms + max(0.0, host_ms - passes), limit
    two_way, late = (1 - kept) * times.two_way_ms, parts.late_ms(choice, kept)
    in_wait = min(1.0, late / two_way) * (1 - kept) if two_way else 0.0
    ms = passes + late + (1 - in_wait) * times.update_ms
    ms = max(ms, two_way) if choice.overlap == "iteration" else ms + times.clip_ms
    return _launched(ms, "link" if late > 0.05 * ms else parts.limit, host_ms)


def _estimate_with_parameters(choice: Choice, parts: Parts, kept: float) -> tuple[float, str]:
    times, slower = parts.with_parameters[choice.overlap], 1 + parts.contention
    passes, two_way, host_ms = parts.passes_ms, times.two_way_ms * (1 - kept), parts.host_ms(choice)
    if choice.overlap == "step":
        gathers, after = slower * parts.gathers_ms, max(times.update_ms, two_way)
        passes += parts.contention * min(parts.gathers_ms, passes)
        limit = "link" if after > times.update_ms or gathers > passes else parts.limit
        return max(passes, gathers, host_ms) + times.clip_ms + after, limit
    busy = passes + times.update_ms + parts.contention * min(two_way, passes)
    # Between the last gather of a forward and the first update, the link has only to load what staging holds.
    state, params = parts.state_bytes, sum(group.parameter_bytes for group in parts.groups)
    staged_ms = choice.staging_bytes(state, params) / max(1, state + params) * parts.with_parameters["step"].load_ms
    link = slower * two_way + max(0.0, parts.idle_ms - staged_ms)
    return _launched(max(busy, link), "link" if link > busy else parts.limit, host_ms)


def _launched(ms: float, limit: str, host_ms: float) -> tuple[float, str]:
    """A host that is late makes the device wait; while the device waits for state, the host goes on."""
    return (host_ms, "launches") if host_ms > ms else (ms, limit)


def kept_share(choice: Choice, parts: Parts, room_bytes: int) -> float:
    """The share of what is offloaded that stays on the device; "auto" keeps what cannot be hidden and has room."""
    whole = [one.state_bytes + (one.parameter_bytes if choice.parameters else 0) for one in parts.groups]
    total = sum(whole)
    share = choice.share(total, [one.parameter_bytes for one in parts.groups])
    if not total or not share.staying_is_learnt:
        return min(1.0, share.staying_bytes / max(1, total))
    limit = room_bytes if share.staying_limit_bytes is None else share.staying_limit_bytes
    # What stays is learnt from iterations that the host may have been late to launch.
    parts = parts.slower(max(1.0, parts.host_ms(choice) / parts.passes_ms))
    kept = 0
    for number, nbytes in enumerate(whole):
        # The gradients of the first block are final when the root's are: if one is kept, so is the other.
        goes_on = number == 1 and choice.overlap == "iteration" and not choice.parameters
        if kept + nbytes > limit or (not goes_on and _hides(choice, parts, kept / total)):
            break
        kept += nbytes
    return kept / total


def _hides(choice: Choice, parts: Parts, kept: float) -> bool:
    if choice.parameters:
        return estimate(choice, parts, kept)[1] != "link"
    times, window_ms = parts.times, 0.75 * parts.times.forward_ms  # as planning/resident.py has it
    if choice.overlap == "iteration":
        window_ms = 0.5 * (parts.passes_ms + times.update_ms)
    is_short = (1 - kept) * (1 + parts.contention) * times.two_way_ms <= window_ms
    return is_short and not parts.late_ms(choice, kept)


_LAUNCHES_OF_KERNEL, _LAUNCHES_OF_TURN, _LAUNCHES_OF_UPDATE, _LAUNCHES_OF_WAIT = 6, 190, 43, 60
"""The host's time in Python, in launches of a kernel in a plain loop: for a kernel in a model with autograd; for a turn
of a ``fully_shard`` group; for moving and updating a parameter's state; for a turn that waits for state. From the two
batches of ``examples/benchmark_results/2026-11-23-h200x1-plan-auto.jsonl`` in which the device waited for the host."""


def parts_of(sizes: Sizes, trace: Trace, training: Training, machine: Machine) -> Parts:
    """Compute the parts of an iteration."""
    forward, forward_link_ms = _turns(sizes, trace, training, machine, "forward")
    backward, backward_link_ms = _turns(sizes, trace, training, machine, "backward")
    wanted_ms, forward_ms = _clock(forward)
    early_ms, backward_ms = _clock(backward[::-1])
    early_ms[forward[0][0]] = 0.0  # the root is reduced at the very end
    params, state, count = sum(sizes.params), sizes.state, training.micro_batches
    by_memory = 1 / (reached.HBM * machine.hbm_gb_per_s * 1e6)  # ms for each byte
    host_rate = machine.host_gb_per_s / min(training.ranks, machine.devices_per_host)  # its ranks share its memory
    one_way = 1e-6 / min(machine.link_gb_per_s, host_rate)
    two_way = 1e-6 / min(reached.TWO_WAY * machine.link_gb_per_s, host_rate)

    def times(loaded: int, stored: int) -> Times:
        return Times(
            forward_ms=forward_ms,
            backward_ms=count * (forward_ms + backward_ms) - forward_ms,
            update_ms=(3 * params + 2 * state) * by_memory,  # reads all, and writes all but the gradients
            clip_ms=3 * params * by_memory if training.clip else 0.0,  # the norm reads, scaling reads and writes
            load_ms=loaded * one_way,
            store_ms=stored * one_way,
            two_way_ms=max(loaded * one_way, stored * one_way, (loaded + stored) * two_way),
        )

    groups = []
    for group in dict.fromkeys((*wanted_ms, *range(len(sizes.params)))):
        own = sizes.params[group]
        own_state = round(state * own / max(1, params))
        groups.append(Group(own_state, own, wanted_ms.get(group, 0.0), early_ms.get(group, 0.0)))
    gathers = 2 * count * params  # bytes, for each forward and each backward; the last one's is also for the update
    kernels = sum(work.kernels for one in trace for work in one.work.values())
    launches = count * (kernels * _LAUNCHES_OF_KERNEL + len(trace) * _LAUNCHES_OF_TURN)
    issues = sizes.tensors * _LAUNCHES_OF_UPDATE + count * len(trace) * _LAUNCHES_OF_WAIT
    return Parts(
        times=times(state, state),
        with_parameters={
            "step": times(params + state, params + state),
            "iteration": times(gathers + state, params + state),
        },
        groups=tuple(groups),
        backward_ms=backward_ms,
        idle_ms=forward[-1][1] + backward_ms - max(early_ms.values()),
        gathers_ms=gathers * one_way,
        limit="gathers" if forward_link_ms + backward_link_ms > 0.95 * (forward_ms + backward_ms) else "compute",
        launch_ms=launches * machine.launch_us / 1e3,
        issue_ms=issues * machine.launch_us / 1e3,
        contention=machine.contention,
    )


def _clock(turns: list[tuple[int, float]]) -> tuple[dict[int, float], float]:
    """When the first turn of each group begins, and when the last turn ends."""
    begins: dict[int, float] = {}
    now_ms = 0.0
    for group, ms in turns:
        begins.setdefault(group, now_ms)
        now_ms += ms
    return begins, now_ms


def _turns(
    sizes: Sizes, trace: Trace, training: Training, machine: Machine, phase: Phase
) -> tuple[list[tuple[int, float]], float]:
    """Groups and milliseconds of the turns of a pass, and those of its gathers and reductions, which it waits for."""
    gathered, shards = sum(sizes.gathered), training.shards
    link_bytes = (1 if phase == "forward" else 2) * (shards - 1) / shards * gathered  # the gather, and the reduction
    if phase == "backward" and training.replicas > 1:
        link_bytes += 2 * gathered / shards
    crosses_hosts = training.ranks > machine.devices_per_host
    link_ms = link_bytes / (machine.network_gb_per_s if crosses_hosts else machine.peer_gb_per_s) / 1e6
    turns = [(one.group, _turn_ms(one, sizes, training, machine)) for one in trace if one.phase == phase]
    longer = max(1.0, link_ms / sum(ms for _, ms in turns))
    return [(group, longer * ms) for group, ms in turns], link_ms


def _turn_ms(segment: Segment, sizes: Sizes, training: Training, machine: Machine) -> float:
    """Computation of one group's turn, and the copies that ``fully_shard`` makes for it."""
    shares, peak = reached.SHARES[segment.phase], machine.bf16_tflops * 1e9  # operations per ms
    if training.compute_dtype == "fp32":
        shares, peak = dict.fromkeys(shares, reached.FP32), machine.fp32_tflops * 1e9
    even, uneven = (share * machine.hbm_gb_per_s * 1e6 for share in (reached.HBM, reached.HBM_UNEVEN))  # bytes per ms
    ms = 0.0
    for kind, work in segment.work.items():
        operations_ms = work.flops / shares.get(kind, 1.0) / peak
        bytes_ms = work.nbytes / (uneven if kind == "uneven" else even)
        # The tiles of a product are written when they have been computed.
        ms += operations_ms + bytes_ms if kind == "matmul" else max(operations_ms, bytes_ms)
        ms += work.kernels * reached.KERNEL_US / 1e3
    params, gathered = sizes.params[segment.group], sizes.gathered[segment.group]
    moved = params + gathered  # cast into the buffers of the gather
    if training.shards > 1:
        moved += 2 * gathered  # and copied out of them
    if segment.phase == "backward":
        moved += 4 * gathered + params  # into the reduction, out of it, and cast
    ms += moved / uneven
    return ms * (1 + reached.GATHER_CONTENTION) if training.ranks > 1 else ms
