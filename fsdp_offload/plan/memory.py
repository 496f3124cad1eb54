"""Bytes by place: the device's peak with its terms, and the host's. Pure arithmetic on shapes and a trace.

What ``fully_shard`` has on the device beside the shards, by turn of its groups (W shards, more than one)::

    forward of a group    its gathered parameters, and the flat buffer they came in, until the next group has its own
    backward of a group   its gathered parameters, the flat buffer of the group that comes next, and the gradients of
                          the group before it, on their way into the reduction
    all the while         the root's gathered parameters, and in the backward the shards of the gradients so far

With one shard nothing is gathered, but parameters are still copied to their compute dtype.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.curve import LASTING_POINTS
from .trace import Trace
from .training import DTYPES, Training

GRADIENTS_BEHIND = 5  # groups whose gradients exist, if updates free them in the backward: at work, and four behind


@dataclass(frozen=True)
class DeviceMemory:
    """The most that is allocated on a device: terms that add up to it, and the part of the iteration with the peak."""

    terms: Mapping[str, int]
    when: str

    @cached_property
    def peak_bytes(self) -> int:
        """The peak that ``max_memory_allocated`` would say."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class Sizes:
    """Shards of the first rank, which are the largest, by group."""

    numels: tuple[tuple[int, ...], ...]  # elements of each parameter's shard; the root is the last group
    itemsize: int  # of parameters; their gradients take the same
    state_itemsizes: tuple[int, ...]  # of each tensor of the optimizer's state
    params: tuple[int, ...]  # bytes of parameters
    gathered: tuple[int, ...]  # bytes of all parameters of the group in the compute dtype

    @staticmethod
    def of(shapes: Sequence[Sequence[tuple[int, ...]]], training: Training) -> "Sizes":
        """Compute them from the shapes of each group's parameters."""
        itemsize, shards = DTYPES[training.dtype].itemsize, training.shards
        numels = tuple(
            tuple(-(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1 for shape in group) for group in shapes
        )
        # Experts are the parameters with three dimensions: those of other ranks are not gathered.
        copies = [
            [shards // (training.expert_parallel if len(shape) == 3 else 1) for shape in group] for group in shapes
        ]
        whole = [sum(map(operator.mul, *pair)) for pair in zip(numels, copies, strict=True)]
        return Sizes(
            numels=numels,
            itemsize=itemsize,
            state_itemsizes=training.state_itemsizes(),
            params=tuple(itemsize * sum(group) for group in numels),
            gathered=tuple(DTYPES[training.compute_dtype].itemsize * numel for numel in whole),
        )

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(self.state_itemsizes) * sum(map(sum, self.numels))


@dataclass(frozen=True)
class Curve:
    """Follows what a model has on the device in each part of its iteration, of which ``step()`` is the last."""

    moments: tuple[DeviceMemory, ...]
    updates: tuple[bool, ...]  # whether updates may run in each, where those of the backward do

    @cached_property
    def peak_bytes(self) -> int:
        """The model's own peak."""
        return max(one.peak_bytes for one in self.moments)

    def room_bytes(self, phase: str) -> list[int]:
        """Return what the model leaves free below its own peak, in each moment of a phase."""
        return [self.peak_bytes - one.peak_bytes for one in self.moments if one.when.startswith(phase)]

    def with_blocks(self, resident: Mapping[str, int], passing_bytes: int = 0) -> DeviceMemory:
        """Find the moment in which most is allocated, with what is ``resident`` in all of them, by name.

        ``passing_bytes``: of blocks that are there where updates need them, and elsewhere below the model's own peak.
        """
        found = []
        for one, updates in zip(self.moments, self.updates, strict=True):
            passing = passing_bytes if updates else min(passing_bytes, self.peak_bytes - one.peak_bytes)
            found.append((one.peak_bytes + passing, -passing, one))
        _, passing, one = max(found, key=lambda one: one[:2])
        terms = {**resident, **one.terms, "blocks": resident.get("blocks", 0) - passing}
        return DeviceMemory({name: nbytes for name, nbytes in terms.items() if nbytes}, one.when)


def curve_of(sizes: Sizes, trace: Trace, training: Training, *, frees: bool = False) -> Curve:
    """Compute what a model has on the device; it ``frees`` gradients in the backward, or all in ``step()``."""
    root, shared, moments, updates, done = len(sizes.params) - 1, training.shards > 1, [], [], list[int]()
    behind = min(LASTING_POINTS, (len(trace) * 3 // 2 + 1) // 8)  # step(), of gathers, reductions, and it
    for number, segment in enumerate(trace):
        gathered = sum(sizes.gathered[group] for group in {segment.group, root})
        gradients = sum(sizes.params) if training.micro_batches > 1 else 0  # of the micro-batches before
        updates.append(bool(done) if segment.phase == "backward" else number < behind)
        if segment.phase == "backward":
            if number + 1 < len(trace) and shared:
                gathered += sizes.gathered[trace[number + 1].group]  # prefetched
            gradients = gradients or sum(sizes.params[group] for group in done[-GRADIENTS_BEHIND if frees else 0 :])
            gradients += sizes.gathered[done[-1]] if done else 0  # on its way into the reduction
            if segment.group != root:  # which is reduced at the very end
                done.append(segment.group)
        elif shared:
            gathered += sizes.gathered[segment.group]  # the flat buffer
        terms = {"gathered": gathered, "gradients": gradients, "activations": segment.peak_bytes}
        moments.append(DeviceMemory(terms, f"{segment.phase} of group {segment.group}"))
    last = {*done[-GRADIENTS_BEHIND:], root} if frees else range(root + 1)
    moments.append(DeviceMemory({"gradients": sum(sizes.params[group] for group in last)}, "step"))
    return Curve(tuple(moments), (*updates, True))
