"""Milliseconds: the parts of an iteration, each alone, and what an iteration of each policy takes. Pure arithmetic.

A kernel takes what its operations or its bytes take, whichever is more (a roofline), and a little for itself. With
forward F, backward B, update U, all copies both ways at once T, and a share r of the loads ahead of the step, an
iteration takes::

    "step"                     F + B + clip + max(U, (1 - r) T)
    "forward", "iteration"     F + B + clip + what the forward waits for state, and what of U is not in these waits

How long it waits, :mod:`.waits` computes group by group.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..planning.bound import Times
from ..planning.choices import Choice
from .machine import Machine
from .memory import Sizes
from .trace import Phase, Segment, Trace
from .training import Training


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
        communication_ms: gathers and reductions, which run beside the computation as far as it lasts.
    """

    times: Times
    forward: tuple[Turn, ...]
    backward: tuple[Turn, ...]
    state_bytes: tuple[int, ...]
    communication_ms: float

    @property
    def last_backward_ms(self) -> float:
        """Of the last micro-batch."""
        return sum(turn.ms for turn in self.backward)


class Estimate(NamedTuple):
    """What an iteration takes, and what decides that."""

    ms: float
    limit: str


_UNEVEN_SHARE = 0.65
"""Of the rate of device memory that kernels reach which reduce or rearrange, and the copies of ``fully_shard``."""


def parts_of(sizes: Sizes, trace: Trace, training: Training, machine: Machine) -> Parts:
    """Compute the parts of an iteration."""
    forward, forward_link = _pass(sizes, trace, training, machine, "forward")
    backward, backward_link = _pass(sizes, trace, training, machine, "backward")
    first_forward, last_backward = (sum(turn.ms for turn in turns) for turns in (forward, backward))
    count = training.micro_batches
    params, state = sum(sizes.params), sizes.state
    by_memory = 1e3 / machine.memory_gb_per_s / 1e9
    one_way_gb_per_s = machine.host_gb_per_s / _sharing(training, machine)
    two_way_gb_per_s = min(machine.two_way_gb_per_s, one_way_gb_per_s)
    times = Times(
        forward_ms=first_forward,
        backward_ms=count * (first_forward + last_backward) - first_forward,
        update_ms=(3 * params + 2 * state) * by_memory,  # reads all, and writes all but the gradients
        clip_ms=3 * params * by_memory if training.clip else 0.0,  # the norm reads, scaling reads and writes
        load_ms=state / min(machine.load_gb_per_s, one_way_gb_per_s) / 1e6,
        store_ms=state / min(machine.store_gb_per_s, one_way_gb_per_s) / 1e6,
        two_way_ms=2 * state / two_way_gb_per_s / 1e6,
    )
    state_bytes = tuple(round(state * nbytes / params) for nbytes in sizes.params) if params else ()
    return Parts(times, forward, backward, state_bytes, count * (forward_link + backward_link))


def _sharing(training: Training, machine: Machine) -> int:
    """How many ranks copy from and to the memory of one host."""
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
    ms = sum(
        count
        * max(
            work.flops / tflops.get(work.kind, 1.0) / 1e9,
            work.nbytes / (uneven if work.kind == "uneven" else even),
        )
        for work, count in segment.work.items()
    )
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
"""Of an iteration: from there on, the host link decides how long it takes."""


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
    times = parts.times
    passes, update, clip = times.forward_ms + times.backward_ms, times.update_ms, times.clip_ms
    compute_name = "gathers" if parts.communication_ms > 0.95 * passes else "compute"
    if choice is None:
        return Estimate(passes + clip + update, compute_name)
    two_way, load = times.two_way_ms * (1 - kept), times.load_ms * (1 - kept)
    if choice.overlap == "step":
        moving = two_way * (1 - (min(staged, times.backward_ms / load) if load else staged))
        return Estimate(passes + clip + max(update, moving), "host link" if moving > update else compute_name)
    in_waits = min(1.0, stall_ms / two_way) * (1 - kept) if two_way else 0.0
    ms = passes + stall_ms + (1 - in_waits) * update
    ms = ms + clip if choice.overlap == "forward" else max(ms, two_way)
    return Estimate(ms, "host link" if stall_ms > _WAITS * ms else compute_name)
