"""Bytes by place: the device's peak with its terms, and the host's. Pure arithmetic on shapes and a trace.

What ``fully_shard`` has on the device beside the shards, by turn of its groups (W shards, more than one)::

    forward of a group    its gathered parameters, and the flat buffer they came in, until the next group has its own
    backward of a group   its gathered parameters, the flat buffer of the group that comes next, and the gradients of
                          the group before it, on their way into the reduction
    all the while         the root's gathered parameters, and in the backward the shards of the gradients so far

With one shard nothing is gathered, but parameters are still copied to their compute dtype.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..planning.buckets import ShardSpec, plan_buckets
from .choices import Choice
from .machine import WORKSPACE_BYTES
from .trace import Trace
from .training import DTYPES, Training

GRADIENTS_BEHIND = 5
"""Groups whose gradients exist at once, if updates free them in the backward: one at work, and four behind it."""


@dataclass(frozen=True)
class DeviceMemory:
    """The most that is allocated on a device: terms that add up to it, and the part of the iteration with the peak."""

    terms: Mapping[str, int]
    when: str

    @property
    def peak_bytes(self) -> int:
        """The peak that ``max_memory_allocated`` would say."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Sizes:
    """Bytes of the first rank, whose shards are the largest, by group."""

    params: tuple[int, ...]  # parameter shards, padded; their gradients take the same
    gathered: tuple[int, ...]  # all parameters of the group in the compute dtype
    state: int  # of the optimizer
    host: int  # the arena with all of the state
    host_with_params: int  # and with the parameters beside it
    tensors: int  # how many parameters are trained

    @staticmethod
    def of(shapes: Sequence[Sequence[tuple[int, ...]]], training: Training) -> "Sizes":
        """Compute them from the shapes of each group's parameters."""
        itemsize, shards = DTYPES[training.dtype].itemsize, training.shards
        local = [[-(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1 for shape in one] for one in shapes]
        sizes = training.state_itemsizes()

        def host_bytes(itemsizes: tuple[int, ...]) -> int:
            specs = [ShardSpec(n, tuple(size * n for size in itemsizes), True) for group in local for n in group]
            return plan_buckets(specs, 1 << 62).home_nbytes if itemsizes else 0

        return Sizes(
            params=tuple(itemsize * sum(group) for group in local),
            gathered=tuple(DTYPES[training.compute_dtype].itemsize * shards * sum(group) for group in local),
            state=sum(sizes) * sum(map(sum, local)),
            host=host_bytes(sizes),
            host_with_params=host_bytes((itemsize, *sizes)),
            tensors=sum(map(len, local)),
        )

    def offloaded(self, choice: Choice | None) -> int:
        """What a policy offloads, or would: the state, and with it the parameters."""
        return self.state + (sum(self.params) if choice is not None and choice.parameters else 0)

    def host_bytes(self, choice: Choice | None, kept: float) -> int:
        """Pinned memory: what stays from the beginning has no place there, what is learnt to stay has."""
        if choice is None:
            return 0
        all_bytes, offloaded = self.host_with_params if choice.parameters else self.host, self.offloaded(choice)
        return all_bytes - (0 if choice.share(offloaded).staying_is_learnt else int(kept * offloaded))


def device_memory(sizes: Sizes, trace: Trace, training: Training, choice: Choice | None, kept: float) -> DeviceMemory:
    """Find the turn at which most is allocated, if that share of what is offloaded stays on the device.

    With updates in the backward, a gradient is freed in ``step()``, or ``GRADIENTS_BEHIND`` groups later if parameters
    live on the host. What comes in the backward and goes in the forward, of staging and of the window, adds nothing.
    """
    params, window, staging, frees = sum(sizes.params), 0, 0, False
    moving = sizes.offloaded(choice) - int(kept * sizes.offloaded(choice))
    if choice is not None:
        staging = min(moving, choice.staging_bytes(sizes.state, params if choice.parameters else 0))
    if choice is not None and choice.parameters:
        window = min(moving, choice.share(params + sizes.state).window_bytes(sizes.params))
        # Clipping may change gradients, and those of all but one micro-batch are alive until the last backward.
        frees = choice.overlap == "iteration" and not training.clip and training.micro_batches == 1
        params = int(kept * params)
    root = len(sizes.params) - 1
    reduced = [one.group for one in trace if one.phase == "backward" and one.group != root]  # the root at the very end
    last = {*reduced[-GRADIENTS_BEHIND:], root} if frees else range(root + 1)
    moments = [_moment(sizes, trace, training, number, frees=frees) for number in range(len(trace))]
    moments.append(DeviceMemory({"gradients": sum(sizes.params[group] for group in last)}, "step"))
    highest = max(moments, key=lambda one: one.peak_bytes)
    terms = {
        "parameters": params,
        "window": window,
        "optimizer state": int(kept * sizes.state),
        "staging": staging,
        "workspace": WORKSPACE_BYTES,
        "other": training.other_device_bytes,
        **highest.terms,
    }
    return DeviceMemory({name: nbytes for name, nbytes in terms.items() if nbytes}, highest.when)


def _moment(sizes: Sizes, trace: Trace, training: Training, number: int, *, frees: bool) -> DeviceMemory:
    segment, root = trace[number], len(sizes.gathered) - 1
    gathered = sum(sizes.gathered[group] for group in {segment.group, root})
    gradients = sum(sizes.params) if training.micro_batches > 1 else 0  # of the micro-batches before
    if segment.phase == "backward":
        if number + 1 < len(trace) and training.shards > 1:
            gathered += sizes.gathered[trace[number + 1].group]  # prefetched
        done = [one.group for one in trace[:number] if one.phase == "backward" and one.group != root]
        there = done[-GRADIENTS_BEHIND:] if frees else done
        gradients = gradients or sum(sizes.params[group] for group in there)
        gradients += sizes.gathered[done[-1]] if done else 0  # on its way into the reduction
    elif training.shards > 1:
        gathered += sizes.gathered[segment.group]  # the flat buffer
    terms = {"gathered": gathered, "gradients": gradients, "activations": segment.peak_bytes}
    return DeviceMemory(terms, f"{segment.phase} of group {segment.group}")
