"""Device memory in each part of an iteration, and the peak with its terms. Pure arithmetic on shapes and a trace.

In addition to the shards, ``fully_shard`` has on the device, by turn of its groups (with more than one shard)::

    forward of a group    its gathered parameters, and the flat buffer they came in, until the next group has its own
    backward of a group   its gathered parameters, the flat buffer of the group that comes next, and the gradients of
                          the group before it, on their way into the reduction
    all the time          the root's gathered parameters, and in the backward the shards of the gradients so far

With one shard nothing is gathered, but parameters are still cast to their compute dtype.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.curve import LASTING_POINTS
from .trace import Trace
from .training import DTYPES, Training

GRADIENTS_BEHIND = 5  # groups with gradients at a time, if updates in the backward free them: the last five


@dataclass(frozen=True)
class DeviceMemory:
    """Peak of a device's memory: the terms that add up to it, and the part of the iteration in which it is reached."""

    terms: Mapping[str, int]
    when: str

    @cached_property
    def peak_bytes(self) -> int:
        """The peak, as ``max_memory_allocated`` reports it."""
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
        """Compute the sizes from the shapes of each group's parameters."""
        itemsize, shards, numels, gathered = DTYPES[training.dtype].itemsize, training.shards, [], []
        for group in shapes:
            numels.append(tuple(-(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1 for shape in group))
            # Experts are the parameters with three dimensions: those of other ranks are not gathered.
            copies = [shards // (training.expert_parallel if len(shape) == 3 else 1) for shape in group]
            gathered.append(DTYPES[training.compute_dtype].itemsize * sum(map(operator.mul, numels[-1], copies)))
        params = tuple(itemsize * sum(group) for group in numels)
        return Sizes(tuple(numels), itemsize, training.state_itemsizes(), params, tuple(gathered))

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(self.state_itemsizes) * sum(map(sum, self.numels))


@dataclass(frozen=True)
class Curve:
    """Device memory of a model in each part of its iteration, of which ``step()`` is the last."""

    moments: tuple[DeviceMemory, ...]
    updates: tuple[bool, ...]  # by moment: updates may run then, if the policy updates in the backward

    @cached_property
    def peak_bytes(self) -> int:
        """The model's own peak."""
        return max(one.peak_bytes for one in self.moments)

    def room_bytes(self, phase: str) -> list[int]:
        """Return what the model leaves free below its own peak, by moment of ``phase``."""
        return [self.peak_bytes - one.peak_bytes for one in self.moments if one.when.startswith(phase)]

    def with_blocks(self, resident: Mapping[str, int], passing_bytes: int = 0) -> DeviceMemory:
        """Find the peak of the model together with blocks.

        ``resident``: bytes by name that are there in all moments. ``passing_bytes``: blocks that are there in moments
        with updates, and elsewhere as far as they fit below the model's own peak.
        """
        found = []
        for one, updates in zip(self.moments, self.updates, strict=True):
            passing = passing_bytes if updates else min(passing_bytes, self.peak_bytes - one.peak_bytes)
            found.append((one.peak_bytes + passing, -passing, one))
        _, passing, one = max(found, key=lambda one: one[:2])
        terms = {**resident, **one.terms, "blocks": resident.get("blocks", 0) - passing}
        return DeviceMemory({name: nbytes for name, nbytes in terms.items() if nbytes}, one.when)


def curve_of(sizes: Sizes, trace: Trace, training: Training, *, frees: bool = False) -> Curve:
    """Compute the device memory of a model by moment; ``frees``: updates free gradients in the backward."""
    root, shared, moments, updates, done = len(sizes.params) - 1, training.shards > 1, [], [], list[int]()
    points = len(trace) * 3 // 2 + 1  # gathers, reductions and step()
    behind = min(LASTING_POINTS, points // 8)  # points after step() at which updates may run
    for number, segment in enumerate(trace):
        gathered = sum(sizes.gathered[group] for group in {segment.group, root})
        gradients = sum(sizes.params) if training.micro_batches > 1 else 0  # of the micro-batches before
        updates.append(bool(done) if segment.phase == "backward" else number < behind)
        if segment.phase == "backward":
            if number + 1 < len(trace) and shared:
                gathered += sizes.gathered[trace[number + 1].group]  # prefetched
            gradients = gradients or sum(sizes.params[group] for group in done[-GRADIENTS_BEHIND if frees else 0 :])
            gradients += sizes.gathered[done[-1]] if done else 0  # being reduced
            if segment.group != root:  # the root is reduced at the very end
                done.append(segment.group)
        elif shared:
            gathered += sizes.gathered[segment.group]  # the flat buffer
        terms = {"gathered": gathered, "gradients": gradients, "activations": segment.peak_bytes}
        moments.append(DeviceMemory(terms, f"{segment.phase} of group {segment.group}"))
    last = {*done[-GRADIENTS_BEHIND:], root} if frees else range(root + 1)
    moments.append(DeviceMemory({"gradients": sum(sizes.params[group] for group in last)}, "step"))
    return Curve(tuple(moments), (*updates, True))
