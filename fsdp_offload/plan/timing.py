"""Milliseconds: the parts of an iteration, each alone, and what an iteration of each policy takes. Pure arithmetic.

A kernel takes what its operations or its bytes take, whichever is more (a roofline), and a little for itself. With
forward F, backward B, update U, all loads L and stores S, both at once T, of which transfers beside computation take a
share c longer, a share r of the loads is ahead of the step, and T' is those of the root::

    "step"           F + B + clip + max(U, (1 - r) T)
    "forward"        B + clip + max(F + U + T', (1 + c) (1 - r) T)
    "iteration"      max(F + B + U + T', (1 + c) T)

The root's gradients (embedding and head) are final last, and its parameters are wanted first: nothing hides T', unless
it stays on the device. With several micro-batches, transfers can hide behind the first forward and the last backward; F
is the first forward, and B all that is left.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ..planning.bound import Times
from ..planning.choices import Choice
from .machine import Machine
from .memory import Sizes
from .trace import Phase, Trace
from .training import Training


@dataclass(frozen=True)
class Parts:
    """The parts of an iteration in milliseconds, each alone.

    Attributes:
        times: in the words of the bound: the first forward, and all that is left as backward; copies of all state.
        last_backward_ms: of the last micro-batch.
        root_share: of the state, that of the root group.
        communication_ms: gathers and reductions, which run beside the computation as far as it lasts.
    """

    times: Times
    last_backward_ms: float
    root_share: float
    communication_ms: float


class Estimate(NamedTuple):
    """What an iteration takes, and what decides that."""

    ms: float
    limit: str


def parts_of(sizes: Sizes, trace: Trace, training: Training, machine: Machine) -> Parts:
    """Compute the parts of an iteration."""
    forward, forward_link = _pass(sizes, trace, training, machine, "forward")
    backward, backward_link = _pass(sizes, trace, training, machine, "backward")
    first_forward, last_backward = max(forward, forward_link), max(backward, backward_link)
    count = training.micro_batches
    params, state = sum(sizes.params), sizes.state
    by_memory = 1e3 / machine.memory_gb_per_s / 1e9
    two_way_gb_per_s = min(machine.two_way_gb_per_s, machine.host_gb_per_s / _sharing(training, machine))
    one_way_gb_per_s = machine.host_gb_per_s / _sharing(training, machine)
    times = Times(
        forward_ms=first_forward,
        backward_ms=count * (first_forward + last_backward) - first_forward,
        update_ms=(3 * params + 2 * state) * by_memory,  # reads all, and writes all but the gradients
        clip_ms=3 * params * by_memory if training.clip else 0.0,  # the norm reads, scaling reads and writes
        load_ms=state / min(machine.load_gb_per_s, one_way_gb_per_s) / 1e6,
        store_ms=state / min(machine.store_gb_per_s, one_way_gb_per_s) / 1e6,
        two_way_ms=2 * state / two_way_gb_per_s / 1e6,
    )
    root_share = sizes.params[-1] / params if params else 0.0
    return Parts(times, last_backward, root_share, count * (forward_link + backward_link))


def _sharing(training: Training, machine: Machine) -> int:
    """How many ranks copy from and to the memory of one host."""
    return min(training.ranks, machine.devices_per_host)


def _pass(sizes: Sizes, trace: Trace, training: Training, machine: Machine, phase: Phase) -> tuple[float, float]:
    """Computation of one pass of one micro-batch, and its communication."""
    fp32 = training.compute_dtype == "fp32"
    matmul = machine.matmul_tflops if phase == "forward" else machine.matmul_backward_tflops
    tflops = {
        "matmul": machine.fp32_tflops if fp32 else matmul,
        "attention": machine.fp32_tflops if fp32 else machine.attention_tflops,
        "attention_backward": machine.fp32_tflops if fp32 else machine.attention_backward_tflops,
        "memory": 1.0,  # no operations to speak of
    }
    compute_ms = sum(
        count * (max(work.flops / tflops[work.kind] / 1e9, work.nbytes / machine.memory_gb_per_s / 1e6))
        for work, count in trace.work[phase].items()
    )
    compute_ms += sum(trace.work[phase].values()) * machine.kernel_us / 1e3
    gathered = sum(sizes.gathered)
    moved = sum(sizes.params) + gathered  # cast into the buffers of the gather
    if training.shards > 1:
        moved += 2 * gathered  # and copied out of them
    if phase == "backward":
        moved += 4 * gathered + sum(sizes.params)  # into the reduction, out of it, and cast
    compute_ms += moved / machine.memory_gb_per_s / 1e6
    if training.ranks == 1:
        return compute_ms, 0.0
    crosses_hosts = training.ranks > machine.devices_per_host
    rate = machine.network_gb_per_s if crosses_hosts else machine.peer_gb_per_s
    share = (training.shards - 1) / training.shards
    passes = 1 if phase == "forward" else 2  # the gather, and the reduction
    link_bytes = passes * share * gathered
    if phase == "backward" and training.replicas > 1:
        link_bytes += 2 * gathered / training.shards
    return compute_ms * (1 + machine.gather_contention), link_bytes / rate / 1e6


_BACKWARD_LINK_SHARE, _FORWARD_LINK_SHARE = 0.5, 0.75
"""How busy "auto" lets the link be in its window; as ``residency.py`` has it."""


def kept_share(choice: Choice, parts: Parts, machine: Machine) -> float:
    """The share of the state that a choice keeps on the device, by measuring transfers beside computation."""
    times = parts.times
    if choice.keeps == "none" or choice.overlap == "step" or not times.two_way_ms:
        return 0.0  # where loads are ahead of the step, nothing waits that "auto" could see
    window_ms = times.forward_ms * _FORWARD_LINK_SHARE
    if choice.overlap == "iteration":
        window_ms = (times.forward_ms + parts.last_backward_ms + times.update_ms) * _BACKWARD_LINK_SHARE
    return max(0.0, 1 - window_ms / times.two_way_ms / (1 + machine.contention))


def estimate(
    choice: Choice | None, parts: Parts, machine: Machine, *, kept: float = 0.0, staged: float = 0.0
) -> Estimate:
    """Estimate an iteration.

    Args:
        choice: ``None`` is no offload.
        parts: of the iteration.
        machine: for its contention.
        kept: the share of the state that stays on the device.
        staged: the share of what moves that staging holds; it is loaded as far as the backward lasts.
    """
    times = parts.times
    forward, backward, update, clip = times.forward_ms, times.backward_ms, times.update_ms, times.clip_ms
    compute_name = "gathers" if parts.communication_ms > 0.95 * (forward + backward) else "compute"
    if choice is None:
        return Estimate(forward + backward + clip + update, compute_name)
    two_way, load = times.two_way_ms * (1 - kept), times.load_ms * (1 - kept)
    root = max(0.0, parts.root_share - kept) * times.two_way_ms
    slower = 1 + machine.contention
    left = 1 - (min(staged, times.backward_ms / load) if load else staged)
    if choice.overlap == "step" and choice.keeps == "auto":
        before, computing, moving = backward + clip, forward + max(update, left * load), slower * times.store_ms
    elif choice.overlap == "step":
        before, computing, moving = forward + backward + clip, update, left * two_way
    elif choice.overlap == "forward":
        before, computing, moving = backward + clip, forward + update + root, slower * left * two_way
    else:
        before = backward - parts.last_backward_ms
        computing, moving = forward + parts.last_backward_ms + update + root, slower * two_way
    return Estimate(before + max(computing, moving), "host link" if moving > computing else compute_name)
