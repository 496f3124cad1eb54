"""Estimate the parts of an iteration in milliseconds, and from them an iteration under each policy. Pure arithmetic.

An iteration without offload is forwards, backwards, clipping and the update. ``"step"`` adds the time by which copies
of state exceed the update; ``"forward"`` and ``"iteration"`` add the time that a forward waits for updates. Parameters
on the host add the time by which their loads exceed the pass that uses them. If the host needs longer to launch the
kernels, its time counts instead.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..core.loop import BACKWARD
from ..core.room import Reading
from . import machine as reached
from .blocks import Blocks
from .machine import Machine
from .memory import Curve, Sizes
from .trace import Phase, Segment, Trace
from .training import DTYPES, Training


class Group(NamedTuple):
    """Bytes of a ``fully_shard`` group that a policy may offload, and the time that the link has for them."""

    state_bytes: int
    parameter_bytes: int
    wanted_ms: float  # from the beginning of a forward to the group's first turn
    early_ms: float  # from the group's final gradients to the end of the backward


@dataclass(frozen=True)
class Parts:
    """Parts of an iteration in milliseconds, each estimated alone."""

    forward_ms: float  # of one micro-batch
    backward_ms: float
    micro_batches: int
    update_ms: float
    clip_ms: float
    one_way: float  # ms for each byte that is copied one way
    two_way: float  # ms for each byte of copies both ways at once
    limit: str  # of the passes: compute, or gathers and reductions if they take longer
    launch_ms: float  # the host's time for all passes
    issue_ms: float  # the host's time in addition, for each update of a bucket and each gather from the host
    contention: float  # share by which copies and computation slow each other down
    groups: tuple[Group, ...]  # in the order of the forward, the root first

    @property
    def passes_ms(self) -> float:
        """Time of all forwards and backwards."""
        return self.micro_batches * (self.forward_ms + self.backward_ms)

    def copy_ms(self, loaded: int, stored: int) -> float:
        """Return the time to copy these bytes in both directions at once."""
        return max(max(loaded, stored) * self.one_way, (loaded + stored) * self.two_way)

    def late_ms(self, blocks: Blocks, ahead_bytes: float, loaded_bytes: float) -> float:
        """Return the time that a forward waits for updates: that of the latest group.

        The link moves the groups in the order of the forward once their gradients are final, after the backward or in
        it. The first groups stay on the device. ``ahead_bytes`` are loaded before the gradients are final,
        ``loaded_bytes`` in the whole backward, in the order of the backward.
        """
        late, before, ms = 0.0, -blocks.kept_state - blocks.kept_params, 2 * (1 + self.contention) * self.two_way
        for group in self.groups:
            moved = before + group.state_bytes + group.parameter_bytes * blocks.policy.parameters
            if moved > 0:
                hidden_ms = group.wanted_ms + group.early_ms * blocks.policy.updates_in_backward
                late = max(late, (moved - ahead_bytes) * ms - hidden_ms)
                late = max(late, (loaded_bytes - max(0, before)) * ms - self.backward_ms - group.wanted_ms)
            before = moved
        return late


class Estimate(NamedTuple):
    """One iteration: the times that training would measure, and what limits them."""

    reading: Reading
    limit: str  # compute, gathers, link, or launches


def estimate(blocks: Blocks | None, parts: Parts, curve: Curve) -> Estimate:
    """Estimate an iteration with these blocks (``None``: no offload); ``curve`` says what room the model leaves."""
    host_ms, passes, slower = parts.launch_ms, parts.passes_ms, 1 + parts.contention
    if blocks is None:
        found = Estimate(Reading(0.0, passes + parts.clip_ms + parts.update_ms), parts.limit)
    else:
        state = sum(group.state_bytes for group in parts.groups) - blocks.kept_state
        params = sum(group.parameter_bytes for group in parts.groups) - blocks.kept_params
        params *= blocks.policy.parameters
        host_ms += parts.issue_ms * blocks.uses
        if not blocks.policy.runs_on_into_forward:
            # Updates run between backward and forward, loads of parameters during computation.
            gathers_ms = 2 * parts.micro_batches * params * parts.one_way
            ms = max(passes + parts.contention * min(gathers_ms, passes), slower * gathers_ms, host_ms)
            # The first blocks are loaded in the backward. Nothing is stored then, and a late host makes it longer.
            backward_ms = parts.backward_ms * max(1.0, host_ms / passes)
            ahead = 0 if params else min(state, blocks.passing_bytes, int(backward_ms / parts.one_way))
            after_ms = max(parts.update_ms, parts.copy_ms(state + params - ahead, state + params))
            in_step_ms = after_ms - parts.update_ms
            stalled_ms = max(0.0, slower * gathers_ms - passes) + in_step_ms
            reading = Reading(stalled_ms, ms + parts.clip_ms + after_ms, in_step_ms=in_step_ms)
            return Estimate(reading, "link" if stalled_ms > 1e-4 * reading.iteration_ms else parts.limit)
        found = _during_passes(blocks, parts, state, params, curve)
    if host_ms <= found.reading.iteration_ms:  # the host launches while the device waits for state
        return found
    return Estimate(found.reading._replace(iteration_ms=host_ms), "launches")


def _during_passes(blocks: Blocks, parts: Parts, state: int, params: int, curve: Curve) -> Estimate:
    """Estimate ``"forward"`` and ``"iteration"``: updates run during the forward, or during the backward as well.

    Below its own peak, the model leaves room for loads ahead, and for parameters between their update and the next
    forward. Items that are not on the device at the peak are loaded in the backward.
    """
    policy, passes, stored = blocks.policy, parts.passes_ms, state + params
    if policy.updates_in_backward and parts.clip_ms:
        # To be able to roll back, kept state is stored as well, and so are the parameters from before the update.
        stored = sum(group.state_bytes + group.parameter_bytes for group in parts.groups)
    count, slower = parts.micro_batches, 1 + parts.contention
    again = blocks.again_bytes(curve.room_bytes("forward")) * policy.parameters  # loaded in each forward
    turned = max(0, params - blocks.turning_bytes)  # and in each backward
    copies_ms = parts.copy_ms(state + count * (again + turned), stored)
    room_bytes = min(curve.room_bytes("backward")[-1], curve.room_bytes("step")[0])
    if policy.updates_in_backward:  # without room, all blocks are still busy with earlier groups
        ahead = (room_bytes, room_bytes - blocks.passing_bytes)
        loaded, others = state + turned, count - 1
    else:
        ahead = (min(room_bytes + blocks.passing_bytes, int(parts.backward_ms / parts.one_way)),) * 2
        loaded, others = 0, count
    late_ms, stalled_ms = (parts.late_ms(blocks, nbytes, loaded) for nbytes in ahead)
    if not policy.updates_in_backward:  # blocks of loads ahead must be stored before the forward needs their room
        left = [state - blocks.passing_bytes - nbytes for nbytes in curve.room_bytes("forward")]
        pairs = zip(left, parts.groups, strict=False)
        leaves_ms = max(2 * slower * parts.two_way * nbytes - group.wanted_ms for nbytes, group in pairs)
        late_ms, stalled_ms = max(late_ms, leaves_ms), max(stalled_ms, leaves_ms)
    elif blocks.is_full and not policy.parameters and copies_ms > BACKWARD * passes / count:
        # Some updates run on into the forward (``LATER``): the link rests from its last gather to the first reduction.
        last = parts.groups[-1]
        rests_ms = parts.forward_ms - last.wanted_ms + parts.backward_ms - last.early_ms
        late_ms = min(late_ms, max(0.0, slower * copies_ms + rests_ms - passes))
    excess_ms = count * max(0.0, slower * parts.copy_ms(again, 0) - parts.forward_ms)
    excess_ms += others * max(0.0, slower * parts.copy_ms(turned, 0) - parts.backward_ms)
    ms = passes + parts.contention * min(copies_ms, passes) + parts.clip_ms + late_ms + excess_ms
    # Add the updates, less the share ``late_ms / copies_ms`` of them (at most ``late_ms``) that ``late_ms`` contains.
    ms += parts.update_ms - min(late_ms, parts.update_ms * min(1.0, late_ms / max(copies_ms, 1e-9)))
    is_late = late_ms + excess_ms > 0.05 * ms or copies_ms > ms
    return Estimate(Reading(stalled_ms + excess_ms, max(ms, copies_ms)), "link" if is_late else parts.limit)


# The host's time in Python, counted in kernel launches of a plain loop: for a kernel of a model with autograd, a turn
# of a fully_shard group, and for moving and updating a bucket. The first two are from two batches of
# 2026-11-23-h200x1-plan-auto.jsonl in which the device waited for the host, the last from 2026-11-25-h100-core.txt.
_LAUNCHES_OF_KERNEL, _LAUNCHES_OF_TURN, _LAUNCHES_OF_USE = 6, 190, 45


def parts_of(sizes: Sizes, trace: Trace, training: Training, machine: Machine) -> Parts:
    """Compute the parts of an iteration."""
    wanted_ms, forward_ms, forward_link_ms = _pass(sizes, trace, training, machine, "forward")
    early_ms, backward_ms, backward_link_ms = _pass(sizes, trace, training, machine, "backward")
    early_ms[trace[0].group] = 0.0  # the root is reduced last
    params, state, count = sum(sizes.params), sizes.state, training.micro_batches
    uneven, update = 1 / _bytes_per_ms(machine)[1], 1e-6 / reached.UPDATE / machine.hbm_gb_per_s
    two_way = machine.two_way_gb_per_s(training.ranks)
    groups = list[Group]()
    for group in dict.fromkeys((*wanted_ms, *range(len(sizes.params)))):
        own, times_ms = sizes.params[group], [times.get(group, 0.0) for times in (wanted_ms, early_ms)]
        groups.append(Group(round(state * own / max(1, params)), own, *times_ms))
    kernels = sum(work.kernels for one in trace for work in one.work.values())
    launches = count * (kernels * _LAUNCHES_OF_KERNEL + len(trace) * _LAUNCHES_OF_TURN)
    return Parts(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        micro_batches=count,
        update_ms=(3 * params + 2 * state) * update,  # reads all, and writes all but the gradients
        clip_ms=3 * params * uneven if training.clip else 0.0,  # the norm reads, scaling reads and writes
        one_way=1e-6 / min(machine.link_gb_per_s, two_way),
        two_way=1e-6 / two_way,
        limit="gathers" if forward_link_ms + backward_link_ms > 0.95 * (forward_ms + backward_ms) else "compute",
        launch_ms=launches * machine.launch_us / 1e3,
        issue_ms=_LAUNCHES_OF_USE * machine.launch_us / 1e3,
        contention=machine.contention,
        groups=tuple(groups),
    )


def _pass(
    sizes: Sizes, trace: Trace, training: Training, machine: Machine, phase: Phase
) -> tuple[dict[int, float], float, float]:
    """Return ms before each group's first turn (backward: after its last turn), ms of the pass, ms of its transfers."""
    gathered, shards = sum(sizes.gathered), training.shards
    link_bytes = (1 if phase == "forward" else 2) * (shards - 1) / shards * gathered  # the gather, and the reduction
    if phase == "backward" and training.replicas > 1:
        link_bytes += 2 * gathered / shards
    crosses_hosts = training.ranks > machine.devices_per_host
    link_ms = link_bytes / (machine.network_gb_per_s if crosses_hosts else machine.peer_gb_per_s) / 1e6
    turns = [(one.group, _turn_ms(one, sizes, training, machine)) for one in trace if one.phase == phase]
    longer = max(1.0, link_ms / sum(ms for _, ms in turns))
    begins: dict[int, float] = {}
    now_ms = 0.0
    for group, ms in turns if phase == "forward" else turns[::-1]:
        begins.setdefault(group, now_ms)
        now_ms += longer * ms
    return begins, now_ms, link_ms


def _bytes_per_ms(machine: Machine) -> tuple[float, float]:
    """Return bytes per ms of kernels that read and write in order, and of other kernels, which the die may limit."""
    even = reached.HBM * machine.hbm_gb_per_s * 1e6
    return even, min(even, reached.UNEVEN * machine.die_gb_per_s * 1e6)


def _turn_ms(segment: Segment, sizes: Sizes, training: Training, machine: Machine) -> float:
    """Estimate the computation of one group's turn with the copies that ``fully_shard`` makes for it."""
    shares, peak = reached.SHARES[segment.phase], machine.bf16_tflops * 1e9  # operations per ms
    if training.compute_dtype == "fp32":
        shares, peak = dict.fromkeys(shares, reached.FP32), machine.fp32_tflops * 1e9
    even, uneven = _bytes_per_ms(machine)
    peers = machine.peer_gb_per_s if training.expert_parallel <= machine.devices_per_host else machine.network_gb_per_s
    ms = 0.0
    for kind, work in segment.work.items():
        if kind == "exchange":  # all but this rank's own part comes from other ranks
            ms += work.nbytes / 2 * (1 - 1 / training.expert_parallel) / peers / 1e6
            continue
        share = shares.get(kind, 1.0)
        if training.deterministic and work.heads:
            share = reached.DETERMINISTIC[kind]
            if kind == "attention_backward":  # heads are divided until each multiprocessor has a part
                parts = (heads := work.heads / work.kernels) * -(-reached.MULTIPROCESSORS // heads)
                share *= parts / reached.MULTIPROCESSORS / -(-parts // reached.MULTIPROCESSORS)
        operations_ms = work.flops / share / peak
        bytes_ms = work.nbytes / (uneven if kind == "uneven" else even)
        # The tiles of a product pass the caches of the die before and after they are computed.
        tiles_ms = work.nbytes / machine.die_gb_per_s / 1e6 if kind == "matmul" else 0.0
        ms += max(operations_ms + tiles_ms, bytes_ms)
        ms += work.kernels * reached.KERNEL_US / 1e3
    params, gathered, moved = sizes.params[segment.group], sizes.gathered[segment.group], 0
    if segment.phase == "forward" or segment.group + 1 < len(sizes.params):  # the root stays gathered
        moved += params + gathered  # cast into the buffers of the gather
        moved += 2 * gathered if training.shards > 1 else 0  # and copied out of them
    if segment.phase == "backward":
        reduced = gathered * DTYPES[training.dtype].itemsize // DTYPES[training.compute_dtype].itemsize
        moved += gathered + 2 * reduced + params  # cast into the reduction, and out of it
    ms += moved / uneven
    return ms * (1 + reached.GATHER_CONTENTION) if training.ranks > 1 else ms
