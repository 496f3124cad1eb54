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
from typing import NamedTuple

from ..planning.buckets import ShardSpec, plan_buckets
from .machine import Machine
from .model import local_shapes
from .trace import Trace
from .training import DTYPES, Training

Shapes = Sequence[Sequence[tuple[int, ...]]]

SLACK = 0.05
"""Share of the peak that an allocator cannot use when nearly full. With room to spare it reserves more, and needs less:
records of an H200 have 5 % with 78 % of the device in use, and up to 15 % where a third is."""


GRADIENTS_BEHIND = 5
"""Groups whose gradients are there at once, where they are freed in the backward: one at work, and four behind it."""


@dataclass(frozen=True)
class DeviceMemory:
    """The most that is allocated on a device, with its terms, which add up to it.

    Attributes:
        terms: what → bytes.
        when: the part of the iteration in which that is.
    """

    terms: Mapping[str, int]
    when: str

    @property
    def peak_bytes(self) -> int:
        """The peak that ``max_memory_allocated`` would say."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank that depend neither on the policy nor on activations, by group.

    Attributes:
        params: parameter shards, padded, and so their gradients.
        gathered: all parameters of the group in the compute dtype.
        state: of the optimizer.
        host: the arena, if all of the state is in it.
        host_with_params: the same with the parameters in it.
        tensors: how many parameters are trained.
    """

    params: tuple[int, ...]
    gathered: tuple[int, ...]
    state: int
    host: int
    host_with_params: int
    tensors: int


class Window(NamedTuple):
    """Device memory for parameters that live on the host, and for those that stay on the device nevertheless.

    ``frees_gradients``: in the backward, a few groups after their update.
    """

    nbytes: int
    staying_bytes: int
    frees_gradients: bool


def sizes_of(shapes: Shapes, training: Training) -> Sizes:
    """Compute them for the first rank, whose shards are the largest."""
    itemsize, compute_itemsize = DTYPES[training.dtype].itemsize, DTYPES[training.compute_dtype].itemsize
    local = [[math.prod(shape) for shape in local_shapes(group, training.shards)] for group in shapes]
    state_itemsizes = training.state_itemsizes()
    numels = [n for group in local for n in group]
    specs = [ShardSpec(n, tuple(size * n for size in state_itemsizes), True) for n in numels]
    with_params = [ShardSpec(n, tuple(size * n for size in (itemsize, *state_itemsizes)), True) for n in numels]
    return Sizes(
        params=tuple(itemsize * sum(group) for group in local),
        gathered=tuple(compute_itemsize * training.shards * sum(group) for group in local),
        state=sum(sum(spec.leaf_nbytes) for spec in specs),
        host=plan_buckets(specs, 1 << 62).home_nbytes if state_itemsizes else 0,
        host_with_params=plan_buckets(with_params, 1 << 62).home_nbytes,
        tensors=len(specs),
    )


def device_memory(
    sizes: Sizes,
    trace: Trace,
    training: Training,
    machine: Machine,
    *,
    resident_bytes: int,
    staging_bytes: int,
    window: Window | None = None,
) -> DeviceMemory:
    """Find the turn at which most is allocated.

    With updates in the backward too: a gradient that one has used goes in ``step()``, or ``GRADIENTS_BEHIND`` groups
    later where parameters live on the host. What comes in the backward and goes in the forward, of staging and of the
    window, adds nothing.

    Args:
        sizes: of the model's shards.
        trace: of one micro-batch.
        training: for what it is.
        machine: for what its libraries take.
        resident_bytes: state that stays on the device.
        staging_bytes: what the rest passes through.
        window: of parameters that live on the host.
    """
    always = {
        "parameters": sum(sizes.params) if window is None else window.staying_bytes,
        "window": 0 if window is None else window.nbytes,
        "optimizer state": resident_bytes,
        "staging": staging_bytes,
        "workspace": machine.workspace_bytes,
        "other": training.other_device_bytes,
    }
    # Of all but one micro-batch they are alive until the last backward.
    frees = window is not None and window.frees_gradients and training.micro_batches == 1
    moments = [_moment(sizes, trace, training, number, frees=frees) for number in range(len(trace.segments))]
    order = [one.group for one in trace.segments if one.phase == "backward"]
    last = {*order[-GRADIENTS_BEHIND:], len(sizes.params) - 1} if frees else range(len(sizes.params))
    step = DeviceMemory({"gradients": sum(sizes.params[group] for group in last)}, "step")
    highest = max([*moments, step], key=lambda one: one.peak_bytes)
    return DeviceMemory({name: n for name, n in {**always, **highest.terms}.items() if n}, highest.when)


def _moment(sizes: Sizes, trace: Trace, training: Training, number: int, *, frees: bool) -> DeviceMemory:
    segment = trace.segments[number]
    root = len(sizes.gathered) - 1
    gathered = sizes.gathered[root]
    if segment.group != root:
        gathered += sizes.gathered[segment.group]
    reducing = gradients = 0
    if segment.phase == "backward":
        if number + 1 < len(trace.segments) and training.shards > 1:
            gathered += sizes.gathered[trace.segments[number + 1].group]  # prefetched
        turns = [one.group for one in trace.segments[:number] if one.phase == "backward"]
        done = [group for group in turns if group != root]  # which is reduced at the very end
        gradients = sum(sizes.params[group] for group in (done[-GRADIENTS_BEHIND:] if frees else done))
        reducing = sizes.gathered[done[-1]] if done else 0
    elif training.shards > 1:
        gathered += sizes.gathered[segment.group]  # the flat buffer
    if training.micro_batches > 1:
        gradients = sum(sizes.params)  # of the micro-batches before
    labels = segment.peak_bytes_by_label
    terms = {"gathered": gathered, "gradients": gradients + reducing, **labels}
    return DeviceMemory(terms, f"{segment.phase} of group {segment.group}")
